"""The scan as one operator of a compiled graph, at inference on CPUs: a compiler sees its shapes, not its chunks.

Traced chunk by chunk, the scan is a graph that takes long to compile, wants a new one for every number of chunks and
runs slower than the eager form, which looks at the values and works in place. As one operator it stays that form, and
the compiler fuses what lies around it.
"""

from __future__ import annotations

import torch

from jumbo_core.linear import running


def stays_whole(x: torch.Tensor) -> bool:
    """Whether the scan of ``x`` is to be one operator: torch.compile at inference on a CPU, nothing exported."""
    return (
        x.device.type == "cpu"
        and torch.compiler.is_dynamo_compiling()
        and not torch.compiler.is_exporting()
        and not torch.is_grad_enabled()
    )


@torch.library.custom_op("jumbo_vit::scan", mutates_args=(), device_types="cpu")
def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    state: torch.Tensor,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, last state) as :func:`jumbo_core.linear.ssd_scan` has them; ``state`` in the accumulation dtype."""
    with torch.no_grad():
        return running.scan(x, dt, A, B, C, D, state, chunk_size)


@scan.register_fake
def _(x, dt, A, B, C, D, state, chunk_size):
    return x.new_empty(x.shape), torch.empty_like(state, memory_format=torch.contiguous_format)
