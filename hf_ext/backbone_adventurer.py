"""The linear-time encoder as a backbone of Transformers."""

from __future__ import annotations

from hf_ext.backbone_vision import VisionBackbone
from hf_ext.modeling_adventurer import AdventurerModel, AdventurerPreTrainedModel


class AdventurerBackbone(VisionBackbone, AdventurerPreTrainedModel):
    """An Adventurer as a backbone: feature maps (B, D, h, w) of the patches, see :class:`VisionBackbone`."""

    encoder_class = AdventurerModel
