"""Where benchmarks write: the short form never meets a published file, and neither what they leave beside it."""

import argparse
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks import outputs

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if "outputs.parse(" in path.read_text())


def parser():
    made = argparse.ArgumentParser()
    made.add_argument("--quick", action="store_true")
    return made


def test_short_form_and_full_form_have_files_and_folders_of_their_own():
    full, quick = (outputs.parse(parser(), "cifar", given).out for given in ([], ["--quick"]))
    own = outputs.parse(parser(), "cifar", ["--quick", "--out", "mine/x.json"]).out
    assert (full, quick, own) == (Path("docs/results/cifar.json"), Path("out/quick/cifar.json"), Path("mine/x.json"))
    folders = [outputs.work_dir(path) for path in (full, quick, own)]
    assert folders == [Path("out/cifar"), Path("out/quick/cifar"), Path("mine/x")]


@pytest.mark.parametrize("name", MODULES)
def test_every_command_says_where_it_writes(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as done:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    said = " ".join(capsys.readouterr().out.split())
    assert done.value.code == 0 and f"docs/results/{name}.json, with --quick out/quick/{name}.json" in said
