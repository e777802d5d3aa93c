"""ETTh1, look-back 336, horizon 96: JumboPatchTST against registers, tsai's PatchTST and a seasonal naive forecast.

``python -m benchmarks.etth1 --data PATH/ETTh1.csv --out docs/results/etth1.json``

The usual protocol: 12/4/4 months of hourly values; validation and test windows look back into the part before; values
scaled by the training months' mean and deviation; all seven channels; errors over every test window, the last partial
batch included. All models have PatchTST's small ETTh1 width and depth and train through the same tsai learner for the
same number of epochs; the learning rate of each is the best of the same grid by validation error at the first seed. An
interrupted run picks up where it stopped.

Two things are not equal, and the table says so. At the same width Jumbo's shared FFN, and a head that reads J slices,
about double the parameters. And the Jumbo FFN learns at 0.3 of the rate: a fixed choice, not tuned here, which the
others have no part to apply to. Seconds are kept with each run of the result file, but they are no comparison where
other work shared the machine.
"""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import tempfile
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress

from jumbo_core.measure.report import ResultFile, markdown_table, mean_spread

TRAIN, VALID, TEST = 8640, 2880, 2880  # hours: 12, 4 and 4 months of 30 days
LOOK_BACK, HORIZON, SEASON = 336, 96, 24
SIZE = dict(patch_len=16, stride=8, d_model=16, n_layers=3, n_heads=4, d_ff=128, dropout=0.3)
MODELS = {
    "JumboPatchTST J=6": dict(multiplier=6),
    "ViT + 16 registers": dict(multiplier=0, registers=16),
    "tsai PatchTST": None,
}
FFN_RATE_SCALE = 0.3  # rate of the Jumbo FFN over the rate of all else; a fixed choice
# 256 steps: every second of the heavily overlapping training windows, twice.
FULL = dict(epochs=2, batch_size=32, window_stride=2, rates=[1e-3, 3e-3, 1e-2], seeds=[0, 1, 2])
QUICK = dict(epochs=1, batch_size=32, window_stride=16, rates=[3e-3], seeds=[0])


def read_scaled(path: Path) -> np.ndarray:
    """The seven columns (hours, 7) float32, scaled by the mean and deviation of the training months alone."""
    with open(path, newline="") as file:
        rows = list(csv.reader(file))
    values = np.array([row[1:] for row in rows[1:]], dtype=np.float64)
    if len(values) < TRAIN + VALID + TEST or values.shape[1] != 7:
        raise ValueError(f"{path} should hold at least {TRAIN + VALID + TEST} hours of 7 columns, got {values.shape}")
    train = values[:TRAIN]
    return ((values - train.mean(0)) / train.std(0)).astype(np.float32)


