"""A plan tried out: what it changes and what it saves on images of a folder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from jumbo_core.measure.turns import median_ms
from jumbo_core.modes import evaluating
from jumbo_core.tofu.apply import FusionReport, apply_tofu
from jumbo_core.tofu.folder import ImageBatches, model_transform
from jumbo_core.tofu.outputs import first_output
from jumbo_core.tofu.plan import FusionPlan


@dataclass(frozen=True)
class Trial:
    """Result of :func:`try_folder`.

    Args:
        report: what leaves where, and the multiply-adds.
        images: how many were looked at.
        agreement: share of them whose largest output is the same with and without fusion.
        cosine: of the outputs with and without fusion, mean over the images.
        unfused_ms, fused_ms: milliseconds per image, median over rounds that take turns.
    """

    report: FusionReport
    images: int
    agreement: float
    cosine: float
    unfused_ms: float
    fused_ms: float

    def __str__(self) -> str:
        return (
            f"{self.report}\n"
            f"{self.images} images: same prediction for {100 * self.agreement:.1f} %, "
            f"mean cosine of the outputs {self.cosine:.4f}\n"
            f"{self.unfused_ms:.2f} ms per image without fusion, {self.fused_ms:.2f} ms with it"
        )


def try_folder(
    model: nn.Module,
    plan: FusionPlan,
    images: str | Path,
    *,
    batches: int = 8,
    batch_size: int = 16,
    seed: int = 0,
    repeats: int = 7,
    transform: Callable[[Image.Image], torch.Tensor] | None = None,
    progress: Callable[[Iterable], Iterable] | None = None,
    **fusion,
) -> Trial:
    """Compare a model with itself fused, on images of a folder; the model given is not changed.

    Args:
        model: what :func:`apply_tofu` takes, not fused, on the CPU. Of several outputs the first counts.
        plan: the plan to try.
        images, batches, batch_size, seed, transform, progress: see :func:`profile_folder`.
        repeats: timed rounds on the first batch. Default 7.
        **fusion: options of :func:`apply_tofu`.

    Raises: as :func:`apply_tofu` and :func:`profile_folder` do.
    """
    fused = copy.deepcopy(model)
    handle = apply_tofu(fused, plan, **fusion)
    transform = model_transform(model) if transform is None else transform
    loader = ImageBatches(images, transform, batches=batches, batch_size=batch_size, seed=seed)
    first, same, cosine = None, 0, 0.0
    with evaluating(model), evaluating(fused), torch.no_grad():
        for batch in loader if progress is None else progress(loader):
            batch = batch.to(next(model.parameters()).dtype)
            first = batch if first is None else first
            plain, other = (first_output(m(batch)).float() for m in (model, fused))
            same += (plain.argmax(-1) == other.argmax(-1)).sum().item()
            cosine += F.cosine_similarity(plain, other, dim=-1).sum().item()
        calls = {"unfused": lambda: model(first), "fused": lambda: fused(first)}
        ms = median_ms(calls, samples=len(first), repeats=repeats)
        report = handle.report()
    return Trial(report, loader.used, same / loader.used, cosine / loader.used, ms["unfused"], ms["fused"])
