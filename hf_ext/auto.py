"""Registration with Transformers' Auto classes, and of token fusion."""

from __future__ import annotations

from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
)

from hf_ext import tofu, tofu_adventurer, tofu_hosts, tofu_jumbo
from hf_ext.backbone_adventurer import AdventurerBackbone
from hf_ext.backbone_jumbo import JumboBackbone
from hf_ext.configuration_adventurer import AdventurerConfig
from hf_ext.configuration_jumbo import JumboConfig
from hf_ext.image_processing_jumbo import IMAGE_PROCESSORS
from hf_ext.modeling_adventurer import AdventurerForImageClassification, AdventurerModel
from hf_ext.modeling_jumbo import JumboForImageClassification, JumboModel


def register() -> None:
    """Make the Auto classes know "jumbo_vit" and "adventurer", and Transformers and our own models know token fusion.

    Doing it again changes nothing.
    """
    for module in (tofu, tofu_hosts, tofu_jumbo, tofu_adventurer):
        module.register()
    for config, model, classifier, backbone in (
        (JumboConfig, JumboModel, JumboForImageClassification, JumboBackbone),
        (AdventurerConfig, AdventurerModel, AdventurerForImageClassification, AdventurerBackbone),
    ):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModel.register(config, model, exist_ok=True)
        AutoModelForImageClassification.register(config, classifier, exist_ok=True)
        AutoBackbone.register(config, backbone, exist_ok=True)
        AutoImageProcessor.register(config, image_processor_classes=dict(IMAGE_PROCESSORS), exist_ok=True)
