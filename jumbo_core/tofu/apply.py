"""Token fusion on a model people already have: put in by :func:`apply_tofu`, taken out by ``remove()``, no retraining.

Source: ToFu (arXiv 2312.01026): r tokens leave between the attention and the MLP of each block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from jumbo_core import checks
from jumbo_core.tofu.hosts import FusionHost, host_of
from jumbo_core.tofu.importance import attention_received
from jumbo_core.tofu.matching import ORDERS, match
from jumbo_core.tofu.operators import NORMS, compose, fuse, source_map, unmerge
from jumbo_core.tofu.plan import Clamp, FusionPlan

IMPORTANCE = ("similarity", "attention")


@dataclass(frozen=True)
class FusionReport:
    """What a plan does to N patches: ``tokens[i]`` patches leave block i; ``clamps`` says where r had to be cut."""

    num_patches: int
    tokens: list[int]
    clamps: list[Clamp]

    def __str__(self) -> str:
        lines = [f"{self.num_patches} patches, after each block: {', '.join(map(str, self.tokens))}"]
        lines += [f"block {c.block}: asked to remove {c.asked}, only {c.possible} could leave" for c in self.clamps]
        return "\n".join(lines)


class FusedModel:
    """Handle of a fused model, returned by :func:`apply_tofu`.

    Attributes:
        model: the model that was given, not a copy; call it as ever.
        plan: the plan it follows.
    """

    def __init__(self, model: nn.Module, plan: FusionPlan, host: FusionHost, run: _Run) -> None:
        self.model, self.plan, self._host, self._run = model, plan, host, run

    def report(self, num_patches: int | None = None) -> FusionReport:
        """Patches kept per block and clamps, for N patches. Default N: of the latest call, else of the model's size.

        Raises:
            ValueError: N is not given, nothing ran yet and the model takes any number of patches.
        """
        if num_patches is None:
            num_patches = self._run.num_patches or self._host.num_patches(self.model)
        if num_patches is None:
            raise ValueError("give num_patches: the model takes any number and has not been called yet")
        _, clamps = self.plan.resolve(num_patches)
        return FusionReport(num_patches, self.plan.tokens_after(num_patches), clamps)

    def sizes(self) -> torch.Tensor:
        """(B, K, 1): how many originals each token of the latest call's output stands for (pruned ones not counted)."""
        return self._last().sizes

    def place(self) -> torch.Tensor:
        """(B, T): where each original token of the latest call stands in its output, for :func:`unmerge`."""
        return self._last().place

    def sources(self) -> torch.Tensor:
        """(B, K, T) bool: which originals each token of the latest call's output stands for."""
        last = self._last()
        return source_map(last.place, last.sizes.shape[1])

    def remove(self) -> nn.Module:
        """Take the fusion out; the model is as before. Raises ValueError if it is not in."""
        return remove_tofu(self.model)

    def _last(self) -> _Step:
        if self._run.last is None:
            raise ValueError("nothing to tell: the latest call, if any, did not go through the last block")
        return self._run.last


