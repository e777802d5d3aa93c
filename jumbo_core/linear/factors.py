"""The chunked scan with every decay split into two factors: no number per pair of steps and head.

``exp(s_i - s_j) = e_i / e_j`` with ``e_i = exp(s_i - m)``, m half way down the chunk. Then the outputs of a chunk are

    y_i = e_i * (sum over j <= i of (C_i B_j) w_j  +  C_i exp(m) state)        w_j = dt_j x_j / e_j

where C B^T is the same for all heads: one matrix product for all of them, and weights of a step instead of a pair. All
terms of a sum carry the same factor, so it costs no digits, as long as the factors themselves are ordinary numbers: s
must not fall by more than twice the floor in a chunk (:func:`fit`). Notation as in :mod:`~jumbo_core.linear.chunks`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from jumbo_core.linear.steps import FLOOR, Steps, Workspace, advance


def fit(steps: Steps) -> bool:
    """Whether these steps decay little enough; looks at values. NaN does not fit."""
    return bool(steps.sums[:, :, -1].amin() >= 2 * FLOOR[steps.x.dtype]) if steps.sums.numel() else True


class Factors(NamedTuple):
    """What forward and backward both need."""

    e: torch.Tensor  # (b, c, q, H)
    inverse: torch.Tensor  # 1 / e
    start: torch.Tensor  # exp(m) (b, c, 1, H)
    end: torch.Tensor  # e of the last step, exp of the chunk's s less m (b, c, H)
    w: torch.Tensor  # (b*c, q, H*P)
    scores: torch.Tensor  # C B^T, 0 above the diagonal (b*c, q, q)


def forward(
    steps: Steps, state: torch.Tensor, space: Workspace, keep_states: bool, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(outputs (b, c, q, H, P) without the skip, in ``out`` if given; states before the chunks, state after them)."""
    x, (flat_B, flat_C) = steps.x, steps.flat()
    batch, c, q, heads, channels = x.shape
    wide, states = heads * channels, flat_B.shape[-1]
    factors = _factors(steps, space)
    # What the chunks add to the state.
    added = torch.bmm(factors.w.transpose(1, 2), flat_B, out=space(x, "added", batch * c, wide, states))
    added = added.view(batch, c, heads, channels, states).mul_(factors.end[..., None, None])
    before, state = advance(added, steps.total(), state, None if keep_states else space(x, "before", *added.shape))
    direct = out is not None and out.is_contiguous()  # one sample, or all of the steps
    y = out.view(batch * c, q, wide) if direct else space(x, "y", batch * c, q, wide)
    torch.bmm(factors.scores, factors.w, out=y)
    torch.baddbmm(y, flat_C, _started(before, factors, space).transpose(1, 2), out=y)
    return torch.mul(y.view(x.shape), factors.e[..., None], out=out), before, state


def backward(
    steps: Steps,
    before: torch.Tensor,
    state: torch.Tensor,
    dy: torch.Tensor,
    grad_state: torch.Tensor,
    space: Workspace,
):
    """Gradients from those of the outputs ``dy`` and of the state after the chunks, which is ``state``.

    Returns those of x, dt (directly, without its part in s), s, B, C and of the state before the chunks.
    """
    x, (flat_B, flat_C) = steps.x, steps.flat()
    batch, c, q, heads, channels = x.shape
    wide, states = heads * channels, flat_B.shape[-1]
    factors = _factors(steps, space)
    started = _started(before, factors, space)  # (b*c, H*P, N)
    g = torch.mul(dy, factors.e[..., None], out=space(x, "g", *x.shape)).view(batch * c, q, wide)
    asked = torch.bmm(g.transpose(1, 2), flat_C, out=space(x, "asked", batch * c, wide, states))
    asked = asked.view(before.shape).mul_(factors.start.transpose(2, 3)[..., None])
    # Gradients of states travel backwards as states do forwards.
    after, grad_state = advance(asked.flip(1), steps.total().flip(1), grad_state)
    after = after.flip(1)  # of the state after each chunk (b, c, H, P, N)
    following = torch.cat([before[:, 1:], state[:, None]], dim=1)
    at_end = (after * following).sum(dim=(3, 4))  # what s of a chunk's last step gets from the state (b, c, H)
    ended = after.mul_(factors.end[..., None, None]).view(batch * c, wide, states)

    dscores = torch.bmm(g, factors.w.transpose(1, 2)).tril_()  # above the diagonal anything, infinite maybe
    dC = torch.baddbmm(torch.bmm(dscores, flat_B), g, started)
    dB = torch.baddbmm(torch.bmm(dscores.transpose(1, 2), flat_C), factors.w, ended)
    dw = torch.bmm(factors.scores.transpose(1, 2), g, out=space(x, "dw", batch * c, q, wide))
    dw = torch.baddbmm(dw, flat_B, ended.transpose(1, 2), out=dw).view(x.shape)
    ddt = (dw * x).sum(-1).mul_(factors.inverse)  # (b, c, q, H)
    # Gradient of s: what e_i multiplies, less what it divides; the part of a step in its own output cancels.
    y = torch.bmm(factors.scores, factors.w, out=space(x, "y", batch * c, q, wide))
    torch.baddbmm(y, flat_C, started.transpose(1, 2), out=y)
    ds = y.mul_(g).view(x.shape).sum(-1) - ddt * steps.dt
    ds[:, :, -1] += at_end
    dx = dw * (steps.dt * factors.inverse)[..., None]
    return dx, ddt, ds, dB.view(steps.B.shape), dC.view(steps.C.shape), grad_state


def _factors(steps: Steps, space: Workspace) -> Factors:
    x, sums, (flat_B, flat_C) = steps.x, steps.sums, steps.flat()
    batch, c, q, heads, channels = x.shape
    middle = sums[:, :, -1:] / 2  # (b, c, 1, H)
    e = (sums - middle).exp()  # in fp64: an exponent of 60 in fp32 is off by 4e-6
    inverse = e.reciprocal().to(x.dtype)
    w = torch.mul(x, (steps.dt * inverse)[..., None], out=space(x, "w", *x.shape))
    e = e.to(x.dtype)
    return Factors(
        e=e,
        inverse=inverse,
        start=middle.exp().to(x.dtype),
        end=e[:, :, -1],
        w=w.view(batch * c, q, heads * channels),
        scores=torch.bmm(flat_C, flat_B.transpose(1, 2)).tril_(),
    )


def _started(before: torch.Tensor, factors: Factors, space: Workspace) -> torch.Tensor:
    """exp(m) state (b*c, H*P, N), in place of what the chunks added, which has gone into the state by now."""
    start = factors.start.transpose(2, 3)[..., None]  # (b, c, H, 1, 1)
    return torch.mul(before, start, out=space(before, "added", *before.shape)).flatten(2, 3).flatten(0, 1)
