"""Where a benchmark writes: the short form never meets the file that the README's table is made from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

PUBLISHED, SHORT = Path("docs/results"), Path("out/quick")


def work_dir(result: Path) -> Path:
    """Folder for what a run makes beside its result file: out/NAME of a published one, else of that name beside it."""
    return Path("out") / result.stem if result.parent == PUBLISHED else result.with_suffix("")


def parse(parser: argparse.ArgumentParser, name: str, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Add ``--out`` to a parser that has ``--quick``, and parse.

    Args:
        parser: of the benchmark.
        name: of its result file.
        arguments: of the command line. Default: the process's own.
    """
    parser.add_argument(
        "--out",
        type=Path,
        help=f"result file, resumed (default {PUBLISHED / name}.json, with --quick {SHORT / name}.json)",
    )
    options = parser.parse_args(arguments)
    if options.out is None:
        options.out = (SHORT if options.quick else PUBLISHED) / f"{name}.json"
    return options
