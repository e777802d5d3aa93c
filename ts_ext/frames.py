"""A pandas frame as a forecaster needs it: numeric columns over even time steps, anything else an error."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd


class TimeFrame(NamedTuple):
    """times (n), values (n, columns) in double precision, NaN = missing, and the step between two times."""

    times: pd.DatetimeIndex
    values: np.ndarray
    freq: Any


def read_frame(
    frame: pd.DataFrame,
    columns: Sequence[str],
    time: str | None,
    missing: str,
    freq: Any = None,
    *,
    last: int | None = None,
) -> TimeFrame:
    """Check a frame and take the columns out of it.

    Args:
        frame: one row per time step, oldest first.
        columns: the numeric columns to take, in this order.
        time: the column of times; None = the index, a DatetimeIndex.
        missing: "error", or "mask" when NaN is allowed.
        freq: the step between rows. Default: the index's own, else what pandas infers from the times.
        last: take this many of the last rows; the values of others are not looked at. Default: all.

    Raises:
        TypeError: no DataFrame.
        ValueError: no row, an absent, repeated or not numeric column, times that are no dates, missing, unsorted,
            duplicate or not evenly spaced, infinite values, NaN with "error", a column that is NaN throughout.
    """
    if not isinstance(frame, pd.DataFrame):
        raise TypeError(f"expected a pandas DataFrame, got {type(frame).__name__}")
    names = list(frame.columns)
    wanted = [*columns] if time is None else [time, *columns]
    repeated = sorted({str(c) for c in wanted if wanted.count(c) > 1 or names.count(c) > 1})
    absent = [c for c in wanted if c not in names]
    if repeated or absent:
        raise ValueError(
            f"the frame has no column {absent}; it has {names}"
            if absent
            else f"columns named more than once: {repeated}"
        )
    if not len(frame):
        raise ValueError("the frame has no row")
    times = _read_times(frame.index if time is None else frame[time], time)
    types = pd.api.types
    words = [
        c
        for c in columns
        if not types.is_numeric_dtype(frame[c]) or types.is_bool_dtype(frame[c]) or types.is_complex_dtype(frame[c])
    ]
    if words:
        raise ValueError(f"columns {words} are not numeric (real numbers): convert them or leave them out")
    freq = _read_freq(frame, times, time, freq)
    rows = slice(None) if last is None else slice(-last, None)
    values = frame[list(columns)].iloc[rows].to_numpy(np.float64, na_value=np.nan)
    _check_values(values, columns, times[rows], missing)
    return TimeFrame(times[rows], values, freq)


def default_targets(frame: pd.DataFrame, time: str | None) -> list[str]:
    """Every column but the one of times."""
    if not isinstance(frame, pd.DataFrame):
        raise TypeError(f"expected a pandas DataFrame, got {type(frame).__name__}")
    return [c for c in frame.columns if c != time]


def following(times: pd.DatetimeIndex, freq: Any, count: int) -> pd.DatetimeIndex:
    """The next ``count`` times."""
    return pd.date_range(times[-1], periods=count + 1, freq=freq)[1:]


def _read_times(column: pd.Index | pd.Series, name: str | None) -> pd.DatetimeIndex:
    what = "the index" if name is None else f"column {name!r}"
    remedy = "convert with pd.to_datetime" + (", or name the column of times: time=…" if name is None else "")
    if not pd.api.types.is_datetime64_any_dtype(column):
        if pd.api.types.is_numeric_dtype(column):
            raise ValueError(f"{what} holds numbers ({column[:1].tolist()}), not times: {remedy}")
        try:
            column = pd.to_datetime(column)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{what} holds no times ({error}): {remedy}") from None
    times = pd.DatetimeIndex(column)
    if times.isna().any():
        raise ValueError(
            f"{what} has no time in row {int(np.flatnonzero(times.isna())[0])}: drop or complete such rows"
        )
    if times.has_duplicates:
        double = times[times.duplicated()][0]
        raise ValueError(
            f"{what} has {int(times.duplicated().sum())} duplicate timestamps, the first is {double}: aggregate them, "
            f"for example frame.groupby(times).mean(); several series belong into columns (frame.pivot)"
        )
    if not times.is_monotonic_increasing:
        row = int(np.flatnonzero(np.diff(times.asi8) < 0)[0]) + 1
        raise ValueError(
            f"{what} is not sorted: row {row} ({times[row]}) is before row {row - 1}: sort the frame by time"
        )
    return times


def _read_freq(frame: pd.DataFrame, times: pd.DatetimeIndex, time: str | None, freq: Any) -> Any:
    if freq is None:
        freq = frame.index.freq if time is None else None
    if freq is None and len(times) >= 3:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pandas 3 announces that it will return an offset, which is as welcome
            freq = pd.infer_freq(times)
    even = freq is not None and times.equals(pd.date_range(times[0], periods=len(times), freq=freq))
    if not even:
        steps = pd.Series(np.diff(times.asi8))
        usual = steps.mode()[0] if len(steps) else 0
        odd = np.flatnonzero(steps != usual)
        where = f", the first step unlike the others is after {times[odd[0]]}" if len(odd) else ""
        raise ValueError(
            f"{len(times)} times are not evenly spaced"
            + (f" by {freq}" if freq is not None else "")
            + f"{where}: resample the frame (frame.asfreq(…) leaves gaps as NaN, for missing='mask'), or give freq=…"
        )
    return pd.tseries.frequencies.to_offset(freq).freqstr


def _check_values(values: np.ndarray, columns: Sequence[str], times: pd.DatetimeIndex, missing: str) -> None:
    absent = np.isnan(values)
    empty = [c for c, gone in zip(columns, absent.all(axis=0), strict=True) if gone]
    if empty:
        raise ValueError(f"columns {empty} are NaN throughout: leave them out")
    wrong = np.isinf(values) | (absent if missing == "error" else False)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"{int(wrong.sum())} of {wrong.size} values are NaN or infinite, the first in {columns[column]!r} at "
            f"{times[row]}: fill them from earlier rows (frame.ffill()), or use missing='mask' for NaN"
        )
