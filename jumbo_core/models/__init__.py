"""Ready models on the kernels; importing this registers the image models with timm."""

from jumbo_core.models import registry as _registry  # noqa: F401 (importing it registers)
from jumbo_core.models.image import AdventurerViT, JumboViT
from jumbo_core.models.released import LoadReport, load_released

__all__ = ["AdventurerViT", "JumboViT", "LoadReport", "load_released"]
