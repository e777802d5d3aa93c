"""Models and images from folders: what the command works on."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torch import nn

from jumbo_core import checks

ENDINGS = (".jpg", ".jpeg", ".png")


def load_model(source: str | Path, *, image_size: int | Sequence[int] | None = None, weights: bool = True) -> nn.Module:
    """A model in eval mode, from a timm folder or by its timm name.

    Args:
        source: folder with ``config.json`` and ``model.safetensors`` as ``timm.models.save_for_hf`` and
            ``push_to_hub`` write it, or a name such as "vit_base_patch16_224" or "jumbo_small_patch16_224".
        image_size: int or (H, W) to resample the model's positions to. Default: as saved.
        weights: load them (default); a name's are downloaded by timm. False leaves them random, for a trial.

    Raises:
        FileNotFoundError: a folder without config.json.
        ValueError: a folder of another library or without fitting weights, a name that timm does not know (similar
            ones are named).
    """
    folder = Path(source)
    if folder.is_dir():
        name = f"local-dir:{_check_folder(folder)}"
    else:
        name = str(source)
        if not timm.is_model(name):
            similar = difflib.get_close_matches(name, timm.list_models())
            hint = f"; similar names: {', '.join(similar)}" if similar else ""
            raise ValueError(f"unknown model {name!r}: neither a folder nor a model name that timm knows{hint}")
        if weights and not timm.models.is_model_pretrained(name):
            raise ValueError(f"nobody published weights for {name!r}: give a model folder, or ask for random weights")
    try:
        model = timm.create_model(name, pretrained=weights)
    except RuntimeError as error:  # unknown architecture, no weights file, weights of another shape
        raise ValueError(f"timm cannot load {source}: {error}") from error
    if image_size is not None:
        model.set_input_size(img_size=checks.pair("image_size", image_size))
    return model.eval()


def model_transform(model: nn.Module) -> Callable[[Image.Image], torch.Tensor]:
    """The preprocessing a timm model asks for: image -> (C, H, W) of the size and the channels the model is made for.

    A grey model (C = 1) that names a mean and a standard deviation for colours gets the average of each.

    Raises:
        ValueError: C is neither 1 nor 3; a model without timm's ``pretrained_cfg``, which says how its images look.
    """
    if not getattr(model, "pretrained_cfg", None):
        raise ValueError(
            f"{type(model).__name__} has no timm pretrained_cfg that says size, mean and deviation of its images: "
            f"give transform=..., a function image -> tensor (C, H, W)"
        )
    config, embed = resolve_model_data_config(model), getattr(model, "patch_embed", None)
    channels, *size = config["input_size"]
    # The model itself knows better: its arguments may differ from what its name stands for.
    first = model.pretrained_cfg.get("first_conv")
    if isinstance(first, str):
        channels = model.get_submodule(first).weight.shape[1]
    size = getattr(embed, "img_size", None) or size
    if channels not in (1, 3):
        raise ValueError(f"images have 1 or 3 channels, the model wants {channels}: give profile_folder a transform")
    if channels == 1:
        config = {**config, **{key: (sum(config[key]) / len(config[key]),) for key in ("mean", "std")}}
    prepare = create_transform(**{**config, "input_size": (channels, *size)}, is_training=False)
    mode = "L" if channels == 1 else "RGB"
    return lambda image: prepare(image.convert(mode))


def find_images(folder: str | Path) -> list[Path]:
    """All jpg and png files below a folder, sorted.

    Raises:
        FileNotFoundError: no such folder, or none in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no image folder at {folder}")
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and path.is_file())
    if not found:
        raise FileNotFoundError(f"no image in {folder} or below it (looked for {', '.join(ENDINGS)})")
    return found


class ImageBatches:
    """Batches (B, C, H, W) of images drawn from a folder, each image at most once; ``used`` says how many.

    A last batch of a single image is left out, for a profile needs pairs of images.

    Args:
        folder: see :func:`find_images`.
        transform: image -> tensor, as from :func:`model_transform`.
        batches: how many at most. Default 8.
        batch_size: images in each, at least 2. Default 16.
        seed: of the draw, by a generator of its own. Default 0.

    Raises:
        FileNotFoundError: no folder, no image.
        ValueError: only one image there; while iterating, an image that cannot be read (it is named).
    """

    def __init__(
        self,
        folder: str | Path,
        transform: Callable[[Image.Image], torch.Tensor],
        *,
        batches: int = 8,
        batch_size: int = 16,
        seed: int = 0,
    ) -> None:
        batches, batch_size = checks.integer("batches", batches), checks.integer("batch_size", batch_size, 2)
        paths = find_images(folder)
        self.found, self.transform = len(paths), transform
        order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(seed)).tolist()
        drawn = [paths[i] for i in order[: batches * batch_size]]
        groups = [drawn[i : i + batch_size] for i in range(0, len(drawn), batch_size)]
        self.groups = [group for group in groups if len(group) > 1]
        if not self.groups:
            raise ValueError(f"{folder} holds one image, {paths[0].name}: at least 2 are needed")
        self.used = sum(map(len, self.groups))

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for group in self.groups:
            yield torch.stack([self._read(path) for path in group])

    def _read(self, path: Path) -> torch.Tensor:
        try:
            with Image.open(path) as image:
                image.load()
                return self.transform(image)
        except (OSError, SyntaxError) as error:  # Pillow calls a broken PNG a SyntaxError
            raise ValueError(f"cannot read image {path}: {error}") from error


def _check_folder(folder: Path) -> Path:
    config = folder / "config.json"
    if not config.is_file():
        raise FileNotFoundError(f"{folder} is no model folder: it has no config.json")
    try:
        content = json.loads(config.read_text())
    except ValueError as error:
        raise ValueError(f"{config} is no JSON: {error}") from None
    if not isinstance(content, dict) or "architecture" not in content:
        kind = content.get("model_type") if isinstance(content, dict) else None
        hint = (
            f"Transformers wrote it (model_type {kind!r}); load the model there and call profile_folder (of "
            f"jumbo_core.tofu.profiling) with it and transform=..., the preprocessing of its images"
            if kind
            else ""
        )
        raise ValueError(f"{config} names no timm architecture" + (f": {hint}" if hint else ""))
    return folder
