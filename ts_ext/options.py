"""Options that belong together: what one kind of encoder or head has and another has not."""

from __future__ import annotations

import math
from typing import Any

from jumbo_core import checks
from jumbo_core.models.series import ENCODERS

HEADS = ("forecast", "classify", "regress", "pretrain")
CHANNELS = ("independent", "mixing")


def encoder_options(
    encoder: str,
    d_model: int,
    registers: int,
    attn_dropout: float,
    layer_scale: float | None,
    *,
    d_state: int,
    head_dim: int | None,
) -> dict[str, Any]:
    """Arguments that one kind of encoder alone has; what it does not have must be off."""
    if encoder not in ENCODERS:
        raise ValueError(f"encoder must be one of {ENCODERS}, got {encoder!r}")
    if encoder == "attention":
        if head_dim is not None:
            raise ValueError(
                f"head_dim {head_dim} is an option of encoder='linear'; the size of attention's heads is d_model "
                f"{d_model} over n_heads"
            )
        return dict(registers=registers, attn_drop=attn_dropout, layer_scale=layer_scale)
    for name, value, off in (
        ("registers", registers, 0),
        ("attn_dropout", attn_dropout, 0),
        ("layer_scale", layer_scale, None),
    ):
        if value != off:
            raise ValueError(f"encoder='linear' has no {name}, got {value!r}: leave it at {off} or use 'attention'")
    if head_dim is None:
        head_dim = math.gcd(64, 2 * d_model)
    return dict(d_state=checks.integer("d_state", d_state), head_dim=checks.integer("head_dim", head_dim))


def check_jumbo_ffn(jumbo_mlp_ratio: float, multiplier: int, d_model: int) -> None:
    """A ratio that leaves the Jumbo FFN at least one hidden unit."""
    if not 0 < jumbo_mlp_ratio < math.inf or (multiplier and int(multiplier * d_model * jumbo_mlp_ratio) < 1):
        raise ValueError(
            f"jumbo_mlp_ratio must be above 0 and leave the Jumbo FFN a hidden unit, got {jumbo_mlp_ratio!r}: its "
            f"hidden width is jumbo_mlp_ratio * multiplier {multiplier} * d_model {d_model}"
        )


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of some words."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; JumboPatchTST has: {', '.join(choices)}")
    return value


def only_forecasts(head: str, **given: Any) -> None:
    """Options that mean something to forecasts alone must be off for the other heads."""
    if head != "forecast":
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} is an option of head='forecast', got {value!r} with head={head!r}")
