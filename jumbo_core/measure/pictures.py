"""Pictures of the results whose modules draw none: the scan over lengths, token fusion."""

from __future__ import annotations

from collections.abc import Callable

from jumbo_core.measure.artefacts import log_axes


def scan(result: dict, axes) -> None:
    """Milliseconds of the scan over steps, and Transformers' at its one length."""
    lengths = [int(n) for n in result["growth_ms"]]
    label = f"ssd_scan (exponent {result['growth_exponent']:.2f})"
    axes.plot(lengths, list(result["growth_ms"].values()), marker="o", label=label)
    peer = f"Transformers, torch path, chunk {result['peer_best_chunk']}"
    axes.plot([result["shape"]["length"]], [result["peer_ms"]["median"]], "s", label=peer)
    log_axes(axes, lengths, "steps")


def tofu(result: dict, axes) -> None:
    """Time saved by each plan beside the multiply-adds it saves, one group a batch size."""
    rows = [row for row in result["rows"] if "time_saved" in row]
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    plans = list(dict.fromkeys(row["plan"] for row in rows))
    for i, batch in enumerate(batches):
        own = {row["plan"]: row for row in rows if row["batch"] == batch}
        saved = [100 * own[plan]["time_saved"]["median"] for plan in plans]
        places = [p + 0.8 * (i - (len(batches) - 1) / 2) / len(batches) for p in range(len(plans))]
        bars = axes.bar(places, saved, 0.75 / len(batches), label=f"time saved, batch {batch}")
        axes.bar_label(bars, [f"{value:.0f}" for value in saved], fontsize=7, padding=2)
    for p, plan in enumerate(plans):
        macs = next(100 * row.get("multiply_adds_saved", 0) for row in rows if row["plan"] == plan)
        axes.plot([p - 0.45, p + 0.45], [macs, macs], color="0.2", label=None if p else "multiply-adds saved")
    axes.set_xticks(range(len(plans)), [plan.replace(" ", "\n") for plan in plans], fontsize=8)
    axes.set_ylabel("%")
    axes.margins(y=0.12)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))


PICTURES: dict[str, Callable[[dict, object], None]] = {"scan": scan, "tofu": tofu}
