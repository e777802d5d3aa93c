"""An image model of jumbo_core as the trunk of a Transformers model."""

from __future__ import annotations

from collections.abc import Container
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from jumbo_core.models.surface import PatchModel


class TrunkOutput(NamedTuple):
    """What a trunk computed, nothing of it normalised.

    embeddings (B, N, D): the patches before the first block. mask (B, N) or None, of the patches that were used.
    tokens (B, T, D) after the last block that ran. collected: outputs (B, T, D) of blocks by index, of the wanted ones
    at least.
    """

    embeddings: torch.Tensor
    mask: torch.Tensor | None
    tokens: torch.Tensor
    collected: dict[int, torch.Tensor]


class Recorder(nn.Module):
    """Where the host records hidden states: called with the tokens before and after a block.

    Not the blocks themselves: the encoders hand on tokens in an order of their own, reversed for example.
    """

    def forward(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return after


class Trunk(PatchModel):
    """Mixed into a headless image model: called, it gives what the models here are made of.

    All that touches its parameters happens inside calls of modules: offloading and sharding hook into those.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, num_classes=0, **kwargs)
        self.recorder = Recorder()

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        collect: Container[int] = (),
        stop: int | None = None,
        record: bool = False,
    ) -> TrunkOutput:
        """Images (B, C, H, W); ``collect`` and ``stop`` as for the encoder, ``record``: the host sees every block."""
        patches, mask = self.embed(x, mask)
        collect = range(len(self.blocks)) if record else collect
        tokens, collected = self.encoder(patches, mask, collect=collect, stop=stop)
        if record and collected:
            first, _ = self.encoder(patches, mask, collect=(), stop=0)
            for before, after in pairwise([first, *collected.values()]):
                self.recorder(before, after)
        return TrunkOutput(patches, mask, tokens, collected)