def apply_tofu(
    model: nn.Module,
    plan: FusionPlan,
    *,
    proportional: bool = False,
    importance: str = "similarity",
    norm: str = "max",
    order: str = "position",
) -> FusedModel:
    """Make a model fuse tokens as the plan says, in place and without touching its parameters.

    ``forward`` and ``forward_features`` then work on ever fewer patches; ``forward_intermediates`` gives maps of every
    original position (and final tokens likewise), each with its group's vector. The model can be trained,
    checkpointed, deep-copied and pickled, fusion included; its state dict does not change.

    Args:
        model: a timm VisionTransformer, a JumboViT or JumboEncoder; others through :func:`register_host`.
        plan: one operator and one count per block.
        proportional: add log sizes to the attention scores (ToMe), so that a merged token weighs what it stands for.
        importance: who leaves: "similarity" (those most alike another, default) or "attention" (those that receive
            least). Whom they join is decided by similarity.
        norm: length of MLERP groups, "max" (default) or "mean", see :func:`fuse`.
        order: of the kept tokens, "position" (default) or "released", see :func:`match`.

    Raises:
        TypeError: a model that no host knows; what is supported is named.
        ValueError: a plan of another depth, or with an r that the model's own size cannot meet; a model that is fused
            already; an unknown option.
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
    if is_fused(model):
        raise ValueError("the model is fused already; call remove() on its handle, or remove_tofu(model), first")
    num_patches = host.num_patches(model)
    if num_patches is not None:
        plan.resolve(num_patches)

    run = _Run(plan, host.prefix(model), proportional, importance, norm, order)
    for i, block in enumerate(blocks):
        queries, keys = host.queries_and_keys(block)
        fused = _FusedForward(block, i, host, run)
        if plan.counts[i]:
            keys.register_forward_hook(fused.keys)
            if importance == "attention":
                queries.register_forward_hook(fused.queries)
        block.forward = fused
    for owner, name in host.dense_calls(model):
        setattr(owner, name, _DenseCall(owner, name, run))
    return FusedModel(model, plan, host, run)


def is_fused(model: nn.Module) -> bool:
    """Whether :func:`apply_tofu` is in force on the model or a part of it."""
    return any(isinstance(module.__dict__.get("forward"), _FusedForward) for module in model.modules())


def remove_tofu(model: nn.Module) -> nn.Module:
    """Take token fusion out of a model, a copy or an unpickled one included; returns the model.

    Raises:
        ValueError: there is none in it.
    """
    if not is_fused(model):
        raise ValueError(f"there is no token fusion in this {type(model).__name__}")
    for module in model.modules():
        for name in [n for n, value in module.__dict__.items() if isinstance(value, (_FusedForward, _DenseCall))]:
            delattr(module, name)
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Capture)]:
            del hooks[key]
    return model


class _Step(NamedTuple):
    """Where the originals stand between two blocks. None for ``sizes``, ``place``, ``origin``: nothing left so far."""

    sizes: torch.Tensor | None
    place: torch.Tensor | None
    origin: torch.Tensor | None  # (B, K) one original position of each token: the way back from unmerged tokens
    dense: bool  # block outputs are unmerged in this call


class _Run:
    """Options, and the traces of the latest call, which a copy or a pickle leaves behind."""

    def __init__(self, plan: FusionPlan, prefix: int, proportional: bool, importance: str, norm: str, order: str):
        self.plan, self.prefix, self.proportional = plan, prefix, proportional
        self.importance, self.norm, self.order = importance, norm, order
        self.dense = False
        self._forget()

    def _forget(self) -> None:
        self.num_patches: int | None = None
        self.counts: list[int] = []
        self.steps: dict[int, _Step] = {}
        self.last: _Step | None = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "num_patches": None, "counts": [], "steps": {}, "last": None, "dense": False}

    def before(self, index: int, tokens: torch.Tensor) -> _Step:
        """What block ``index`` starts from; the first block begins a new call."""
        if index:
            return self.steps[index - 1]
        # Gradient checkpointing runs blocks again inside backward, last one first: that is no new call.
        again = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if not again:
            self._forget()
            self.num_patches = tokens.shape[1] - self.prefix
            self.counts, _ = self.plan.resolve(self.num_patches)
        return _Step(None, None, None, self.steps[0].dense if again else self.dense)

    def after(self, index: int, step: _Step, tokens: torch.Tensor) -> None:
        self.steps[index] = step
        if index == len(self.counts) - 1:
            batch, kept = tokens.shape[:2]
            if step.place is None:
                everyone = torch.arange(kept, device=tokens.device).expand(batch, kept)
                step = step._replace(sizes=tokens.new_ones(batch, kept, 1), place=everyone, origin=everyone)
            self.last = step


class _Capture:
    """Forward hook that keeps a module's output until it is asked for."""

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None

    def __call__(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        self.value = output.detach()

    def take(self) -> torch.Tensor:
        value, self.value = self.value, None
        return value

    def __getstate__(self) -> dict:
        return {"value": None}


class _FusedForward:
    """Stands in as ``block.forward``: attention, fusion, MLP."""

    def __init__(self, block: nn.Module, index: int, host: FusionHost, run: _Run) -> None:
        self.block, self.index, self.host, self.run = block, index, host, run
        self.queries, self.keys = _Capture(), _Capture()

    def __call__(self, tokens: torch.Tensor, *context, **options) -> torch.Tensor:
        run = self.run
        step = run.before(self.index, tokens)
        r = run.counts[self.index]
        if not r and step.place is None:  # nothing left so far: the block as it is, which costs nothing extra
            tokens = type(self.block).forward(self.block, tokens, *context, **options)
            run.after(self.index, step, tokens)
            return tokens
        if step.dense and step.place is not None:
            tokens = unmerge(tokens, step.origin)  # back to one token per group
        bias = None
        if run.proportional and step.sizes is not None:
            bias = step.sizes.log().to(tokens.dtype).transpose(1, 2).unsqueeze(1)  # (B, K, 1) -> (B, 1, 1, K)
        tokens = self.host.attend(self.block, tokens, bias, *context, **options)
        if r:
            tokens, step = self._fuse(tokens, r, step)
        elif run.plan.counts[self.index]:  # capped to nothing, but the hooks are there
            self.queries.take(), self.keys.take()
        tokens = self.host.feed(self.block, tokens, *context, **options)
        run.after(self.index, step, tokens)
        return unmerge(tokens, step.place) if step.dense and step.place is not None else tokens

    def _fuse(self, tokens: torch.Tensor, r: int, step: _Step) -> tuple[torch.Tensor, _Step]:
        run = self.run
        queries, keys = self.queries.take(), self.host.keys(self.block, self.keys.take())
        importance = None
        if run.importance == "attention":
            queries = self.host.queries(self.block, queries)
            sizes = step.sizes if run.proportional else None
            importance = attention_received(queries, keys, scale=self.host.scale(self.block), sizes=sizes)
        matching = match(keys, r, protected=run.prefix, importance=importance, order=run.order)
        tokens, sizes = fuse(tokens, matching, run.plan.ops[self.index], sizes=step.sizes, norm=run.norm)
        origin = matching.kept if step.origin is None else step.origin.gather(1, matching.kept)
        return tokens, _Step(sizes, compose(step.place, matching), origin, step.dense)


class _DenseCall:
    """Stands in for a method that reads block outputs as maps: in its course they hold every original position."""

    def __init__(self, owner: nn.Module, name: str, run: _Run) -> None:
        self.owner, self.name, self.run = owner, name, run

    def __call__(self, *args, **options):
        self.run.dense = True
        try:
            return getattr(type(self.owner), self.name)(self.owner, *args, **options)
        finally:
            self.run.dense = False
