"""JumboPatchTST in Transformers: importing it registers the models with the Auto classes.

::

    import ts_ext.transformers
    from transformers import AutoModelForTimeSeriesPrediction

    model = AutoModelForTimeSeriesPrediction.from_pretrained(folder)
    forecast = model(past_values=x).prediction_outputs  # x (B, context_length, channels)

Names of arguments and outputs are those of Transformers' PatchTST. Trainer finds the targets with
``TrainingArguments(label_names=["future_values"])`` (forecasts) or ``["target_values"]`` (classes).
:func:`from_core` and :func:`to_core` move weights between these models and :class:`ts_ext.JumboPatchTST`, which tsai
and plain torch use.
"""

from __future__ import annotations

import torch

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForPreTraining,
        AutoModelForTimeSeriesPrediction,
        PreTrainedModel,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_TIME_SERIES_CLASSIFICATION_MAPPING
except ImportError as error:
    raise ImportError(
        f"ts_ext.transformers needs transformers>=5.24,<6 and accelerate: pip install 'jumbo-vit[hf]' ({error})"
    ) from error

from ts_ext.configuration_jumbo_patchtst import JumboPatchTSTConfig
from ts_ext.modeling_jumbo_patchtst import JumboPatchTSTModel
from ts_ext.modeling_jumbo_patchtst_tasks import (
    JumboPatchTSTForClassification,
    JumboPatchTSTForPrediction,
    JumboPatchTSTForPretraining,
)
from ts_ext.patchtst import JumboPatchTST

__all__ = [
    "JumboPatchTSTConfig",
    "JumboPatchTSTForClassification",
    "JumboPatchTSTForPrediction",
    "JumboPatchTSTForPretraining",
    "JumboPatchTSTModel",
    "from_core",
    "to_core",
]

_TRUNK = "model.trunk."
_HEADS = {"forecast": "prediction_head.", "classify": "classification_head.", "pretrain": "reconstruction_head."}


def from_core(model: JumboPatchTST) -> dict[str, torch.Tensor]:
    """State dict of a :class:`ts_ext.JumboPatchTST`, as the model here with the same head and sizes reads it.

    Raises:
        ValueError: a head that no model here has ("regress").
    """
    if model.task not in _HEADS:
        raise ValueError(f"no model of Transformers has head={model.task!r}; there are: {', '.join(_HEADS)}")
    head = _HEADS[model.task]
    return {
        head + name.removeprefix("head.") if name.startswith("head.") else _TRUNK + name: tensor
        for name, tensor in model.state_dict().items()
    }


def to_core(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """State dict of a model here that has a head, as the :class:`ts_ext.JumboPatchTST` of the same sizes reads it."""
    state = model.state_dict()
    for head in _HEADS.values():
        state = {"head." + n.removeprefix(head) if n.startswith(head) else n: tensor for n, tensor in state.items()}
    return {name.removeprefix(_TRUNK): tensor for name, tensor in state.items()}


def _register() -> None:
    """Make the Auto classes know "jumbo_patchtst". Doing it again changes nothing."""
    AutoConfig.register(JumboPatchTSTConfig.model_type, JumboPatchTSTConfig, exist_ok=True)
    AutoModel.register(JumboPatchTSTConfig, JumboPatchTSTModel, exist_ok=True)
    AutoModelForTimeSeriesPrediction.register(JumboPatchTSTConfig, JumboPatchTSTForPrediction, exist_ok=True)
    AutoModelForPreTraining.register(JumboPatchTSTConfig, JumboPatchTSTForPretraining, exist_ok=True)
    # Transformers has a table for classification of series, and no Auto class that reads it.
    MODEL_FOR_TIME_SERIES_CLASSIFICATION_MAPPING.register(
        JumboPatchTSTConfig, JumboPatchTSTForClassification, exist_ok=True
    )


_register()
