"""Reading pretrained weights into the backbone, whoever wrote them; nothing in a file is ever executed."""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from mmengine.dist import barrier, is_main_process
from mmengine.logging import print_log
from safetensors.torch import load_file
from torch import nn

from jumbo_core.models.positions import grid_of_table, resample_positions
from jumbo_core.models.released import (
    RELEASED_FLIP,
    LoadReport,
    Renamed,
    fill,
    is_released_adventurer,
    load_released,
    read_state_dict,
    to_current_names,
)

# Where a model may sit in a file: bare (released, timm), in a model or a classifier of Transformers, our backbone in a
# segmentor. The longest fitting prefix is taken off.
_PREFIXES = ("backbone.vit.", "adventurer.vit.", "jumbo.vit.", "vit.", "backbone.")
_BLOCK = re.compile(r"encoder\.(?:blocks|jumbo_mlp)\.(\d+)\.")
# What stands behind the tokens in timm's classifiers.
_TIMM_HEADS = ("head.", "head_dist.", "fc_norm.", "attn_pool.", "pre_logits.")


class Weights(NamedTuple):
    """A file's tensors under their own names, and what it says about them beside.

    grid: patch grid (h, w) of its positions. flip: the flip rule it was trained under, if it is an Adventurer's.
    """

    tensors: dict[str, torch.Tensor]
    grid: tuple[int, int] | None = None
    flip: str | list[int] | None = None


def load_pretrained(
    backbone: nn.Module,
    checkpoint: str | Path,
    *,
    prefix: str | None = None,
    grid: Sequence[int] | None = None,
    map_location: str = "cpu",
) -> LoadReport:
    """Load a checkpoint into one of our backbones and log what was loaded, missing and ignored.

    An Adventurer's weights are meaningless under another flip rule than theirs, so the backbone takes over the one that
    comes with them: blocks 2 and 3 with a published file, the one in a Transformers folder's config or in a checkpoint
    of this backbone. A timm checkpoint names none: there the backbone's own ``flip`` must be the right one.

    Args:
        backbone: :class:`mmseg_ext.JumboViT`, :class:`mmseg_ext.AdventurerViT` or :class:`mmseg_ext.ToFuViT`, filled
            in place.
        checkpoint: a released ``.pth``, a ``.safetensors`` file, a folder of Transformers or timm (``config.json`` and
            ``model.safetensors``), a timm checkpoint or state dict, a checkpoint of MMSegmentation; or an ``https://``
            address of such a file, which is downloaded once into torch.hub's cache. A ToFuViT takes timm's names.
        prefix: take only the tensors below this prefix, as the host's ``Pretrained`` does. Default None: found out.
        grid: patch grid (h, w) that the file's positions were learned on. Default None: taken from a Transformers
            folder's config; else the backbone's own grid for checkpoints of this backbone and for tables that fit it
            and cannot be square; else square. Another grid than the backbone's is resampled bicubically.
        map_location: accepted for the host's sake; weights always go where the backbone is.

    Returns:
        LoadReport(missing, unexpected, ignored): parameters the file lacks, keys nobody knows, keys without use here
        (heads, the final norm while ``final_norm=False``, blocks that ``out_indices`` does not need). Keys of a
        published Adventurer file go under their current names.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: a file that would have to execute code or is no weight file, nothing in it fits, a tensor of another
            shape (both shapes are named), NaN or infinity in a tensor, a position table of unknown grid, an
            Adventurer's weights for a JumboViT.
    """
    vit = backbone.vit
    weights = read_weights(checkpoint)
    tensors, left_out, place = _below_prefix(weights.tensors, vit, prefix, checkpoint)
    if any(".mixer." in key for key in tensors) and not hasattr(backbone, "set_flip"):
        raise ValueError(
            f"{checkpoint} holds an Adventurer, which a {type(backbone).__name__} cannot take: use type='AdventurerViT'"
        )
    flip = _flip_rule(weights, tensors, place)
    tensors, without_use = _current_names(tensors, backbone)
    tensors, skipped = _without_unbuilt(tensors, backbone)
    grid = tuple(grid) if grid is not None else weights.grid
    tensors = _fit_positions(tensors, vit, grid, place == "backbone.vit.", checkpoint)
    try:
        if hasattr(vit, "encoder"):
            report = load_released(vit, tensors, grid=vit.patch_embed.grid_size)
        else:
            report = fill(vit, _without_timm_heads(tensors, vit))
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {error}") from None
    ignored = sorted([*report.ignored, *left_out, *without_use, *skipped])
    report = LoadReport(report.missing, report.unexpected, ignored)
    loaded = len(vit.state_dict()) - len(report.missing)
    print_log(
        f"{checkpoint}: loaded {loaded} tensors; missing {report.missing or 'none'}; "
        f"unexpected {report.unexpected or 'none'}; ignored {report.ignored or 'none'}",
        logger="current",
    )
    if flip is not None:
        _take_over(flip, backbone, checkpoint)
    return report


