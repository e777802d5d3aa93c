"""tomesd 25: no random number is drawn, repeats are bit-equal, ties are deterministic."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from jumbo_core.tofu import FusionPlan, apply_tofu, fuse, linearity_profile, match


def vit() -> VisionTransformer:
    return VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2, num_classes=5).eval()


@pytest.mark.parametrize("importance", ["similarity", "attention"])
def test_random_state_and_repeats(importance):
    model, image = vit(), torch.randn(2, 3, 32, 32)
    state = torch.get_rng_state()
    apply_tofu(model, FusionPlan.paper(3, 3), importance=importance)
    first = model(image)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model(image), first)


def test_profile_leaves_the_random_state_alone():
    model, images = vit(), torch.randn(4, 3, 32, 32)
    state = torch.get_rng_state()
    first = linearity_profile(model, [images])
    assert torch.equal(torch.get_rng_state(), state)
    assert linearity_profile(model, [images]) == first
    assert linearity_profile(model, [images], seed=1) != first


def test_ties_go_to_the_lower_position():
    keys = torch.ones(2, 9, 4)
    matching = match(keys, 3, protected=1)
    assert matching.sources.tolist() == [[2, 4, 6]] * 2
    assert matching.destinations.tolist() == [[1, 1, 1]] * 2
    importance = torch.zeros(2, 9)
    assert match(keys, 3, protected=1, importance=importance).sources.tolist() == [[2, 4, 6]] * 2


@pytest.mark.parametrize("op", ["prune", "average", "mlerp"])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_tokens_equal(op, value):
    tokens = torch.full((2, 9, 4), value)
    matching = match(tokens, 4, protected=1)
    out, _ = fuse(tokens, matching, op)
    torch.testing.assert_close(out, torch.full((2, 5, 4), value), atol=1e-6, rtol=0)
    model = vit()
    with torch.no_grad():
        model.pos_embed.zero_()
    apply_tofu(model, FusionPlan.uniform(3, 4, op))
    assert model(torch.full((1, 3, 32, 32), value)).isfinite().all()
