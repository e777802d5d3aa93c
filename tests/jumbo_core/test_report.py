"""Result files: resumed run by run, never mixed, written in one step."""

import json

import pytest

from jumbo_core.measure import ResultFile, markdown_table, mean_spread


def test_runs_are_computed_once_and_survive_an_interrupt(tmp_path):
    path = tmp_path / "sub" / "result.json"
    calls = []

    def measure(value):
        calls.append(value)
        return {"value": value}

    first = ResultFile(path, {"epochs": 2, "rates": (1, 2)})
    first.run("a", lambda: measure(1))
    with pytest.raises(KeyboardInterrupt):
        first.run("b", lambda: (_ for _ in ()).throw(KeyboardInterrupt))

    second = ResultFile(path, {"epochs": 2, "rates": (1, 2)})
    assert second.run("a", lambda: measure(99)) == {"value": 1}
    assert second.run("b", lambda: measure(2)) == {"value": 2}
    second.save(table="t")
    assert calls == [1, 2]
    content = json.loads(path.read_text())
    assert set(content["runs"]) == {"a", "b"} and content["table"] == "t"
    assert {"processor", "threads", "commit", "date", "torch"} <= set(content["environment"])
    assert content["commits"] == [content["environment"]["commit"]]
    assert not list(tmp_path.rglob("*.tmp"))


def test_other_settings_are_refused(tmp_path):
    ResultFile(tmp_path / "r.json", {"epochs": 2}).run("a", dict)
    with pytest.raises(ValueError, match=r"other settings \(file, now\): \{'epochs': \(2, 3\)\}"):
        ResultFile(tmp_path / "r.json", {"epochs": 3})


def test_mean_spread_and_table():
    assert mean_spread([1.0, 3.0]) == (2.0, pytest.approx(2**0.5))
    assert mean_spread([5.0]) == (5.0, 0.0)
    assert markdown_table(["a", "b"], [[1, "x"]]) == "| a | b |\n| --- | --- |\n| 1 | x |"
