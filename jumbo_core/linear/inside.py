"""Scan, skip, gate and norm of the mixer at inference: one walk over the sequence, a chunk at a time.

What follows the scan of a chunk is done while its outputs are in the processor's cache, in place; for the whole
sequence one after the other, each operator would wait for memory. The numbers are those of :class:`Mamba2Mixer`'s own
operators up to rounding.
"""

from __future__ import annotations

import torch
from torch import nn
from torch._C._nn import silu  # the one of torch.nn.functional takes no buffer

from jumbo_core.linear.running import few_samples, scan_in_turn


def walk(
    mixer: nn.Module,
    gate: torch.Tensor,
    mixed: torch.Tensor,
    dt: torch.Tensor,
    state: torch.Tensor,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the convolution's outputs to what the output projection takes.

    Args:
        mixer: the :class:`Mamba2Mixer`, for its sizes and weights.
        gate, mixed: (b, L, inner) as projected, and [x | B | C] (b, L, inner + 2 N) as convolved; not modified.
        dt: step sizes (b, L, H) in the accumulation dtype, 0 for padding.
        state: of the scan before the first step (b, H, P, N), in the accumulation dtype.
        chunk_size: steps per chunk.

    Returns:
        (b, L, inner) in the dtype of ``gate``, and the state after the last step (b, H, P, N).
    """
    inner, by_head, wide = mixer.inner, (mixer.num_heads, mixer.head_dim), dt.dtype
    A, skip = mixer._decay().to(wide), mixer.D.to(wide)[:, None].expand(by_head).contiguous()
    scale, eps = mixer.norm.weight.to(wide), gate.new_tensor(mixer.norm.eps, dtype=wide)
    q = min(chunk_size, gate.shape[1])
    y, states = gate.new_empty(gate.shape), torch.empty_like(state)
    for some in few_samples(len(gate), q * inner):
        x, B, C = mixed[some].split([inner, mixer.d_state, mixer.d_state], dim=-1)
        x, opened = x.unflatten(2, by_head), x.new_empty(len(x), q, inner, dtype=wide)

        def source(begin: int, end: int, x=x) -> torch.Tensor:
            return x[:, begin:end].to(wide)

        def sink(
            begin: int, end: int, x: torch.Tensor, outputs: torch.Tensor, gate=gate[some], y=y[some], opened=opened
        ) -> None:
            outputs = outputs.addcmul_(x, skip).flatten(2)
            outputs.mul_(silu(gate[:, begin:end].to(wide), out=opened[:, : end - begin]))
            norm = torch.linalg.vector_norm(outputs, dim=-1, keepdim=True)
            outputs.mul_(torch.addcmul(eps, norm, norm, value=1 / inner).rsqrt_())
            if y.dtype == wide:
                torch.mul(outputs, scale, out=y[:, begin:end])
            else:
                y[:, begin:end] = outputs.mul_(scale)

        states[some] = scan_in_turn(source, sink, dt[some], A, B.to(wide), C.to(wide), state[some], chunk_size)
    return y, states
