"""The gradient of the Jumbo FFN that all blocks share, in one product for all of them.

A block runs the FFN on one row per sample, and its weights are as large as the rest of the model together. Left to
autograd, the weights' gradient is one product of a few rows per block, each as large as the weights themselves, added
up one after the other: on a CPU that traffic is most of what a Jumbo token costs in training. Here every pass keeps its
rows x_i and their gradients dy_i, a few kilobytes, and when all passes of a backward are through,

    dW = [dy_1; ...; dy_d]^T [x_1; ...; x_d]        db = sum of all rows dy

Equal up to rounding; second derivatives are autograd's own, through these formulas. (Where only the backward is
compiled, by dynamo's private compiled_autograd around an eager forward, torch ends with a TypeError.)
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from jumbo_core.jumbo.token import JumboFFN
from jumbo_core.modes import hooked, traced


class SharedPasses:
    """The passes of one forward through one shared :class:`JumboFFN`.

    Args:
        ffn: one that :meth:`serve` says yes to.
        count: passes, one a block.
    """

    def __init__(self, ffn: JumboFFN, count: int) -> None:
        self.layers = ffn.fc1, ffn.fc2
        # By layer and pass: rows and gradients, from a pass's backward until the sum's. Backward nodes hold this and
        # nothing that holds them: a graph that is never run leaves no cycle behind.
        self.rows: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        parameters = [p for layer in self.layers for p in (layer.weight, layer.bias)]
        # A number per layer and pass. Its gradient says which passes a backward went through, and autograd asks for
        # the sum only when all of these are through.
        self.flags = _Sum.apply(self.rows, count, *parameters)

    @staticmethod
    def serve(ffn: nn.Module | None, count: int) -> bool:
        """Whether passes through ``ffn`` may go this way: on a CPU, plain trained layers that nobody looks into."""
        return (
            count > 1
            and torch.is_grad_enabled()
            and type(ffn) is JumboFFN
            and not traced()
            and type(ffn.fc1) is type(ffn.fc2) is nn.Linear
            and all(
                type(p) is nn.Parameter and p.requires_grad and p.device.type == "cpu"
                for layer in (ffn.fc1, ffn.fc2)
                for p in (layer.weight, layer.bias)
            )
            and not torch.is_autocast_enabled("cpu")
            and not hooked(*ffn.modules())
            and not any(m._backward_hooks or m._backward_pre_hooks for m in ffn.modules())
        )

    def linear(self, x: torch.Tensor, layer: int, index: int) -> torch.Tensor:
        """The FFN's first (0) or second (1) linear layer on the rows x (B, in) of pass ``index``."""
        weight, bias = self.layers[layer].weight, self.layers[layer].bias
        return _Pass.apply(x, weight, bias, self.flags, self.rows, (layer, index))


class _Pass(torch.autograd.Function):
    """A linear layer that leaves its weight's gradient to :class:`_Sum`."""

    @staticmethod
    def forward(ctx, x, weight, bias, flags, rows, key):
        ctx.save_for_backward(x, weight)
        ctx.rows, ctx.key, ctx.size = rows, key, flags.shape
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        flag = torch.zeros(ctx.size, dtype=torch.float32, device="cpu")
        if traced() or torch._C._functorch.is_legacy_batchedtensor(dy):  # several outputs at once: each pass for itself
            return dx, dy.t() @ x, dy.sum(0), flag, None, None
        if not torch.is_grad_enabled():
            x, dy = x.detach(), dy.detach()
        ctx.rows[ctx.key] = x, dy
        flag[ctx.key] = 1
        return dx, None, None, flag, None, None


class _Sum(torch.autograd.Function):
    """Zeros (layers, passes) that stand for the weights in every pass; their gradient is that of the weights."""

    @staticmethod
    def forward(ctx, rows, count, *parameters):
        ctx.set_materialize_grads(False)
        ctx.rows = rows
        return torch.zeros(len(parameters) // 2, count, dtype=torch.float32, device="cpu")

    @staticmethod
    def backward(ctx, flags):
        gradients = []
        for layer, passes in enumerate([] if flags is None else flags.tolist()):
            if max(passes) > 1:
                raise RuntimeError("a block ran the shared Jumbo FFN more than once: its gradients would be wrong")
            own = [ctx.rows.pop((layer, i)) for i, flag in enumerate(passes) if flag]
            if own:
                x, dy = (torch.cat(parts) for parts in zip(*own, strict=True))
                gradients += [dy.t() @ x, dy.sum(0)]
            else:
                gradients += [None, None]
        return None, None, *(gradients or [None] * 4)
