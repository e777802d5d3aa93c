"""The report as markdown and as one HTML page that needs nothing beside it."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jumbo_core.measure.report import markdown_table

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 14px; }
td, th { padding: .25rem .6rem; text-align: left; }
th { border-bottom: 2px solid #444; } td { border-bottom: 1px solid #ddd; } code { background: #f3f3f3; }
img { max-width: 100%; } .met { color: #14662b; } .missed { color: #a11; } h2 { margin-top: 2.5rem; }
"""
TARGETS = ["must show", "target", "measured", "verdict"]


@dataclass
class Section:
    """One table with what belongs to it; ``targets`` are rows under :data:`TARGETS`, ``paragraphs`` stand last."""

    title: str
    text: str
    table: str
    source: str
    targets: Sequence[Sequence[str]] = ()
    paragraphs: Sequence[str] = ()
    picture: Path | None = field(default=None)


def to_markdown(title: str, lead: Sequence[str], sections: Sequence[Section]) -> str:
    """Everything but the pictures."""
    parts = [f"# {title}", *lead]
    if summary := summary_of(sections):
        parts += ["## What must be shown", markdown_table(["", *TARGETS], summary)]
    for section in sections:
        parts += [f"## {section.title}", section.text, section.table]
        if section.targets:
            parts.append(markdown_table(TARGETS, [list(row) for row in section.targets]))
        parts += [*section.paragraphs, section.source]
    return "\n\n".join(part for part in parts if part) + "\n"


def to_html(title: str, lead: Sequence[str], sections: Sequence[Section]) -> str:
    """The same as one page, pictures embedded."""
    parts = [f"<h1>{html.escape(title)}</h1>", *map(_paragraph, lead)]
    if summary := summary_of(sections):
        parts += ["<h2>What must be shown</h2>", _table(markdown_table(["", *TARGETS], summary))]
    for section in sections:
        parts += [f"<h2>{html.escape(section.title)}</h2>", _paragraph(section.text), _tables(section.table)]
        if section.targets:
            parts.append(_table(markdown_table(TARGETS, [list(row) for row in section.targets])))
        if section.picture is not None:
            data = base64.b64encode(section.picture.read_bytes()).decode()
            parts.append(f'<img alt="{html.escape(section.title)}" src="data:image/png;base64,{data}">')
        parts += [*map(_paragraph, section.paragraphs), _paragraph(section.source)]
    head = f"<meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en>{head}{''.join(parts)}</html>\n"


def summary_of(sections: Sequence[Section]) -> list[list[str]]:
    """Every target with the title of its section."""
    return [[section.title, *row] for section in sections for row in section.targets]


def source_of(result: Mapping) -> str:
    """Where a table comes from: its command, the machine, threads, versions, day and commit."""
    where = result["environment"]
    changed = "+changes" if where["commit"].endswith("+changes") else ""
    machine = where["gpu"] if result.get("device") == "cuda" else f"{where['processor']}, {where['threads']} threads"
    return (
        f"`{result['command']}` on {machine}, torch {where['torch']}, {where['date']}, commit "
        f"{where['commit'][:7]}{changed}"
    )


def _tables(text: str) -> str:
    """Markdown tables and paragraphs between them."""
    return "".join(_table(part) if part.startswith("|") else _paragraph(part) for part in text.split("\n\n"))


def _table(text: str) -> str:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    head = "".join(f"<th>{_inline(cell)}</th>" for cell in lines[0])
    body = "".join("<tr>" + "".join(map(_cell, line)) + "</tr>" for line in lines[2:])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    kind = "met" if text == "met" else "missed" if text.startswith("missed by") else ""
    return f"<td class={kind}>{_inline(text)}</td>" if kind else f"<td>{_inline(text)}</td>"


def _paragraph(text: str) -> str:
    return f"<p>{_inline(text)}</p>" if text else ""


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
