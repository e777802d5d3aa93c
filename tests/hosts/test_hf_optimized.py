"""Transformers models that were optimised for inference: saved, restored, asked for, refused."""

import copy
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from safetensors.torch import load_file
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    DeiTImageProcessor,
    pipeline,
)

from hf_ext import (
    AdventurerForImageClassification,
    JumboBackbone,
    JumboConfig,
    JumboForImageClassification,
)
from hf_ext import apply_tofu as fuse
from jumbo_core import inference_report, optimize_for_inference
from jumbo_core.tofu import FusionPlan
from tests.hosts.hf_models import config, linear_config, randomised


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32)


@pytest.fixture
def trained() -> JumboForImageClassification:
    return randomised(JumboForImageClassification(config())).eval()


def dtypes(model) -> list[str]:
    return [entry.dtype for entry in inference_report(model)]


@torch.inference_mode()
def logits(model, images) -> torch.Tensor:
    return model(images).logits


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_saved_and_restored(tmp_path, trained, images, dtype):
    fast = optimize_for_inference(copy.deepcopy(trained), dtype=dtype)
    fast.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["optimize"] == dtype
    stored = load_file(tmp_path / "model.safetensors")["jumbo.vit.encoder.jumbo_mlp.fc1.weight"]
    assert stored.dtype == getattr(torch, dtype)
    for cls in (JumboForImageClassification, AutoModelForImageClassification):
        again, info = cls.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        assert dtypes(again) == [dtype] and not again.training
        assert not any(p.requires_grad for p in again.parameters())
        assert torch.equal(logits(again, images), logits(fast, images))
    again.save_pretrained(tmp_path / "twice")
    twice = JumboForImageClassification.from_pretrained(tmp_path / "twice")
    assert torch.equal(logits(twice, images), logits(fast, images))


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_asked_for_while_a_trained_model_is_loaded(tmp_path, trained, images, dtype):
    trained.save_pretrained(tmp_path)
    expected = logits(optimize_for_inference(copy.deepcopy(trained), dtype=dtype), images)
    wanted = AutoConfig.from_pretrained(tmp_path, optimize=dtype)
    for cls, options in (
        (JumboForImageClassification, dict(optimize=dtype)),
        (AutoModelForImageClassification, dict(optimize=dtype)),
        (JumboForImageClassification, dict(config=wanted)),
    ):
        fast = cls.from_pretrained(tmp_path, **options)
        assert dtypes(fast) == [dtype] and fast.config.optimize == dtype
        assert torch.equal(logits(fast, images), expected)
    assert wanted.optimize == dtype  # the caller's own is left alone
    assert dtypes(JumboForImageClassification.from_pretrained(tmp_path)) == []


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("kind", [str, Path])
def test_asked_for_by_a_configuration_elsewhere(tmp_path, trained, images, dtype, kind):
    trained.save_pretrained(tmp_path / "model")
    AutoConfig.from_pretrained(tmp_path / "model", optimize=dtype).save_pretrained(tmp_path / "wanted")
    expected = logits(optimize_for_inference(copy.deepcopy(trained), dtype=dtype), images)
    where = dict(config=kind(tmp_path / "wanted"))
    fast, info = JumboForImageClassification.from_pretrained(tmp_path / "model", **where, output_loading_info=True)
    assert not info["missing_keys"] and dtypes(fast) == [dtype] and fast.config.optimize == dtype
    assert torch.equal(logits(fast, images), expected)
    plain = JumboForImageClassification.from_pretrained(tmp_path / "model", **where, optimize=None)
    assert dtypes(plain) == [] and torch.equal(logits(plain, images), logits(trained, images))
    fast.save_pretrained(tmp_path / "fast")
    with pytest.raises(ValueError, match="rounded"):
        JumboForImageClassification.from_pretrained(tmp_path / "fast", config=kind(tmp_path / "model"))


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_offloaded_models_are_refused(tmp_path, trained, dtype):
    trained.save_pretrained(tmp_path / "model")
    options = dict(device_map={"": "disk"}, offload_folder=str(tmp_path / "offload"))
    with pytest.raises(ValueError, match="without offloading"):
        JumboForImageClassification.from_pretrained(tmp_path / "model", **options, optimize=dtype)