def windows(values: np.ndarray, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Every window whose *targets* lie in hours start..stop-1: inputs (n, 7, look-back), targets (n, 7, horizon)."""
    first = max(0, start - LOOK_BACK)
    view = np.lib.stride_tricks.sliding_window_view(values[first:stop], LOOK_BACK + HORIZON, axis=0)
    return view[..., :LOOK_BACK].copy(), view[..., LOOK_BACK:].copy()


def errors(prediction: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    assert prediction.shape == truth.shape, (prediction.shape, truth.shape)
    difference = prediction.astype(np.float64) - truth
    return {"mse": float(np.square(difference).mean()), "mae": float(np.abs(difference).mean())}


def seasonal_naive(x: np.ndarray) -> np.ndarray:
    """Repeat the last day: (n, 7, look-back) -> (n, 7, horizon)."""
    return x[..., -SEASON:][..., np.arange(HORIZON) % SEASON]


class Data:
    def __init__(self, path: Path, window_stride: int) -> None:
        values = read_scaled(path)
        x, y = windows(values, 0, TRAIN)
        valid_x, valid_y = windows(values, TRAIN, TRAIN + VALID)
        x, y = x[::window_stride], y[::window_stride]
        self.splits = list(range(len(x))), list(range(len(x), len(x) + len(valid_x)))
        self.x, self.y = np.concatenate([x, valid_x]), np.concatenate([y, valid_y])
        self.test_x, self.test_y = windows(values, TRAIN + VALID, TRAIN + VALID + TEST)


def train(
    model: str, rate: float, seed: int, data: Data, epochs: int, batch_size: int, progress: Progress, folder: str
) -> dict:
    """One training run through tsai: validation and test errors, seconds of an epoch, parameters."""
    import tsai.inference  # noqa: F401 (gives learners get_X_preds)
    from tsai.models.PatchTST import PatchTST
    from tsai.tslearner import TSForecaster

    from ts_ext.tsai import FitBar, JumboPatchTST, jumbo_lr, jumbo_splitter

    options = MODELS[model]
    watch = FitBar(progress, f"{model}, rate {rate:g}, seed {seed}")
    jumbo = dict(splitter=jumbo_splitter) if options and options["multiplier"] else {}
    learner = TSForecaster(
        data.x,
        data.y,
        splits=data.splits,
        inplace=True,
        arch=PatchTST if options is None else JumboPatchTST,
        arch_config={**SIZE, **(options or {})},
        bs=[batch_size, 256],
        seed=seed,
        path=folder,
        cbs=watch,
        device=torch.device("cpu"),
        **jumbo,
    )
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(epochs, jumbo_lr(rate, FFN_RATE_SCALE) if jumbo else rate)
        valid_mse = learner.recorder.values[-1][learner.recorder.metric_names.index("valid_loss") - 1]
        prediction = learner.get_X_preds(data.test_x, data.test_y, bs=256)[0]
    return {
        "model": model,
        "rate": rate,
        "seed": seed,
        "valid_mse": float(valid_mse),
        **errors(prediction.numpy(), data.test_y),
        "seconds_per_epoch": sum(watch.seconds) / len(watch.seconds),
        "parameters": sum(p.numel() for p in learner.model.parameters() if p.requires_grad),
        "test_windows": len(prediction),
    }


def settings(plan: dict, data: Path) -> dict:
    """Everything that shapes the numbers, for the result file. The learning rates may grow: each run names its own."""
    return {
        **plan,
        "size": SIZE,
        "look_back": LOOK_BACK,
        "horizon": HORIZON,
        "models": MODELS,
        "ffn_rate_scale": FFN_RATE_SCALE,
        "data_sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
    }


def label(model: str) -> str:
    """Name of a model in the table, with what is special about its training."""
    return f"{model}, FFN rate x {FFN_RATE_SCALE:g}" if (MODELS[model] or {}).get("multiplier") else model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="ETTh1.csv")
    parser.add_argument("--out", type=Path, default=Path("docs/results/etth1.json"), help="result file (resumed)")
    parser.add_argument(
        "--quick", action="store_true", help="one seed, one rate, every 16th window: about a minute on an idle core"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads. Default 1")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    plan = QUICK if arguments.quick else FULL
    result = ResultFile(arguments.out, settings(plan, arguments.data))
    data = Data(arguments.data, plan["window_stride"])

    naive = result.run("seasonal naive", lambda: errors(seasonal_naive(data.test_x), data.test_y))
    chosen = {}
    with Progress() as progress, tempfile.TemporaryDirectory() as folder:
        total = progress.add_task("runs", total=len(MODELS) * (len(plan["rates"]) + len(plan["seeds"]) - 1))

        def run(model: str, rate: float, seed: int) -> dict:
            one = functools.partial(
                train, model, rate, seed, data, plan["epochs"], plan["batch_size"], progress, folder
            )
            done = result.run(f"{model} rate={rate:g} seed={seed}", one)
            progress.advance(total)
            return done

        # Models take turns, so that a busy spell of the machine does not fall on one of them alone.
        for rate in plan["rates"]:
            for model in MODELS:
                found = run(model, rate, plan["seeds"][0])
                chosen[model] = min(chosen.get(model, found), found, key=lambda r: r["valid_mse"])
        runs = {model: [best] for model, best in chosen.items()}
        for seed in plan["seeds"][1:]:
            for model in MODELS:
                runs[model].append(run(model, chosen[model]["rate"], seed))

    summary = {"seasonal naive": naive}
    rows = [["seasonal naive (24 h)", "", f"{naive['mse']:.4f}", f"{naive['mae']:.4f}", ""]]
    least = min(parts[0]["parameters"] for parts in runs.values())
    for model, parts in runs.items():
        spread = {k: mean_spread(part[k] for part in parts) for k in ("mse", "mae")}
        parameters = parts[0]["parameters"]
        summary[model] = {"rate": chosen[model]["rate"], "parameters": parameters, **spread}
        quality = [f"{spread[k][0]:.4f} ± {spread[k][1]:.4f}" for k in ("mse", "mae")]
        rate = f"{chosen[model]['rate']:g}"
        rows.append([label(model), rate, *quality, f"{parameters:,} ({parameters / least:.2f} x)"])
    table = markdown_table(["model", "rate", "test MSE", "test MAE", "parameters"], rows)
    result.save(summary=summary, table=table)
    print(table)


if __name__ == "__main__":
    main()
