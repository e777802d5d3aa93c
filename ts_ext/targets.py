"""What an output looks like: the shape of one target, and the input channels that forecasts continue."""

from __future__ import annotations

import warnings
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
            raise ValueError(
                f"head='forecast' without pred_dim has one value per sample, and c_out must be 1, got {c_out}: give "
                f"pred_dim, or head='classify' or 'regress' (in tsai: arch_config=dict(head=…))"
            )
        shape = ()
    elif isinstance(pred_dim, Sequence):
        shape = _sizes("pred_dim", pred_dim)
    else:
        shape = (c_out, *_sizes("pred_dim", pred_dim))
    return shape


def class_shape(c_out: int, pred_dim: int | Sequence[int] | None, custom_head: Any) -> tuple[int, ...]:
    """(classes,): one score per class, or per label of a multi-label target (whose c_out is 1 in tsai)."""
    given = _labels(pred_dim, custom_head)
    if c_out == 1 and given is not None and len(given) == 1:
        return given
    if given not in (None, (c_out,)):
        raise ValueError(
            f"head='classify' gives one score per class, c_out {c_out}, and the target has shape {given}: one class, "
            f"or one 0/1 label per class, for a whole window; a class per step is not supported"
        )
    return (c_out,)


def value_shape(c_out: int, pred_dim: int | Sequence[int] | None, custom_head: Any) -> tuple[int, ...]:
    """Shape of one target of a regression: () for one value, (c_out,) for several, or that of ``pred_dim``."""
    given = _labels(pred_dim, custom_head)
    if given is None:
        return () if c_out == 1 else (c_out,)
    if c_out != 1 and c_out not in given:
        raise ValueError(f"head='regress' with c_out {c_out} and a target of shape {given}: they disagree")
    return given


def _labels(pred_dim: int | Sequence[int] | None, custom_head: Any) -> tuple[int, ...] | None:
    """Shape of the target, from tsai's head or from ``pred_dim``; None if neither says."""
    shape = None if custom_head is None else _shape_from_tsai(custom_head)
    if pred_dim is None:
        return shape
    own = _sizes("pred_dim", pred_dim)
    if shape not in (None, own):
        raise ValueError(f"pred_dim {pred_dim} and the targets of tsai's custom_head, {shape}, disagree")
    return own


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


def choose_channels(channels: Sequence[int] | None, c_in: int, channels_out: int) -> list[int] | None:
    """The input channel that each output continues; None, with a warning, for a mixture of them all."""
    if channels is None and channels_out == c_in:
        channels = range(c_in)
    if channels is not None:
        return check_targets(channels, c_in, channels_out)
    warnings.warn(
        f"{c_in} input channels, {channels_out} output channel(s) and no target_channels: every output starts "
        f"as the mean of all channels' forecasts and has to learn which of them it continues. If the targets "
        f"are among the inputs, say which: target_channels={[i % c_in for i in range(channels_out)]} for the "
        f"first ones (in tsai: arch_config=dict(target_channels=…))",
        UserWarning,
        stacklevel=3,
    )
    return None


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
