"""Timing of calls that take turns, so that a load on the machine falls on all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def take_turns(
    calls: dict[str, Callable[[], object]], repeats: int, *, warmup: int = 2, device: str = "cpu"
) -> dict[str, list[float]]:
    """Milliseconds of every call in every round; the calls take turns, so that load falls on all of them.

    Args:
        calls: what to time, by name; run in inference mode, which a call that trains leaves by itself.
        repeats: timed rounds.
        warmup: rounds before them, which warm caches up. Default 2.
        device: "cpu" (wall clock, default) or "cuda" (events around each call, synchronised after it).
    """
    clock = _cuda_ms if device == "cuda" else _wall_ms
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for round_number in range(repeats + warmup):
            for name, call in calls.items():
                ms = clock(call)
                if round_number >= warmup:
                    times[name].append(ms)
    return times


def _wall_ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def _cuda_ms(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def median_ms(calls: dict[str, Callable[[], object]], *, samples: int = 1, repeats: int = 25) -> dict[str, float]:
    """Milliseconds per sample of each call, the median over the rounds of :func:`take_turns`."""
    return {name: statistics.median(values) / samples for name, values in take_turns(calls, repeats).items()}


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles of at least two values."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")  # never beyond what was measured
    return {"median": round(median, 3), "quartiles": [round(low, 3), round(high, 3)]}


def paired(first: list[float], own: list[float]) -> dict[str, float]:
    """How many times as fast ``own`` is as ``first``, round by round: median and quartiles."""
    return spread([a / b for a, b in zip(first, own, strict=True)])
