"""ToMe 5: fusion with nothing to do changes nothing."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from jumbo_core.models import JumboViT
from jumbo_core.tofu import FusionPlan, apply_tofu
from tests.conftest import max_error

OPTIONS = [
    {},
    {"init_values": 0.1},
    {"qk_norm": True},
    {"reg_tokens": 3},
    {"class_token": False, "global_pool": "avg"},
    {"init_values": 0.1, "qk_norm": True, "reg_tokens": 3},
]


@pytest.mark.parametrize("proportional", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_timm(options, proportional):
    model = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2, num_classes=5, **options
    ).eval()
    image = torch.randn(2, 3, 32, 32)
    expected = model(image)
    handle = apply_tofu(model, FusionPlan.paper(3, 0), proportional=proportional)
    assert max_error(model(image), expected) < 1e-6
    assert handle.report().tokens == [16, 16, 16]
    assert torch.equal(handle.sizes(), torch.ones(2, 16 + model.num_prefix_tokens, 1))
    handle.remove()
    apply_tofu(model, FusionPlan.paper(3, 2), proportional=proportional)
    assert max_error(model(image), expected) > 1e-4  # and something to do does change it


@pytest.mark.parametrize(
    "options", [{"multiplier": 3}, {"multiplier": 0, "registers": 2}, {"layer_scale": 0.1}], ids=str
)
def test_jumbo(options):
    model = JumboViT(32, 8, num_classes=5, embed_dim=32, depth=3, num_heads=2, init="short", **options).eval()
    image = torch.randn(2, 3, 32, 32)
    expected = model(image)
    apply_tofu(model, FusionPlan.paper(3, 0))
    assert max_error(model(image), expected) < 1e-6
