"""A better plan of the same cost, by trying: tokens are moved between blocks while the model's outputs get closer.

Our own addition to the adaptive plan of ToFu (arXiv 2312.01026): no training, no labels, calibration images only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from jumbo_core import checks
from jumbo_core.modes import evaluating
from jumbo_core.tofu.apply import apply_tofu, fusion_report, is_fused
from jumbo_core.tofu.matching import largest_r
from jumbo_core.tofu.operators import OPERATORS
from jumbo_core.tofu.plan import FusionPlan

NOTHING = 1e-4  # rise of the loss, as a share of it, that is rounding rather than loss


@dataclass(frozen=True)
class PlanSearch:
    """Result of :func:`search_plan`.

    Attributes:
        plan: the best plan found, never costlier than the one it started from.
        options: what to give :func:`apply_tofu` with it, one of those that were tried.
        loss, start_loss: of that plan, and of the best start with the best options.
        tried: plans measured, options counted.
    """

    plan: FusionPlan
    options: dict
    loss: float
    start_loss: float
    tried: int


def search_plan(
    model: nn.Module,
    batches: Sequence[torch.Tensor],
    start: FusionPlan | Sequence[FusionPlan],
    *,
    cost: Callable[[FusionPlan], float] | None = None,
    budget: float | None = None,
    options: Sequence[Mapping] = ({},),
    ops: Sequence[str] = OPERATORS,
    steps: Sequence[int] | None = None,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> PlanSearch:
    """Improve a plan within a budget: coordinate descent on what calibration images lose.

    A move lets ``step`` tokens less leave in one block and as many more in another as the budget asks, or changes a
    block's operator, and is kept if the loss gets lower; or it lets ``step`` more leave, and is kept if nothing is
    lost by it, which makes room for others. When no move is kept the next step is taken.

    Every start with every one of the options is tried so; after each step the worse half is given up. Deterministic:
    the moves have a fixed order and nothing is drawn at random. The model is left as it was.

    Args:
        model: what :func:`apply_tofu` takes, not fused.
        batches: calibration images, each (B, C, H, W), all of one size, on the model's device. Never test images.
        start: one plan or several, from :meth:`FusionPlan.from_profile` and :meth:`FusionPlan.uniform`, for example.
            Counts are first cut to what can leave.
        cost: of a plan; where more tokens leave it must not rise. Default: multiply-adds, matching included, or for
            models without a closed form the patches that blocks hand on, summed.
        budget: what the plan may cost. Default: what the start costs, of several the costliest.
        options: keyword arguments of :func:`apply_tofu` to choose from. Default: its own defaults only.
        ops: operators to choose from. Default: all three.
        steps: sizes of the moves, each used until nothing improves. Default: powers of two, from the largest that a
            count of the starts reaches down to 1.
        loss: (output, output of the unfused model) -> mean over images, not negative. Default: Kullback-Leibler
            divergence of the class probabilities, for outputs that are logits (B, classes).

    Raises:
        TypeError: a model that no host knows; outputs that the default loss cannot compare.
        ValueError: a fused model, no batches, options, operators or steps; a start beyond the budget (both costs are
            named); a loss that is negative or not finite.
    """
    if is_fused(model):
        raise ValueError("search on the model before it is fused; call remove_tofu(model) first")
    starts = [start] if isinstance(start, FusionPlan) else list(start)
    named = {"batches": batches, "start": starts, "options": options, "ops": ops}
    for name, value in (named if steps is None else {**named, "steps": steps}).items():
        if not len(value):
            raise ValueError(f"{name} is empty: there is nothing to search with")
    with torch.no_grad(), evaluating(model):
        trial = _Trial(model, list(batches), divergence if loss is None else loss)
        patches = trial.num_patches(len(starts[0].ops))
        cost = _default_cost(model, patches) if cost is None else cost
        starts = [FusionPlan(plan.ops, tuple(plan.resolve(patches)[0])) for plan in starts]
        costliest = max(map(cost, starts))
        budget = costliest if budget is None else budget
        if costliest > budget:
            raise ValueError(f"a start costs {costliest}, more than the budget of {budget}: start from a cheaper plan")
        if steps is None:
            largest = max(max(plan.counts) for plan in starts)
            steps = [1 << power for power in reversed(range(largest.bit_length()))]
        steps = [checks.integer("steps", step) for step in steps]
        found = [(trial.loss(plan, some, math.inf), plan, some) for plan in starts for some in options]
        start_loss = min(value for value, *_ in found)
        for step in steps:
            moves = list(_moves(len(starts[0].ops), step, ops))
            found = [_descend(trial, *one, moves, patches, cost, budget) for one in found]
            found = sorted(found, key=lambda one: one[0])[: (len(found) + 1) // 2]
    least, best, chosen = min(found, key=lambda one: one[0])
    return PlanSearch(best, dict(chosen), least, start_loss, trial.tried)


def _descend(trial, least, best, options, moves, patches, cost, budget) -> tuple[float, FusionPlan, Mapping]:
    """Make moves until none is kept."""
    lowest, improved = least, True
    while improved:
        improved = False
        for move in moves:
            plan = move(best, patches, cost, budget)
            if plan is None:
                continue
            # Only what is cheaper may be a little worse, and never worse than the lowest loss so far by more than
            # rounding: so the search cannot go round in circles.
            limit = lowest * (1 + NOTHING) if cost(plan) < cost(best) else lowest
            if (value := trial.loss(plan, options, limit)) < limit:
                least, best, lowest, improved = value, plan, min(lowest, value), True
    return least, best, options


def divergence(output: torch.Tensor, unfused: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of class probabilities from those of the unfused model, mean over images.

    Raises:
        TypeError: outputs that are no logits (B, classes).
    """
    if not isinstance(output, torch.Tensor) or output.ndim != 2:
        found = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise TypeError(f"the default loss compares logits (B, classes), the model gives {found}: give loss=")
    logs = [values.double().log_softmax(-1) for values in (output, unfused)]
    return F.kl_div(*logs, reduction="batchmean", log_target=True)


