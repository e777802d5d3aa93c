"""Demo part (c): a real series forecast through tsai, against tsai's own PatchTST and last year's values.

``python -m demo.forecast`` runs this part alone.
"""

from __future__ import annotations

import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import torch
import tsai.inference  # noqa: F401 (gives learners get_X_preds)
from fastai.learner import load_learner
from rich.progress import Progress
from statsmodels.datasets import co2
from torch import nn
from tsai.models.PatchTST import PatchTST
from tsai.tslearner import TSForecaster

from demo.rows import Row
from jumbo_core.measure.turns import median_ms
from ts_ext.tsai import FitBar, JumboPatchTST, jumbo_lr, jumbo_splitter

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LOOK_BACK, HORIZON, YEAR = 104, 26, 52  # weeks
VALID, TEST = 260, 416  # the last weeks, as targets: five years to choose the rate, then eight to test
SIZE = dict(patch_len=16, stride=8, d_model=32, n_layers=3, n_heads=4, d_ff=64, dropout=0.1)
EPOCHS, BATCH, RATES = 8, 32, (1e-3, 3e-3)
JUMBO, PATCHTST, NAIVE = "JumboPatchTST", "tsai PatchTST", "seasonal naive (last year)"


def run(out: Path, *, seed: int = 0) -> tuple[list[Row], dict[str, Path]]:
    """Train both models at equal width, depth and budget, with the same two learning rates to choose from.

    The better learner of each is exported and loaded again; the loaded one forecasts the last eight years.

    Args:
        out: folder for the exported learners and the picture.
        seed: of the weights and the order of the windows.

    Returns:
        One row per baseline for the closing table, and the picture by name: {"forecast": …}.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    series = weekly_co2()
    x, y, split = windows(series.to_numpy(np.float32))
    contenders = {JUMBO: JumboPatchTST, PATCHTST: PatchTST}
    fitted = {}
    with Progress() as progress:
        for name, arch in contenders.items():
            runs = [fit(arch, rate, x, y, split, out, seed, progress, name) for rate in RATES]
            best = min(runs, key=lambda found: found[0])[1]
            fitted[name] = save_and_reload(best, out / f"{arch.__name__}.pkl")

    test = split[2]
    predictions = {name: predict(learner, x[test], y[test]) for name, learner in fitted.items()}
    predictions[NAIVE] = x[test][..., -YEAR : HORIZON - YEAR]
    mae = {name: float(np.abs(values - y[test]).mean()) for name, values in predictions.items()}
    milliseconds = time_per_window({name: learner.model for name, learner in fitted.items()}, x[test][:BATCH])
    for name, value in mae.items():
        print(f"forecast: {name}: mean error {value:.3f} ppm over {len(test)} test windows")
    rows = [
        Row(
            task=f"forecast (CO2, {HORIZON} weeks)",
            host="tsai",
            baseline=baseline,
            metric="MAE in ppm",
            better="lower",
            baseline_quality=mae[baseline],
            jumbo_quality=mae[JUMBO],
            baseline_ms=milliseconds.get(baseline, float("nan")),
            jumbo_ms=milliseconds[JUMBO],
        )
        for baseline in (PATCHTST, NAIVE)
    ]
    return rows, {"forecast": draw(series, predictions, mae, out / "forecast.png")}


def weekly_co2() -> pd.Series:
    """Weekly CO2 in the air over Mauna Loa, 1958 to 2001, in ppm (ships inside statsmodels; 2,284 weeks).

    59 weeks are missing; they repeat the last value before them, never one from after.
    """
    return co2.load_pandas().data["co2"].ffill()


def windows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[list[int], list[int], list[int]]]:
    """Inputs (n, 1, look-back), targets (n, 1, horizon) and the indices of train, valid and test windows, in time.

    A window belongs to the part that holds *all* of its targets; windows across a border are left out, so that no
    target of training or validation is a target of a later part.
    """
    view = np.lib.stride_tricks.sliding_window_view(values, LOOK_BACK + HORIZON)[:, None]
    first_target = np.arange(len(view)) + LOOK_BACK
    last_target = first_target + HORIZON - 1
    borders = [0, len(values) - TEST - VALID, len(values) - TEST, len(values)]
    split = tuple(
        np.flatnonzero((first_target >= start) & (last_target < stop)).tolist() for start, stop in pairwise(borders)
    )
    return view[..., :LOOK_BACK].copy(), view[..., LOOK_BACK:].copy(), split


def fit(
    arch: type[nn.Module],
    rate: float,
    x: np.ndarray,
    y: np.ndarray,
    split: tuple[list[int], list[int], list[int]],
    out: Path,
    seed: int,
    progress: Progress,
    name: str,
) -> tuple[float, TSForecaster]:
    """Validation error and the trained learner."""
    rates = dict(splitter=jumbo_splitter) if arch is JumboPatchTST else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        learner = TSForecaster(
            x,
            y,
            splits=split[:2],
            arch=arch,
            arch_config=SIZE,
            bs=[BATCH, 256],
            seed=seed,
            path=out,
            cbs=FitBar(progress, f"forecast: {name}, rate {rate:g}"),
            device=torch.device("cpu"),
            **rates,
        )
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(EPOCHS, jumbo_lr(rate) if rates else rate)
    valid_x, valid_y = x[split[1]], y[split[1]]
    return float(np.abs(predict(learner, valid_x, valid_y) - valid_y).mean()), learner


def save_and_reload(learner: TSForecaster, path: Path) -> TSForecaster:
    """The learner that ``load_learner`` makes from what ``learner.export`` wrote."""
    learner.export(path.resolve())
    with warnings.catch_warnings():
        # fastai warns that a learner's file can run code. This one was written by the line above.
        warnings.filterwarnings("ignore", message="load_learner", category=UserWarning)
        return load_learner(path)


def predict(learner: TSForecaster, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Forecasts (n, 1, horizon) of every window, in ppm."""
    with learner.no_bar(), learner.no_logging():
        return learner.get_X_preds(x, y, bs=256)[0].numpy()


