"""The forecasting benchmark keeps to the usual splits: no leak, every window, the training part's scale."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.forecasting import (
    FULL,
    LOOK_BACK,
    NAIVE,
    QUICK,
    SETS,
    Data,
    Job,
    borders,
    chosen_rate,
    errors,
    mean_ranks,
    naive,
    read_scaled,
    run_all,
    seasonal_naive,
    settings,
    summarise,
    tables,
    time_epoch,
    timing_of,
    train,
    windows,
)
from benchmarks.forecasting_ablation import PUBLISHED, read_result, table
from benchmarks.series_models import MODELS, SIZE, SMOOTHING, VARIANTS, DLinear, build
from jumbo_core.measure.report import ResultFile

TINY = dict(horizons=[96], epochs=1, batch_size=32, window_stride=30, valid_stride=300, rates=[1e-3, 1e-2], seeds=[0])


@pytest.fixture(scope="module")
def series(tmp_path_factory) -> Path:
    """Both files with random values; a value of ETTh1's validation part and after is far from all before."""
    folder, generator = tmp_path_factory.mktemp("series"), np.random.default_rng(0)
    for name, rows in (("ETTh1", 14500), ("exchange_rate", 4000)):
        values = generator.normal(3, 2, (rows, SETS[name]["channels"])).round(4)
        values[borders(name, rows)[1] :] += 1000
        lines = [",".join(["2016-07-01", *map(str, row)]) for row in values.tolist()]
        (folder / f"{name}.csv").write_text("\n".join(["date" + ",x" * values.shape[1], *lines]) + "\n")
    return folder


def test_borders():
    assert borders("ETTh1", 17420) == [0, 8640, 11520, 14400]  # months of 30 days; the rest is not used
    assert borders("exchange_rate", 7588) == [0, 5311, 6071, 7588]


@pytest.mark.parametrize(
    ("name", "rows", "horizon", "counts"),
    [
        ("ETTh1", 17420, 96, (8209, 2785, 2785)),
        ("ETTh1", 17420, 720, (7585, 2161, 2161)),
        ("exchange_rate", 7588, 96, (4880, 665, 1422)),
        ("exchange_rate", 7588, 720, (4256, 41, 798)),
    ],
)
def test_windows(name, rows, horizon, counts):
    values, ends = np.arange(rows, dtype=np.float32)[:, None].repeat(2, axis=1), borders(name, rows)
    for start, stop, count in zip(ends[:-1], ends[1:], counts, strict=True):
        x, y = windows(values, start, stop, horizon)
        assert x.shape == (count, 2, LOOK_BACK) and y.shape == (count, 2, horizon)
        assert y.min() == max(start, LOOK_BACK) and y.max() == stop - 1  # targets fill the part and never leave it
        assert (x[..., -1] + 1 == y[..., 0]).all()


def test_published_files(shared):
    """The real files have the rows and columns that the protocol is written for."""
    for name, ends in (("ETTh1", [0, 8640, 11520, 14400]), ("exchange_rate", [0, 5311, 6071, 7588])):
        values, found = read_scaled(shared / "data" / "series", name)
        assert found == ends and values.shape[1] == SETS[name]["channels"] and np.isfinite(values).all()


def test_scale_comes_from_the_training_part(series):
    for name in SETS:
        scaled, ends = read_scaled(series, name)
        np.testing.assert_allclose(scaled[: ends[1]].mean(0), 0, atol=1e-4)
        np.testing.assert_allclose(scaled[: ends[1]].std(0), 1, atol=1e-4)
        assert scaled[ends[1] :].min() > 300


def test_training_sees_nothing_of_validation_and_test(series):
    data = Data(series, "ETTh1", 96, window_stride=7, valid_stride=500)
    train_rows, valid_rows = data.splits
    assert (len(train_rows), len(valid_rows)) == (1173, 6) and not set(train_rows) & set(valid_rows)
    assert data.x[train_rows].max() < 300 and data.y[train_rows].max() < 300
    assert data.y[valid_rows].min() > 300
    assert len(data.test_x) == len(data.test_y) == 2785 and data.test_y.min() > 300