class _Trial:
    """Losses of plans on the calibration images, each measured once."""

    def __init__(self, model: nn.Module, batches: list[torch.Tensor], loss: Callable) -> None:
        self.model, self.batches, self._loss = model, batches, loss
        self.unfused = [model(images) for images in batches]
        self.known: dict[tuple, float] = {}
        self.dropped: dict[tuple, float] = {}  # the limit that was reached

    @property
    def tried(self) -> int:
        return len(self.known.keys() | self.dropped.keys())

    def num_patches(self, depth: int) -> int:
        """N of the calibration images."""
        handle = apply_tofu(self.model, FusionPlan.uniform(depth, 0, OPERATORS[0]))
        try:
            self.model(self.batches[0][:1])
            return handle.report().num_patches
        finally:
            handle.remove()

    def loss(self, plan: FusionPlan, options: Mapping, limit: float) -> float:
        """Mean over the images; a plan that is certain to lose ``limit`` or more is dropped and counts as infinite."""
        # An operator without tokens does nothing: plans that differ there only are the same.
        key = tuple((op, r) if r else None for op, r in zip(plan.ops, plan.counts, strict=True))
        key = (key, tuple(sorted(options.items())))
        if key in self.known:
            return self.known[key]
        if limit > self.dropped.get(key, -1):
            value = self._measure(plan, options, limit)
            if value < math.inf:
                self.known[key] = value
                return value
            self.dropped[key] = limit
        return math.inf

    def _measure(self, plan: FusionPlan, options: Mapping, limit: float) -> float:
        handle = apply_tofu(self.model, plan, **options)
        try:
            total, images = 0.0, sum(map(len, self.batches))
            for batch, unfused in zip(self.batches, self.unfused, strict=True):
                value = float(self._loss(self.model(batch), unfused))
                if not 0 <= value < math.inf:
                    raise ValueError(f"the loss must be finite and not negative, got {value} for {plan}")
                total += value * len(batch) / images
                if total >= limit:  # it cannot come down again
                    return math.inf
            return total
        finally:
            handle.remove()


def _moves(depth: int, step: int, ops: Sequence[str]) -> Iterator[Callable[..., FusionPlan | None]]:
    """Every move in its order, each a function (plan, patches, cost, budget) -> plan, None where it is not possible."""
    for giver in range(depth):
        for taker in range(depth):
            if giver != taker:
                yield partial(_shift, giver, taker, step)
    for block in range(depth):
        yield partial(_more, block, step)
    for block in range(depth):
        for op in ops:
            yield partial(_switch, block, op)


def _shift(giver: int, taker: int, step: int, plan: FusionPlan, patches: int, cost: Callable, budget: float):
    """``step`` tokens less leave in ``giver``, and in ``taker`` as many more as it takes to meet the budget."""
    counts = list(plan.counts)
    if not counts[giver]:
        return None
    counts[giver] = max(0, counts[giver] - step)
    while True:
        changed = FusionPlan(plan.ops, tuple(counts))
        if counts[taker] > largest_r(patches) or changed.resolve(patches)[1]:
            return None
        if cost(changed) <= budget:
            return changed
        counts[taker] += 1


def _more(block: int, step: int, plan: FusionPlan, patches: int, *_):
    """``step`` tokens more leave in one block."""
    counts = list(plan.counts)
    counts[block] += step
    changed = FusionPlan(plan.ops, tuple(counts))
    return None if counts[block] > largest_r(patches) or changed.resolve(patches)[1] else changed


def _switch(block: int, op: str, plan: FusionPlan, *_):
    """Another operator in one block."""
    if plan.ops[block] == op or not plan.counts[block]:
        return None
    return FusionPlan((*plan.ops[:block], op, *plan.ops[block + 1 :]), plan.counts)


def _default_cost(model: nn.Module, patches: int) -> Callable[[FusionPlan], float]:
    def cost(plan: FusionPlan) -> float:
        counted = fusion_report(model, plan, patches).multiply_adds
        return sum(plan.tokens_after(patches)) if counted is None else counted

    return cost