def time_per_window(models: dict[str, nn.Module], batch: np.ndarray) -> dict[str, float]:
    """Milliseconds per window in batches, see :func:`median_ms`."""
    batch = torch.from_numpy(batch)
    return median_ms({name: partial(model.eval(), batch) for name, model in models.items()}, samples=len(batch))


def draw(series: pd.Series, predictions: dict[str, np.ndarray], mae: dict[str, float], path: Path) -> Path:
    """The last test window: two years of history, half a year of truth, and the three forecasts."""
    dates, values = series.index[-LOOK_BACK - HORIZON :], series.to_numpy()[-LOOK_BACK - HORIZON :]
    figure, axis = plt.subplots(figsize=(10, 4.2), layout="constrained")
    axis.plot(dates[: LOOK_BACK + 1], values[: LOOK_BACK + 1], color="0.55", label="history")
    axis.plot(dates[LOOK_BACK:], values[LOOK_BACK:], color="black", linewidth=2, label="what came")
    colors = {JUMBO: "tab:red", PATCHTST: "tab:blue", NAIVE: "tab:green"}
    for name, color in colors.items():
        style = "--" if name == NAIVE else "-"
        axis.plot(
            dates[LOOK_BACK:], predictions[name][-1, 0], style, color=color, label=f"{name} (MAE {mae[name]:.2f})"
        )
    axis.axvline(dates[LOOK_BACK], color="0.8", linewidth=1, zorder=0)
    axis.set_ylabel("CO2, ppm")
    axis.set_title(f"Weekly CO2 at Mauna Loa: the last {HORIZON} weeks, MAE over the last eight years", fontsize=11)
    axis.legend(fontsize=9, loc="upper left")
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


if __name__ == "__main__":
    for row in run(Path("out/demo/forecast"))[0]:
        print(*row.cells(), sep=" | ")
