"""Masked prediction: which patches the student does not see, and how well it guesses the teacher's features there."""

from __future__ import annotations

from numbers import Real

import torch
from torch.nn import functional as F

from jumbo_core import checks
from jumbo_core.distill.finite import check_finite


def check_mask_ratio(mask_ratio: float) -> float:
    """A share strictly between 0 and 1, as a float."""
    if isinstance(mask_ratio, bool) or not isinstance(mask_ratio, Real) or not 0 < mask_ratio < 1:
        raise ValueError(
            f"mask_ratio must lie strictly between 0 and 1 (0 masks nothing, 1 shows nothing), got {mask_ratio!r}"
        )
    return float(mask_ratio)


def masked_count(mask_ratio: float, num_patches: int) -> int:
    """How many of N patches :func:`random_mask` masks."""
    return round(mask_ratio * num_patches)


def random_mask(
    batch: int,
    num_patches: int,
    mask_ratio: float,
    *,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Bool (B, N), True = masked: exactly ``round(mask_ratio * N)`` patches of every sample, drawn uniformly.

    Args:
        batch, num_patches: B and N.
        mask_ratio: share to mask, strictly between 0 and 1.
        device, generator: of the draw. Default: torch's global generator of the default device.

    Raises:
        ValueError: a ratio outside (0, 1), or one that masks no patch or every patch of so few.
    """
    batch, num_patches = checks.integer("batch", batch), checks.integer("num_patches", num_patches)
    mask_ratio = check_mask_ratio(mask_ratio)
    count = masked_count(mask_ratio, num_patches)
    if not 0 < count < num_patches:
        raise ValueError(
            f"mask_ratio {mask_ratio} masks {count} of {num_patches} patches and leaves {num_patches - count} visible; "
            f"at least 1 of each is needed: use larger images, smaller patches or another ratio"
        )
    noise = torch.rand(batch, num_patches, device=device, generator=generator)
    masked = noise.argsort(dim=1)[:, :count]
    return torch.zeros_like(noise, dtype=torch.bool).scatter_(1, masked, True)


def masked_prediction_loss(
    teacher: torch.Tensor,
    prediction: torch.Tensor,
    mask: torch.Tensor,
    *,
    beta: float = 1.0,
    normalize_target: bool = True,
) -> torch.Tensor:
    """Mean of SmoothL1 between prediction and teacher over the masked tokens (arXiv 2504.00037, ``L_mask``).

    What stands at visible tokens plays no part. No gradient reaches the teacher.

    Args:
        teacher: features (B, N, D) of the whole image.
        prediction: the student's guess of them (B, N, D), projected to the teacher's width.
        mask: bool (B, N), True = masked.
        beta: where SmoothL1 turns from quadratic to linear. Default 1 (the paper does not say).
        normalize_target: LayerNorm without affine on the teacher's tokens, so that no channel or layer scale of the
            teacher rules the loss. Default True (the paper does not say).

    Returns:
        A scalar; float32 under autocast and for half precision, float64 for float64.

    Raises:
        ValueError: shapes that do not fit, a mask that is not bool or masks nothing, beta not above 0, NaN or infinity.
    """
    if teacher.ndim != 3 or teacher.shape != prediction.shape:
        raise ValueError(
            f"teacher and prediction must both be (B, N, D) of one shape, got {tuple(teacher.shape)} and "
            f"{tuple(prediction.shape)}; project the student to the teacher's width"
        )
    if mask.dtype != torch.bool or mask.shape != teacher.shape[:2]:
        raise ValueError(
            f"mask must be bool of shape (B, N) = {tuple(teacher.shape[:2])} with True for masked tokens, "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    target, guess = teacher[mask], prediction[mask]  # (B, N, D) -> (M, D)
    if not len(target):
        raise ValueError(f"the mask {tuple(mask.shape)} masks no token: there is nothing to predict")
    check_finite(["the teacher's features", "the prediction"], [target, guess])
    return prediction_loss(target, guess, beta=beta, normalize_target=normalize_target)


def prediction_loss(
    target: torch.Tensor, prediction: torch.Tensor, *, beta: float = 1.0, normalize_target: bool = True
) -> torch.Tensor:
    """:func:`masked_prediction_loss` of tokens (..., D) that are all masked and known to be finite."""
    beta, normalize_target = checks.positive("beta", beta), checks.flag("normalize_target", normalize_target)
    precision = torch.promote_types(torch.promote_types(target.dtype, prediction.dtype), torch.float32)
    target, prediction = target.detach().to(precision), prediction.to(precision)
    if normalize_target:
        target = F.layer_norm(target, target.shape[-1:])
    return F.smooth_l1_loss(prediction, target, beta=beta)
