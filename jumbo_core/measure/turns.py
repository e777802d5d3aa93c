"""Timing of calls that take turns, so that a load on the machine falls on all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


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


def median_ms(calls: dict[str, Callable[[], object]], *, samples: int = 1, repeats: int = 25) -> dict[str, float]:
    """Milliseconds per sample of each call, the median over the rounds of :func:`take_turns`."""
    return {name: statistics.median(values) / samples for name, values in take_turns(calls, repeats).items()}


def spread(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": round(median, 3), "quartiles": [round(low, 3), round(high, 3)]}
