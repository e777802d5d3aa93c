"""Tiny linear-time backbones and the models of jumbo_core inside them."""

from torch import nn

from jumbo_core.models import AdventurerViT as CoreAdventurerViT
from mmseg_ext import AdventurerViT

SIZES = dict(d_state=8, head_dim=8, img_size=32, patch_size=8)
TINY = dict(embed_dims=16, num_layers=3, drop_path_rate=0.0, **SIZES)
JUMBO = dict(multiplier=2)


def tiny(**options) -> AdventurerViT:
    return AdventurerViT(**{**TINY, **options})


def core(**options) -> CoreAdventurerViT:
    return CoreAdventurerViT(**{**dict(num_classes=5, embed_dim=16, depth=3, **SIZES), **options})


def randomised(model: nn.Module) -> nn.Module:
    """Weights at which nothing is silent: not even A_log, whose initial values are of another size than the rest."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model
