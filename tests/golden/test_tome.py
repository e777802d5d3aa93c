"""The released ToMe's logits, sources and sizes, by matching and average alone and through apply_tofu."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from jumbo_core.tofu import FusionPlan, apply_tofu, compose, fuse, match, source_map
from tests.conftest import Golden, max_error


@pytest.fixture(scope="module")
def tome(shared) -> Golden:
    return Golden(shared / "golden" / "tome_vit.safetensors")


@pytest.fixture
def model(tome) -> VisionTransformer:
    model = VisionTransformer(**tome.arguments, num_classes=9).eval()
    model.load_state_dict(tome.weights)
    return model


@pytest.mark.parametrize("proportional", [False, True])
@pytest.mark.parametrize("r", [0, 2, 4])
def test_fused_model(model, tome, r, proportional):
    handle = apply_tofu(model, FusionPlan.uniform(4, r, "average"), proportional=proportional, order="released")
    with torch.no_grad():
        logits = model(tome["input"])
    name = f"prop{int(proportional)}.r{r}"
    assert max_error(logits, tome[f"logits.{name}"]) < 1e-5
    if r:
        # Not only up to order: "released" is the order of the released code.
        assert torch.equal(handle.sources().float(), tome[f"source.{name}"])
        assert torch.equal(handle.sizes(), tome[f"size.{name}"])


def test_plain(model, tome):
    with torch.no_grad():
        assert max_error(model(tome["input"]), tome["logits.plain"]) < 1e-5


@torch.no_grad()
def test_operators_by_hand(model, tome):
    """The same without hosts: the block is written out here, so that two errors cannot hide each other."""
    x, sizes, place = model._pos_embed(model.patch_embed(tome["input"])), None, None
    for block in model.blocks:
        attn, normed = block.attn, block.norm1(x)
        q, k, v = attn.qkv(normed).unflatten(-1, (3, 4, 12)).permute(2, 0, 3, 1, 4)  # 3 x (B, H, T, d)
        scores = q @ k.transpose(-2, -1) * attn.scale
        if sizes is not None:
            scores = scores + sizes.log().transpose(1, 2)[:, None]
        x = x + attn.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        matching = match(k, 4, protected=1, order="released")
        x, sizes = fuse(x, matching, "average", sizes=sizes)
        place = compose(place, matching)
        x = x + block.mlp(block.norm2(x))
    assert max_error(model.forward_head(model.norm(x)), tome["logits.prop1.r4"]) < 1e-5
    assert torch.equal(sizes, tome["size.prop1.r4"])
    assert torch.equal(source_map(place, x.shape[1]).float(), tome["source.prop1.r4"])


def test_the_order_decides_who_meets_whom_next(model, tome):
    """With the original order kept, later blocks pair other tokens: released numbers need order="released"."""
    apply_tofu(model, FusionPlan.uniform(4, 4, "average"))
    with torch.no_grad():
        assert max_error(model(tome["input"]), tome["logits.prop0.r4"]) > 1e-2
