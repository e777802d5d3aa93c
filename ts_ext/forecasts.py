"""What :func:`ts_ext.forecaster.jumbo_forecaster` returns: a trained model that reads and writes pandas frames."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from jumbo_core import checks
from ts_ext.frames import TimeFrame, default_targets, following, read_frame
from ts_ext.patchtst import JumboPatchTST


class Forecaster:
    """A trained model that speaks frames; :func:`jumbo_forecaster` makes one.

    Attributes:
        model: the :class:`JumboPatchTST`, in eval mode; arguments: those of its constructor.
        learner: tsai's learner that trained it, None after :meth:`load`.
        columns: input columns, targets first; ignored: the others of the frame trained on.
        targets, horizon, look_back, quantiles, time, freq: as given or inferred.
        mean, std: what each column is scaled by, from the training rows alone (std 1 for a constant one).
        split: {"train_end", "valid_end", "end"}, the last timestamp of each part that has rows.
    """

    def __init__(
        self,
        model: JumboPatchTST,
        arguments: dict[str, Any],
        *,
        targets: list[str],
        columns: list[str],
        time: str | None,
        mean: np.ndarray,
        std: np.ndarray,
        freq: Any,
        learner: Any = None,
        data: TimeFrame | None = None,
        borders: Sequence[int] = (),
        ignored: Sequence[str] = (),
    ) -> None:
        self.model, self.arguments, self.learner = model.eval(), arguments, learner
        self.targets, self.columns, self.time = targets, columns, time
        self.mean, self.std, self.freq = mean, std, freq
        self.data, self.borders, self.ignored = data, tuple(borders), list(ignored)
        self.quantiles, self.missing = model.quantiles, model.missing
        self.look_back, self.horizon = model.seq_len, model.target_shape[-1]
        ends = zip(("train_end", "valid_end", "end"), pairwise(self.borders), strict=bool(self.borders))
        self.split = {name: data.times[stop - 1] for name, (start, stop) in ends if stop > start}

    def predict(self, frame: pd.DataFrame | None = None) -> pd.DataFrame:
        """The next ``horizon`` rows after a frame's last one (default: the frame trained on), in its own units.

        Only the last ``look_back`` rows are read; of the others the times alone are looked at.

        Returns:
            DataFrame indexed by time with the target columns; with quantiles the columns have two levels, (target,
            quantile).

        Raises:
            ValueError: other columns than in training, too few rows, another step of time, or what
                :func:`jumbo_forecaster` refuses.
        """
        data = self._own() if frame is None else self._read(frame)
        if len(data.times) < self.look_back:
            raise ValueError(
                f"{len(data.times)} rows are fewer than the look_back of {self.look_back} that a forecast reads"
            )
        forecast = self._run(data.values[None, -self.look_back :])[0]  # (targets, H) or (targets, H, Q)
        index = following(data.times, self.freq, self.horizon)
        if self.quantiles is None:
            return pd.DataFrame(forecast.T, index=index, columns=self.targets)
        columns = pd.MultiIndex.from_product([self.targets, self.quantiles], names=["column", "quantile"])
        return pd.DataFrame(forecast.transpose(1, 0, 2).reshape(self.horizon, -1), index=index, columns=columns)

    def backtest(self, *, step: int | None = None) -> pd.DataFrame:
        """Forecasts of the test rows, each made from the ``look_back`` rows before its origin.

        Args:
            step: rows between two origins. Default: the horizon, so that no row is forecast twice.

        Returns:
            DataFrame with the columns origin, time, column, truth, and forecast, or one column per quantile.

        Raises:
            ValueError: no test rows (``test_share=0``) or fewer than a horizon.
        """
        step = self.horizon if step is None else checks.integer("step", step)
        times, values, _ = self._own()
        start, stop = self.borders[2:]
        origins = np.arange(start, stop - self.horizon + 1, step)
        if not len(origins):
            raise ValueError(f"{stop - start} test rows hold no window of horizon {self.horizon}: raise test_share")
        forecasts = self._run(np.stack([values[i - self.look_back : i] for i in origins]))
        blocks = []
        for i, made in zip(origins, forecasts, strict=True):
            rows = slice(i, i + self.horizon)
            for c, column in enumerate(self.targets):
                block = {"origin": times[i], "time": times[rows], "column": column, "truth": values[rows, c]}
                block |= (
                    {"forecast": made[c]} if self.quantiles is None else zip(self.quantiles, made[c].T, strict=True)
                )
                blocks.append(pd.DataFrame(block))
        return pd.concat(blocks, ignore_index=True)

    def metrics(self) -> dict[str, float]:
        """Errors over every test window in original units.

        Returns:
            "mae" and "mse", of the median when there are quantiles and 0.5 is one; with quantiles also "pinball", the
            mean over them, and with several "coverage", the share of the truth between the lowest and the highest.
        """
        table, found = self.backtest(step=1), {}
        point = "forecast" if self.quantiles is None else 0.5
        if point in table.columns:
            error = table[point] - table["truth"]
            found |= {"mae": float(error.abs().mean()), "mse": float(error.pow(2).mean())}
        if self.quantiles is not None:
            errors = {q: table["truth"] - table[q] for q in self.quantiles}
            losses = [np.maximum(q * error, (q - 1) * error).mean() for q, error in errors.items()]
            found["pinball"] = float(np.mean(losses))
        if self.quantiles is not None and len(self.quantiles) > 1:
            there = table["truth"].notna()  # with missing="mask" a truth may be missing
            inside = table["truth"].between(table[self.quantiles[0]], table[self.quantiles[-1]])
            found["coverage"] = float(inside[there].mean())
        return found

    def save(self, path: str | Path) -> None:
        """Weights, scaling and names in one file, without the frame and tsai's learner (``learner.export``).

        Raises:
            ValueError: names of columns that a file of weights cannot hold: anything but text and numbers.
        """
        names = [*self.columns, *self.ignored, *([] if self.time is None else [self.time])]
        other = [name for name in names if not isinstance(name, str | int | float)]
        if other:
            raise ValueError(f"columns named {other[:3]} cannot be saved: rename them to text before training")
        content = {n: getattr(self, n) for n in ("arguments", "targets", "columns", "ignored", "time", "freq")}
        arrays = {name: torch.from_numpy(getattr(self, name)) for name in ("mean", "std")}
        torch.save({**content, **arrays, "model": self.model.state_dict()}, path)

    @classmethod
    def load(cls, path: str | Path, *, device: str | torch.device = "cpu") -> Forecaster:
        """A saved forecaster: :meth:`predict` of a frame gives what it gave. Read as weights only: no code is run."""
        content = torch.load(path, map_location=device, weights_only=True)
        model = JumboPatchTST(**content["arguments"]).to(device)
        model.load_state_dict(content.pop("model"))
        arrays = {name: content.pop(name).cpu().numpy() for name in ("mean", "std")}
        return cls(model, **content, **arrays)

    def _own(self) -> TimeFrame:
        if self.data is None:
            raise ValueError("a loaded forecaster has no frame of its own: predict(frame)")
        return self.data

    def _read(self, frame: pd.DataFrame) -> TimeFrame:
        found = default_targets(frame, self.time)
        missing = [c for c in self.columns if c not in found]
        unknown = [c for c in found if c not in self.columns and c not in self.ignored]
        if missing or unknown:
            raise ValueError(
                f"trained on {len(self.columns)} columns {self.columns}, got {len(found)}: missing {missing}, unknown "
                f"{unknown}"
            )
        return read_frame(frame, self.columns, self.time, self.missing, self.freq, last=self.look_back)

    @torch.no_grad()
    def _run(self, windows: np.ndarray, batch_size: int = 256) -> np.ndarray:
        """Windows (n, look_back, columns) in original units -> (n, targets, H) or (n, targets, H, Q)."""
        device = next(self.model.parameters()).device
        scaled = torch.from_numpy(scale(windows, self.mean, self.std))
        made = torch.cat([self.model(part.to(device)).cpu() for part in scaled.split(batch_size)]).double().numpy()
        shape = (-1, 1) if self.quantiles is None else (-1, 1, 1)
        count = len(self.targets)
        return made * self.std[:count].reshape(shape) + self.mean[:count].reshape(shape)


def scale(values: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """(n, window, columns) -> scaled (n, columns, window), single precision."""
    return ((values - mean) / std).astype(np.float32).swapaxes(-1, -2)
