"""demo/forecast.py: the three parts of the series never share a target, and what is loaded is what was trained."""

import numpy as np
import pytest
import torch

pytest.importorskip("tsai", reason="needs jumbo-vit[ts]")
pytest.importorskip("statsmodels", reason="needs the demo's series")

from demo import forecast
from demo.forecast import HORIZON, LOOK_BACK, TEST, VALID, YEAR, windows
from ts_ext.tsai import JumboPatchTST


def test_no_target_of_training_or_validation_is_a_target_of_a_later_part():
    weeks = LOOK_BACK + TEST + VALID + 200
    x, y, (train, valid, test) = windows(np.arange(weeks, dtype=np.float32))
    assert x.shape[1:] == (1, LOOK_BACK) and y.shape[1:] == (1, HORIZON)
    assert (x[:, 0, -1] + 1 == y[:, 0, 0]).all()  # every input ends right before its target
    parts = [y[part] for part in (train, valid, test)]
    ends = [(part.min(), part.max()) for part in parts]
    # each part is filled to its border, and no target reaches over it
    first_test, first_valid = weeks - TEST, weeks - TEST - VALID
    assert ends == [(LOOK_BACK, first_valid - 1), (first_valid, first_test - 1), (first_test, weeks - 1)]


def test_naive_forecast_is_the_same_weeks_of_the_year_before():
    x, y, (*_, test) = windows(np.arange(LOOK_BACK + TEST + VALID + 200, dtype=np.float32))
    assert (x[test][..., -YEAR : HORIZON - YEAR] + YEAR == y[test]).all()


def test_what_is_not_known_at_the_time_does_not_fill_a_gap():
    series = forecast.weekly_co2()
    assert len(series) == 2284 and not series.isna().any()
    raw = forecast.co2.load_pandas().data["co2"]
    gaps = np.flatnonzero(raw.isna())
    assert all(series.iloc[gap] == series.iloc[gap - 1] for gap in gaps)


def test_reloaded_learner_forecasts_as_the_trained_one(tmp_path, monkeypatch):
    from rich.progress import Progress

    monkeypatch.setattr(forecast, "EPOCHS", 1)
    monkeypatch.setattr(forecast, "SIZE", dict(patch_len=16, stride=16, d_model=8, n_layers=1, n_heads=2, d_ff=8))
    values = np.sin(np.arange(LOOK_BACK + TEST + VALID + 100, dtype=np.float32) / 8) * 3 + 340
    x, y, split = windows(values)
    with Progress(disable=True) as progress:
        _, learner = forecast.fit(JumboPatchTST, 1e-3, x, y, split, tmp_path, 0, progress, "test")
    expected = forecast.predict(learner, x[:40], y[:40])
    loaded = forecast.save_and_reload(learner, tmp_path / "JumboPatchTST.pkl")
    assert loaded is not learner and loaded.model is not learner.model
    np.testing.assert_array_equal(forecast.predict(loaded, x[:40], y[:40]), expected)
    assert all(torch.isfinite(p).all() for p in loaded.model.parameters())
