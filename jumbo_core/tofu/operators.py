"""What happens to tokens that leave: pruned, averaged into their destination, or merged with the norm kept (MLERP).

Source: ToFu (arXiv 2312.01026), ToMe (arXiv 2210.09461) for sizes and the average.
"""

from __future__ import annotations

import torch

from jumbo_core.tofu.matching import Matching

OPERATORS = ("prune", "average", "mlerp")
NORMS = ("max", "mean", "spherical")


def fuse(
    tokens: torch.Tensor,
    matching: Matching,
    op: str,
    *,
    sizes: torch.Tensor | None = None,
    norm: str = "max",
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply one operator to every group (a destination and the sources that join it): (B, N, D) -> (B, K, D).

    - ``"prune"``: sources are dropped, destinations unchanged. A destination's size does not grow: proportional
      attention must not count what is gone.
    - ``"average"``: mean of the group, weighted by size; sizes add up.
    - ``"mlerp"``: direction of the mean of the group's vectors (all count alike), or of their unit vectors, and length
      by ``norm``; sizes add up. Where that mean vanishes (antipodal members: shorter than rounding leaves it) the
      direction is the destination's own. A group whose mean and destination are both zero gives zero.

    A group of one is returned bit by bit as it was. Sums run in fp32 (fp64 for fp64 tokens); a result beyond the range
    of the tokens' dtype, which MLERP can reach in fp16, becomes the dtype's largest number. Differentiable.
    On CUDA, torch adds in no fixed order: repeats are bit-equal under ``torch.use_deterministic_algorithms(True)``.

    Args:
        tokens: (B, N, D).
        matching: from :func:`match`, of the same B and N.
        op: "prune", "average" or "mlerp".
        sizes: (B, N, 1), how many original tokens each stands for. Default: one each.
        norm: of an MLERP group: "max", the longest of its members' lengths (paper, default); "mean", their weighted
            mean; or "spherical" (seed), their weighted mean in the direction of ``sum w_i t_i / |t_i|``, so that a long
            vector pulls no harder than a short one.
        weights: (B, N), not negative; importance, for example. Replaces the sizes in "average" and the equal weights
            in "mlerp". A group whose weights are all zero counts its members alike. "prune" has no use for them.

    Returns:
        tokens (B, K, D) in their dtype and sizes (B, K, 1) in the dtype of the sums.

    Raises:
        ValueError: unknown operator or norm; shapes that do not fit; weights for "prune", or (not checked while
            compiling) negative or not finite.
    """
    _check(tokens, matching, op, sizes, norm, weights)
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    if sizes is None:
        sizes = tokens.new_ones(*tokens.shape[:2], 1, dtype=dtype)
    sizes = sizes.to(dtype)
    r = matching.sources.shape[1]
    if r == 0:
        return tokens, sizes
    if tokens.shape[0] == 0:  # no sample: nothing to index
        return tokens[:, : matching.kept.shape[1]], sizes[:, : matching.kept.shape[1]]
    if op == "prune":
        return _take(tokens, matching.kept), _take(sizes, matching.kept)

    # Only groups that change are computed: the B r rows below, one per source. Sources of one group share the row of
    # the first of them; the rows of the others are never read. Samples lie one behind the other throughout.
    group = matching.place.gather(1, matching.sources)  # (B, r): the group each source joins
    number = torch.arange(r, device=group.device).expand_as(group)
    first = torch.full_like(matching.kept, r).scatter_reduce(1, group, number, "amin")  # (B, K): the row of each group
    row = first.gather(1, group)  # (B, r)
    rows, groups, edges = _flat(row, r), _flat(group, matching.kept.shape[1]), row.numel()

    # One gather brings the two ends of every edge, destinations first.
    index = _flat(torch.stack([matching.destinations, matching.sources]), tokens.shape[1])
    ends = tokens.flatten(0, 1).index_select(0, index).to(dtype)  # (2 B r, D)
    alike = op == "mlerp" and weights is None
    weight = total = None
    if not alike:
        weight = (sizes if weights is None else weights.to(dtype)).reshape(-1, 1).index_select(0, index)
    elif norm != "max":
        weight = ends.new_ones(index.shape[0], 1)
    if weight is not None:
        total = _sum(weight, rows)
    if weights is not None:
        weight = torch.where((total == 0).index_select(0, rows).repeat(2, 1), 1, weight)
        total = _sum(weight, rows)

    members = ends if alike else ends * weight
    if op == "average":
        fused = _sum(members, rows) / total
    else:
        lengths = ends.norm(dim=-1, keepdim=True)
        stays, own, joining = ends[:edges], lengths[:edges], lengths[edges:]
        # Length of the sum if all members pointed the same way.
        reach = _sum(lengths if alike else lengths * weight, rows)
        if norm == "max":
            target = own.scatter_reduce(0, rows.unsqueeze(-1), joining, "amax")
        else:
            target = reach / total
        if norm == "spherical":
            members, reach = members / torch.where(lengths > 0, lengths, 1), total
        summed = _sum(members, rows)
        length = summed.norm(dim=-1, keepdim=True)
        vanishes = length <= reach * (8 * torch.finfo(dtype).eps)
        direction, length = torch.where(vanishes, stays, summed), torch.where(vanishes, own, length)
        fused = direction * (target / torch.where(length > 0, length, 1))
    if tokens.dtype != dtype:
        limit = torch.finfo(tokens.dtype).max
        fused = fused.clamp(-limit, limit).to(tokens.dtype)
    # Kept tokens, and one row to spare: rows that share a group with an earlier one are written there and cut off.
    count = matching.kept.numel()
    kept = _flat(matching.kept, tokens.shape[1])
    slot = torch.where((row == number).flatten(), groups, count)
    out = tokens.flatten(0, 1).index_select(0, torch.cat([kept, kept[:1]])).index_copy_(0, slot, fused)
    sizes = sizes.reshape(-1, 1)
    left = sizes.index_select(0, kept).index_add(0, groups, sizes.index_select(0, index[edges:]))
    return out[:count].unflatten(0, matching.kept.shape), left.unflatten(0, matching.kept.shape)


def unmerge(tokens: torch.Tensor, matching: Matching | torch.Tensor) -> torch.Tensor:
    """Give every original position its group's vector, a pruned one its destination's: (B, K, D) -> (B, N, D).

    Args:
        tokens: (B, K, D).
        matching: the matching that was fused by, or ``place`` (B, N) of several steps from :func:`compose`.

    Raises:
        ValueError: a batch or token count that does not fit.
    """
    place = matching.place if isinstance(matching, Matching) else matching
    if isinstance(matching, Matching) and tokens.shape[1] != matching.kept.shape[1]:
        raise ValueError(
            f"unmerge expects {matching.kept.shape[1]} tokens, as many as were kept, got {tokens.shape[1]}"
        )
    if tokens.ndim != 3 or tokens.shape[0] != place.shape[0]:
        raise ValueError(f"unmerge expects tokens (B, K, D) with B={place.shape[0]}, got {tuple(tokens.shape)}")
    # gather, not _take: it notices a place that points beyond the K tokens, rows of a flat index would not.
    return tokens.gather(1, place.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


def compose(place: torch.Tensor | None, matching: Matching) -> torch.Tensor:
    """Follow the originals through one more step.

    Args:
        place: (B, N) where each original stands before ``matching``; None before the first step.
        matching: of the tokens as they stand then.

    Returns:
        (B, N) where each original stands after it: what :func:`unmerge` and :func:`source_map` take.
    """
    return matching.place if place is None else matching.place.gather(1, place)


def source_map(place: torch.Tensor, num_kept: int) -> torch.Tensor:
    """Which originals each kept token stands for: place (B, N) -> (B, K, N) bool, one True per column."""
    return place.unsqueeze(1) == torch.arange(num_kept, device=place.device).view(1, -1, 1)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """(B, N, D) by index (B, K) -> (B, K, D). Whole rows, which is faster than gathering element by element."""
    return x.flatten(0, 1).index_select(0, _flat(index, x.shape[1])).unflatten(0, index.shape)


def _sum(ends: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What both ends of every edge add up to in the row of its group: (2 R, D), destinations first -> (R, D)."""
    edges = rows.shape[0]
    return ends[:edges].index_add(0, rows, ends[edges:])


def _flat(index: torch.Tensor, rows: int) -> torch.Tensor:
    """Index (…, B, K) into B times ``rows`` rows -> (…*B*K,) into all of them."""
    if index.shape[-2] == 1:
        return index.flatten()
    start = torch.arange(0, index.shape[-2] * rows, rows, device=index.device).unsqueeze(1)
    return (index + start).flatten()


def _check(tokens, matching, op, sizes, norm, weights) -> None:
    if op not in OPERATORS:
        raise ValueError(f"op must be one of {', '.join(map(repr, OPERATORS))}, got {op!r}")
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(map(repr, NORMS))}, got {norm!r}")
    expected = (matching.place.shape[0], matching.num_tokens)
    if tokens.ndim != 3 or tokens.shape[:2] != expected:
        raise ValueError(f"tokens must be (B, N, D) with (B, N) = {expected} as matched, got {tuple(tokens.shape)}")
    if sizes is not None and sizes.shape != (*expected, 1):
        raise ValueError(f"sizes must be (B, N, 1) = {(*expected, 1)}, got {tuple(sizes.shape)}")
    if weights is not None and weights.shape != expected:
        raise ValueError(f"weights must be (B, N) = {expected}, got {tuple(weights.shape)}")
    if weights is not None and op == "prune":
        raise ValueError("op 'prune' has no use for weights: to prune the least important, give importance to match")
    if weights is not None and not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
        if not (weights.isfinite() & (weights >= 0)).all():
            raise ValueError("weights must be finite and not negative")
