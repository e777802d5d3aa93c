"""Published weight files: read them safely, rename them, load them, and report what was not used."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from jumbo_core.models.positions import resample_positions, square_grid

logger = logging.getLogger(__name__)

# Names at the top level of a published Jumbo file that live inside our encoder.
_ENCODER = ("jumbo_token", "blocks", "jumbo_mlp", "norm")
_WRAPPERS = ("model", "state_dict", "model_state_dict", "module")


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
    model: nn.Module, source: str | Path | Mapping[str, torch.Tensor], *, resample: bool = False
) -> LoadReport:
    """Load a published Jumbo file into a :class:`JumboViT` of the same shape.

    Args:
        model: the model to fill, in place.
        source: path of a ``.pth``/``.pt``/``.bin`` (read with ``weights_only=True``) or ``.safetensors`` file, or a
            state dict. ``{"model": …}`` style wrappers and ``module.`` prefixes are taken off; so is the ``weight.``
            prefix of the golden files.
        resample: bicubically resample the position table when the model has another grid. Default False: an error.

    Returns:
        LoadReport; missing and unexpected keys are also logged as a warning.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a tensor of another shape (both shapes are named), a tensor with NaN or infinity, or a file in
            which nothing fits the model.
    """
    renamed = to_current_names(read_state_dict(source), model, resample=resample)
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
    report = LoadReport(
        missing=sorted(set(own) - set(usable)),
        unexpected=sorted(set(renamed.weights) - set(own)),
        ignored=sorted(renamed.ignored),
    )
    if report.missing or report.unexpected:
        logger.warning("load_released: missing %s, unexpected %s", report.missing, report.unexpected)
    return report


def read_state_dict(source: str | Path | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a file or mapping, without executing code from it; wrappers and ``module.`` prefixes are taken off."""
    if isinstance(source, Mapping):
        state = source
    else:
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"no weight file at {path}")
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    for wrapper in _WRAPPERS:
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    if not isinstance(state, Mapping) or not state:
        raise ValueError(f"expected a state dict of named tensors, got {type(state).__name__}")
    strangers = [k for k, v in state.items() if not isinstance(v, torch.Tensor)]
    if strangers:
        raise ValueError(f"expected a state dict of named tensors, these are none: {strangers[:5]}")
    while all(key.startswith("module.") for key in state):
        state = {key.removeprefix("module."): value for key, value in state.items()}
    if any(key.startswith("weight.") for key in state):
        state = {key.removeprefix("weight."): v for key, v in state.items() if key.startswith("weight.")}
    return dict(state)


def to_current_names(state: Mapping[str, torch.Tensor], model: nn.Module, *, resample: bool) -> Renamed:
    """Published names -> names of this library; keys that are current already pass through."""
    state = read_state_dict(state)
    own = model.state_dict()
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
    if resample and "pos_embed" in out.weights:
        table, target = out.weights["pos_embed"], model.patch_embed.grid_size
        grid = target if table.shape[1] == target[0] * target[1] else square_grid(table.shape[1])
        if grid is None:
            raise ValueError(
                f"cannot resample a position table of {table.shape[1]} entries: its grid is not square, so it is "
                f"unknown; build the model with the file's img_size, load, then call set_input_size"
            )
        out.weights["pos_embed"] = resample_positions(table, grid, target)
    return out
