"""CUDA kernels of other packages behind :func:`ssd_scan`: chosen when installed, never required."""

from __future__ import annotations

import importlib
import logging
from functools import lru_cache

import torch

logger = logging.getLogger(__name__)

# Module and function of each package's fused scan: mamba_ssm >= 2.2, flash-linear-attention >= 0.2 (time before heads).
KERNELS = {
    "mamba_ssm": ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"),
    "fla": ("fla.ops.simple_gla", "chunk_simple_gla"),
}


def fused_backend(x: torch.Tensor, backend: str) -> str:
    """The backend to run: "auto" becomes the first installed kernel for CUDA tensors, else "torch".

    Under torch.compile and torch.export "auto" is "torch": kernels of others cut graphs or cannot be written to a file.

    Raises:
        ValueError: a kernel was asked for by name and cannot run: x is not on CUDA, is fp64, or it is not installed.
    """
    if backend == "torch":
        return "torch"
    if backend == "auto":
        recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()
        return "torch" if recorded or not x.is_cuda or x.dtype == torch.float64 else _first_installed()
    if not x.is_cuda or x.dtype == torch.float64:
        raise ValueError(
            f"backend {backend!r} runs fp32, fp16 and bf16 tensors on CUDA, x is {x.dtype} on {x.device}: "
            f"use backend='torch' or 'auto'"
        )
    if _kernel(backend) is None:
        raise ValueError(f"backend {backend!r} is not installed or does not import here: use backend='auto'")
    return backend


def fused_scan(backend, x, dt, A, B, C, D, chunk_size, initial_state):
    """Run a package's kernel; arguments and results as for :func:`ssd_scan`, mask already applied."""
    kernel = _kernel(backend)
    if backend == "mamba_ssm":
        # Chunks must be a power of two of at least 16 there. B and C get one group for all heads.
        chunk = max(16, 1 << (chunk_size - 1).bit_length())
        return kernel(
            x,
            dt,
            A.float(),
            B[:, :, None].to(x.dtype),
            C[:, :, None].to(x.dtype),
            chunk_size=chunk,
            D=None if D is None else D.float(),
            initial_states=None if initial_state is None else initial_state.float(),
            return_final_states=True,
        )
    # Gated linear attention with a scalar gate: queries C, keys B, values dt*x, log gate dt*A; state (b, H, N, P).
    heads = x.shape[2]
    keys, queries = (t[:, :, None].expand(-1, -1, heads, -1).to(x.dtype) for t in (B, C))
    start = None if initial_state is None else initial_state.float().transpose(2, 3).contiguous()
    y, state = kernel(
        q=queries.contiguous(),
        k=keys.contiguous(),
        v=(x * dt[..., None]).to(x.dtype),
        g=dt.float() * A.float(),
        scale=1.0,
        initial_state=start,
        output_final_state=True,
    )
    if D is not None:
        y = y + (D[:, None] * x).to(y.dtype)
    return y.to(x.dtype), state.transpose(2, 3)


@lru_cache
def _first_installed() -> str:
    chosen = next((name for name in KERNELS if _kernel(name) is not None), "torch")
    logger.info("ssd_scan on CUDA uses %s", chosen)
    return chosen


@lru_cache
def _kernel(backend: str):
    module, function = KERNELS[backend]
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, RuntimeError) as error:  # kernels also fail to import without a driver
        logger.debug("%s is not usable: %s", backend, error)
        return None
