"""What is timed: a call of a model on a batch or a step of its training, and the gate that both pass first."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import timm
import torch
from torch import nn

from jumbo_core.measure.contenders import Contender, contender
from jumbo_core.measure.forms import DTYPES, OPTIMISED


def check_options(contenders: list[Contender], dtype: str, device: str, train: bool) -> None:
    """Refuse what cannot be timed, before anything is built.

    Raises:
        ValueError: an unknown dtype or device, a form for inference that is to be trained, fp16 training.
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


def random_images(batch: int, size: tuple[int, int], device: str = "cpu") -> torch.Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(1)).to(device)


def inference(one: Contender, batch: int, dtype: str = "float32", device: str = "cpu") -> Callable[[], torch.Tensor]:
    """A call ready to run: images (batch, 3, H, W) through the model, in eval mode."""
    images = one.arrange(random_images(batch, one.image_size, device).to(getattr(torch, dtype)))
    return partial(one.build(dtype, device), images)


def training(one: Contender, batch: int, dtype: str = "float32", device: str = "cpu") -> Callable[[], torch.Tensor]:
    """A step ready to run again and again: forward, cross-entropy, backward, AdamW. Gives the loss.

    bfloat16 trains as users do: fp32 weights under autocast.
    """
    with torch.inference_mode(False):
        model = one.build(device=device).train()
        images = one.arrange(random_images(batch, one.image_size, device))
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
    warm, image = timm.create_model("test_jumbo_adventurer").eval(), torch.randn(1, 3, 32, 32)
    timm.create_model("test_vit", img_size=32).eval()(image)
    warm(image)
    make = training if train else inference
    return make(contender(text, size), batch, dtype)


@torch.inference_mode()
def check_inference(one: Contender, call: partial, dtype: str, device: str) -> tuple[float, float]:
    """Logits are finite, of the right shape and the same in a second call; forms agree with the plain fp32 model.

    Returns:
        Relative L2 distance from the logits of the plain fp32 model, 0 for the plain model itself; and about how many
        seconds a call takes.

    Raises:
        RuntimeError: they are not, or do not.
    """
    (images,) = call.args
    logits = call()
    start = time.perf_counter()
    again = call()
    same = torch.equal(logits, again) if device == "cpu" else torch.allclose(logits, again, rtol=1e-3, atol=1e-3)
    seconds = time.perf_counter() - start
    classes = call.func.num_classes
    shape = (len(images), classes) if classes else (len(images), call.func.num_features)
    if tuple(logits.shape) != shape or not logits.isfinite().all():
        raise RuntimeError(f"{one.text}: logits {tuple(logits.shape)} must be finite and {shape}; nothing was timed")
    if not same:
        raise RuntimeError(f"{one.text}: a second call gives other logits; nothing was timed")
    tolerance = one.tolerance(dtype)
    if not tolerance:
        return 0.0, seconds
    if device == "cuda":
        tolerance = max(tolerance, 5e-3)  # convolutions there run in TF32, and differ by the algorithm
    expected = one.build(device=device, plain=True)(images.float())
    distance = ((logits.float() - expected).norm() / expected.norm()).item()
    if not distance <= tolerance:
        raise RuntimeError(
            f"{one.text}: logits are off those of the plain fp32 model by {distance:.1e} of their norm, more than "
            f"{tolerance:.0e}; nothing was timed"
        )
    return distance, seconds


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
