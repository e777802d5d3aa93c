"""One pre-norm block over [J slices | other prefix tokens | patches]."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from timm.layers import Attention, DropPath, LayerScale
from torch import nn

from jumbo_core.jumbo.mlp import TightMlp
from jumbo_core.jumbo.token import join_slices, split_slices
from jumbo_core.modes import hooked, recorded


class JumboBlock(nn.Module):
    """Attention over all tokens, a wide FFN for the joined Jumbo token, a narrow MLP for every other token.

    With x the tokens, g the J slices joined and p the rest (Jumbo paper, section 3; released code)::

        x = x + attn(norm1(x))
        g = g + jumbo_ffn(norm3(g))      # jumbo_ffn is passed in: all blocks share it
        p = p + mlp(norm2(p))

    With ``multiplier=0`` this is the plain ViT block.

    Args:
        dim: token width D.
        num_heads: attention heads; must divide ``dim``.
        multiplier: J, the number of slices at the front of the sequence. 0 for a plain block.
        mlp_ratio: hidden width of the patch MLP over D. Default 4.
        layer_scale: initial value of LayerScale on each residual, or None (default) for none. Paper v1: 1e-4.
        drop_path: stochastic depth rate of this block's residuals. Default 0.
        attn_drop, proj_drop: dropout of attention weights and of linear outputs. Default 0.
        norm_eps: epsilon of the LayerNorms. Default 1e-5.
        attn_layer: ``attn_layer(dim, num_heads=…, qkv_bias=True, attn_drop=…, proj_drop=…)``, called as
            ``attn(x, attn_mask=mask)``. Hosts pass their own attention here. Default ``timm.layers.Attention``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        multiplier: int,
        mlp_ratio: float = 4.0,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_eps: float = 1e-5,
        attn_layer: Callable[..., nn.Module] = Attention,
    ) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, eps=norm_eps)
        scale = partial(LayerScale, init_values=layer_scale) if layer_scale is not None else nn.Identity
        self.multiplier = multiplier
        self.norm1 = norm(dim)
        self.attn = attn_layer(dim, num_heads=num_heads, qkv_bias=True, attn_drop=attn_drop, proj_drop=proj_drop)
        self.ls1 = scale(dim)
        self.norm2 = norm(dim)
        self.mlp = TightMlp(dim, int(dim * mlp_ratio), drop=proj_drop)
        self.ls2 = scale(dim)
        if multiplier:
            self.norm3 = norm(dim * multiplier)
            self.ls3 = scale(dim * multiplier)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(
        self,
        x: torch.Tensor,
        jumbo_ffn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(B, J+E+N, D) -> (B, J+E+N, D). ``attn_mask`` broadcasts to (B, heads, T, T), True = may be attended to."""
        if self.multiplier and not recorded() and self._halves_are_own():
            return self._without_copies(x, jumbo_ffn, attn_mask)
        return self.feed(self.attend(x, attn_mask), jumbo_ffn)

    def _halves_are_own(self) -> bool:
        """Whether neither a subclass nor somebody on this object has replaced one of the halves."""
        halves = (self.attend, JumboBlock.attend), (self.feed, JumboBlock.feed)
        return all(getattr(half, "__func__", None) is own for half, own in halves)

    def _without_copies(
        self, x: torch.Tensor, jumbo_ffn: Callable[[torch.Tensor], torch.Tensor], attn_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Both halves at inference: attention's residual is added slices and patches apart, so that each lies in one
        piece for its norm and FFN, and their results are written into the output's two parts."""
        j = self.multiplier
        y = self.drop_path(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask)))
        slices, rest = x[:, :j] + y[:, :j], x[:, j:] + y[:, j:]
        del y  # its memory serves what follows
        g = self.drop_path(self.ls3(jumbo_ffn(self.norm3(join_slices(slices)))))
        update = self.drop_path(self.ls2(self.mlp(self.norm2(rest))))
        out = x.new_empty(x.shape, dtype=torch.result_type(rest, update))
        torch.add(slices, split_slices(g, j), out=out[:, :j])
        torch.add(rest, update, out=out[:, j:])
        return out

    def attend(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None) -> torch.Tensor:
        """The first half, attention with its residual: a new tensor of the shape of ``x``."""
        return x + self.drop_path(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask)))

    def feed(self, x: torch.Tensor, jumbo_ffn: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        """The second half, the feed-forward networks; may overwrite ``x`` when gradients are off."""
        if not self.multiplier:
            return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))

        slices, rest = x.split([self.multiplier, x.shape[1] - self.multiplier], dim=1)  # one gradient for both parts
        g = join_slices(slices)  # (B, J, D) -> (B, J*D)
        g = self.drop_path(self.ls3(jumbo_ffn(self.norm3(g))))
        rest_update = self.drop_path(self.ls2(self.mlp(self.norm2(rest))))
        slices_update = split_slices(g, self.multiplier)  # (B, J*D) -> (B, J, D)

        if recorded() or hooked(self.norm2, self.norm3, self.mlp):
            return torch.cat([slices + slices_update, rest + rest_update], dim=1)
        # x is the first half's own result and no hook was given parts of it, so both are updated where they lie.
        slices.add_(slices_update)
        rest.add_(rest_update)
        return x
