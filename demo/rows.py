"""One line of the demo's closing table."""

from __future__ import annotations

from dataclasses import dataclass


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
