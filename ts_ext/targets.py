"""What a forecast looks like: the shape of one target, and the input channels that the outputs continue."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from jumbo_core import checks


def target_shape(c_out: int, pred_dim: int | Sequence[int] | None, custom_head: Any) -> tuple[int, ...]:
    """Shape of one target: (), (H,) or (C_out, H)."""
    if custom_head is not None:
        shape = _shape_from_tsai(custom_head)
        if pred_dim is not None and _sizes("pred_dim", pred_dim) not in (shape, shape[-1:]):
            raise ValueError(f"pred_dim {pred_dim} and the targets of tsai's custom_head, {shape}, disagree")
    elif pred_dim is None:
        if c_out != 1:
            raise ValueError(f"without pred_dim there is one value per sample and c_out must be 1, got {c_out}")
        shape = ()
    elif isinstance(pred_dim, Sequence):
        shape = _sizes("pred_dim", pred_dim)
    else:
        shape = (c_out, *_sizes("pred_dim", pred_dim))
    return shape


def _sizes(name: str, given: int | Sequence[int]) -> tuple[int, ...]:
    """H, [H] or [C_out, H] as a tuple of one or two sizes."""
    shape = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    if not 1 <= len(shape) <= 2:
        raise ValueError(f"{name}: a forecast has steps, [H], or channels and steps, [C_out, H]; got {given!r}")
    return tuple(
        checks.integer(part, size)
        for part, size in zip(("output channels", "horizon")[-len(shape) :], shape, strict=True)
    )


def _shape_from_tsai(custom_head: Any) -> tuple[int, ...]:
    """The shape of a target, which tsai hands over inside the head it proposes."""
    is_tsai = isinstance(custom_head, partial) and custom_head.func.__name__ == "lin_nd_head"
    if not is_tsai or "d" not in custom_head.keywords:
        raise ValueError(
            f"JumboPatchTST brings its own head and accepts only tsai's partial(lin_nd_head, d=…), got {custom_head!r}"
        )
    return _sizes("d of custom_head", custom_head.keywords["d"])


def check_targets(channels: Sequence[int], c_in: int, channels_out: int) -> list[int]:
    error = ValueError(
        f"target_channels must be a list of {channels_out} of the input channels 0..{c_in - 1}, got {channels!r}"
    )
    try:
        found = [checks.integer("channel", channel, 0) for channel in channels]
    except (TypeError, ValueError):  # not a list, or not of integers
        raise error from None
    if len(found) != channels_out or max(found) >= c_in:
        raise error
    return found
