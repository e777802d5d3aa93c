"""Published weight files: read them safely, rename them, load them, and report what was not used."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from jumbo_core.models.positions import grid_of_table, resample_positions

logger = logging.getLogger(__name__)

# Names at the top level of a published Jumbo file that live inside our encoder.
_ENCODER = ("jumbo_token", "blocks", "jumbo_mlp", "norm")
# Blocks that the published Adventurer code reverses; its weights were trained that way.
RELEASED_FLIP = (2, 3)
# Where training scripts put it; averaged weights come first, as in timm.
_WRAPPERS = ("state_dict_ema", "model_ema", "model", "state_dict", "model_state_dict", "module")


@dataclass(frozen=True)
class LoadReport:
    """What :func:`load_released` did, as sorted key names.

    missing: parameters of the model the file does not have. unexpected: keys of the file no rule knows.
    ignored: keys of the file that are known and have no use here (the dead ``cls_token``, a head the model lacks).
    """

    missing: list[str]
    unexpected: list[str]
    ignored: list[str]


@dataclass
class Renamed:
    """A state dict under current names and the published keys that were left out on purpose."""

    weights: dict[str, torch.Tensor]
    ignored: list[str] = field(default_factory=list)


def load_released(
    model: nn.Module,
    source: str | Path | Mapping[str, torch.Tensor],
    *,
    resample: bool = False,
    grid: tuple[int, int] | None = None,
) -> LoadReport:
    """Load a published file into a :class:`JumboViT` or :class:`AdventurerViT` of the same shape.

    A published Adventurer file also sets the flip rule of the released code, blocks 2 and 3, and says so in the log:
    its weights are meaningless under another one. A state dict of ours does not say its rule, as it says no number of
    heads: load it into a model made with the same ``flip``.

    Args:
        model: the model to fill, in place.
        source: path of a ``.pth``/``.pt``/``.bin`` (read with ``weights_only=True``) or ``.safetensors`` file, or a
            state dict. ``{"model": …}`` style wrappers and ``module.`` prefixes are taken off; so is the ``weight.``
            prefix of the golden files.
        resample: bicubically resample the position table when the model has another grid. Default False: an error.
        grid: patch grid (h, w) of the file's positions. Default None: found out, see :func:`grid_of_table`.

    Returns:
        LoadReport; missing and unexpected keys are also logged as a warning.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a tensor of another shape (both shapes are named), a tensor with NaN or infinity, or a file in
            which nothing fits the model.
    """
    state = read_state_dict(source)
    report = fill(model, to_current_names(state, model, resample=resample, grid=grid))
    if is_released_adventurer(state):
        set_released_flip(model)
    if report.missing or report.unexpected:
        logger.warning("load_released: missing %s, unexpected %s", report.missing, report.unexpected)
    return report


def fill(model: nn.Module, renamed: Renamed) -> LoadReport:
    """Load tensors under the model's own names into it; errors as :func:`load_released`."""
    own = model.state_dict()
    clashes = [
        f"{key}: file {tuple(value.shape)}, model {tuple(own[key].shape)}"
        for key, value in renamed.weights.items()
        if key in own and value.shape != own[key].shape
    ]
    if clashes:
        hint = "; resample=True resizes positions" if any(c.startswith("pos_embed") for c in clashes) else ""
        raise ValueError(f"{len(clashes)} tensors of another shape than the model's: {'; '.join(clashes[:5])}{hint}")
    usable = {key: value for key, value in renamed.weights.items() if key in own}
    if not usable:
        raise ValueError(
            f"no key of the file fits {type(model).__name__}: the file has {sorted(renamed.weights)[:4]}…, "
            f"the model wants {sorted(own)[:4]}…"
        )
    for key, value in usable.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise ValueError(f"{key} in the file holds NaN or infinite values: the file is damaged")
    model.load_state_dict(usable, strict=False)
    return LoadReport(
        missing=sorted(key for key in set(own) - set(usable) if not _is_made_of_weights(key, own, usable)),
        unexpected=sorted(set(renamed.weights) - set(own)),
        ignored=sorted(renamed.ignored),
    )


def _is_made_of_weights(key: str, own: Mapping[str, torch.Tensor], usable: Mapping[str, torch.Tensor]) -> bool:
    """Whether it is the scale of an int8 layer, which loading makes of the file's float weights."""
    weight = key.removesuffix("scale") + "weight"
    if not key.endswith(".scale") or weight not in usable:
        return False
    return own[weight].dtype == torch.int8 and usable[weight].is_floating_point()


