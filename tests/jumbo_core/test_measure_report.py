"""The report: its tables are commands that parse, targets are judged right, an interrupted run is picked up."""

import csv
import json
import re
from pathlib import Path

import pytest
import torch

from jumbo_core.measure import __main__ as command
from jumbo_core.measure import collection, notes, page, pieces, targets
from jumbo_core.measure.commands import make_parser
from jumbo_core.measure.contenders import contender
from jumbo_core.measure.pictures import PICTURES
from jumbo_core.measure.pieces import PIECES, Piece
from jumbo_core.measure.targets import Target

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SMALL = (
    Piece("one", "First", "Text.", "speed test_vit test_jumbo@patch_size=16 --image-size 32 --no-memory", "--repeats 2",
          lambda results: [Target("a ratio", 0.0, targets.ratio(results["one"], "test_vit", "test_vit", batch=1)),
                           Target("more", 9.0, 3.0), Target("of another table", 1.0, None)]),
    Piece("two", "Second", "", "scaling test_vit test_jumbo@patch_size=16 --sizes 32 64 --no-memory", "--repeats 2"),
    Piece("cpu", "Third", "", "scan", "", on_cuda=False),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(collection, "PIECES", SMALL[:2])


# --- pieces ---


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.name)
def test_commands_parse_and_name_models_that_exist(piece):
    for quick in (False, True):
        for device in ("cpu", "cuda"):
            words = piece.command(quick=quick, threads=1, device=device)
            options = make_parser()[0].parse_args(words)
            assert options.threads == 1 and ("--device" in words) == piece.on_cuda
            assert len([word for word in words if word.startswith("--")]) == len(
                {word for word in words if word.startswith("--")}
            )
            for name in getattr(options, "models", []):
                contender(name)


def test_every_piece_has_a_name_of_its_own_and_targets_of_nothing_are_unmeasured():
    assert len({piece.name for piece in PIECES}) == len(PIECES)
    found = [target for piece in PIECES for target in piece.targets({})]
    assert len(found) > 10 and all(target.met is None for target in found)


def test_targets_are_read_from_the_rows_they_name():
    def row(model, rounds, **where):
        return {"model": model, "rounds_ms": rounds, **where}

    linear, ours = targets.VIT_B, targets.JUMBO_LINEAR
    small = {"rows": [
        row(f"{linear}@materialised", [60.0, 80.0], size=[512, 1024], tokens=2048, ms={"median": 70.0}),
        row(linear, [40.0, 44.0], size=[512, 1024], tokens=2048, ms={"median": 42.0}),
        row(ours, [10.0, 10.0], size=[512, 1024], tokens=2048, ms={"median": 10.0}, peak_MiB=5, GMAC=1),
        row(f"{ours}@int8", [8.0, 8.0], size=[512, 1024], tokens=2048, ms={"median": 8.0}),
        row("jumbo_linear_384", [7.0, 7.0], size=[512, 1024], tokens=2048, ms={"median": 7.0}),
        row(ours, [1.0, 1.0], size=[512, 512], tokens=1024, ms={"median": 5.0}, peak_MiB=2.5, GMAC=1),
        row(linear, [9.0, 9.0], size=[512, 512], tokens=1024, ms={"median": 9.0}),
    ]}  # fmt: skip
    assert [target.measured for target in targets.linear_targets({"linear": small})] == [
        *[4.2, 7.0, 5.25, 8.75, 6.0, 10.0],
        *[None, None],
    ]
    assert [target.measured for target in targets.linear_large_targets({"linear": small})] == [*[None] * 4, 1.0, 1.0]
    tofu = {
        "rows": [dict(plan="paper", batch=1, kept_of_the_saving=0.8), dict(plan="mean", batch=8, kept_of_the_saving=1)]
    }
    assert [(t.measured, t.met) for t in targets.tofu_targets({"tofu": tofu})] == [(0.8, False), (None, None)]
    tiny = {
        "rows": [
            row("vit_registers_tiny", [3.0, 3.0], batch=8),
            row("jumbo_tiny_patch16_224@int8", [2.0, 2.0], batch=8),
        ]
    }
    assert [t.measured for t in targets.registers_targets("tiny")({"registers_tiny": tiny})] == [None, 1.5, None]


