"""The scan at inference: one chunk after the other, the state lying above the chunk's inputs in one buffer.

With the factors of :mod:`~jumbo_core.linear.factors`, the outputs of a chunk are one matrix product,

    y = e * [C | C B^T up to the diagonal] [S ; w]        S = exp(m) state, as rows (N, H*P) above those of w (q, H*P)

and what the chunk adds to the state, B^T w, is added to S where it lies. On the way to the next chunk S is multiplied
by the decay from the middle of this chunk to the middle of the next. So a chunk costs two products and three passes
over numbers that stay in a core's cache. Nothing is kept for a backward pass. Notation as in
:mod:`~jumbo_core.linear.chunks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from jumbo_core.linear import pairs
from jumbo_core.linear.steps import FLOOR, Steps, Workspace
from jumbo_core.modes import recorded

SHORTEST = 16  # steps of a chunk that is cut because its decay is steep; below, a matrix per head is the cheaper way
NUMBERS_AT_ONCE = 1 << 17  # inputs of a chunk, over samples and heads: 512 kB of fp32
PAIRED = 64  # and steps of a chunk there, whose cost grows with their square
CHUNKS_AT_ONCE = 16  # chunks whose factors are made together, and that share a form


def runs(x: torch.Tensor) -> bool:
    """Whether a scan of ``x`` takes this form: on a CPU, with nobody recording. A GPU wants few large calls."""
    return x.device.type == "cpu" and not recorded()


def scan(x, dt, A, B, C, D, state, chunk_size) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, last state) as :func:`ssd_scan` has them; ``state`` in the accumulation dtype."""
    length, heads, channels = x.shape[1:]
    y, states, dtype = x.new_empty(x.shape), torch.empty_like(state), state.dtype
    skip = None if D is None else D.to(dtype)[:, None].expand(heads, channels).contiguous()
    for some in few_samples(len(x), min(chunk_size, length) * heads * channels):

        def sink(begin: int, end: int, inputs: torch.Tensor, outputs: torch.Tensor, whole=y[some]) -> None:
            whole = whole[:, begin:end]
            if skip is not None:
                outputs = torch.addcmul(outputs, inputs, skip, out=whole if y.dtype == dtype else outputs)
            if outputs is not whole:
                whole.copy_(outputs)

        source = _slices(x[some], dtype)
        rest = (part[some].to(dtype) for part in (B, C))
        states[some] = scan_in_turn(source, sink, dt[some].to(dtype), A, *rest, state[some], chunk_size)
    return y, states


