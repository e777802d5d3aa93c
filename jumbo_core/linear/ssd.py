"""The state-space scan of Mamba-2 (SSD): a linear recurrence over the sequence, computed in chunks of matrix products.

Per head, with a scalar decay per step (Mamba-2, arXiv 2405.21060)::

    h_t = exp(dt_t * A) * h_{t-1} + dt_t * x_t (outer) B_t        h: (P, N)
    y_t = h_t C_t + D * x_t

Inside a chunk the same thing is a masked, attention-like matrix product; between chunks only the state h is handed on.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from jumbo_core import checks
from jumbo_core.linear.backends import fused_backend, fused_scan
from jumbo_core.linear.chunks import ChunkedScan, scan_chunks
from jumbo_core.linear.opaque import scan as opaque_scan
from jumbo_core.linear.opaque import stays_whole
from jumbo_core.linear.running import runs
from jumbo_core.linear.steps import accumulation_dtype
from jumbo_core.modes import traced

BACKENDS = ("auto", "torch", "mamba_ssm", "fla")


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    *,
    chunk_size: int | str = 64,
    initial_state: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence over any length, in time and memory linear in it.

    Shapes: b batch, L steps, H heads, P channels per head, N state size.

    Args:
        x: inputs (b, L, H, P).
        dt: step sizes (b, L, H), already positive (after softplus).
        A: decay rates (H,), negative.
        B, C: input and output projections (b, L, N), shared by all heads, never expanded per head (but for "fla").
        D: skip weights (H,), or None (default) for no skip.
        chunk_size: steps per chunk, or "auto": by shape. The result does not depend on it. Default 64.
        initial_state: (b, H, P, N), or None (default) for zeros. Never modified.
        mask: (b, L) bool, True = real. Padding neither decays nor feeds the state, and its output is 0. Default None.
        backend: "torch" runs everywhere; "mamba_ssm" and "fla" run their CUDA kernels; "auto" (default) takes the first
            of them that is installed when x is on CUDA (and says which in the log), else "torch".

    Returns:
        y (b, L, H, P) in the dtype of x, and the state after the last step (b, H, P, N) in fp32 (fp64 for fp64).
        Decay and accumulation are fp32 at least, under autocast too.

    At inference on CPUs torch.compile takes the scan for one operator; elsewhere it makes a graph per number of chunks.
    An exported program has one length; the batch may vary.

    Raises:
        ValueError: shapes that do not fit (the sizes that clash are named), an unknown backend or one that cannot run;
            on CPU, where nobody traces, also a positive A or a negative dt.
    """
    _check_shapes(x, dt, A, B, C, D, initial_state, mask)
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if chunk_size == "auto":
        chunk_size = chunk_for(x.shape, running=runs(x) or stays_whole(x))
    chunk_size = checks.integer("chunk_size", chunk_size)
    if mask is not None:
        # Where, not a product: padding may hold anything, and 0 * inf is no number.
        x = x.masked_fill(~mask[..., None, None], 0)
        dt = dt.masked_fill(~mask[..., None], 0)
        B, C = B.masked_fill(~mask[..., None], 0), C.masked_fill(~mask[..., None], 0)
    backend = fused_backend(x, backend)
    with torch.autocast(x.device.type, enabled=False):
        if backend != "torch":
            return fused_scan(backend, x, dt, A, B, C, D, chunk_size, initial_state)
        if initial_state is None:
            b, _, heads, channels = x.shape
            initial_state = x.new_zeros(b, heads, channels, B.shape[-1], dtype=accumulation_dtype(x.dtype))
        if stays_whole(x):
            return opaque_scan(x, dt, A, B, C, D, initial_state.to(accumulation_dtype(x.dtype)), chunk_size)
        if traced():
            return _recorded_scan(x, dt, A, B, C, D, initial_state, chunk_size)
        if not torch.is_grad_enabled():  # autograd would count parameters as wanting gradients even so
            initial_state = initial_state.to(accumulation_dtype(x.dtype))
            return scan_chunks(x, dt, A, B, C, D, initial_state, chunk_size)[:2]
        return ChunkedScan.apply(x, dt, A, B, C, D, initial_state, chunk_size)


