"""Token fusion that is saved with a Transformers model: the plan in ``config.json``, restored by ``from_pretrained``.

``apply_tofu`` is :func:`jumbo_core.tofu.apply_tofu`: with hf_ext imported it takes Transformers models, whose
``save_pretrained`` then writes plan and options as the entry "tofu" of ``config.json``; ``from_pretrained`` of the same
or another class of that model, Auto classes and ``pipeline`` fuse what they load. With ``tofu=None`` it leaves fusion
out, and a model whose fusion was removed is saved without. A plan that does not fit the loaded model is an error. Give
``apply_tofu`` the model that will be saved: a whole whose part was fused does not save the part's plan.

The plan belongs to the model, not to its configuration, which models may share: ``model.config`` holds it only while
``save_pretrained`` writes. So a model made from the configuration of a fused one is plain and is saved as such, and
``from_pretrained(folder, config=model.config)`` loads a plain one. What ``AutoConfig.from_pretrained`` reads from a
fused folder does hold the plan, for ``from_pretrained(folder, config=...)`` to find. A stock model made from that
without weights is plain, but takes the plan along into what it saves (our own models do not): ``del config.tofu,
config.quantization_config`` before making it.

How stock classes restore a plan. Importing hf_ext may register, not patch, and the one thing registered with
Transformers that every ``from_pretrained`` asks, of stock classes too, is its table of quantizers. So ``config.json``
also says ``"quantization_config": {"quant_method": "tofu"}``, and what is registered under that name fuses the loaded
model and then withdraws: the model is not marked as quantized and has no ``hf_quantizer``, so that it trains, changes
dtype and saves as any other. The price: a model has one quantizer. A quantized stock model can be fused, but with a
warning that the plan is not saved, and a fused folder cannot be quantized while it loads (Transformers says so); under
DeepSpeed ZeRO-3 and FSDP every process reads all weights, as for quantized models. Where hf_ext has not been imported,
Transformers warns about an unknown quantization type "tofu" and loads the plain model.
Considered and left: model types of our own ("tofu_vit") for the Auto classes, which ``ViTModel.from_pretrained`` would
load unfused with hf_ext imported, and plain Transformers not at all; code in the folder (``auto_map``), which needs
``trust_remote_code`` and serves the Auto classes alone. Our own models have a ``from_pretrained`` of their own that
restores plans: they need no such entry, and can be quantized and fused.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from jumbo_core.tofu import FusionPlan, apply_tofu, is_fused, remove_tofu
from jumbo_core.tofu.apply import OPTIONS

__all__ = ["apply_tofu", "is_fused", "remove_tofu"]

METHOD = "tofu"
_PLAN = ("ops", "counts")


def remember(model: PreTrainedModel, plan: FusionPlan, options: dict) -> None:
    """Let the model save plan and options; warns where they could not be restored from what it saves."""
    if not _warned_of_quantization(model):
        model.save_pretrained = _SaveFused(model, {"ops": list(plan.ops), "counts": list(plan.counts), **options})


def forget(model: PreTrainedModel) -> None:
    """Undo :func:`remember` in a model and its parts, and take out what a configuration read from a folder says."""
    for part in model.modules():
        if isinstance(vars(part).get("save_pretrained"), _SaveFused):
            del part.save_pretrained
    _clear(model)


@contextmanager
def saying(model: PreTrainedModel, record: dict | None) -> Iterator[None]:
    """Inside, the model's configuration holds this plan, or none; before and after, what it held."""
    own = getattr(model, "restores_tofu", False)
    entries = {"tofu": record} if own else {"tofu": record, "quantization_config": {"quant_method": METHOD}}
    configs = [vars(c) for c in (model.config, getattr(model.config, "vision_config", None)) if c is not None]
    held = [{name: config[name] for name in entries if name in config} for config in configs]
    try:
        for config in configs:
            for name, value in entries.items():
                if record is not None:
                    config[name] = dict(value)
                elif name == "tofu" or _is_ours(config.get(name)):
                    config.pop(name, None)
        yield
    finally:
        for config, before in zip(configs, held, strict=True):
            for name in entries:
                config.pop(name, None)
            config.update(before)


