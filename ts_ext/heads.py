"""Heads: from what the encoder made of a window to forecasts, classes, values or patches."""

from __future__ import annotations

import torch
from timm.layers import trunc_normal_
from torch import nn

from jumbo_core.jumbo import JumboOutput


class SeriesHead(nn.Linear):
    """A dropout and a linear layer on tokens; what is read of the tokens is the subclass's.

    Rows R are series: sample and channel, or with channel mixing samples alone.

    Args:
        in_features, out_features: of the linear layer (trunc-normal 0.02, zero bias).
        drop: dropout before it. Default 0.
    """

    def __init__(self, in_features: int, out_features: int, drop: float = 0.0) -> None:
        super().__init__(in_features, out_features)
        self.drop = nn.Dropout(drop)
        trunc_normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Dropout and the linear layer, in the dtype of the weights."""
        return super().forward(self.drop(features))


class FlattenHead(SeriesHead):
    """Forecasts: every token flattened, [J slices ; N patches], so the wide token reaches the output directly."""

    def forward(self, tokens: JumboOutput, real: torch.Tensor | None = None) -> torch.Tensor:
        """J slices (R, J, D) and patches (R, N, D) -> (R, out); patches that are not ``real`` (R, N) are read as 0."""
        patches = tokens.patches if real is None else tokens.patches.masked_fill(~real[..., None], 0)
        return self.project(torch.cat([tokens.jumbo, patches], dim=1).flatten(1))  # (R, J + N, D) -> (R, (J + N)*D)


class PoolHead(SeriesHead):
    """Classes or values: [J slices joined ; mean of the real patches], those of a sample's channels joined.

    Args:
        rows: rows of a sample, C, or 1 with channel mixing. in_features, out_features, drop: as above.
    """

    def __init__(self, in_features: int, out_features: int, drop: float = 0.0, *, rows: int) -> None:
        super().__init__(in_features, out_features, drop)
        self.rows = rows

    def forward(self, tokens: JumboOutput, real: torch.Tensor | None = None) -> torch.Tensor:
        """J slices (B*rows, J, D), patches (B*rows, N, D) -> (B, out)."""
        if real is None:
            mean = tokens.patches.mean(dim=1)
        else:
            weight = real[..., None].to(tokens.patches.dtype)
            mean = (tokens.patches * weight).sum(dim=1) / weight.sum(dim=1)
        features = torch.cat([tokens.jumbo.flatten(1), mean], dim=1)  # (B*rows, (J + 1)*D)
        return self.project(features.unflatten(0, (-1, self.rows)).flatten(1))


class PatchHead(SeriesHead):
    """Reconstruction: every patch token on its own -> the steps of its patch."""

    def forward(self, tokens: JumboOutput, real: torch.Tensor | None = None) -> torch.Tensor:
        """Patches (R, N, D) -> (R, N, out); ``real`` has no say, the loss leaves out what was not observed."""
        return self.project(tokens.patches)
