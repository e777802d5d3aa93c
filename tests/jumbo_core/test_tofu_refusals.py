"""apply_tofu: options, models, masks and questions that are refused."""

import pytest
import timm
import torch
from torch import nn

from jumbo_core.tofu import FusionPlan, apply_tofu
from tests.jumbo_core.fused_models import PLAN, jumbo_vit, timm_vit


@pytest.mark.parametrize(
    "options, message",
    [
        ({"plan": FusionPlan.paper(4, 1)}, "the plan is for 4 blocks, the model has 3"),
        ({"plan": FusionPlan.paper(3, 9)}, "block 0 is to remove 9 tokens, but of 16 patches at most 8 can leave"),
        ({"importance": "random"}, "importance must be one of 'similarity', 'attention', got 'random'"),
        ({"norm": "min"}, "norm must be one of 'max', 'mean', 'spherical'"),
        ({"weights": "equal"}, "weights must be None or one of 'size', 'importance', got 'equal'"),
        ({"order": "x"}, "order must be one of 'position', 'released'"),
        ({"proportional": 1}, "proportional must be True or False, got 1"),
    ],
)
def test_bad_options(options, message):
    model = timm_vit()
    with pytest.raises(ValueError, match=message):
        apply_tofu(model, **{"plan": PLAN, **options})
    assert "forward" not in model.blocks[0].__dict__


def test_a_smaller_image_that_cannot_meet_r():
    model = jumbo_vit()
    apply_tofu(model, FusionPlan.uniform(3, 5, "prune"))
    with pytest.raises(ValueError, match="block 0 is to remove 5 tokens, but of 8 patches at most 4"):
        model(torch.randn(1, 3, 16, 32))


UNSUPPORTED = [
    nn.Linear(2, 2),
    nn.Sequential(),
    timm.create_model("test_resnet"),
]


@pytest.mark.parametrize("bad", UNSUPPORTED, ids=lambda m: type(m).__name__)
def test_unsupported(bad):
    with pytest.raises(TypeError, match=f"token fusion does not know {type(bad).__name__}.*; supported: "):
        apply_tofu(bad, FusionPlan.paper(2, 1))


def test_a_plan_is_a_plan():
    with pytest.raises(TypeError, match="plan must be a FusionPlan, got dict"):
        apply_tofu(timm_vit(), {})


def test_masks_are_refused(image):
    model = timm_vit()
    apply_tofu(model, PLAN)
    with pytest.raises(ValueError, match="takes no attention mask"):
        model(image, attn_mask=torch.ones(17, 17, dtype=torch.bool))
    model = jumbo_vit()
    apply_tofu(model, PLAN)
    with pytest.raises(ValueError, match="takes no padding mask"):
        model(image, mask=torch.ones(2, 16, dtype=torch.bool))


def test_masks_work_while_nothing_leaves(image):
    model, mask = jumbo_vit(), torch.ones(2, 16, dtype=torch.bool)
    mask[0, 9:] = False
    plain = model(image, mask=mask)
    handle = apply_tofu(model, FusionPlan.paper(3, 0))
    assert torch.equal(model(image, mask=mask), plain)
    handle.remove()
    apply_tofu(model, FusionPlan(("prune",) * 3, (0, 2, 0)))
    with pytest.raises(ValueError, match="takes no padding mask"):
        model(image, mask=mask)


def test_nothing_to_tell_of_a_call_that_stopped_early(image):
    handle = apply_tofu(model := timm_vit(), PLAN)
    with pytest.raises(ValueError, match="did not go through the last block"):
        handle.sizes()
    model(image)
    assert handle.sizes().shape == (2, 8, 1)
    model.forward_intermediates(image, indices=[0], stop_early=True)
    with pytest.raises(ValueError, match="did not go through the last block"):
        handle.place()
