"""Trainer callbacks."""

from __future__ import annotations

from torch import nn
from transformers import TrainerCallback

from jumbo_core.jumbo import linear_drop_rate
from jumbo_core.models.surface import PatchModel


class PatchDropSchedule(TrainerCallback):
    """Drop patches at random in training, at a rate that moves linearly over the run (Jumbo paper, IN-21K runs).

    ``Trainer(…, callbacks=[PatchDropSchedule()])``. The rate follows the global step, so a resumed run continues it;
    evaluation always sees every patch. After training the model has its own rate back.

    Args:
        start: share of dropped patches at the first step. Default 0.9.
        end: share at the last step. Default 0.1.

    Raises:
        ValueError: a rate outside [0, 1), or, when training begins, a model of another package.
    """

    def __init__(self, start: float = 0.9, end: float = 0.1) -> None:
        linear_drop_rate(0, 1, start=start, end=end)  # checks both
        self.start, self.end = start, end
        self._own_rates: list[tuple[PatchModel, float]] = []

    def on_train_begin(self, args, state, control, model: nn.Module | None = None, **kwargs) -> None:
        self._own_rates = [(m, m.patch_drop_rate) for m in model.modules() if isinstance(m, PatchModel)]
        if not self._own_rates:
            raise ValueError(f"PatchDropSchedule needs a Jumbo or Adventurer model, got {type(model).__name__}")

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        rate = linear_drop_rate(state.global_step, state.max_steps, start=self.start, end=self.end)
        for vit, _ in self._own_rates:
            vit.patch_drop_rate = rate

    def on_train_end(self, args, state, control, **kwargs) -> None:
        for vit, rate in self._own_rates:
            vit.patch_drop_rate = rate
