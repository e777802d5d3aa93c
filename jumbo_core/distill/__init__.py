"""Seed 2, the training: distil a ViT into a linear-time student (ViT-Linearizer, arXiv 2504.00037)."""

from jumbo_core.distill.activation import (
    activation_map,
    activation_matching_loss,
    activation_matching_reference,
)
from jumbo_core.distill.linearizer import ViTLinearizer, map_distance
from jumbo_core.distill.masked import masked_prediction_loss, random_mask
from jumbo_core.distill.picture import plot_activation_maps
from jumbo_core.distill.stages import StageFeatures
from jumbo_core.distill.teachers import Teacher, as_teacher

__all__ = [
    "StageFeatures",
    "Teacher",
    "ViTLinearizer",
    "activation_map",
    "activation_matching_loss",
    "activation_matching_reference",
    "as_teacher",
    "map_distance",
    "masked_prediction_loss",
    "plot_activation_maps",
    "random_mask",
]
