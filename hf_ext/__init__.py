"""Jumbo and linear-time vision models inside Hugging Face Transformers.

Importing it registers them with the Auto classes, and token fusion for vision models of Transformers with
``from_pretrained`` and :func:`apply_tofu`; it does no more.
"""

try:
    from packaging.version import Version as _Version
    from transformers import __version__ as _version

    if not (5, 24) <= _Version(_version).release[:2] < (6,):
        raise ImportError(f"found transformers {_version}")
except ImportError as error:
    raise ImportError(
        f"hf_ext needs transformers>=5.24,<6 and accelerate: pip install 'jumbo-vit[hf]' ({error})"
    ) from error

from hf_ext.auto import register as _register
from hf_ext.backbone_adventurer import AdventurerBackbone
from hf_ext.backbone_jumbo import JumboBackbone
from hf_ext.callbacks import PatchDropSchedule
from hf_ext.configuration_adventurer import AdventurerConfig
from hf_ext.configuration_jumbo import JumboConfig
from hf_ext.distillation import LinearizerTrainer
from hf_ext.image_processing_adventurer import adventurer_image_processor
from hf_ext.image_processing_jumbo import jumbo_image_processor
from hf_ext.modeling_adventurer import AdventurerForImageClassification, AdventurerModel, AdventurerPreTrainedModel
from hf_ext.modeling_jumbo import JumboForImageClassification, JumboModel, JumboPreTrainedModel
from hf_ext.tofu import apply_tofu, remove_tofu

_register()

__all__ = [
    "AdventurerBackbone",
    "AdventurerConfig",
    "AdventurerForImageClassification",
    "AdventurerModel",
    "AdventurerPreTrainedModel",
    "JumboBackbone",
    "JumboConfig",
    "JumboForImageClassification",
    "JumboModel",
    "JumboPreTrainedModel",
    "LinearizerTrainer",
    "PatchDropSchedule",
    "adventurer_image_processor",
    "apply_tofu",
    "jumbo_image_processor",
    "remove_tofu",
]
