"""The chunked scan with a decay for every pair of steps and head: right for any decay.

Notation as in :mod:`~jumbo_core.linear.chunks`. What a compiler or an exporter records takes this form too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from jumbo_core.linear.steps import FLOOR, Steps, Workspace, advance, decay
from jumbo_core.modes import recorded


class Decays(NamedTuple):
    """What forward and backward both need."""

    u: torch.Tensor  # dt * x, heads first (b, c, H, q, P)
    pairs: torch.Tensor  # L at and below the diagonal, something finite above it (b, c, H, q, q)
    from_start: torch.Tensor  # decay since the chunk began (b, c, q, H)
    to_end: torch.Tensor  # decay until the chunk ends (b, c, q, H)
    scores: torch.Tensor  # C B^T, once for all heads, 0 above the diagonal (b, c, 1, q, q)

    def masked(self) -> torch.Tensor:
        """(C B^T) * L (b, c, H, q, q); in place where nobody needs L afterwards."""
        return self.pairs * self.scores if recorded() else self.pairs.mul_(self.scores)


def forward(
    steps: Steps, state: torch.Tensor, space: Workspace, keep_states: bool, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(outputs (b, c, q, H, P) without the skip, in ``out`` if given; states before the chunks, state after them)."""
    x, (flat_B, flat_C) = steps.x, steps.flat()
    batch, c, q, heads, channels = x.shape
    decays = _decays(steps, space)
    # What the chunks add to the state: one matrix product for all heads.
    weighted = torch.mul(
        x, (steps.dt * decays.to_end)[..., None], out=space(x, "weighted", batch, c, q, heads, channels)
    ).reshape(batch * c, q, heads * channels)
    added = torch.bmm(
        weighted.transpose(1, 2), flat_B, out=space(x, "added", batch * c, heads * channels, flat_B.shape[-1])
    ).view(batch, c, heads, channels, flat_B.shape[-1])
    before, state = advance(
        added, decays.from_start[:, :, -1], state, None if keep_states else space(x, "before", *added.shape)
    )
    # What the chunks make of the state before them (b*c, q, H*P), and of their own steps (b*c*H, q, P).
    carried = torch.bmm(
        flat_C, before.reshape(batch * c, heads * channels, flat_B.shape[-1]).transpose(1, 2),
        out=space(x, "carried", batch * c, q, heads * channels),
    )  # fmt: skip
    inside = torch.bmm(
        decays.masked().view(batch * c * heads, q, q), decays.u.reshape(batch * c * heads, q, channels),
        out=space(x, "inside", batch * c * heads, q, channels),
    )  # fmt: skip
    y = carried.view(x.shape).mul_(decays.from_start[..., None])
    return torch.add(y, inside.view(batch, c, heads, q, channels).transpose(2, 3), out=out), before, state


def backward(
    steps: Steps,
    before: torch.Tensor,
    state: torch.Tensor,
    dy: torch.Tensor,
    grad_state: torch.Tensor,
    space: Workspace,
):
    """Gradients from those of the outputs ``dy`` and of the state after the chunks.

    Returns those of x, dt (directly, without its part in s), s, B, C and of the state before the chunks.
    """
    heads = steps.x.shape[3:]
    span = _decays(steps, space)
    seen = (dy * span.from_start[..., None]).flatten(3)  # what outputs ask of the state before (b, c, q, H*P)
    asked = (seen.transpose(2, 3) @ steps.C).unflatten(2, heads)  # (b, c, H, P, N)
    total = span.from_start[:, :, -1]
    # Gradients of states travel backwards as states do forwards.
    after, grad_state = advance(asked.flip(1), total.flip(1), grad_state)
    after = after.flip(1)  # of the state after each chunk (b, c, H, P, N)

    dy_heads = dy.transpose(2, 3).contiguous()  # (b, c, H, q, P)
    from_pairs = (dy_heads @ span.u.transpose(3, 4)).mul_(span.pairs)  # (b, c, H, q, q)
    dscores = from_pairs.sum(dim=2).tril_()  # (b, c, q, q)
    from_pairs.mul_(span.scores)
    pushed = (steps.B @ after.flatten(2, 3).transpose(2, 3)).unflatten(3, heads)  # (b, c, q, H, P)
    du = pushed * span.to_end[..., None]
    du.add_((span.masked().transpose(3, 4) @ dy_heads).transpose(2, 3))
    dB = dscores.transpose(2, 3) @ steps.C
    dB += (steps.x * (steps.dt * span.to_end)[..., None]).flatten(3) @ after.flatten(2, 3)
    dC = dscores @ steps.B
    dC += seen @ before.flatten(2, 3)

    # Gradient of the running sums s: rows gain, columns lose; the diagonal of L is 1 whatever s is and cancels.
    carried = (steps.C @ before.flatten(2, 3).transpose(2, 3)).unflatten(3, heads)
    ends = (steps.x * pushed).sum(-1) * (steps.dt * span.to_end)  # (b, c, q, H)
    ds = (from_pairs.sum(4) - from_pairs.sum(3)).transpose(2, 3) + (dy * carried).sum(-1) * span.from_start - ends
    ds[:, :, -1] += ends.sum(2) + total * (before * after).sum(dim=(3, 4))
    ddt = (du * steps.x).sum(-1)
    return du.mul_(steps.dt[..., None]), ddt, ds, dB, dC, grad_state


def _decays(steps: Steps, space: Workspace) -> Decays:
    x, sums, dtype = steps.x, steps.sums, steps.x.dtype
    batch, c, q, heads, channels = x.shape
    by_head = sums.transpose(2, 3).contiguous()
    high = by_head.to(dtype)
    pairs = torch.sub(high[..., :, None], high[..., None, :], out=space(x, "pairs", batch, c, heads, q, q))
    if dtype != torch.float64:  # fp64 = high + low parts in fp32; their differences keep the digits that matter
        low = (by_head - high).to(dtype)
        pairs = pairs.add_(low[..., :, None]).sub_(low[..., None, :])
    # Above the diagonal an exponential could be infinite: cut off before it, zeroed by the scores after.
    floor = FLOOR[dtype]
    pairs = pairs.clamp(floor, 0.0).exp() if recorded() else pairs.clamp_(floor, 0.0).exp_()
    return Decays(
        u=torch.mul(
            x.transpose(2, 3), steps.dt.transpose(2, 3)[..., None], out=space(x, "u", batch, c, heads, q, channels)
        ),
        pairs=pairs,
        from_start=decay(sums, dtype),
        to_end=decay(sums[:, :, -1:] - sums, dtype),
        scores=(steps.C @ steps.B.transpose(2, 3)).tril()[:, :, None],
    )
