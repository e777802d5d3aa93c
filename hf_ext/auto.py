"""Registration with Transformers' Auto classes."""

from __future__ import annotations

from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
)

from hf_ext.backbone_jumbo import JumboBackbone
from hf_ext.configuration_jumbo import JumboConfig
from hf_ext.image_processing_jumbo import IMAGE_PROCESSORS
from hf_ext.modeling_jumbo import JumboForImageClassification, JumboModel


def register() -> None:
    """Make the Auto classes know "jumbo_vit"; doing it again changes nothing."""
    AutoConfig.register(JumboConfig.model_type, JumboConfig, exist_ok=True)
    AutoModel.register(JumboConfig, JumboModel, exist_ok=True)
    AutoModelForImageClassification.register(JumboConfig, JumboForImageClassification, exist_ok=True)
    AutoBackbone.register(JumboConfig, JumboBackbone, exist_ok=True)
    AutoImageProcessor.register(JumboConfig, image_processor_classes=dict(IMAGE_PROCESSORS), exist_ok=True)
