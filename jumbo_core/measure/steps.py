"""What is timed: a call of a model on a batch or a step of its training, and the gate that both pass first."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from jumbo_core.measure.contenders import contender
from jumbo_core.measure.contract import Contender
from jumbo_core.measure.forms import DTYPES, OPTIMISED


def check_options(contenders: list[Contender], dtype: str, device: str, train: bool) -> None:
    """Refuse what cannot be timed, before anything is built.

    Raises:
        ValueError: an unknown dtype or device, a form for inference or a UNet that is to be trained, fp16 training.
        RuntimeError: CUDA without a device.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("device cuda: torch sees no CUDA device here; use --device cpu")
    if train and dtype == "float16":
        raise ValueError("training in float16 needs loss scaling, which is not measured here; use bfloat16")
    for one in contenders:
        if train and set(one.options) & set(OPTIMISED):
            raise ValueError(f"{one.text}: {', '.join(OPTIMISED)} are forms for inference; drop them to time training")
        if train and one.not_trained:
            raise ValueError(f"{one.text}: {one.not_trained}")


def inference(one: Contender, batch: int, dtype: str = "float32", device: str = "cpu") -> Callable[[], torch.Tensor]:
    """A call ready to run: inputs of ``batch`` images through the model, in eval mode."""
    return partial(one.build(dtype, device), *one.inputs(batch, dtype, device))


def training(one: Contender, batch: int, dtype: str = "float32", device: str = "cpu") -> Callable[[], torch.Tensor]:
    """A step ready to run again and again: forward, cross-entropy, backward, AdamW. Gives the loss.

    bfloat16 trains as users do: fp32 weights under autocast.
    """
    with torch.inference_mode(False):
        model = one.build(device=device).train()
        (images,) = one.inputs(batch, device=device)
        if not model.num_classes:
            raise ValueError(f"{one.text}: training needs classes, got num_classes=0")
        labels = torch.arange(batch, device=device) % model.num_classes
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
        context = nullcontext() if dtype == "float32" else torch.autocast(device, getattr(torch, dtype))

    def step() -> torch.Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            optimizer.zero_grad()
            with context:
                loss = nn.functional.cross_entropy(model(images).float(), labels)
            loss.backward()
            optimizer.step()
            return loss.detach()

    return step


def prepared(text: str, size: tuple[int, int], batch: int, dtype: str, train: bool) -> Callable[[], object]:
    """A call in a new process, for :func:`peak_memory`: the first step of training, or a call of the model.

    Libraries load their workspaces on other, small models.
    """
    one, make = contender(text, size), training if train else inference
    one.warm_up()
    return make(one, batch, dtype)


class Checked(NamedTuple):
    """What the gate of :func:`check_inference` found.

    distance: relative L2 distance of the output from the plain fp32 model's, 0 for the plain model itself.
    repeat: that between two calls; 0 where they must be the same. seconds: about how many a call takes.
    """

    distance: float
    repeat: float
    seconds: float


@torch.inference_mode()
def check_inference(one: Contender, call: partial, batch: int, dtype: str, device: str) -> Checked:
    """The output is finite, of the right shape and the same in a second call; forms agree with the plain fp32 model.

    A form that draws at random in every call says how far two calls may be apart.

    Raises:
        RuntimeError: they are not, or do not.
    """
    output = call()
    start = time.perf_counter()
    again = call()
    seconds = time.perf_counter() - start
    shape = one.output_shape(call.func, batch)
    if tuple(output.shape) != shape or not output.isfinite().all():
        raise RuntimeError(f"{one.text}: output {tuple(output.shape)} must be finite and {shape}; nothing was timed")
    repeat, allowed = 0.0, one.repeat_tolerance(batch)
    if allowed:
        repeat = _apart(again, output)
        if not repeat <= allowed:
            raise RuntimeError(
                f"{one.text}: it draws at random, but two calls are apart by {repeat:.1e} of their norm, more than "
                f"{allowed:.0e}; nothing was timed"
            )
    elif not (torch.equal if device == "cpu" else partial(torch.allclose, rtol=1e-3, atol=1e-3))(output, again):
        raise RuntimeError(f"{one.text}: a second call gives another output; nothing was timed")
    tolerance = one.tolerance(dtype)
    if not tolerance:
        return Checked(0.0, repeat, seconds)
    if device == "cuda":
        tolerance = max(tolerance, 5e-3)  # convolutions there run in TF32, and differ by the algorithm
    inputs = (x.float() if x.is_floating_point() else x for x in call.args)
    distance = _apart(output, one.build(device=device, plain=True)(*inputs))
    if not distance <= tolerance:
        raise RuntimeError(
            f"{one.text}: its output is off that of the plain fp32 model by {distance:.1e} of its norm, more than "
            f"{tolerance:.0e}; nothing was timed"
        )
    return Checked(distance, repeat, seconds)


def _apart(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 distance; NaN where either is not finite, which no limit lets pass."""
    expected = expected.float()
    return ((output.float() - expected).norm() / expected.norm()).item()


def check_training(one: Contender, step: Callable[[], torch.Tensor]) -> float:
    """Losses are finite and fall. Returns about how many seconds a step takes.

    Raises:
        RuntimeError: they are not, or do not.
    """
    losses = [step().item() for _ in range(3)]
    start = time.perf_counter()
    losses.append(step().item())
    seconds = time.perf_counter() - start
    if not all(0 <= loss < 1e6 for loss in losses) or losses[-1] >= losses[0]:
        raise RuntimeError(f"{one.text}: losses {losses} must be finite and fall; nothing was timed")
    return seconds
