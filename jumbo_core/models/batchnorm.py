"""BatchNorm in an encoder of series, as PatchTST has it: statistics per feature over all tokens of the batch."""

from __future__ import annotations

import torch
from torch import nn

from jumbo_core.jumbo import JumboEncoder


class TokenBatchNorm(nn.BatchNorm1d):
    """BatchNorm over the last dimension: tokens (B, T, D), or joined Jumbo slices (B, J*D).

    In eval mode the running statistics are used, so that a sample's result does not depend on its batch.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def use_batch_norm(encoder: JumboEncoder) -> None:
    """Put :class:`TokenBatchNorm` in the place of every LayerNorm of a new encoder (weights start at one and zero).

    Statistics are taken per place: ``norm1`` over slices, registers and patches together, ``norm2`` over the patches,
    ``norm3`` over the batch's joined Jumbo tokens, ``norm`` at the end over all tokens.
    """
    for parent in [encoder, *encoder.blocks]:
        for name, norm in list(parent.named_children()):
            if isinstance(norm, nn.LayerNorm):
                setattr(parent, name, TokenBatchNorm(norm.normalized_shape[0], eps=norm.eps))
