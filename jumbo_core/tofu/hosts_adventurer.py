"""Fusion inside AdventurerEncoder, alone or as ``.encoder`` of a model (AdventurerViT, Jumbo-linear included).

A linear-time mixer has no attention, but Mamba-2 is linear attention with decay (arXiv 2405.21060): what a token writes
into the state is addressed by its B, as a value is by its key. So B, as it comes out of the input projection, is
matched on: before the convolution, which would blend it with the tokens scanned just before. Tokens leave between the
mixer and the SwiGLU. Those that stay keep their order, forwards and reversed, so the scan goes over the image as ever.
"""

from __future__ import annotations

import torch
from torch import nn

from jumbo_core.linear import AdventurerBlock, AdventurerEncoder, Mamba2Mixer
from jumbo_core.tofu.compute import linear_weights, matching_multiply_adds
from jumbo_core.tofu.hosts import FusionHost, register_host


class LastAndReversed:
    """Global tokens stand last, and patches run backwards in a flipped block; ``index`` None: the encoder's output."""

    def __init__(self, encoder: AdventurerEncoder, index: int | None) -> None:
        self.encoder, self.index = encoder, index

    def arrange(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        count = self.encoder.num_global_tokens
        patches, globals_ = x.split([x.shape[dim] - count, count], dim)
        return torch.cat([globals_, self._turn(patches, dim)], dim)

    def restore(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        count = self.encoder.num_global_tokens
        globals_, patches = x.split([count, x.shape[dim] - count], dim)
        return torch.cat([self._turn(patches, dim), globals_], dim)

    def _turn(self, patches: torch.Tensor, dim: int) -> torch.Tensor:
        return patches.flip(dim) if self.index in self.encoder.flipped else patches


class AdventurerHost(FusionHost):
    """The class token or the J slices are protected."""

    supported = "AdventurerEncoder and models with one as .encoder (AdventurerViT)"

    def accepts(self, model: nn.Module) -> bool:
        encoder = _encoder(model)
        return isinstance(encoder, AdventurerEncoder) and all(
            type(block).forward is AdventurerBlock.forward and type(block.mixer).forward is Mamba2Mixer.forward
            for block in encoder.blocks
        )

    def check_options(self, model, proportional, importance):
        if proportional or importance == "attention":
            raise ValueError(
                "proportional=True, importance='attention' and weights='importance' are about attention, and a "
                "linear-time mixer has none: leave them at their defaults"
            )

    def blocks(self, model):
        return list(_encoder(model).blocks)

    def prefix(self, model):
        return _encoder(model).num_global_tokens

    def num_patches(self, model):
        return model.patch_embed.num_patches if hasattr(model, "patch_embed") else None

    def queries_and_keys(self, block):
        return block.mixer.in_proj, block.mixer.in_proj

    def keys(self, block, output):
        mixer = block.mixer  # output (B, 1 + T, [z | x B C | dt]), the heading average first
        start = 2 * mixer.inner
        return output[:, 1:, start : start + mixer.d_state].unsqueeze(1)

    def attend(self, block, tokens, bias, jumbo_ffn=None, padding=None):
        if padding is not None:
            raise ValueError("a fused model takes no padding mask, for its tokens leave their places; remove() first")
        return block.mix(tokens)

    def feed(self, block, tokens, jumbo_ffn=None, padding=None):
        return block.feed(tokens, jumbo_ffn)

    def mlp(self, block):
        return block.mlp

    def mlp_norm(self, block):
        return block.norm_mlp

    def mlp_prefix(self, model):
        return 0

    def mlp_suffix(self, model):
        return 0 if _encoder(model).multiplier else 1  # the class token passes the patches' MLP, slices do not

    def arrangement(self, model, index):
        return LastAndReversed(_encoder(model), index)

    def dense_calls(self, model):
        encoder = _encoder(model)
        calls = [(encoder, "intermediates")]
        return calls if model is encoder else [(model, "forward_intermediates"), *calls]

    def multiply_adds(self, model, before, after):
        from jumbo_core.measure.flops import mixer_multiply_adds  # which knows the models, and they may know fusion

        encoder, total = _encoder(model), 0
        for i, (came, left) in enumerate(zip(before, after, strict=True)):
            block = encoder.blocks[i]
            total += mixer_multiply_adds(block.mixer, came + encoder.num_global_tokens + 1)
            total += matching_multiply_adds(came, left, block.mixer.d_state)
            total += linear_weights(block.mlp) * (left + self.mlp_suffix(encoder))
            if encoder.multiplier:
                total += linear_weights(encoder.ffn_of(i))
        return total


def _encoder(model: nn.Module) -> nn.Module | None:
    return model if isinstance(model, AdventurerEncoder) else getattr(model, "encoder", None)


register_host(AdventurerHost())