def test_files_that_will_not_do(series, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"ETTh1\.csv, exchange_rate\.csv"):
        read_scaled(tmp_path, "ETTh1")
    lines = (series / "ETTh1.csv").read_text().split("\n")
    (tmp_path / "ETTh1.csv").write_text("\n".join(lines[:2000]))
    with pytest.raises(ValueError, match="at least 14400 rows of 7 columns"):
        read_scaled(tmp_path, "ETTh1")
    (tmp_path / "exchange_rate.csv").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="of 8 columns"):
        read_scaled(tmp_path, "exchange_rate")


def test_seasonal_naive():
    x = np.arange(48.0)[None, None]
    np.testing.assert_array_equal(seasonal_naive(x, 30, 24)[0, 0], [*range(24, 48), *range(24, 30)])
    np.testing.assert_array_equal(seasonal_naive(x, 3, 1)[0, 0], [47, 47, 47])
    day = np.tile(np.random.default_rng(0).normal(size=(2, 7, 24)), 18)
    assert errors(seasonal_naive(day[..., :LOOK_BACK], 96, 24), day[..., LOOK_BACK:]) == {"mse": 0, "mae": 0}


def test_errors_by_hand(series):
    assert errors(np.array([[1.0, 2]]), np.array([[0.0, 4]])) == {"mse": 2.5, "mae": 1.5}
    with pytest.raises(AssertionError):
        errors(np.zeros((1, 2)), np.zeros((2, 2)))
    values, ends = read_scaled(series, "exchange_rate")
    part = values[ends[2] - 1 :].astype(np.float64)  # the last value of each window, and what follows
    steps = [np.abs(part[h : len(part) - 96 + h] - part[:-96]) for h in range(1, 97)]
    found = naive(series, "exchange_rate", 96)
    assert found["mae"] == pytest.approx(np.mean(steps)) and found["test_windows"] == len(part) - 96


