"""Teachers, students and masks for the tests of ViTLinearizer."""

import torch
from timm.models.vision_transformer import VisionTransformer

from jumbo_core.models import AdventurerViT, JumboViT


def teacher_vit(**options):
    """Width 24, 6 blocks, a class token and 4 registers, patch 8."""
    options = {"depth": 6, "patch_size": 8, "dynamic_img_size": True, **options}
    return VisionTransformer(
        img_size=32, embed_dim=24, num_heads=2, num_classes=3, reg_tokens=4, no_embed_class=True, **options
    )


def adventurer(**options):
    options = {"depth": 4, "multiplier": 0, **options}
    return AdventurerViT(32, 8, num_classes=3, embed_dim=16, d_state=8, head_dim=8, **options)


def jumbo(**options):
    return JumboViT(32, 8, num_classes=3, embed_dim=16, depth=4, num_heads=2, multiplier=2, **options)


def mask_of(batch=2, patches=16, masked=12):
    order = torch.rand(batch, patches).argsort(dim=1)
    return order < masked
