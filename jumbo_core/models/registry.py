"""The image models under timm's names: sizes, published files, preprocessing."""

from __future__ import annotations

from typing import Any

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from jumbo_core.models.image import JumboViT
from jumbo_core.models.released import to_current_names


def checkpoint_filter_fn(state_dict: dict[str, torch.Tensor], model: JumboViT) -> dict[str, torch.Tensor]:
    """timm's hook: published names to ours, positions resampled to the model's grid (published tables are square)."""
    return to_current_names(state_dict, model, resample=True).weights


def _cfg(**kwargs) -> dict[str, Any]:
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 1.0,
        "interpolation": "bilinear",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "paper_ids": "arXiv:2502.15021",
        "paper_name": "Thicker and Quicker: A Jumbo Token for Fast Plain Vision Transformers",
        "origin_url": "https://github.com/antofuller/jumbo",
        **kwargs,
    }


default_cfgs = generate_default_cfgs(
    {
        **{
            f"jumbo_{size}_patch16_224.in1k": _cfg(hf_hub_id="antofuller/jumbo", hf_hub_filename=f"jumbo_{size}.pth")
            for size in ("pico", "nano", "tiny", "small", "base")
        },
        "jumbo_large_patch16_224.untrained": _cfg(),
        "test_jumbo.untrained": _cfg(input_size=(3, 32, 32)),
    }
)


def _create(variant: str, pretrained: bool, **kwargs) -> JumboViT:
    out_indices = kwargs.pop("out_indices", min(3, kwargs["depth"]))
    return build_model_with_cfg(
        JumboViT,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls="getter"),
        **kwargs,
    )


@register_model
def jumbo_pico_patch16_224(pretrained: bool = False, **kwargs) -> JumboViT:
    """D=96, 12 blocks, J=6, 4.779 M parameters; released weights 69.156 % top-1 on ImageNet-1k."""
    args = dict(embed_dim=96, depth=12, num_heads=3, multiplier=6)
    return _create("jumbo_pico_patch16_224", pretrained, **{**args, **kwargs})


@register_model
def jumbo_nano_patch16_224(pretrained: bool = False, **kwargs) -> JumboViT:
    """D=128, 12 blocks, J=6, 8.142 M parameters; released weights 74.528 % top-1 on ImageNet-1k."""
    args = dict(embed_dim=128, depth=12, num_heads=4, multiplier=6)
    return _create("jumbo_nano_patch16_224", pretrained, **{**args, **kwargs})


@register_model
def jumbo_tiny_patch16_224(pretrained: bool = False, **kwargs) -> JumboViT:
    """D=192, 12 blocks, J=6, 17.520 M parameters; released weights 78.366 % top-1 on ImageNet-1k."""
    args = dict(embed_dim=192, depth=12, num_heads=3, multiplier=6)
    return _create("jumbo_tiny_patch16_224", pretrained, **{**args, **kwargs})


@register_model
def jumbo_small_patch16_224(pretrained: bool = False, **kwargs) -> JumboViT:
    """D=384, 12 blocks, J=6, 66.890 M parameters; released weights 82.558 % top-1 on ImageNet-1k."""
    args = dict(embed_dim=384, depth=12, num_heads=6, multiplier=6)
    return _create("jumbo_small_patch16_224", pretrained, **{**args, **kwargs})


@register_model
def jumbo_base_patch16_224(pretrained: bool = False, **kwargs) -> JumboViT:
    """D=768, 12 blocks, J=3, 131.407 M parameters; released weights 84.954 % top-1 on ImageNet-1k."""
    args = dict(embed_dim=768, depth=12, num_heads=12, multiplier=3)
    return _create("jumbo_base_patch16_224", pretrained, **{**args, **kwargs})


@register_model
def jumbo_large_patch16_224(pretrained: bool = False, **kwargs) -> JumboViT:
    """D=1024, 24 blocks, J=3, 383.060 M parameters. Not a released size: the paper's authors published no weights or
    configuration for it, these numbers are ours."""
    args = dict(embed_dim=1024, depth=24, num_heads=16, multiplier=3)
    return _create("jumbo_large_patch16_224", pretrained, **{**args, **kwargs})


@register_model
def test_jumbo(pretrained: bool = False, **kwargs) -> JumboViT:
    """Tiny model for tests: 32 px, patch 8, D=16, 2 blocks, J=2."""
    args = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, multiplier=2)
    return _create("test_jumbo", pretrained, **{**args, **kwargs})