def test_what_was_rounded_does_not_come_back(tmp_path, trained):
    optimize_for_inference(trained).save_pretrained(tmp_path)
    for wanted in (None, "bfloat16"):
        with pytest.raises(ValueError, match="rounded"):
            JumboForImageClassification.from_pretrained(tmp_path, optimize=wanted)


def test_values_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="'int8', 'bfloat16' or None"):
        JumboConfig(optimize="int4")
    with pytest.raises(ValueError, match="multiplier=0"):
        JumboConfig(optimize="int8", multiplier=0)


def test_parts_and_other_families(tmp_path, trained, images):
    fast = optimize_for_inference(copy.deepcopy(trained))
    fast.save_pretrained(tmp_path / "whole")
    encoder = AutoModel.from_pretrained(tmp_path / "whole")
    backbone = JumboBackbone.from_pretrained(tmp_path / "whole")
    assert dtypes(encoder) == dtypes(backbone) == ["int8"]
    with torch.inference_mode():
        assert torch.equal(encoder(images).pooler_output, fast.jumbo(images).pooler_output)
        assert torch.isfinite(backbone(images).feature_maps[0]).all()
    assert isinstance(backbone, type(AutoBackbone.from_config(trained.config)))
    # Optimised inside only: what is saved says so all the same.
    optimize_for_inference(trained.jumbo.vit)
    trained.save_pretrained(tmp_path / "inside")
    assert torch.equal(
        logits(JumboForImageClassification.from_pretrained(tmp_path / "inside"), images), logits(trained, images)
    )
    linear = randomised(AdventurerForImageClassification(linear_config(multiplier=2))).eval()
    optimize_for_inference(linear).save_pretrained(tmp_path / "linear")
    again = AdventurerForImageClassification.from_pretrained(tmp_path / "linear")
    assert dtypes(again) == ["int8"] and torch.equal(logits(again, images), logits(linear, images))


def test_unshared_ffns_and_half_precision(tmp_path, images):
    model = randomised(JumboForImageClassification(config(share_jumbo_ffn=False))).eval()
    fast = optimize_for_inference(copy.deepcopy(model))
    fast.save_pretrained(tmp_path)
    assert torch.equal(logits(JumboForImageClassification.from_pretrained(tmp_path), images), logits(fast, images))
    half = JumboForImageClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.jumbo.vit.encoder.jumbo_mlp[0].fc1.weight.dtype == torch.int8
    found = logits(half, images.bfloat16())
    assert found.dtype == torch.bfloat16 and (found - logits(model, images)).abs().max() < 0.1


def test_fused_and_optimised_together(tmp_path, trained, images):
    fuse(trained, FusionPlan.uniform(3, 2, "mlerp"))
    optimize_for_inference(trained).save_pretrained(tmp_path)
    again = JumboForImageClassification.from_pretrained(tmp_path)
    assert dtypes(again) == ["int8"] and torch.equal(logits(again, images), logits(trained, images))


def test_in_a_pipeline_and_refused_in_training(tmp_path, trained):
    optimize_for_inference(trained).save_pretrained(tmp_path)
    DeiTImageProcessor(size={"height": 32, "width": 32}, do_center_crop=False).save_pretrained(tmp_path)
    classify = pipeline("image-classification", str(tmp_path))
    from PIL import Image

    assert len(classify(Image.new("RGB", (40, 40), "red"), top_k=5)) == 5
    with pytest.raises(RuntimeError, match="training mode"):
        classify.model.train()(torch.randn(2, 3, 32, 32), labels=torch.tensor([0, 1]))
