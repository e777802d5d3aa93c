"""Small Vision Transformers of timm and of jumbo_core, and a plan for their three blocks."""

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from jumbo_core.models import JumboViT
from jumbo_core.tofu import FusionPlan

PLAN = FusionPlan(("prune", "average", "mlerp"), (3, 2, 4))
SIZES = {"embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}


def timm_vit(**options) -> VisionTransformer:
    return VisionTransformer(**{"img_size": 32, "patch_size": 8, **SIZES, **options}).eval()


def jumbo_vit(**options) -> JumboViT:
    model = JumboViT(32, 8, **{"multiplier": 3, **SIZES, **options}).eval()
    nn.init.normal_(model.head.weight, std=0.1)  # released: zero, and nothing could go wrong in the logits
    return model