def test_verdicts():
    assert Target("x", 2.0, 1.5).cells() == ["x", "at least 2", "1.5", "missed by 25.0 %"]
    assert Target("x", 2.0, 2.0).cells()[-1] == "met"
    assert Target("x", 1.1, 1.21, at_most=True).cells() == ["x", "at most 1.1", "1.21", "missed by 10.0 %"]
    assert Target("x", 1.1, 1.0, at_most=True).met and Target("x", 1.0, None).cells()[2:] == [
        "-",
        "not measured in this run",
    ]


def test_short_forms_override_options():
    words = pieces.override("speed a b --batch 1 8 --train --seconds 9".split(), "--batch 4 --no-memory".split())
    assert words == "speed a b --batch 4 --train --seconds 9 --no-memory".split()


# --- report ---


def test_report(small, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    words = [
        "report",
        "--quick",
        "--threads",
        "1",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
        "--results",
        str(tmp_path),
    ]
    command.main([*words, "--only", "two"])
    assert "Not measured here: one." in (tmp_path / "benchmarks.md").read_text()
    first = json.loads((tmp_path / "report.json").read_text())["runs"]["two"]

    command.main([*words, "--markdown", str(tmp_path / "docs" / "b.md")])
    said = capsys.readouterr().out
    assert "one: measured" in said and "two: in the file" in said
    runs = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert runs["two"] == first and set(runs) == {"one", "two"}
    assert runs["one"]["command"] == (
        "python -m jumbo_core.measure speed test_vit test_jumbo@patch_size=16 --image-size 32 --no-memory --repeats 2 "
        "--threads 1 --device cpu"
    )
    assert len(list(csv.DictReader((tmp_path / "two.csv").open()))) == 4

    markdown, html = (tmp_path / "docs" / "b.md").read_text(), (tmp_path / "index.html").read_text()
    assert markdown.index("## First") < markdown.index("## Second") and "Not measured here" not in markdown
    assert runs["one"]["table"] in markdown and runs["one"]["environment"]["commit"][:7] in markdown
    assert "| First | more | at least 9 | 3 | missed by 66.7 % |" in markdown
    assert "`python -m benchmarks.optimize_cifar` makes it" in markdown  # no such file in that folder
    assert html.count("data:image/png;base64,") == 2 and "<img" in html and 'src="h' not in html
    assert "<td class=missed>missed by 66.7 %</td>" in html and "<td class=met>met</td>" in html
    assert all(cell in html for cell in re.findall(r"[\d.]+ \([\d.]+ to [\d.]+\)", runs["one"]["table"]))

    with pytest.raises(ValueError, match=r"other settings.*'quick': \(True, False\)"):
        command.main([word for word in words if word != "--quick"])


def test_a_table_that_fails_costs_no_other(small, monkeypatch, tmp_path, capsys):
    measure = collection.measure

    def broken(piece, **settings):
        if piece.name == "one":
            raise RuntimeError("no such luck")
        return measure(piece, **settings)

    monkeypatch.setattr(collection, "measure", broken)
    arguments = ["report", "--out", str(tmp_path / "r"), "--threads", "1", "--quick", "--device", "cpu"]
    with pytest.raises(SystemExit, match="failed: one; the same command measures"):
        command.main(arguments)
    assert "one: failed, RuntimeError: no such luck" in capsys.readouterr().out
    text = (tmp_path / "r" / "benchmarks.md").read_text()
    assert "## Second" in text and "## First" not in text
    monkeypatch.setattr(collection, "measure", measure)
    command.main(arguments)
    assert re.search(r"one: measured, .*\ntwo: in the file", capsys.readouterr().out)


def test_report_wants_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="is a file: give a folder"):
        command.main(["report", "--out", str(tmp_path / "file")])


def test_what_was_tried_stands_with_every_published_miss():
    for section in (RESULTS.parent / "benchmarks.md").read_text().split("\n## ")[2:]:
        assert "| missed by" not in section or "\nTried: " in section, section.splitlines()[0]


