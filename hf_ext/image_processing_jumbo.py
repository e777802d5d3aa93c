"""Preprocessing of the released weights, as one of Transformers' own image processors.

A Transformers class rather than one of ours, so that a saved ``preprocessor_config.json`` opens without this package.
"""

from __future__ import annotations

import math

from transformers import BaseImageProcessor, DeiTImageProcessor, DeiTImageProcessorPil
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, PILImageResampling

from jumbo_core import checks

IMAGE_PROCESSORS = {"torchvision": DeiTImageProcessor, "pil": DeiTImageProcessorPil}


def jumbo_image_processor(
    image_size: int | tuple[int, int] = 224, *, crop_pct: float = 1.0, backend: str = "torchvision", **overrides
) -> BaseImageProcessor:
    """The released evaluation transform: short side to ``image_size`` (bilinear), centre crop, ImageNet statistics.

    Source: the data loading of the released code, with which its ImageNet accuracies were measured.

    Args:
        image_size: side of the model's input, or (H, W). A non-square size is resized to directly, without a crop.
            Default 224.
        crop_pct: the short side is resized to ``image_size / crop_pct`` before the crop. Default 1, as released.
        backend: "torchvision" (default) or "pil".
        **overrides: any option of the Transformers processor, such as ``image_mean``, ``image_std``, ``resample``.

    Raises:
        ValueError: ``image_size`` not one or two positive integers, ``crop_pct`` outside (0, 1] or an unknown backend.
    """
    if not 0 < crop_pct <= 1:
        raise ValueError(f"crop_pct must lie in (0, 1], got {crop_pct}")
    if backend not in IMAGE_PROCESSORS:
        raise ValueError(f"backend must be one of {sorted(IMAGE_PROCESSORS)}, got {backend!r}")
    height, width = checks.pair("image_size", image_size)
    shape = {"height": height, "width": width}
    square = height == width
    options = {
        "size": {"shortest_edge": math.floor(height / crop_pct)} if square else shape,
        "do_center_crop": square,
        "crop_size": shape,
        "resample": PILImageResampling.BILINEAR,
        "image_mean": list(IMAGENET_DEFAULT_MEAN),
        "image_std": list(IMAGENET_DEFAULT_STD),
    }
    return IMAGE_PROCESSORS[backend](**{**options, **overrides})