def few_samples(batch: int, numbers: int) -> Iterator[slice]:
    """Samples worked on at once, when a chunk of one holds so many numbers."""
    at_once = max(1, NUMBERS_AT_ONCE // max(1, numbers))
    for begin in range(0, batch, at_once):
        yield slice(begin, begin + at_once)


def _slices(x: torch.Tensor, dtype: torch.dtype) -> Callable[[int, int], torch.Tensor]:
    return lambda begin, end: x[:, begin:end].to(dtype)


def scan_in_turn(
    source: Callable[[int, int], torch.Tensor],
    sink: Callable[[int, int, torch.Tensor, torch.Tensor], None],
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    state: torch.Tensor,
    chunk_size: int,
) -> torch.Tensor:
    """Run the scan over a sequence whose inputs are made, and outputs used, while they are in the cache.

    Args:
        source: ``source(begin, end)`` gives the inputs x (b, end - begin, H, P) of those steps, a chunk at most.
        sink: ``sink(begin, end, x, y)`` takes these inputs and their outputs (same shape, without the skip); neither is
            kept, and the next call may find both overwritten.
        dt, A, B, C: as for :func:`ssd_scan`, dt, B and C and what ``source`` gives in the accumulation dtype.
        state: (b, H, P, N) before the first step; not modified.
        chunk_size: steps per chunk, fewer where decay is steep.

    Returns:
        the state after the last step (b, H, P, N).
    """
    heads, rows, space = dt.shape[2], None, Workspace()
    b, _, channels, states = state.shape
    buffer = dt.new_empty(b, states + min(chunk_size, dt.shape[1]), heads * channels)
    for begin, end, q in _spans(dt.shape[1], chunk_size):
        sums = (dt[:, begin:end] * A.to(dt.dtype)).double()
        whole, q = q, _mild(sums, q, dt.dtype)
        if not q:
            state, rows = state if rows is None else _from_rows(rows, heads), None
            for at in range(begin, end, whole):
                x, parts = (
                    source(at, at + whole),
                    (dt[:, at : at + whole], A, B[:, at : at + whole], C[:, at : at + whole]),
                )
                steps = Steps.cut(x, *parts, 0, whole, PAIRED if whole % PAIRED == 0 else whole, dt.dtype)
                y, _, state = pairs.forward(steps, state, space, False)
                sink(at, at + whole, x, y.flatten(1, 2))
            continue
        cut = (part[:, begin:end].unflatten(1, (-1, q)) for part in (dt, B, C))
        run = RunningScan(*cut, sums.unflatten(1, (-1, q)).cumsum(2), _to_rows(state) if rows is None else rows, buffer)
        for at in range(begin, end, q):
            x = source(at, at + q)
            sink(at, at + q, x, run.chunk(x))
        rows = run.state
    return state if rows is None else _from_rows(rows, heads)


class RunningScan:
    """A few chunks of one sequence: :meth:`chunk` runs the next, ``state`` is the one after all of them, as rows.

    Args:
        dt, B, C, sums: of those chunks, as in :class:`Steps`.
        rows: the state before (b, N, H*P), maybe where an earlier run left it in ``buffer``.
        buffer: (b, N + q or more, H*P), for the state and the inputs of a chunk below it.
    """

    def __init__(self, dt, B, C, sums, rows: torch.Tensor, buffer: torch.Tensor) -> None:
        (_, _, q, heads), states = dt.shape, rows.shape[1]
        middle = sums[:, :, -1:] / 2
        e = (sums - middle).exp()  # in fp64: an exponent of 60 in fp32 is off by 4e-6
        start = middle.exp()  # (b, c, 1, H)
        to_end = e[:, :, -1:, :, None].to(dt.dtype)
        # To the middle of the next chunk. For both at once the product of the two must be an ordinary number.
        to_next = start[:, 1:, :, :, None].to(dt.dtype)
        self.at_once = bool((sums[:, :, -1] >= FLOOR[dt.dtype]).all())
        if self.at_once:
            to_next *= to_end[:, :-1]
        mixing = torch.cat([C, (C @ B.transpose(2, 3)).tril_()], dim=3)  # (b, c, q, N + q)
        self.buffer = buffer[:, : states + q]
        self.state, self.inputs = self.buffer[:, :states], self.buffer[:, states:]
        self.y = dt.new_empty(self.inputs.shape)
        self.state_by_head, self.inputs_by_head, self.y_by_head = (
            part.unflatten(2, (heads, -1)) for part in (self.state, self.inputs, self.y)
        )
        torch.mul(rows.unflatten(2, (heads, -1)), start[:, 0, :, :, None].to(dt.dtype), out=self.state_by_head)
        # Views of every chunk, made at once: one by one they would cost as much as small operators.
        self.each = zip(
            (dt / e).to(dt.dtype)[..., None].unbind(1),
            mixing.unbind(1),
            B.transpose(2, 3).unbind(1),
            e.to(dt.dtype)[..., None].unbind(1),
            to_end.unbind(1),
            [*to_next.unbind(1), None],
            strict=True,
        )

    def chunk(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs, without the skip, of the next chunk x (b, q, H, P); they lie where the next ones will."""
        weights, mixing, back, e, to_end, to_next = next(self.each)
        torch.mul(x, weights, out=self.inputs_by_head)
        torch.bmm(mixing, self.buffer, out=self.y)
        torch.baddbmm(self.state, back, self.inputs, out=self.state)
        if to_next is None or not self.at_once:
            self.state_by_head.mul_(to_end)
        if to_next is not None:
            self.state_by_head.mul_(to_next)
        return self.y_by_head.mul_(e)


def _spans(length: int, chunk_size: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, steps per chunk) of runs of equal chunks; the last chunk may be shorter."""
    chunk_size = min(chunk_size, length)
    whole = length - length % chunk_size
    for begin in range(0, whole, CHUNKS_AT_ONCE * chunk_size):
        yield begin, min(begin + CHUNKS_AT_ONCE * chunk_size, whole), chunk_size
    if whole < length:
        yield whole, length, length - whole


def _mild(decays: torch.Tensor, q: int, dtype: torch.dtype) -> int:
    """Steps per chunk, q or a half, quarter, … of it, at which dt*A (b, L, H) let every chunk be split into factors.

    0 if there is none, as for NaN. Looks at the values.
    """
    while True:
        if bool(decays.unflatten(1, (-1, q)).sum(2).amin() >= 2 * FLOOR[dtype]):
            return q
        if q % 2 or q < 2 * SHORTEST:
            return 0
        q //= 2


def _to_rows(state: torch.Tensor) -> torch.Tensor:
    return state.permute(0, 3, 1, 2).flatten(2)


def _from_rows(rows: torch.Tensor, heads: int) -> torch.Tensor:
    return rows.unflatten(2, (heads, -1)).permute(0, 2, 3, 1).contiguous()
