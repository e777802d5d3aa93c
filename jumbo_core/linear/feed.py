"""What a block does around its mixer, at inference: a few hundred tokens at a time, without copies of all of them."""

from __future__ import annotations

import torch
from timm.layers import SwiGLU
from torch import nn
from torch.nn import functional as F

from jumbo_core.linear.running import runs
from jumbo_core.modes import hooked

TOKENS_AT_ONCE = 512  # over all samples: enough for matrix products at full speed, few enough for caches


def with_heading(h: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    """[mean of all tokens | tokens], normalised: h (B, T, D) -> (B, T + 1, D)."""
    if not runs(h) or hooked(norm) or not len(h):
        u = norm(h)
        return torch.cat([u.mean(dim=1, keepdim=True), u], dim=1)
    whole, step, begin = None, _tokens(h), 1
    for part in h.split(step, dim=1):
        u = norm(part)
        whole = u.new_empty(len(h), h.shape[1] + 1, h.shape[2]) if whole is None else whole
        whole[:, begin : begin + part.shape[1]] = u
        begin += part.shape[1]
    torch.mean(whole[:, 1:], dim=1, out=whole[:, 0])
    return whole


def feeds_in_parts(h: torch.Tensor, norm: nn.Module, mlp: nn.Module) -> bool:
    """Whether :func:`feed_in_parts` may stand for the modules: nobody records or hooks them, nothing is dropped."""
    return (
        runs(h)
        and type(mlp) is SwiGLU
        and type(mlp.act) is nn.SiLU
        and not any(module.training for module in mlp.modules())
        and not hooked(norm, *mlp.modules())
    )


def feed_in_parts(h: torch.Tensor, norm: nn.Module, mlp: SwiGLU) -> None:
    """``h += mlp(norm(h))`` for tokens h (B, T, D), which is overwritten."""
    for part in h.split(_tokens(h), dim=1):
        u = norm(part)
        hidden = F.silu(mlp.fc1_g(u), inplace=True).mul_(mlp.fc1_x(u))
        part.add_(mlp.fc2(mlp.norm(hidden)))


def _tokens(h: torch.Tensor) -> int:
    """Tokens of each sample that are worked on at once."""
    return max(1, TOKENS_AT_ONCE // max(1, len(h)))
