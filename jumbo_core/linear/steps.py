"""What both forms of the chunked scan share: steps cut into chunks, buffers, and the state that travels between chunks.

Notation as in :mod:`~jumbo_core.linear.chunks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from jumbo_core.modes import recorded

# Decays below exp(FLOOR) are taken for it, a share of 1e-26 (1e-260 in fp64) that no sum here can notice: decays beyond
# that are denormal numbers, on which processors are up to a hundred times slower.
FLOOR = {torch.float32: -60.0, torch.float64: -600.0}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def stretches(length: int, size: int) -> Iterator[slice]:
    """Steps 0 to ``length`` in stretches of ``size``; a rest below an eighth of that goes with the one before it."""
    size = max(1, size)
    ends = list(range(size, length - size // 8, size))
    for begin, end in zip([0, *ends], [*ends, length], strict=True):
        yield slice(begin, end)


class Steps(NamedTuple):
    """A few chunks of q steps in the accumulation dtype."""

    x: torch.Tensor  # (b, c, q, H, P)
    dt: torch.Tensor  # (b, c, q, H)
    B: torch.Tensor  # (b, c, q, N)
    C: torch.Tensor  # (b, c, q, N)
    sums: torch.Tensor  # s, fp64 (b, c, q, H)

    @classmethod
    def cut(cls, x, dt, A, B, C, begin: int, end: int, q: int, dtype: torch.dtype) -> Steps:
        """Steps ``begin`` to ``end`` in chunks of q.

        Sums of logarithms over a stretch of steps are differences of running sums. In fp32 such a difference has lost
        the digits of the larger sum, so running sums are fp64: one number per step and head, next to nothing.
        """
        x, dt, B, C = (part[:, begin:end].to(dtype).unflatten(1, (-1, q)) for part in (x, dt, B, C))
        return cls(x, dt, B, C, (dt * A.to(dtype)).double().cumsum(2))

    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        """B and C as factors of batched products (b*c, q, N)."""
        return self.B.flatten(0, 1), self.C.flatten(0, 1)

    def total(self) -> torch.Tensor:
        """Decay over a whole chunk (b, c, H)."""
        return decay(self.sums[:, :, -1], self.x.dtype)


def decay(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """exp of an fp64 exponent, which is never taken below the floor."""
    return exponent.clamp(min=FLOOR[dtype]).exp().to(dtype)


class Workspace:
    """Buffers that one run of spans after the other writes into: fresh memory costs more than filling it.

    Called with a tensor of the wanted dtype and device, a name and a shape; gives None while somebody records what
    happens, for whom every result must be a new tensor.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, torch.Tensor] = {}

    def __call__(self, like: torch.Tensor, name: str, *shape: int) -> torch.Tensor | None:
        if recorded():
            return None
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self.buffers[name][:size].view(shape)


def advance(
    added: torch.Tensor, total: torch.Tensor, state: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hand the state from chunk to chunk: states before every chunk (b, c, H, P, N), into ``out``, and the last one.

    ``total`` (b, c, H): decay over a whole chunk.
    """
    total, count = total[..., None, None], added.shape[1]
    if recorded():
        before = []
        for k in range(count):
            before.append(state)
            state = torch.addcmul(added[:, k], total[:, k], state)
        return torch.stack(before, dim=1), state
    before = torch.empty_like(added) if out is None else out
    before[:, 0] = state
    for k in range(1, count):
        torch.addcmul(added[:, k - 1], total[:, k - 1], before[:, k - 1], out=before[:, k])
    return before, torch.addcmul(added[:, -1], total[:, -1], before[:, -1])
