"""Fast plain Vision Transformers: the kernels, on torch and timm alone. Importing it registers the models with timm."""

from jumbo_core import distill, jumbo, linear, models, tofu
from jumbo_core.inference import OptimizedFFN, inference_report, optimize_for_inference

__version__ = "0.1.0"
__all__ = [
    "OptimizedFFN",
    "distill",
    "inference_report",
    "jumbo",
    "linear",
    "models",
    "optimize_for_inference",
    "tofu",
]
