"""Attention of the Jumbo blocks through Transformers' table of attention implementations."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Written-out attention that keeps its weights; (B, heads, T, d) each -> (B, T, heads, d), (B, heads, T, T).

    ``attention_mask`` broadcasts to the weights: bool, True = may be attended to, or numbers to add to the scores.
    """
    scores = query @ key.transpose(-2, -1) * scaling
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        scores = scores + attention_mask
    elif attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, float("-inf"))  # prefix tokens are real: no row is all padding
    weights = nn.functional.dropout(scores.softmax(dim=-1), p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class AttentionCore(nn.Module):
    """Softmax attention without parameters, by the implementation the configuration names.

    A module of its own so that the host can record what it returns: (context (B, T, heads, d), weights or None).
    """

    is_causal = False

    def __init__(self, config: PreTrainedConfig, scaling: float, dropout: float) -> None:
        super().__init__()
        self.config, self.scaling, self.dropout = config, scaling, dropout

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        return attend(
            self,
            query,
            key,
            value,
            attn_mask,
            dropout=self.dropout if self.training else 0.0,
            scaling=self.scaling,
        )


class JumboAttention(nn.Module):
    """Multi-head self-attention with the parameters of ``timm.layers.Attention`` (``qkv``, ``proj``)."""

    def __init__(
        self,
        config: PreTrainedConfig,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.attend = AttentionCore(config, (dim // num_heads) ** -0.5, attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None) -> torch.Tensor:
        """(B, T, D) -> (B, T, D); ``attn_mask`` broadcasts to (B, heads, T, T), see :func:`eager_attention`."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B, T, 3*D) -> (B, T, 3, heads, d)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        context, _ = self.attend(query, key, value, attn_mask)
        return self.proj_drop(self.proj(context.flatten(2)))  # (B, T, heads, d) -> (B, T, D)
