"""RevIN: take a window's own mean and scale off before the model, put them back on the forecast."""

from __future__ import annotations

from collections.abc import Sequence
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

    Missing values are left out through a mask: they enter no statistic, and 0 stands in their place.

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

    def normalize(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, WindowStats]:
        """(B, C, L), any floating dtype -> the same shape in double precision, and the window's statistics.

        Args:
            x: values; where ``mask`` is False they may be anything, NaN and infinite included.
            mask: bool of the shape of ``x``, True = a real value. Default: all real.

        Raises:
            ValueError: another number of channels, another mask, a channel of a window without a real value.
        """
        self._check(x)
        x = wide(x)
        if mask is None:
            first = x[..., :1]
        else:
            check_mask(x, mask)
            first = x.gather(-1, mask.int().argmax(dim=-1, keepdim=True))  # the first real value
            x = torch.where(mask, x, first)
        centred = x - first  # exactly 0 for a constant series, whatever its offset
        shift = _mean(centred, mask)
        centred = centred - shift
        if mask is not None:
            centred = centred.masked_fill(~mask, 0)
        # Squares of the values themselves would leave the range of floating point for scales of 1e-160 or 1e160.
        unit = centred.detach().abs().amax(dim=-1, keepdim=True)
        unit = torch.where(unit > 0, unit, 1)
        variance = _mean((centred / unit).square(), mask)
        moves = variance > 0  # only a constant window has variance 0; divided by 1 it stays 0
        std = torch.where(moves, variance, 1).sqrt() * unit * moves
        if self.eps:
            std = torch.hypot(std, std.new_tensor(self.eps).sqrt())
            normal = centred / std
        else:
            normal = centred / torch.where(moves, std, 1)
        if self.weight is not None:
            normal = normal * self.weight[:, None] + self.bias[:, None]
            normal = normal if mask is None else normal.masked_fill(~mask, 0)
        return normal, WindowStats(first + shift, std)

    def inverse(self, y: torch.Tensor, stats: WindowStats, channels: Sequence[int] | None = None) -> torch.Tensor:
        """Normalised (B, C, H) -> original units, in double precision.

        With ``channels`` the rows of ``y`` (B, K, H) are those channels, in that order, repetitions allowed.
        """
        weight, bias = self.weight, self.bias
        if channels is None:
            self._check(y)
        else:
            if y.ndim != 3 or y.shape[1] != len(channels):
                raise ValueError(f"RevIN expects (B, {len(channels)} chosen channels, steps), got {tuple(y.shape)}")
            stats = WindowStats(stats.mean[:, channels], stats.std[:, channels])
            weight, bias = (None, None) if weight is None else (weight[channels], bias[channels])
        y = wide(y)
        if weight is not None:
            y = (y - bias[:, None]) / weight[:, None]
        return y * stats.std + stats.mean

    def _check(self, x: torch.Tensor) -> None:
        if x.ndim < 2 or x.shape[-2] != self.num_channels:
            raise ValueError(f"RevIN was built for (B, {self.num_channels} channels, steps), got {tuple(x.shape)}")


def standardize(x: torch.Tensor, stats: WindowStats) -> torch.Tensor:
    """Values in units of statistics that they need not have entered; of a window with deviation 0, the departures."""
    return (wide(x) - stats.mean) / torch.where(stats.std > 0, stats.std, 1)


def wide(x: torch.Tensor) -> torch.Tensor:
    """In double precision, or single on Apple's GPUs, which have no double."""
    return x.float() if x.device.type == "mps" else x.double()


def check_mask(x: torch.Tensor, mask: torch.Tensor) -> None:
    """A mask of values is bool, of their shape, and leaves no channel of a window without a value."""
    if mask.dtype != torch.bool or mask.shape != x.shape:
        raise ValueError(
            f"a mask of observed values must be bool of the values' shape {tuple(x.shape)} with True for observed "
            f"values, got {mask.dtype} {tuple(mask.shape)}"
        )
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or mask.is_meta:
        return
    empty = ~mask.any(dim=-1)
    if empty.any():
        place = tuple(empty.nonzero()[0].tolist())
        raise ValueError(
            f"{int(empty.sum())} of {empty.numel()} channels of windows have no observed value, the first at (sample, "
            f"channel) {place}: leave such windows out, use longer ones, or drop the channel"
        )


def _mean(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Mean over time; what the mask hides is 0 in ``x``."""
    if mask is None:
        return x.mean(dim=-1, keepdim=True)
    return x.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True)
