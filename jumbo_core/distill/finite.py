"""The one look at values: NaN and infinity are named before a loss hides them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def check_finite(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """ValueError that names the tensors with NaN or infinite values; looks nowhere under ``torch.compile``."""
    if torch.compiler.is_compiling():
        return
    finite = torch.stack([tensor.isfinite().all() for tensor in tensors])
    if not finite.all():  # one wait for the device, however many tensors
        bad = [name for name, good in zip(names, finite.tolist(), strict=True) if not good]
        raise ValueError(f"NaN or infinite values in {', '.join(bad)}")
