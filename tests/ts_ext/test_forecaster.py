"""jumbo_forecaster: frames in and out, no leakage, units, and what is refused."""

import numpy as np
import pytest
import torch

pd = pytest.importorskip("pandas")
pytest.importorskip("tsai", reason="needs jumbo-vit[ts]")

from ts_ext.forecaster import jumbo_forecaster  # noqa: E402 (after the host is known to be there)
from ts_ext.forecasts import Forecaster  # noqa: E402

TINY = dict(
    horizon=6, look_back=24, patch_len=8, stride=4, d_model=8, n_layers=1, n_heads=2, d_ff=16, multiplier=2, epochs=2,
    lr=1e-2,
)  # fmt: skip
ROWS, TRAIN, TEST = 240, 168, 192  # 0.7 and 0.8 of the rows


def frame(rows=ROWS):
    hours = np.arange(rows)
    noise = np.random.default_rng(0).normal(size=rows)
    return pd.DataFrame(
        {"load": 1000 + 50 * np.sin(hours * 2 * np.pi / 12) + noise, "heat": 20 + np.cos(hours * 2 * np.pi / 12)},
        index=pd.date_range("2024-01-01", periods=rows, freq="h"),
    )


@pytest.fixture(scope="module")
def trained():
    return jumbo_forecaster(frame(), **TINY)


def weights_equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_predictions_carry_the_times_that_follow(trained):
    made = trained.predict()
    assert list(made.columns) == ["load", "heat"] and len(made) == 6
    assert list(made.index) == list(pd.date_range("2024-01-11", periods=6, freq="h"))
    assert made["load"].between(900, 1100).all() and made["heat"].between(15, 25).all()
    assert trained.split == {
        "train_end": pd.Timestamp("2024-01-07 23:00"),
        "valid_end": pd.Timestamp("2024-01-08 23:00"),
        "end": pd.Timestamp("2024-01-10 23:00"),
    }
    data = frame()
    np.testing.assert_allclose(trained.mean, data[:TRAIN].mean(), rtol=1e-12)
    np.testing.assert_allclose(trained.std, data[:TRAIN].std(ddof=0), rtol=1e-12)
    newest = (data.to_numpy()[-24:].T - trained.mean[:, None]) / trained.std[:, None]
    with torch.no_grad():
        by_hand = trained.model(torch.from_numpy(newest).float()[None])[0].double().numpy()
    np.testing.assert_allclose(made.to_numpy().T, by_hand * trained.std[:, None] + trained.mean[:, None], rtol=1e-7)


def test_backtest_and_metrics(trained):
    table = trained.backtest()
    assert list(table.columns) == ["origin", "time", "column", "truth", "forecast"]
    assert len(table) == 8 * 6 * 2 and table["origin"].nunique() == 8  # 48 test rows, one horizon apart
    assert table["time"].min() == frame().index[TEST] and table["time"].max() == frame().index[-1]
    for column in ("load", "heat"):
        rows = table[table["column"] == column]
        np.testing.assert_array_equal(rows["truth"], frame()[column][TEST:])
    one = table[(table["origin"] == frame().index[TEST + 6]) & (table["column"] == "heat")]
    np.testing.assert_allclose(one["forecast"], trained.predict(frame()[: TEST + 6])["heat"], rtol=1e-6)
    every = trained.backtest(step=1)
    error = every["forecast"] - every["truth"]
    assert every["origin"].nunique() == 48 - 5
    assert trained.metrics() == {"mae": error.abs().mean(), "mse": (error**2).mean()}


def test_no_leakage(trained):
    """Rows after a cut change no weight, no scaling, and no forecast made before them."""
    for cut in (TRAIN, TEST):
        changed = frame()
        changed.iloc[cut:] *= 100
        other = jumbo_forecaster(changed, **TINY)
        assert weights_equal(other.model, trained.model)
        np.testing.assert_array_equal(other.mean, trained.mean)
        np.testing.assert_array_equal(other.std, trained.std)
        pd.testing.assert_frame_equal(other.predict(changed[:cut]), trained.predict(frame()[:cut]))
    first = [made.backtest()["forecast"][:12].to_numpy() for made in (other, trained)]
    np.testing.assert_array_equal(*first)  # the first test window ends right before the cut
    assert not np.array_equal(other.backtest()["forecast"], trained.backtest()["forecast"])
    changed = frame()
    changed.iloc[TRAIN - 1] += 1
    assert not weights_equal(jumbo_forecaster(changed, **TINY).model, trained.model)


def test_scale_equivariance(trained):
    made = jumbo_forecaster(frame() * 10 + 5, **TINY).predict()
    expected = trained.predict() * 10 + 5
    error = (made - expected).abs().max() / (10 * frame().std())
    assert (error < 1e-3).all()  # training rounds in single precision


def test_no_early_choice_of_window_or_column_order(trained):
    shuffled = frame()[["heat", "load"]]
    pd.testing.assert_frame_equal(trained.predict(shuffled), trained.predict(frame()))
    longer = pd.concat([frame(), frame(30).set_axis(pd.date_range("2024-01-11", periods=30, freq="h"), axis=0)])
    assert trained.predict(longer).index[0] == pd.Timestamp("2024-01-12 06:00")


