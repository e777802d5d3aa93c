"""Timing for the closing table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def median_ms(calls: dict[str, Callable[[], object]], *, samples: int = 1, repeats: int = 25) -> dict[str, float]:
    """Milliseconds per sample of each call: median over ``repeats`` rounds in which the calls take turns.

    Turns make a load on the machine fall on all of them; three rounds before the first one count nothing.
    """
    times = {name: [] for name in calls}
    for round_number in range(repeats + 3):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if round_number >= 3:
                times[name].append(1e3 * (time.perf_counter() - start) / samples)
    return {name: statistics.median(values) for name, values in times.items()}
