"""Preprocessing of the released Adventurer weights, as one of Transformers' own image processors."""

from __future__ import annotations

from transformers import BaseImageProcessor
from transformers.image_utils import PILImageResampling

from hf_ext.image_processing_jumbo import jumbo_image_processor
from jumbo_core import checks


def adventurer_image_processor(
    image_size: int | tuple[int, int] = 224,
    patch_size: int | tuple[int, int] = 16,
    *,
    crop_pct: float | None = None,
    **overrides,
) -> BaseImageProcessor:
    """The released evaluation transform: short side resized (bicubic), centre crop, ImageNet statistics.

    Source: the evaluation commands of the released code and the data loading (DeiT's) that it builds on.

    Args:
        image_size: side of the model's input, or (H, W). A non-square size is resized to directly, without a crop.
            Default 224.
        patch_size: the model's, int or (h, w): the released crop depends on it. Default 16.
        crop_pct: the short side is resized to ``image_size / crop_pct`` before the crop. Default None, as released:
            1 for patches below 16 px or images above 224 px, else 0.875.
        **overrides: see :func:`jumbo_image_processor`.

    Raises:
        ValueError: see :func:`jumbo_image_processor`.
    """
    if crop_pct is None:
        fine = min(checks.pair("patch_size", patch_size)) < 16 or max(checks.pair("image_size", image_size)) > 224
        crop_pct = 1.0 if fine else 0.875
    return jumbo_image_processor(image_size, crop_pct=crop_pct, **{"resample": PILImageResampling.BICUBIC, **overrides})
