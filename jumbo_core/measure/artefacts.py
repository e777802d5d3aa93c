"""What a measurement leaves behind: JSON with everything, CSV of its rows, a picture."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    """Type of an argument: an integer of that size or more."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return integer


def size(text: str) -> tuple[int, int]:
    """``N`` or ``HxW`` of a command line -> (H, W)."""
    sides = text.split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(f"an image size is N or HxW in pixels, got {text!r}")
    return int(sides[0]), int(sides[-1])


def flat(row: dict) -> dict:
    """A row for CSV: medians with quartiles as ``ms, ms_low, ms_high``, other dicts as JSON, without single rounds."""
    cells = {}
    for key, value in row.items():
        if key == "rounds_ms":
            continue
        if isinstance(value, dict) and set(value) == {"median", "quartiles"}:
            low, high = value["quartiles"]
            cells |= {key: value["median"], f"{key}_low": low, f"{key}_high": high}
        elif isinstance(value, (list, dict, tuple)):
            cells[key] = json.dumps(value)
        else:
            cells[key] = value
    return cells


def write_csv(path: Path, rows: list[dict]) -> None:
    """Rows with a column for every key that any of them has."""
    cells = [flat(row) for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in cells for key in row)))
        writer.writeheader()
        writer.writerows(cells)


def draw(path: Path, result: dict, picture: Callable[[dict, object], None]) -> None:
    """Write the picture of a result, PNG or what the suffix says; ``picture(result, axes)`` draws it.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"{path} needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    picture(result, figure.add_subplot())
    figure.savefig(path, dpi=130)


def log_axes(axes, ticks: list[int], label: str) -> None:
    """Milliseconds over lengths, both logarithmic, a tick at each length, and the legend."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel(label)
    axes.set_ylabel("ms")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def write(out: Path, name: str, result: dict, picture: Callable[[dict, object], None] | None) -> None:
    """Write a result: a path ending in .json is that file alone, any other the folder of name.json, .csv and .png.

    ``picture``: see :func:`draw`; None: the result has none.

    Raises:
        ImportError: matplotlib is missing; JSON and CSV are written by then.
    """
    file = out if out.suffix == ".json" else out / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    if file != out:
        write_csv(file.with_suffix(".csv"), result.get("rows", [result]))
        if picture is not None:
            draw(file.with_suffix(".png"), result, picture)
