"""Class names of a classifier."""

from __future__ import annotations

import json
from pathlib import Path

from timm.data import ImageNetInfo


def imagenet_labels() -> list[str]:
    """Names of the 1,000 ImageNet classes in the order of the released heads; two classes of one name get their
    synset added, so that names are unique."""
    info = ImageNetInfo()
    names = [info.index_to_description(i) for i in range(info.num_classes())]
    return [
        f"{name} ({info.index_to_label_name(i)})" if names.count(name) > 1 else name for i, name in enumerate(names)
    ]


def read_labels(path: str | Path, num_labels: int) -> list[str]:
    """Class names in order of class, from a JSON list, a JSON object {index: name}, or a text file, one name a line.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not one unique name for each of the ``num_labels`` classes.
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    names = json.loads(text) if path.suffix == ".json" else [line for line in text.splitlines() if line.strip()]
    if isinstance(names, dict):
        by_index = {int(index): name for index, name in names.items()}
        if sorted(by_index) != list(range(num_labels)):
            raise ValueError(f"{path} must name the classes 0..{num_labels - 1}, it names {len(by_index)} others")
        names = [by_index[i] for i in range(num_labels)]
    if not isinstance(names, list) or len(names) != num_labels or not all(isinstance(n, str) for n in names):
        count = len(names) if isinstance(names, list) else type(names).__name__
        raise ValueError(f"{path} must hold {num_labels} class names, it holds {count}")
    if len(set(names)) != len(names):
        double = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"class names must be unique, {path} repeats {double[:5]}")
    return names
