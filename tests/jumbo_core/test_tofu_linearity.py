"""Linearity profile: what it measures, that it leaves no trace, JSON, plot, refusals."""

import copy

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from jumbo_core.models import JumboViT
from jumbo_core.tofu import FusionPlan, LinearityProfile, apply_tofu, linearity_profile
from tests.conftest import max_error


def vit(**options) -> VisionTransformer:
    return VisionTransformer(
        img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=5, reg_tokens=2, **options
    ).eval()


class Bend(nn.Module):
    """|x|: a path that crosses zero comes back."""

    def forward(self, x):
        return x.abs()


def test_a_linear_mlp_is_1_and_a_bent_one_is_not():
    model = vit()
    model.blocks[0].mlp = nn.Linear(16, 16)
    model.blocks[1].mlp = Bend()
    model.blocks[2].mlp = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    first, bent, last = linearity_profile(model, [torch.randn(4, 3, 32, 32)]).linearity
    assert first == pytest.approx(1, abs=1e-5) and last == pytest.approx(1, abs=1e-5)
    assert bent < 0.95


def test_a_constant_mlp_counts_as_straight():
    model = vit()
    with torch.no_grad():
        for parameter in model.blocks[1].mlp.parameters():
            parameter.zero_()
    assert linearity_profile(model, [torch.randn(4, 3, 32, 32)]).linearity[1] == 1.0


def test_by_hand_in_one_dimension():
    """|x| from -1 to 2 in 3 steps: 1, 0, 1, 2; chord 1, path 3."""
    from jumbo_core.tofu.linearity import _straightness

    assert _straightness(Bend(), torch.tensor([[-1.0]]), torch.tensor([[2.0]]), 3) == pytest.approx(1 / 3)


def test_importance_is_gradient_times_activation_of_the_patches():
    model, images, labels = vit(), torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])
    profile = linearity_profile(model, [(images, labels)])
    x = model._pos_embed(model.patch_embed(images))
    states = []
    for block in model.blocks:
        x = x + block.attn(block.norm1(x))
        states.append(x)
        x = x + block.mlp(block.norm2(x))
    loss = nn.functional.cross_entropy(model.forward_head(model.norm(x)), labels, reduction="sum")
    expected = [
        (state * gradient).abs().sum(-1)[:, 3:].mean()  # behind the class token and 2 registers
        for state, gradient in zip(states, torch.autograd.grad(loss, states), strict=True)
    ]
    expected = torch.stack(expected) / torch.stack(expected).mean()
    assert max_error(torch.tensor(profile.importance), expected.detach()) < 1e-5
    assert profile.num_patches == 16
    assert linearity_profile(model, [images]).importance != profile.importance


@pytest.mark.parametrize("options", [{"multiplier": 3, "registers": 2}, {"multiplier": 0, "registers": 1}])
def test_jumbo(options):
    model = JumboViT(32, 8, num_classes=5, embed_dim=16, depth=3, num_heads=2, init="short", **options)
    profile = linearity_profile(model, [torch.randn(3, 3, 32, 32)] * 2)
    assert len(profile.linearity) == 3 and profile.num_patches == 16
    plan = FusionPlan.from_profile(profile)
    apply_tofu(model, plan)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)


def test_the_model_is_left_as_it_was():
    model = vit()
    model.train()
    model.blocks[1].eval()
    model.requires_grad_(False)
    modes = [m.training for m in model.modules()]
    linearity_profile(model, [torch.randn(2, 3, 32, 32)])
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    with pytest.raises(AssertionError):  # timm's, of an image size: hooks and modes are put back all the same
        linearity_profile(model, [torch.randn(2, 3, 8, 8)])
    assert [m.training for m in model.modules()] == modes
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_works_without_gradients_around():
    images = torch.randn(2, 3, 32, 32)
    model = vit()
    with torch.no_grad():
        inside = linearity_profile(model, [images])
    assert inside == linearity_profile(model, [images])


