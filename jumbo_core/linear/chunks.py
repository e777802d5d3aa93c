"""The chunked scan in plain torch, forward and backward by hand.

Notation: b samples, c chunks of q steps, H heads of P channels, N states; s_i is the sum of dt*A up to step i of its
chunk. Inside a chunk, with L_ij = exp(s_i - s_j) for j <= i, the outputs are ``((C B^T) * L) (dt x)``: matrix products.
Between chunks only the state travels.

Training memory: only the inputs and one state per chunk are kept. The decay matrices L (a number per pair of steps and
head) are made anew in the backward pass, a few chunks at a time, so that they stay in the processor's cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

# Pairs of steps, times heads and samples, worked on at once: 4 MB of fp32, what caches hold and few enough calls.
PAIRS_AT_ONCE = 1 << 20
# Decays below exp(FLOOR) are taken for it, a share of 1e-26 (1e-260 in fp64) that no sum here can notice: decays beyond
# that are denormal numbers, on which processors are up to a hundred times slower.
FLOOR = {torch.float32: -60.0, torch.float64: -600.0}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Span(NamedTuple):
    """What forward and backward both need of a few chunks; see :func:`_span`."""

    x: torch.Tensor  # (b, c, q, H, P)
    dt: torch.Tensor  # (b, c, q, H)
    B: torch.Tensor  # (b, c, q, N)
    C: torch.Tensor  # (b, c, q, N)
    u: torch.Tensor  # dt * x, heads first (b, c, H, q, P)
    pairs: torch.Tensor  # L at and below the diagonal, something finite above it (b, c, H, q, q)
    from_start: torch.Tensor  # decay since the chunk began (b, c, q, H)
    to_end: torch.Tensor  # decay until the chunk ends (b, c, q, H)
    scores: torch.Tensor  # C B^T, once for all heads, 0 above the diagonal (b, c, 1, q, q)


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
    outputs, starts, space = [], [], Workspace()
    dtype, batch, whole = state.dtype, x.shape[0], None
    for begin, end, q in spans(x, chunk_size):
        span = _span(x[:, begin:end], dt[:, begin:end], A, B[:, begin:end], C[:, begin:end], q, dtype, space)
        c, _, heads, channels = span.x.shape[1:]
        flat_B, flat_C = span.B.flatten(0, 1), span.C.flatten(0, 1)  # (b*c, q, N)
        # What the chunks add to the state: one matrix product for all heads.
        weighted = torch.mul(
            span.x, (span.dt * span.to_end)[..., None], out=space(span.x, "weighted", batch, c, q, heads, channels)
        ).reshape(batch * c, q, heads * channels)
        added = torch.bmm(
            weighted.transpose(1, 2), flat_B, out=space(x, "added", batch * c, heads * channels, flat_B.shape[-1])
        ).view(batch, c, heads, channels, flat_B.shape[-1])
        before, state = _advance(added, span.from_start[:, :, -1], state, None if keep_states else space)
        # What the chunks make of the state before them (b*c, q, H*P), and of their own steps (b*c*H, q, P).
        carried = torch.bmm(
            flat_C, before.reshape(batch * c, heads * channels, flat_B.shape[-1]).transpose(1, 2),
            out=space(x, "carried", batch * c, q, heads * channels),
        )  # fmt: skip
        inside = torch.bmm(
            _masked(span).view(batch * c * heads, q, q), span.u.reshape(batch * c * heads, q, channels),
            out=space(x, "inside", batch * c * heads, q, channels),
        )  # fmt: skip
        y = carried.view(span.x.shape).mul_(span.from_start[..., None])
        y = y.add_(inside.view(batch, c, heads, q, channels).transpose(2, 3))
        if D is not None:
            y = y.addcmul_(span.x, D.to(dtype)[:, None])
        if _functional():
            outputs.append(y.flatten(1, 2).to(x.dtype))
        else:
            whole = x.new_empty(x.shape) if whole is None else whole
            whole[:, begin:end].copy_(y.flatten(1, 2))
        if keep_states:
            starts.append(before)
    return _cat(outputs) if whole is None else whole, state, _cat(starts) if keep_states else None


class Workspace:
    """Buffers that one run of spans after the other writes into: fresh memory costs more than filling it.

    Called with a tensor of the wanted dtype and device, a name and a shape; gives None while somebody records what
    happens, for whom every result must be a new tensor.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, torch.Tensor] = {}

    def __call__(self, like: torch.Tensor, name: str, *shape: int) -> torch.Tensor | None:
        if _functional():
            return None
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = torch.empty(size, dtype=accumulation_dtype(like.dtype), device=like.device)
        return self.buffers[name][:size].view(shape)


