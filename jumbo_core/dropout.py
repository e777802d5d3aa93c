"""Dropout with a mask from random bytes: torch's own, which fills a tensor with Bernoulli numbers, is a large part of a
small model's training step on a CPU."""

from __future__ import annotations

import torch
from torch import nn

from jumbo_core.modes import traced

_LEVELS = 1 << 16  # values of the 16 random bits behind each element


class Dropout(nn.Dropout):
    """``nn.Dropout`` with the same meaning, faster in training on a CPU; elsewhere it is ``nn.Dropout`` itself.

    Each element is dropped if 16 random bits are below ``round(p * 65536)``. The share dropped is therefore p to
    within 8e-6, and what is kept is divided by the share that is really kept, so that the expectation stays exact.
    The draws come from torch's global generator (another sequence than ``nn.Dropout``'s). What a training step gains:
    ``python -m benchmarks.series_speed``.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape -> the same."""
        threshold = round(self.p * _LEVELS)
        if (
            not self.training
            or self.inplace
            or not 0 < threshold < _LEVELS
            or x.device.type != "cpu"
            or not x.is_floating_point()
            or x.is_nested
            or hasattr(x, "device_mesh")  # a part of a distributed tensor
            or traced()
        ):
            return super().forward(x)
        return x.mul(_keep(x, threshold)).mul_(_LEVELS / (_LEVELS - threshold))


def _keep(x: torch.Tensor, threshold: int) -> torch.Tensor:
    """Bool mask of the shape of ``x``, False where 16 random bits, read as a signed number, are in the lowest part."""
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device)  # four elements a draw
    words.random_(-(1 << 63), None)
    bits = words.view(torch.int16)[: x.numel()].view(x.shape)
    return bits >= threshold - _LEVELS // 2


def replace_dropouts(module: nn.Module) -> None:
    """Make every plain ``nn.Dropout`` now inside ``module`` a :class:`Dropout` of its rate: no name changes."""
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # under every name it has
            if type(child) is nn.Dropout:
                setattr(parent, name, Dropout(child.p, child.inplace).train(child.training))
