"""Token fusion in our linear-time Transformers models: as in jumbo_core, dense outputs, saved plans, removal."""

import copy
import json

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoModelForImageClassification

from hf_ext import AdventurerBackbone, AdventurerForImageClassification, AdventurerModel, apply_tofu, remove_tofu
from jumbo_core.models import AdventurerViT
from jumbo_core.tofu import is_fused, linearity_profile, unmerge
from tests.conftest import max_error
from tests.hf_ext.fusion import PLAN
from tests.hosts.hf_models import LINEAR_VARIANTS, linear_config, randomised

variants = pytest.mark.parametrize("variant", LINEAR_VARIANTS)


def make(variant="adventurer", cls=AdventurerForImageClassification, **options):
    return randomised(cls(linear_config(**LINEAR_VARIANTS[variant], **options))).eval()


def core_of(model) -> AdventurerViT:
    core = AdventurerViT(num_classes=model.config.num_labels, **model.config.core_arguments()).eval()
    head = {f"head.{name}": tensor for name, tensor in model.classifier.state_dict().items()}
    core.load_state_dict({**model.adventurer.vit.state_dict(), **head})
    return core


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 32)


@variants
@pytest.mark.parametrize("norm", ["max", "mean"])
def test_against_jumbo_core(variant, norm, images):
    model = make(variant)
    core, plain = core_of(model), model(images).logits
    ours, theirs = (apply_tofu(m, PLAN, norm=norm) for m in (model, core))
    with torch.no_grad():
        logits = model(images).logits
        assert torch.equal(logits, core(images)) and max_error(logits, plain) > 1e-3
        assert torch.equal(ours.sources(), theirs.sources()) and torch.equal(ours.sizes(), theirs.sizes())
        assert torch.equal(model.adventurer(images).last_hidden_state, core.forward_features(images))
        assert torch.equal(model(images[..., :16]).logits, core(images[..., :16]))
    assert ours.report() == theirs.report() and ours.report().saved > 0


@variants
def test_hidden_states_hold_every_position(variant, images):
    model = make(variant)
    count, core = model.config.multiplier or 1, core_of(model)
    with torch.no_grad():
        plain = model(images, output_hidden_states=True).hidden_states
        handle = apply_tofu(model, PLAN)
        apply_tofu(core, PLAN)
        short = model.adventurer(images).last_hidden_state
        assert short.shape == (2, 16 - 9 + count, 16)
        states = model(images, output_hidden_states=True).hidden_states
        assert [state.shape for state in states] == [(2, 16 + count, 16)] * 4
        assert torch.equal(states[0], plain[0])
        normed = model.adventurer.vit.norm(states[3])
        assert max_error(normed, unmerge(short, handle.place())) < 1e-5
        maps = core.forward_intermediates(images, output_fmt="NLC", intermediates_only=True)
        assert all(max_error(state[:, :16], m) < 1e-6 for state, m in zip(states[1:], maps, strict=True))
        kept = [state[0].unique(dim=0).shape[0] - count for state in states]
        assert kept == [16, 13, 11, 7]
        # Told by the trunk, the model works on fewer tokens again.
        assert torch.equal(model.adventurer(images).last_hidden_state, short)


def test_feature_maps(images):
    stages = ["stem", "stage1", "stage3"]
    model = make("jumbo-linear", AdventurerBackbone, out_features=stages)
    core = AdventurerViT(num_classes=0, **model.config.core_arguments()).eval()
    core.load_state_dict(model.adventurer.vit.state_dict())
    with torch.no_grad():
        plain = model(images).feature_maps
        apply_tofu(model, PLAN)
        apply_tofu(core, PLAN)
        maps = model(images).feature_maps
        expected = core.forward_intermediates(images, indices=[0, 2], norm=True, intermediates_only=True)
        assert [m.shape for m in maps] == [(2, 16, 4, 4)] * 3 and torch.equal(maps[0], plain[0])
        assert all(max_error(a, b) < 1e-5 for a, b in zip(maps[1:], expected, strict=True))
        remove_tofu(model)
        assert all(torch.equal(a, b) for a, b in zip(model(images).feature_maps, plain, strict=True))


@variants
def test_saved_and_removed(variant, images, tmp_path):
    model = make(variant)
    plain, state = model(images).logits, copy.deepcopy(model.state_dict())
    handle = apply_tofu(model, PLAN, norm="mean")
    fused = model(images).logits
    assert model.state_dict().keys() == state.keys()
    model.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())["tofu"]
    assert (record["ops"], record["counts"], record["norm"]) == (list(PLAN.ops), list(PLAN.counts), "mean")
    for cls in (AdventurerForImageClassification, AutoModelForImageClassification):
        loaded = cls.from_pretrained(tmp_path)
        assert is_fused(loaded) and torch.equal(loaded(images).logits, fused)
        assert torch.equal(cls.from_pretrained(tmp_path, tofu=None)(images).logits, plain)
    assert is_fused(AdventurerModel.from_pretrained(tmp_path))
    assert handle.remove() is model and torch.equal(model(images).logits, plain)
    model.save_pretrained(tmp_path / "plain")
    assert not is_fused(AdventurerForImageClassification.from_pretrained(tmp_path / "plain"))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training(checkpointing, images):
    model = make("jumbo-linear")
    core = core_of(model)
    for m in (model, core):
        apply_tofu(m, PLAN)
    core(images).square().sum().backward()
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    model(images).logits.square().sum().backward()
    expected = dict(core.named_parameters())
    for name, parameter in model.adventurer.vit.named_parameters():
        assert max_error(parameter.grad, expected[name].grad) < 1e-4 * max(1, expected[name].grad.abs().max()), name


def test_profile(images):
    model = make()
    assert linearity_profile(model, [images]) == linearity_profile(core_of(model), [images])


def test_refusals(images):
    model = make()
    with pytest.raises(ValueError, match="a linear-time mixer has none"):
        apply_tofu(model, PLAN, proportional=True)
    assert not is_fused(model)
    apply_tofu(model, PLAN)
    with pytest.raises(ValueError, match="a fused model takes no padding mask"):
        model(images, pixel_mask=torch.ones(2, 32, 32))