def test_save_and_load(trained, tmp_path):
    trained.save(tmp_path / "forecaster.pt")
    loaded = Forecaster.load(tmp_path / "forecaster.pt")
    pd.testing.assert_frame_equal(loaded.predict(frame()), trained.predict(), check_freq=False)
    with pytest.raises(ValueError, match="no frame of its own"):
        loaded.predict()
    with pytest.raises(ValueError, match="no frame of its own"):
        loaded.backtest()


def test_a_column_of_times_quantiles_covariates_and_names(tmp_path):
    data = frame().reset_index(names="when").assign(when=lambda d: d["when"].astype(str))
    made = jumbo_forecaster(
        data, time="when", targets=["heat"], covariates=["load"], channels="mixing", quantiles=(0.1, 0.5, 0.9), **TINY
    )
    assert made.columns == ["heat", "load"] and made.targets == ["heat"]
    table = made.predict()
    assert list(table.columns) == [("heat", 0.1), ("heat", 0.5), ("heat", 0.9)]
    assert (table.to_numpy()[:, :-1] <= table.to_numpy()[:, 1:]).all()
    assert list(made.backtest().columns) == ["origin", "time", "column", "truth", 0.1, 0.5, 0.9]
    every = made.backtest(step=1)
    error, truth = every[0.5] - every["truth"], every["truth"]
    pinball = [np.maximum(q * (truth - every[q]), (q - 1) * (truth - every[q])).mean() for q in (0.1, 0.5, 0.9)]
    inside = ((truth >= every[0.1]) & (truth <= every[0.9])).mean()
    expected = {"mae": error.abs().mean(), "mse": (error**2).mean(), "pinball": np.mean(pinball), "coverage": inside}
    assert made.metrics() == pytest.approx(expected)
    louder = data.assign(load=data["load"] * np.linspace(1, 2, ROWS))
    assert not np.allclose(made.predict(louder), table)  # the covariate informs
    made.save(tmp_path / "f.pt")
    pd.testing.assert_frame_equal(Forecaster.load(tmp_path / "f.pt").predict(data), table, check_freq=False)


def test_quantiles_without_the_median_have_no_error_of_a_point():
    found = jumbo_forecaster(frame(), quantiles=(0.1, 0.9), **TINY).metrics()
    assert set(found) == {"pinball", "coverage"}
    assert set(jumbo_forecaster(frame(), quantiles=(0.9,), **TINY).metrics()) == {"pinball"}


def test_columns_and_rows_that_are_not_read_may_be_there(tmp_path):
    data = frame().assign(note=1.0)
    made = jumbo_forecaster(data, targets=["load"], **TINY)
    expected = made.predict()
    pd.testing.assert_frame_equal(made.predict(data), expected, check_freq=False)
    pd.testing.assert_frame_equal(made.predict(data[["load"]]), expected, check_freq=False)
    old = data.copy()
    old.iloc[0, 0], old.iloc[1, 0] = np.nan, np.inf
    pd.testing.assert_frame_equal(made.predict(old), expected, check_freq=False)
    made.save(tmp_path / "f.pt")
    loaded = Forecaster.load(tmp_path / "f.pt")
    assert loaded.ignored == ["heat", "note"]
    pd.testing.assert_frame_equal(loaded.predict(data), expected, check_freq=False)
    with pytest.raises(ValueError, match=r"unknown \['cold'\]"):
        loaded.predict(data.assign(cold=1.0))
    with pytest.raises(ValueError, match="not sorted"):
        made.predict(data.iloc[[1, 0, *range(2, len(data))]])


def test_show_results_of_the_learner():
    import matplotlib.pyplot as plt

    plt.close("all")
    learner = jumbo_forecaster(frame(), **TINY).learner
    with learner.no_bar():
        learner.show_results()
    assert len([axis for axis in plt.gcf().axes if axis.lines]) == 9
    plt.close("all")


def test_names_that_a_file_of_weights_cannot_hold_are_refused_when_saving(tmp_path):
    stamp = pd.Timestamp("2024-01-01")
    made = jumbo_forecaster(frame().rename(columns={"load": stamp}), **TINY)
    with pytest.raises(ValueError, match="cannot be saved: rename them to text"):
        made.save(tmp_path / "f.pt")


def test_missing_values_and_a_constant_column():
    data = frame().assign(flat=7.7)
    data.iloc[np.random.default_rng(0).choice(ROWS, 30, replace=False), 0] = np.nan
    made = jumbo_forecaster(data, missing="mask", **TINY)
    assert np.isfinite(made.predict().to_numpy()).all()
    np.testing.assert_allclose(made.predict()["flat"], 7.7, rtol=1e-7)
    assert np.isfinite(list(made.metrics().values())).all()
    assert all(torch.isfinite(p).all() for p in made.model.parameters())


