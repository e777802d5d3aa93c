"""Hooks that keep checkpoints plain and a resumed run equal to one that was never interrupted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from mmengine.dist import get_world_size
from mmengine.hooks import Hook
from mmengine.logging import HistoryBuffer
from mmengine.registry import HOOKS


@HOOKS.register_module()
class PlainMessageHubHook(Hook):
    """Save the log history as plain Python, so that checkpoints load with ``torch.load(…, weights_only=True)``.

    mmengine pickles its own ``HistoryBuffer`` objects and NumPy scalars into the ``message_hub`` entry of a checkpoint,
    and torch's default reading refuses those, resuming included. This hook writes the same content with lists and
    numbers, and hands the host its own objects back when a checkpoint is loaded. Needed when saving and when resuming.
    """

    priority = "VERY_LOW"  # after every hook that may still add to the message hub

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:
        hub = checkpoint["message_hub"]
        scalars = {name: _plain_history(buffer) for name, buffer in hub["log_scalars"].items()}
        checkpoint["message_hub"] = dict(
            log_scalars=scalars, runtime_info=plain(hub["runtime_info"]), resumed_keys=plain(hub["resumed_keys"])
        )

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        hub = checkpoint.get("message_hub")
        if isinstance(hub, dict):
            hub["log_scalars"] = OrderedDict((k, _history(v)) for k, v in hub["log_scalars"].items())


@HOOKS.register_module()
class RandomStateHook(Hook):
    """Keep torch's random state in checkpoints, so that dropout and drop path go on as if nothing had happened.

    On resuming, mmengine replays the data loader up to the saved iteration, which repeats every random choice of the
    data pipeline (given ``randomness=dict(seed=…)``), but the model's own draws start over. With this hook a run on
    one process ends bit-equal to the uninterrupted one. Validation, which may follow a checkpoint and draws a seed for
    its loader, leaves the random state as it found it. On several processes only the first one's state could be saved,
    so nothing is restored there. A pipeline that draws from torch's global generator in the main process (mmseg's own
    do not) is not covered.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, torch.Tensor] | None = None
        self._before_val: dict[str, torch.Tensor] | None = None

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:
        checkpoint["random_state"] = _random_state()

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        self._loaded = checkpoint.get("random_state")

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        state, self._loaded = self._loaded, None
        if state is None or runner.iter == 0:
            return  # nothing loaded, or weights alone for a new run
        if get_world_size() > 1:
            runner.logger.warning("random state is not restored on several processes: dropout draws start over")
            return
        _set_random_state(state)

    def before_val(self, runner) -> None:
        self._before_val = _random_state()

    def after_val(self, runner) -> None:
        _set_random_state(self._before_val)


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"].cpu())  # a checkpoint may have been loaded onto a GPU
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def plain(value: Any) -> Any:
    """The same content in Python's and torch's own types: NumPy scalars to numbers, NumPy arrays to tensors.

    Raises:
        TypeError: an object that has no plain form; the message names its type.
    """
    if value is None or (
        isinstance(value, (bool, int, float, str, bytes, torch.Tensor)) and not isinstance(value, np.generic)
    ):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy()) if value.dtype.kind in "biuf" else plain(value.tolist())
    if isinstance(value, Mapping):
        return {plain(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [plain(v) for v in value]
        return items if isinstance(value, list) else set(items) if isinstance(value, (set, frozenset)) else tuple(items)
    raise TypeError(
        f"the message hub holds a {type(value).__module__}.{type(value).__qualname__}, which no plain checkpoint can "
        f"hold: store numbers, strings, lists, dicts or tensors, or add it with resumed=False"
    )


def _plain_history(buffer: Any) -> Any:
    if not isinstance(buffer, HistoryBuffer):
        return plain(buffer)
    values, counts = (torch.from_numpy(np.array(array)) for array in buffer.data)  # tensors: histories grow long
    return {"values": values, "counts": counts, "max_length": int(buffer.max_length)}


def _history(saved: Any) -> Any:
    if not (isinstance(saved, dict) and {"values", "counts", "max_length"} <= set(saved)):
        return saved  # saved without this hook
    return HistoryBuffer(saved["values"].cpu().numpy(), saved["counts"].cpu().numpy(), saved["max_length"])
