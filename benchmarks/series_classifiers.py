"""What ``benchmarks.classification`` compares, and how each is trained on one set."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.series_sets import SeriesSet, hold_out, patching, statistics, stretched, windows
from jumbo_core.jumbo import JumboOutput, param_groups
from ts_ext import JumboPatchTST

SIZE = dict(d_model=32, n_layers=3, n_heads=4, d_ff=64)
MODELS = {
    "PatchTST": dict(multiplier=0),
    "+ 16 registers": dict(multiplier=0, registers=16),
    "+ Jumbo J=6": dict(multiplier=6),
}
JUMBO = "+ Jumbo J=6"
ROCKET = "MultiRocket-Hydra"
ABLATION = {
    "J=2": dict(multiplier=2),
    "Jumbo FFN ratio 1": dict(multiplier=6, jumbo_mlp_ratio=1.0),
    "own Jumbo FFN in each block": dict(multiplier=6, share_jumbo_ffn=False),
    "head reads the slices alone": dict(multiplier=6, reads="slices"),
    "head reads the mean alone": dict(multiplier=6, reads="mean"),
}
FFN_RATE_SCALE = 0.3


class PartReader(nn.Module):
    """A Jumbo model whose scores are read from the J slices alone or from the mean of the patches alone.

    ``whole`` is the model of both; its own head stays unused and untrained.
    """

    def __init__(self, whole: JumboPatchTST, classes: int, reads: str) -> None:
        super().__init__()
        if reads not in ("slices", "mean"):
            raise ValueError(f"reads must be 'slices' or 'mean', got {reads!r}")
        encoder = whole.series.encoder
        count = encoder.num_global_tokens if reads == "slices" else 1
        self.whole, self.reads = whole, reads
        self.head = nn.Linear(whole.c_in * count * encoder.dim, classes)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        whole.head.requires_grad_(False)

    def forward(self, x: torch.Tensor, observed_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.read(*self.whole.encode(x, observed_mask)[:2])

    def read(self, tokens: JumboOutput, real: torch.Tensor | None) -> torch.Tensor:
        """Tokens of B*C rows and which patches are real -> scores (B, classes)."""
        if self.reads == "slices":
            features = tokens.jumbo.flatten(1)  # (B*C, J*D)
        else:
            weight = torch.ones_like(tokens.patches[..., :1]) if real is None else real[..., None].float()
            features = (tokens.patches * weight).sum(dim=1) / weight.sum(dim=1)
        return self.head(features.unflatten(0, (-1, self.whole.c_in)).flatten(1))


def build(options: dict[str, Any], data: SeriesSet, dropout: float) -> nn.Module:
    """A fresh model for a set; ``options``: of JumboPatchTST, and ``reads``, see :class:`PartReader`."""
    own = {key: value for key, value in options.items() if key != "reads"}
    patch, stride = patching(data.length)
    model = JumboPatchTST(
        data.channels, data.classes, data.length, head="classify", patch_len=patch, stride=stride, dropout=dropout,
        revin=False, **SIZE, **own,
    )  # fmt: skip
    return PartReader(model, data.classes, options["reads"]) if "reads" in options else model


def fit(
    options: dict[str, Any], data: SeriesSet, rows: np.ndarray, rate: float, dropout: float, seed: int, plan: dict
) -> Callable[[list[np.ndarray], np.ndarray], tuple[float, float]]:
    """Train on some ``rows`` of the training part; returns what scores series: (series, labels) -> accuracy, loss.

    AdamW, one cycle of the rate, the Jumbo FFN at 0.3 of it. Batches run through shuffled rows again and again.
    """
    torch.manual_seed(seed)
    model = build(options, data, dropout)
    values, mask = windows([data.train[i] for i in rows], data.length)
    mean, std = statistics(values, mask)
    labels = torch.from_numpy(data.train_y[rows])
    groups = param_groups(model, rate, plan["weight_decay"], jumbo_lr_scale=FFN_RATE_SCALE)
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [group["lr"] for group in groups], plan["steps"])

    def scores(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model((values - mean) / std, None if mask.all() else mask)

    size, queue = min(plan["batch_size"], len(rows)), torch.empty(0, dtype=torch.long)
    for _ in range(plan["steps"]):
        if len(queue) < size:
            queue = torch.cat([queue, torch.randperm(len(rows))])
        batch, queue = queue[:size], queue[size:]
        loss = F.cross_entropy(scores(values[batch], mask[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    @torch.no_grad()
    def score(series: list[np.ndarray], truth: np.ndarray) -> tuple[float, float]:
        model.eval()
        parts = [scores(*windows(series[i : i + 64], data.length)) for i in range(0, len(series), 64)]
        found, target = torch.cat(parts), torch.from_numpy(truth)
        accuracy = (found.argmax(dim=1) == target).double().mean()
        return 100 * accuracy.item(), F.cross_entropy(found.double(), target).item()

    return score


def tune(data: SeriesSet, options: dict, plan: dict) -> dict:
    """Every rate and dropout with the first seed, on held-out series of the training part; which pair is best."""
    started = time.perf_counter()
    rows, held = hold_out(data.train_y, plan["held_out"])
    series, labels, grid = [data.train[i] for i in held], data.train_y[held], []
    for rate in plan["rates"]:
        for dropout in plan["dropouts"]:
            accuracy, loss = fit(options, data, rows, rate, dropout, plan["seeds"][0], plan)(series, labels)
            grid.append(dict(rate=rate, dropout=dropout, held_out=accuracy, loss=loss))
    best = max(grid, key=lambda one: (one["held_out"], -one["loss"]))
    chosen = dict(rate=best["rate"], dropout=best["dropout"])
    return {**chosen, "held_out_series": len(held), "grid": grid, "seconds": time.perf_counter() - started}


def evaluate(data: SeriesSet, options: dict, rate: float, dropout: float, seed: int, plan: dict) -> dict:
    """Train on the whole training part with what was chosen; accuracy in percent on the test part."""
    started = time.perf_counter()
    score = fit(options, data, np.arange(len(data.train)), rate, dropout, seed, plan)
    seconds = time.perf_counter() - started
    accuracy, _ = score(data.test, data.test_y)
    parameters = sum(p.numel() for p in build(options, data, dropout).parameters() if p.requires_grad)
    return dict(rate=rate, dropout=dropout, accuracy=accuracy, parameters=parameters, seconds=seconds)


def rocket(data: SeriesSet, seed: int) -> dict:
    """MultiRocket-Hydra of aeon with its defaults, which have nothing to choose but its ridge, by leave-one-out."""
    from aeon.classification.convolution_based import MultiRocketHydraClassifier

    started = time.perf_counter()
    model = MultiRocketHydraClassifier(random_state=seed, n_jobs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(stretched(data.train, data.length), data.train_y)
        seconds = time.perf_counter() - started
        found = model.predict(stretched(data.test, data.length))
    return dict(accuracy=100 * float((found == data.test_y).mean()), seconds=seconds)
