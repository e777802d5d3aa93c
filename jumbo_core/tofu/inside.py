"""What stands in a fused model in place of its blocks' ``forward``, and what it remembers of a call."""

from __future__ import annotations

import inspect
from types import CodeType, MethodType
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from jumbo_core.tofu.hosts import Arrangement, FusionHost
from jumbo_core.tofu.importance import attention_received
from jumbo_core.tofu.matching import match
from jumbo_core.tofu.operators import compose, fuse, unmerge
from jumbo_core.tofu.plan import FusionPlan


class Step(NamedTuple):
    """Where the originals stand between two blocks. None for ``sizes``, ``place``, ``origin``: nothing left so far."""

    sizes: torch.Tensor | None
    place: torch.Tensor | None
    origin: torch.Tensor | None  # (B, K) one original position of each token: the way back from unmerged tokens
    dense: bool  # block outputs are unmerged in this call


class Call:
    """One call of a model of N patches: how many leave each block, and where the originals stand after it."""

    def __init__(self, num_patches: int, counts: list[int], dense: bool) -> None:
        self.num_patches, self.counts, self.dense = num_patches, counts, dense
        self.steps: dict[int, Step] = {}

    def before(self, index: int) -> Step:
        """What block ``index`` starts from."""
        return self.steps[index - 1] if index else Step(None, None, None, self.dense)


