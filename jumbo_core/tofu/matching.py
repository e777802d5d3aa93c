"""Which tokens leave and whom they join: ToMe's bipartite matching, behind any number of protected prefix tokens.

Source: ToMe (arXiv 2210.09461) and its released code; ToFu (arXiv 2312.01026) uses it with every operator.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch.nn import functional as F

from jumbo_core import checks

ORDERS = ("position", "released")


class Matching(NamedTuple):
    """Result of :func:`match`: indices (long) into the token sequence, prefix included. N tokens become K = N - r.

    Attributes:
        sources: (B, r) positions of the tokens that leave, the first choice first.
        destinations: (B, r) positions of the tokens they join; several sources may join one.
        kept: (B, K) positions of the tokens that stay, in the order they stand in afterwards.
        place: (B, N) for each token, where its group stands among the kept: what ``unmerge`` gathers.
        num_tokens: N.
    """

    sources: torch.Tensor
    destinations: torch.Tensor
    kept: torch.Tensor
    place: torch.Tensor
    num_tokens: int


@torch.no_grad()
def match(
    keys: torch.Tensor,
    r: int,
    *,
    protected: int,
    importance: torch.Tensor | None = None,
    order: str = "position",
) -> Matching:
    """Choose r tokens that leave and the token each of them joins.

    Behind the prefix, even positions of the sequence (prefix counted) are sources and odd ones destinations, as in
    the released ToMe with its class token. Each source looks for the destination whose key has the largest cosine; the
    r best edges are taken. Deterministic: on ties the lower position wins, and no random number is drawn. Cosines are
    computed in fp32 (fp64 for fp64 keys) whatever autocast says.

    Args:
        keys: (B, N, D), or (B, H, N, D), which is averaged over heads.
        r: how many tokens leave. 0 gives the identity.
        protected: number of leading tokens that neither leave nor are joined (class token, registers, Jumbo slices).
        importance: (B, N), optional. Then the r least important sources leave, each still to its most similar
            destination. Entries of other tokens are not read.
        order: of the kept tokens. "position" (default) keeps them rising, which scans and 2-D neighbourhoods want;
            "released" is the order of the released ToMe: prefix, sources that stay, destinations. It decides which
            tokens are sources in the next block, so its published numbers need it.

    Raises:
        ValueError: r that is no integer, negative, or more than half of the unprotected tokens; keys or importance
            that are not finite (not checked while compiling); shapes that do not fit; an unknown order.
    """
    if keys.ndim not in (3, 4):
        raise ValueError(f"keys must be (B, N, D) or (B, H, N, D), got {tuple(keys.shape)}")
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
    if keys.ndim == 4:
        keys = keys.sum(1)  # the direction of the mean, which is all that a cosine reads
    batch, tokens, _ = keys.shape
    r, protected = checks.integer("r", r, 0), checks.integer("protected", protected, 0)
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(map(repr, ORDERS))}, got {order!r}")
    if protected > tokens:
        raise ValueError(f"protected is {protected} but there are only {tokens} tokens")
    if r > (possible := largest_r(tokens - protected)):
        raise ValueError(
            f"asked to remove r={r} tokens, but at most {possible} of {tokens - protected} unprotected tokens "
            f"({tokens} in all, {protected} protected) can leave in one step: half of them; choose r <= {possible}"
        )
    if importance is not None and importance.shape != (batch, tokens):
        raise ValueError(f"importance must be (B, N) = {(batch, tokens)}, got {tuple(importance.shape)}")

    position = torch.arange(tokens, device=keys.device).expand(batch, tokens)
    if r == 0:
        none = position[:, :0]
        return Matching(none, none, position, position, tokens)

    first_source = protected + protected % 2
    first_destination = protected + 1 - protected % 2
    with _no_autocast(keys.device.type):
        unit = F.normalize(keys, dim=-1)
        cosine = unit[:, first_source::2] @ unit[:, first_destination::2].transpose(1, 2)  # (B, sources, destinations)
    nearest = cosine.argmax(-1)  # argmax promises the first of equals, max does not
    best = cosine.gather(-1, nearest.unsqueeze(-1)).squeeze(-1)
    _check_finite("keys", best)
    if importance is None:
        leaving = _first(best, r, largest=True)
    else:
        importance = importance[:, first_source::2]
        _check_finite("importance", importance)
        leaving = _first(importance, r, largest=False)
    sources = leaving * 2 + first_source
    destinations = nearest.gather(1, leaving) * 2 + first_destination

    return _settle(sources, destinations, tokens, protected, order)


def _settle(
    sources: torch.Tensor, destinations: torch.Tensor, tokens: int, protected: int = 0, order: str = "position"
) -> Matching:
    """The matching of these edges, each (B, r): who is kept and where everyone stands."""
    position = torch.arange(tokens, device=sources.device).expand(sources.shape[0], tokens)
    stays = torch.ones_like(position).scatter_(1, sources, 0)
    rank = _rank(stays, protected, order)
    kept_count = tokens - sources.shape[1]
    # Scattered rather than sorted: tokens that leave all write to one extra slot, which is cut off.
    slot = rank.scatter(1, sources, kept_count)
    kept = position.new_empty(position.shape[0], kept_count + 1).scatter_(1, slot, position)[:, :kept_count]
    place = rank.gather(1, position.scatter(1, sources, destinations))
    return Matching(sources, destinations, kept, place, tokens)


def largest_r(num_patches: int) -> int:
    """How many of ``num_patches`` unprotected tokens can leave in one step: half of them, rounded down."""
    return num_patches // 2


def _rank(stays: torch.Tensor, protected: int, order: str) -> torch.Tensor:
    """Where each token that stays will stand: ``stays`` (B, N) of 0 and 1 -> (B, N); other entries mean nothing."""
    if order == "position":
        return stays.cumsum(1) - 1
    parity = torch.arange(stays.shape[1], device=stays.device) % 2
    front = (torch.arange(stays.shape[1], device=stays.device) < protected).to(stays.dtype)
    sources, destinations = stays * (1 - parity) * (1 - front), stays * parity * (1 - front)
    in_front, in_middle = front.cumsum(0) - 1, protected + sources.cumsum(1) - 1
    at_end = protected + sources.sum(1, keepdim=True) + destinations.cumsum(1) - 1
    return torch.where(front.bool(), in_front, torch.where(parity.bool(), at_end, in_middle))


def _first(values: torch.Tensor, r: int, *, largest: bool) -> torch.Tensor:
    """Indices (B, r) of the r largest or smallest of ``values`` (B, S), the best first, the lower index on ties."""
    if torch.onnx.is_in_onnx_export():
        # There is no stable sort in ONNX, but its TopK promises the lower index on ties, which torch's does not.
        return values.topk(r, dim=1, largest=largest).indices
    return values.argsort(dim=1, descending=largest, stable=True)[:, :r]


def _no_autocast(device_type: str) -> AbstractContextManager:
    """Autocast off; nothing to enter where it is off already, for entering costs as much as an operation."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def _check_finite(name: str, values: torch.Tensor) -> None:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return
    if not math.isfinite(values.sum(dtype=torch.float64)):  # a sum passes NaN and infinity on
        raise ValueError(f"{name} must be finite, got NaN or infinite values: tokens cannot be ranked by them")
