"""Forecast the columns of a CSV with JumboPatchTST through tsai.

    python plugins/timeseries/forecast_csv.py sales.csv --date-column date --horizon 28 --look-back 168 --out out/sales

The file has a column of dates, rising and evenly spaced, as text without time zones, and one numeric column per series.
Rows are split by time: the model trains on the first part, is watched on the second and tested on the last; every
number it is scaled by comes from the first part. OUT then holds

    predictions.csv   origin, date, column, forecast, truth: test windows one horizon apart, then the time to come
    metrics.json      errors over every test window in the file's own units, of all columns and of each, next to
                      repeating the last season
    forecast.png      the last test window and the forecast of what comes next
    models/model.pth  the weights (torch.load(…, weights_only=True)), its arguments are in metrics.json
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(arguments: list[str] | None = None) -> dict:
    options = parse(arguments)
    frame = read(options.csv, options.date_column, options.columns)
    values = frame.to_numpy(np.float64)
    window = options.look_back + options.horizon
    train_rows = round(len(frame) * (1 - options.valid_share - options.test_share))
    test_start = round(len(frame) * (1 - options.test_share))
    view = np.lib.stride_tricks.sliding_window_view(values, window, axis=0)  # (n, columns, window)
    # A window belongs to the part that holds all of its targets; those across a border are left out.
    first, last = np.arange(len(view)) + options.look_back, np.arange(len(view)) + window - 1
    borders = (0, train_rows, test_start, len(frame))
    train, valid, test = (np.flatnonzero((first >= a) & (last < b)).tolist() for a, b in pairwise(borders))
    for name, part in (("training", train), ("validation", valid), ("test", test)):
        if not part:
            raise SystemExit(
                f"no {name} window: {len(frame)} rows, parts end at rows {borders[1:]}, a window needs "
                f"{options.look_back} + {options.horizon} rows; shorten --look-back or --horizon or change the shares"
            )

    mean, std = values[:train_rows].mean(axis=0), values[:train_rows].std(axis=0)
    std = np.where(std > 0, std, 1)
    scaled = ((view - mean[:, None]) / std[:, None]).astype(np.float32)
    x, y = scaled[..., : options.look_back].copy(), scaled[..., options.look_back :].copy()
    config = dict(
        patch_len=options.patch_len,
        stride=options.stride,
        multiplier=options.multiplier,
        registers=options.registers,
        d_model=options.d_model,
        n_layers=options.n_layers,
        n_heads=options.n_heads,
        d_ff=options.d_ff,
        dropout=options.dropout,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    newest = ((values[-options.look_back :].T - mean[:, None]) / std[:, None]).astype(np.float32)[None]
    forecast, future, parameters = fit(x, y, (train, valid, test), newest, config, options)
    forecast, future = forecast * std[:, None] + mean[:, None], future * std[:, None] + mean[:, None]
    truth = view[test][..., options.look_back :]
    steps = np.arange(options.horizon) % options.season - options.season
    naive = view[test][..., : options.look_back][..., steps]
    forecasts = {"JumboPatchTST": forecast, f"repeat last {options.season} rows": naive}
    table = predictions(frame, first[test], forecast, truth, future, options.horizon)
    table.to_csv(options.out / "predictions.csv", index=False)
    metrics = {
        "rows": len(frame),
        "split": {"train_rows": train_rows, "test_starts": str(frame.index[test_start])},
        "windows": {"train": len(train), "valid": len(valid), "test": len(test)},
        "model": dict(c_in=len(mean), c_out=len(mean), seq_len=options.look_back, pred_dim=options.horizon, **config),
        "parameters": parameters,
        "scaling": {"mean": mean.tolist(), "std": std.tolist()},
        "test": {name: errors(made, truth) for name, made in forecasts.items()},
        "test_by_column": {
            name: {column: errors(made[:, c], truth[:, c]) for c, column in enumerate(frame.columns)}
            for name, made in forecasts.items()
        },
    }
    (options.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    draw(frame, table, options)
    for name, found in metrics["test"].items():
        print(f"{name}: MAE {found['mae']:.4g}, MSE {found['mse']:.4g} over {len(test)} test windows")
    print(f"wrote {options.out}/predictions.csv, metrics.json, forecast.png, models/model.pth")
    return metrics


def fit(
    x: np.ndarray,
    y: np.ndarray,
    parts: tuple[list[int], list[int], list[int]],
    newest: np.ndarray,
    config: dict,
    options: argparse.Namespace,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Train and save; scaled forecasts of the test windows (n, columns, horizon) and of the newest, parameters."""
    # Here and not above, so that --help and bad arguments are answered at once.
    import torch
    import tsai.inference  # noqa: F401 (gives learners get_X_preds)
    from rich.progress import Progress
    from tsai.tslearner import TSForecaster

    from ts_ext.tsai import FitBar, JumboPatchTST, jumbo_lr, jumbo_splitter

    train, valid, test = parts
    with Progress() as progress:
        learner = TSForecaster(
            x, y, splits=(train, valid), arch=JumboPatchTST, arch_config=config, splitter=jumbo_splitter,
            bs=[options.batch_size, 256], seed=options.seed, path=options.out, device=torch.device(options.device),
            drop_last=len(train) > options.batch_size, cbs=FitBar(progress, "training"),
        )  # fmt: skip
        with learner.no_bar(), learner.no_logging():
            learner.fit_one_cycle(options.epochs, jumbo_lr(options.lr))
            forecast = learner.get_X_preds(x[test], bs=256)[0].numpy()
            future = learner.get_X_preds(newest)[0].numpy()[0]
    learner.save("model", with_opt=False)
    return forecast, future, sum(p.numel() for p in learner.model.parameters())


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--date-column", default="date", help="default: date")
    parser.add_argument("--columns", nargs="+", help="columns to forecast (default: every other column)")
    parser.add_argument("--horizon", type=int, default=24, help="rows to forecast (default 24)")
    parser.add_argument("--look-back", type=int, default=96, help="rows the model sees (default 96)")
    parser.add_argument("--season", type=int, default=24, help="rows of a season, for the naive forecast (default 24)")
    parser.add_argument("--valid-share", type=float, default=0.1)
    parser.add_argument("--test-share", type=float, default=0.2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak rate; the Jumbo FFN gets 0.3 of it")
    parser.add_argument("--multiplier", type=int, default=6, help="J, width of the Jumbo token in patches; 0 = none")
    parser.add_argument("--registers", type=int, default=0)
    parser.add_argument("--patch-len", type=int, default=16)
    parser.add_argument("--stride", type=int, default=8)
    parser.add_argument("--d-model", type=int, default=32)
    parser.add_argument("--n-layers", type=int, default=3)
    parser.add_argument("--n-heads", type=int, default=4)
    parser.add_argument("--d-ff", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("out/forecast"))
    options = parser.parse_args(arguments)
    at_least_one = ("horizon", "look_back", "season", "epochs", "batch_size", "patch_len", "stride", "d_model")
    for name in (*at_least_one, "n_layers", "n_heads", "d_ff", "multiplier", "registers"):
        least = 0 if name in ("multiplier", "registers") else 1
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    if not 0 < options.lr < np.inf:
        parser.error(f"--lr must be above 0, got {options.lr}")
    if not 0 <= options.dropout < 1:
        parser.error(f"--dropout must be at least 0 and below 1, got {options.dropout}")
    if options.d_model % options.n_heads:
        parser.error(f"--d-model {options.d_model} is not divisible by --n-heads {options.n_heads}: choose a divisor")
    if options.patch_len > options.look_back:
        parser.error(f"--patch-len {options.patch_len} is longer than --look-back {options.look_back}")
    if options.stride > options.patch_len:
        parser.error(f"--stride {options.stride} is longer than --patch-len {options.patch_len}: rows would be skipped")
    if options.season > options.look_back:
        parser.error(f"--season {options.season} is longer than --look-back {options.look_back}")
    if not 0 < options.valid_share < 1 or not 0 < options.test_share < 1 - options.valid_share:
        parser.error(f"shares must leave rows to train on, got {options.valid_share} and {options.test_share}")
    return options


def read(path: Path, date_column: str, columns: list[str] | None) -> pd.DataFrame:
    """The numeric columns, indexed by date; anything the model could not honestly use is an error."""
    frame = pd.read_csv(path)
    wanted = columns or [c for c in frame.columns if c != date_column]
    repeated = sorted({c for c in wanted if wanted.count(c) > 1})
    if repeated:
        raise SystemExit(f"--columns names {repeated} more than once: name every column once")
    if date_column in wanted:
        raise SystemExit(f"--columns names {date_column!r}, the column of dates: leave it out or set --date-column")
    absent = [c for c in (date_column, *wanted) if c not in frame.columns]
    if absent:
        raise SystemExit(f"{path} has no column {absent}; it has {list(frame.columns)}")
    if not wanted:
        raise SystemExit(f"{path} has no column beside {date_column!r}: there is nothing to forecast")
    dates = read_dates(frame[date_column])
    frame = frame[wanted].set_axis(dates, axis=0)
    words = [c for c in wanted if not pd.api.types.is_numeric_dtype(frame[c])]
    if words:
        raise SystemExit(f"columns {words} are not numeric: choose others with --columns")
    missing = frame.isna() | ~np.isfinite(frame)
    if missing.to_numpy().any():
        row, column = np.argwhere(missing.to_numpy())[0]
        raise SystemExit(
            f"{int(missing.to_numpy().sum())} missing values, the first in {wanted[column]} at {dates[row]}: fill them "
            f"first (from earlier rows, frame.ffill(), nothing leaks into the past)"
        )
    if dates.has_duplicates:
        raise SystemExit(f"{date_column} {dates[dates.duplicated()][0]} appears more than once")
    if not dates.is_monotonic_increasing:
        back = int(np.flatnonzero(np.diff(dates.to_numpy()) < np.timedelta64(0))[0]) + 1
        raise SystemExit(f"{date_column} goes back at data row {back + 1} ({dates[back]}): sort the file by date")
    if len(dates) < 3 or pd.infer_freq(dates) is None:
        raise SystemExit(f"{date_column} is not evenly spaced: resample the file first (frame.resample(…))")
    return frame


def read_dates(column: pd.Series) -> pd.DatetimeIndex:
    """Text as dates; nothing is guessed from numbers, and nothing that is no date is passed over."""
    name, advice = column.name, "write dates as text such as 2024-01-31 or 2024-01-31 18:00:00"
    if pd.api.types.is_numeric_dtype(column):
        raise SystemExit(f"{name} holds numbers ({column.iloc[0] if len(column) else 'no row'}), not dates: {advice}")
    zones = f"{name} has time zones ({column.iloc[0]}): convert to one, for example UTC, and write dates without it"
    try:
        dates = pd.to_datetime(column, errors="coerce")
    except ValueError as error:  # zones that change within the file
        raise SystemExit(f"{zones} ({error})") from None
    if dates.dt.tz is not None:
        raise SystemExit(zones)
    if dates.isna().any():
        row = int(np.flatnonzero(dates.isna())[0])
        raise SystemExit(f"{name} {column.iloc[row]!r} in data row {row + 1} is not a date like those before: {advice}")
    return pd.DatetimeIndex(dates)


def predictions(
    frame: pd.DataFrame, origins: np.ndarray, forecast: np.ndarray, truth: np.ndarray, future: np.ndarray, horizon: int
) -> pd.DataFrame:
    """Test windows one horizon apart, counted back from the last row, then the time after the last row."""
    after = pd.date_range(frame.index[-1], periods=horizon + 1, freq=pd.infer_freq(frame.index))[1:]
    dates, shown = frame.index, sorted(range(len(origins) - 1, -1, -horizon))
    blocks = [(dates[origins[i] : origins[i] + horizon], forecast[i], truth[i]) for i in shown]
    blocks.append((after, future, np.full_like(future, np.nan)))
    parts = [
        pd.DataFrame(
            {"origin": when[0], "date": when, "column": column, "forecast": guess[c], "truth": came[c]}
        )
        for when, guess, came in blocks
        for c, column in enumerate(frame.columns)
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


def errors(forecast: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    return {"mae": float(np.abs(forecast - truth).mean()), "mse": float(np.square(forecast - truth).mean())}


def draw(frame: pd.DataFrame, table: pd.DataFrame, options: argparse.Namespace) -> None:
    names = list(frame.columns)[:8]
    size = (10, 2.4 * len(names) + 0.6)
    figure, axes = plt.subplots(len(names), 1, figsize=size, layout="constrained", squeeze=False)
    shown = frame.iloc[-(options.look_back + options.horizon) :]
    for axis, name in zip(axes[:, 0], names, strict=True):
        axis.plot(shown.index, shown[name], color="0.4", label="file")
        rows = table[(table["column"] == name) & (table["date"] >= shown.index[0])]
        for number, (_, part) in enumerate(list(rows.groupby("origin"))[-2:]):
            label = ("last test window", "what comes next")[number]
            axis.plot(part["date"], part["forecast"], color=("tab:blue", "tab:red")[number], label=label)
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    axes[0, 0].legend(loc="upper left", fontsize=8)
    if len(names) < len(frame.columns):
        figure.suptitle(f"the first {len(names)} of {len(frame.columns)} columns; predictions.csv has them all")
    figure.savefig(options.out / "forecast.png", dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