def test_batches_are_averaged():
    model, a, b = vit(), torch.randn(2, 3, 32, 32), torch.randn(2, 3, 32, 32)
    both = linearity_profile(model, [a, b])
    assert both != linearity_profile(model, [a]) and both == linearity_profile(model, iter([a, b]))


@pytest.mark.parametrize("read", ["text", "path", "string path"])
def test_json_round_trip(tmp_path, read):
    profile, path = LinearityProfile((0.25, 1.0), (0.5, 1.5), 16), tmp_path / "profile.json"
    text = profile.to_json(path)
    assert LinearityProfile.from_json({"text": text, "path": path, "string path": str(path)}[read]) == profile
    with pytest.raises(ValueError, match="a LinearityProfile is an object with the keys"):
        LinearityProfile.from_json('{"linearity": [1.0]}')


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path = LinearityProfile((0.25, 1.0), (0.5, 1.5), 16).plot(tmp_path / "new" / "profile.png")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


@pytest.mark.parametrize(
    "linearity, importance, patches, message",
    [
        ((0.5,), (1.0, 1.0), 4, "got 1 and 2"),
        ((), (), 4, "got 0 and 0"),
        ((0.0,), (1.0,), 4, r"linearity must lie in \(0, 1\]"),
        ((float("nan"),), (1.0,), 4, r"linearity must lie in \(0, 1\]"),
        ((0.5,), (-1.0,), 4, "importance must be finite and not negative"),
        ((0.5,), (float("inf"),), 4, "importance must be finite and not negative"),
        ((0.5,), (1.0,), 0, "num_patches must be an integer of at least 1, got 0"),
    ],
)
def test_bad_profiles(linearity, importance, patches, message):
    with pytest.raises(ValueError, match=message):
        LinearityProfile(linearity, importance, patches)


def test_refusals():
    model, images = vit(), torch.randn(2, 3, 32, 32)
    with pytest.raises(ValueError, match="no calibration batch was given"):
        linearity_profile(model, [])
    with pytest.raises(ValueError, match="at least 2 samples"):
        linearity_profile(model, [images[:1]])
    with pytest.raises(ValueError, match="steps must be an integer of at least 2, got 1"):
        linearity_profile(model, [images], steps=1)
    with pytest.raises(TypeError, match="token fusion does not know Linear"):
        linearity_profile(nn.Linear(2, 2), [images])
    jumbo = JumboViT(32, 8, num_classes=5, embed_dim=16, depth=2, num_heads=2)
    with pytest.raises(ValueError, match="16 patches, then 8"):
        linearity_profile(jumbo, [images, images[..., :16]])
    apply_tofu(model, FusionPlan.paper(3, 1))
    with pytest.raises(ValueError, match="before it is fused"):
        linearity_profile(model, [images])


@pytest.mark.parametrize("made_inside", [False, True], ids=["outside", "inside"])
def test_under_inference_mode(made_inside):
    model, images, labels = vit(), torch.randn(2, 3, 32, 32), torch.tensor([0, 3])
    expected = linearity_profile(model, [(images, labels)])
    with torch.inference_mode():
        batch = (images.clone(), labels.clone()) if made_inside else (images, labels)
        assert batch[0].is_inference() == made_inside
        assert linearity_profile(model, [batch]) == expected
        assert torch.is_inference_mode_enabled()
        born = vit()
        with pytest.raises(ValueError, match=r"was made under torch\.inference_mode\(\): make or load it outside, or"):
            linearity_profile(born, [images])
    assert len(linearity_profile(copy.deepcopy(born), [images]).linearity) == 3  # the remedy named


def test_a_model_that_gives_no_tensor():
    model = vit()
    model.forward = lambda x: {"logits": VisionTransformer.forward(model, x)}
    with pytest.raises(TypeError, match="got a dict with 'logits'"):
        linearity_profile(model, [torch.randn(2, 3, 32, 32)])
