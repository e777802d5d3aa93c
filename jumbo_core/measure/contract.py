"""What a contender of a comparison can do, whatever it is: a timm model or a diffusers UNet; and how names are read."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from jumbo_core.measure.forms import DTYPES


@dataclass(frozen=True)
class Contender:
    """One model of a comparison; :func:`jumbo_core.measure.contenders.contender` makes it from a name."""

    text: str  # as given
    arguments: dict
    options: tuple[str, ...]
    image_size: tuple[int, int]

    # Why a training step of it is not measured; empty: it is.
    not_trained = ""

    def build(self, dtype: str = "float32", device: str = "cpu", *, plain: bool = False) -> nn.Module:
        """The model in eval mode with random weights, the same at every call; called on inputs it gives one tensor.

        Args:
            dtype: of the whole model, one of :data:`~jumbo_core.measure.forms.DTYPES`.
            device: "cpu" or "cuda".
            plain: without options and in fp32, to compare with.
        """
        raise NotImplementedError

    def inputs(self, batch: int, dtype: str = "float32", device: str = "cpu") -> tuple[torch.Tensor, ...]:
        """What a call is given, in the memory order that the model wants; floating-point tensors in ``dtype``."""
        raise NotImplementedError

    def output_shape(self, model: nn.Module, batch: int) -> tuple[int, ...]:
        """What a call of ``model`` must give."""
        raise NotImplementedError

    def warm_up(self) -> None:
        """Run small models of its kind, so that libraries load their workspaces."""
        raise NotImplementedError

    @property
    def timm_name(self) -> str | None:
        """Of a timm model, else None."""
        return None

    @property
    def parameters(self) -> int:
        raise NotImplementedError

    @property
    def multiply_adds(self) -> int | None:
        """Of one image; None where they cannot be counted."""
        raise NotImplementedError

    @property
    def tokens(self) -> int:
        """Patches of 16x16 pixels in an image, whatever the model makes of them."""
        return self.image_size[0] * self.image_size[1] // 256

    @property
    def moves(self) -> float:
        """Relative L2 distance of the output from the plain model's that the options are let pass."""
        raise NotImplementedError

    def tolerance(self, dtype: str) -> float:
        """Relative L2 distance of the output from the plain fp32 model's that is let pass; 0: nothing to compare."""
        return self.moves + DTYPES[dtype]

    def repeat_tolerance(self, batch: int) -> float:
        """Relative L2 distance between two calls that is let pass; 0, the rule: they must be the same."""
        return 0.0


def read_name(text: str) -> tuple[str, dict, list[str]]:
    """``MODEL@option+key=value`` -> MODEL, {key: value}, [option]; values are Python literals or else strings."""
    name, _, options = text.partition("@")
    arguments, flags = {}, []
    for option in filter(None, options.split("+")):
        key, is_pair, value = option.partition("=")
        if not is_pair:
            flags.append(option)
            continue
        try:
            arguments[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[key] = value
    return name, arguments, flags


def check_flags(text: str, flags: Sequence[str], known: Iterable[str], pairs: str) -> None:
    """Refuse options that do not exist.

    Args:
        text: the whole name; flags: its options, see :func:`read_name`.
        known: what there is.
        pairs: what ``key=value`` is good for.

    Raises:
        ValueError: an unknown option, or an @ without any.
    """
    for flag in flags:
        if flag not in known:
            raise ValueError(f"unknown option {flag!r} of {text!r}: use {', '.join(known)}, or key=value for {pairs}")
    if text.endswith("@"):
        raise ValueError(f"{text!r} ends in @ without an option: use {', '.join(known)}, or key=value")
