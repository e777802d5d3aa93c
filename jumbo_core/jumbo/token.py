"""The Jumbo token: one global token J times as wide as a patch, kept as J slices between layers.

Source: Jumbo paper (arXiv 2502.15021), section 3, and the released code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from jumbo_core.jumbo.mlp import WideMlp

if TYPE_CHECKING:
    from jumbo_core.jumbo.shared import SharedPasses


def join_slices(slices: torch.Tensor) -> torch.Tensor:
    """Rejoin J slices into one wide token: (B, J, D) -> (B, J*D)."""
    return slices.flatten(1)


def split_slices(wide: torch.Tensor, multiplier: int) -> torch.Tensor:
    """Split one wide token into J slices of patch width: (B, J*D) -> (B, J, D)."""
    if wide.ndim != 2 or wide.shape[1] % multiplier:
        raise ValueError(
            f"split_slices expects (B, J*D) with J={multiplier}, got {tuple(wide.shape)}: "
            f"{wide.shape[-1]} is not a multiple of {multiplier}"
        )
    return wide.unflatten(1, (multiplier, -1))


class JumboFFN(WideMlp):
    """Feed-forward network of the joined Jumbo token: (B, J*D) -> (B, J*D).

    ``Linear(J*D, ratio*J*D) -> GELU -> Linear(ratio*J*D, J*D)``. By default one instance serves every block, which is
    what keeps the parameter count small; it still runs once per block, on one token.

    Args:
        dim: patch width D.
        multiplier: J, how many times wider than a patch the global token is.
        mlp_ratio: hidden width over J*D. Default 4.
        drop: dropout after both linear layers. Default 0.
    """

    def __init__(self, dim: int, multiplier: int, mlp_ratio: float = 4.0, drop: float = 0.0) -> None:
        width = dim * multiplier
        super().__init__(width, int(width * mlp_ratio), drop=drop)

    def forward(self, x: torch.Tensor, passes: SharedPasses | None = None, index: int = 0) -> torch.Tensor:
        """(B, J*D) -> (B, J*D). As pass ``index`` of ``passes``, which share a gradient of the weights."""
        if passes is None or not torch.is_grad_enabled():
            return super().forward(x)
        hidden = self.norm(self.drop1(self.act(passes.linear(x, 0, index))))
        return self.drop2(passes.linear(hidden, 1, index))

    def _load_from_state_dict(self, state_dict, prefix, *others) -> None:
        """As any module, but int8 weights are refused."""
        refuse_int8(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *others)


def refuse_int8(state_dict: dict, prefix: str) -> None:
    """ValueError for an FFN's int8 weights, which copying would take for numbers around 100."""
    weight = state_dict.get(f"{prefix}fc1.weight")
    if isinstance(weight, torch.Tensor) and weight.dtype == torch.int8:
        raise ValueError(
            f"{prefix}fc1.weight is int8, of a model that optimize_for_inference made: load it into a model as trained "
            f"that went through jumbo_core.optimize_for_inference(model, dtype='int8') before"
        )
