"""Jumbo vision models for Transformers."""

from __future__ import annotations

from functools import partial

from timm.layers import LayerScale
from torch import nn
from transformers import initialization

from hf_ext.attention import AttentionCore, JumboAttention
from hf_ext.configuration_jumbo import JumboConfig
from hf_ext.modeling_vision import VisionForImageClassification, VisionModel, VisionPreTrainedModel
from hf_ext.trunk import Recorder, Trunk
from jumbo_core.models import JumboViT


class JumboTrunk(Trunk, JumboViT):
    """A headless JumboViT, see :class:`Trunk`."""


class JumboPreTrainedModel(VisionPreTrainedModel):
    """What all Jumbo vision models share."""

    config_class = JumboConfig
    base_model_prefix = "jumbo"
    _no_split_modules = ["JumboBlock"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": Recorder, "attentions": AttentionCore}

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, LayerScale):
            initialization.constant_(module.gamma, self.config.layer_scale)
        else:
            super()._init_weights(module)

    def _check_attentions(self, requested: bool | None) -> None:
        if (self.config.output_attentions if requested is None else requested) and (
            self.config._attn_implementation != "eager"
        ):
            raise ValueError(
                f"attention implementation {self.config._attn_implementation!r} keeps no attention weights; call "
                f"model.set_attn_implementation('eager') or load with attn_implementation='eager' to get attentions"
            )


class JumboModel(VisionModel, JumboPreTrainedModel):
    """The encoder: images -> normalised tokens and the pooled vector.

    Tokens run ``[J slices of the Jumbo token (or class token) | registers | patches]``. The pooled vector is
    ``[J slices ; mean of the patches]``, width (J+1)*D, or the class token when ``multiplier=0``.
    """

    trunk_class = JumboTrunk

    def _trunk_arguments(self) -> dict:
        return super()._trunk_arguments() | dict(attn_layer=partial(JumboAttention, self.config))


class JumboForImageClassification(VisionForImageClassification, JumboPreTrainedModel):
    """Encoder and a linear classifier on ``[J slices ; mean of the patches]``, or on the class token.

    ``config.num_labels`` classes (0 = no classifier: logits are the pooled vector); ``config.init`` says how a new
    classifier starts.
    """

    encoder_class = JumboModel
