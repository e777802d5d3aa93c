"""What a block does around its mixer, at inference: a few hundred tokens at a time, without copies of all of them."""

from __future__ import annotations

import torch
from timm.layers import SwiGLU
from torch import nn
from torch.nn import functional as F

from jumbo_core.jumbo.packed import PackedLinear
from jumbo_core.linear.running import runs
from jumbo_core.modes import hooked

TOKENS_AT_ONCE = 1024  # over all samples: enough for matrix products at full speed, few enough for caches


def with_heading(h: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    """[mean of all tokens | tokens], normalised: h (B, T, D) -> (B, T + 1, D)."""
    if not runs(h) or hooked(norm) or not len(h):
        u = norm(h)
        return torch.cat([u.mean(dim=1, keepdim=True), u], dim=1)
    dtype = h.dtype if _is_plain(h, norm) else norm(h[:, :1]).dtype
    whole = h.new_empty(len(h), h.shape[1] + 1, h.shape[2], dtype=dtype)
    for begin in range(0, h.shape[1], step := _tokens(h)):
        end = min(begin + step, h.shape[1])
        normalise(h[:, begin:end], norm, out=whole[:, begin + 1 : end + 1])
    torch.mean(whole[:, 1:], dim=1, out=whole[:, 0])
    return whole


def normalise(h: torch.Tensor, norm: nn.Module, out: torch.Tensor) -> torch.Tensor:
    """``norm(h)`` written into ``out``; for an RMSNorm in two passes over ``h``, where torch takes four and a copy."""
    if not _is_plain(h, norm):
        return out.copy_(norm(h))
    size = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
    scale = size.square_().mul_(1 / h.shape[-1]).add_(norm.eps).rsqrt_()
    return torch.mul(h, scale, out=out).mul_(norm.weight)


def _is_plain(h: torch.Tensor, norm: nn.Module) -> bool:
    """Whether the norm is a plain RMSNorm that computes in the dtype of ``h``."""
    return (
        type(norm) is nn.RMSNorm
        and norm.weight is not None
        and norm.eps is not None
        and norm.normalized_shape == h.shape[-1:]
        and norm.weight.dtype == h.dtype
        and h.dtype in (torch.float32, torch.float64)
    )


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
    if not _multiplies_plainly(h, mlp):
        for part in h.split(_tokens(h), dim=1):
            u = norm(part)
            hidden = F.silu(mlp.fc1_g(u), inplace=True).mul_(mlp.fc1_x(u))
            part.add_(mlp.fc2(mlp.norm(hidden)))
        return
    # Products go into the memory of the part before, biases after them: torch's own linear layer takes fresh memory for
    # every product and copies its bias into each row of it first.
    rows = len(h) * min(_tokens(h), h.shape[1])
    u, gate, hidden = (h.new_empty(rows, size) for size in (h.shape[2], *[mlp.fc1_g.out_features] * 2))
    for part in h.split(_tokens(h), dim=1):
        n = part.shape[0] * part.shape[1]
        flat = normalise(part, norm, out=u[:n].view(part.shape)).view(n, part.shape[2])
        g = torch.mm(flat, mlp.fc1_g.weight.t(), out=gate[:n]).add_(mlp.fc1_g.bias)
        x = torch.mm(flat, mlp.fc1_x.weight.t(), out=hidden[:n]).add_(mlp.fc1_x.bias)
        F.silu(g, inplace=True).mul_(x)
        part.add_(mlp.fc2.bias)
        if len(h) == 1:
            part[0].addmm_(g, mlp.fc2.weight.t())
        else:
            part.add_(torch.mm(g, mlp.fc2.weight.t(), out=flat).view(part.shape))


def _multiplies_plainly(h: torch.Tensor, mlp: SwiGLU) -> bool:
    """Whether the products may be taken by hand: plain layers with a bias, all of one dtype, no autocast."""
    layers = (mlp.fc1_g, mlp.fc1_x, mlp.fc2)
    return (
        type(mlp.norm) is nn.Identity
        and all(type(layer) in (nn.Linear, PackedLinear) and layer.bias is not None for layer in layers)
        and all(type(p) is nn.Parameter and p.dtype == h.dtype for layer in layers for p in layer.parameters())
        and type(h) is torch.Tensor
        and not torch.is_autocast_enabled("cpu")
    )


def _tokens(h: torch.Tensor) -> int:
    """Tokens of each sample that are worked on at once."""
    return max(1, TOKENS_AT_ONCE // max(1, len(h)))
