"""Token fusion on a model people already have: put in by :func:`apply_tofu`, taken out by ``remove()``, no retraining.

Source: ToFu (arXiv 2312.01026): r tokens leave between the attention and the MLP of each block.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import nn

from jumbo_core import checks
from jumbo_core.tofu.hosts import FusionHost, host_of
from jumbo_core.tofu.inside import Capture, DenseCall, FusedForward, Run, Step
from jumbo_core.tofu.matching import ORDERS
from jumbo_core.tofu.operators import NORMS, source_map
from jumbo_core.tofu.plan import Clamp, FusionPlan

IMPORTANCE = ("similarity", "attention")
WEIGHTS = ("size", "importance")


@dataclass(frozen=True)
class FusionReport:
    """What a plan does to N patches: ``tokens[i]`` patches leave block i; ``clamps`` says where r had to be cut.

    ``multiply_adds`` of the blocks for one image, matching included, and ``unfused`` without fusion: None where the
    model's host knows no closed form.
    """

    num_patches: int
    tokens: list[int]
    clamps: list[Clamp]
    multiply_adds: int | None = None
    unfused: int | None = None

    @property
    def saved(self) -> float | None:
        """Share of the multiply-adds that fusion saves."""
        return None if self.multiply_adds is None else 1 - self.multiply_adds / self.unfused

    def __str__(self) -> str:
        lines = [f"{self.num_patches} patches, after each block: {', '.join(map(str, self.tokens))}"]
        lines += [f"block {c.block}: asked to remove {c.asked}, only {c.possible} could leave" for c in self.clamps]
        if self.multiply_adds is not None:
            lines.append(
                f"multiply-adds of the blocks for one image: {self.multiply_adds:,} of {self.unfused:,}, "
                f"{100 * self.saved:.1f} % saved"
            )
        return "\n".join(lines)


class FusedModel:
    """Handle of a fused model, returned by :func:`apply_tofu`.

    Attributes:
        model: the model that was given, not a copy; call it as ever.
        plan: the plan it follows.
    """

    def __init__(self, model: nn.Module, plan: FusionPlan, host: FusionHost, run: Run) -> None:
        self.model, self.plan, self._host, self._run = model, plan, host, run

    def report(self, num_patches: int | None = None) -> FusionReport:
        """Patches kept per block, clamps and compute, for N patches. Default N: of the latest call, else the model's.

        Raises:
            ValueError: N is not given, nothing ran yet and the model takes any number of patches.
        """
        if num_patches is None:
            num_patches = self._run.num_patches or self._host.num_patches(self.model)
        if num_patches is None:
            raise ValueError("give num_patches: the model takes any number and has not been called yet")
        return fusion_report(self.model, self.plan, num_patches)

    def sizes(self) -> torch.Tensor:
        """(B, K, 1): how many originals each token of the latest call's output stands for (pruned ones not counted)."""
        sizes, order = self._last().sizes, self._host.arrangement(self.model, None)
        return sizes if order is None else order.restore(sizes)

    def place(self) -> torch.Tensor:
        """(B, T): where each original token of the latest call stands in its output, for :func:`unmerge`."""
        last, order = self._last(), self._host.arrangement(self.model, None)
        if order is None:
            return last.place
        stands = order.arrange(torch.arange(last.sizes.shape[1], device=last.place.device).unsqueeze(0))
        return order.restore(stands[0][last.place])

    def sources(self) -> torch.Tensor:
        """(B, K, T) bool: which originals each token of the latest call's output stands for."""
        return source_map(self.place(), self._last().sizes.shape[1])

    def remove(self) -> nn.Module:
        """Take the fusion out; the model is as before. Raises ValueError if it is not in."""
        return remove_tofu(self.model)

    def _last(self) -> Step:
        if self._run.last is None:
            raise ValueError("nothing to tell: the latest call, if any, did not go through the last block")
        return self._run.last


def fusion_report(model: nn.Module, plan: FusionPlan, num_patches: int) -> FusionReport:
    """What a plan does to N patches in a model, fused or not. Raises as :meth:`FusionPlan.resolve` does."""
    host, (_, clamps), tokens = host_of(model), plan.resolve(num_patches), plan.tokens_after(num_patches)
    whole = [num_patches] * len(tokens)
    left = host.multiply_adds(model, [num_patches, *tokens[:-1]], tokens)
    return FusionReport(num_patches, tokens, clamps, left, host.multiply_adds(model, whole, whole))


