"""JumboPatchTST in neuralforecast: real NeuralForecast objects, all losses, windows, padding, saving, refusals."""

import importlib
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
import torch

pytest.importorskip("neuralforecast", reason="needs jumbo-vit[nixtla]")

from neuralforecast import NeuralForecast
from neuralforecast.core import MODEL_FILENAME_DICT
from neuralforecast.losses.pytorch import GMM, MAE, PMM, DistributionLoss, HuberIQLoss, HuberMQLoss, IQLoss, MQLoss

import ts_ext
from ts_ext.neuralforecast import JumboPatchTST

H, L = 4, 16
PLAIN = dict(patch_len=8, stride=4, d_model=16, n_layers=1, n_heads=2, d_ff=24, multiplier=2)
SMALL = dict(
    h=H, input_size=L, patch_len=8, stride=4, hidden_size=16, encoder_layers=1, n_heads=2, linear_hidden_size=24,
    multiplier=2, max_steps=2, val_check_steps=2, windows_batch_size=16, learning_rate=1e-3, accelerator="cpu",
    enable_progress_bar=False, logger=False, enable_checkpointing=False, enable_model_summary=False,
)  # fmt: skip


def frame(lengths=(50, 40), level=0.0, freq="D"):
    """Sines of unequal scale and length, all ending on one day."""
    parts = []
    for i, n in enumerate(lengths):
        days = pd.date_range(end="2024-06-30", periods=n, freq=freq)
        parts.append(pd.DataFrame(dict(unique_id=f"s{i}", ds=days, y=level + (i + 1) * np.sin(0.4 * np.arange(n) + i))))
    return pd.concat(parts, ignore_index=True)


def fitted(df=None, **options):
    nf = NeuralForecast([JumboPatchTST(**SMALL | options)], freq="D")
    nf.fit(frame() if df is None else df)
    return nf


def values(nf, df=None, **options):
    """Point forecasts (series, H)."""
    return nf.predict(df, **options)["JumboPatchTST"].to_numpy().reshape(-1, H)


@pytest.fixture(scope="module")
def nf():
    return fitted(dropout=0.5, attn_dropout=0.5, head_dropout=0.5, drop_path=0.3)


def plain(nf, **options):
    """The same weights in the plain model, in eval mode."""
    model = ts_ext.JumboPatchTST(1, 1, L, [H], **PLAIN | options)
    model.load_state_dict(nf.models[0].model.state_dict())
    return model.eval()


def last_windows(df):
    """Values and mask of the last L steps of each series, padded in front."""
    series = [torch.tensor(y.to_numpy()[-L:], dtype=torch.float32)[None] for _, y in df.groupby("unique_id")["y"]]
    return ts_ext.pad_windows(series, L)


def test_plain_torch_gives_the_same_forecasts_also_of_short_series_and_with_dropout(nf):
    df = frame((50, 40, 10, 3), level=5.0)  # the padding of the last two must not enter a statistic
    forecast = values(nf, df)
    model = plain(nf, dropout=0.5, attn_dropout=0.5, head_dropout=0.5, drop_path=0.3)
    x, mask = last_windows(df)
    with torch.no_grad():
        np.testing.assert_allclose(forecast, model(x, mask).numpy(), atol=1e-5)
        assert not np.allclose(forecast[2:], model(x).numpy()[2:], atol=0.1)  # zeros read as values
        assert not np.allclose(forecast, model.train()(x, mask).numpy(), atol=0.05)  # dropout is not nothing


def test_loss_falls_in_training():
    nf = fitted(max_steps=60, dropout=0.0, learning_rate=3e-3)
    losses = [loss for _, loss in nf.models[0].train_trajectories]
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])


def test_quantiles_are_those_of_the_plain_model_and_never_cross():
    nf = fitted(loss=MQLoss(level=[90, 50]))
    columns = [f"JumboPatchTST{name}" for name in ("-lo-90", "-lo-50", "-median", "-hi-50", "-hi-90")]
    forecast = nf.predict()[columns].to_numpy().reshape(-1, H, 5)
    with torch.no_grad():
        expected = plain(nf, quantiles=(0.05, 0.25, 0.5, 0.75, 0.95))(*last_windows(frame()))
    np.testing.assert_allclose(forecast, expected.numpy(), atol=1e-5)
    assert (np.diff(forecast, axis=-1) >= 0).all() and np.ptp(forecast, axis=-1).min() > 0


