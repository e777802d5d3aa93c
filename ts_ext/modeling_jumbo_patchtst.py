"""JumboPatchTST's encoder as a Transformers model, with the argument names and output classes of its PatchTST."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, initialization
from transformers.models.patchtst.modeling_patchtst import (
    PatchTSTModelOutput,
)
from transformers.utils.generic import can_return_tuple

from jumbo_core import inference_report
from jumbo_core.jumbo import JumboFFN, JumboOutput
from jumbo_core.jumbo.stack import BlockStack
from jumbo_core.linear import Mamba2Mixer
from jumbo_core.linear.mamba2 import GatedRMSNorm
from jumbo_core.models.series import JumboSeries, to_patches
from ts_ext.configuration_jumbo_patchtst import JumboPatchTSTConfig
from ts_ext.heads import ForecastHead
from ts_ext.scaling import RevIN
from ts_ext.trunk import Encoded, SeriesTrunk
from ts_ext.values import refuse_exogenous, tensor_of


class JumboPatchTSTPreTrainedModel(PreTrainedModel):
    """What all of these share: initialisation, loading and saving, how inputs are read.

    ``past_values`` are (B, L, C), time before channels as everywhere in the host. Loaded in half precision, the decay
    parameters of the linear encoder stay float32.
    """

    config_class = JumboPatchTSTConfig
    base_model_prefix = "model"
    main_input_name = "past_values"
    input_modalities = ("time",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["JumboBlock", "AdventurerBlock"]
    _keep_in_fp32_modules_strict = [r"\.mixer\.A_log$", r"\.mixer\.dt_bias$", r"\.mixer\.D$"]

    def __init__(self, config: JumboPatchTSTConfig, *args, **kwargs) -> None:
        config.check()  # fields may have been set since it was made
        super().__init__(config, *args, **kwargs)

    def save_pretrained(self, *args, **kwargs) -> None:
        """As for any model.

        Raises:
            ValueError: the model was optimised for inference, which its configuration has no entry for.
        """
        if inference_report(self):
            raise ValueError(
                f"{type(self).__name__} was optimised for inference and its folder could not say so: save the trained "
                f"model and call jumbo_core.optimize_for_inference after loading it"
            )
        super().save_pretrained(*args, **kwargs)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func=checkpoint, every_n_layers: int = 1
    ) -> None:
        if every_n_layers != 1:
            raise ValueError(f"every block is checkpointed; every_n_layers must be 1, got {every_n_layers}")
        self.base_model.trunk.set_grad_checkpointing(enable)  # refuses what cannot be recomputed
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func)

    def _init_weights(self, module: nn.Module) -> None:
        """The rule of jumbo_core, through functions that leave tensors alone which a checkpoint has filled."""
        if isinstance(module, Mamba2Mixer):
            # The mixer's own rule writes past the host's guards: what a checkpoint has filled stays.
            module.reset_decay(keep=lambda parameter: getattr(parameter, "_is_hf_initialized", False))
        elif isinstance(module, nn.Linear):
            if self.config.init == "short" and any(module is f.fc2 for f in self.modules() if isinstance(f, JumboFFN)):
                initialization.zeros_(module.weight)
            else:
                initialization.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                initialization.zeros_(module.bias)
            if isinstance(module, ForecastHead) and module.mix is not None:
                initialization.zeros_(module.mix)
        elif isinstance(module, (nn.Conv1d, nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d)):
            module.reset_parameters()  # torch's default; the host guards it while it loads
        elif isinstance(module, GatedRMSNorm):
            initialization.ones_(module.weight)
        elif isinstance(module, RevIN):
            if module.weight is not None:
                initialization.ones_(module.weight)
                initialization.zeros_(module.bias)
        elif isinstance(module, (BlockStack, JumboSeries)):
            for token in module.parameters(recurse=False):  # learned tokens and positions
                initialization.trunc_normal_(token, std=0.02)
        elif self.config.layer_scale is not None:
            for name, gamma in module.named_parameters(recurse=False):
                if "gamma" in name:
                    initialization.constant_(gamma, self.config.layer_scale)


class JumboPatchTSTModel(JumboPatchTSTPreTrainedModel):
    """The encoder: a window -> tokens of every channel, ``[J slices | patches]``."""

    def __init__(self, config: JumboPatchTSTConfig) -> None:
        super().__init__(config)
        self.trunk = SeriesTrunk(**config.trunk_arguments())
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        past_values: torch.Tensor,
        past_observed_mask: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs,
    ) -> PatchTSTModelOutput:
        """Encode windows.

        Args:
            past_values: (B, L, C), of any floating dtype.
            past_observed_mask: (B, L, C), nonzero = observed; the other values may be anything. Default: all.
            output_hidden_states: return what the first block is given and every block's output, none of it normalised.
            output_attentions: refused: attention is fused here and has no weights to show.
            **kwargs: ``return_dict``.

        Returns:
            PatchTSTModelOutput: last_hidden_state (B, C, J + N, D) (1 in place of C with channel mixing), hidden_states
            of that shape, loc and scale (B, 1, C), None without scaling, patch_input (B, C, N, P), in units of these.

        Raises:
            ValueError: a shape or value that does not fit, named with what was expected.
            TypeError: a further input, for example of exogenous values.
        """
        encoded = self.encode(
            past_values,
            past_observed_mask,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            **kwargs,
        )
        trunk, (loc, scale) = self.trunk, self.location(encoded)
        x, mask = trunk.read(*self.arrange(past_values, past_observed_mask))
        normal = x if trunk.revin is None else trunk.revin.normalize(x, mask)[0]
        patches = to_patches(normal if mask is None else normal.masked_fill(~mask, 0), *self.patching)
        return PatchTSTModelOutput(
            last_hidden_state=self.join(encoded.tokens),
            hidden_states=self.hidden_states(encoded.blocks),
            loc=loc,
            scale=scale,
            patch_input=patches.to(x.dtype),
        )

    @property
    def patching(self) -> tuple[int, int]:
        """P and S."""
        return self.trunk.series.patch_len, self.trunk.series.stride

    def arrange(self, values: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, L, C), the host's order -> (B, C, L), ours, and a bool mask."""
        values, mask = tensor_of(values), tensor_of(mask)
        shape = (self.config.context_length, self.config.num_input_channels)
        if values.ndim != 3 or values.shape[1:] != shape:
            raise ValueError(
                f"past_values must be (B, {shape[0]} steps (context_length), {shape[1]} channels), got "
                f"{tuple(values.shape)}"
            )
        if mask is not None and mask.shape != values.shape:
            raise ValueError(
                f"past_observed_mask must have the shape of past_values {tuple(values.shape)}, got {tuple(mask.shape)}"
            )
        return values.transpose(1, 2), None if mask is None else mask.transpose(1, 2).bool()

    def encode(
        self,
        past_values: torch.Tensor,
        past_observed_mask: torch.Tensor | None = None,
        *,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs,
    ) -> Encoded:
        """What a head is given; arguments and errors as in ``forward``."""
        every = self.wants_every_block(output_hidden_states, output_attentions, kwargs)
        return self.trunk.encode(*self.arrange(past_values, past_observed_mask), every_block=every)

    def wants_every_block(self, hidden_states: bool | None, attentions: bool | None, others: Mapping) -> bool:
        """Check a call's options; whether it, or the configuration, asks for hidden states."""
        known = ("past_values", "past_observed_mask", "output_hidden_states", "future_values", "target_values")
        refuse_exogenous([name for name in others if name not in ("return_dict", "num_items_in_batch")], known)
        if self.config.output_attentions if attentions is None else attentions:
            raise ValueError(
                "output_attentions: attention is fused here, and a linear encoder has none; ask for hidden states"
            )
        return bool(self.config.output_hidden_states if hidden_states is None else hidden_states)

    def join(self, tokens: JumboOutput) -> torch.Tensor:
        """J slices and patches of all rows -> (B, C, J + N, D), or (B, 1, J + N, D) with channel mixing."""
        return torch.cat([tokens.jumbo, tokens.patches], dim=1).unflatten(0, (-1, self.trunk.rows))

    def hidden_states(self, blocks: Sequence[JumboOutput]) -> tuple[torch.Tensor, ...] | None:
        """As the host has them; None where they were not asked for."""
        return tuple(map(self.join, blocks)) or None

    def location(self, encoded: Encoded) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """RevIN's statistics as the host has them: loc and scale (B, 1, C)."""
        return (None, None) if encoded.stats is None else tuple(part.transpose(1, 2) for part in encoded.stats)
