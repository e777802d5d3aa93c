"""Forecasting ETTh1 and exchange rates, look-back 336: JumboPatchTST against PatchTST of two hosts and simple models.

``python -m benchmarks.forecasting --data ../shared/data/series --out docs/results/forecasting.json [--quick]``

The usual protocol. ETTh1: 12/4/4 months of hourly values; exchange_rate: 70/10/20 % of the days. Validation and test
windows look back into the part before; values are scaled by the training part's mean and deviation; errors are over
every channel and every test window, the last partial batch included, on the scaled values.

All models train through the same tsai learner, for one epoch of every second training window; DLinear, whose epoch
costs a twentieth of the others' and which is far from done by then, for ten. The learning rate of each is the best of
one grid by validation error, at horizon 96 of each data set and at the first seed, and serves the longer horizons as
well; every fourth validation window is looked at. The patch models have PatchTST's small width and depth.

The seasonal naive forecast repeats the last season: the last day of ETTh1; the last value of the daily exchange rates,
which know no other season.

Two things are not equal. At the same width Jumbo's shared FFN, and a head that reads J slices, cost parameters. And the
Jumbo FFN learns at 0.3 of the rate: a fixed choice, not tuned here, which the others have no part to apply to. The
seconds of an epoch, without validation, come from runs of their own at ETTh1, horizon 96, at the end, one after the
other on one thread: they compare where nothing else shares the machine then. An interrupted command picks up at the
first run that the file lacks.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata

from benchmarks import outputs
from benchmarks.pool import run_jobs
from benchmarks.series_models import JUMBO, MODELS, SIZE, SMOOTHING, VARIANTS, build
from jumbo_core.measure.report import ResultFile, markdown_table, mean_spread

MONTH = 30 * 24
LOOK_BACK = 336
NAIVE = "seasonal naive"
# Rows of training, validation and test (of all rows where below 1), channels, steps of a season.
SETS = {
    "ETTh1": dict(parts=(12 * MONTH, 4 * MONTH, 4 * MONTH), channels=7, season=24, named="24 hours"),
    "exchange_rate": dict(parts=(0.7, 0.1, 0.2), channels=8, season=1, named="1 day, the last value"),
}
MORE_EPOCHS = {"DLinear": 10}  # epochs over those of the other models
FFN_RATE_SCALE = 0.3  # rate of the Jumbo FFN over the rate of all else; a fixed choice
FULL = dict(
    horizons=[96, 192, 336, 720], epochs=1, batch_size=32, window_stride=2, valid_stride=4,
    rates=[3e-4, 1e-3, 3e-3, 1e-2], seeds=[0, 1, 2],
)  # fmt: skip
QUICK = {**FULL, "horizons": [96, 720], "window_stride": 16, "valid_stride": 32, "rates": [3e-3], "seeds": [0]}


def timing_of(model: str) -> str:
    """Name of the run that times an epoch of a model."""
    return f"seconds per epoch|{model}"


class Job(NamedTuple):
    """One training run."""

    data: str
    horizon: int
    model: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.data}|H={self.horizon}|{self.model}|rate={self.rate:g}|seed={self.seed}"


def borders(name: str, rows: int) -> list[int]:
    """Where the parts of a set begin and end: 0, end of training, of validation, of test."""
    train, valid, test = SETS[name]["parts"]
    if train < 1:
        train, test = int(rows * train), int(rows * test)
        valid = rows - train - test
    return [0, train, train + valid, train + valid + test]


def read_scaled(folder: Path, name: str) -> tuple[np.ndarray, list[int]]:
    """Values (rows, channels) float32, scaled by the mean and deviation of the training part alone; its borders.

    Raises:
        FileNotFoundError: no such file.
        ValueError: too few rows, or other columns than the set has.
    """
    path = Path(folder) / f"{name}.csv"
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: --data is the folder that holds {', '.join(f'{n}.csv' for n in SETS)}")
    with open(path, newline="") as file:
        values = np.array([row[1:] for row in csv.reader(file)][1:], dtype=np.float64)
    channels, ends = SETS[name]["channels"], borders(name, len(values))
    needed = max(ends[-1], LOOK_BACK + max(FULL["horizons"]))
    if values.ndim != 2 or values.shape[1] != channels or len(values) < needed:
        raise ValueError(f"{path.name} should hold at least {needed} rows of {channels} columns, got {values.shape}")
    train = values[: ends[1]]
    return ((values - train.mean(0)) / train.std(0)).astype(np.float32), ends


def windows(values: np.ndarray, start: int, stop: int, horizon: int) -> tuple[np.ndarray, np.ndarray]:
    """Every window whose *targets* lie in rows start..stop-1: inputs (n, C, look-back), targets (n, C, horizon)."""
    view = values[max(0, start - LOOK_BACK) : stop]
    view = np.lib.stride_tricks.sliding_window_view(view, LOOK_BACK + horizon, axis=0)
    return view[..., :LOOK_BACK].copy(), view[..., LOOK_BACK:].copy()


def errors(prediction: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    assert prediction.shape == truth.shape, (prediction.shape, truth.shape)
    difference = prediction.astype(np.float64) - truth
    return {"mse": float(np.square(difference).mean()), "mae": float(np.abs(difference).mean())}


def seasonal_naive(x: np.ndarray, horizon: int, season: int) -> np.ndarray:
    """Repeat the last season: (n, C, look-back) -> (n, C, horizon)."""
    return x[..., -season:][..., np.arange(horizon) % season]


class Data:
    """Windows of one set at one horizon: ``x``, ``y`` of training and validation (``splits``), and of the test."""

    def __init__(self, folder: Path, name: str, horizon: int, window_stride: int, valid_stride: int) -> None:
        values, ends = read_scaled(folder, name)
        x, y = (part[::window_stride] for part in windows(values, *ends[:2], horizon))
        valid_x, valid_y = (part[::valid_stride] for part in windows(values, *ends[1:3], horizon))
        self.splits = list(range(len(x))), list(range(len(x), len(x) + len(valid_x)))
        self.x, self.y = np.concatenate([x, valid_x]), np.concatenate([y, valid_y])
        self.test_x, self.test_y = windows(values, *ends[2:], horizon)


def train(job: Job, folder: Path, plan: dict) -> dict:
    """One training run through tsai: validation and test errors, seconds of an epoch, parameters."""
    data = Data(folder, job.data, job.horizon, plan["window_stride"], plan["valid_stride"])
    import tsai.inference  # noqa: F401 (gives learners get_X_preds)
    from tsai.tslearner import TSForecaster

    from ts_ext.tsai import FitBar, jumbo_lr, jumbo_splitter

    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    model = build(job.model, data.x.shape[1], LOOK_BACK, job.horizon)
    watch = FitBar(None, "")
    jumbo = {**JUMBO, **VARIANTS}.get(job.model, {}).get("multiplier", 0) > 0
    with tempfile.TemporaryDirectory() as scratch:
        learner = TSForecaster(
            data.x,
            data.y,
            splits=data.splits,
            inplace=True,
            arch=model,
            bs=[plan["batch_size"], 256],
            seed=job.seed,
            path=scratch,
            cbs=watch,
            device=torch.device("cpu"),
            **(dict(splitter=jumbo_splitter) if jumbo else {}),
        )
        with learner.no_bar(), learner.no_logging():
            epochs = plan["epochs"] * MORE_EPOCHS.get(job.model, 1)
            learner.fit_one_cycle(epochs, jumbo_lr(job.rate, FFN_RATE_SCALE) if jumbo else job.rate)
            valid_mse = learner.recorder.values[-1][learner.recorder.metric_names.index("valid_loss") - 1]
            prediction = learner.get_X_preds(data.test_x, data.test_y, bs=256)[0]
    return {
        **job._asdict(),
        "valid_mse": float(valid_mse),
        **errors(prediction.numpy(), data.test_y),
        "seconds_per_epoch": sum(watch.seconds) / len(watch.seconds),
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "test_windows": len(prediction),
    }


def time_epoch(model: str, folder: Path, plan: dict) -> dict:
    """Seconds of an epoch of a model at the nearest horizon of ETTh1."""
    run = train(Job("ETTh1", plan["horizons"][0], model, plan["rates"][0], plan["seeds"][0]), folder, plan)
    return {"seconds_per_epoch": run["seconds_per_epoch"]}


def naive(folder: Path, name: str, horizon: int) -> dict:
    """Errors of the seasonal naive forecast over every test window."""
    values, ends = read_scaled(folder, name)
    x, y = windows(values, *ends[2:], horizon)
    return {**errors(seasonal_naive(x, horizon, SETS[name]["season"]), y), "test_windows": len(y)}


def settings(plan: dict, folder: Path) -> dict:
    """Everything that shapes the numbers, for the result file."""
    return {
        **plan,
        "size": SIZE,
        "look_back": LOOK_BACK,
        "sets": SETS,
        "models": MODELS,
        "jumbo": JUMBO,
        "smoothing": SMOOTHING,
        "more_epochs": MORE_EPOCHS,
        "ffn_rate_scale": FFN_RATE_SCALE,
        "data_sha256": {n: hashlib.sha256((Path(folder) / f"{n}.csv").read_bytes()).hexdigest() for n in SETS},
    }


def run_all(jobs: Iterable[Job], file: ResultFile, folder: Path, plan: dict, workers: int) -> None:
    """Run the jobs that the file lacks, saving each as it ends."""
    run_jobs(
        {job.name: (train, job, folder, plan) for job in jobs},
        file,
        workers,
        lambda name, run: f"{name}: MSE {run['mse']:.4f}, {run['seconds_per_epoch']:.1f} s an epoch",
    )


def chosen_rate(file: ResultFile, plan: dict, data: str, model: str) -> float:
    """The rate of the least validation error at the first horizon and seed. Test errors have no say."""
    first = [Job(data, plan["horizons"][0], model, rate, plan["seeds"][0]) for rate in plan["rates"]]
    return min(first, key=lambda job: file.runs[job.name]["valid_mse"]).rate


def summarise(file: ResultFile, plan: dict) -> list[dict]:
    """Mean and spread of each set, horizon and model over the seeds that the file has so far."""
    rows = []
    for data in SETS:
        for horizon in plan["horizons"]:
            found = file.runs[f"{data}|H={horizon}|{NAIVE}"]
            best = {key: (found[key], 0.0) for key in ("mse", "mae")}
            rows.append(dict(data=data, horizon=horizon, model=NAIVE, seeds=1, **best))
            for model in MODELS:
                rate = chosen_rate(file, plan, data, model)
                names = [Job(data, horizon, model, rate, seed).name for seed in plan["seeds"]]
                runs = [file.runs[name] for name in names if name in file.runs]
                spread = {key: mean_spread(run[key] for run in runs) for key in ("mse", "mae")}
                row = dict(data=data, horizon=horizon, model=model, seeds=len(runs), rate=rate, **spread)
                rows.append({**row, "parameters": runs[0]["parameters"]})
    return rows


def mean_ranks(rows: list[dict], key: str) -> dict[str, float]:
    """Mean over sets and horizons of a model's place by its mean error, 1 = least; ties share the mean place."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    lines = dict.fromkeys((row["data"], row["horizon"]) for row in rows)
    of = {(row["data"], row["horizon"], row["model"]): row[key][0] for row in rows}
    places = rankdata([[of[*line, name] for name in names] for line in lines], axis=1)
    return dict(zip(names, places.mean(axis=0).tolist(), strict=True))


