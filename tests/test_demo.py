"""The demo's frame: one table whatever the parts return, one page that needs no other file (`make demo` runs all)."""

import math
from pathlib import Path

import matplotlib.image
import numpy as np

from demo.page import write_page
from demo.rows import HEADER, Row


def row(**changes) -> Row:
    values = dict(
        task="forecast <x>", host="tsai", baseline="seasonal naive", metric="MSE", better="lower",
        baseline_quality=1.5, jumbo_quality=0.51234, baseline_ms=math.nan, jumbo_ms=1.0,
    )  # fmt: skip
    return Row(**{**values, **changes})


def test_cells_match_the_header():
    cells = row().cells()
    assert len(cells) == len(HEADER)
    assert cells[2] == "MSE (lower is better)" and cells[5] == "0.5123"
    assert cells[6] == "-" and cells[7] == "1.00"


def test_page_is_one_file(tmp_path: Path):
    picture = tmp_path / "map.png"
    matplotlib.image.imsave(picture, np.zeros((4, 4)))
    page = write_page(tmp_path / "index.html", [row()], {"the map": picture}, 2.5).read_text()
    picture.unlink()
    assert "forecast &lt;x&gt;" in page and "data:image/png;base64," in page and "the map" in page
    assert 'src="http' not in page
