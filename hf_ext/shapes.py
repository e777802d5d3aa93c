"""A model's configuration, read off the tensors of a weight file, and what they leave open."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_ext.configuration_adventurer import AdventurerConfig
from hf_ext.configuration_jumbo import JumboConfig
from hf_ext.configuration_vision import VisionConfig
from hf_ext.model_card import RELEASED
from jumbo_core.models.positions import square_grid
from jumbo_core.models.released import RELEASED_FLIP, is_released_adventurer

Weights = Mapping[str, torch.Tensor]


def is_adventurer(state: Weights) -> bool:
    """Whether these are an Adventurer's tensors, under published or current names, and not a Jumbo ViT's."""
    return any(".mixer." in key for key in state)


def infer_config(
    state: Weights,
    *,
    num_attention_heads: int | None = None,
    image_size: tuple[int, int] | None = None,
    flip: str | Sequence[int] | None = None,
) -> VisionConfig:
    """Read a model's shape off its tensors, under published or current names.

    Args:
        state: a state dict as :func:`jumbo_core.models.released.read_state_dict` returns it.
        num_attention_heads: of a Jumbo ViT; tensors do not show it; known only for the released sizes, else it must be
            given.
        image_size: (H, W) of the position table; needed when the table is not square.
        flip: of an Adventurer; tensors do not show which blocks see the patches reversed. Default: blocks 2 and 3 for
            a published file, as the released code has it, else "alternate".

    Raises:
        ValueError: the tensors are no Jumbo ViT's and no Adventurer's, leave heads or image size open, or an option is
            for the other kind of model.
    """
    linear = is_adventurer(state)
    for name, value, kind in (("num_attention_heads", num_attention_heads, linear), ("flip", flip, not linear)):
        if value is not None and kind:
            raise ValueError(f"{name} was given, but the file holds {'an Adventurer' if linear else 'a Jumbo ViT'}")
    if linear:
        return _adventurer(state, image_size, flip)
    return _jumbo(state, image_size, num_attention_heads)


def assumptions(
    config: VisionConfig,
    *,
    num_attention_heads: int | None = None,
    image_size: tuple[int, int] | None = None,
    flip: str | Sequence[int] | None = None,
) -> list[str]:
    """What a file of tensors leaves open and the conversion took for granted, as lines to read.

    Args:
        config: the result of :func:`infer_config`.
        num_attention_heads, image_size, flip: what the caller gave, None = it was assumed.
    """
    height, width = config.image_sides
    size = "as given" if image_size is not None else "a square position table"
    pooled = "[Jumbo token ; mean of the patches]" if config.multiplier else "the class token"
    if isinstance(config, AdventurerConfig):
        alternate = config.flip == "alternate"
        source = "as given"
        if flip is None:  # only published files are taken to follow another rule than the paper
            source = "the paper's rule" if alternate else "as in the released code"
        blocks = "every second block" if alternate else f"blocks {', '.join(map(str, config.flip))} (from 0)"
        first = f"patches run reversed in {blocks if config.flip else 'no block'}: {source}"
    else:
        source = "as given" if num_attention_heads is not None else f"as in the released size of D={config.hidden_size}"
        first = f"{config.num_attention_heads} attention heads ({source})"
    return [
        first,
        f"positions for images of {height}x{width} px ({size})",
        f"the classifier or pooled vector reads {pooled}",
    ]


def _jumbo(state: Weights, image_size: tuple[int, int] | None, heads: int | None) -> JumboConfig:
    state = {key.removeprefix("encoder."): value for key, value in state.items()}
    _check_has(state, "a Jumbo ViT", {"patch_embed.proj.weight": 4, "pos_embed": 3, "blocks.0.mlp.fc1.weight": 2})
    shape = _common(state, "blocks.0.mlp.fc1.weight", state["pos_embed"].shape[1], image_size)
    shape["registers"] = state["reg_token"].shape[1] if "reg_token" in state else 0
    if "blocks.0.ls1.gamma" in state:
        shape["layer_scale"] = 1e-4  # the paper's initial value; the trained scales come with the weights
    if heads is None:
        dim, depth, multiplier = (shape[name] for name in ("hidden_size", "num_hidden_layers", "multiplier"))
        sizes = RELEASED[JumboConfig.model_type].values()
        known = [s.heads for s in sizes if (s.dim, s.depth, s.multiplier) == (dim, depth, multiplier)]
        if not known:
            raise ValueError(
                f"the tensors do not show the number of attention heads and D={dim}, depth {depth}, J={multiplier} "
                f"is no released size: give --num-attention-heads"
            )
        heads = known[0]
    return JumboConfig(num_attention_heads=heads, **shape)


def _adventurer(
    state: Weights, image_size: tuple[int, int] | None, flip: str | Sequence[int] | None
) -> AdventurerConfig:
    released = is_released_adventurer(state)
    state = {re.sub(r"^(encoder\.)?layers\.", "blocks.", key.removeprefix("encoder.")): v for key, v in state.items()}
    mixer, mlp = "blocks.0.mixer", "blocks.0.mlp.w1.weight" if released else "blocks.0.mlp.fc1_g.weight"
    needed = {"patch_embed.proj.weight": 4, "pos_embed": 3, mlp: 2}
    needed |= {f"{mixer}.A_log": 1, f"{mixer}.out_proj.weight": 2, f"{mixer}.conv1d.weight": 3}
    _check_has(state, "an Adventurer", needed)
    # The published table has an entry for the class token, the last one.
    shape = _common(state, mlp, state["pos_embed"].shape[1] - released, image_size)
    inner, (channels, _, kernel) = state[f"{mixer}.out_proj.weight"].shape[1], state[f"{mixer}.conv1d.weight"].shape
    if flip is None:
        flip = [i for i in RELEASED_FLIP if i < shape["num_hidden_layers"]] if released else "alternate"
    return AdventurerConfig(
        state_size=(channels - inner) // 2,  # x, B and C pass through the convolution
        head_dim=inner // len(state[f"{mixer}.A_log"]),
        expand=inner / shape["hidden_size"],
        conv_kernel=kernel,
        flip=flip if isinstance(flip, str) else list(flip),
        **shape,
    )


def _check_has(state: Weights, kind: str, axes: dict[str, int]) -> None:
    for key, count in axes.items():
        if key not in state:
            raise ValueError(f"not {kind}: the file has no {key}, only {sorted(state)[:5]}…")
        if state[key].ndim != count:
            raise ValueError(f"not {kind}: {key} has shape {tuple(state[key].shape)}, expected {count} axes")


def _common(state: Weights, mlp: str, num_patches: int, image_size: tuple[int, int] | None) -> dict[str, Any]:
    """Fields that every configuration of ours has; ``mlp`` is the weight whose rows are the FFN's hidden width."""
    dim, channels, *patch = state["patch_embed.proj.weight"].shape
    multiplier = state["jumbo_token"].shape[1] if "jumbo_token" in state else 0
    shape = {
        "patch_size": patch[0] if patch[0] == patch[1] else list(patch),
        "num_channels": channels,
        "hidden_size": dim,
        "num_hidden_layers": 1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks.")),
        "multiplier": multiplier,
        "mlp_ratio": len(state[mlp]) / dim,
    }
    if multiplier:
        shape["share_jumbo_ffn"] = "jumbo_mlp.fc1.weight" in state
        first = "jumbo_mlp.fc1.weight" if shape["share_jumbo_ffn"] else "jumbo_mlp.0.fc1.weight"
        shape["jumbo_mlp_ratio"] = len(state[first]) / (dim * multiplier)
    if "head.weight" in state:
        classes, width = state["head.weight"].shape
        pooled = dim * (multiplier + 1 if multiplier else 1)
        if width != pooled:
            wanted = "[Jumbo token ; mean of the patches]" if multiplier else "the class token"
            raise ValueError(
                f"the head reads {width} features, a classifier of D={dim}, J={multiplier} reads {pooled}: heads on "
                f"another pooling than {wanted} are not supported here"
            )
        shape["num_labels"] = classes
    if image_size is None:
        grid = square_grid(num_patches)
        if grid is None:
            raise ValueError(f"the position table has {num_patches} entries, not a square: give --image-size H W")
        image_size = (grid[0] * patch[0], grid[1] * patch[1])
    elif image_size[0] // patch[0] * (image_size[1] // patch[1]) != num_patches:
        raise ValueError(
            f"--image-size {image_size[0]} {image_size[1]} means {image_size[0] // patch[0]}x"
            f"{image_size[1] // patch[1]} patches of {patch[0]}x{patch[1]}, the position table has {num_patches}"
        )
    shape["image_size"] = image_size[0] if image_size[0] == image_size[1] else list(image_size)
    return shape
