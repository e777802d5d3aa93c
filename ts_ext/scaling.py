"""RevIN: take a window's own mean and scale off before the model, put them back on the forecast."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class WindowStats(NamedTuple):
    """Mean and standard deviation of each window and channel, both (B, C, 1), in double precision where it exists."""

    mean: torch.Tensor
    std: torch.Tensor


class RevIN(nn.Module):
    """Reversible instance normalisation, per sample and channel over time (Kim et al., ICLR 2022, as in PatchTST).

    Statistics and both directions run in double precision and the mean is taken around the first value, so that nothing
    cancels for a series with a huge offset, and ``inverse(normalize(x))`` gives a constant series back bit by bit. With
    ``eps=0`` (default) ``f(a*x + b) = a*f(x) + b`` holds for every a > 0 and b; the original adds 1e-5 to the variance,
    which makes small series depend on their unit. A constant window is normalised to zeros and its forecast is its
    value.

    Args:
        num_channels: C.
        eps: added to the variance. Default 0; PatchTST: 1e-5.
        affine: learn a weight and a bias per channel on the normalised values. Default False.

    Raises:
        ValueError: ``num_channels`` below 1 or ``eps`` negative.
    """

    def __init__(self, num_channels: int, *, eps: float = 0.0, affine: bool = False) -> None:
        super().__init__()
        if num_channels < 1 or not eps >= 0:
            raise ValueError(f"RevIN needs num_channels >= 1 and eps >= 0, got {num_channels} and {eps}")
        self.num_channels, self.eps = num_channels, eps
        self.weight = nn.Parameter(torch.ones(num_channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_channels)) if affine else None

    def normalize(self, x: torch.Tensor) -> tuple[torch.Tensor, WindowStats]:
        """(B, C, L), any floating dtype -> the same shape in double precision, and the window's statistics."""
        x = _wide(x)
        first = x[..., :1]
        centred = x - first  # exactly 0 for a constant series, whatever its offset
        shift = centred.mean(dim=-1, keepdim=True)
        centred = centred - shift
        variance = centred.square().mean(dim=-1, keepdim=True) + self.eps
        moves = variance > 0  # only a constant window has variance 0; divided by 1 it stays 0
        std = torch.where(moves, variance, 1).sqrt()
        normal = centred / std
        if self.weight is not None:
            normal = normal * self.weight[:, None] + self.bias[:, None]
        return normal, WindowStats(first + shift, std * moves)

    def inverse(self, y: torch.Tensor, stats: WindowStats) -> torch.Tensor:
        """Normalised (B, C, H) -> original units, in double precision."""
        y = _wide(y)
        if self.weight is not None:
            y = (y - self.bias[:, None]) / self.weight[:, None]
        return y * stats.std + stats.mean


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.device.type == "mps" else x.double()  # Apple's GPUs have no double precision