DISTRIBUTION = dict(revin=False, scaler_type="standard")
LOSSES = [
    (lambda: HuberMQLoss(quantiles=[0.9, 0.1]), {}, 2),
    (lambda: DistributionLoss("Poisson"), {}, 6),
    (lambda: DistributionLoss("Normal", return_params=True), DISTRIBUTION, 8),
    (lambda: DistributionLoss("StudentT", level=[80]), DISTRIBUTION, 4),
    (lambda: DistributionLoss("NegativeBinomial"), DISTRIBUTION, 6),
    (lambda: GMM(n_components=2), DISTRIBUTION, 6),
    (lambda: PMM(n_components=2), DISTRIBUTION, 6),
    (IQLoss, dict(valid_loss=IQLoss()), 1),
    (HuberIQLoss, dict(valid_loss=HuberIQLoss()), 1),
]


@pytest.mark.parametrize("make, options, columns", LOSSES)
def test_every_kind_of_loss_fits_validates_and_predicts(make, options, columns):
    nf = NeuralForecast([JumboPatchTST(**SMALL | options, loss=make())], freq="D")
    nf.fit(frame(level=9.0), val_size=8)
    forecast = nf.predict().drop(columns=["unique_id", "ds"])
    assert forecast.shape == (2 * H, columns) and np.isfinite(forecast.to_numpy()).all()
    assert np.isfinite(nf.models[0].valid_trajectories[-1][1])


def test_revin_with_the_scale_of_a_distribution_warns_and_the_advice_helps():
    def width(**options):
        nf = fitted(frame(level=500.0), loss=DistributionLoss("Normal", level=[80]), **options)
        forecast = nf.predict()
        return (forecast["JumboPatchTST-hi-80"] - forecast["JumboPatchTST-lo-80"]).mean()

    with pytest.warns(UserWarning, match="RevIN is undone on every parameter of DistributionLoss"):
        wide = width()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="RevIN is undone")
        assert width(**DISTRIBUTION) < 10 < 100 < wide  # of series of 500 +- 2
        JumboPatchTST(**SMALL, loss=DistributionLoss("Poisson"))


def test_cross_validation_has_every_row_and_its_last_window():
    df = frame()
    model = JumboPatchTST(**SMALL, inference_windows_batch_size=3)  # 5 windows of 2 series: the last batch has one
    rows = NeuralForecast([model], freq="D").cross_validation(df, n_windows=5, step_size=2)
    assert len(rows) == 2 * 5 * H and rows["JumboPatchTST"].notna().all()
    assert (rows.groupby(["unique_id", "cutoff"]).size() == H).all()
    assert rows["ds"].max() == df["ds"].max()
    assert sorted(rows["cutoff"].unique()) == list(pd.date_range(end="2024-06-26", periods=5, freq="2D"))
    whole = NeuralForecast([JumboPatchTST(**SMALL)], freq="D").cross_validation(df, n_windows=5, step_size=2)
    pd.testing.assert_frame_equal(rows, whole, rtol=0, atol=1e-5)  # batches of another size round otherwise


def test_what_comes_after_the_cut_changes_no_forecast():
    def forecasts(df):
        nf = NeuralForecast([JumboPatchTST(**SMALL)], freq="D")
        rows = nf.cross_validation(df, n_windows=3, step_size=H)  # trains on what is before the first cut
        return [part["JumboPatchTST"].to_numpy() for _, part in rows.groupby("cutoff")]

    df = frame()
    changed = df.assign(y=df["y"].where(df["ds"] <= df["ds"].max() - pd.Timedelta(days=2 * H), 1e4))
    before, after = forecasts(df), forecasts(changed)
    np.testing.assert_array_equal(before[0], after[0])
    np.testing.assert_array_equal(before[1], after[1])
    assert not np.allclose(before[2], after[2])


def test_a_longer_horizon_goes_on_from_the_models_own_forecasts(nf):
    forecast = nf.predict(h=2 * H)["JumboPatchTST"].to_numpy().reshape(2, 2 * H)
    model, (x, _) = plain(nf), last_windows(frame())
    with torch.no_grad():
        first = model(x)
        second = model(torch.cat([x, first[:, None]], dim=-1)[..., H:])
    np.testing.assert_allclose(forecast, torch.cat([first, second], dim=1).numpy(), atol=1e-5)


def test_saved_and_loaded(nf, tmp_path):
    path = str(tmp_path / "mean")
    nf.save(path)
    assert {file.suffix for file in (tmp_path / "mean").iterdir()} == {".json", ".safetensors"}
    loaded = NeuralForecast.load(path)
    assert type(loaded.models[0]) is JumboPatchTST
    pd.testing.assert_frame_equal(loaded.predict(), nf.predict())

    other = fitted(loss=MQLoss(level=[80]), alias="mine", jumbo_lr_scale=0.5, encoder="linear", revin_affine=True)
    other.save(str(tmp_path / "other"))
    again = NeuralForecast.load(str(tmp_path / "other"))
    assert again.models[0].jumbo_lr_scale == 0.5 and again.models[0].model.quantiles is not None
    assert "mine-lo-80" in again.predict()
    pd.testing.assert_frame_equal(again.predict(), other.predict())