def read_weights(checkpoint: str | Path) -> Weights:
    """Tensors of a file, folder or address; see :func:`load_pretrained` for kinds and errors."""
    if str(checkpoint).startswith(("http://", "https://")):
        path = _download(str(checkpoint))
    else:
        path = Path(checkpoint).expanduser()
    if path.is_dir():
        return _read_transformers_folder(path)
    if not path.is_file():
        raise FileNotFoundError(f"no weight file or folder at {path}")
    if path.suffix == ".safetensors":
        return _with_config(read_state_dict(load_file(path)), path.with_name("config.json"))
    try:
        # timm's checkpoints carry the command line as an argparse.Namespace: plain data, safe to rebuild.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} cannot be read as weights alone: it is damaged, no checkpoint, or holds other objects, and those "
            f"are never executed. Save its state dict as a .safetensors file; checkpoints of MMSegmentation are "
            f"readable when they were saved with PlainMessageHubHook. ({error})"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a state dict of named tensors")
    return Weights(read_state_dict(content))


def _read_transformers_folder(folder: Path) -> Weights:
    index = folder / "model.safetensors.index.json"
    if index.is_file():  # large models come in pieces
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    tensors: dict[str, torch.Tensor] = {}
    for name in files:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} is no Transformers model: it has no {name}")
        tensors.update(load_file(folder / name))
    return _with_config(tensors, folder / "config.json")


def _with_config(tensors: dict[str, torch.Tensor], path: Path) -> Weights:
    """Tensors and what a Transformers config says about them, where there is one."""
    config = json.loads(path.read_text()) if path.is_file() else {}
    flip = config.get("flip") if config.get("model_type") == "adventurer" else None
    return Weights(tensors, _grid_of_config(config), flip)


def _grid_of_config(config: dict) -> tuple[int, int] | None:
    """Patch grid of a Transformers config, None where it names no sizes."""
    pairs = []
    for key in ("image_size", "patch_size"):
        value = config.get(key)
        pairs.append([value, value] if isinstance(value, int) else value)
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return None
    return pairs[0][0] // pairs[1][0], pairs[0][1] // pairs[1][1]


def _download(url: str) -> Path:
    # The address is part of the name: files of one name on two servers are two files.
    name = f"{hashlib.sha256(url.encode()).hexdigest()[:12]}-{url.partition('?')[0].rpartition('/')[2]}"
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if is_main_process() and not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(url, str(path))
        except OSError as error:
            raise OSError(
                f"cannot download {url} ({error}); fetch it yourself and give checkpoint= its path"
            ) from error
    barrier()  # the others wait until the file is there
    return path


def _below_prefix(
    tensors: dict[str, torch.Tensor], vit: nn.Module, prefix: str | None, source: str | Path
) -> tuple[dict[str, torch.Tensor], list[str], str]:
    """Tensors of the backbone without their prefix, the names of the others, and that prefix."""
    chosen = prefix or ""
    if chosen and not any(key.startswith(chosen) for key in tensors):
        raise ValueError(f"{source} has no tensor below {chosen!r}: it has {sorted(tensors)[:4]}…")
    inner = {key.removeprefix(chosen): value for key, value in tensors.items() if key.startswith(chosen)}
    embedding = "patch_embed.proj.weight"  # every file that could fit has it
    found = next((p for p in _PREFIXES if p + embedding in inner), "")
    chosen += found
    kept = {key.removeprefix(chosen): value for key, value in tensors.items() if key.startswith(chosen)}
    others = [key for key in tensors if not key.startswith(chosen) and key != _flip_key(chosen)]
    return kept, others, chosen


