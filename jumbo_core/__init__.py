"""Fast plain Vision Transformers: the kernels, on torch and timm alone. Importing it registers the models with timm."""

from jumbo_core import distill, jumbo, linear, models, tofu

__version__ = "0.1.0"
__all__ = ["distill", "jumbo", "linear", "models", "tofu"]
