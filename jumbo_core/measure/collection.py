"""Every table that is claimed, measured one after the other: JSON, CSV, pictures, one HTML page, markdown.

An interrupted command picks up at the first table that is not in FOLDER/report.json. Each table is one command of its
own, which the report names; figures of other commands (accuracies, Stable Diffusion) are read from their result files.
"""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path

import torch

from jumbo_core.measure import page
from jumbo_core.measure.artefacts import at_least, draw, write_csv
from jumbo_core.measure.commands import make_parser, module_of, result_of
from jumbo_core.measure.notes import accuracy_note, evidence_sections, tried
from jumbo_core.measure.pictures import PICTURES
from jumbo_core.measure.pieces import PIECES, Piece
from jumbo_core.measure.report import ResultFile

TITLE = "Benchmarks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [piece.name for piece in PIECES]
    parser.add_argument("--out", type=Path, required=True, help="folder; index.html is the page")
    parser.add_argument("--quick", action="store_true", help="ten minutes: fewer rounds and sizes")
    parser.add_argument("--threads", type=at_least(1), default=2, help="default 2")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--only", nargs="+", choices=names, metavar="TABLE", help=f"some of {', '.join(names)}")
    parser.add_argument("--markdown", type=Path, help="where the markdown goes (default OUT/benchmarks.md)")
    parser.add_argument(
        "--results", type=Path, default=Path("docs/results"), help="result files of other commands (docs/results)"
    )


def run(options: argparse.Namespace) -> None:
    """Measure what is missing, then write everything that the folder has."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings, failed = dict(quick=options.quick, threads=options.threads, device=device), []
    if options.out.exists() and not options.out.is_dir():
        raise SystemExit(f"--out {options.out} is a file: give a folder")
    torch.set_num_threads(options.threads)
    file = ResultFile(options.out / "report.json", settings)
    for piece in PIECES:
        if options.only and piece.name not in options.only:
            continue
        if device == "cuda" and not piece.on_cuda:
            print(f"{piece.name}: measured on CPUs only")
            continue
        if options.quick and piece.quick is None:
            print(f"{piece.name}: not in the short form")
            continue
        known = piece.name in file.runs
        try:
            result = file.run(piece.name, lambda piece=piece: measure(piece, **settings))
        except Exception as error:  # whatever it is, the other tables are worth having
            failed.append(piece.name)
            print(f"{piece.name}: failed, {type(error).__name__}: {error}", flush=True)
            continue
        print(f"{piece.name}: {'in the file' if known else 'measured'}, {result['took_s']:.0f} s", flush=True)
    write(file.runs, options.out, options.markdown or options.out / "benchmarks.md", options.results, file.content)
    if failed:
        raise SystemExit(
            f"failed: {', '.join(failed)}; the same command measures these alone, the rest is in {options.out}"
        )


def measure(piece: Piece, *, quick: bool, threads: int, device: str) -> dict:
    """The result of a table's command, which stands under "command" as a user would type it."""
    words, start = piece.command(quick=quick, threads=threads, device=device), time.perf_counter()
    result = result_of(make_parser()[0].parse_args(words))
    command = f"python -m jumbo_core.measure {shlex.join(words)}"
    return result | {"command": command, "took_s": round(time.perf_counter() - start, 1)}


def write(runs: dict[str, dict], folder: Path, markdown: Path, results: Path, content: dict) -> None:
    """CSV, pictures, page and markdown of what has been measured, in the order of :data:`PIECES`."""
    sections = []
    for piece in PIECES:
        if piece.name not in runs:
            continue
        result = runs[piece.name]
        write_csv(folder / f"{piece.name}.csv", result.get("rows", [result]))
        command = shlex.split(piece.words)[0]
        picture = PICTURES.get(command) or getattr(module_of(command), "picture", None)
        if picture is not None:
            draw(folder / f"{piece.name}.png", result, picture)
        targets = piece.targets(runs)
        notes = [accuracy_note(results / "cifar.json")] if piece.name == "accuracy" else []
        if any(target.met is False for target in targets):
            notes += [f"Tried: {tried(piece.name)}"] if tried(piece.name) else []
        sections.append(
            page.Section(
                piece.title,
                piece.text,
                result["table"],
                page.source_of(result),
                [target.cells() for target in targets],
                notes,
                folder / f"{piece.name}.png" if picture is not None else None,
            )
        )
    sections += evidence_sections(results)
    lead = lead_of(content, [piece.name for piece in PIECES if piece.name not in runs])
    (folder / "index.html").write_text(page.to_html(TITLE, lead, sections))
    markdown.parent.mkdir(parents=True, exist_ok=True)
    markdown.write_text(page.to_markdown(TITLE, lead, sections))


def lead_of(content: dict, missing: list[str]) -> list[str]:
    """What the reader must know before any figure: machine, threads, form, what is not there."""
    where, settings = content["environment"], content["settings"]
    machine = where["gpu"] if settings["device"] == "cuda" else where["processor"]
    form = "short form (`make bench`): few rounds" if settings["quick"] else "full form (`report` without `--quick`)"
    lead = [
        f"{machine}, {where['cores']} cores, {settings['threads']} threads, torch {where['torch']}; {form}. Models "
        "have random weights. In each table all models take turns in one process, after each has shown finite outputs "
        "of the right shape, the same in a second call (near them where a table says that it draws at random) and, "
        "where it is a form of another model, near that model's. Times "
        "are medians, in brackets the quartiles; ratios are paired within each round. Where a command has --processes, "
        "the rounds of so many processes are pooled: where memory comes to lie differs between them."
    ]
    if missing:
        lead.append(f"Not measured here: {', '.join(missing)}.")
    return lead