def read_state_dict(source: str | Path | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a file or mapping, without executing code from it; wrappers and ``module.`` prefixes are taken off."""
    if isinstance(source, Mapping):
        state = source
    else:
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"no weight file at {path}")
        state = _read_file(path)
    while isinstance(state, Mapping) and (
        inner := [state[name] for name in _WRAPPERS if isinstance(state.get(name), Mapping)]
    ):
        state = inner[0]
    if not isinstance(state, Mapping) or not state:
        raise ValueError(f"expected a state dict of named tensors, got {type(state).__name__} without any")
    strangers = [k for k, v in state.items() if not isinstance(v, torch.Tensor) or not isinstance(k, str)]
    if strangers:
        raise ValueError(f"expected a state dict of named tensors, these are none: {strangers[:5]}")
    while all(key.startswith("module.") for key in state):
        state = {key.removeprefix("module."): value for key, value in state.items()}
    if any(key.startswith("weight.") for key in state):
        state = {key.removeprefix("weight."): v for key, v in state.items() if key.startswith("weight.")}
    return dict(state)


def _read_file(path: Path) -> object:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, SafetensorError, RuntimeError, EOFError, KeyError) as error:
        # torch's own text advises to switch the protection off; nothing here ever does.
        raise ValueError(
            f"{path} cannot be read as weights alone: it is damaged, no checkpoint, or holds other objects than "
            f"tensors, which are never executed. Save its state dict as a .safetensors file ({type(error).__name__})"
        ) from None


def to_current_names(
    state: Mapping[str, torch.Tensor],
    model: nn.Module,
    *,
    resample: bool,
    grid: tuple[int, int] | None = None,
) -> Renamed:
    """Published names -> names of this library; keys that are current already pass through.

    ``resample`` and ``grid``: see :func:`load_released`.
    """
    state = read_state_dict(state)
    own = model.state_dict()
    ours = any(key.startswith("encoder.") for key in state)
    if is_released_adventurer(state):
        state = _from_adventurer(state)
    out = Renamed({})
    for key, value in state.items():
        if key == "cls_token" and "encoder.cls_token" not in own:
            out.ignored.append(key)  # released Jumbo files carry one that the forward pass never touches
            continue
        name = f"encoder.{key}" if key.split(".")[0] in (*_ENCODER, "cls_token", "reg_token") else key
        if name.startswith("head.") and not any(k.startswith("head.") for k in own):
            out.ignored.append(key)
            continue
        out.weights[name] = value
    table = out.weights.get("pos_embed")
    if table is not None and table.ndim == 3 and "pos_embed" in own:
        target = tuple(model.patch_embed.grid_size)
        file_grid = grid_of_table(table.shape[1], target, same_layout=ours, given=grid)
        if file_grid == target:
            return out
        if not resample and table.shape[1] == target[0] * target[1]:
            raise ValueError(
                f"the file's {table.shape[1]} positions are a {file_grid[0]}x{file_grid[1]} grid, the model's are "
                f"{target[0]}x{target[1]}; resample=True resizes them, grid=(h, w) tells the file's grid"
            )
        if resample:
            if file_grid is None:
                raise ValueError(
                    f"cannot resample a position table of {table.shape[1]} entries: its grid is not square, so it is "
                    f"unknown; give grid=(h, w)"
                )
            out.weights["pos_embed"] = resample_positions(table, file_grid, target)
    return out


def is_released_adventurer(state: Mapping[str, torch.Tensor]) -> bool:
    """Whether these are the tensors of a published Adventurer file."""
    return any(key.startswith("layers.") and ".mixer." in key for key in state)


def set_released_flip(model: nn.Module) -> None:
    """Let an AdventurerViT reverse the blocks that published weights were trained with; others stay as they are."""
    if hasattr(model, "set_flip"):
        model.set_flip(tuple(i for i in RELEASED_FLIP if i < len(model.blocks)))
        logger.info("published Adventurer weights: flip set to blocks %s", model.encoder.flip)


# Parts of a published Adventurer block under other names here: w1, w2, w3 are SwiGLU's gate, value and output.
_ADVENTURER_PARTS = {".mlp.w1.": ".mlp.fc1_g.", ".mlp.w2.": ".mlp.fc1_x.", ".mlp.w3.": ".mlp.fc2."}


def _from_adventurer(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A published Adventurer file under the names of a published Jumbo file."""
    out = {}
    for key, value in state.items():
        key = re.sub(r"^layers\.", "blocks.", key)
        key = re.sub(r"^norm_f\.", "norm.", key)
        for theirs, own in _ADVENTURER_PARTS.items():
            key = key.replace(theirs, own)
        out[key] = value
    table, token = out.get("pos_embed"), out.get("cls_token")
    if table is not None and token is not None and table.ndim == 3 and table.shape[-1] == token.shape[-1]:
        # The class token stands last and has the last entry of the table; the learned token here is their sum.
        out["cls_token"], out["pos_embed"] = token + table[:, -1:], table[:, :-1]
    return out
