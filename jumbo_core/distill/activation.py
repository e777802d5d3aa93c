"""Activation maps, and the loss that makes a student's maps those of its teacher without ever storing one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.checkpoint import checkpoint

from jumbo_core import checks
from jumbo_core.distill.finite import check_finite


def activation_map(features: torch.Tensor) -> torch.Tensor:
    """Cosine of every pair of tokens: (B, n, D) -> (B, n, n) (ViT-Linearizer, arXiv 2504.00037: ``A(i,j)``).

    A zero vector has cosine 0 with every token, itself included. Half precision is computed and returned in float32.

    Raises:
        ValueError: not a floating point tensor (B, n, D), or NaN or infinity in it.
    """
    _check_features("features", features)
    with _full_precision(features):
        unit = _unit(features.to(_precision(features)))
        return unit @ unit.mT


def activation_matching_loss(
    teacher: torch.Tensor | Sequence[torch.Tensor],
    student: torch.Tensor | Sequence[torch.Tensor],
    *,
    row_block: int = 256,
) -> torch.Tensor:
    """How far the rows of the student's activation maps point away from the teacher's (arXiv 2504.00037, ``L_act``).

    With l2-normalised rows of the maps of stage k::

        L = 1/(K n) sum_k sum_i (1 - <row_i of teacher k, row_i of student k>)

    averaged over the batch; the squared l2 distance of the same rows is twice this. Maps need no projection, so that
    the widths may differ. A row of a zero vector counts 1. No gradient reaches the teacher.

    No tensor of n x n entries is made when n is above ``row_block``. With unit vectors T (n, Dt) and S (n, Ds) the
    inner product of two rows is ``t_i (T'S) s_i'`` and the squared norm of one is ``t_i (T'T) t_i'``: when that is
    cheaper than the maps (roughly n > 1.5 D), three small matrices replace them, exactly. Otherwise ``row_block`` rows
    at a time are made, and made again in the backward pass.

    Args:
        teacher: (B, n, Dt), or a sequence of K stages of it.
        student: (B, n, Ds), or as many stages.
        row_block: rows of a map held at a time. Default 256.

    Returns:
        A scalar; float32 under autocast and for half precision, float64 for float64.

    Raises:
        ValueError: another number of stages, tokens or samples on the two sides, no token, not floating point, NaN or
            infinity in the features (not looked for under ``torch.compile``).
    """
    row_block = checks.integer("row_block", row_block)
    teacher = [teacher] if isinstance(teacher, torch.Tensor) else list(teacher)
    student = [student] if isinstance(student, torch.Tensor) else list(student)
    if len(teacher) != len(student) or not teacher:
        raise ValueError(f"teacher has {len(teacher)} stages, student {len(student)}: give as many of each, at least 1")
    losses = []
    for k, (t, s) in enumerate(zip(teacher, student, strict=True), 1):
        _check_features(f"teacher stage {k}", t)
        _check_features(f"student stage {k}", s)
        if t.shape[:2] != s.shape[:2]:
            raise ValueError(
                f"stage {k}: teacher has (B, n) = {tuple(t.shape[:2])} tokens, student {tuple(s.shape[:2])}; maps "
                f"compare the same tokens on both sides"
            )
        precision = torch.promote_types(_precision(t), _precision(s))
        with _full_precision(s):
            t, s = _unit(t.detach().to(precision)), _unit(s.to(precision))
            cosines = cosines_by_gram(t, s) if _gram_is_cheaper(t, s) else cosines_by_rows(t, s, row_block)
            losses.append(1 - cosines.mean())
    return torch.stack(losses).mean()


def activation_matching_reference(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """One stage of :func:`activation_matching_loss` as plain loops over samples and rows: slow, and decides."""
    total = 0
    for t, s in zip(teacher.detach(), student, strict=True):
        for i in range(len(s)):
            rows = []
            for tokens in (t, s):
                cosines = [_cosine(tokens[i], token) for token in tokens]
                rows.append(torch.stack(cosines))
            total = total + 1 - _cosine(*rows)
    return total / (student.shape[0] * student.shape[1])


def cosines_by_rows(t: torch.Tensor, s: torch.Tensor, row_block: int) -> torch.Tensor:
    """Cosines (B, n) between the map rows of unit vectors t (B, n, Dt) and s (B, n, Ds), ``row_block`` rows at a time.

    With more than one block, the maps are thrown away and made again in the backward pass.
    """
    n, cosines = t.shape[1], []
    for start in range(0, n, row_block):
        rows = slice(start, start + row_block)
        if n > row_block and torch.is_grad_enabled():
            cosines.append(checkpoint(_map_cosines, t[:, rows], t, s[:, rows], s, use_reentrant=False))
        else:
            cosines.append(_map_cosines(t[:, rows], t, s[:, rows], s))
    return torch.cat(cosines, dim=1)


def cosines_by_gram(t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """As :func:`cosines_by_rows`, through T'S, T'T and S'S instead of the maps: time n*D^2, memory n*D + D^2."""
    inner = ((t @ (t.mT @ s)) * s).sum(dim=-1)
    return _cosine_of(inner, _gram_norm(t), _gram_norm(s))


def _map_cosines(t_rows: torch.Tensor, t: torch.Tensor, s_rows: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    t_map, s_map = t_rows @ t.mT, s_rows @ s.mT  # (B, b, n)
    return _cosine_of((t_map * s_map).sum(dim=-1), t_map.square().sum(dim=-1), s_map.square().sum(dim=-1))


def _gram_norm(unit: torch.Tensor) -> torch.Tensor:
    """Squared norm (B, n) of the map rows of unit vectors (B, n, D)."""
    return ((unit @ (unit.mT @ unit)) * unit).sum(dim=-1)


def _cosine_of(inner: torch.Tensor, t_square: torch.Tensor, s_square: torch.Tensor) -> torch.Tensor:
    # A row holds its own cosine, 1, so its squared norm is at least 1; only rows of zero vectors, all 0, are below.
    return inner * t_square.clamp(min=0.5).rsqrt() * s_square.clamp(min=0.5).rsqrt()


def _gram_is_cheaper(t: torch.Tensor, s: torch.Tensor) -> bool:
    n, dt, ds = t.shape[1], t.shape[2], s.shape[2]
    return n * n * (dt + ds) > n * (dt * ds + dt * dt + ds * ds)


def _unit(features: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1; zero vectors stay zero and get no gradient."""
    scale = features.detach().abs().amax(dim=-1, keepdim=True)
    real = scale > 0
    scaled = features / torch.where(real, scale, 1)  # squares of values beyond 1e19 would overflow float32
    norm = torch.where(real, scaled, 1).norm(dim=-1, keepdim=True)
    return torch.where(real, scaled / norm, 0)


def _cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Cosine of two vectors, 0 if one of them is zero."""
    if not a.any() or not b.any():
        return a.new_zeros(())
    return (a * b).sum() / (a.square().sum().sqrt() * b.square().sum().sqrt())


def _precision(features: torch.Tensor) -> torch.dtype:
    return torch.promote_types(features.dtype, torch.float32)


def _full_precision(features: torch.Tensor) -> torch.autocast:
    """Cosines near 1 are what this is about: half precision knows three digits of them."""
    return torch.autocast(features.device.type, enabled=False)


def _check_features(name: str, features: torch.Tensor) -> None:
    if features.ndim != 3 or not features.is_floating_point() or not features.numel():
        raise ValueError(
            f"{name} must be floating point features (B, n, D) with no empty side, "
            f"got {features.dtype} {tuple(features.shape)}"
        )
    check_finite([name], [features])