def restore(model: PreTrainedModel) -> None:
    """Fuse a loaded model as its configuration says, which says nothing of it from then on.

    Raises:
        ValueError: a plan that does not fit the model, an entry that is none.
    """
    record = getattr(model.config, "tofu", None)
    if record is None:
        _clear(model)
        return
    try:
        plan, options = _read(record)
        apply_tofu(model, plan, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the token fusion in the configuration does not fit this {type(model).__name__}: {error}. Load with "
            f"tofu=None to leave it out"
        ) from error
    _clear(model)


class _SaveFused:
    """Stands in as ``save_pretrained`` of a fused model: the configuration holds the plan while it is written."""

    def __init__(self, model: PreTrainedModel, record: dict) -> None:
        self.model, self.record = model, record

    @property
    def __signature__(self) -> inspect.Signature:
        """Of the method it stands in for."""
        return inspect.signature(MethodType(type(self.model).save_pretrained, self.model))

    def __call__(self, *args, **kwargs):
        # Fusion may have been taken out of a part, and a quantization may have come since.
        fused = is_fused(self.model) and not _warned_of_quantization(self.model)
        with saying(self.model, self.record if fused else None):
            return type(self.model).save_pretrained(self.model, *args, **kwargs)


class TokenFusionConfig(QuantizationConfigMixin):
    """What ``quantization_config`` becomes while a fused stock model loads: a name, nothing else."""

    def __init__(self, quant_method: str = METHOD, **unknown) -> None:
        if unknown:
            raise ValueError(f"a quantization_config of method {METHOD!r} has no other entry, got {sorted(unknown)}")
        self.quant_method = quant_method


class TokenFusionLoader(HfQuantizer):
    """Stands where a quantizer would, quantizes nothing, and is gone when the model is loaded."""

    def preprocess_model(self, model: PreTrainedModel, dtype=None, **kwargs) -> None:
        """Does nothing; the host's own marks the model as quantized."""

    def postprocess_model(self, model: PreTrainedModel, **kwargs) -> None:
        """Fuse the loaded model."""
        del model.hf_quantizer
        restore(model)

    def get_new_dtype(self, converter, param, dtype):
        """As where there is no quantizer."""
        return dtype

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def register() -> None:
    """Make ``from_pretrained`` know the method "tofu"; doing it again changes nothing."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(TokenFusionConfig)
        register_quantizer(METHOD)(TokenFusionLoader)


def _read(record) -> tuple[FusionPlan, dict]:
    """Plan and options of a configuration's ``tofu`` entry."""
    if not isinstance(record, dict) or not set(_PLAN) <= set(record) <= {*_PLAN, *OPTIONS}:
        found = sorted(record) if isinstance(record, dict) else repr(record)
        raise ValueError(f"tofu must be an object with {', '.join(_PLAN)} and possibly {', '.join(OPTIONS)}: {found}")
    options = {name: value for name, value in record.items() if name in OPTIONS}
    return FusionPlan(tuple(record["ops"]), tuple(record["counts"])), options


def _warned_of_quantization(model: PreTrainedModel) -> bool:
    """Whether a real quantization leaves no place in config.json; then the user has been warned."""
    taken = getattr(model.config, "quantization_config", None)
    if getattr(model, "restores_tofu", False) or taken is None or _is_ours(taken):
        return False
    warnings.warn(
        f"{type(model).__name__} is fused, but a saved copy will not be: its quantization ({_method(taken)}) takes the "
        f"place in config.json from which Transformers would restore the plan. Call apply_tofu after loading",
        stacklevel=4,
    )
    return True


def _clear(model: PreTrainedModel) -> None:
    """Take plans out of the configurations of a model and its parts."""
    for config in _configs(model):
        # Not delattr: a declared field stands in the class too, as None.
        vars(config).pop("tofu", None)
        if _is_ours(getattr(config, "quantization_config", None)):
            del config.quantization_config


def _configs(model: PreTrainedModel) -> Iterator[PreTrainedConfig]:
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            yield part.config
            if (vision := getattr(part.config, "vision_config", None)) is not None:
                yield vision


def _is_ours(quantization) -> bool:
    return quantization is not None and _method(quantization) == METHOD


def _method(quantization) -> str:
    """Of a quantization configuration, which is a dictionary or an object."""
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    return getattr(method, "value", method)
