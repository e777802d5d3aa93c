"""Linear-time vision models for Transformers: Adventurer, and its variant with a Jumbo token."""

from __future__ import annotations

from torch import nn
from transformers import initialization

from hf_ext.configuration_adventurer import AdventurerConfig
from hf_ext.modeling_vision import VisionForImageClassification, VisionModel, VisionPreTrainedModel
from hf_ext.trunk import Trunk
from jumbo_core.linear import Mamba2Mixer
from jumbo_core.linear.mamba2 import GatedRMSNorm
from jumbo_core.models import AdventurerViT


class AdventurerTrunk(Trunk, AdventurerViT):
    """A headless AdventurerViT, see :class:`Trunk`."""


class AdventurerPreTrainedModel(VisionPreTrainedModel):
    """What all linear-time vision models share.

    Loaded in half precision, the mixers' decay parameters stay float32: a rounding error in them grows with the length
    of the sequence.
    """

    config_class = AdventurerConfig
    base_model_prefix = "adventurer"
    _no_split_modules = ["AdventurerBlock"]
    _keep_in_fp32_modules_strict = [r"\.mixer\.A_log$", r"\.mixer\.dt_bias$", r"\.mixer\.D$"]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Mamba2Mixer):
            # The mixer's own rule writes past the host's guards: what a checkpoint has filled stays.
            module.reset_decay(keep=lambda parameter: getattr(parameter, "_is_hf_initialized", False))
        elif isinstance(module, GatedRMSNorm):
            initialization.ones_(module.weight)
        else:
            super()._init_weights(module)

    def _check_attentions(self, requested: bool | None) -> None:
        if self.config.output_attentions if requested is None else requested:
            raise ValueError(
                "output_attentions: this model has no attention, its mixers are state-space models; ask for hidden "
                "states instead"
            )


class AdventurerModel(VisionModel, AdventurerPreTrainedModel):
    """The encoder: images -> normalised tokens and the pooled vector.

    Tokens run ``[patches | class token]``, or ``[patches | J slices of the Jumbo token]`` with ``multiplier > 0``: what
    is global stands **last**, in ``last_hidden_state`` and in every hidden state, and no patch is reversed there. The
    pooled vector is the class token, width D, or ``[J slices ; mean of the patches]``, width (J+1)*D.
    """

    trunk_class = AdventurerTrunk


class AdventurerForImageClassification(VisionForImageClassification, AdventurerPreTrainedModel):
    """Encoder and a linear classifier on the class token, or on ``[J slices ; mean of the patches]``.

    ``config.num_labels`` classes (0 = no classifier: logits are the pooled vector); ``config.init`` says how a new
    classifier starts.
    """

    encoder_class = AdventurerModel
