"""search_plan: never costlier, never worse, deterministic, the model left alone; and its refusals."""

import copy

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from jumbo_core.models import JumboViT
from jumbo_core.tofu import FusionPlan, apply_tofu, is_fused
from jumbo_core.tofu.apply import fusion_report
from jumbo_core.tofu.search import divergence, search_plan

START = FusionPlan(("prune", "mlerp", "mlerp"), (2, 3, 4))
OPTIONS = [{}, {"proportional": True}, {"importance": "attention"}]


@pytest.fixture
def model() -> VisionTransformer:
    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2, num_classes=5).eval()
    for block in model.blocks:  # random weights hardly say who is like whom: make attention and MLP matter
        torch.nn.init.normal_(block.attn.qkv.weight, std=0.4)
        torch.nn.init.normal_(block.mlp.fc2.weight, std=0.4)
    return model


@pytest.fixture
def batches() -> list[torch.Tensor]:
    return [torch.randn(4, 3, 32, 32), torch.randn(2, 3, 32, 32)]


@torch.no_grad()
def loss_of(model, batches, plan, options) -> float:
    """The default loss, written out."""
    unfused = torch.cat([model(images) for images in batches]).double().softmax(-1)
    handle = apply_tofu(model, plan, **options)
    fused = torch.cat([model(images) for images in batches]).double().softmax(-1)
    handle.remove()
    return (unfused * (unfused / fused).log()).sum(-1).mean().item()


@pytest.mark.parametrize("jumbo", [False, True])
def test_better_at_no_higher_cost(model, batches, jumbo):
    if jumbo:
        model = JumboViT(32, 8, 3, 5, 32, 3, 2, 3, init="short").eval()
        torch.nn.init.normal_(model.head.weight, std=0.3)
    found = search_plan(model, batches, START, options=OPTIONS)
    cost = [fusion_report(model, plan, 16).multiply_adds for plan in (found.plan, START)]
    assert cost[0] <= cost[1]
    assert found.loss == pytest.approx(loss_of(model, batches, found.plan, found.options), rel=1e-4)
    assert found.start_loss == pytest.approx(min(loss_of(model, batches, START, o) for o in OPTIONS), rel=1e-4)
    assert found.loss < found.start_loss and found.tried >= 20
    assert found == search_plan(model, batches, START, options=OPTIONS)


def test_finds_what_trying_everything_finds(model, batches):
    """Two blocks, prune only: few enough plans to measure them all."""
    del model.blocks[2]
    start = FusionPlan.uniform(2, 4, "prune")

    def cost(plan):
        return sum(plan.tokens_after(16))

    found = search_plan(model, batches, start, cost=cost, ops=("prune",), budget=cost(start) + 2)
    plans = [FusionPlan(("prune", "prune"), (a, b)) for a in range(9) for b in range(9)]
    plans = [p for p in plans if not p.resolve(16)[1] and cost(p) <= cost(start) + 2]
    losses = {plan: loss_of(model, batches, plan, {}) for plan in plans}
    assert found.loss == pytest.approx(losses[found.plan], rel=1e-4)
    assert found.loss == pytest.approx(min(losses.values()), rel=2e-4) and found.loss < losses[start]


def test_takes_what_costs_nothing(batches):
    """In the last block only the class token's MLP counts, so all patches that can leave there do."""
    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5).eval()
    found = search_plan(model, batches, FusionPlan(("prune", "prune"), (4, 0)), ops=("prune",))
    assert found.plan.tokens_after(16)[1] == -(-found.plan.tokens_after(16)[0] // 2)
    assert found.loss <= found.start_loss * (1 + 1e-4)


def test_starts_from_the_best_of_several(model, batches):
    starts = [START, FusionPlan.uniform(3, 3, "average"), FusionPlan.uniform(3, 3, "prune")]
    losses = {(plan, i): loss_of(model, batches, plan, o) for plan in starts for i, o in enumerate(OPTIONS)}
    found = search_plan(model, batches, starts, options=OPTIONS, steps=(1,))
    assert found.start_loss == pytest.approx(min(losses.values()), rel=1e-4)
    assert found.start_loss < min(losses[START, i] for i in range(3))
    costs = [fusion_report(model, plan, 16).multiply_adds for plan in (found.plan, *starts)]
    assert costs[0] <= max(costs[1:])


def test_model_and_random_state_are_left_alone(model, batches):
    model.train()
    model.blocks[0].eval()
    state, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    before = torch.get_rng_state()
    search_plan(model, batches, START, steps=(2,))
    assert torch.equal(before, torch.get_rng_state()) and not is_fused(model)
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_counts_that_cannot_leave_are_cut_first(model, batches):
    found = search_plan(model, batches, FusionPlan.uniform(3, 8, "prune"), ops=("prune",), steps=(8,))
    assert found.plan.resolve(16)[1] == []


def test_own_loss(model, batches):
    """Only the first logit counts; the loss sees fused outputs first."""
    seen = []

    def loss(output, unfused):
        seen.append((output, unfused))
        return (output - unfused)[:, 0].square().mean()

    found = search_plan(model, batches, START, steps=(2,), loss=loss)
    with torch.no_grad():
        assert torch.equal(seen[0][1], model(batches[0])) and not torch.equal(*seen[0])
    assert 0 < found.loss <= found.start_loss


def test_a_failing_loss_leaves_no_fusion_behind(model, batches):
    with pytest.raises(ValueError, match=r"loss must be finite and not negative, got -1.0 for FusionPlan"):
        search_plan(model, batches, START, loss=lambda output, unfused: torch.tensor(-1.0))
    assert not is_fused(model)


def test_divergence():
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log(), torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    expected = (0.25 * torch.tensor(0.25 / 0.5).log() + 0.75 * torch.tensor(0.75 / 0.5).log()) / 2
    assert divergence(p, q + 3).item() == pytest.approx(expected.item(), abs=1e-6)
    with pytest.raises(TypeError, match=r"compares logits \(B, classes\), the model gives \(2, 4, 3\): give loss="):
        divergence(torch.zeros(2, 4, 3), torch.zeros(2, 4, 3))


def test_refusals(model, batches):
    for name in ("batches", "start", "options", "ops", "steps"):
        with pytest.raises(ValueError, match=f"{name} is empty"):
            search_plan(model, **{"batches": batches, "start": START, name: []})
    with pytest.raises(ValueError, match="steps must be an integer of at least 1, got 0"):
        search_plan(model, batches, START, steps=(0,))
    with pytest.raises(ValueError, match="the plan is for 2 blocks, the model has 3"):
        search_plan(model, batches, FusionPlan.uniform(2, 1, "prune"))
    with pytest.raises(TypeError, match="token fusion does not know Flatten"):
        search_plan(torch.nn.Flatten(), batches, START)
    with pytest.raises(ValueError, match="a start costs 9, more than the budget of 8: start from a cheaper plan"):
        search_plan(model, batches, START, cost=lambda plan: 18 - sum(plan.counts), budget=8)
    apply_tofu(model, START)
    with pytest.raises(ValueError, match="before it is fused"):
        search_plan(model, batches, START)