def test_tables_that_are_of_cpus_alone_are_named_on_cuda(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(collection, "PIECES", SMALL[2:])
    command.main(["report", "--device", "cuda", "--out", str(tmp_path), "--results", str(tmp_path)])
    assert "cpu: measured on CPUs only" in capsys.readouterr().out
    assert "Not measured here: cpu." in (tmp_path / "benchmarks.md").read_text()


def test_tables_of_the_full_form_alone_are_named_in_the_short_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(collection, "PIECES", (Piece("long", "Fourth", "", "scan", None),))
    command.main(["report", "--quick", "--device", "cpu", "--out", str(tmp_path), "--results", str(tmp_path)])
    assert "long: not in the short form" in capsys.readouterr().out
    assert "Not measured here: long." in (tmp_path / "benchmarks.md").read_text()


def test_evidence_of_other_commands_is_shown_with_its_source(tmp_path):
    where = dict(processor="A", threads=2, torch="2", date="today", commit="abcdefghij+changes", gpu=None)
    content = dict(command="python -m benchmarks.tofu_diffusion", environment=where, table="| a |\n| --- |\n| 1 |")
    (tmp_path / "tofu_diffusion.json").write_text(json.dumps(content))
    sections = {section.title: section for section in notes.evidence_sections(tmp_path)}
    section = sections["Token fusion in Stable Diffusion's UNet against tomesd"]
    assert section.table == content["table"]
    assert (
        section.source
        == "`python -m benchmarks.tofu_diffusion` on A, 2 threads, torch 2, today, commit abcdefg+changes"
    )


def test_agreement_of_low_latency_forms_is_a_target(tmp_path):
    where = dict(processor="A", threads=2, torch="2", date="today", commit="abcdefghij", gpu=None)
    quality = dict(float32=dict(agreement=100), int8=dict(agreement=98.5), bfloat16=dict(agreement=99.9))
    (tmp_path / "optimize_cifar.json").write_text(
        json.dumps(dict(command="c", environment=where, table="| a |\n| --- |\n| 1 |", quality=quality))
    )
    section = notes.evidence_sections(tmp_path)[0]
    assert [row[-1] for row in section.targets] == ["missed by 0.5 %", "met"]


def test_accuracies_that_stand_against_each_other(tmp_path):
    assert "`python -m benchmarks.cifar` measures" in notes.accuracy_note(tmp_path / "cifar.json")

    def row(contender, width, mean, std, macs):
        return dict(contender=contender, width=width, test_mean=mean, test_std=std, multiply_adds=macs, seeds=3)

    rows = [
        row("Jumbo J=6", 32, 51.0, 0.3, 30),
        row("Jumbo J=6", 64, 53.0, 0.4, 110),
        row("ViT + 16 registers", 64, 52.0, 1.2, 100),
    ]
    (tmp_path / "cifar.json").write_text(json.dumps({"summary": rows}))
    note = notes.accuracy_note(tmp_path / "cifar.json")
    assert "52.00 ± 1.20 %, Jumbo of width 32 51.00 ± 0.30 %, 1.00 points below it, less than the spread" in note
    assert "at 0.30 of its multiply-adds" in note


def test_pictures_show_what_the_result_says(tmp_path):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots(2)
    found = json.loads((RESULTS / "scan.json").read_text())
    PICTURES["scan"](found, axes[0])
    assert list(axes[0].lines[0].get_ydata()) == list(found["growth_ms"].values())
    assert axes[0].lines[1].get_ydata()[0] == found["peer_ms"]["median"]
    found = json.loads((RESULTS / "tofu_speed.json").read_text())
    PICTURES["tofu"](found, axes[1])
    saved = [100 * row["time_saved"]["median"] for row in found["rows"] if "time_saved" in row]
    assert [bar.get_height() for bar in axes[1].patches] == saved


def test_page_escapes_and_marks_code():
    html = page.to_html("T", ["a < b"], [page.Section("S", "`x<y`", "| a |\n| --- |\n| <b> |\n\nleft out", "")])
    assert (
        "a &lt; b" in html
        and "<code>x&lt;y</code>" in html
        and "<td>&lt;b&gt;</td>" in html
        and "<p>left out</p>" in html
    )