def apply_tofu(
    model: nn.Module,
    plan: FusionPlan,
    *,
    proportional: bool = False,
    importance: str = "similarity",
    norm: str = "max",
    weights: str | None = None,
    order: str = "position",
) -> FusedModel:
    """Make a model fuse tokens as the plan says, in place and without touching its parameters.

    ``forward`` and ``forward_features`` then work on ever fewer patches; ``forward_intermediates`` gives maps of every
    original position (and final tokens likewise), each with its group's vector. The model can be trained,
    checkpointed, deep-copied and pickled, fusion included; its state dict does not change. It remembers its latest
    call, so one thread at a time may call it; others take copies, which can share the weights
    (``copy.deepcopy(model, {id(p): p for p in model.parameters()})``).

    Args:
        model: a timm VisionTransformer or Eva, a JumboViT, AdventurerViT or their encoders; others through
            :func:`register_host`.
        plan: one operator and one count per block.
        proportional: add log sizes to the attention scores (ToMe), so that a merged token weighs what it stands for.
        importance: who leaves: "similarity" (those most alike another, default) or "attention" (those that receive
            least). Whom they join is decided by similarity.
        norm: of MLERP groups, "max" (default), "mean" or "spherical", see :func:`fuse`.
        weights: what members of a merged group count by: "size", "importance" (the attention they receive), or None
            (default), each operator's own: size in "average", all alike in "mlerp".
        order: of the kept tokens, "position" (default) or "released", see :func:`match`.

    Raises:
        TypeError: a model that no host knows; what is supported is named.
        ValueError: a plan of another depth, or with an r that the model's own size cannot meet; a model that is fused
            already; an unknown option, or one that the model has no part for.
    """
    host = host_of(model)
    blocks = host.blocks(model)
    if not isinstance(plan, FusionPlan):
        raise TypeError(f"plan must be a FusionPlan, got {type(plan).__name__}")
    if len(plan.ops) != len(blocks):
        raise ValueError(f"the plan is for {len(plan.ops)} blocks, the model has {len(blocks)}")
    checks.flag("proportional", proportional)
    for name, value, known in (("importance", importance, IMPORTANCE), ("norm", norm, NORMS), ("order", order, ORDERS)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    if weights is not None and weights not in WEIGHTS:
        raise ValueError(f"weights must be None or one of {', '.join(map(repr, WEIGHTS))}, got {weights!r}")
    if is_fused(model):
        raise ValueError("the model is fused already; call remove() on its handle, or remove_tofu(model), first")
    host.check_options(model, proportional, "attention" if weights == "importance" else importance)
    if order != "position" and any(host.arrangement(model, i) is not None for i in range(len(blocks))):
        raise ValueError(f"order={order!r} would change the order in which this model scans patches: use 'position'")
    num_patches = host.num_patches(model)
    if num_patches is not None:
        plan.resolve(num_patches)

    options = {
        "proportional": proportional,
        "importance": importance,
        "norm": norm,
        "weights": weights,
        "order": order,
    }
    run = Run(plan, host.prefix(model), **options)
    for i, block in enumerate(blocks):
        queries, keys = host.queries_and_keys(block)
        fused = FusedForward(block, i, host, run, host.arrangement(model, i))
        if plan.counts[i]:
            keys.register_forward_hook(fused.keys)
            if run.reads_attention(i):
                queries.register_forward_hook(fused.queries)
        block.forward = fused
    for owner, name in host.dense_calls(model):
        setattr(owner, name, DenseCall(owner, name, host, run))
    host.remember(model, plan, options)
    return FusedModel(model, plan, host, run)


# What apply_tofu may be told beside model and plan, for configurations that name these options.
OPTIONS = tuple(p.name for p in inspect.signature(apply_tofu).parameters.values() if p.kind is p.KEYWORD_ONLY)


def is_fused(model: nn.Module) -> bool:
    """Whether :func:`apply_tofu` is in force on the model or a part of it."""
    return any(isinstance(module.__dict__.get("forward"), FusedForward) for module in model.modules())


def remove_tofu(model: nn.Module) -> nn.Module:
    """Take token fusion out of a model, a copy or an unpickled one included; returns the model.

    Raises:
        ValueError: there is none in it.
    """
    if not is_fused(model):
        raise ValueError(f"there is no token fusion in this {type(model).__name__}")
    host = next(m.forward.host for m in model.modules() if isinstance(m.__dict__.get("forward"), FusedForward))
    for module in model.modules():
        for name in [n for n, value in module.__dict__.items() if isinstance(value, (FusedForward, DenseCall))]:
            delattr(module, name)
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, Capture)]:
            del hooks[key]
    host.forget(model)
    return model