def tables(rows: list[dict], file: ResultFile, plan: dict) -> str:
    """Errors, then what each model is and costs."""
    names, lines = [NAIVE, *MODELS], []
    for data, horizon in dict.fromkeys((row["data"], row["horizon"]) for row in rows):
        of_line = {row["model"]: row for row in rows if (row["data"], row["horizon"]) == (data, horizon)}
        least = {key: min(row[key][0] for row in of_line.values()) for key in ("mse", "mae")}
        cells = []
        for name in names:
            row, parts = of_line[name], []
            for key in ("mse", "mae"):
                text = f"**{row[key][0]:.3f}**" if row[key][0] == least[key] else f"{row[key][0]:.3f}"
                parts.append(text + (f" ± {row[key][1]:.3f}" if row["seeds"] > 1 and key == "mse" else ""))
            cells.append(" / ".join(parts))
        lines.append([data, horizon, *cells])
    ranks = {key: mean_ranks(rows, key) for key in ("mse", "mae")}
    lines.append(["mean rank", "", *(f"{ranks['mse'][name]:.2f} / {ranks['mae'][name]:.2f}" for name in names)])
    quality = markdown_table(["MSE / MAE", "horizon", *names], lines)

    near, far, lines = plan["horizons"][0], plan["horizons"][-1], []
    for model in MODELS:
        own = [row for row in rows if row["model"] == model]
        rates = [f"{next(r['rate'] for r in own if r['data'] == data):g}" for data in SETS]
        size = {row["horizon"]: row["parameters"] for row in own if row["data"] == "ETTh1"}
        scaled = f", FFN x {FFN_RATE_SCALE:g}" if JUMBO.get(model, {}).get("multiplier") else ""
        cost = [f"{size[near]:,}", f"{size[far]:,}", f"{file.runs[timing_of(model)]['seconds_per_epoch']:.1f}"]
        epochs = plan["epochs"] * MORE_EPOCHS.get(model, 1)
        lines.append([model, ", ".join(rates) + scaled, epochs, own[0]["seeds"], *cost])
    head = [
        "model",
        f"rates ({', '.join(SETS)})",
        "epochs",
        "seeds",
        f"parameters, H={near}",
        f"H={far}",
        "seconds per epoch",
    ]
    naive_of = "; ".join(f"{name}: {its['named']}" for name, its in SETS.items())
    return f"{quality}\n\n{markdown_table(head, lines)}\n\nSeasons of the naive forecast: {naive_of}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with ETTh1.csv and exchange_rate.csv")
    parser.add_argument("--quick", action="store_true", help="a few minutes: two horizons, one rate and seed")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, each on one thread. Default 1")
    arguments = outputs.parse(parser, "forecasting")
    plan = QUICK if arguments.quick else FULL
    file = ResultFile(arguments.out, settings(plan, arguments.data))

    near, (first, *others) = plan["horizons"][0], plan["seeds"]
    for data in SETS:
        for horizon in plan["horizons"]:
            name = f"{data}|H={horizon}|{NAIVE}"
            file.run(name, lambda d=data, h=horizon: naive(arguments.data, d, h))
    # Models take turns, so that a busy spell of the machine does not fall on one of them alone.
    grid = [Job(d, near, m, rate, first) for d in SETS for rate in plan["rates"] for m in MODELS]
    run_all(grid, file, arguments.data, plan, arguments.workers)
    rate_of = {(d, m): chosen_rate(file, plan, d, m) for d in SETS for m in MODELS}
    for seed in (first, *others):  # all have a seed more before any has two: an interrupted file stays fair
        jobs = [Job(d, h, m, rate_of[d, m], seed) for h in plan["horizons"] for d in SETS for m in MODELS]
        run_all(jobs, file, arguments.data, plan, arguments.workers)
    run_jobs(
        {timing_of(model): (time_epoch, model, arguments.data, plan) for model in MODELS},
        file,
        1,
        lambda name, run: f"{name}: {run['seconds_per_epoch']:.1f} s",
    )
    rows = summarise(file, plan)
    ranks = {key: mean_ranks(rows, key) for key in ("mse", "mae")}
    file.save(summary=rows, mean_rank=ranks, table=tables(rows, file, plan))
    print(file.content["table"])


if __name__ == "__main__":
    main()
