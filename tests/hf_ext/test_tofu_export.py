"""Fused Transformers models as files: ONNX and torch.export of the first output."""

import pytest
import torch

pytest.importorskip("transformers")
from transformers import Dinov2Backbone, ViTForImageClassification, ViTModel

from jumbo_core.tofu import apply_tofu, is_fused
from jumbo_core.tofu.deploy import export_model, load_exported
from tests.conftest import max_error
from tests.hf_ext.fusion import FAMILIES, PLAN


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_a_fused_classifier(ending, tmp_path):
    if ending == "onnx":
        for name in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(name)
    model = FAMILIES["vit"].make(ViTForImageClassification, num_labels=5).train()
    apply_tofu(model, PLAN, proportional=True)
    done = export_model(model, tmp_path / f"model.{ending}", torch.randn(3, 3, 32, 32))
    assert done.error < 1e-4 and done.agreement == 1
    assert is_fused(model) and all(module.training for module in model.modules())
    run, more = load_exported(done.path), torch.randn(4, 3, 32, 32)
    model.eval()
    with torch.no_grad():
        assert max_error(run(more), model(more).logits) < 1e-4


@pytest.mark.slow
def test_an_encoder_gives_its_tokens(tmp_path):
    model, images = FAMILIES["vit"].make(ViTModel), torch.randn(2, 3, 32, 32)
    apply_tofu(model, PLAN)
    done = export_model(model, tmp_path / "model.pt2", images)
    with torch.no_grad():
        assert max_error(load_exported(done.path)(images), model(images).last_hidden_state) < 1e-4


def test_no_tensor_stands_first(tmp_path):
    model = FAMILIES["dinov2"].make(Dinov2Backbone)
    with pytest.raises(TypeError, match="got a BackboneOutput with 'feature_maps' whose first entry is a tuple"):
        export_model(model, tmp_path / "model.pt2", torch.randn(2, 3, 32, 32))
    assert not list(tmp_path.iterdir())
