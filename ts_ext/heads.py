"""Heads: from what the encoder made of a window to forecasts, classes, values or patches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from timm.layers import trunc_normal_
from torch import nn

from jumbo_core.dropout import Dropout
from ts_ext.trunk import Encoded, SeriesTrunk


class SeriesHead(nn.Linear):
    """A dropout and a linear layer on tokens; what is read of the tokens is the subclass's.

    Args:
        in_features, out_features: of the linear layer (trunc-normal 0.02, zero bias).
        drop: dropout before it. Default 0.
    """

    def __init__(self, in_features: int, out_features: int, drop: float = 0.0) -> None:
        super().__init__(in_features, out_features)
        self.drop = Dropout(drop)
        trunc_normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Dropout and the linear layer, in the dtype of the weights."""
        return super().forward(self.drop(features))


class ForecastHead(SeriesHead):
    """Forecasts in the units of the input, from every token flattened, [J slices ; N patches].

    So the wide token reaches the output directly; the width is (J + N) * D. RevIN is undone.

    Args:
        trunk: what will encode; only its sizes are read.
        shape: of one target, (), (H,) or (C_out, H).
        channels: the input channel that each output continues, or None for a learned mixture of all channels'
            forecasts, whose weights sum to one.
        quantiles: of each forecast, in one more, last dimension. Default 0: the mean, and no such dimension.
        drop: see above.
    """

    def __init__(
        self,
        trunk: SeriesTrunk,
        shape: tuple[int, ...],
        channels: Sequence[int] | None,
        *,
        quantiles: int = 0,
        drop: float = 0.0,
    ) -> None:
        encoder = trunk.series.encoder
        width = (encoder.num_global_tokens + trunk.patch_num) * encoder.dim
        # with mixing the forecasts of all target channels come from one row, else every row makes its channel's
        made = len(channels or range(trunk.c_in)) if trunk.mixing else 1
        super().__init__(width, made * (1, *shape)[-1] * max(quantiles, 1), drop)
        self.shape, self.quantiles = shape, quantiles
        self.c_in, self.made, self.mixing = trunk.c_in, made, trunk.mixing
        self.channels = None if channels is None else list(channels)
        outputs = (1, 1, *shape)[-2]
        self.mix = nn.Parameter(torch.zeros(outputs, trunk.c_in)) if channels is None else None

    def forward(self, encoded: Encoded, revin: nn.Module | None) -> torch.Tensor:
        """Tokens of the rows and the RevIN that made them -> (B, *shape), or (B, *shape, quantiles)."""
        tokens, real, stats = encoded[:3]
        # What stands for patches without an observed value says nothing: it is read as 0.
        patches = tokens.patches if real is None else tokens.patches.masked_fill(~real[..., None], 0)
        y = self.project(torch.cat([tokens.jumbo, patches], dim=1).flatten(1))  # (R, J + N, D) -> (R, (J + N)*D)
        known = self.channels if self.mixing else None  # the rows were made for these channels alone
        y = y.unflatten(1, (self.made, -1)) if self.mixing else y.unflatten(0, (-1, self.c_in))
        if revin is not None:  # (B, C, H), or (B, C, H*Q)
            y = revin.inverse(y, stats, known)
        if self.mix is not None:
            mix = self.mix.to(y.dtype)
            weights = mix + (1 - mix.sum(dim=1, keepdim=True)) / self.c_in  # every row sums to one
            first = y[:, :1]  # mixed as departures from one channel: an offset of all of them then costs no digits
            y = first + weights @ (y - first)
        elif known is None and self.channels != list(range(self.c_in)):
            y = y[:, self.channels]
        if not self.quantiles:
            return y.reshape(-1, *self.shape)
        return y.reshape(-1, *self.shape, self.quantiles).sort(dim=-1).values


class PoolHead(SeriesHead):
    """Classes or values: [J slices joined ; mean of the real patches], those of a sample's channels joined.

    Args:
        trunk: what will encode; only its sizes are read.
        shape: of one output.
        drop: see above.
    """

    def __init__(self, trunk: SeriesTrunk, shape: tuple[int, ...], *, drop: float = 0.0) -> None:
        encoder = trunk.series.encoder
        super().__init__(trunk.rows * (encoder.num_global_tokens + 1) * encoder.dim, math.prod(shape), drop)
        self.rows, self.shape = trunk.rows, shape

    def forward(self, encoded: Encoded) -> torch.Tensor:
        """J slices (B*rows, J, D), patches (B*rows, N, D) -> (B, *shape)."""
        tokens, real = encoded[:2]
        if real is None:
            mean = tokens.patches.mean(dim=1)
        else:
            weight = real[..., None].to(tokens.patches.dtype)
            mean = (tokens.patches * weight).sum(dim=1) / weight.sum(dim=1)
        features = torch.cat([tokens.jumbo.flatten(1), mean], dim=1)  # (B*rows, (J + 1)*D)
        return self.project(features.unflatten(0, (-1, self.rows)).flatten(1)).reshape(-1, *self.shape)


class PatchHead(SeriesHead):
    """Reconstruction: every patch token on its own -> the steps of its patch.

    Args:
        trunk: what will encode; what stands behind its last patches is frozen, since nothing trains it.
        drop: see above.
    """

    def __init__(self, trunk: SeriesTrunk, *, drop: float = 0.0) -> None:
        series = trunk.series
        super().__init__(series.encoder.dim, series.in_channels * series.patch_len, drop)
        series.encoder.freeze_unreachable("patches")

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Patches (R, N, D) -> (R, N, out)."""
        return self.project(patches)