class Run:
    """Options, and the traces of the latest call, which a copy or a pickle leaves behind."""

    def __init__(
        self,
        plan: FusionPlan,
        prefix: int,
        *,
        proportional: bool,
        importance: str,
        norm: str,
        weights: str | None,
        order: str,
    ) -> None:
        self.plan, self.prefix, self.proportional = plan, prefix, proportional
        self.importance, self.norm, self.weights, self.order = importance, norm, weights, order
        self._clear()

    def _clear(self) -> None:
        self.dense = False
        self.call: Call | None = None
        self.last: Step | None = None
        self.calls = WeakTensorKeyDictionary()  # input of a block -> (its index, its call), while training needs it

    def __getstate__(self) -> dict:
        return {n: v for n, v in self.__dict__.items() if n not in ("dense", "call", "last", "calls")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._clear()

    @property
    def num_patches(self) -> int | None:
        """N of the latest call."""
        return None if self.call is None else self.call.num_patches

    def reads_attention(self, index: int) -> bool:
        """Whether block ``index`` needs to know how much attention its tokens receive."""
        return self.importance == "attention" or (self.weights == "importance" and self.plan.ops[index] != "prune")

    def call_of(self, index: int, tokens: torch.Tensor) -> Call:
        """The call that block ``index`` runs in; the first block begins a new one.

        Gradient checkpointing runs a block again inside backward, maybe after other calls: such a block is known by its
        input, which is the tensor of its first run, or another on the same memory.
        """
        eager = not torch.compiler.is_compiling()
        if eager and torch._C._current_graph_task_id() != -1:
            again = self._again(index, tokens)
            if again is not None:
                return again
        if not index:
            num_patches = tokens.shape[1] - self.prefix
            self.call, self.last = Call(num_patches, self.plan.resolve(num_patches)[0], self.dense), None
        if eager and (torch.is_grad_enabled() or tokens.requires_grad):  # a reentrant checkpoint runs without gradients
            self.calls[tokens] = index, self.call
        return self.call

    def _again(self, index: int, tokens: torch.Tensor) -> Call | None:
        found = self.calls.get(tokens)
        if found is None:  # the checkpoint handed over a detached tensor
            same = (v for t, v in self.calls.items() if t.data_ptr() == tokens.data_ptr() and t.shape == tokens.shape)
            found = next((value for value in same if value[0] == index), None)
        return None if found is None or found[0] != index else found[1]

    def after(self, call: Call, index: int, step: Step, tokens: torch.Tensor) -> None:
        """Note what block ``index`` did."""
        call.steps[index] = step
        if index < len(call.counts) - 1 or call is not self.call:
            return
        if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
            self.call, self.last = None, None  # torch.export runs this with stand-ins that hold no values
            return
        batch, kept = tokens.shape[:2]
        if step.place is None:
            everyone = torch.arange(kept, device=tokens.device).expand(batch, kept)
            step = step._replace(sizes=tokens.new_ones(batch, kept, 1), place=everyone, origin=everyone)
        self.last = step


class Capture:
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


class FusedForward:
    """Stands in as ``block.forward``: attention, fusion, MLP."""

    def __init__(
        self, block: nn.Module, index: int, host: FusionHost, run: Run, arrangement: Arrangement | None
    ) -> None:
        self.block, self.index, self.host, self.run, self.arrangement = block, index, host, run, arrangement
        self.queries, self.keys = Capture(), Capture()

    def __call__(self, tokens: torch.Tensor, *context, **options) -> torch.Tensor:
        run = self.run
        call = run.call_of(self.index, tokens)
        step, r = call.before(self.index), call.counts[self.index]
        if not r and step.place is None:  # nothing left so far: the block as it is, which costs nothing extra
            tokens = type(self.block).forward(self.block, tokens, *context, **options)
            run.after(call, self.index, step, tokens)
            return tokens
        if step.dense and step.place is not None:
            tokens = self._unmerge(tokens, step.origin)  # back to one token per group
        if step.origin is not None:
            context, options = self.host.moved(step.origin[:, run.prefix :] - run.prefix, context, options)
        bias = None
        if run.proportional and step.sizes is not None:
            bias = step.sizes.log().to(tokens.dtype).transpose(1, 2).unsqueeze(1)  # (B, K, 1) -> (B, 1, 1, K)
        tokens = self.host.attend(self.block, tokens, bias, *context, **options)
        if r:
            tokens, step = self._fuse(tokens, r, step)
        elif run.plan.counts[self.index]:  # capped to nothing, but the hooks are there
            self.queries.take(), self.keys.take()
        tokens = self.host.feed(self.block, tokens, *context, **options)
        run.after(call, self.index, step, tokens)
        return self._unmerge(tokens, step.place) if step.dense and step.place is not None else tokens

    def _unmerge(self, tokens: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        if self.arrangement is None:
            return unmerge(tokens, place)
        return self.arrangement.restore(unmerge(self.arrangement.arrange(tokens), place))

    def _fuse(self, tokens: torch.Tensor, r: int, step: Step) -> tuple[torch.Tensor, Step]:
        run = self.run
        queries, keys = self.queries.take(), self.host.keys(self.block, self.keys.take())
        if self.arrangement is not None:
            tokens, keys = self.arrangement.arrange(tokens), self.arrangement.arrange(keys, dim=2)
        received = None
        if run.reads_attention(self.index):
            queries = self.host.queries(self.block, queries)
            sizes = step.sizes if run.proportional else None
            received = attention_received(queries, keys, scale=self.host.scale(self.block), sizes=sizes)
        importance = received if run.importance == "attention" else None
        matching = match(keys, r, protected=run.prefix, importance=importance, order=run.order)
        op, weights = run.plan.ops[self.index], None
        if op != "prune" and run.weights == "importance":
            weights = received
        elif op != "prune" and run.weights == "size" and step.sizes is not None:
            weights = step.sizes.squeeze(-1)
        tokens, sizes = fuse(tokens, matching, op, sizes=step.sizes, norm=run.norm, weights=weights)
        if self.arrangement is not None:
            tokens = self.arrangement.restore(tokens)
        origin = matching.kept if step.origin is None else step.origin.gather(1, matching.kept)
        return tokens, Step(sizes, compose(step.place, matching), origin, step.dense)


class DenseCall:
    """Stands in for a method that reads block outputs as maps: in its course they hold every original position."""

    def __init__(self, owner: nn.Module, name: str, host: FusionHost, run: Run) -> None:
        self.owner, self.name, self.host, self.run = owner, name, host, run

    @property
    def __signature__(self) -> inspect.Signature:
        """Of the method it stands in for: Transformers' Trainer asks which inputs a model takes."""
        return inspect.signature(MethodType(getattr(type(self.owner), self.name), self.owner))

    @property
    def __code__(self) -> CodeType:
        """Of the method it stands in for: torch.export notes which code it traces."""
        return inspect.unwrap(getattr(type(self.owner), self.name)).__code__

    def __call__(self, *args, **options):
        before = self.run.dense  # one may call another
        self.run.dense = before or self.host.reads_maps(self.owner, options)
        try:
            return getattr(type(self.owner), self.name)(self.owner, *args, **options)
        finally:
            self.run.dense = before
