"""What a model gives, as one tensor."""

from __future__ import annotations

import torch


def first_output(output) -> torch.Tensor:
    """A model's output, or the first of several: Transformers' models put logits or the last hidden state there.

    Raises:
        TypeError: what stands first is no tensor.
    """
    if isinstance(output, torch.Tensor):
        return output
    try:
        first = output[0]
    except (TypeError, KeyError, IndexError):
        first = None
    if not isinstance(first, torch.Tensor):
        names = f" with {', '.join(map(repr, output))}" if isinstance(output, dict) else ""
        held = "" if first is None else f" whose first entry is a {type(first).__name__}"
        raise TypeError(
            f"the model must give a tensor, or a tuple or Transformers output with a tensor first; got a "
            f"{type(output).__name__}{names}{held}. Give a module whose forward picks the tensor"
        )
    return first