def _advance(
    added: torch.Tensor, total: torch.Tensor, state: torch.Tensor, space: Workspace | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hand the state from chunk to chunk: states before every chunk (b, c, H, P, N) and the one after the last.

    ``total`` (b, c, H): decay over a whole chunk.
    """
    total, count = total[..., None, None], added.shape[1]
    if _functional():
        before = []
        for k in range(count):
            before.append(state)
            state = torch.addcmul(added[:, k], total[:, k], state)
        return torch.stack(before, dim=1), state
    before = torch.empty_like(added) if space is None else space(added, "before", *added.shape)
    before[:, 0] = state
    for k in range(1, count):
        torch.addcmul(added[:, k - 1], total[:, k - 1], before[:, k - 1], out=before[:, k])
    return before, torch.addcmul(added[:, -1], total[:, -1], before[:, -1])


def _masked(span: Span) -> torch.Tensor:
    """(C B^T) * L (b, c, H, q, q); in place where nobody needs L afterwards."""
    return span.pairs * span.scores if _functional() else span.pairs.mul_(span.scores)


def _functional() -> bool:
    """Whether somebody records what happens here: then nothing may be written into buffers."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing()


class ChunkedScan(torch.autograd.Function):
    """:func:`scan_chunks` with the backward pass written out."""

    @staticmethod
    def forward(ctx, x, dt, A, B, C, D, initial_state, chunk_size):
        train = any(ctx.needs_input_grad)
        y, state, starts = scan_chunks(
            x, dt, A, B, C, D, initial_state.to(accumulation_dtype(x.dtype)), chunk_size, keep_states=train
        )
        ctx.save_for_backward(x, dt, A, B, C, D, starts)
        ctx.chunk_size, ctx.state_dtype = chunk_size, initial_state.dtype
        return y, state

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_state):
        with torch.autocast(grad_y.device.type, enabled=False):  # backward may be called inside of one
            return ChunkedScan._backward(ctx, grad_y, grad_state)

    @staticmethod
    def _backward(ctx, grad_y, grad_state):
        x, dt, A, B, C, D, starts = ctx.saved_tensors
        dtype = starts.dtype
        grad_x, grad_dt = torch.empty_like(x), torch.empty_like(dt)
        grad_B, grad_C = torch.empty_like(B), torch.empty_like(C)
        grad_A = torch.zeros(A.shape, dtype=torch.float64, device=A.device)
        grad_D = None if D is None else torch.zeros(D.shape, dtype=torch.float64, device=D.device)
        grad_state, last, space = grad_state.to(dtype), starts.shape[1], Workspace()
        for begin, end, q in reversed(list(spans(x, ctx.chunk_size))):
            span = _span(x[:, begin:end], dt[:, begin:end], A, B[:, begin:end], C[:, begin:end], q, dtype, space)
            count = span.x.shape[1]
            before = starts[:, last - count : last]
            last -= count
            dy = grad_y[:, begin:end].to(dtype).unflatten(1, (-1, q))  # (b, c, q, H, P)
            dx, ddt, da, dB, dC, grad_state = _span_backward(span, A.to(dtype), before, dy, grad_state)
            if D is not None:
                dx = torch.addcmul(dx, dy, D.to(dtype)[:, None])
                grad_D += (dy * span.x).sum(dim=(0, 1, 2, 4))
            grad_A += (da * span.dt).sum(dim=(0, 1, 2))
            for whole, part in ((grad_x, dx), (grad_dt, ddt), (grad_B, dB), (grad_C, dC)):
                whole[:, begin:end] = part.flatten(1, 2)
        grad_D = None if D is None else grad_D.to(D.dtype)
        return grad_x, grad_dt, grad_A.to(A.dtype), grad_B, grad_C, grad_D, grad_state.to(ctx.state_dtype), None


