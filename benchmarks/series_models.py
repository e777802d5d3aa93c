"""What ``benchmarks.forecasting`` compares: every model from (B, C, look-back) to (B, C, horizon)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ts_ext import JumboPatchTST

# PatchTST's small width, which it uses for ETTh1.
SIZE = dict(patch_len=16, stride=8, d_model=16, n_layers=3, n_heads=4, d_ff=128, dropout=0.3)
SMOOTHING = 25  # steps of DLinear's moving average
JUMBO = {"JumboPatchTST J=6": dict(multiplier=6), "ViT + 16 registers": dict(multiplier=0, registers=16)}
MODELS = [*JUMBO, "tsai PatchTST", "Transformers PatchTST", "DLinear"]


def build(name: str, channels: int, look_back: int, horizon: int) -> nn.Module:
    """A fresh model of :data:`MODELS`; its weights come from torch's global generator.

    Raises:
        ValueError: an unknown name.
    """
    if name in JUMBO:
        return JumboPatchTST(channels, channels, look_back, horizon, **SIZE, **JUMBO[name])
    if name == "tsai PatchTST":
        from tsai.models.PatchTST import PatchTST

        return PatchTST(channels, channels, look_back, horizon, **SIZE)
    if name == "Transformers PatchTST":
        return TransformersPatchTST(channels, look_back, horizon)
    if name == "DLinear":
        return DLinear(look_back, horizon)
    raise ValueError(f"unknown model {name!r}; there are: {', '.join(MODELS)}")


class TransformersPatchTST(nn.Module):
    """``PatchTSTForPrediction`` of Transformers at :data:`SIZE`.

    Away from its defaults are the sizes, the dropouts (after embedding, in the FFN and on residuals, where tsai's
    PatchTST has them) and the pooling: by default the head reads the *mean* of the patches, while PatchTST flattens
    them. All else is as Transformers has it: norm before attention, fixed sine positions, no padding at the end.
    """

    def __init__(self, channels: int, look_back: int, horizon: int) -> None:
        super().__init__()
        from transformers import PatchTSTConfig, PatchTSTForPrediction

        self.host = PatchTSTForPrediction(
            PatchTSTConfig(
                num_input_channels=channels,
                context_length=look_back,
                prediction_length=horizon,
                patch_length=SIZE["patch_len"],
                patch_stride=SIZE["stride"],
                d_model=SIZE["d_model"],
                num_hidden_layers=SIZE["n_layers"],
                num_attention_heads=SIZE["n_heads"],
                ffn_dim=SIZE["d_ff"],
                positional_dropout=SIZE["dropout"],
                path_dropout=SIZE["dropout"],
                ff_dropout=SIZE["dropout"],
                pooling_type=None,
                loss="mse",
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Transformers has time before channels; tsai's tensor type would follow every operation.
        return self.host(past_values=x.as_subclass(torch.Tensor).mT).prediction_outputs.mT


class DLinear(nn.Module):
    """DLinear (arXiv 2205.13504): a moving average and what it leaves, each through one linear layer, added up.

    Both layers are the same for every channel; the average is over :data:`SMOOTHING` steps, with the first and the last
    value repeated beyond the ends, so that it has the length of the window.
    """

    def __init__(self, look_back: int, horizon: int) -> None:
        super().__init__()
        self.trend, self.rest = nn.Linear(look_back, horizon), nn.Linear(look_back, horizon)

    @staticmethod
    def moving_average(x: torch.Tensor) -> torch.Tensor:
        """(B, C, L) -> (B, C, L)."""
        side = SMOOTHING // 2
        return F.avg_pool1d(F.pad(x, (side, side), mode="replicate"), SMOOTHING, stride=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.as_subclass(torch.Tensor)
        trend = self.moving_average(x)
        return self.trend(trend) + self.rest(x - trend)