def _flip_key(place: str) -> str:
    """Name of the flip rule that an AdventurerViT of ours saved beside its weights."""
    return place.removesuffix("vit.") + "flipped"


def _flip_rule(weights: Weights, tensors: dict[str, torch.Tensor], place: str) -> str | list[int] | None:
    """The flip rule that comes with weights found at a place, None where nothing says it."""
    if is_released_adventurer(tensors):
        return list(RELEASED_FLIP)
    saved = weights.tensors.get(_flip_key(place))
    return weights.flip if saved is None else saved.nonzero().flatten().tolist()


def _take_over(flip: str | list[int], backbone: nn.Module, source: str | Path) -> None:
    before = backbone.flipped.nonzero().flatten().tolist()
    if not isinstance(flip, str):  # blocks that a deeper model had are among the unexpected keys
        flip = [i for i in flip if i < backbone.num_layers]
    try:
        backbone.set_flip(flip)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    after = backbone.flipped.nonzero().flatten().tolist()
    instead = "" if after == before else f", not {before} as the backbone was built"
    print_log(f"{source}: flip set to blocks {after}, as its weights were trained{instead}", logger="current")


def _current_names(tensors: dict[str, torch.Tensor], backbone: nn.Module) -> tuple[dict[str, torch.Tensor], list[str]]:
    """A published Adventurer file under current names, and its keys without use; other files as they are."""
    if not is_released_adventurer(tensors):
        return tensors, []
    # With the model's own grid named as the file's, positions pass through: they are fitted, and logged, later.
    renamed = to_current_names(tensors, backbone.vit, resample=False, grid=backbone.vit.patch_embed.grid_size)
    return renamed.weights, renamed.ignored


def _without_unbuilt(
    tensors: dict[str, torch.Tensor], backbone: nn.Module
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Leave out what this backbone would have with other options: later blocks and the final norm."""
    built = len(backbone.vit.blocks)

    def unbuilt(key: str) -> bool:
        name = key if key.startswith("encoder.") else f"encoder.{key}"
        if name.startswith("encoder.norm."):
            return not backbone.final_norm
        match = _BLOCK.match(name)
        return bool(match) and built <= int(match[1]) < backbone.num_layers

    skipped = [key for key in tensors if unbuilt(key)]
    return {key: value for key, value in tensors.items() if key not in skipped}, skipped


def _without_timm_heads(tensors: dict[str, torch.Tensor], vit: nn.Module) -> Renamed:
    own = vit.state_dict()
    heads = [key for key in tensors if key not in own and key.startswith(_TIMM_HEADS)]
    return Renamed({key: value for key, value in tensors.items() if key not in heads}, heads)


def _fit_positions(
    tensors: dict[str, torch.Tensor],
    vit: nn.Module,
    grid: tuple[int, int] | None,
    own_format: bool,
    source: str | Path,
) -> dict[str, torch.Tensor]:
    table = tensors.get("pos_embed")
    if table is None or vit.pos_embed is None or table.ndim != 3 or table.shape[-1] != vit.embed_dim:
        return tensors  # another width is reported with both shapes when the tensors are loaded
    target = tuple(vit.patch_embed.grid_size)
    prefix = vit.pos_embed.shape[1] - target[0] * target[1]  # timm's tables begin with the class token's entry
    count = table.shape[1] - prefix
    grid = grid_of_table(count, target, same_layout=own_format, given=grid)
    if grid is None or grid[0] * grid[1] != count:
        raise ValueError(
            f"{source} has a position table of {tuple(table.shape)}, "
            + (f"which is not the grid {tuple(grid)}" if grid else "of unknown grid (not square)")
            + f"; the backbone's grid is {target}. Name the file's grid: init_cfg=dict(…, grid=(h, w))"
        )
    if grid != target:
        print_log(f"{source}: positions resampled from grid {grid} to {target}", logger="current")
        patches = resample_positions(table[:, prefix:], grid, target)
        tensors = {**tensors, "pos_embed": torch.cat([table[:, :prefix], patches], dim=1)}
    return tensors
