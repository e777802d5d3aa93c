"""ToMe 42, 34; tomesd 2: other entry points, each first and twice; copies, pickles, removal; nothing to wrap."""

import copy
import pickle

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

from jumbo_core.models import JumboViT
from jumbo_core.tofu import FusionPlan, apply_tofu, is_fused, remove_tofu

PLAN = FusionPlan(("prune", "average", "mlerp"), (3, 2, 4))
IMAGE_SIZE = (32, 48)  # 4 x 6 patches


def timm_vit() -> VisionTransformer:
    return VisionTransformer(
        img_size=IMAGE_SIZE, patch_size=8, embed_dim=32, depth=3, num_heads=2, num_classes=5, reg_tokens=2
    )


def jumbo_vit() -> JumboViT:
    return JumboViT(IMAGE_SIZE, 8, num_classes=5, embed_dim=32, depth=3, num_heads=2, multiplier=3, registers=2)


@pytest.fixture(params=[timm_vit, jumbo_vit])
def model(request):
    model = request.param().eval()
    with torch.no_grad():  # a released Jumbo head is zero: nothing could go wrong in it
        model.head.weight.normal_()
    return model


@pytest.fixture
def image() -> torch.Tensor:
    return torch.randn(2, 3, *IMAGE_SIZE)


CALLS = {
    "forward": lambda model, image: [model(image)],
    "forward_features": lambda model, image: [model.forward_features(image)],
    "forward_intermediates": lambda model, image: model.forward_intermediates(image)[1],
    "maps and prefix": lambda model, image: [
        part for pair in model.forward_intermediates(image, return_prefix_tokens=True, norm=True)[1] for part in pair
    ],
    "some maps": lambda model, image: model.forward_intermediates(image, indices=[1], intermediates_only=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_call_first_and_twice(model, image, name):
    call = CALLS[name]
    plain = call(model, image)
    handle = apply_tofu(model, PLAN)
    first, second = call(model, image), call(model, image)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(first, plain, strict=True))
    handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(call(model, image), plain, strict=True))


def test_maps_cover_the_grid_and_agree_with_the_tokens(model, image):
    handle = apply_tofu(model, PLAN)
    prefix = model.num_prefix_tokens
    tokens = model.forward_features(image)
    assert tokens.shape == (2, prefix + 24 - 9, 32)
    maps = model.forward_intermediates(image, norm=True, intermediates_only=True)
    assert [m.shape for m in maps] == [(2, 32, 4, 6)] * 3
    # Every position holds, bit by bit, the vector of the group it belongs to.
    expected = tokens[torch.arange(2)[:, None], handle.place()][:, prefix:]
    assert torch.equal(maps[-1].flatten(2).transpose(1, 2), expected)
    assert [len(m[0].flatten(1).unique(dim=1).T) for m in maps] == [21, 19, 15]


def test_calls_do_not_disturb_each_other(model, image):
    apply_tofu(model, PLAN)
    logits = model(image)
    model.forward_intermediates(image)
    model.forward_intermediates(image, indices=[0], stop_early=True)
    assert torch.equal(model(image), logits)
    if isinstance(model, JumboViT):  # takes any size
        assert model(image[:1, :, :, :40]).shape == (1, 5)
        assert torch.equal(model(image), logits)


def test_a_failed_call_leaves_nothing_behind(model, image):
    apply_tofu(model, PLAN)
    logits = model(image)
    with pytest.raises((AssertionError, ValueError)):
        model.forward_intermediates(image, output_fmt="nonsense")
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        model(image[:, :2])
    assert torch.equal(model(image), logits)


def test_copies_and_pickles_are_fused_and_stand_alone(model, image):
    plain = model(image)
    names = list(model.state_dict())
    handle = apply_tofu(model, PLAN, proportional=True)
    assert list(model.state_dict()) == names
    fused = model(image)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in copies:
        assert is_fused(other)
        assert torch.equal(other(image), fused)
        with torch.no_grad():
            next(other.blocks[0].mlp.parameters()).add_(1.0)
        assert not torch.equal(other(image), fused)  # its own weights, not the original's
        assert torch.equal(model(image), fused)
    handle.remove()
    assert not is_fused(model) and torch.equal(model(image), plain)
    for other in copies:
        assert is_fused(other)
        remove_tofu(other)
        assert not is_fused(other)


def test_a_pickle_does_not_carry_the_latest_call(model, image):
    apply_tofu(model, PLAN, importance="attention")
    size = len(pickle.dumps(model))
    model(image)
    assert len(pickle.dumps(model)) == size


def test_removal_leaves_no_trace(model, image):
    def traces(module):
        return [(sorted(m.__dict__), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in module.modules()]

    before = traces(model)
    handle = apply_tofu(model, PLAN, importance="attention")
    assert traces(model) != before
    assert handle.remove() is model
    assert traces(model) == before
    with pytest.raises(ValueError, match="there is no token fusion in this"):
        handle.remove()


def test_twice_is_refused(model):
    apply_tofu(model, PLAN)
    with pytest.raises(ValueError, match="fused already"):
        apply_tofu(model, PLAN)


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny_patch4_window7_224", "beit_base_patch16_224"])
def test_nothing_to_wrap_is_an_error(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(TypeError, match=r"token fusion does not know \w+.*supported: .*timm VisionTransformer .*Jumbo"):
        apply_tofu(model, FusionPlan.paper(12, 2))


def test_another_block_is_an_error():
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", block_fn=timm.models.vision_transformer.ParallelScalingBlock)
    with pytest.raises(TypeError, match="VisionTransformer made of ParallelScalingBlock"):
        apply_tofu(model, FusionPlan.paper(12, 2))
