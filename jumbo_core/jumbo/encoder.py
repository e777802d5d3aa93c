"""A stack of Jumbo blocks for any modality: image, series, text and video embeddings sit in front of it."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import NamedTuple

import torch
from timm.layers import Attention, trunc_normal_
from torch import nn
from torch.utils.checkpoint import checkpoint

from jumbo_core import checks
from jumbo_core.jumbo.block import JumboBlock
from jumbo_core.jumbo.token import JumboFFN


class JumboOutput(NamedTuple):
    """jumbo (B, J, D): the J slices, or the class token (B, 1, D) when ``multiplier=0``. patches (B, N, D)."""

    jumbo: torch.Tensor
    patches: torch.Tensor


class JumboEncoder(nn.Module):
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
        super().__init__()
        dim, depth = checks.integer("dim", dim), checks.integer("depth", depth)
        num_heads = checks.integer("num_heads", num_heads)
        multiplier, registers = checks.integer("multiplier", multiplier, 0), checks.integer("registers", registers, 0)
        if dim % num_heads:
            raise ValueError(f"dim {dim} is not divisible by num_heads {num_heads}")
        mlp_ratio = checks.positive("mlp_ratio", mlp_ratio)
        jumbo_mlp_ratio = checks.positive("jumbo_mlp_ratio", jumbo_mlp_ratio)
        norm_eps = checks.positive("norm_eps", norm_eps)
        layer_scale = None if layer_scale is None else checks.positive("layer_scale", layer_scale)
        share_jumbo_ffn = checks.flag("share_jumbo_ffn", share_jumbo_ffn)
        attn_drop, proj_drop = checks.rate("attn_drop", attn_drop), checks.rate("proj_drop", proj_drop)
        rates = _rates_per_block(drop_path, depth)
        self.dim, self.depth, self.num_heads = dim, depth, num_heads
        self.multiplier, self.registers = multiplier, registers
        self.share_jumbo_ffn = share_jumbo_ffn
        self.num_global_tokens = multiplier or 1
        self.num_prefix_tokens = self.num_global_tokens + registers
        self._unreachable: list[str] = []  # names of the parameters that freeze_unreachable took out of training
        # Transformers flips these two on every module that has them; timm's set_grad_checkpointing sets the first.
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

        if multiplier:
            self.jumbo_token = nn.Parameter(torch.zeros(1, multiplier, dim))
        else:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
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
        # The shared FFN lives here and only here: a module that several blocks own has several names in a state dict.
        if multiplier:
            make_ffn = partial(JumboFFN, dim, multiplier, jumbo_mlp_ratio, drop=proj_drop)
            self.jumbo_mlp = make_ffn() if share_jumbo_ffn else nn.ModuleList(make_ffn() for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As released: every matrix and token from a truncated normal of 0.02, every bias zero."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                trunc_normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def zero_jumbo_output(self) -> None:
        """Start with Jumbo FFNs that add nothing: part of ``init="short"``, which short runs want."""
        if self.multiplier:
            for name, parameter in self.jumbo_mlp.named_parameters():
                if name.endswith("fc2.weight"):
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
        collected = {}
        for i, block in enumerate(self.blocks[:stop]):
            # Its call, not the FFN itself: offloading hooks try to move every argument that has a device.
            ffn = self.ffn_of(i).__call__ if self.multiplier else None
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                tokens = self._gradient_checkpointing_func(block.__call__, tokens, ffn, attn_mask)
            else:
                tokens = block(tokens, ffn, attn_mask)
            if collect is not None and i in collect:
                collected[i] = tokens
        return self.split(self.norm(tokens)) if collect is None else (tokens, collected)

    def forward_tokens(self, patches: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """As :meth:`forward`, but one tensor (B, prefix + N, D), normalised, prefix tokens first."""
        tokens, _ = self(patches, mask, collect=())  # called, not run: offloading hooks sit on calls
        return self.norm(tokens)

    def intermediates(
        self,
        patches: torch.Tensor,
        indices: Sequence[int],
        mask: torch.Tensor | None = None,
        *,
        norm: bool = False,
    ) -> list[JumboOutput]:
        """Outputs of the blocks named in ``indices`` (negative counts from the end), in the order asked for.

        Blocks after the last wanted one are not run. ``norm=True`` applies the final LayerNorm to each.
        """
        if not len(indices):
            raise ValueError("indices must name at least one block, got none")
        wanted = [resolve_index(i, len(self.blocks)) for i in indices]
        _, collected = self(patches, mask, collect=wanted, stop=max(wanted) + 1)
        return [self.split(self.norm(collected[i]) if norm else collected[i]) for i in wanted]

    def add_prefix(self, patches: torch.Tensor) -> torch.Tensor:
        """Put the learned prefix tokens in front: (B, N, D) -> (B, prefix + N, D)."""
        if patches.ndim != 3 or patches.shape[-1] != self.dim:
            raise ValueError(f"JumboEncoder expects patches (B, N, {self.dim}), got {tuple(patches.shape)}")
        prefix = [self.jumbo_token if self.multiplier else self.cls_token]
        if self.registers:
            prefix.append(self.reg_token)
        prefix = [token.to(patches.dtype).expand(patches.shape[0], -1, -1) for token in prefix]
        return torch.cat([*prefix, patches], dim=1)

    def split(self, tokens: torch.Tensor) -> JumboOutput:
        """(B, prefix + N, D) -> global token and patches; registers are dropped."""
        return JumboOutput(tokens[:, : self.num_global_tokens], tokens[:, self.num_prefix_tokens :])

    def ffn_of(self, block_index: int) -> nn.Module | None:
        """The Jumbo FFN that block runs with."""
        if not self.multiplier:
            return None
        return self.jumbo_mlp if self.share_jumbo_ffn else self.jumbo_mlp[block_index]

    def keep_blocks(self, count: int) -> None:
        """Cut off every block after the first ``count``."""
        self.blocks = self.blocks[:count]
        if self.multiplier and not self.share_jumbo_ffn:
            self.jumbo_mlp = self.jumbo_mlp[:count]
        self.depth = count

    def freeze_unreachable(self, reads: str = "patches") -> None:
        """Take out of training what cannot reach what a head reads, and put back what an earlier call took out.

        In the last block the Jumbo FFN changes the Jumbo token alone and the MLP every other token alone. A head that
        reads one side only would leave the other without a gradient: weight decay would shrink it, and distributed
        training would wait for gradients that never come.

        Args:
            reads: "patches" (feature maps, patch mean), "global" (the Jumbo token alone) or "all".
        """
        if reads not in ("patches", "global", "all"):
            raise ValueError(f"reads must be 'patches', 'global' or 'all', got {reads!r}")
        parameters = dict(self.named_parameters())
        for name in self._unreachable:
            if name in parameters:
                parameters[name].requires_grad_(True)
        last, unreachable = f"blocks.{len(self.blocks) - 1}.", ()
        if self.multiplier and reads == "patches":
            unreachable = (last + "norm3.", last + "ls3.")
            if not self.share_jumbo_ffn:
                unreachable += (f"jumbo_mlp.{len(self.blocks) - 1}.",)
            elif len(self.blocks) == 1:
                unreachable += ("jumbo_mlp.",)
        elif self.multiplier and reads == "global":
            unreachable = (last + "norm2.", last + "mlp.", last + "ls2.")
        self._unreachable = [n for n, p in parameters.items() if n.startswith(unreachable) and p.requires_grad]
        for name in self._unreachable:
            parameters[name].requires_grad_(False)

    def _attention_mask(self, patches: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Mask of patches (B, N) -> mask of attention (B, 1, 1, prefix + N)."""
        if mask is None:
            return None
        if mask.dtype != torch.bool or mask.shape != patches.shape[:2]:
            raise ValueError(
                f"mask must be bool of shape (B, N) = {tuple(patches.shape[:2])} with True for real patches, "
                f"got {mask.dtype} {tuple(mask.shape)}"
            )
        prefix = mask.new_ones(mask.shape[0], self.num_prefix_tokens)  # prefix tokens are always real
        return torch.cat([prefix, mask], dim=1)[:, None, None]  # (B, T) -> (B, 1, 1, T)


def resolve_index(index: int, depth: int) -> int:
    """A block index with negatives counted from the end; IndexError names the range when it is outside."""
    if not -depth <= index < depth:
        raise IndexError(f"block index {index} is outside of a model with {depth} blocks ({-depth}..{depth - 1})")
    return index % depth


def _rates_per_block(drop_path: float | Sequence[float], depth: int) -> list[float]:
    rates = list(drop_path) if isinstance(drop_path, Sequence) else [drop_path] * depth
    if len(rates) != depth:
        raise ValueError(f"drop_path has {len(rates)} rates for {depth} blocks; give one number or one per block")
    return [checks.rate("drop_path", rate) for rate in rates]
