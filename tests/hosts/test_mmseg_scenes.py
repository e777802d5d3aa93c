"""The demo's scenes: ADE20K's folder layout, sane labels, the same for the same seed."""

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("sklearn", reason="needs the extra dev")

from demo.scenes import write_scenes


def read(folder):
    return {str(p.relative_to(folder)): np.asarray(Image.open(p)) for p in sorted(folder.rglob("*.*"))}


def test_layout_labels_and_seed(tmp_path):
    sizes = dict(training=12, validation=3, size=48)
    files = read(write_scenes(tmp_path / "a", **sizes, seed=1))
    assert sum(name.startswith("images/training/") for name in files) == 12
    assert {name.replace("images", "annotations").replace(".jpg", ".png") for name in files} <= set(files)
    labels = [array for name, array in files.items() if name.startswith("annotations/")]
    assert all(array.shape == (48, 48) and array.max() <= 10 for array in labels)
    assert all(2 <= len(np.unique(array)) <= 6 for array in labels)  # background and up to five digits
    assert 0.05 < np.mean([(array > 0).mean() for array in labels]) < 0.5
    again = read(write_scenes(tmp_path / "b", **sizes, seed=1))
    assert all(np.array_equal(array, again[name]) for name, array in files.items())
    other = read(write_scenes(tmp_path / "c", **sizes, seed=2))
    assert not all(np.array_equal(array, other[name]) for name, array in files.items())
