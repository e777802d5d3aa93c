"""Telling whether a tensor is still the one that something was made of."""

from __future__ import annotations

import torch


def stamp(tensor: torch.Tensor | None) -> tuple | None:
    """Changes whenever the tensor is replaced, moved or written to (not through ``.data``, which torch hides).

    torch does not count writes to inference tensors, so that theirs is never the same as an earlier one.
    """
    if tensor is None:
        return None
    return tensor.data_ptr(), tensor.device, tensor.dtype, object() if tensor.is_inference() else tensor._version
