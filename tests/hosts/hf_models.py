"""Tiny models for the tests of the Transformers adapter."""

from __future__ import annotations

import torch

from hf_ext import AdventurerConfig, JumboConfig

TINY = dict(
    image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, multiplier=2, num_labels=5
)
VARIANTS = {
    "jumbo": {},
    "registers baseline": dict(multiplier=0, registers=4),
    "jumbo and registers": dict(registers=3),
    "unshared, layer scale": dict(share_jumbo_ffn=False, layer_scale=1e-4),
    "short": dict(init="short"),
}


def config(**changes) -> JumboConfig:
    return JumboConfig(**{**TINY, **changes})


def randomised(model):
    """Weights away from their start, where zero heads and FFNs would hide errors."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


# --- linear-time models ---

LINEAR_TINY = dict(
    image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=3, state_size=8, head_dim=8, num_labels=5
)
LINEAR_VARIANTS = {
    "adventurer": {},
    "released flips": dict(flip=[0, 2]),
    "jumbo-linear": dict(multiplier=2),
    "unshared, short": dict(multiplier=2, share_jumbo_ffn=False, init="short"),
}


def linear_config(**changes) -> AdventurerConfig:
    return AdventurerConfig(**{**LINEAR_TINY, **changes})