def test_moving_average_keeps_constants_and_lines():
    x = torch.full((2, 3, 60), 5.0)
    torch.testing.assert_close(DLinear.moving_average(x), x)
    line = torch.arange(60.0).expand(1, 1, 60)
    inside = slice(SMOOTHING // 2, -(SMOOTHING // 2))
    torch.testing.assert_close(DLinear.moving_average(line)[..., inside], line[..., inside])
    assert DLinear.moving_average(line)[0, 0, 0] == sum(range(13)) / SMOOTHING  # the first value is repeated 12 times


def test_dlinear_is_two_linear_maps():
    model, x = DLinear(40, 7), torch.randn(2, 3, 40)
    assert model(x).shape == (2, 3, 7) and len(list(model.parameters())) == 4
    with torch.no_grad():
        for layer in (model.trend, model.rest):
            layer.weight.fill_(1 / 40)
            layer.bias.zero_()
    torch.testing.assert_close(model(x), x.mean(dim=-1, keepdim=True).expand(2, 3, 7))  # the parts add up to x


@pytest.mark.parametrize("name", MODELS)
def test_models_share_shapes_and_size(name):
    model = build(name, 7, LOOK_BACK, 96)
    x = torch.randn(2, 7, LOOK_BACK)
    model.train()
    model(x).sum().backward()
    without = {n for n, p in model.named_parameters() if p.requires_grad and p.grad is None}
    assert without <= {"model.revin_layer.weight", "model.revin_layer.bias"}  # tsai's, which it never uses
    model.eval()
    assert model(x).shape == (2, 7, 96) and type(model(x)) is torch.Tensor
    moved = x.clone()
    moved[:, 3] += torch.linspace(0, 1, LOOK_BACK)
    others = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(model(moved)[:, others], model(x)[:, others])  # channel independence
    assert not torch.equal(model(moved)[:, 3], model(x)[:, 3])
    if name != "DLinear":
        widths = {m.in_features for m in model.modules() if isinstance(m, nn.Linear)}
        assert {SIZE["d_model"], SIZE["d_ff"]} <= widths
        assert sum(isinstance(m, nn.Linear) and m.in_features == SIZE["d_ff"] for m in model.modules()) >= 3
        dropouts = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
        assert dropouts.count(SIZE["dropout"]) >= 7


def test_transformers_head_reads_every_patch():
    """Its default head reads the mean of the patches, which PatchTST does not."""
    head = build("Transformers PatchTST", 7, LOOK_BACK, 96).host.head.projection
    assert (head.in_features, head.out_features) == (41 * SIZE["d_model"], 96)


def test_unknown_model():
    with pytest.raises(ValueError, match=r"'LSTM'.*DLinear"):
        build("LSTM", 7, LOOK_BACK, 96)


@pytest.mark.parametrize("model", ["DLinear", "JumboPatchTST J=6"])
def test_one_run_counts_every_test_window(series, model):
    run = train(Job("exchange_rate", 96, model, 1e-3, 0), series, TINY)
    _, ends = read_scaled(series, "exchange_rate")
    assert run["test_windows"] == ends[3] - ends[2] - 96 + 1  # 705: two batches of 256 and the rest
    assert np.isfinite([run["mse"], run["mae"], run["valid_mse"]]).all() and run["seconds_per_epoch"] > 0
    assert run["parameters"] == sum(p.numel() for p in build(model, 8, LOOK_BACK, 96).parameters())
    again = train(Job("exchange_rate", 96, model, 1e-3, 0), series, TINY)
    assert again["mse"] == run["mse"]
    assert train(Job("exchange_rate", 96, model, 1e-3, 1), series, TINY)["mse"] != run["mse"]


def filled(path, plan, valid) -> ResultFile:
    """A result file with made-up runs; ``valid``: rate -> validation error."""
    file = ResultFile(path, {})
    for data in SETS:
        for horizon in plan["horizons"]:
            file.run(f"{data}|H={horizon}|{NAIVE}", lambda: dict(mse=1.0, mae=0.9))
            for i, model in enumerate(MODELS):
                for rate in plan["rates"]:
                    for seed in plan["seeds"]:
                        job = Job(data, horizon, model, rate, seed)
                        # the better rate on validation is the worse one on test
                        run = dict(
                            valid_mse=valid[rate], mse=1 + i / 10 - valid[rate] + seed, mae=0.5, parameters=10 + i,
                            seconds_per_epoch=1.0,
                        )  # fmt: skip
                        file.run(job.name, lambda r=run: r)
    for i, model in enumerate(MODELS):
        file.run(timing_of(model), lambda s=20.5 + i: dict(seconds_per_epoch=s))
    return file


def test_the_rate_is_chosen_on_validation_at_the_first_horizon_and_seed(tmp_path):
    plan = dict(TINY, horizons=[96, 192], seeds=[0, 1])
    file = filled(tmp_path / "r.json", plan, {1e-3: 0.5, 1e-2: 0.2})
    assert chosen_rate(file, plan, "ETTh1", "DLinear") == 1e-2
    for name, run in file.runs.items():  # other horizons, seeds and test errors have no say
        if "valid_mse" in run and not ("H=96" in name and name.endswith("seed=0")):
            run["valid_mse"] = -run["valid_mse"]
        run["mse"] = 0.0 if "rate=0.001" in name else 9.0
    assert chosen_rate(file, plan, "ETTh1", "DLinear") == 1e-2


def test_summary_and_tables(tmp_path):
    plan = dict(TINY, seeds=[0, 1])
    file = filled(tmp_path / "r.json", plan, {1e-3: 0.5, 1e-2: 0.2})
    rows = summarise(file, plan)
    assert len(rows) == len(SETS) * (1 + len(MODELS))
    row = next(r for r in rows if r["model"] == "DLinear")
    assert row["rate"] == 1e-2 and row["mse"] == pytest.approx((1.7, 0.5**0.5)) and row["seeds"] == 2
    ranks = mean_ranks(rows, "mse")
    assert ranks[NAIVE] == 1 and ranks[MODELS[0]] == 2 and ranks["DLinear"] == 6
    assert mean_ranks(rows, "mae")[MODELS[0]] == 3 and mean_ranks(rows, "mae")[NAIVE] == 6  # a tie of five
    text = tables(rows, file, plan)
    assert "**1.000** / 0.900" in text and "1.300 ± 0.707 / **0.500**" in text
    assert "| mean rank |" in text and "JumboPatchTST J=6 | 0.01, 0.01, FFN x 0.3" in text
    assert "24 hours" in text and "the last value" in text and f"| {20.5 + len(MODELS) - 1} |" in text


def test_seconds_of_an_epoch_are_measured_in_a_run_of_their_own(series):
    assert 0 < time_epoch("DLinear", series, TINY)["seconds_per_epoch"] < 600


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_forecast(name):
    model = build(name, 2, 64, 8).eval()
    x = torch.randn(3, 2, 64)
    forecast = model(x)
    assert forecast.shape == (3, 2, 8)
    with torch.no_grad():
        encoded = model.encode(x)
        blind = encoded._replace(tokens=encoded.tokens._replace(jumbo=torch.zeros_like(encoded.tokens.jumbo)))
        same = torch.equal(model.head(blind, model.revin), model.head(encoded, model.revin))
    assert same == ("alone" in name)
    forecast.sum().backward()
    assert model.head.weight.grad.abs().sum() > 0


def test_ablation_takes_a_finished_result_of_the_same_settings(series, tmp_path):
    wanted = settings(FULL, series)
    with pytest.raises(FileNotFoundError, match="RESULT is the file that"):
        read_result(tmp_path / "r.json", wanted)
    file = ResultFile(tmp_path / "r.json", wanted)
    file.save()
    with pytest.raises(ValueError, match="of an unfinished run"):
        read_result(tmp_path / "r.json", wanted)
    file.save(table="")
    assert read_result(tmp_path / "r.json", wanted)["runs"] == {}
    with pytest.raises(ValueError, match="of other settings"):
        read_result(tmp_path / "r.json", settings(QUICK, series))


def test_ablation_table_compares_means_over_seeds(tmp_path):
    plan = dict(TINY, seeds=[0, 1])
    file = ResultFile(tmp_path / "r.json", {})
    for data in SETS:
        for i, model in enumerate([PUBLISHED, *VARIANTS]):
            for seed in plan["seeds"]:
                file.run(Job(data, 96, model, 1e-3, seed).name, lambda v=1 + i / 10 + seed: dict(mse=v))
    text = table(file, plan, dict.fromkeys(SETS, 1e-3))
    assert "| ETTh1 | 96 | 1.500 ± 0.707 | 1.600 ± 0.707 |" in text and "| - | +6.7 % | +13.3 % |" in text


def test_finished_runs_are_not_run_again(tmp_path):
    """A folder without data: any training would fail."""
    plan = TINY
    file = filled(tmp_path / "r.json", plan, {1e-3: 0.5, 1e-2: 0.2})
    jobs = [Job(data, 96, model, 1e-3, 0) for data in SETS for model in MODELS]
    run_all(jobs, file, tmp_path, plan, workers=1)
    reopened = ResultFile(tmp_path / "r.json", {})
    run_all(jobs, reopened, tmp_path, plan, workers=1)
    del reopened.runs[jobs[0].name]
    with pytest.raises(FileNotFoundError):
        run_all(jobs, reopened, tmp_path, plan, workers=1)


def test_result_file_is_of_these_settings_and_this_data(series, tmp_path):
    wanted = settings(FULL, series)
    ResultFile(tmp_path / "r.json", wanted).save()
    ResultFile(tmp_path / "r.json", wanted)
    for other in ({**wanted, "size": {}}, {**wanted, "data_sha256": {}}, settings(QUICK, series)):
        with pytest.raises(ValueError, match="other settings"):
            ResultFile(tmp_path / "r.json", other)
    assert str(tmp_path) not in (tmp_path / "r.json").read_text().split('"settings"')[1]


def test_published_runs_are_of_these_settings(shared, tmp_path):
    """The published runs belong to today's models, sizes and data, so that the command adds to them."""
    published = Path(__file__).parents[2] / "docs" / "results" / "forecasting.json"
    if not published.is_file():
        pytest.skip("docs/results/forecasting.json is not published yet")
    (tmp_path / "r.json").write_bytes(published.read_bytes())
    file = ResultFile(tmp_path / "r.json", settings(FULL, shared / "data" / "series"))
    of_each = {
        Job(data, horizon, model, chosen_rate(file, FULL, data, model), seed).name
        for data in SETS for horizon in FULL["horizons"] for model in MODELS for seed in FULL["seeds"]
    }  # fmt: skip
    assert of_each <= set(file.runs)
