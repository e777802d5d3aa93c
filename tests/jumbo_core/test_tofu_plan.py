"""Plans: presets, budgets, caps, multiply-adds, JSON."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from jumbo_core.tofu import FusionPlan, LinearityProfile, apply_tofu


def test_presets():
    assert FusionPlan.paper(12, 8) == FusionPlan(["prune"] * 6 + ["mlerp"] * 6, [8] * 12)
    assert FusionPlan.paper(3, 1).ops == ("prune", "mlerp", "mlerp")
    assert FusionPlan.uniform(2, 5, "average") == FusionPlan(("average", "average"), (5, 5))
    assert hash(FusionPlan.paper(4, 1)) == hash(FusionPlan.paper(4, 1)) and FusionPlan.paper(4, 1) != FusionPlan.paper(
        4, 2
    )
    with pytest.raises(AttributeError):
        FusionPlan.paper(4, 1).counts = (0,) * 4


def test_tokens_after():
    assert FusionPlan.paper(12, 8).tokens_after(196) == [188 - 8 * i for i in range(12)]
    assert FusionPlan(("prune", "mlerp"), (0, 98)).tokens_after(196) == [196, 98]


def test_a_constant_r_is_capped_where_patches_run_out():
    plan = FusionPlan.uniform(6, 8, "average")
    assert plan.tokens_after(25) == [17, 9, 5, 3, 2, 1]
    removed, clamps = plan.resolve(25)
    assert removed == [8, 8, 4, 2, 1, 1]
    assert clamps == [(2, 8, 4), (3, 8, 2), (4, 8, 1), (5, 8, 1)]
    assert (clamps[0].block, clamps[0].asked, clamps[0].possible) == (2, 8, 4)


@pytest.mark.parametrize("counts, block, asked", [((13, 13), 0, 13), ((0, 30), 1, 30)])
def test_what_no_block_could_meet_is_an_error(counts, block, asked):
    plan = FusionPlan(("prune", "prune"), counts)
    with pytest.raises(ValueError, match=f"block {block} is to remove {asked} tokens, but of 25 patches at most 12"):
        plan.tokens_after(25)


@pytest.mark.parametrize(
    "ops, counts, message",
    [
        (("merge",), (1,), "ops must be among 'prune', 'average', 'mlerp', got 'merge'"),
        (("prune",), (1, 2), "one operator and one count per block"),
        ((), (), "one operator and one count per block"),
        ("prune", (1,) * 5, "one operator and one count per block"),
        (("prune", "prune"), (1, -1), r"counts\[1\] must be an integer of at least 0, got -1"),
        (("prune",), (float("nan"),), r"counts\[0\] must be an integer of at least 0, got nan"),
        (("prune",), (1.5,), r"counts\[0\] must be an integer"),
    ],
)
def test_bad_plans(ops, counts, message):
    with pytest.raises(ValueError, match=message):
        FusionPlan(ops, counts)


def profile(linearity, importance=None, num_patches=196) -> LinearityProfile:
    return LinearityProfile(linearity, importance or (1.0,) * len(linearity), num_patches)


def test_adaptive_operators():
    plan = FusionPlan.from_profile(profile((0.9, 0.2, 0.8, 0.5, 0.3)))
    assert plan.ops == ("mlerp", "prune", "mlerp", "mlerp", "prune")
    assert FusionPlan.from_profile(profile((0.5,) * 4)).ops == ("prune", "prune", "mlerp", "mlerp")


@pytest.mark.parametrize("reduction", [0.0, 0.1, 0.35, 0.6, 0.8])
@pytest.mark.parametrize("importance", [(1.0,) * 12, tuple(range(1, 13)), tuple(range(12, 0, -1)), (0.0,) * 12])
def test_adaptive_budget_is_met_and_not_exceeded(reduction, importance):
    plan = FusionPlan.from_profile(profile((0.5,) * 12, importance), reduction)
    after = plan.tokens_after(196)
    saved, goal = sum(196 - n for n in after), reduction * 196 * 12
    assert goal <= saved < goal + 12  # a token that leaves in the first block saves 12 token-layers
    assert plan.resolve(196)[1] == []


def test_adaptive_counts_follow_importance():
    plan = FusionPlan.from_profile(profile((0.5,) * 4, (1.0, 2.0, 4.0, 1.0)), 0.3)
    first, second, third, last = plan.counts
    assert first == pytest.approx(2 * second, abs=2) and second == pytest.approx(2 * third, abs=2)
    assert last == pytest.approx(first, abs=2)
    # A block on which nothing depends takes what it can, half; it is not divided by zero.
    assert FusionPlan.from_profile(profile((0.5,) * 4, (1.0, 0.0, 1.0, 1.0)), 0.3).counts[1] >= 78


def test_adaptive_for_another_number_of_patches():
    plan = FusionPlan.from_profile(profile((0.5,) * 4), 0.25, tokens=64)
    assert 64 <= sum(64 - n for n in plan.tokens_after(64)) < 68


def test_a_reduction_out_of_reach():
    with pytest.raises(ValueError, match=r"reduction=0.9 is out of reach: halving in every block saves 0\.6"):
        FusionPlan.from_profile(profile((0.5,) * 2, num_patches=16), 0.9)
    for bad in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"reduction must lie in \[0, 1\)"):
            FusionPlan.from_profile(profile((0.5,) * 2), bad)


@pytest.mark.parametrize("read", ["text", "path", "string path"])
def test_json_round_trip(tmp_path, read):
    plan, path = FusionPlan(("prune", "mlerp", "average"), (3, 0, 2)), tmp_path / "plan.json"
    text = plan.to_json(path)
    assert FusionPlan.from_json({"text": text, "path": path, "string path": str(path)}[read]) == plan
    assert text == '{"ops": ["prune", "mlerp", "average"], "counts": [3, 0, 2]}'


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"ops": ["prune"]}', r"FusionPlan is an object with the keys \['counts', 'ops'\], got \['ops'\]"),
        ('{"ops": ["prune"], "counts": [1], "extra": 1}', "got \\['counts', 'extra', 'ops'\\]"),
        ('{"ops": "prune", "counts": [1]}', "ops must be a list"),
        ('{"ops": ["prune"], "counts": [1.5]}', "must be an integer"),
        ("{", "the text of a FusionPlan is no JSON: Expecting property name"),
    ],
)
def test_bad_json(text, message):
    with pytest.raises(ValueError, match=message):
        FusionPlan.from_json(text)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"\xff\xd8\xff\xe0 a photo", r"plan\.jpg is no JSON: 'utf-8' codec .* A FusionPlan is read from"),
        (b"not this either", r"plan\.jpg is no JSON: Expecting value"),
        (b"[1]", r"plan\.jpg: the JSON of a FusionPlan is an object with the keys .*, got list"),
    ],
)
def test_a_file_that_is_no_plan_is_named(content, message, tmp_path):
    (tmp_path / "plan.jpg").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        FusionPlan.from_json(tmp_path / "plan.jpg")


PLANS = [
    FusionPlan.uniform(4, 0, "prune"),
    FusionPlan.paper(4, 3),
    FusionPlan.uniform(4, 8, "average"),  # is capped
    FusionPlan(("mlerp", "prune", "mlerp", "average"), (0, 5, 0, 1)),
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("registers", [0, 2])
def test_multiply_adds_equal_the_counter(plan, registers):
    model = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=2, num_classes=5, mlp_ratio=3, reg_tokens=registers
    ).eval()
    apply_tofu(model, plan)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, 32, 32))
    blocks = plan.multiply_adds(16, 32, prefix=1 + registers, mlp_ratio=3, key_dim=16)
    assert blocks + 16 * 192 * 32 + 32 * 5 == counter.get_total_flops() // 2
    assert plan.multiply_adds(16, 32, prefix=1 + registers, mlp_ratio=3) <= blocks


def test_multiply_adds_by_hand():
    # D=8, 4 patches, 1 class token; one token leaves: T = 5, T' = 4; h = 32.
    assert FusionPlan(("prune",), (1,)).multiply_adds(4, 8) == 4 * 5 * 64 + 2 * 25 * 8 + 2 * 4 * 8 * 32
    assert FusionPlan(("prune",), (1,)).multiply_adds(4, 8, key_dim=4) == 1280 + 400 + 2048 + 2 * 2 * 4


@pytest.mark.parametrize("r, gmac", [(0, 17.58), (8, 13.12), (12, 10.93), (16, 8.78), (20, 7.14)])
def test_base_at_224(r, gmac):
    """Table 1 of the paper, ViT-B: blocks, patch projection and head."""
    total = FusionPlan.paper(12, r).multiply_adds(196, 768) + 196 * 768 * 768 + 768 * 1000
    assert total / 1e9 == pytest.approx(gmac, abs=0.02)


def test_saved_share_of_token_layers():
    assert FusionPlan(("prune",) * 4, (2, 0, 3, 0)).saved(10) == pytest.approx((4 * 2 + 2 * 3) / 40)
    assert FusionPlan.paper(12, 0).saved(196) == 0


def test_the_smallest_r_that_reaches_a_reduction():
    plan = FusionPlan.reaching(lambda r: FusionPlan.paper(12, r), 0.35, 196)
    assert plan == FusionPlan.paper(12, 11)
    assert plan.saved(196) >= 0.35 > FusionPlan.paper(12, 10).saved(196)
    assert FusionPlan.reaching(lambda r: FusionPlan.uniform(3, r, "prune"), 0, 9) == FusionPlan.uniform(3, 0, "prune")
    with pytest.raises(ValueError, match=r"reduction=0\.9 is out of reach: r=4, half of 8 patches, saves 0\.708"):
        FusionPlan.reaching(lambda r: FusionPlan.paper(3, r), 0.9, 8)
    with pytest.raises(ValueError, match=r"reduction must lie in \[0, 1\), got 1"):
        FusionPlan.reaching(lambda r: FusionPlan.paper(3, r), 1, 8)
