"""What ``benchmarks.forecasting`` compares: every model from (B, C, look-back) to (B, C, horizon)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ts_ext import JumboPatchTST
from ts_ext.heads import ForecastHead
from ts_ext.trunk import Encoded

# PatchTST's small width, which it uses for ETTh1.
SIZE = dict(patch_len=16, stride=8, d_model=16, n_layers=3, n_heads=4, d_ff=128, dropout=0.3)
SMOOTHING = 25  # steps of DLinear's moving average
JUMBO = {"JumboPatchTST J=6": dict(multiplier=6), "ViT + 16 registers": dict(multiplier=0, registers=16)}
MODELS = [*JUMBO, "tsai PatchTST", "Transformers PatchTST", "DLinear"]
# Of ``benchmarks.forecasting_ablation``; ``reads``: see PatchesAlone.
VARIANTS = {
    "J=2": dict(multiplier=2),
    "Jumbo FFN ratio 1": dict(multiplier=6, jumbo_mlp_ratio=1.0),
    "own Jumbo FFN in each block": dict(multiplier=6, share_jumbo_ffn=False),
    "head reads the patches alone": dict(multiplier=6, reads="patches"),
}


def build(name: str, channels: int, look_back: int, horizon: int) -> nn.Module:
    """A fresh model of :data:`MODELS` or :data:`VARIANTS`; its weights come from torch's global generator.

    Raises:
        ValueError: an unknown name.
    """
    if name in JUMBO or name in VARIANTS:
        options = {**JUMBO, **VARIANTS}[name]
        own = {key: value for key, value in options.items() if key != "reads"}
        model = JumboPatchTST(channels, channels, look_back, horizon, **SIZE, **own)
        if "reads" in options:
            model.head = PatchesAlone(model)
        return model
    if name == "tsai PatchTST":
        from tsai.models.PatchTST import PatchTST

        return PatchTST(channels, channels, look_back, horizon, **SIZE)
    if name == "Transformers PatchTST":
        return TransformersPatchTST(channels, look_back, horizon)
    if name == "DLinear":
        return DLinear(look_back, horizon)
    raise ValueError(f"unknown model {name!r}; there are: {', '.join([*MODELS, *VARIANTS])}")


class PatchesAlone(ForecastHead):
    """The forecast head without the J slices: of ``model``'s shape, it reads the N patches flattened."""

    def __init__(self, model: JumboPatchTST) -> None:
        super().__init__(model, model.head.shape, model.head.channels)
        encoder = model.series.encoder
        self.in_features -= encoder.num_global_tokens * encoder.dim
        self.weight = nn.Parameter(self.weight.detach()[:, -self.in_features :].clone())

    def forward(self, encoded: Encoded, revin: nn.Module | None) -> torch.Tensor:
        tokens = encoded.tokens
        return super().forward(encoded._replace(tokens=tokens._replace(jumbo=tokens.jumbo[:, :0])), revin)


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
