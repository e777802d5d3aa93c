"""Matching on a picture's grid: every small region keeps one token, chosen at random, and the rest may leave.

Source: Token Merging for Fast Stable Diffusion (arXiv 2303.17604), which ToFu (arXiv 2312.01026) follows there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from jumbo_core import checks
from jumbo_core.tofu.matching import Matching, _check_finite, _first, _settle


def match_regions(
    tokens: torch.Tensor,
    height: int,
    width: int,
    ratio: float,
    *,
    region: int | Sequence[int] = (2, 2),
    generator: torch.Generator,
) -> Matching:
    """Choose the share ``ratio`` of a grid's tokens that leave and the token each of them joins.

    One token of every region is a destination, the same in all samples (so that both halves of a batch for
    classifier-free guidance are treated alike); the others look for the destination of largest cosine, anywhere on the
    grid, and the best ``floor(ratio * N)`` of them leave. This is :func:`region_destinations` followed by
    :func:`match_to`.

    Args:
        tokens: (B, N, D), row by row of a grid of N = height * width.
        height, width: of the grid.
        ratio: share that leaves, in [0, 1 - 1/(sy*sx)]. 0 gives the identity.
        region: (sy, sx), or one number for both. The regions at the lower and right edge hold what is left there.
        generator: on the CPU, advanced by the draw. No other random state is touched.

    Raises:
        ValueError: N that is not height * width; a ratio outside its range, or more tokens than this grid can spare
            (asked and possible are named); tokens that are not finite (not checked while compiling).
        TypeError: a generator that is none.
    """
    height, width = checks.integer("height", height), checks.integer("width", width)
    if tokens.ndim != 3 or tokens.shape[1] != height * width:
        raise ValueError(
            f"tokens must be (B, N, D) with N = height * width = {height} * {width} = {height * width}, "
            f"got {tuple(tokens.shape)}"
        )
    sy, sx = checks.pair("region", region)
    r = count_for(ratio, height, width, region=(sy, sx))
    return match_to(tokens, region_destinations(height, width, region=(sy, sx), generator=generator), r)


def check_ratio(ratio: float, region: tuple[int, int], name: str = "ratio") -> float:
    """``ratio`` as a float in [0, 1 - 1/(sy*sx)]: with one token kept per region, no more can leave."""
    sy, sx = region
    most = 1 - 1 / (sy * sx)
    try:
        value = math.nan if isinstance(ratio, (bool, str)) else float(ratio)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value <= most:
        raise ValueError(
            f"{name} must lie in [0, {most:g}]: each {sy}x{sx} region keeps a token, so at most {most:g} of them "
            f"can leave; asked for {ratio!r}. Choose less, or larger regions"
        )
    return value


def count_for(ratio: float, height: int, width: int, *, region: tuple[int, int]) -> int:
    """How many tokens of the grid leave: ``floor(ratio * height * width)``.

    Raises:
        ValueError: a ratio outside its range, or more than this grid can spare: where regions do not divide it, those
            at its edges are smaller and keep more.
    """
    sy, sx = region
    tokens = height * width
    # 0.29 * 100 is a little less than 29.
    r = math.floor(check_ratio(ratio, region) * tokens + 1e-6)
    possible = tokens - math.ceil(height / sy) * math.ceil(width / sx)
    if r > possible:
        raise ValueError(
            f"asked to remove {r} of {tokens} tokens (ratio {ratio:g}), but at most {possible} can leave a grid of "
            f"{height}x{width}, whose {sy}x{sx} regions keep {tokens - possible} tokens (those at its edges are "
            f"smaller): choose a ratio of at most {math.floor(1000 * possible / tokens) / 1000:g}"
        )
    return r


def region_destinations(
    height: int, width: int, *, region: tuple[int, int] = (2, 2), generator: torch.Generator
) -> torch.Tensor:
    """Draw one token of every region: positions (R,) on the grid, rising within each row of regions.

    Each token of a region is as likely as the others, smaller regions at the edges included. Drawn on the CPU,
    so that every device sees the same.

    Raises:
        TypeError: a generator that is none, or one of another device.
    """
    if not isinstance(generator, torch.Generator) or generator.device.type != "cpu":
        raise TypeError(f"generator must be a torch.Generator on the CPU, got {generator!r}")
    sy, sx = region
    top, left = torch.arange(0, height, sy).unsqueeze(1), torch.arange(0, width, sx).unsqueeze(0)
    rows, columns = (height - top).clamp(max=sy), (width - left).clamp(max=sx)
    drawn = torch.rand(len(top), left.shape[1], generator=generator, dtype=torch.float64)
    chosen = (drawn * (rows * columns)).long()  # 0 .. rows * columns - 1
    row, column = chosen.div(columns, rounding_mode="floor"), chosen % columns
    return ((top + row) * width + left + column).flatten()


@torch.no_grad()
def match_to(tokens: torch.Tensor, destinations: torch.Tensor, r: int) -> Matching:
    """Choose r tokens that leave; only the given ones may be joined, and they stay.

    Deterministic, on ties the lower position wins. Cosines are computed in fp32 (fp64 for fp64 tokens) whatever
    autocast says.

    Args:
        tokens: (B, N, D).
        destinations: (R,) positions, all different, the same for every sample.
        r: how many leave, at most N - R. 0 gives the identity.

    Raises:
        ValueError: r out of range; tokens that are not finite (not checked while compiling).
    """
    batch, count, _ = tokens.shape
    r, possible = checks.integer("r", r, 0), count - len(destinations)
    if r > possible:
        raise ValueError(f"asked to remove r={r} tokens, but {count} tokens with {len(destinations)} destinations "
                         f"have at most {possible} to spare")  # fmt: skip
    position = torch.arange(count, device=tokens.device)
    if r == 0:
        position = position.expand(batch, count)
        return Matching(position[:, :0], position[:, :0], position, position, count)

    destinations = destinations.sort().values
    # Not a boolean index, whose length a compiler could not know.
    stays = torch.zeros_like(position).scatter(0, destinations, 1)
    candidates = stays.argsort(stable=True)[:possible]
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    with torch.autocast(tokens.device.type, enabled=False):
        unit = F.normalize(tokens.to(dtype), dim=-1)
        cosine = unit[:, candidates] @ unit[:, destinations].transpose(1, 2)  # (B, N - R, R)
    nearest = cosine.argmax(-1)  # argmax promises the first of equals, max does not
    best = cosine.gather(-1, nearest.unsqueeze(-1)).squeeze(-1)
    _check_finite("tokens", best)
    leaving = _first(best, r, largest=True)
    return _settle(candidates[leaving], destinations[nearest.gather(1, leaving)], count)
