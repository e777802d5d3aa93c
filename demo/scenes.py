"""Scenes of handwritten digits (scikit-learn's) on textured backgrounds, written in ADE20K's folder layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def write_scenes(root: Path, *, training: int = 1500, validation: int = 100, size: int = 48, seed: int = 0) -> Path:
    """Write ``images/{training,validation}/*.jpg`` and ``annotations/{training,validation}/*.png`` below ``root``.

    Each scene, ``size`` x ``size``, holds three to five digits of varied size and colour. Labels: 0 background, 1 + d
    for the digit d. Training and validation scenes use different people's digits. Returns ``root``.
    """
    digits = load_digits()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(digits.images))
    cut = int(0.8 * len(order))
    for split, count, members in (("training", training, order[:cut]), ("validation", validation, order[cut:])):
        folders = [root / kind / split for kind in ("images", "annotations")]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        for i in range(count):
            chosen = rng.choice(members, rng.integers(3, 6), replace=False)
            image, label = _scene(digits.images[chosen], digits.target[chosen], size, rng)
            Image.fromarray(image).save(folders[0] / f"scene_{i:04d}.jpg", quality=95)
            Image.fromarray(label).save(folders[1] / f"scene_{i:04d}.png")
    return root


def _scene(images: np.ndarray, targets: np.ndarray, size: int, rng) -> tuple[np.ndarray, np.ndarray]:
    canvas = _texture(size, rng)
    label = np.zeros((size, size), np.uint8)
    for pixels, target in zip(images, targets, strict=True):
        side = int(rng.integers(size // 3, size * 4 // 9 + 1))
        small = Image.fromarray((pixels * 15.9).astype(np.uint8))
        ink = np.asarray(small.resize((side, side), Image.Resampling.BICUBIC), np.float32) / 255
        for _ in range(20):  # a free place, or none
            y, x = rng.integers(0, size - side + 1, 2)
            area = (slice(y, y + side), slice(x, x + side))
            if not (label[area] * (ink > 0.4)).any():
                break
        else:
            continue
        colour = rng.uniform(150, 255, 3)  # of any hue, lighter than the background
        canvas[area] += ink[..., None] * (colour - canvas[area])
        label[area][ink > 0.4] = 1 + target
    return np.clip(canvas, 0, 255).astype(np.uint8), label


def _texture(size: int, rng) -> np.ndarray:
    """Clouds of three scales between two colours, with grain: (size, size, 3) float."""
    clouds = np.zeros((size, size), np.float32)
    for cells, weight in ((3, 0.5), (8, 0.3), (24, 0.2)):
        noise = Image.fromarray(rng.uniform(0, 1, (cells, cells)).astype(np.float32))
        clouds += weight * np.asarray(noise.resize((size, size), Image.Resampling.BICUBIC))
    dark, light = rng.uniform(0, 70, 3), rng.uniform(50, 130, 3)
    return dark + clouds[..., None] * (light - dark) + rng.normal(0, 8, (size, size, 1))
