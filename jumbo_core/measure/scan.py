"""The scan against Transformers' torch path of Mamba-2, and against its own length."""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch.nn import functional as F

from jumbo_core.linear import ssd_scan
from jumbo_core.measure.report import command_line, environment, markdown_table

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
    return ssd_scan(**tensors, chunk_size="auto", backend="torch")[0]


def peer(tensors: dict[str, torch.Tensor], chunk: int) -> torch.Tensor:
    """Transformers' own chunked scan in torch, what its Mamba-2 runs without a kernel package."""
    try:
        module = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    except ImportError as error:
        raise ImportError("the peer of this measurement is Transformers: pip install 'jumbo-vit[hf]'") from error
    scan = module.mamba2_chunk_scan.__wrapped__  # past the look-up of kernel packages
    x, dt, A, B, C, D = (tensors[name] for name in ("x", "dt", "A", "B", "C", "D"))
    return scan(x, dt, A, B[:, :, None], C[:, :, None], chunk_size=chunk, D=D, dt_softplus=False)


def take_turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every call in every round; the calls take turns, so that load falls on all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for round_number in range(repeats + 2):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                if round_number >= 2:  # the first rounds warm caches up
                    times[name].append(1e3 * (time.perf_counter() - start))
    return times


def spread(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": round(median, 3), "quartiles": [round(low, 3), round(high, 3)]}


def peak_memory(which: str, chunk: int, length: int, threads: int) -> float:
    """MiB that a process grows by at most during one scan, in a process of its own.

    Raises:
        OSError: the system does not let a process reset its own peak (Linux does, /proc/self/clear_refs).
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_peak, which, chunk, length, threads).result()


def _peak(which: str, chunk: int, length: int, threads: int) -> float:
    torch.set_num_threads(threads)
    call = partial(ours) if which == "ours" else partial(peer, chunk=chunk)
    with torch.inference_mode():
        call(inputs(2 * chunk, **SHAPE))  # libraries load their workspaces
        tensors = inputs(length, **SHAPE)
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is in use now
        before = _status("VmHWM")
        call(tensors)
        return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    """A number of kB from this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def measure(*, length: int = 2048, repeats: int = 15, threads: int = 2) -> dict:
    """Everything about the scan: ratio to the peer at its best chunk size, peak memory of both, growth with length.

    Raises:
        RuntimeError: the two do not agree within 1e-4: nothing is timed then.
    """
    torch.set_num_threads(threads)
    tensors = inputs(length, **SHAPE)
    with torch.inference_mode():
        expected = ours(tensors)
        for chunk in PEER_CHUNKS:
            error = (peer(tensors, chunk) - expected).abs().max().item()
            if not error < 1e-4 * expected.abs().max().item():
                raise RuntimeError(f"peer with chunk {chunk} and ssd_scan differ by {error:.1e}: nothing was timed")
    trial = take_turns({str(chunk): partial(peer, tensors, chunk) for chunk in PEER_CHUNKS}, 3)
    best = int(min(trial, key=lambda chunk: statistics.median(trial[chunk])))
    times = take_turns({"ours": partial(ours, tensors), "peer": partial(peer, tensors, best)}, repeats)
    growth = take_turns({str(n): partial(ours, inputs(n, **SHAPE)) for n in LENGTHS}, max(5, repeats // 2))
    medians = [statistics.median(growth[str(n)]) for n in LENGTHS]
    x, y = [math.log(n) for n in LENGTHS], [math.log(ms) for ms in medians]
    return {
        "command": command_line(),
        "environment": environment(),
        "shape": {**SHAPE, "length": length, "dtype": "float32"},
        "ours_ms": spread(times["ours"]),
        "peer_ms": spread(times["peer"]),
        "peer_best_chunk": best,
        "ratio": round(statistics.median(p / o for o, p in zip(times["ours"], times["peer"], strict=True)), 2),
        "peak_MiB": {name: round(peak_memory(name, best, length, threads), 1) for name in ("ours", "peer")},
        "growth_ms": dict(zip(map(str, LENGTHS), (round(ms, 2) for ms in medians), strict=True)),
        "growth_exponent": round(statistics.linear_regression(x, y).slope, 3),
    }


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
