"""JumboPatchTST's tasks as Transformers models: forecasts, classes, pre-training.

Each has a head of its own name, so that the folder of one task opens as another: the encoder goes over, the head starts
anew, and the host reports both.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.patchtst.modeling_patchtst import (
    PatchTSTForClassificationOutput,
    PatchTSTForPredictionOutput,
    PatchTSTForPretrainingOutput,
)
from transformers.utils.generic import can_return_tuple

from ts_ext.configuration_jumbo_patchtst import JumboPatchTSTConfig
from ts_ext.heads import ForecastHead, PatchHead, PoolHead
from ts_ext.losses import ObservedMSELoss, PinballLoss
from ts_ext.modeling_jumbo_patchtst import JumboPatchTSTModel, JumboPatchTSTPreTrainedModel
from ts_ext.pretraining import check_masking, rebuild
from ts_ext.targets import check_targets
from ts_ext.values import tensor_of


class JumboPatchTSTForPrediction(JumboPatchTSTPreTrainedModel):
    """Forecasts (B, H, C) in the units of the input, or with ``config.quantiles`` (B, H, C, quantiles)."""

    def __init__(self, config: JumboPatchTSTConfig) -> None:
        super().__init__(config)
        self.model = JumboPatchTSTModel(config)
        chosen = range(config.num_input_channels) if config.target_channels is None else config.target_channels
        chosen = check_targets(chosen, self.model.trunk.c_in, len(chosen))
        shape = (len(chosen), config.prediction_length)
        quantiles = len(config.quantiles or ())
        self.prediction_head = ForecastHead(
            self.model.trunk, shape, chosen, quantiles=quantiles, drop=config.head_dropout
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        past_values: torch.Tensor,
        past_observed_mask: torch.Tensor | None = None,
        future_values: torch.Tensor | None = None,
        future_observed_mask: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs,
    ) -> PatchTSTForPredictionOutput:
        """Forecast; with ``future_values`` the output holds ``loss``.

        Args:
            past_values, past_observed_mask, output_hidden_states, output_attentions: see :class:`JumboPatchTSTModel`.
            future_values: (B, H, target channels), of the units of ``past_values``.
            future_observed_mask: of that shape, nonzero = observed; the others are left out of the loss. Default: all,
                and a NaN is an error.

        Returns:
            PatchTSTForPredictionOutput: loss, prediction_outputs, hidden_states, loc and scale.
        """
        past_values = tensor_of(past_values)
        encoded = self.model.encode(
            past_values,
            past_observed_mask,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            **kwargs,
        )
        forecast = self.prediction_head(encoded, self.model.trunk.revin).transpose(1, 2).to(past_values.dtype)
        loc, scale = self.model.location(encoded)
        return PatchTSTForPredictionOutput(
            loss=None if future_values is None else self._loss(forecast, future_values, future_observed_mask),
            prediction_outputs=forecast,
            hidden_states=self.model.hidden_states(encoded.blocks),
            loc=loc,
            scale=scale,
        )

    def _loss(self, forecast: torch.Tensor, target: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        expected = forecast.shape[:3]
        for name, given in (("future_values", target), ("future_observed_mask", mask)):
            if given is not None and given.shape != expected:
                raise ValueError(
                    f"{name} must be (B, prediction_length, target channels) = {tuple(expected)}, got "
                    f"{tuple(given.shape)}"
                )
        if mask is not None:
            mask = mask.bool()
            if not torch.compiler.is_compiling() and target[mask].isnan().any():
                raise ValueError(
                    f"{int(target[mask].isnan().sum())} of {int(mask.sum())} future_values are NaN and marked as "
                    f"observed: mark them as missing in future_observed_mask, or fill them"
                )
            target = target.masked_fill(~mask, torch.nan)
        missing = "error" if mask is None else "mask"
        if self.config.quantiles is None:
            return ObservedMSELoss(missing=missing)(forecast, target)
        return PinballLoss(self.config.quantiles, missing=missing)(forecast, target)


class JumboPatchTSTForClassification(JumboPatchTSTPreTrainedModel):
    """Classes of whole windows: logits (B, num_targets) from the J slices and the mean of the patches."""

    def __init__(self, config: JumboPatchTSTConfig) -> None:
        super().__init__(config)
        self.model = JumboPatchTSTModel(config)
        self.classification_head = PoolHead(self.model.trunk, (config.num_targets,), drop=config.head_dropout)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        past_values: torch.Tensor,
        target_values: torch.Tensor | None = None,
        past_observed_mask: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs,
    ) -> PatchTSTForClassificationOutput:
        """Classify; with ``target_values``, class indices (B,), the output holds ``loss`` (cross-entropy).

        With one target (``num_targets=1``) these are 0 or 1 and the loss is the binary one.
        """
        encoded = self.model.encode(
            past_values,
            past_observed_mask,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            **kwargs,
        )
        logits = self.classification_head(encoded)
        return PatchTSTForClassificationOutput(
            loss=None if target_values is None else self._loss(logits, target_values),
            prediction_logits=logits,
            hidden_states=self.model.hidden_states(encoded.blocks),
        )

    def _loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        classes = logits.shape[1]
        if target.shape != logits.shape[:1]:
            raise ValueError(f"target_values must be ({logits.shape[0]},) class indices, got {tuple(target.shape)}")
        if not torch.compiler.is_compiling():
            wrong = (target < 0) | (target >= max(classes, 2)) | (target != target.long())
            if wrong.any():
                raise ValueError(
                    f"target_values must be whole numbers 0 to {max(classes, 2) - 1} with num_targets {classes}, got "
                    f"{target[wrong][:5].tolist()}"
                )
        if classes == 1:
            return nn.functional.binary_cross_entropy_with_logits(logits[:, 0], target.to(logits.dtype))
        return nn.functional.cross_entropy(logits, target.long())


class JumboPatchTSTForPretraining(JumboPatchTSTPreTrainedModel):
    """Masked patches, rebuilt from the rest; another task's ``from_pretrained`` takes the encoder over.

    What is hidden enters no statistic and no other patch. In eval mode every call hides the same patches.
    """

    def __init__(self, config: JumboPatchTSTConfig) -> None:
        super().__init__(config)
        self.model = JumboPatchTSTModel(config)
        check_masking(config.random_mask_ratio, self.model.trunk.seq_len, *self.model.patching)
        self.reconstruction_head = PatchHead(self.model.trunk, drop=config.head_dropout)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        past_values: torch.Tensor,
        past_observed_mask: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        generator: torch.Generator | None = None,
        **kwargs,
    ) -> PatchTSTForPretrainingOutput:
        """Hide, rebuild, compare: loss, the squared error over hidden observed steps, and prediction_output.

        Args:
            past_values, past_observed_mask, output_hidden_states, output_attentions: see :class:`JumboPatchTSTModel`.
            generator: of the draw. Default: torch's global one in training, in eval one that starts anew each time.

        Returns:
            PatchTSTForPretrainingOutput: prediction_output (B, C, N, P), in units of the visible values' deviation.
        """
        every = self.model.wants_every_block(output_hidden_states, output_attentions, kwargs)
        x, mask = self.model.trunk.read(*self.model.arrange(past_values, past_observed_mask))
        out = rebuild(
            self.model.trunk, self.reconstruction_head, x, mask, self.config.random_mask_ratio, generator,
            every_block=every,
        )  # fmt: skip
        return PatchTSTForPretrainingOutput(
            loss=out.loss, prediction_output=out.reconstruction, hidden_states=self.model.hidden_states(out.blocks)
        )
