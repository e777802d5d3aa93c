"""Tiny models of Transformers for the tests of token fusion, and their layers written out by hand."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPVisionConfig,
    CLIPVisionModel,
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    DeiTModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    PreTrainedConfig,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    ViTMAEConfig,
    ViTMAEModel,
    ViTModel,
)

from hf_ext import JumboConfig, JumboForImageClassification, JumboModel
from jumbo_core.tofu import FusionPlan, fuse, match

PLAN = FusionPlan(("prune", "average", "mlerp"), (3, 2, 4))
ATTENTION = ("eager", "sdpa")

SIZES = dict(
    image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64
)


class Family(NamedTuple):
    """A model class, how to make it small, and how many tokens stand in front of its patches."""

    model: type[PreTrainedModel]
    config: type[PreTrainedConfig]
    prefix: int
    options: dict = {}
    patches: int = 16

    def make(self, cls: type[PreTrainedModel] | None = None, attention: str = "sdpa", **options) -> PreTrainedModel:
        config = self.config(**{**SIZES, **self.options, **options})
        return randomised((cls or self.model)._from_config(config, attn_implementation=attention)).eval()


MLP = dict(mlp_ratio=2)
FAMILIES = {
    "vit": Family(ViTModel, ViTConfig, 1, dict(encoder_stride=8)),
    "deit": Family(DeiTModel, DeiTConfig, 2, dict(encoder_stride=8)),
    "dinov2": Family(Dinov2Model, Dinov2Config, 1, MLP),
    "dinov2 swiglu": Family(Dinov2Model, Dinov2Config, 1, dict(**MLP, use_swiglu_ffn=True)),
    "dinov2 registers": Family(Dinov2WithRegistersModel, Dinov2WithRegistersConfig, 5, MLP),
    "dinov3": Family(DINOv3ViTModel, DINOv3ViTConfig, 4, dict(num_register_tokens=3)),
    "clip": Family(CLIPVisionModel, CLIPVisionConfig, 1, dict(projection_dim=8)),
    "mae": Family(
        ViTMAEModel,
        ViTMAEConfig,
        1,
        dict(
            image_size=64,
            mask_ratio=0.75,
            decoder_hidden_size=16,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=32,
        ),
    ),
}
JUMBO = {
    "jumbo": Family(JumboModel, JumboConfig, 3, dict(multiplier=3, mlp_ratio=2, intermediate_size=None)),
    "jumbo registers": Family(
        JumboModel, JumboConfig, 4, dict(multiplier=2, registers=2, layer_scale=0.1, intermediate_size=None)
    ),
}
TOWERS = {name: family for name, family in {**FAMILIES, **JUMBO}.items() if name != "dinov2 swiglu"}
HEADS = {
    "vit": ViTForImageClassification,
    "deit": DeiTForImageClassification,
    "deit teacher": DeiTForImageClassificationWithTeacher,
    "dinov2": Dinov2ForImageClassification,
    "dinov2 registers": Dinov2WithRegistersForImageClassification,
    "jumbo": JumboForImageClassification,
}


def clip(cls: type[PreTrainedModel], attention: str = "sdpa", **options) -> PreTrainedModel:
    """A model around CLIP's two towers or its vision tower."""
    vision = {**SIZES, "projection_dim": 8}
    text = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20)
    config = CLIPConfig(vision_config=vision, text_config=text, projection_dim=8, **options)
    return randomised(cls._from_config(config, attn_implementation=attention)).eval()


def classifier(name: str, attention: str = "sdpa", **options):
    return TOWERS[name.removesuffix(" teacher")].make(HEADS[name], attention, num_labels=5, **options)


def randomised(model: nn.Module) -> nn.Module:
    """Weights away from their start, where much is zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def inputs(model: PreTrainedModel, batch: int = 2) -> dict[str, torch.Tensor]:
    """Images, and where patches are masked at random, the noise that decides which."""
    side = 64 if isinstance(model.config, ViTMAEConfig) else 32
    images = {"pixel_values": torch.randn(batch, 3, side, side)}
    return images | ({"noise": torch.rand(batch, 64)} if side == 64 else {})


def last(model, given) -> torch.Tensor:
    with torch.no_grad():
        return model(**given).last_hidden_state


def embedded(model: PreTrainedModel, given: dict) -> torch.Tensor:
    """What a tower's first layer sees."""
    tokens = model.embeddings(**given)
    tokens = tokens[0] if isinstance(tokens, tuple) else tokens
    return model.pre_layrnorm(tokens) if isinstance(model, CLIPVisionModel) else tokens


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    inner = getattr(model, "encoder", getattr(model, "model", model))
    return inner.layer if hasattr(inner, "layer") else inner.layers


def written_out(
    model: PreTrainedModel, given: dict, plan: FusionPlan, prefix: int, *, proportional: bool, order: str = "position"
) -> torch.Tensor:
    """A tower's ``last_hidden_state``, fused: every layer from its weights, attention by hand."""
    x, sizes = embedded(model, given), None
    batch, total = x.shape[:2]
    patch = torch.arange(total - prefix).expand(batch, -1)  # which of the patches each token began as
    for layer, op, r in zip(layers_of(model), plan.ops, plan.counts, strict=True):
        attention = layer.self_attn if hasattr(layer, "self_attn") else layer.attention
        first = next(n for n in ("layernorm_before", "layer_norm1", "norm1") if hasattr(layer, n))
        second = next(n for n in ("layernorm_after", "layer_norm2", "norm2") if hasattr(layer, n))
        out = attention.o_proj if hasattr(attention, "o_proj") else attention.out_proj
        normed = getattr(layer, first)(x)
        q, k, v = (
            getattr(attention, n)(normed).unflatten(-1, (2, -1)).transpose(1, 2) for n in ("q_proj", "k_proj", "v_proj")
        )
        turned_q, turned_k = q, k
        if isinstance(model, DINOv3ViTModel):
            cos, sin = model.rope_embeddings(given["pixel_values"])
            turned_q, turned_k = (_turn(y, cos[patch], sin[patch], prefix) for y in (q, k))
        scores = turned_q @ turned_k.transpose(-2, -1) / 16**0.5
        if proportional and sizes is not None:
            scores = scores + sizes.log().transpose(1, 2)[:, None]
        attended = out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x + (layer.layer_scale1(attended) if hasattr(layer, "layer_scale1") else attended)
        matching = match(k, r, protected=prefix, order=order)
        x, sizes = fuse(x, matching, op, sizes=sizes)
        patch = patch.gather(1, matching.kept[:, prefix:] - prefix)
        fed = layer.mlp(getattr(layer, second)(x))
        x = x + (layer.layer_scale2(fed) if hasattr(layer, "layer_scale2") else fed)
    if isinstance(model, CLIPVisionModel):
        return x
    return (model.norm if hasattr(model, "norm") else model.layernorm)(x)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, prefix: int) -> torch.Tensor:
    """Rotary positions, each of (B, K, d), on the patches of (B, H, T, d)."""
    still, x = x[:, :, :prefix], x[:, :, prefix:]
    a, b = x.chunk(2, -1)
    return torch.cat([still, x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]], dim=2)
