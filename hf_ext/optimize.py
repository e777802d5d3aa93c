"""Models that ``jumbo_core.optimize_for_inference`` made, saved and restored with Transformers.

The configuration's ``optimize`` says what the weights beside it are: "int8", "bfloat16", or None for a model as it was
trained. A model made from a configuration that says "int8" has int8 weights from the start, for the host's loader to
fill. Every other one is loaded as saved and optimised afterwards: bfloat16 weights pass through the model's own dtype
without loss.
"""

from __future__ import annotations

import copy

from transformers import PreTrainedConfig, PreTrainedModel

from jumbo_core import inference_report, optimize_for_inference


def check_optimize(config: PreTrainedConfig) -> None:
    """Refuse a configuration whose ``optimize`` no model could have, or that has no Jumbo FFN to optimise."""
    if config.optimize not in (None, "int8", "bfloat16"):
        raise ValueError(f"optimize must be 'int8', 'bfloat16' or None, got {config.optimize!r}")
    if config.optimize and not config.multiplier:
        raise ValueError(f"optimize={config.optimize!r} is for the Jumbo FFN, and multiplier=0 has none")


def optimized(model: PreTrainedModel) -> str | None:
    """What the Jumbo FFNs of a model are, None as trained."""
    return next((entry.dtype for entry in inference_report(model)), None)


def plan_loading(saved: PreTrainedConfig | None, config, options: dict, asked: PreTrainedConfig | None = None):
    """How to load a folder: (configuration or None, options of ``from_pretrained``, what to optimise to afterwards).

    Args:
        saved: the configuration in the folder, None where there is none.
        config: what the caller gave as ``config``: an object, a path or None.
        options: the caller's other options; ``optimize`` among them asks for another form than the saved one.
        asked: the configuration that a path as ``config`` leads to.

    Raises:
        ValueError: weights were saved in a form that cannot be turned into the one asked for.
    """
    has = None if saved is None else saved.optimize
    if isinstance(config, PreTrainedConfig):
        wanted = config.optimize
    else:
        wanted = options.get("optimize", has if asked is None else asked.optimize)
    if has not in (None, wanted):
        raise ValueError(
            f"the folder's Jumbo FFN is in {has} and optimize={wanted!r} was asked for: the weights that were rounded "
            f"are gone; load the folder of the trained model"
        )
    if wanted is None:
        return config, options, None
    built = "int8" if has == "int8" else None
    if isinstance(config, PreTrainedConfig):
        config = copy.deepcopy(config)
        config.optimize = built
        return config, options, wanted
    return config, {**options, "optimize": built}, wanted


def finish_loading(model: PreTrainedModel, wanted: str | None) -> None:
    """Optimise a loaded model as :func:`plan_loading` said."""
    if wanted is not None:
        optimize_for_inference(model, dtype=wanted)
        note(model)


def note(model: PreTrainedModel) -> None:
    """Write into the configurations of a model and its parts what their weights are."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and hasattr(part.config, "optimize"):
            part.config.optimize = optimized(part)