def _span_backward(span: Span, A: torch.Tensor, before: torch.Tensor, dy: torch.Tensor, grad_state: torch.Tensor):
    """Gradients of a few chunks from those of their outputs ``dy`` and of the state after them."""
    heads = span.x.shape[3:]
    seen = (dy * span.from_start[..., None]).flatten(3)  # what outputs ask of the state before (b, c, q, H*P)
    asked = (seen.transpose(2, 3) @ span.C).unflatten(2, heads)  # (b, c, H, P, N)
    total = span.from_start[:, :, -1]
    # Gradients of states travel backwards as states do forwards.
    after, grad_state = _advance(asked.flip(1), total.flip(1), grad_state)
    after = after.flip(1)  # of the state after each chunk (b, c, H, P, N)

    dy_heads = dy.transpose(2, 3).contiguous()  # (b, c, H, q, P)
    from_pairs = (dy_heads @ span.u.transpose(3, 4)).mul_(span.pairs)  # (b, c, H, q, q)
    dscores = from_pairs.sum(dim=2).tril_()  # (b, c, q, q)
    from_pairs.mul_(span.scores)
    pushed = (span.B @ after.flatten(2, 3).transpose(2, 3)).unflatten(3, heads)  # (b, c, q, H, P)
    du = pushed * span.to_end[..., None]
    du.add_((_masked(span).transpose(3, 4) @ dy_heads).transpose(2, 3))
    dB = dscores.transpose(2, 3) @ span.C
    dB += (span.x * (span.dt * span.to_end)[..., None]).flatten(3) @ after.flatten(2, 3)
    dC = dscores @ span.B
    dC += seen @ before.flatten(2, 3)

    # Gradient of the running sums s: rows gain, columns lose; the diagonal of L is 1 whatever s is and cancels.
    carried = (span.C @ before.flatten(2, 3).transpose(2, 3)).unflatten(3, heads)
    ends = (span.x * pushed).sum(-1) * (span.dt * span.to_end)  # (b, c, q, H)
    ds = (from_pairs.sum(4) - from_pairs.sum(3)).transpose(2, 3) + (dy * carried).sum(-1) * span.from_start - ends
    ds[:, :, -1] += ends.sum(2) + total * (before * after).sum(dim=(3, 4))
    da = ds.double().flip(2).cumsum(2).flip(2).to(ds.dtype)  # s_i holds every dt*A up to i
    ddt = (du * span.x).sum(-1) + da * A
    return du.mul_(span.dt[..., None]), ddt, da, dB, dC, grad_state


def _span(x, dt, A, B, C, q: int, dtype: torch.dtype, space: Workspace) -> Span:
    """Cut steps into chunks of q and compute their decays, in the accumulation dtype."""
    x, dt, B, C = (part.to(dtype).unflatten(1, (-1, q)) for part in (x, dt, B, C))
    batch, c, _, heads, channels = x.shape
    # Sums of logarithms over a stretch of steps are differences of running sums. In fp32 such a difference has lost the
    # digits of the larger sum, so running sums are fp64: one number per step and head, next to nothing.
    sums = (dt * A.to(dtype)).double().cumsum(2)  # (b, c, q, H)
    by_head = sums.transpose(2, 3).contiguous()
    high = by_head.to(dtype)
    pairs = torch.sub(high[..., :, None], high[..., None, :], out=space(x, "pairs", batch, c, heads, q, q))
    if dtype != torch.float64:  # fp64 = high + low parts in fp32; their differences keep the digits that matter
        low = (by_head - high).to(dtype)
        pairs = pairs.add_(low[..., :, None]).sub_(low[..., None, :])
    # Above the diagonal an exponential could be infinite: cut off before it, zeroed by the scores after.
    floor = FLOOR[dtype]
    pairs = pairs.clamp(floor, 0.0).exp() if _functional() else pairs.clamp_(floor, 0.0).exp_()
    u = torch.mul(x.transpose(2, 3), dt.transpose(2, 3)[..., None], out=space(x, "u", batch, c, heads, q, channels))
    return Span(
        x=x,
        dt=dt,
        B=B,
        C=C,
        u=u,
        pairs=pairs,
        from_start=sums.to(dtype).clamp(min=floor).exp(),
        to_end=(sums[:, :, -1:] - sums).to(dtype).clamp(min=floor).exp(),
        scores=(C @ B.transpose(2, 3)).tril()[:, :, None],
    )


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
