"""plugins/timeseries/forecast_csv.py on a small file, from the command line's arguments to what it writes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pd = pytest.importorskip("pandas")
pytest.importorskip("tsai", reason="needs jumbo-vit[ts]")

from ts_ext import JumboPatchTST  # noqa: E402 (after the host is known to be there)

SCRIPT = Path(__file__).resolve().parents[2] / "plugins" / "timeseries" / "forecast_csv.py"
TINY = (
    "--horizon 6 --look-back 24 --season 12 --patch-len 8 --stride 4 --d-model 8 --n-layers 1 --n-heads 2 --d-ff 16 "
    "--multiplier 2 --epochs 3 --lr 0.01"
).split()


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("forecast_csv", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def frame(rows=240):
    hours = np.arange(rows)
    return pd.DataFrame(
        {
            "date": pd.date_range("2024-01-01", periods=rows, freq="h").astype(str),
            "load": 1000 + 50 * np.sin(hours * 2 * np.pi / 12),
            "heat": 20 + np.cos(hours * 2 * np.pi / 12) + 0.001 * hours,
        }
    )


def test_recipe_writes_forecasts_metrics_plot_and_weights(recipe, tmp_path):
    data = frame()
    data.to_csv(tmp_path / "data.csv", index=False)
    metrics = recipe.main([str(tmp_path / "data.csv"), "--out", str(tmp_path / "out"), *TINY])
    assert metrics == json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["windows"] == {"train": 168 - 24 - 5, "valid": 24 - 5, "test": 48 - 5}
    assert metrics["split"]["test_starts"] == data["date"][192]
    assert set(metrics["test"]) == set(metrics["test_by_column"]) == {"JumboPatchTST", "repeat last 12 rows"}
    for name, columns in metrics["test_by_column"].items():
        assert set(columns) == {"load", "heat"}
        for kind in ("mae", "mse"):
            mean = (columns["load"][kind] + columns["heat"][kind]) / 2
            assert abs(mean - metrics["test"][name][kind]) <= 1e-9 * mean
    assert metrics["test_by_column"]["repeat last 12 rows"]["load"]["mae"] < 1e-9  # an exact season
    assert abs(metrics["test_by_column"]["repeat last 12 rows"]["heat"]["mae"] - 0.012) < 1e-9  # 12 rows of trend

    table = pd.read_csv(tmp_path / "out" / "predictions.csv")
    future = table[table["truth"].isna()]
    assert list(future["date"].unique()) == [f"2024-01-11 0{hour}:00:00" for hour in range(6)]
    assert (table["date"].min(), table[table["truth"].notna()]["date"].max()) == (data["date"][192], data["date"][239])
    past = table[table["truth"].notna()].merge(data.melt("date", var_name="column"), on=["date", "column"])
    assert len(past) == 2 * 48
    np.testing.assert_allclose(past["truth"], past["value"])
    assert np.isfinite(table["forecast"]).all()
    assert (tmp_path / "out" / "forecast.png").stat().st_size > 5000

    model = JumboPatchTST(**metrics["model"]).eval()
    model.load_state_dict(torch.load(tmp_path / "out" / "models" / "model.pth", weights_only=True))
    mean, std = (np.array(metrics["scaling"][k])[:, None] for k in ("mean", "std"))
    newest = (data[["load", "heat"]].to_numpy()[-24:].T - mean) / std
    by_hand = model(torch.from_numpy(newest).float()[None])[0].detach().numpy() * std + mean
    np.testing.assert_allclose(future[future["column"] == "load"]["forecast"], by_hand[0], rtol=1e-5)


def test_what_comes_after_the_cut_changes_nothing_before(recipe, tmp_path):
    """Same weights and same scaling, whatever the test rows hold."""
    found = []
    for factor in (1, 100):
        data = frame()
        data.loc[192:, ["load", "heat"]] *= factor
        data.to_csv(tmp_path / "data.csv", index=False)
        metrics = recipe.main([str(tmp_path / "data.csv"), "--out", str(tmp_path / f"out{factor}"), *TINY])
        weights = torch.load(tmp_path / f"out{factor}" / "models" / "model.pth", weights_only=True)
        table = pd.read_csv(tmp_path / f"out{factor}" / "predictions.csv")
        found.append((metrics["scaling"], weights, table[table["date"] < "2024-01-09 06"]["forecast"]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][key], found[1][1][key]) for key in found[0][1])
    # the first test window starts right at the cut: it has seen nothing of what comes after
    np.testing.assert_array_equal(found[0][2], found[1][2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.iloc[::-1], "goes back at data row 2"),
        (lambda d: d.drop(index=5), "not evenly spaced"),
        (lambda d: pd.concat([d[:9], d[8:]]), "2024-01-01 08:00:00 appears more than once"),
        (lambda d: d.assign(heat=d["heat"].where(d.index != 7)), "first in heat at 2024-01-01 07:00:00"),
        (lambda d: d.rename(columns={"date": "time"}), "has no column"),
        (lambda d: d.assign(place="here"), r"columns \['place'\] are not numeric"),
        (lambda d: d[:50], "no validation window: 50 rows"),
        (lambda d: d.assign(date=range(20240101, 20240101 + len(d))), r"date holds numbers \(20240101\), not dates"),
        (lambda d: d.assign(date=d["date"].where(d.index != 4, "soon")), "date 'soon' in data row 5 is not a date"),
        (lambda d: d.assign(date=d["date"].where(d.index != 4)), "date nan in data row 5 is not a date"),
        (lambda d: d.assign(date=d["date"] + "+01:00"), r"time zones \(2024-01-01 00:00:00\+01:00\)"),
        (lambda d: d.assign(date=d["date"] + np.where(d.index < 99, "+01:00", "+02:00")), "date has time zones"),
        (lambda d: d[["date"]], "no column beside 'date'"),
    ],
)
def test_unusable_files_are_refused(recipe, tmp_path, change, message):
    change(frame()).to_csv(tmp_path / "data.csv", index=False)
    with pytest.raises(SystemExit, match=message):
        recipe.main([str(tmp_path / "data.csv"), "--out", str(tmp_path / "out"), *TINY])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--columns", "load", "heat", "load"], r"names \['load'\] more than once"),
        (["--columns", "date", "load"], "names 'date', the column of dates"),
    ],
)
def test_unusable_columns_are_refused(recipe, tmp_path, options, message):
    frame().to_csv(tmp_path / "data.csv", index=False)
    with pytest.raises(SystemExit, match=message):
        recipe.main([str(tmp_path / "data.csv"), "--out", str(tmp_path / "out"), *TINY, *options])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--lr 0", "--lr must be above 0, got 0.0"),
        ("--lr nan", "--lr must be above 0, got nan"),
        ("--n-heads 3", "--d-model 8 is not divisible by --n-heads 3"),
        ("--n-heads 0", "--n-heads must be at least 1, got 0"),
        ("--multiplier -1", "--multiplier must be at least 0, got -1"),
        ("--dropout 1", "--dropout must be at least 0 and below 1, got 1.0"),
        ("--patch-len 25", "--patch-len 25 is longer than --look-back 24"),
        ("--stride 9", "--stride 9 is longer than --patch-len 8"),
        ("--season 25", "--season 25 is longer than --look-back 24"),
        ("--valid-share 0.9", "shares must leave rows to train on, got 0.9 and 0.2"),
    ],
)
def test_unusable_options_are_refused_before_the_file_is_read(recipe, capsys, options, message):
    with pytest.raises(SystemExit):
        recipe.main(["absent.csv", *TINY, *options.split()])
    assert message in capsys.readouterr().err


def test_plot_says_when_it_shows_only_the_first_columns(recipe, tmp_path, monkeypatch):
    options = recipe.parse(["x.csv", "--look-back", "24", "--out", str(tmp_path)])
    titles = []
    monkeypatch.setattr(recipe.plt, "close", lambda figure: titles.append(figure.get_suptitle()))
    for count in (8, 9):
        many = pd.DataFrame(
            {f"c{i}": np.arange(60.0) for i in range(count)}, index=pd.date_range("2024", periods=60, freq="h")
        )
        table = pd.DataFrame({"origin": many.index[:1], "date": many.index[:1], "column": "c0", "forecast": 0.0})
        recipe.draw(many, table, options)
    assert titles == ["", "the first 8 of 9 columns; predictions.csv has them all"]


def test_help():
    done = subprocess.run([sys.executable, "-W", "ignore", str(SCRIPT), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--look-back" in done.stdout
