"""Jumbo as a backbone of Transformers."""

from __future__ import annotations

from hf_ext.backbone_vision import VisionBackbone
from hf_ext.modeling_jumbo import JumboModel, JumboPreTrainedModel


class JumboBackbone(VisionBackbone, JumboPreTrainedModel):
    """A Jumbo ViT as a backbone: feature maps (B, D, h, w) of the patches, see :class:`VisionBackbone`."""

    encoder_class = JumboModel
