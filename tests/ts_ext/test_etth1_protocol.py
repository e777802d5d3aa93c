"""The ETTh1 benchmark keeps to the usual split: no leak, every window, the training months' scale."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.etth1 import (
    FULL,
    HORIZON,
    LOOK_BACK,
    MODELS,
    TEST,
    TRAIN,
    VALID,
    errors,
    label,
    read_scaled,
    seasonal_naive,
    settings,
    windows,
)
from jumbo_core.measure.report import ResultFile

HOURS = TRAIN + VALID + TEST


@pytest.fixture
def hours():
    return np.arange(HOURS + 500, dtype=np.float32)[:, None].repeat(7, axis=1)


@pytest.mark.parametrize(
    ("start", "stop", "count"),
    [(0, TRAIN, 8209), (TRAIN, TRAIN + VALID, 2785), (TRAIN + VALID, HOURS, 2785)],
)
def test_windows(hours, start, stop, count):
    x, y = windows(hours, start, stop)
    assert x.shape == (count, 7, LOOK_BACK) and y.shape == (count, 7, HORIZON)
    assert y.min() == max(start, LOOK_BACK) and y.max() == stop - 1  # targets fill the part and never leave it
    assert (x[..., -1] + 1 == y[..., 0]).all()


def test_scale_comes_from_the_training_months(tmp_path):
    values = np.random.default_rng(0).normal(3, 2, (HOURS, 7))
    values[TRAIN:] = 1e6
    rows = "\n".join(",".join(["2016-07-01", *map(str, row)]) for row in values)
    (tmp_path / "data.csv").write_text("date,a,b,c,d,e,f,g\n" + rows)
    scaled = read_scaled(tmp_path / "data.csv")
    np.testing.assert_allclose(scaled[:TRAIN].mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(scaled[:TRAIN].std(0), 1, atol=1e-5)
    (tmp_path / "short.csv").write_text("date,a,b,c,d,e,f,g\n" + "\n".join(rows.split("\n")[:50]))
    with pytest.raises(ValueError, match="hours of 7 columns"):
        read_scaled(tmp_path / "short.csv")


def test_seasonal_naive_repeats_the_last_day():
    day = np.tile(np.random.default_rng(0).normal(size=(2, 7, 24)), 14 + 4)
    assert errors(seasonal_naive(day[..., :LOOK_BACK]), day[..., LOOK_BACK:]) == {"mse": 0, "mae": 0}


def test_result_file_is_of_these_settings_and_this_file(shared, tmp_path):
    """The published runs belong to today's models, sizes and data, so that the command adds to them."""
    wanted = settings(FULL, shared / "data" / "series" / "ETTh1.csv")
    published = Path(__file__).parents[2] / "docs" / "results" / "etth1.json"
    copied = tmp_path / "etth1.json"
    copied.write_bytes(published.read_bytes())
    result = ResultFile(copied, wanted)
    names = {
        f"{model} rate={rate:g} seed={seed}" for model in MODELS for rate in FULL["rates"] for seed in FULL["seeds"]
    }
    assert set(result.runs) - {"seasonal naive"} <= names
    with pytest.raises(ValueError, match="models"):
        ResultFile(copied, {**wanted, "models": {}})


def test_table_names_the_fixed_ffn_rate_where_it_applies():
    assert [label(model) for model in MODELS] == [
        "JumboPatchTST J=6, FFN rate x 0.3", "ViT + 16 registers", "tsai PatchTST",
    ]  # fmt: skip
