"""Models for the tests of optimize_for_inference, and how far their answers may lie apart."""

import copy

import timm
import torch
from torch import nn

from jumbo_core import optimize_for_inference

# Relative error of logits, the Jumbo FFN's weights and inputs being rounded to 8 bits each, or to bfloat16.
TOLERANCE = {"int8": 0.06, "bfloat16": 0.03}


def trained(name: str = "test_jumbo", **options) -> nn.Module:
    """A model with weights away from their start, so that the Jumbo FFN matters."""
    model = timm.create_model(name, **{"num_classes": 5, "init": "short", **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def images(batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def optimised(model: nn.Module, dtype: str = "int8") -> nn.Module:
    return optimize_for_inference(copy.deepcopy(model), dtype=dtype)
