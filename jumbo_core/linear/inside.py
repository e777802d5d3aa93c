"""What lies between the mixer's projections, at inference: one walk over the sequence, a chunk at a time.

A chunk is convolved, scanned, gated and normalised while it is in the processor's cache, in place; for the whole
sequence one after the other, each operator would wait for memory. The numbers are those of :class:`Mamba2Mixer`'s own
operators up to rounding.
"""

from __future__ import annotations

import torch
from torch import nn
from torch._C._nn import silu  # the one of torch.nn.functional takes no buffer

from jumbo_core.linear.running import few_samples, scan_in_turn


def walk(
    mixer: nn.Module, rows: torch.Tensor, dt: torch.Tensor, state: torch.Tensor, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """From what the input projection gives to what the output projection takes.

    Args:
        mixer: the :class:`Mamba2Mixer`, for its sizes and weights.
        rows: [gate | x | B | C | step sizes] as projected (b, K - 1 + L, …), K the convolution's kernel: above the L
            steps are those before them, of which only x, B and C are read. Not modified.
        dt: step sizes (b, L, H) in the accumulation dtype, 0 for padding.
        state: of the scan before the first step (b, H, P, N), in the accumulation dtype.
        chunk_size: steps per chunk.

    Returns:
        (b, L, inner) in the dtype of ``rows``, and the state after the last step (b, H, P, N).
    """
    inner, by_head, wide, n = mixer.inner, (mixer.num_heads, mixer.head_dim), dt.dtype, mixer.d_state
    A, skip = mixer._decay().to(wide), mixer.D.to(wide)[:, None].expand(by_head).contiguous()
    scale, eps = mixer.norm.weight.to(wide), rows.new_tensor(mixer.norm.eps, dtype=wide)
    taps, bias = mixer.conv1d.weight[:, 0].t().to(wide).contiguous(), mixer.conv1d.bias
    bias = taps.new_zeros(len(mixer.conv1d.weight)) if bias is None else bias.to(wide)
    before, length = len(taps) - 1, dt.shape[1]
    q = min(chunk_size, length)
    y, states = rows.new_empty(len(rows), length, inner), torch.empty_like(state)
    for some in few_samples(len(rows), q * inner):
        own = rows[some]
        gate, x, BC = own[:, before:, :inner], own[..., inner : 2 * inner], own[..., 2 * inner : 2 * inner + 2 * n]
        B, C = convolve(BC, taps[:, inner:], bias[inner:], BC.new_empty(len(own), length, 2 * n, dtype=wide)).chunk(
            2, 2
        )
        opened, convolved = (rows.new_empty(len(own), q, inner, dtype=wide) for _ in range(2))

        def source(begin: int, end: int, x=x, convolved=convolved) -> torch.Tensor:
            x = convolve(x[:, begin : end + before], taps[:, :inner], bias[:inner], convolved[:, : end - begin])
            return x.unflatten(2, by_head)

        def sink(
            begin: int, end: int, x: torch.Tensor, outputs: torch.Tensor, gate=gate, y=y[some], opened=opened
        ) -> None:
            outputs = outputs.addcmul_(x, skip).flatten(2)
            outputs.mul_(silu(gate[:, begin:end].to(wide), out=opened[:, : end - begin]))
            norm = torch.linalg.vector_norm(outputs, dim=-1, keepdim=True)
            outputs.mul_(torch.addcmul(eps, norm, norm, value=1 / inner).rsqrt_())
            if y.dtype == wide:
                torch.mul(outputs, scale, out=y[:, begin:end])
            else:
                y[:, begin:end] = outputs.mul_(scale)

        states[some] = scan_in_turn(source, sink, dt[some], A, B, C, state[some], chunk_size)
    return y, states


def convolve(x: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Causal convolution of each channel, then SiLU: x (b, K - 1 + L, c), taps (K, c) -> ``out`` (b, L, c)."""
    length, x = out.shape[1], x.to(out.dtype)
    torch.addcmul(bias, x[:, :length], taps[0], out=out)
    for k in range(1, len(taps)):
        out.addcmul_(x[:, k : k + length], taps[k])
    return torch.ops.aten.silu_(out)
