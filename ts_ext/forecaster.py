"""A pandas frame in, forecasts with timestamps out: JumboPatchTST trained by tsai, split by time without leakage."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import torch

from jumbo_core import checks
from jumbo_core.models.series import num_patches
from ts_ext.forecasts import Forecaster, scale
from ts_ext.frames import TimeFrame, default_targets, read_frame
from ts_ext.losses import ObservedMSELoss, PinballLoss, check_quantiles
from ts_ext.options import check_choice
from ts_ext.patchtst import JumboPatchTST
from ts_ext.values import MISSING, refuse_exogenous

SIZE = dict(d_model=32, n_heads=4, d_ff=64, dropout=0.1)  # what a few thousand windows can feed
FIXED = ("c_in", "c_out", "seq_len", "pred_dim", "head", "target_channels", "custom_head", "exogenous")


def jumbo_forecaster(
    frame: pd.DataFrame,
    *,
    horizon: int,
    look_back: int,
    time: str | None = None,
    targets: Sequence[str] | None = None,
    covariates: Sequence[str] = (),
    freq: Any = None,
    valid_share: float = 0.1,
    test_share: float = 0.2,
    quantiles: Sequence[float] | None = None,
    missing: str = "error",
    epochs: int = 10,
    batch_size: int = 32,
    lr: float = 3e-3,
    seed: int = 0,
    device: str | torch.device = "cpu",
    progress: bool = False,
    **model: Any,
) -> Forecaster:
    """Train on the oldest rows of a frame, watch on the next, keep the newest for a test, forecast what comes after.

    No leakage: scaling comes from the training rows, a window belongs to the part that holds all of its targets, and
    nothing is chosen by what comes later (no early stopping: the validation loss is only shown). A change of rows after
    the training part changes no weight, and no forecast made before them.

    Args:
        frame: one row per time step, oldest first, evenly spaced.
        horizon, look_back: rows to forecast, rows a forecast reads (not less than a patch, 16 by default).
        time: the column of times. Default: the index, a DatetimeIndex.
        targets: columns to forecast. Default: every one but ``time`` and ``covariates``.
        covariates: columns whose past informs the forecasts; needs ``channels="mixing"``.
        freq: the step between rows. Default: inferred.
        valid_share, test_share: of the rows. Default 0.1 and 0.2; the test may be 0.
        quantiles: rising probabilities to forecast instead of the mean, trained with the pinball loss.
        missing: NaN is an error (default), or with "mask" a missing value: left out of statistics, of the loss and, if
            a patch holds nothing else, of attention. A window with a column without any value is an error all the same.
        epochs, batch_size, lr: of tsai's one-cycle training; the Jumbo FFN learns at 0.3 of the rate.
        seed: of weights and order; tsai sets the global one.
        device: where to train and forecast. Default "cpu".
        progress: show fastai's table of epochs. Default False.
        **model: arguments of :class:`JumboPatchTST`. Default sizes: d_model=32, n_heads=4, d_ff=64, dropout=0.1.

    Returns:
        Forecaster: ``.predict()``, ``.backtest()``, ``.metrics()``.

    Raises:
        ImportError: tsai is not installed.
        TypeError: no frame; an argument the model does not have (exogenous ones are told what takes their place).
        ValueError: a frame that can not be used (see :func:`ts_ext.frames.read_frame`), a part without a window, a
            horizon of 0, a window shorter than a patch, covariates that could inform nothing.
    """
    horizon, look_back = checks.integer("horizon", horizon), checks.integer("look_back", look_back)
    epochs, batch_size = checks.integer("epochs", epochs), checks.integer("batch_size", batch_size)
    lr, valid_share = checks.positive("lr", lr), checks.rate("valid_share", valid_share)
    test_share, missing = checks.rate("test_share", test_share), check_choice("missing", missing, MISSING)
    options = {**SIZE, **_check_model(model), "missing": missing}
    options = {k: v.item() if isinstance(v, np.generic) else v for k, v in options.items()}  # they go into a file
    num_patches(look_back, options.get("patch_len", 16), options.get("stride", 8))
    if isinstance(targets, str) or isinstance(covariates, str):
        raise TypeError(f"targets and covariates are lists of columns, got {targets!r} and {covariates!r}")
    covariates = list(covariates)
    targets = [c for c in default_targets(frame, time) if c not in covariates] if targets is None else list(targets)
    if not targets:
        raise ValueError(f"no column to forecast beside {[c for c in (time, *covariates) if c is not None]}")
    if covariates and options.get("channels") != "mixing":
        raise ValueError(f"covariates {covariates} inform nothing while channels are independent: channels='mixing'")
    columns = [*targets, *covariates]
    data = read_frame(frame, columns, time, missing, freq)
    borders = _borders(len(data.times), valid_share, test_share)
    parts = _parts(len(data.times), look_back, horizon, borders)
    _check_windows(data, columns, look_back, parts)
    mean, std = _statistics(data.values[: borders[1]], columns, data.times[borders[1] - 1])

    view = np.lib.stride_tricks.sliding_window_view(data.values, look_back + horizon, axis=0).swapaxes(1, 2)
    scaled = np.ascontiguousarray(scale(view, mean, std))  # (n, columns, window)
    x, y = scaled[..., :look_back].copy(), scaled[:, : len(targets), look_back:].copy()
    if len(targets) != len(columns):
        options["target_channels"] = list(range(len(targets)))
    loss = ObservedMSELoss(missing=missing)
    if quantiles is not None:
        options["quantiles"] = check_quantiles(quantiles)
        loss = PinballLoss(quantiles, missing=missing)
    learner = _fit(x, y, parts[:2], options, loss, batch_size, epochs, lr, seed, torch.device(device), progress)
    arguments = dict(options, c_in=len(columns), c_out=len(targets), seq_len=look_back, pred_dim=horizon)
    return Forecaster(
        learner.model,
        arguments,
        targets=targets,
        columns=columns,
        time=time,
        mean=mean,
        std=std,
        freq=data.freq,
        learner=learner,
        data=data,
        borders=borders,
        ignored=[c for c in default_targets(frame, time) if c not in columns],
    )


def _fit(x, y, parts, options, loss, batch_size, epochs, lr, seed, device, progress) -> Any:
    """Train with tsai."""
    from ts_ext.tsai import jumbo_lr, jumbo_splitter  # with the message of a missing tsai

    from tsai.data.core import TSForecasting  # isort: skip
    from tsai.tslearner import TSForecaster  # isort: skip

    learner = TSForecaster(
        x, y, splits=parts, tfms=[None, TSForecasting()],  # show_results decodes targets of several steps with it
        arch=JumboPatchTST, arch_config=options, splitter=jumbo_splitter, loss_func=loss,
        bs=[batch_size, 256], seed=seed, device=device, drop_last=len(parts[0]) > batch_size,
    )  # fmt: skip
    if progress:
        learner.fit_one_cycle(epochs, jumbo_lr(lr))
    else:
        with learner.no_bar(), learner.no_logging():
            learner.fit_one_cycle(epochs, jumbo_lr(lr))
    return learner


def _check_model(model: dict[str, Any]) -> dict[str, Any]:
    known = [name for name in inspect.signature(JumboPatchTST).parameters if name not in ("self", "exogenous")]
    refuse_exogenous([name for name in model if name not in known])
    fixed = [name for name in model if name in FIXED]
    if fixed:
        raise TypeError(f"{fixed} follow from the frame, horizon, look_back and targets: leave them out")
    return model


def _borders(rows: int, valid_share: float, test_share: float) -> list[int]:
    """Where the parts begin and end: 0, end of training, end of validation, end."""
    if not 0 < valid_share or not valid_share + test_share < 1:
        raise ValueError(
            f"valid_share must be above 0 and leave rows to train on beside test_share, "
            f"got {valid_share} and {test_share}"
        )
    return [0, round(rows * (1 - valid_share - test_share)), round(rows * (1 - test_share)), rows]


def _parts(rows: int, look_back: int, horizon: int, borders: list[int]) -> list[list[int]]:
    """Windows of each part: a window belongs to the part that holds all of its targets, else to none."""
    count = rows - look_back - horizon + 1
    first = np.arange(max(count, 0)) + look_back
    parts = [np.flatnonzero((first >= a) & (first + horizon <= b)).tolist() for a, b in pairwise(borders)]
    for name, part, (a, b) in zip(("training", "validation", "test"), parts, pairwise(borders), strict=True):
        if not part and (b > a or name != "test"):
            raise ValueError(
                f"no {name} window: {rows} rows, parts end at rows {borders[1:]}, a window needs {look_back} + "
                f"{horizon} rows: give more rows, shorten look_back or horizon, or change the shares"
            )
    return parts


def _check_windows(data: TimeFrame, columns: list[str], look_back: int, parts: list[list[int]]) -> None:
    """With missing values: no window may have a column without any."""
    there = np.cumsum(np.pad(~np.isnan(data.values), ((1, 0), (0, 0))), axis=0)
    for start in [*parts[0], *parts[1], *parts[2], len(data.times) - look_back]:
        empty = np.flatnonzero(there[start + look_back] == there[start])
        if len(empty):
            raise ValueError(
                f"column {columns[empty[0]]!r} has no value between {data.times[start]} and "
                f"{data.times[start + look_back - 1]}, a whole window of {look_back} rows: fill it, or use a "
                f"longer look_back"
            )


def _statistics(rows: np.ndarray, columns: list[str], end: Any) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each column (columns,), of what is there."""
    empty = np.flatnonzero(np.isnan(rows).all(axis=0))
    if len(empty):
        raise ValueError(f"column {columns[empty[0]]!r} has no value in the training rows (until {end})")
    first = rows[np.isnan(rows).argmin(axis=0), np.arange(rows.shape[1])]  # about it, so that huge offsets cost nothing
    mean, std = first + np.nanmean(rows - first, axis=0), np.nanstd(rows - first, axis=0)
    return mean, np.where(std > 0, std, 1)
