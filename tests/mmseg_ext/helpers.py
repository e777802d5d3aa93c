"""Tiny backbones and segmentors for the tests."""

import mmseg_ext

TINY = dict(embed_dims=16, num_layers=3, num_heads=2, multiplier=2, img_size=32, patch_size=8, drop_path_rate=0.0)


def tiny(**options) -> mmseg_ext.JumboViT:
    return mmseg_ext.JumboViT(**{**TINY, **options})


def trainable_without_gradient(model) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
