"""The chunked scan in plain torch, forward and backward by hand.

Notation: b samples, c chunks of q steps, H heads of P channels, N states; s_i is the sum of dt*A up to step i of its
chunk. Inside a chunk, with L_ij = exp(s_i - s_j) for j <= i, the outputs are ``((C B^T) * L) (dt x)``: matrix products.
Between chunks only the state travels.

L takes one of two forms: two factors, one product for all heads (:mod:`~jumbo_core.linear.factors`), wherever decay in
a chunk is mild enough for it; else a matrix per head (:mod:`~jumbo_core.linear.pairs`).

Training memory: only the inputs and one state per chunk are kept. All else is made anew in the backward pass, a few
chunks at a time, so that it stays in the processor's cache.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from jumbo_core.linear import factors, pairs, running
from jumbo_core.linear.steps import Steps, Workspace, accumulation_dtype
from jumbo_core.modes import recorded

# Pairs of steps, times heads and samples, worked on at once: 4 MB of fp32, what caches hold and few enough calls.
PAIRS_AT_ONCE = 1 << 20


def scan_chunks(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    state: torch.Tensor,
    chunk_size: int,
    *,
    keep_states: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(y, last state, states before every chunk (b, chunks, H, P, N) if kept); arguments as for :func:`ssd_scan`."""
    if running.runs(x) and not keep_states and x.numel():
        return *running.scan(x, dt, A, B, C, D, state, chunk_size), None
    outputs, starts, space, whole = [], [], Workspace(), None
    for begin, end, q in spans(x, chunk_size):
        steps = Steps.cut(x, dt, A, B, C, begin, end, q, state.dtype)
        out = None
        if not recorded():
            whole = torch.empty_like(x) if whole is None else whole
            out = whole[:, begin:end].unflatten(1, (-1, q)) if x.dtype == state.dtype else None
        y, before, state = form_of(steps).forward(steps, state, space, keep_states, out)
        if D is not None:
            y = y.addcmul_(steps.x, D.to(y.dtype)[:, None])
        if whole is None:
            outputs.append(y.flatten(1, 2).to(x.dtype))
        elif out is None:
            whole[:, begin:end].copy_(y.flatten(1, 2))
        if keep_states:
            starts.append(before)
    return _cat(outputs) if whole is None else whole, state, _cat(starts) if keep_states else None


def form_of(steps: Steps):
    """The module whose ``forward`` and ``backward`` these steps take.

    Factors need a look at the values. A recording cannot look, and on a GPU looking would wait for it.
    """
    return factors if not recorded() and steps.x.device.type == "cpu" and factors.fit(steps) else pairs


class ChunkedScan(torch.autograd.Function):
    """:func:`scan_chunks` with the backward pass written out."""

    @staticmethod
    def forward(ctx, x, dt, A, B, C, D, initial_state, chunk_size):
        train = any(ctx.needs_input_grad)
        y, state, starts = scan_chunks(
            x, dt, A, B, C, D, initial_state.to(accumulation_dtype(x.dtype)), chunk_size, keep_states=train
        )
        ctx.save_for_backward(x, dt, A, B, C, D, starts, state)
        ctx.chunk_size, ctx.state_dtype = chunk_size, initial_state.dtype
        return y, state

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_state):
        with torch.autocast(grad_y.device.type, enabled=False):  # backward may be called inside of one
            return ChunkedScan._backward(ctx, grad_y, grad_state)

    @staticmethod
    def _backward(ctx, grad_y, grad_state):
        x, dt, A, B, C, D, starts, state = ctx.saved_tensors
        dtype = starts.dtype
        grad_x, grad_dt = torch.empty_like(x), torch.empty_like(dt)
        grad_B, grad_C = torch.empty_like(B), torch.empty_like(C)
        grad_A = torch.zeros(A.shape, dtype=torch.float64, device=A.device)
        grad_D = None if D is None else torch.zeros(D.shape, dtype=torch.float64, device=D.device)
        grad_state, last, space = grad_state.to(dtype), starts.shape[1], Workspace()
        for begin, end, q in reversed(list(spans(x, ctx.chunk_size))):
            steps = Steps.cut(x, dt, A, B, C, begin, end, q, dtype)
            count = steps.x.shape[1]
            before = starts[:, last - count : last]
            last -= count
            dy = grad_y[:, begin:end].to(dtype).unflatten(1, (-1, q))  # (b, c, q, H, P)
            dx, ddt, ds, dB, dC, grad_state = form_of(steps).backward(steps, before, state, dy, grad_state, space)
            state = before[:, 0]
            da = ds.double().flip(2).cumsum(2).flip(2).to(dtype)  # s_i holds every dt*A up to i
            ddt = torch.addcmul(ddt, da, A.to(dtype))
            if D is not None:
                dx = torch.addcmul(dx, dy, D.to(dtype)[:, None])
                grad_D += (dy * steps.x).sum(dim=(0, 1, 2, 4))
            grad_A += (da * steps.dt).sum(dim=(0, 1, 2))
            for whole, part in ((grad_x, dx), (grad_dt, ddt), (grad_B, dB), (grad_C, dC)):
                whole[:, begin:end] = part.flatten(1, 2)
        grad_D = None if D is None else grad_D.to(D.dtype)
        return grad_x, grad_dt, grad_A.to(A.dtype), grad_B, grad_C, grad_D, grad_state.to(ctx.state_dtype), None


def spans(x: torch.Tensor, chunk_size: int):
    """(begin, end, steps per chunk) of the runs of equal chunks worked on at once; the last chunk may be shorter."""
    batch, length, heads, _ = x.shape
    chunk_size = min(chunk_size, length)
    whole = length - length % chunk_size
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        at_once = max(whole, 1)  # a small graph, for any batch; the compiler blocks the work itself
    else:
        at_once = max(1, PAIRS_AT_ONCE // max(1, batch * heads * chunk_size * chunk_size)) * chunk_size
    for begin in range(0, whole, at_once):
        yield begin, min(begin + at_once, whole), chunk_size
    if whole < length:
        yield whole, length, length - whole


def _cat(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
