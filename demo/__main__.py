"""The main job on real data that ships inside packages, in all three hosts: train, save, reload, predict, compare.

    python -m demo [--out out/demo] [--only classification segmentation forecast]

Ends in one table and writes DIR/index.html with the pictures. Numbers are what was measured, whichever side wins.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from demo.page import write_page
from demo.rows import HEADER, Row
from jumbo_core.measure import environment

PARTS = ("classification", "segmentation", "forecast")


def show(rows: list[Row], console: Console) -> None:
    table = Table(title="What was measured", title_justify="left")
    for column in HEADER:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.cells())
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for models, pictures and the page")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    console = Console()
    if not console.is_terminal:  # a log: rich would fold the table to 80 columns
        console = Console(width=150)
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    pictures: dict[str, Path] = {}
    start = time.monotonic()
    for part in PARTS:
        if part not in arguments.only:
            continue
        console.rule(part)
        part_rows, part_pictures = importlib.import_module(f"demo.{part}").run(
            arguments.out / part, seed=arguments.seed
        )
        rows += part_rows
        pictures |= part_pictures
    minutes = (time.monotonic() - start) / 60
    show(rows, console)
    (arguments.out / "rows.json").write_text(
        json.dumps({"environment": environment(), "minutes": round(minutes, 2), "rows": [asdict(r) for r in rows]})
    )
    page = write_page(arguments.out / "index.html", rows, pictures, minutes)
    console.print(f"{minutes:.1f} minutes. Pictures and table: {page}")


if __name__ == "__main__":
    main()
