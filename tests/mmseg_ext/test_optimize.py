"""The backbones' option ``optimize``: checkpoints of either form, the host's loaders, training."""

import copy

import pytest
import torch

pytest.importorskip("mmseg", reason="needs the extra mmseg-lite")

from mmengine.runner import load_checkpoint, save_checkpoint
from mmseg.registry import MODELS
from safetensors.torch import save_file

from jumbo_core import inference_report, optimize_for_inference
from tests.mmseg_ext.helpers import tiny


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 32, 48)


@pytest.fixture
def trained():
    backbone = tiny(out_indices=(1, 2)).eval()
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return backbone


def maps(backbone, images) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat(backbone.eval()(images))


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_checkpoints_of_either_form_load(tmp_path, trained, images, dtype):
    fast = optimize_for_inference(copy.deepcopy(trained), dtype=dtype)
    expected = maps(fast, images)
    assert 0 < (expected - maps(trained, images)).norm() / expected.norm() < 0.05
    for source in (trained, fast):
        save_checkpoint({"state_dict": source.state_dict(), "meta": {}}, str(tmp_path / "model.pth"))
        built = tiny(out_indices=(1, 2), optimize=dtype)
        load_checkpoint(built, str(tmp_path / "model.pth"), strict=True)
        assert torch.equal(maps(built, images), expected)


@pytest.mark.parametrize("share", [True, False])
def test_pretrained_init_cfg_of_either_form(tmp_path, images, share):
    trained = tiny(share_jumbo_ffn=share).eval()
    fast = optimize_for_inference(copy.deepcopy(trained))
    for i, source in enumerate((trained, fast)):
        path = tmp_path / f"{i}.safetensors"
        save_file({name: value.contiguous() for name, value in source.vit.state_dict().items()}, path)
        init_cfg = dict(type="Pretrained", checkpoint=str(path))
        built = tiny(share_jumbo_ffn=share, optimize="int8", init_cfg=init_cfg)
        built.init_weights()
        assert torch.equal(maps(built, images), maps(fast, images))


def test_an_int8_checkpoint_is_refused_by_a_backbone_as_trained(tmp_path, trained):
    fast = optimize_for_inference(copy.deepcopy(trained))
    save_file({name: value.contiguous() for name, value in fast.vit.state_dict().items()}, tmp_path / "a.safetensors")
    built = tiny(init_cfg=dict(type="Pretrained", checkpoint=str(tmp_path / "a.safetensors")))
    with pytest.raises(ValueError, match="optimize_for_inference"):
        built.init_weights()


def test_with_token_fusion_and_the_linear_backbone(images):
    plan = dict(preset="uniform", r=2, op="mlerp")
    both = tiny(optimize="int8", tofu=dict(plan=dict(plan)))
    assert both.fusion is not None and torch.isfinite(maps(both, images)).all()
    linear = MODELS.build(
        dict(
            type="mmseg.AdventurerViT", arch="jumbo_tiny", embed_dims=16, num_layers=2, multiplier=2, d_state=8,
            head_dim=8, img_size=32, patch_size=8, optimize="int8",
        )
    )  # fmt: skip
    assert len(inference_report(linear)) == 1 and torch.isfinite(maps(linear, images)).all()


def test_training_and_useless_options_are_refused(images):
    with pytest.raises(RuntimeError, match="training mode"):
        tiny(optimize="int8").train()(images)
    with pytest.raises(TypeError, match="no Jumbo FFN"):
        tiny(optimize="int8", multiplier=0)
    with pytest.raises(ValueError, match="'int8', 'bfloat16'"):
        tiny(optimize="int4")
