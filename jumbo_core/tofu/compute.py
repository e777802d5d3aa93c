"""Multiply-adds that fusion leaves in a model's blocks, by closed forms read from the model's own layers."""

from __future__ import annotations

from torch import nn

from jumbo_core.jumbo.lowlatency import Int8Linear


def linear_weights(module: nn.Module) -> int:
    """Weights of all linear layers inside: the multiply-adds of one token that passes each of them once."""
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, (nn.Linear, Int8Linear)))


def attention_multiply_adds(attention: nn.Module, tokens: int) -> int:
    """Projections, scores and weighted sums over T tokens: ``T * weights + 2 T^2 * heads * head_dim``.

    Args:
        attention: has ``num_heads`` and ``head_dim``, as timm's has.
        tokens: T, prefix included.
    """
    width = attention.num_heads * attention.head_dim
    return linear_weights(attention) * tokens + 2 * tokens * tokens * width


def matching_multiply_adds(before: int, after: int, key_dim: int) -> int:
    """Cosines of sources with destinations among ``before`` patches; nothing where no patch leaves."""
    return (before // 2) * (before - before // 2) * key_dim if after < before else 0
