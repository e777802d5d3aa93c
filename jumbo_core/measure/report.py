"""Result files of evidence runs: what was measured, by which command, on which commit and machine; resumable."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch


def environment() -> dict:
    """Processor, cores, threads, versions and commit of this run, as a JSON-ready dict."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain") else ""),
        "date": datetime.date.today().isoformat(),
    }


def command_line() -> str:
    """The command that started this process, as a user would type it (`python -m package.module …`)."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    start = f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {Path(sys.argv[0]).name}"
    return shlex.join(shlex.split(start) + sys.argv[1:])


class ResultFile:
    """A JSON file of named runs that an interrupted command picks up where it stopped.

    Args:
        path: the file; made with its folder when missing.
        settings: everything that shapes the numbers. A file with other settings is refused, never mixed.

    Raises:
        ValueError: the file was written with other settings (the differing ones are named).
    """

    def __init__(self, path: str | Path, settings: dict) -> None:
        self.path = Path(path)
        settings = json.loads(json.dumps(settings))
        self.content = {
            "command": command_line(),
            "environment": environment(),
            "commits": [],
            "settings": settings,
            "runs": {},
        }
        if self.path.exists():
            old = json.loads(self.path.read_text())
            keys = set(old["settings"]) | set(settings)
            other = {k: (old["settings"].get(k), settings.get(k)) for k in sorted(keys)}
            other = {k: v for k, v in other.items() if v[0] != v[1]}
            if other:
                raise ValueError(f"{self.path} holds runs with other settings (file, now): {other}; move or delete it")
            # The file keeps telling how it was begun; each later run adds the commit it was made with.
            self.content = {**old, "commits": old.get("commits", [old["environment"]["commit"]])}
        self.commit = environment()["commit"]

    @property
    def runs(self) -> dict[str, dict]:
        return self.content["runs"]

    def run(self, name: str, function: Callable[[], dict]) -> dict:
        """Result of run ``name``: read from the file when it is there, else computed and saved at once."""
        if name not in self.runs:
            self.runs[name] = function()
            if self.commit not in self.content["commits"]:
                self.content["commits"].append(self.commit)
            self.save()
        return self.runs[name]

    def save(self, **extra) -> None:
        """Write the file in one step, so that an interrupt never leaves half of it."""
        self.content.update(extra)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".tmp")
        draft.write_text(json.dumps(self.content, indent=1) + "\n")
        draft.replace(self.path)


def mean_spread(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for a single value)."""
    values = list(values)
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def markdown_table(header: list[str], rows: list[list]) -> str:
    """A GitHub table; floats keep what the caller formatted, everything else is str()."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown" if arguments[0] == "rev-parse" else ""
    return done.stdout.strip()
