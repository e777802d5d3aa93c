"""Fusion inside timm's Eva: EVA, EVA-02, DINOv3, RoPE-ViT and others of that class.

Rotary positions follow the tokens that stay: a merged token has the position of the one the others joined. Keys are
matched before rotation, by what tokens say and not by where they stand.
"""

from __future__ import annotations

import torch
from timm.layers import AttentionRope
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from torch import nn

from jumbo_core.tofu.compute import attention_multiply_adds, linear_weights, matching_multiply_adds
from jumbo_core.tofu.hosts import FusionHost, register_host


class EvaHost(FusionHost):
    """Pre-norm and post-norm blocks; rotary positions of every type, per block and head ("mixed") as well."""

    supported = "timm Eva (EVA, EVA-02, DINOv3, RoPE-ViT) made of its own blocks and attention"

    def accepts(self, model: nn.Module) -> bool:
        return isinstance(model, Eva) and all(
            type(block).forward in (EvaBlock.forward, EvaBlockPostNorm.forward)
            and type(block.attn).forward in (EvaAttention.forward, AttentionRope.forward)
            for block in model.blocks
        )

    def check_options(self, model, proportional, importance):
        if importance == "attention" and model.rope is not None:
            raise ValueError(
                "importance by attention needs queries and keys as attention multiplies them, and this model rotates "
                "them on the way there (rotary positions); use importance='similarity' and no weights='importance'"
            )

    def blocks(self, model):
        return list(model.blocks)

    def prefix(self, model):
        return model.num_prefix_tokens

    def num_patches(self, model):
        return model.patch_embed.num_patches

    def queries_and_keys(self, block):
        return block.attn.q_norm, block.attn.k_norm

    def scale(self, block):
        return block.attn.scale

    def moved(self, origin, context, options):
        rope = options.get("rope")
        if rope is None:
            return context, options
        if rope.ndim == 2:  # (N, d): for all samples and heads
            rope = rope[origin].unsqueeze(1)
        elif rope.ndim == 3:  # (H, N, d): "mixed"
            rope = rope[:, origin].transpose(0, 1)
        else:  # (B, 1 or H, N, d): each sample has patches of its own, as patch dropout leaves them
            rope = rope.gather(2, origin[:, None, :, None].expand(-1, rope.shape[1], -1, rope.shape[3]))
        return context, {**options, "rope": rope}  # (B, 1 or H, K, d)

    def attend(self, block, tokens, bias, rope=None, attn_mask=None, is_causal=False):
        if attn_mask is not None or is_causal:
            raise ValueError("a fused model takes no attention mask, for its tokens leave their places; remove() first")
        if isinstance(block, EvaBlockPostNorm):
            return tokens + block.drop_path1(block.norm1(block.attn(tokens, rope=rope, attn_mask=bias)))
        return tokens + block.drop_path1(_scaled(block.gamma_1, block.attn(block.norm1(tokens), rope, bias)))

    def feed(self, block, tokens, rope=None, attn_mask=None, is_causal=False):
        if isinstance(block, EvaBlockPostNorm):
            return tokens + block.drop_path2(block.norm2(block.mlp(tokens)))
        return tokens + block.drop_path2(_scaled(block.gamma_2, block.mlp(block.norm2(tokens))))

    def mlp(self, block):
        return block.mlp

    def mlp_norm(self, block):
        return block.mlp if isinstance(block, EvaBlockPostNorm) else block.norm2

    def mlp_prefix(self, model):
        return model.num_prefix_tokens

    def dense_calls(self, model):
        return [(model, "forward_intermediates")]

    def multiply_adds(self, model, before, after):
        total, prefix = 0, model.num_prefix_tokens
        for block, came, left in zip(model.blocks, before, after, strict=True):
            total += attention_multiply_adds(block.attn, came + prefix)
            total += matching_multiply_adds(came, left, block.attn.head_dim)
            total += linear_weights(block.mlp) * (left + prefix)
        return total


def _scaled(gamma: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return x if gamma is None else gamma * x


register_host(EvaHost())
