"""A stack of Jumbo blocks for any modality: image, series, text and video embeddings sit in front of it."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
from timm.layers import Attention, trunc_normal_
from torch import nn

from jumbo_core import checks
from jumbo_core.dropout import replace_dropouts
from jumbo_core.jumbo.block import JumboBlock
from jumbo_core.jumbo.stack import BlockStack, JumboOutput, check_mask, rates_per_block


class JumboEncoder(BlockStack):
    """Transformer encoder with a Jumbo token (arXiv 2502.15021, section 3; layout and defaults of the released code).

    ``multiplier=0, registers=16`` is the paper's baseline, a plain ViT with a class token and 16 registers, from the
    same code, so that ablations compare like with like. Tokens run in the order
    ``[J slices or class token | registers | patches]``; the position table, if any, belongs to the embedding in front.

    Args:
        dim: patch width D.
        depth: number of blocks.
        num_heads: attention heads; must divide ``dim``.
        multiplier: J, width of the global token in patches. Default 6. 0 = a class token of width D instead.
        registers: extra scratch tokens, attended to and thrown away at the end. Default 0.
        mlp_ratio: hidden width of the patch MLP over D. Default 4.
        jumbo_mlp_ratio: hidden width of the Jumbo FFN over J*D. Default 4.
        share_jumbo_ffn: one Jumbo FFN for all blocks (default) or one per block (v1 of the paper).
        layer_scale: initial LayerScale value, or None (default).
        drop_path: stochastic depth rate: one number for every block (as released, default 0.1) or one per block,
            for example ``timm.layers.calculate_drop_path_rates(0.1, depth)`` for the usual ramp.
        attn_drop, proj_drop: dropout of attention weights and of linear outputs. Default 0.
        norm_eps: LayerNorm epsilon. Default 1e-5.
        attn_layer: see :class:`JumboBlock`.

    Raises:
        ValueError: sizes below 1, heads that do not divide ``dim``, rates outside [0, 1), wrong number of rates.
    """

    global_parts = ("norm3", "ls3")
    patch_parts = ("norm2", "mlp", "ls2")

    def __init__(
        self,
        dim: int,
        depth: int,
        num_heads: int,
        *,
        multiplier: int = 6,
        registers: int = 0,
        mlp_ratio: float = 4.0,
        jumbo_mlp_ratio: float = 4.0,
        share_jumbo_ffn: bool = True,
        layer_scale: float | None = None,
        drop_path: float | Sequence[float] = 0.1,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_eps: float = 1e-5,
        attn_layer: Callable[..., nn.Module] = Attention,
    ) -> None:
        super().__init__(
            dim,
            depth,
            multiplier=multiplier,
            jumbo_mlp_ratio=jumbo_mlp_ratio,
            share_jumbo_ffn=share_jumbo_ffn,
            proj_drop=proj_drop,
        )
        num_heads, registers = checks.integer("num_heads", num_heads), checks.integer("registers", registers, 0)
        if self.dim % num_heads:
            raise ValueError(f"dim {dim} is not divisible by num_heads {num_heads}")
        mlp_ratio, norm_eps = checks.positive("mlp_ratio", mlp_ratio), checks.positive("norm_eps", norm_eps)
        layer_scale = None if layer_scale is None else checks.positive("layer_scale", layer_scale)
        attn_drop = checks.rate("attn_drop", attn_drop)
        rates = rates_per_block(drop_path if isinstance(drop_path, Sequence) else [drop_path] * depth, depth)
        self.num_heads, self.registers = num_heads, registers
        self.num_prefix_tokens = self.num_global_tokens + registers
        if registers:
            self.reg_token = nn.Parameter(torch.zeros(1, registers, dim))
        self.blocks = nn.ModuleList(
            JumboBlock(
                dim,
                num_heads,
                multiplier=multiplier,
                mlp_ratio=mlp_ratio,
                layer_scale=layer_scale,
                drop_path=rate,
                attn_drop=attn_drop,
                proj_drop=proj_drop,
                norm_eps=norm_eps,
                attn_layer=attn_layer,
            )
            for rate in rates
        )
        self.norm = nn.LayerNorm(dim, eps=norm_eps)
        replace_dropouts(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As released: every matrix and token from a truncated normal of 0.02, every bias zero."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                trunc_normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self,
        patches: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        collect: Container[int] | None = None,
        stop: int | None = None,
    ) -> JumboOutput | tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Encode patches (B, N, D); ``mask`` (B, N) bool, True = real, False = padding that nobody attends to.

        With ``collect``, a set of block indices, nothing is normalised or split: the return value is the tokens
        (B, prefix + N, D) after the first ``stop`` blocks (default all) and the outputs of the blocks in ``collect``.
        """
        tokens, attn_mask = self.add_prefix(patches), self._attention_mask(patches, mask)
        collected, blocks = {}, range(len(self.blocks[:stop]))
        passes = self.shared_passes(len(blocks))
        for i in blocks:
            tokens = self.run_block(i, tokens, attn_mask, passes)
            if collect is not None and i in collect:
                collected[i] = tokens
        return self.split(self.norm(tokens)) if collect is None else (tokens, collected)

    def add_prefix(self, patches: torch.Tensor) -> torch.Tensor:
        """Put the learned prefix tokens in front: (B, N, D) -> (B, prefix + N, D)."""
        if patches.ndim != 3 or patches.shape[-1] != self.dim:
            raise ValueError(f"JumboEncoder expects patches (B, N, {self.dim}), got {tuple(patches.shape)}")
        prefix = [self.global_token(patches)]
        if self.registers:
            prefix.append(self.reg_token.to(patches.dtype).expand(patches.shape[0], -1, -1))
        return torch.cat([*prefix, patches], dim=1)

    def split(self, tokens: torch.Tensor) -> JumboOutput:
        """(B, prefix + N, D) -> global token and patches; registers are dropped."""
        return JumboOutput(tokens[:, : self.num_global_tokens], tokens[:, self.num_prefix_tokens :])

    def without_patches(self, tokens: torch.Tensor) -> torch.Tensor:
        """Every token that is no patch (B, globals + registers, D)."""
        return tokens[:, : self.num_prefix_tokens]

    def _attention_mask(self, patches: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Mask of patches (B, N) -> mask of attention (B, 1, 1, prefix + N)."""
        if mask is None:
            return None
        check_mask(patches, mask)
        prefix = mask.new_ones(mask.shape[0], self.num_prefix_tokens)  # prefix tokens are always real
        return torch.cat([prefix, mask], dim=1)[:, None, None]  # (B, T) -> (B, 1, 1, T)
