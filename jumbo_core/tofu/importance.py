"""How much a token matters: the attention it receives (no calibration), or |gradient x activation| (calibration).

Source: ToFu (arXiv 2312.01026) and the adaptive plan built on it; METHODS: importance.
"""

from __future__ import annotations

import torch


@torch.no_grad()
def attention_received(
    queries: torch.Tensor, keys: torch.Tensor, *, scale: float | None = None, sizes: torch.Tensor | None = None
) -> torch.Tensor:
    """Share of all attention that each token receives, mean over heads and queries: (B, N), each row sums to 1.

    One head's (B, N, N) weights are held at a time. Computed in fp32 (fp64 for fp64 inputs).

    Args:
        queries, keys: (B, H, N, D), as attention multiplies them.
        scale: of the scores. Default 1/sqrt(D).
        sizes: (B, N, 1), how many originals each token stands for, as :func:`fuse` returns. Then attention is
            proportional (log sizes are added to the scores) and a query counts as often as its size: the result is
            what the originals would receive together, had they all kept the group's vector.

    Raises:
        ValueError: shapes that do not fit.
    """
    if queries.ndim != 4 or queries.shape != keys.shape:
        raise ValueError(
            f"queries and keys must be (B, H, N, D) alike, got {tuple(queries.shape)} and {tuple(keys.shape)}"
        )
    batch, heads, tokens, width = keys.shape
    if sizes is not None and sizes.shape != (batch, tokens, 1):
        raise ValueError(f"sizes must be (B, N, 1) = {(batch, tokens, 1)}, got {tuple(sizes.shape)}")
    dtype = torch.promote_types(keys.dtype, torch.float32)
    scale = width**-0.5 if scale is None else scale
    sizes = keys.new_ones(batch, tokens, 1, dtype=dtype) if sizes is None else sizes.to(dtype)
    share = sizes / sizes.sum(1, keepdim=True)  # of the queries
    received = keys.new_zeros(batch, tokens, dtype=dtype)
    with torch.autocast(keys.device.type, enabled=False):
        for head in range(heads):
            scores = queries[:, head].to(dtype) * scale @ keys[:, head].to(dtype).transpose(1, 2)
            weights = (scores + sizes.log().transpose(1, 2)).softmax(-1)
            received += (weights * share).sum(1)
    return received / heads


def gradient_importance(activations: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    """|gradient x activation| of each token, summed over channels: two (B, N, D) -> (B, N).

    To first order, how much of the loss hangs on the token. Computed in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: shapes that differ.
    """
    if activations.ndim != 3 or activations.shape != gradients.shape:
        raise ValueError(
            f"activations and gradients must be (B, N, D) alike, "
            f"got {tuple(activations.shape)} and {tuple(gradients.shape)}"
        )
    dtype = torch.promote_types(activations.dtype, torch.float32)
    return (activations.detach().to(dtype) * gradients.detach().to(dtype)).abs().sum(-1)
