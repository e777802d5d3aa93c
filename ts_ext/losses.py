"""Losses of forecasts: pinball for quantiles, and squared error that leaves missing targets out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

REDUCTIONS = ("mean", "sum", "none")


def check_quantiles(quantiles: Sequence[float]) -> tuple[float, ...]:
    """Rising probabilities strictly between 0 and 1, as floats."""
    try:
        found = tuple(float(q) for q in quantiles)
    except (TypeError, ValueError):  # not a sequence, or not of numbers
        found = ()
    if not found or not all(0 < q < 1 for q in found) or list(found) != sorted(set(found)):
        raise ValueError(
            f"quantiles must be rising probabilities strictly between 0 and 1, for example (0.1, 0.5, 0.9), "
            f"got {quantiles!r}"
        )
    return found


class _TargetLoss(nn.Module):
    """What both losses share: which targets count and how their errors become one number."""

    def __init__(self, reduction: str, missing: str) -> None:
        super().__init__()
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
        if missing not in ("error", "mask"):
            raise ValueError(f"missing must be 'error' or 'mask', got {missing!r}")
        self.reduction, self.missing = reduction, missing

    def _targets(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Targets without NaN, and which of them were there; None = all."""
        target = target.as_subclass(torch.Tensor)  # tsai's tensor types would follow every operation
        absent = target.isnan()
        if not absent.any():
            return target, None
        if self.missing == "error":
            raise ValueError(
                f"{int(absent.sum())} of {target.numel()} targets are NaN: fill them, or leave them out with "
                f"{type(self).__name__}(…, missing='mask')"
            )
        return target.masked_fill(absent, 0), ~absent

    def _reduce(self, error: torch.Tensor, present: torch.Tensor | None) -> torch.Tensor:
        if present is not None:
            error = error * present.to(error.dtype)
        if self.reduction == "none":
            return error
        if self.reduction == "sum" or present is None:
            return error.sum() if self.reduction == "sum" else error.mean()
        return error.sum() / present.expand_as(error).sum().clamp(min=1)  # no target at all: 0, and zero gradients

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, missing={self.missing!r}"


class PinballLoss(_TargetLoss):
    """Quantile loss: for a quantile q and an error e = target - forecast, ``max(q * e, (q - 1) * e)``, averaged.

    Args:
        quantiles: the probabilities that the last dimension of a forecast stands for, as given to the model.
        reduction: "mean" (default) over everything, "sum", or "none" (the shape of the forecast).
        missing: a NaN among the targets is an error (default) or, with "mask", left out.

    Raises:
        ValueError: quantiles that are not rising or not strictly between 0 and 1; in the call a forecast that is not
            the target's shape and one more dimension of that many quantiles, or a NaN target.
    """

    def __init__(
        self, quantiles: Sequence[float] = (0.1, 0.5, 0.9), *, reduction: str = "mean", missing: str = "error"
    ) -> None:
        super().__init__(reduction, missing)
        self.quantiles = check_quantiles(quantiles)

    def forward(self, forecast: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Forecast (..., Q), target (...)."""
        if forecast.shape != (*target.shape, len(self.quantiles)):
            raise ValueError(
                f"PinballLoss of {len(self.quantiles)} quantiles expects a forecast of shape "
                f"{(*target.shape, len(self.quantiles))} for targets {tuple(target.shape)}, got "
                f"{tuple(forecast.shape)}: build the model with quantiles={self.quantiles}"
            )
        target, present = self._targets(target)
        error = target[..., None] - forecast.as_subclass(torch.Tensor)
        q = error.new_tensor(self.quantiles)
        return self._reduce(torch.maximum(q * error, (q - 1) * error), None if present is None else present[..., None])

    def extra_repr(self) -> str:
        return f"{self.quantiles}, {super().extra_repr()}"


class ObservedMSELoss(_TargetLoss):
    """Mean squared error over the targets that are there.

    Args:
        reduction: "mean" (default) over the targets that are there, "sum", or "none" (0 where one is missing).
        missing: "mask" (default here) leaves NaN targets out, "error" refuses them.

    Raises:
        ValueError: forecast and target of unequal shape; with "error" a NaN target.
    """

    def __init__(self, *, reduction: str = "mean", missing: str = "mask") -> None:
        super().__init__(reduction, missing)

    def forward(self, forecast: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Forecast and target of one shape."""
        if forecast.shape != target.shape:
            raise ValueError(f"forecast {tuple(forecast.shape)} and target {tuple(target.shape)} differ in shape")
        target, present = self._targets(target)
        return self._reduce((forecast.as_subclass(torch.Tensor) - target).square(), present)
