"""``optimize_for_inference``: a trained model made faster for prediction, without changing its answers noticeably."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from jumbo_core.jumbo.encoder import JumboEncoder
from jumbo_core.jumbo.lowlatency import DTYPES, LowLatencyFFN
from jumbo_core.jumbo.packed import PackedLinear
from jumbo_core.jumbo.stack import BlockStack
from jumbo_core.jumbo.token import JumboFFN
from jumbo_core.modes import hooked

logger = logging.getLogger(__name__)


class OptimizedFFN(NamedTuple):
    """One Jumbo FFN of a model, by :func:`inference_report`.

    name: where it sits. dtype: "int8" or "bfloat16". computes: dtype that is multiplied on its present device, float32
    where a processor has no exact int8 products. megabytes, float32_megabytes: what a call reads, now and in float32.
    """

    name: str
    dtype: str
    computes: str
    megabytes: float
    float32_megabytes: float


def optimize_for_inference(model: nn.Module, *, dtype: str = "int8") -> nn.Module:
    """Give every Jumbo FFN inside a trained model small weights, and make the model one for prediction, in place.

    The Jumbo FFN is the widest part of a Jumbo model and runs once per block on one token, so that small batches wait
    for its weights to be read. In int8 they are a quarter as many bytes, and a batch of one runs up to twice as fast.
    Works on anything with a :class:`JumboEncoder`, or an :class:`AdventurerEncoder` with J slices, inside: JumboViT,
    AdventurerViT, models of Transformers, MMSegmentation and time series. How it is computed on which device:
    :mod:`jumbo_core.jumbo.lowlatency`. Beside that the other linear layers in the blocks of a JumboEncoder keep their
    float32 weights a second time, packed, on CPUs (:class:`jumbo_core.jumbo.packed.PackedLinear`; same answers up to
    rounding), all parameters are frozen and the model is set to eval mode.

    ``state_dict()`` has the small weights (int8 ``weight`` and float ``scale`` of each layer). To load them, optimise a
    new model first, then ``load_state_dict``; that takes a state dict in float32 too, and rounds it. Transformers
    models of ours save and restore the choice themselves, MMSegmentation's backbones have the option ``optimize``.

    Args:
        model: a trained model.
        dtype: "int8" (default; weights rounded per output, inputs per token where the processor multiplies int8
            exactly) or "bfloat16" (half of float32's bytes, for processors with such products).

    Returns:
        The model. :func:`inference_report` says what was done, the log as well. Optimising again to the same dtype
        changes nothing.

    Raises:
        ValueError: another dtype; a model that was optimised to the other one, which has no float32 weights any more;
            a Jumbo FFN with forward hooks, as offloading puts on it.
        TypeError: a model without a Jumbo FFN, or one whose layers an adapter or another quantizer has replaced.

    Warns:
        UserWarning: this processor has no exact int8 products: answers are right, but no faster.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(repr, DTYPES))}, got {dtype!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize_for_inference takes a model (a torch module), got {type(model).__name__}")
    places = list(_places(model))
    if not places:
        raise TypeError(
            f"{type(model).__name__} has no Jumbo FFN to optimise: optimize_for_inference is for models with a "
            f"JumboEncoder, or an AdventurerEncoder, of multiplier > 0 (JumboViT, JumboForImageClassification, …)"
        )
    for name, _, _, ffn in places:  # all are looked at before any is changed
        _check(name, ffn, dtype)
    for encoder in (module for module in model.modules() if isinstance(module, BlockStack)):
        encoder._unreachable = []  # nothing in it trains any more, so nothing is to be put back into training
        if isinstance(encoder, JumboEncoder):  # for linear blocks it does not pay: they save the same in other ways
            for linear in _block_layers(encoder):
                PackedLinear.take_over(linear)
    for _, owner, key, ffn in places:
        if not isinstance(ffn, LowLatencyFFN):
            owner[key] = LowLatencyFFN(ffn, dtype)
    model.requires_grad_(False).eval()
    report = inference_report(model)
    logger.info("optimize_for_inference: %s", "; ".join(map(str, report)))
    on_meta = any(tensor.is_meta for tensor in model.parameters())  # a host's loader: what it runs on is yet to come
    if dtype == "int8" and not on_meta and all(entry.computes == "float32" for entry in report):
        warnings.warn(
            "this device has no exact int8 products: the int8 weights are expanded to float32 once, and predictions "
            "are right but no faster; dtype='bfloat16' may be",
            stacklevel=2,
        )
    return model


def inference_report(model: nn.Module) -> list[OptimizedFFN]:
    """What :func:`optimize_for_inference` has done to a model: one entry per FFN, none for a model as it was."""
    entries = []
    for name, module in model.named_modules():
        if isinstance(module, LowLatencyFFN):
            layers = (module.fc1, module.fc2)
            computes = layers[0].kind() if module.dtype == "int8" else layers[0].weight.dtype
            full = 4 * sum(t.numel() for layer in layers for t in (layer.weight, layer.bias) if t is not None)
            size = module.weight_bytes()
            entries.append(
                OptimizedFFN(name, module.dtype, str(computes).removeprefix("torch."), size / 1e6, full / 1e6)
            )
    return entries


class _Attribute:
    """``encoder.jumbo_mlp`` with the brackets that a list of FFNs has."""

    def __init__(self, encoder: nn.Module) -> None:
        self.encoder = encoder

    def __setitem__(self, key: str, ffn: nn.Module) -> None:
        setattr(self.encoder, key, ffn)


def _places(model: nn.Module) -> Iterator[tuple[str, object, str | int, nn.Module]]:
    """Every Jumbo FFN: its name, what it is an item of, its key there, itself."""
    for name, encoder in model.named_modules():
        if isinstance(encoder, BlockStack) and encoder.multiplier:
            path = f"{name}.jumbo_mlp" if name else "jumbo_mlp"
            if encoder.share_jumbo_ffn:
                yield path, _Attribute(encoder), "jumbo_mlp", encoder.jumbo_mlp
            else:
                for i, ffn in enumerate(encoder.jumbo_mlp):
                    yield f"{path}.{i}", encoder.jumbo_mlp, i, ffn


def _block_layers(encoder: BlockStack) -> list[nn.Linear]:
    """The plain float32 linear layers of an encoder's blocks, which neither adapters nor hooks have a part in."""
    return [
        module
        for module in encoder.blocks.modules()
        if type(module) is nn.Linear and type(module.weight) is nn.Parameter and not hooked(module)
    ]


def _check(name: str, ffn: nn.Module, dtype: str) -> None:
    if isinstance(ffn, LowLatencyFFN):
        if ffn.dtype != dtype:
            raise ValueError(
                f"{name} was optimised to {ffn.dtype} already, and its float32 weights are gone: load the trained "
                f"model again for {dtype}"
            )
        return
    plain = isinstance(ffn, JumboFFN) and all(
        type(layer) is nn.Linear and layer.weight.is_floating_point() and type(layer.weight) is nn.Parameter
        for layer in (ffn.fc1, ffn.fc2)
    )
    if not plain:
        raise TypeError(
            f"{name} is no plain JumboFFN ({type(ffn).__name__} of {type(getattr(ffn, 'fc1', None)).__name__}): merge "
            f"adapters, and leave other quantization out, before optimize_for_inference"
        )
    if hooked(*ffn.modules()):
        raise ValueError(
            f"{name} carries hooks, of offloading (device_map, accelerate) or your own, which the FFN in its place "
            f"would not have: load the model on one device without offloading, or remove the hooks, before "
            f"optimize_for_inference"
        )
    if ffn.fc1.weight.dtype == torch.float64:
        raise TypeError(f"{name} is float64: an int8 or bfloat16 FFN does not keep its digits; convert with .float()")