def test_masked_rows_may_hold_anything(nf):
    df = frame().assign(available_mask=1.0)
    masked = df["ds"].between("2024-06-20", "2024-06-23")
    df.loc[masked, "available_mask"] = 0.0
    forecasts = [values(nf, df.assign(y=df["y"].where(~masked, junk))) for junk in (np.nan, 0.0, 1e6)]
    np.testing.assert_array_equal(forecasts[0], forecasts[1])
    np.testing.assert_array_equal(forecasts[0], forecasts[2])
    x, _ = last_windows(df)
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[..., 5:9] = False  # of the days 15 to 30
    with torch.no_grad():
        np.testing.assert_allclose(forecasts[0], plain(nf)(x, mask).numpy(), atol=1e-5)


@pytest.mark.parametrize("junk", [0.0, 7.0, np.nan])
def test_a_window_without_any_value_is_read_as_zeros(nf, junk):
    df = frame(level=5.0).assign(available_mask=1.0)
    empty = (df["unique_id"] == "s1") & (df["ds"] > df["ds"].max() - pd.Timedelta(days=L))
    df.loc[empty, "y"], df.loc[empty, "available_mask"] = junk, 0.0
    forecast = values(nf, df)
    np.testing.assert_array_equal(forecast[1], 0)
    np.testing.assert_allclose(forecast[0], values(nf, frame(level=5.0))[0], atol=1e-5)
    bare = fitted(revin=False)
    with torch.no_grad():
        expected = plain(bare, revin=False)(torch.zeros(1, 1, L))
    np.testing.assert_allclose(values(bare, df)[1:], expected.numpy(), atol=1e-6)


def test_training_on_short_series_needs_padding_which_the_model_does_not_read():
    short = frame((10, 6), level=100.0)
    with pytest.raises(ValueError, match="start_padding_enabled"):
        fitted(short)
    nf = fitted(short, start_padding_enabled=True)
    assert nf.models[0].train_trajectories[0][1] < 10  # padding read as values would put the forecasts far below 100
    assert np.abs(values(nf) - 100).max() < 10


def test_level_scale_and_a_constant_series(nf):
    df = frame()
    np.testing.assert_allclose(values(nf, df.assign(y=10 * df["y"] + 5)), 10 * values(nf, df) + 5, atol=1e-4)
    np.testing.assert_array_equal(values(nf, df.assign(y=7.25)), 7.25)


def test_frames_that_neuralforecast_accepts_are_what_the_docstring_says(nf):
    df = frame()
    expected = values(nf, df)
    np.testing.assert_array_equal(values(nf, df.sample(frac=1, random_state=0)), expected)
    np.testing.assert_array_equal(values(nf, df.assign(price=3.0)), expected)
    twice = pd.concat([df, df.iloc[[45]]]).sort_values(["unique_id", "ds"], ignore_index=True)
    shifted = twice.assign(ds=pd.concat([frame((51,)), frame((50, 40)).iloc[50:]])["ds"].to_numpy())
    np.testing.assert_array_equal(values(nf, twice), values(nf, shifted))
    with pytest.raises(ValueError, match=r"Found missing values in \['y'\]"):
        nf.predict(df.assign(y=df["y"].where(df.index != 45)))
    with pytest.raises(ValueError, match=r"1 of 32 values of these windows are NaN or infinite.*available_mask 0"):
        nf.predict(df.assign(y=df["y"].where(df.index != 45, np.inf)))


def rates(model):
    optimizer = model.configure_optimizers()["optimizer"]
    names = {parameter: name for name, parameter in model.named_parameters()}
    return optimizer, [(group["lr"], {names[p] for p in group["params"]}) for group in optimizer.param_groups]


