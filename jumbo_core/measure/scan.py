"""The scan against Transformers' torch path of Mamba-2, and against its own length."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional as F

from jumbo_core.linear import ssd_scan
from jumbo_core.measure.memory import peak_memory, peak_memory_cuda
from jumbo_core.measure.report import command_line, environment, markdown_table
from jumbo_core.measure.turns import spread, take_turns

SHAPE = dict(batch=1, heads=24, head_dim=64, d_state=64)
PEER_CHUNKS = (16, 32, 64, 128, 256)
LENGTHS = (1024, 2048, 4096, 8192, 16384)


def inputs(length: int, *, batch: int, heads: int, head_dim: int, d_state: int) -> dict[str, torch.Tensor]:
    """Random inputs of a scan, with steps and decays in Mamba-2's initial range."""
    g = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(batch, length, heads, head_dim, generator=g),
        "dt": F.softplus(torch.randn(batch, length, heads, generator=g) - 3),
        "A": -torch.empty(heads).uniform_(1, 16, generator=g),
        "B": torch.randn(batch, length, d_state, generator=g),
        "C": torch.randn(batch, length, d_state, generator=g),
        "D": torch.randn(heads, generator=g),
    }


def ours(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """On CUDA by a fused kernel, if one is installed."""
    return ssd_scan(**tensors, chunk_size="auto", backend="auto")[0]


def peer(tensors: dict[str, torch.Tensor], chunk: int) -> torch.Tensor:
    """Transformers' own chunked scan in torch, what its Mamba-2 runs without a kernel package."""
    try:
        module = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    except ImportError as error:
        raise ImportError("the peer of this measurement is Transformers: pip install 'jumbo-vit[hf]'") from error
    scan = module.mamba2_chunk_scan.__wrapped__  # past the look-up of kernel packages
    x, dt, A, B, C, D = (tensors[name] for name in ("x", "dt", "A", "B", "C", "D"))
    return scan(x, dt, A, B[:, :, None], C[:, :, None], chunk_size=chunk, D=D, dt_softplus=False)


def prepared(which: str, chunk: int, length: int) -> Callable[[], torch.Tensor]:
    """One scan ready to run, for :func:`peak_memory`."""
    run = ours if which == "ours" else partial(peer, chunk=chunk)
    run(inputs(2 * chunk, **SHAPE))  # libraries load their workspaces
    return partial(run, inputs(length, **SHAPE))


def measure(
    *,
    length: int = 2048,
    repeats: int = 15,
    threads: int = 2,
    lengths: Sequence[int] = LENGTHS,
    device: str | None = None,
) -> dict:
    """Everything about the scan: ratio to the peer at its best chunk size, peak memory of both, growth with length.

    ``device``: "cpu" or "cuda"; default CUDA where there is one.

    Raises:
        RuntimeError: the two do not agree within 1e-4, or 1e-2 on CUDA, where kernels may round factors to TF32:
            nothing is timed then.
    """
    torch.set_num_threads(threads)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    tensors, limit = on(device, inputs(length, **SHAPE)), 1e-2 if device == "cuda" else 1e-4
    with torch.inference_mode():
        expected = ours(tensors)
        for chunk in PEER_CHUNKS:
            error = (peer(tensors, chunk) - expected).abs().max().item()
            if not error < limit * expected.abs().max().item():
                raise RuntimeError(f"peer with chunk {chunk} and ssd_scan differ by {error:.1e}: nothing was timed")
    trial = take_turns({str(chunk): partial(peer, tensors, chunk) for chunk in PEER_CHUNKS}, 3, device=device)
    best = int(min(trial, key=lambda chunk: statistics.median(trial[chunk])))
    times = take_turns({"ours": partial(ours, tensors), "peer": partial(peer, tensors, best)}, repeats, device=device)
    growing = {str(n): partial(ours, on(device, inputs(n, **SHAPE))) for n in lengths}
    growth = take_turns(growing, max(5, repeats // 2), device=device)
    medians = [statistics.median(growth[str(n)]) for n in lengths]
    x, y = [math.log(n) for n in lengths], [math.log(ms) for ms in medians]
    return {
        "command": command_line(),
        "environment": environment(),
        "device": device,
        "shape": {**SHAPE, "length": length, "dtype": "float32"},
        "ours_ms": spread(times["ours"]),
        "peer_ms": spread(times["peer"]),
        "peer_best_chunk": best,
        "ratio": round(statistics.median(p / o for o, p in zip(times["ours"], times["peer"], strict=True)), 2),
        "peak_MiB": {
            name: round(peak(name, call, best, length, threads, device), 1)
            for name, call in (("ours", partial(ours, tensors)), ("peer", partial(peer, tensors, best)))
        },
        "growth_ms": dict(zip(map(str, lengths), (round(ms, 2) for ms in medians), strict=True)),
        "growth_exponent": round(statistics.linear_regression(x, y).slope, 3),
    }


def on(device: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def peak(name: str, call: Callable[[], torch.Tensor], chunk: int, length: int, threads: int, device: str) -> float:
    """MiB that a scan takes at most."""
    if device == "cuda":
        return peak_memory_cuda(call)
    return peak_memory(prepared, name, chunk, length, threads=threads)


def table(result: dict) -> str:
    """The result as the README shows it."""
    cells = [
        f"{result['shape']['length']}",
        f"{result['ours_ms']['median']:.1f}",
        f"{result['peer_ms']['median']:.1f} (chunk {result['peer_best_chunk']})",
        f"{result['ratio']:.1f}x",
        f"{result['peak_MiB']['ours']:.0f} / {result['peak_MiB']['peer']:.0f}",
        f"{result['growth_exponent']:.2f}",
    ]
    return markdown_table(
        ["steps", "ssd_scan (ms)", "Transformers (ms)", "ratio", "peak memory (MiB)", "exponent, 1k to 16k"], [cells]
    )
