"""What a model is given: which values are observed, what is missing, and windows of unequal length."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from jumbo_core import checks
from ts_ext.scaling import check_mask

MISSING = ("error", "mask")


def read_values(
    x: torch.Tensor, observed_mask: torch.Tensor | None, missing: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values (B, C, L) and the mask of those observed, None when all are.

    Args:
        x: values. Where ``observed_mask`` is False they may be anything.
        observed_mask: bool of the shape of ``x``, True = observed, or None.
        missing: what a NaN is that the mask does not cover: "error", or "mask" for a missing value. An infinite value
            is always an error.

    Raises:
        ValueError: no sample; values that are not finite and not masked (how many, and where the first one is); a
            channel of a window without an observed value; another mask. torch.compile, torch.export, tracing and meta
            tensors cannot look at values: there a NaN that is not masked comes out as NaN.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        if missing == "mask":
            present = ~x.isnan()
            observed_mask = present if observed_mask is None else observed_mask & present
        return x, observed_mask
    x = x.as_subclass(torch.Tensor)  # tsai's tensor types would follow every operation
    if not x.shape[0]:
        repaired = repair_tsai_if_loaded()
        raise ValueError(
            f"no sample in {tuple(x.shape)}"
            + ". tsai's loader makes such batches under numpy 2; it is repaired now: run the same call again" * repaired
        )
    if observed_mask is not None:
        observed_mask = observed_mask.as_subclass(torch.Tensor)
    if x.is_meta:
        return x, observed_mask
    finite, absent = torch.isfinite(x), None
    if observed_mask is not None:
        check_mask(x, observed_mask)
        absent = ~observed_mask
    if missing == "mask":
        absent = x.isnan() if absent is None else absent | x.isnan()
    _check_finite(finite if absent is None else finite | absent, masked=absent is not None)
    if absent is None or not absent.any():
        return x, None
    check_mask(x, ~absent)
    return x, ~absent


def _check_finite(fine: torch.Tensor, *, masked: bool) -> None:
    if fine.all():
        return
    bad = (~fine).nonzero()
    sample, channel, step = bad[0].tolist()
    raise ValueError(
        f"{len(bad)} of {fine.numel()} values are NaN or infinite"
        + " and not masked as missing" * masked
        + f", the first at sample {sample}, channel {channel}, step {step}: mask missing values "
        f"(observed_mask=…, or missing='mask' in the constructor, which takes NaN as missing), or fill them before the "
        f"model"
    )


def tensor_of(values):
    """numpy arrays as tensors that share their memory; anything else as it is."""
    return torch.as_tensor(values) if isinstance(values, np.ndarray) else values


def pad_windows(
    series: Iterable[torch.Tensor], seq_len: int, *, side: str = "left"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Series of unequal length (C, L_i) -> values (B, C, L) and ``observed_mask`` (B, C, L) for the model.

    Args:
        series: tensors or arrays (C, L_i) with 1 <= L_i <= ``seq_len``.
        seq_len: L, the window of the model.
        side: where the padding goes. Default "left": the newest values end the window, as a forecast needs it.

    Returns:
        values in the widest floating dtype of the series, 0 where padded, and the bool mask, True = observed. NaN in
        the series stays NaN and counts as not observed.

    Raises:
        ValueError: no series, another number of channels or dimensions, an empty or too long series, another side.
    """
    if side not in ("left", "right"):
        raise ValueError(f"side must be 'left' or 'right', got {side!r}")
    seq_len = checks.integer("seq_len", seq_len)
    windows = [torch.as_tensor(one) for one in series]
    if not windows:
        raise ValueError("no series to pad: give at least one (C, steps)")
    channels = windows[0].shape[0] if windows[0].ndim == 2 else None
    for i, one in enumerate(windows):
        if one.ndim != 2 or one.shape[0] != channels or not 1 <= one.shape[1] <= seq_len:
            raise ValueError(
                f"series {i} is {tuple(one.shape)}: expected ({channels if channels is not None else 'C'} channels, "
                f"1 to {seq_len} steps)"
            )
    dtype = torch.get_default_dtype() if not any(one.is_floating_point() for one in windows) else None
    for one in windows:
        dtype = one.dtype if dtype is None else torch.promote_types(dtype, one.dtype)
    values = torch.zeros(len(windows), channels, seq_len, dtype=dtype, device=windows[0].device)
    mask = torch.zeros_like(values, dtype=torch.bool)
    for i, one in enumerate(windows):
        place = slice(seq_len - one.shape[1], None) if side == "left" else slice(one.shape[1])
        values[i, :, place], mask[i, :, place] = one, ~one.isnan()
    return values, mask


def refuse_exogenous(names: Sequence[str], known: Iterable[str] = ()) -> None:
    """TypeError for arguments that are none of ours; says what takes the place of exogenous inputs.

    A name close to one that is ``known`` is taken for a slip of the pen.
    """
    for name in names:
        meant = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
        if meant:
            raise TypeError(f"JumboPatchTST takes no {name!r}: did you mean {meant[0]!r}?")
    if names:
        raise TypeError(
            f"JumboPatchTST takes no {', '.join(map(repr, names))}. Supported as inputs: past values of any number of "
            f"numeric channels, x (B, C, L), some of them targets (target_channels=[…]; channels='mixing' lets the "
            f"others inform them), and which values are observed (observed_mask). Not supported: inputs known for the "
            f"future, static inputs, categories"
        )


def repair_tsai_if_loaded() -> bool:
    """Repair tsai's loader (see ``ts_ext.tsai``) if tsai has been imported; says whether it has.

    Called when a model is made or unpickled. Where tsai is imported only after that, and ``ts_ext.tsai`` is not, the
    first empty batch is an error, and repairs it then.
    """
    loaded = "tsai.data.core" in sys.modules
    if loaded:
        import ts_ext.tsai  # noqa: F401
    return loaded