def _recorded_scan(*arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan for a compiler or exporter, whose graph holds every chunk; a training graph computes it again backwards.

    It has no decay matrix of a whole sequence to keep then, as the eager form has none.
    """

    def run(*arguments):
        y, state, _ = scan_chunks(*arguments)
        return y, state

    if torch.is_grad_enabled() and torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
        return checkpoint(run, *arguments, use_reentrant=False)
    return run(*arguments)


def ssd_scan_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    *,
    initial_state: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence step by step, as the formula reads; slow, and what decides when backends disagree.

    Arguments and results as for :func:`ssd_scan`.
    """
    _check_shapes(x, dt, A, B, C, D, initial_state, mask)
    dtype = accumulation_dtype(x.dtype)
    b, length, heads, channels = x.shape
    state = x.new_zeros(b, heads, channels, B.shape[-1], dtype=dtype) if initial_state is None else initial_state
    state, outputs = state.to(dtype), []
    for t in range(length):
        x_t, dt_t, b_t, c_t = x[:, t].to(dtype), dt[:, t].to(dtype), B[:, t].to(dtype), C[:, t].to(dtype)
        new = (
            torch.exp(dt_t * A.to(dtype))[..., None, None] * state
            + (dt_t[..., None] * x_t)[..., None] * b_t[:, None, None]
        )
        y_t = (new * c_t[:, None, None]).sum(-1)
        if D is not None:
            y_t = y_t + D.to(dtype)[:, None] * x_t
        if mask is not None:
            real = mask[:, t, None, None]
            new = torch.where(real[..., None], new, state)
            y_t = torch.where(real, y_t, torch.zeros_like(y_t))
        state = new
        outputs.append(y_t)
    return torch.stack(outputs, dim=1).to(x.dtype), state


def chunk_for(shape: tuple[int, ...], *, running: bool = False) -> int:
    """Chunk size for inputs of this shape: short sequences are one chunk, long ones go in chunks that fit a cache.

    ``running``: at inference on a CPU, where chunks run one by one and every one costs a dozen calls.
    """
    length, size = shape[1], 128 if running else 64
    return length if length <= 1.5 * size else size


def _check_shapes(x, dt, A, B, C, D, initial_state, mask) -> None:
    if x.ndim != 4 or not x.shape[1]:
        raise ValueError(f"x must be (batch, length, heads, channels) with length > 0, got {tuple(x.shape)}")
    b, length, heads, channels = x.shape
    expected = {"dt": (dt, (b, length, heads)), "A": (A, (heads,))}
    if B.ndim != 3:
        raise ValueError(f"B must be (batch, length, state) = ({b}, {length}, N), got {tuple(B.shape)}")
    states = B.shape[-1]
    expected |= {"B": (B, (b, length, states)), "C": (C, (b, length, states))}
    expected |= {"D": (D, (heads,)), "initial_state": (initial_state, (b, heads, channels, states))}
    expected |= {"mask": (mask, (b, length))}
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} must have shape {shape} for x {tuple(x.shape)} and B {tuple(B.shape)}, "
                f"got {tuple(tensor.shape)}"
            )
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool with True for real steps, got {mask.dtype}")
    if not traced() and x.device.type == "cpu":  # elsewhere looking would wait for the device
        if (A > 0).any():
            raise ValueError(f"A must not be positive, the state would grow: got {A.max():.3g}; pass -exp(A_log)")
        if (dt < 0).any():
            raise ValueError(f"dt must not be negative, got {dt.min():.3g}; pass softplus(dt + dt_bias)")
    if not x.is_floating_point():
        raise ValueError(f"x must be floating point, got {x.dtype}")
