"""The image models under timm's names: sizes, published files, preprocessing."""

from __future__ import annotations

from typing import Any

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from jumbo_core.models.image import AdventurerViT, JumboViT
from jumbo_core.models.released import (
    is_released_adventurer,
    read_state_dict,
    set_released_flip,
    to_current_names,
)


def checkpoint_filter_fn(
    state_dict: dict[str, torch.Tensor], model: JumboViT | AdventurerViT
) -> dict[str, torch.Tensor]:
    """timm's hook: published names to ours, positions resampled to the model's grid (published tables are square)."""
    if is_released_adventurer(read_state_dict(state_dict)):
        set_released_flip(model)
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


def _adventurer_cfg(**kwargs) -> dict[str, Any]:
    """Preprocessing of the authors' evaluation: bicubic, crop 0.875."""
    return _cfg(
        **{
            "crop_pct": 0.875,
            "interpolation": "bicubic",
            "paper_ids": "arXiv:2410.07599",
            "paper_name": "Causal Image Modeling for Efficient Visual Understanding",
            "origin_url": "https://github.com/wangf3014/Adventurer",
            **kwargs,
        }
    )


def _linear_cfg(**kwargs) -> dict[str, Any]:
    """Jumbo-linear is ours: no paper, no published weights."""
    return _cfg(**{"paper_ids": None, "paper_name": None, "origin_url": None, **kwargs})


default_cfgs = generate_default_cfgs(
    {
        **{
            f"jumbo_{size}_patch16_224.in1k": _cfg(hf_hub_id="antofuller/jumbo", hf_hub_filename=f"jumbo_{size}.pth")
            for size in ("pico", "nano", "tiny", "small", "base")
        },
        "jumbo_large_patch16_224.untrained": _cfg(),
        "test_jumbo.untrained": _cfg(input_size=(3, 32, 32)),
        **{
            f"adventurer_{size}_patch16_224.in1k": _adventurer_cfg(
                hf_hub_id="Wangf3014/Adventurer", hf_hub_filename=f"adventurer_{size}_patch16_224.pth"
            )
            for size in ("tiny", "small", "base", "large")
        },
        **{f"jumbo_adventurer_{size}_patch16_224.untrained": _linear_cfg() for size in ("tiny", "small", "base")},
        "test_adventurer.untrained": _adventurer_cfg(input_size=(3, 32, 32)),
        "test_jumbo_adventurer.untrained": _linear_cfg(input_size=(3, 32, 32)),
    }
)


def _create(variant: str, pretrained: bool, *, model_cls=JumboViT, **kwargs) -> JumboViT | AdventurerViT:
    out_indices = kwargs.pop("out_indices", min(3, kwargs["depth"]))
    return build_model_with_cfg(
        model_cls,
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


@register_model
def adventurer_tiny_patch16_224(pretrained: bool = False, **kwargs) -> AdventurerViT:
    """D=256, 12 blocks, 11.61 M parameters, class token last; loading the authors' weights sets their flip rule."""
    args = dict(embed_dim=256, depth=12)
    return _create("adventurer_tiny_patch16_224", pretrained, model_cls=AdventurerViT, **{**args, **kwargs})


@register_model
def adventurer_small_patch16_224(pretrained: bool = False, **kwargs) -> AdventurerViT:
    """D=512, 12 blocks, 44.49 M parameters, class token last; loading the authors' weights sets their flip rule."""
    args = dict(embed_dim=512, depth=12)
    return _create("adventurer_small_patch16_224", pretrained, model_cls=AdventurerViT, **{**args, **kwargs})


@register_model
def adventurer_base_patch16_224(pretrained: bool = False, **kwargs) -> AdventurerViT:
    """D=768, 12 blocks, 98.66 M parameters, class token last; loading the authors' weights sets their flip rule."""
    args = dict(embed_dim=768, depth=12)
    return _create("adventurer_base_patch16_224", pretrained, model_cls=AdventurerViT, **{**args, **kwargs})


@register_model
def adventurer_large_patch16_224(pretrained: bool = False, **kwargs) -> AdventurerViT:
    """D=1024, 24 blocks, 346.20 M parameters, class token last; loading the authors' weights sets their flip rule."""
    args = dict(embed_dim=1024, depth=24)
    return _create("adventurer_large_patch16_224", pretrained, model_cls=AdventurerViT, **{**args, **kwargs})


@register_model
def jumbo_adventurer_tiny_patch16_224(pretrained: bool = False, **kwargs) -> AdventurerViT:
    """Jumbo-linear, our own combination: D=256, 12 blocks, J=6 slices of a Jumbo token in place of the class token."""
    args = dict(embed_dim=256, depth=12, multiplier=6)
    return _create("jumbo_adventurer_tiny_patch16_224", pretrained, model_cls=AdventurerViT, **{**args, **kwargs})


@register_model
def jumbo_adventurer_small_patch16_224(pretrained: bool = False, **kwargs) -> AdventurerViT:
    """Jumbo-linear, our own combination: D=512, 12 blocks, J=6 slices of a Jumbo token in place of the class token."""
    args = dict(embed_dim=512, depth=12, multiplier=6)
    return _create("jumbo_adventurer_small_patch16_224", pretrained, model_cls=AdventurerViT, **{**args, **kwargs})


@register_model
def jumbo_adventurer_base_patch16_224(pretrained: bool = False, **kwargs) -> AdventurerViT:
    """Jumbo-linear, our own combination: D=768, 12 blocks, J=3 slices of a Jumbo token in place of the class token."""
    args = dict(embed_dim=768, depth=12, multiplier=3)
    return _create("jumbo_adventurer_base_patch16_224", pretrained, model_cls=AdventurerViT, **{**args, **kwargs})


@register_model
def test_adventurer(pretrained: bool = False, **kwargs) -> AdventurerViT:
    """Tiny model for tests: 32 px, patch 8, D=16, 2 blocks, state 8, heads of 8."""
    args = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, d_state=8, head_dim=8)
    return _create("test_adventurer", pretrained, model_cls=AdventurerViT, **{**args, **kwargs})


@register_model
def test_jumbo_adventurer(pretrained: bool = False, **kwargs) -> AdventurerViT:
    """Tiny Jumbo-linear model for tests: as test_adventurer, with J=2."""
    args = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, d_state=8, head_dim=8, multiplier=2)
    return _create("test_jumbo_adventurer", pretrained, model_cls=AdventurerViT, **{**args, **kwargs})
