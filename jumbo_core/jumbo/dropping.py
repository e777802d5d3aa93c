"""Token dropping: train on a random subset of the patches, chosen by index (Jumbo paper, IN-21K runs)."""

from __future__ import annotations

import torch

from jumbo_core import checks


def random_keep(
    batch: int,
    num_patches: int,
    drop_rate: float,
    *,
    mask: torch.Tensor | None = None,
    device=None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Index (B, K) of the patches each sample keeps, in rising order; ``K = N - floor(N * drop_rate)``, at least 1.

    Args:
        batch, num_patches: B and N.
        drop_rate: share to drop, in [0, 1).
        mask: (B, N) bool, True = real. Padding is dropped before any real patch is.
        device, generator: of the draw. Default: torch's global generator of the default device.

    Raises:
        ValueError: ``drop_rate`` outside [0, 1).
    """
    drop_rate = checks.rate("drop_rate", drop_rate)
    keep = num_patches - int(num_patches * drop_rate + 1e-9)  # 0.9 of 100 is 90, whatever binary fractions say
    noise = torch.rand(batch, num_patches, device=device, generator=generator)
    if mask is not None:
        noise = noise + (~mask).to(noise.dtype)  # padding sorts behind every real patch
    return noise.argsort(dim=1)[:, :keep].sort(dim=1).values


def take_patches(patches: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Select patches: (B, N, ...) by index (B, K) -> (B, K, ...)."""
    if keep.ndim != 2 or keep.shape[0] != patches.shape[0] or keep.dtype != torch.long or not keep.shape[1]:
        raise ValueError(
            f"keep must be a long index (B, K) with K > 0 for patches {tuple(patches.shape)}, "
            f"got {keep.dtype} {tuple(keep.shape)}"
        )
    index = keep.reshape(*keep.shape, *[1] * (patches.ndim - 2)).expand(-1, -1, *patches.shape[2:])
    return patches.gather(1, index)


def linear_drop_rate(step: int, total_steps: int, *, start: float = 0.9, end: float = 0.1) -> float:
    """Drop rate at ``step`` of ``total_steps``, moving linearly from ``start`` to ``end`` (paper: 90 % to 10 %).

    Use as ``model.patch_drop_rate = linear_drop_rate(step, total_steps)`` before each step.

    Raises:
        ValueError: step outside 0..total_steps, or a rate outside [0, 1).
    """
    if total_steps < 1 or not 0 <= step <= total_steps:
        raise ValueError(f"step {step} is outside 0..{total_steps} (total_steps must be at least 1)")
    start, end = checks.rate("start", start), checks.rate("end", end)
    return start + (end - start) * step / total_steps
