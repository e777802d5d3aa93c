"""Forms in which a model can be timed: attention, memory order, compilation, number type, another library's mixers."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch
from torch import nn

from jumbo_core.linear import Mamba2Mixer

# Options of a name, and the relative L2 distance from the plain fp32 model's logits that is let pass.
OPTIONS = {
    "materialised": 1e-4,  # attention scores as a tensor: timm's fused_attn off
    "channels-last": 1e-4,  # what convolutional peers want on CPU and GPU
    "compile": 1e-3,  # torch.compile, dynamic=False
    "transformers": 1e-4,  # Mamba-2 mixers of Transformers, same weights
    "int8": 0.1,  # jumbo_core.optimize_for_inference(model, dtype="int8")
    "bf16": 0.05,  # jumbo_core.optimize_for_inference(model, dtype="bfloat16")
}
OPTIMISED = {"int8": "int8", "bf16": "bfloat16"}  # forms for inference alone
DTYPES = {"float32": 0.0, "bfloat16": 0.05, "float16": 0.01}  # what storing the whole model so may move its logits


def apply_forms(model: nn.Module, options: Sequence[str], dtype: str, device: str, name: str) -> nn.Module:
    """The model in the forms that ``options`` name, on its device; ``name`` is for error messages."""
    if "materialised" in options:
        materialise_attention(model, name)
    if "transformers" in options:
        use_transformers_mixers(model, name)
    model = model.to(device, getattr(torch, dtype))
    for option in options:
        if option in OPTIMISED:
            model = importlib.import_module("jumbo_core").optimize_for_inference(model, dtype=OPTIMISED[option])
    if "channels-last" in options:
        model = model.to(memory_format=torch.channels_last)
    return torch.compile(model, dynamic=False) if "compile" in options else model


def materialise_attention(model: nn.Module, name: str | None) -> None:
    """Switch fused attention off; with a name, a model that has none is a ValueError."""
    found = [module for module in model.modules() if hasattr(module, "fused_attn")]
    if name is not None and not found:
        raise ValueError(f"{name}: nothing in it has fused attention that could be switched off; drop @materialised")
    for module in found:
        module.fused_attn = False


class _TheirMixer(nn.Module):
    """Transformers' Mamba-2 mixer where an AdventurerBlock calls its own."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.mixer(x, attention_mask=mask)


def use_transformers_mixers(model: nn.Module, name: str) -> None:
    """Replace every mixer by Transformers' with the same weights, at the chunk that is best for it on CPU (64)."""
    try:
        theirs = importlib.import_module("transformers.models.mamba2.modeling_mamba2").Mamba2Mixer
        config_class = importlib.import_module("transformers").Mamba2Config
    except ImportError as error:
        raise ImportError("@transformers needs Transformers: pip install 'jumbo-vit[hf]'") from error
    blocks = [module for module in model.modules() if isinstance(getattr(module, "mixer", None), Mamba2Mixer)]
    if not blocks:
        raise ValueError(f"{name}: it has no Mamba-2 mixer; @transformers is for adventurer models")
    for block in blocks:
        own = block.mixer
        if own.inner % own.dim:
            raise ValueError(f"{name}: Transformers' mixer wants a whole expand, got {own.inner / own.dim}")
        config = config_class(
            hidden_size=own.dim, num_heads=own.num_heads, head_dim=own.head_dim, state_size=own.d_state,
            expand=own.inner // own.dim, conv_kernel=own.conv_kernel, n_groups=1, chunk_size=64, use_bias=False,
            use_conv_bias=True, layer_norm_epsilon=own.norm.eps, num_hidden_layers=1,
        )  # fmt: skip
        mixer = theirs(config, layer_idx=0)
        mixer.load_state_dict(own.state_dict())
        block.mixer = _TheirMixer(mixer.to(own.D.device).eval())