def test_huge_offsets_keep_their_digits():
    made = jumbo_forecaster(frame() + 1e12, **TINY).predict() - 1e12
    np.testing.assert_allclose(made, jumbo_forecaster(frame(), **TINY).predict(), atol=0.1)


def test_months_and_no_test_part():
    data = frame().set_axis(pd.date_range("2000-01-31", periods=ROWS, freq="ME"), axis=0)
    made = jumbo_forecaster(data, test_share=0, **TINY)
    assert made.predict().index[0] == pd.Timestamp("2020-01-31") and "end" not in made.split
    with pytest.raises(ValueError, match="0 test rows hold no window of horizon 6"):
        made.backtest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.iloc[::-1], r"the index is not sorted: row 1 \(2024-01-10 22:00:00\) is before row 0: sort"),
        (lambda d: pd.concat([d[:9], d[8:]]), "1 duplicate timestamps, the first is 2024-01-01 08:00:00: aggregate"),
        (lambda d: d.drop(index=d.index[5]), "first step unlike the others is after 2024-01-01 04:00:00: resample"),
        (lambda d: d.assign(heat=np.nan), r"columns \['heat'\] are NaN throughout"),
        (lambda d: d.assign(heat=d["heat"].mask(np.arange(ROWS) == 7)), "1 of 480 values .*'heat' at 2024-01-01 07:00"),
        (lambda d: d.assign(heat=d["heat"].mask(np.arange(ROWS) == 7, np.inf)), "NaN or infinite, the first in 'heat'"),
        (lambda d: d.assign(place="here"), r"columns \['place'\] are not numeric"),
        (lambda d: d.reset_index(drop=True), r"the index holds numbers \(\[0\]\), not times.*name the column of times"),
        (lambda d: d.set_axis(["soon"] * ROWS, axis=0), "the index holds no times"),
        (
            lambda d: d[:50],
            r"no training window: 50 rows, parts end at rows \[35, 40, 50\]|no validation window: 50 rows",
        ),
        (lambda d: d[:0], "no row"),
        (lambda d: d[[]], "no column to forecast"),
    ],
)
def test_unusable_frames(change, message):
    with pytest.raises(ValueError, match=message):
        jumbo_forecaster(change(frame()), **TINY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(horizon=0), "horizon must be an integer of at least 1, got 0"),
        (dict(look_back=7), "window of 7 steps is shorter than one patch of 8"),
        (dict(stride=9), "stride 9 is longer than patch_len 8"),
        (dict(targets=["cold"]), r"no column \['cold'\]; it has \['load', 'heat'\]"),
        (dict(time="when"), r"no column \['when'\]"),
        (dict(covariates=["heat"]), "inform nothing while channels are independent: channels='mixing'"),
        (dict(valid_share=0.5, test_share=0.5), "leave rows to train on"),
        (dict(valid_share=0), "valid_share must be above 0"),
        (dict(quantiles=(0.9, 0.1)), "quantiles must be rising"),
        (dict(epochs=0), "epochs must be an integer of at least 1"),
        (dict(missing="drop"), "unknown missing 'drop'"),
        (dict(freq="D"), "not evenly spaced by D"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        jumbo_forecaster(frame(), **{**TINY, **options})


def test_arguments_that_are_none():
    with pytest.raises(TypeError, match=r"takes no 'futr_exog'. Supported as inputs"):
        jumbo_forecaster(frame(), futr_exog=["price"], **TINY)
    with pytest.raises(TypeError, match=r"\['seq_len'\] follow from the frame"):
        jumbo_forecaster(frame(), seq_len=24, **TINY)
    with pytest.raises(TypeError, match="lists of columns, got 'heat'"):
        jumbo_forecaster(frame(), targets="heat", **TINY)
    with pytest.raises(TypeError, match="expected a pandas DataFrame, got ndarray"):
        jumbo_forecaster(frame().to_numpy(), **TINY)


def test_a_window_without_any_value_is_an_error_before_training():
    data = frame()
    data.iloc[100:130, 0] = np.nan
    with pytest.raises(ValueError, match=r"'load' has no value between 2024-01-05 04:00:00 and 2024-01-06 03:00:00"):
        jumbo_forecaster(data, missing="mask", **TINY)
    data = frame()
    data.iloc[:TRAIN, 0] = np.nan
    with pytest.raises(ValueError, match="'load' has no value"):
        jumbo_forecaster(data, missing="mask", **TINY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d[["load"]], r"trained on 2 columns \['load', 'heat'\], got 1: missing \['heat'\], unknown \[\]"),
        (lambda d: d.assign(cold=1.0), r"got 3: missing \[\], unknown \['cold'\]"),
        (lambda d: d[:23], "23 rows are fewer than the look_back of 24"),
        (lambda d: d.iloc[::-1], "not sorted"),
        (lambda d: d.set_axis(pd.date_range("2024-01-01", periods=ROWS, freq="D"), axis=0), "not evenly spaced by h"),
        (lambda d: d.assign(heat=np.nan), "NaN throughout"),
    ],
)
def test_what_predict_refuses(trained, change, message):
    with pytest.raises(ValueError, match=message):
        trained.predict(change(frame()))
