"""One line of the demo's closing table."""

from __future__ import annotations

import math
from dataclasses import dataclass

HEADER = ("task", "host", "quality", "baseline", "its quality", "Jumbo's", "baseline ms", "Jumbo ms")


@dataclass(frozen=True)
class Row:
    """What was measured for one task in one host; ``better`` says which way quality points."""

    task: str
    host: str
    baseline: str
    metric: str
    better: str  # "higher" or "lower"
    baseline_quality: float
    jumbo_quality: float
    baseline_ms: float  # per sample; nan where a baseline has no model
    jumbo_ms: float

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of ``HEADER``."""

        def milliseconds(value: float) -> str:
            return "-" if math.isnan(value) else f"{value:.2f}"

        return (
            self.task,
            self.host,
            f"{self.metric} ({self.better} is better)",
            self.baseline,
            f"{self.baseline_quality:.4g}",
            f"{self.jumbo_quality:.4g}",
            milliseconds(self.baseline_ms),
            milliseconds(self.jumbo_ms),
        )