def test_jumbo_ffn_learns_at_a_slower_rate():
    model = JumboPatchTST(**SMALL | dict(max_steps=1, val_check_steps=1), loss=IQLoss(), valid_loss=IQLoss())
    optimizer, groups = rates(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    ffn = {name for name in trained if ".jumbo_mlp." in name}
    assert type(optimizer) is torch.optim.Adam and model.optimizer is None
    assert ffn and groups == [(1e-3, trained - ffn), (pytest.approx(3e-4), ffn)]  # the loss' own weights too

    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    nf = NeuralForecast([model], freq="D")
    nf.fit(frame())
    moved = {name: (p - before[name]).abs().max().item() for name, p in nf.models[0].named_parameters()}
    assert max(moved[name] for name in ffn) == pytest.approx(3e-4, rel=1e-2)  # Adam's first step is the rate
    assert moved["model.head.bias"] == pytest.approx(1e-3, rel=1e-2)


def test_optimizer_and_schedule_of_ones_own():
    options = dict(optimizer=torch.optim.AdamW, optimizer_kwargs=dict(weight_decay=0.2), jumbo_lr_scale=0.1)
    model = JumboPatchTST(**SMALL | options, num_lr_decays=2, loss=MAE())
    made = model.configure_optimizers()
    groups = made["optimizer"].param_groups
    assert type(made["optimizer"]) is torch.optim.AdamW and model.optimizer is torch.optim.AdamW
    assert [group["weight_decay"] for group in groups] == [0.2, 0.2]
    made["optimizer"].step()
    made["lr_scheduler"]["scheduler"].step()
    assert [group["lr"] for group in groups] == pytest.approx([5e-4, 5e-5])
    for alone in (dict(jumbo_lr_scale=1.0), dict(multiplier=0, registers=2)):
        assert [rate for rate, _ in rates(JumboPatchTST(**SMALL | alone))[1]] == [1e-3]


VARIANTS = [
    dict(encoder="linear"),
    dict(multiplier=0, registers=3),
    dict(revin_affine=True),
    dict(scaler_type="robust"),
    dict(precision="bf16-mixed"),
]


@pytest.mark.parametrize("options", VARIANTS)
def test_variants_fit_and_predict(options):
    forecast = values(fitted(frame((50, 12)), start_padding_enabled=True, **options))
    assert forecast.shape == (2, H) and np.isfinite(forecast).all()


def test_batch_norm_trains_on_series_of_one_length_and_refuses_padding():
    assert np.isfinite(values(fitted(frame((50, 50)), norm="BatchNorm"))).all()
    with pytest.raises(ValueError, match="norm='BatchNorm' can not leave patches without a real value out"):
        fitted(frame((50, 12)), norm="BatchNorm", start_padding_enabled=True)


def test_an_encoder_that_was_pretrained_is_taken_over():
    pretrained = ts_ext.JumboPatchTST(1, 1, L, head="pretrain", mask_ratio=0.25, **PLAIN)
    model = JumboPatchTST(**SMALL | dict(learning_rate=1e-12))
    model.model.load_pretrained(pretrained)
    kept = NeuralForecast([model], freq="D")
    kept.fit(frame())
    name = "series.encoder.jumbo_token"
    torch.testing.assert_close(kept.models[0].model.state_dict()[name], pretrained.state_dict()[name])


BAD = [
    (dict(h=0), ValueError, "h must be an integer of at least 1, got 0"),
    (dict(input_size=7), ValueError, "input_size 7 is shorter than one patch of 8 steps"),
    (dict(input_size=-1), ValueError, "input_size must be an integer of at least 1, got -1"),
    (dict(stride=9), ValueError, "stride 9 is longer than patch_len 8"),
    (dict(jumbo_lr_scale=0), ValueError, "jumbo_lr_scale must be a finite number above 0"),
    (dict(encoder="linear", registers=2), ValueError, "encoder='linear' has no registers"),
    (dict(loss=MQLoss(level=[100])), ValueError, "strictly between 0 and 1"),
    (dict(optimizer_kwargs=dict(eps=1e-3)), ValueError, "optimizer_kwargs .* need an optimizer"),
    (dict(fc_dropout=0.2), TypeError, "no fc_dropout: .* use dropout and head_dropout"),
    (dict(batch_normalization=True), TypeError, "no batch_normalization: use norm='BatchNorm'"),
    (dict(multipler=4), TypeError, "no 'multipler'"),
    (dict(hist_exog_list=["a"]), TypeError, "takes no 'hist_exog_list'. Supported as inputs: past values"),
    (dict(futr_exog_list=["a"]), TypeError, "takes no 'futr_exog_list'. Supported as inputs: past values"),
    (dict(stat_exog_list=["a"]), TypeError, "takes no 'stat_exog_list'. Supported as inputs: past values"),
    (dict(cat_exog_list=["a"]), Exception, "JumboPatchTST does not support categorical exogenous"),
    (dict(exclude_insample_y=True), Exception, "does not support `exclude_insample_y=True`"),
]


@pytest.mark.parametrize("options, error, message", BAD)
def test_bad_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        JumboPatchTST(**SMALL | options)


def test_the_name_is_registered_for_loading_and_the_missing_host_is_named(monkeypatch):
    assert MODEL_FILENAME_DICT["jumbopatchtst"] is JumboPatchTST
    monkeypatch.delitem(sys.modules, "ts_ext.neuralforecast")
    monkeypatch.setitem(sys.modules, "neuralforecast.core", None)  # what an import finds that is not there
    with pytest.raises(ImportError, match=r"pip install 'jumbo-vit\[nixtla\]'"):
        importlib.import_module("ts_ext.neuralforecast")
