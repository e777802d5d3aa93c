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

    Statistics and both directions run in double precision, around the window's first value and in units of its largest
    departure from it, so that neither a huge offset nor a huge or tiny scale costs digits that the series has. With
    ``eps=0`` (default) a model f between the two directions has ``f(a*x + b) = a*f(x) + b`` for a > 0, up to the
    rounding of ``a*x + b`` itself: what the offset's last digit swallows is gone before it comes here. It holds for
    departures from about 1e-300 to 1e300 (on Apple's GPUs, which compute in single precision, 1e-35 to 1e35). The
    original adds 1e-5 to the variance, which makes small series depend on their unit.

    A constant window is normalised to zeros (with ``affine``: to the bias) and whatever the model makes of it, the
    inverse gives its value, bit by bit (with ``eps`` above 0 that is so only for normalised zeros, or the bias).

    Args:
        num_channels: C.
        eps: added to the variance. Default 0; PatchTST: 1e-5.
        affine: learn a weight and a bias per channel on the normalised values. Default False. The inverse divides by
            the weight: one that is exactly 0 has lost the series, and its forecasts are infinite or NaN.

    Raises:
        ValueError: ``num_channels`` below 1 or ``eps`` negative; a tensor with another number of channels.
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
        self._check(x)
        x = _wide(x)
        first = x[..., :1]
        centred = x - first  # exactly 0 for a constant series, whatever its offset
        shift = centred.mean(dim=-1, keepdim=True)
        centred = centred - shift
        # Squares of the values themselves would leave the range of floating point for scales of 1e-160 or 1e160.
        unit = centred.detach().abs().amax(dim=-1, keepdim=True)
        unit = torch.where(unit > 0, unit, 1)
        variance = (centred / unit).square().mean(dim=-1, keepdim=True)
        moves = variance > 0  # only a constant window has variance 0; divided by 1 it stays 0
        std = torch.where(moves, variance, 1).sqrt() * unit * moves
        if self.eps:
            std = torch.hypot(std, std.new_tensor(self.eps).sqrt())
            normal = centred / std
        else:
            normal = centred / torch.where(moves, std, 1)
        if self.weight is not None:
            normal = normal * self.weight[:, None] + self.bias[:, None]
        return normal, WindowStats(first + shift, std)

    def inverse(self, y: torch.Tensor, stats: WindowStats) -> torch.Tensor:
        """Normalised (B, C, H) -> original units, in double precision."""
        self._check(y)
        y = _wide(y)
        if self.weight is not None:
            y = (y - self.bias[:, None]) / self.weight[:, None]
        return y * stats.std + stats.mean

    def _check(self, x: torch.Tensor) -> None:
        if x.ndim < 2 or x.shape[-2] != self.num_channels:
            raise ValueError(f"RevIN was built for (B, {self.num_channels} channels, steps), got {tuple(x.shape)}")


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.device.type == "mps" else x.double()  # Apple's GPUs have no double precision
