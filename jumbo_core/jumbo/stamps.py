"""Telling whether a tensor is still the one that something was made of."""

from __future__ import annotations

import torch


def stamp(tensor: torch.Tensor | None) -> tuple | None:
    """Changes whenever the tensor is replaced, moved or written to (not through ``.data``, which torch hides)."""
    if tensor is None:
        return None
    return tensor.data_ptr(), tensor.device, tensor.dtype, -1 if tensor.is_inference() else tensor._version
