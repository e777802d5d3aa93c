"""JumboPatchTST in tsai: pass the class or an instance as ``arch`` of tsai's learners or of ts_learner.

The head follows from ``arch_config``: nothing for TSForecaster, ``dict(head="classify")`` for TSClassifier,
``dict(head="regress")`` for TSRegressor, and for masked patches ``TSForecaster(X, X, arch_config=dict(head="pretrain"),
loss_func=pretraining_loss)``, which fits and validates; the encoder then goes to another learner's model with
``learner.model.load_pretrained(pretrained.model)``. Quantiles: ``arch_config=dict(quantiles=q)`` and
``loss_func=PinballLoss(q)``. NaN in X: ``arch_config=dict(missing="mask")``. ``learner.show_results`` compares decoded
targets, which for targets of several steps needs ``tfms=[None, TSForecasting()]``, with any architecture.

Importing this module has one effect: it repairs tsai's data loader for numpy 2. tsai numbers the samples of a loader
with the smallest integer type that holds their count (``smallest_dtype``), and ``NumpyDataLoader.create_batch`` adds
the batch size to such a number. Since numpy 2 the sum keeps the small type: for 100 samples in batches of 32 the last
batch ends at ``int8(96) + 32 = -128`` and comes out empty, so that validation and prediction lose samples. The repair
widens the numbers to 64 bit where they are made, in ``NumpyDataLoader.get_idxs``, and touches nothing else.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from ts_ext.losses import ObservedMSELoss, PinballLoss
from ts_ext.patchtst import JumboPatchTST
from ts_ext.pretraining import PretrainOutput

try:
    from fastai.callback.core import Callback
    from fastcore.foundation import L
    from tsai.data.core import NumpyDataLoader
except ImportError as error:
    raise ImportError(f"ts_ext.tsai needs tsai: pip install 'jumbo-vit[ts]' ({error})") from error

__all__ = [
    "FitBar", "JumboPatchTST", "ObservedMSELoss", "PinballLoss", "jumbo_lr", "jumbo_splitter", "pretraining_loss",
]  # fmt: skip


def _repair_batch_numbers() -> None:
    original = NumpyDataLoader.get_idxs
    if getattr(original, "widened", False):
        return

    @functools.wraps(original)
    def get_idxs(self):
        indices = original(self)
        return indices.astype(np.int64) if isinstance(indices, np.ndarray) else indices

    get_idxs.widened = True
    NumpyDataLoader.get_idxs = get_idxs


_repair_batch_numbers()


def jumbo_splitter(model: nn.Module) -> L:
    """``splitter=`` of a Learner: two groups, the Jumbo FFN and everything else (one group where there is no such FFN).

    The wide FFN collects gradients from every block and wants a slower rate on short runs::

        learn = TSForecaster(X, y, splits=splits, arch=JumboPatchTST, splitter=jumbo_splitter)
        learn.fit_one_cycle(10, jumbo_lr(1e-3))

    These groups are for rates, not for freezing. fastai's ``freeze()`` trains the last group alone, which here is all
    but the Jumbo FFN and not just the head; ``fine_tune()`` begins with such epochs and then gives the FFN a hundredth
    of the rate. To train the head first, freeze what is before it, before the first fit, and fit as usual::

        learn.model.series.requires_grad_(False)
        learn.fit_one_cycle(2, jumbo_lr(1e-3))
        learn.model.requires_grad_(True)
        learn.fit_one_cycle(10, jumbo_lr(1e-3))

    Parameters frozen in this way stay in their group. fastai skips parameters that have no gradient; frozen after a
    fit they still have one, and weight decay and momentum would go on moving them.
    """
    groups = ([], [])
    for name, parameter in model.named_parameters():
        groups[".jumbo_mlp." not in f".{name}"].append(parameter)
    return L(L(group) for group in groups if group)


def jumbo_lr(lr: float, scale: float = 0.3) -> slice:
    """Learning rates for :func:`jumbo_splitter`: ``scale * lr`` for the Jumbo FFN, ``lr`` for the rest.

    Raises:
        ValueError: a rate or scale that is not above 0.
    """
    if not lr > 0 or not scale > 0:
        raise ValueError(f"lr and scale must be above 0, got {lr} and {scale}")
    return slice(scale * lr, lr)


def pretraining_loss(output: PretrainOutput, *targets: torch.Tensor) -> torch.Tensor:
    """``loss_func=`` of a Learner whose model has head="pretrain": its own loss; targets of the loader have no say."""
    return output.loss


class FitBar(Callback):
    """One quiet bar for a whole fit, in place of fastai's table of epochs, and the seconds each epoch of training took.

    Use with ``learner.no_bar()`` and ``learner.no_logging()``. A copied or exported learner keeps the seconds but not
    the bar, which belongs to a terminal: a further fit of it only counts seconds.

    Args:
        progress: a ``rich.progress.Progress`` that is being shown.
        title: text beside the bar.

    Attributes:
        seconds: one number per epoch, validation not included.
    """

    def __init__(self, progress: Any, title: str) -> None:
        self.progress, self.title, self.seconds, self.bar = progress, title, [], None

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "progress": None, "bar": None}

    def before_fit(self) -> None:
        if self.progress is not None:
            self.bar = self.progress.add_task(self.title, total=len(self.learn.dls.train) * self.n_epoch)

    def before_train(self) -> None:
        self.start = time.perf_counter()

    def after_batch(self) -> None:
        if self.training and self.progress is not None:
            self.progress.advance(self.bar)

    def after_train(self) -> None:
        self.seconds.append(time.perf_counter() - self.start)

    def after_fit(self) -> None:
        if self.progress is not None:
            self.progress.remove_task(self.bar)
