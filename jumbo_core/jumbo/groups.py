"""Optimizer groups: no decay where it hurts, a slower shared Jumbo FFN, layer decay on request."""

from __future__ import annotations

import math
import re

from torch import nn

NO_DECAY = ("pos_embed", "jumbo_token", "cls_token", "reg_token", "mask_token")
_BLOCK = re.compile(r"(?:^|\.)blocks\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:patch_embed\.|(?:pos_embed|jumbo_token|cls_token|reg_token|mask_token)$)")
_JUMBO_FFN = re.compile(r"(?:^|\.)jumbo_mlp\.")


def param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    *,
    jumbo_lr_scale: float = 0.3,
    layer_decay: float | None = None,
) -> list[dict]:
    """Optimizer groups for any model that holds a :class:`JumboEncoder` (timm, Transformers, MMSegmentation, series).

    The shared FFN collects gradients from every block and is the widest part of the model: at the common rate it learns
    too fast and costs Jumbo its gain on short runs, so it gets ``jumbo_lr_scale`` times the rate. Norms, biases,
    positions and learned tokens get no weight decay.

    Args:
        model: any module; frozen parameters are left out.
        lr: learning rate of ordinary parameters, > 0.
        weight_decay: decay of matrices, >= 0.
        jumbo_lr_scale: factor on ``lr`` for the Jumbo FFN. Default 0.3.
        layer_decay: with decay d, block i of L trains at ``lr * d**(L - i)``, embeddings and tokens at
            ``lr * d**(L + 1)``, final norm and head at ``lr``, the shared FFN at ``lr * jumbo_lr_scale``; an
            unshared FFN follows its block, times ``jumbo_lr_scale``. None (default) = off.

    Returns:
        list of ``{"params", "lr", "weight_decay", "lr_scale"}``, ready for any torch optimizer; ``lr_scale`` is
        ``lr`` of the group over the common rate.

    Raises:
        ValueError: a number out of range, or no trainable parameter.
    """
    for name, value, positive in (
        ("lr", lr, True),
        ("weight_decay", weight_decay, False),
        ("jumbo_lr_scale", jumbo_lr_scale, True),
    ):
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            raise ValueError(f"{name} must be finite and {'> 0' if positive else '>= 0'}, got {value}")
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise ValueError(f"layer_decay must lie in (0, 1], got {layer_decay}")

    depth = 1 + max((int(m[1]) for n, _ in model.named_parameters() if (m := _BLOCK.search(n))), default=-1)
    groups: dict[tuple[float, float], dict] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = layer_decay ** _layers_above(name, depth) if layer_decay is not None else 1.0
        if _JUMBO_FFN.search(name):
            scale *= jumbo_lr_scale
        decays = parameter.ndim > 1 and name.rpartition(".")[2] not in NO_DECAY
        decay = weight_decay if decays else 0.0
        group = groups.setdefault(
            (scale, decay), {"params": [], "lr": lr * scale, "weight_decay": decay, "lr_scale": scale}
        )
        group["params"].append(parameter)
    if not groups:
        raise ValueError(f"{type(model).__name__} has no trainable parameter")
    return list(groups.values())


def _layers_above(name: str, depth: int) -> int:
    """How many trainable layers lie between this parameter and the head."""
    if match := _BLOCK.search(name):
        return depth - int(match[1])
    if match := re.search(r"(?:^|\.)jumbo_mlp\.(\d+)\.", name):  # one FFN per block
        return depth - int(match[1])
    return depth + 1 if _EMBEDDING.search(name) else 0
