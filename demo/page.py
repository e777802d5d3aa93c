"""The demo's HTML page: the table and the pictures, in one file that needs nothing beside it."""

from __future__ import annotations

import base64
import html
from pathlib import Path

from demo.rows import HEADER, Row
from jumbo_core.measure import environment

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; font-size: 15px; } td, th { padding: .35rem .6rem; text-align: left; }
th { border-bottom: 2px solid #444; } td { border-bottom: 1px solid #ddd; }
figure { margin: 2rem 0; } img { max-width: 100%; } figcaption { color: #555; }
"""


def write_page(path: Path, rows: list[Row], pictures: dict[str, Path], minutes: float) -> Path:
    """Write the page; ``pictures`` maps a caption to a PNG file, which is embedded."""
    machine = environment()
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in HEADER)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row.cells()) + "</tr>" for row in rows)
    figures = "".join(
        f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,'
        f'{base64.b64encode(file.read_bytes()).decode()}"><figcaption>{html.escape(caption)}</figcaption></figure>'
        for caption, file in pictures.items()
    )
    path.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Jumbo demo</title><style>{STYLE}</style>"
        f"<h1>Jumbo in three hosts</h1><p>Measured in {minutes:.1f} minutes on {html.escape(machine['processor'])}, "
        f"{machine['threads']} threads, torch {machine['torch']}, {machine['date']}. Small models and short runs on "
        f"small data: this shows that the whole path works, not what a method is worth.</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{figures}</html>\n"
    )
    return path
