"""How token fusion finds its way in Transformers' vision models.

Dense outputs hold every original position: ``feature_maps`` of a backbone, ``hidden_states``, what masked-image heads
rebuild. ``last_hidden_state`` of a call without hidden states holds the fused tokens. ``attentions`` ("eager" only) are
those that were computed: smaller from block to block. Masks are refused, since tokens leave their places.
"""

from __future__ import annotations

import inspect
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.backbone_utils import BackboneMixin
from transformers.models.clip.modeling_clip import CLIPEncoderLayer, CLIPVisionModel
from transformers.models.deit.modeling_deit import DeiTForMaskedImageModeling, DeiTLayer, DeiTModel
from transformers.models.dinov2.modeling_dinov2 import Dinov2Backbone, Dinov2Layer, Dinov2Model
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import (
    Dinov2WithRegistersBackbone,
    Dinov2WithRegistersLayer,
    Dinov2WithRegistersModel,
)
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTBackbone, DINOv3ViTLayer, DINOv3ViTModel
from transformers.models.vit.modeling_vit import ViTForMaskedImageModeling, ViTLayer, ViTModel
from transformers.models.vit_mae.modeling_vit_mae import ViTMAEForPreTraining, ViTMAELayer, ViTMAEModel
from transformers.utils.import_utils import is_torchdynamo_exporting

from hf_ext.tofu import forget, remember
from jumbo_core.tofu import FusionHost, register_host
from jumbo_core.tofu.compute import linear_weights, matching_multiply_adds


class _Parts(NamedTuple):
    """Names of a layer's parts. ``scales``: LayerScale of attention and of MLP; ``drop``: what follows each of them."""

    attention: str
    norms: tuple[str, str]
    scales: tuple[str, str] | None = None
    drop: str | None = None


_VIT = _Parts("attention", ("layernorm_before", "layernorm_after"), drop="dropout")
_CLIP = _Parts("self_attn", ("layer_norm1", "layer_norm2"))
_DINO = _Parts("attention", ("norm1", "norm2"), ("layer_scale1", "layer_scale2"), "drop_path")

_LAYERS: dict[type[nn.Module], _Parts] = {
    ViTLayer: _VIT,
    DeiTLayer: _VIT,
    ViTMAELayer: _VIT,
    CLIPEncoderLayer: _CLIP,
    Dinov2Layer: _DINO,
    Dinov2WithRegistersLayer: _DINO,
    DINOv3ViTLayer: _DINO,
}
# The modules that run the layers, and where they keep them.
_TOWERS: dict[type[PreTrainedModel], str] = {
    ViTModel: "layers",
    DeiTModel: "layers",
    ViTMAEModel: "layers",
    CLIPVisionModel: "encoder.layers",
    Dinov2Model: "encoder.layer",
    Dinov2Backbone: "encoder.layer",
    Dinov2WithRegistersModel: "encoder.layer",
    Dinov2WithRegistersBackbone: "encoder.layer",
    DINOv3ViTModel: "model.layer",
    DINOv3ViTBackbone: "model.layer",
}
# Where a model around a tower keeps it, the base model of its class aside: CLIP, UperNet and other users of backbones.
_PLACES = ("vision_model", "backbone")
# Models around a tower that lay its last hidden state out as a grid.
_GRID_READERS = (ViTForMaskedImageModeling, DeiTForMaskedImageModeling, ViTMAEForPreTraining)
# Implementations that take numbers to add to the scores.
_WITH_BIAS = ("eager", "sdpa")


class ConfiguredHost(FusionHost):
    """What hosts of Transformers models share: the model saves the plan."""

    def remember(self, model, plan, options):
        remember(model, plan, options)

    def forget(self, model):
        forget(model)


class TransformersHost(ConfiguredHost):
    """The towers of ``_TOWERS``, alone or inside a model.

    Tokens that rotary positions belong to (DINOv3) keep those of the token they joined, and are matched by their keys
    before rotation: by what they say, not by where they stand.
    """

    supported = (
        "Transformers' ViT, DeiT, DINOv2, DINOv2 with registers, DINOv3 ViT, CLIP vision and ViTMAE models and "
        "backbones, and models with one as base model, .vision_model or .backbone"
    )

    def accepts(self, model: nn.Module) -> bool:
        tower = _tower(model)
        return tower is not None and all(map(_is_plain, _layers(tower)))

    def check_options(self, model, proportional, importance):
        tower = _tower(model)
        if importance == "attention" and isinstance(tower, (DINOv3ViTModel, DINOv3ViTBackbone)):
            raise ValueError(
                "importance by attention is not available for DINOv3, whose queries and keys are rotated inside its "
                "attention: use importance='similarity' and no weights='importance'"
            )
        if proportional:
            check_takes_bias(tower.config)

    def blocks(self, model):
        return _layers(_tower(model))

    def prefix(self, model):
        embeddings = _tower(model).embeddings
        registers = getattr(embeddings, "register_tokens", None)
        return 1 + hasattr(embeddings, "distillation_token") + (0 if registers is None else registers.shape[1])

    def num_patches(self, model):
        tower = _tower(model)
        if isinstance(tower, CLIPVisionModel):
            return tower.embeddings.num_patches
        if isinstance(tower, (DINOv3ViTModel, DINOv3ViTBackbone)):
            return tower.rope_embeddings.num_patches_h * tower.rope_embeddings.num_patches_w
        patches = tower.embeddings.patch_embeddings.num_patches
        if isinstance(tower, ViTMAEModel):  # those that are not masked
            return int(patches * (1 - tower.config.mask_ratio))
        return patches

    def queries_and_keys(self, block):
        if hasattr(block, "_hf_hook"):
            raise ValueError("accelerate has spread this model over devices (device_map): fuse it before that")
        attention = _attention(block)
        return attention.q_proj, attention.k_proj

    def queries(self, block, output):
        return self.keys(block, output)

    def keys(self, block, output):
        return output.unflatten(-1, (-1, _attention(block).head_dim)).transpose(1, 2)  # (B, T, D) -> (B, H, T, d)

    def scale(self, block):
        attention = _attention(block)
        return attention.scale if isinstance(block, CLIPEncoderLayer) else attention.scaling

    def moved(self, origin, context, options):
        rotation = options.get("position_embeddings")
        if rotation is not None:  # two of (N, d) -> (B, 1, K, d)
            options = {**options, "position_embeddings": tuple(part[origin].unsqueeze(1) for part in rotation)}
        return context, options

    def attend(self, block, tokens, bias, attention_mask=None, **options):
        config = _attention(block).config
        if config._attn_implementation == "flex_attention":
            raise ValueError("'flex_attention' wants a mask of the first layer's size: use 'sdpa' or 'eager'")
        # While torch.export traces, Transformers makes up a mask without a hole; reads_maps refuses one of the caller.
        _refuse_masks(None if is_torchdynamo_exporting() else attention_mask, options.get("head_mask"))
        if bias is not None:  # it may have been set since
            check_takes_bias(config)
        return _checkpointed(block, _attend, tokens, bias, **options)

    def feed(self, block, tokens, attention_mask=None, **options):
        return _checkpointed(block, _feed, tokens)

    def mlp(self, block):
        return block.mlp

    def mlp_norm(self, block):
        return getattr(block, _parts(block).norms[1])

    def mlp_prefix(self, model):
        return self.prefix(model)

    def dense_calls(self, model):
        tower = _tower(model)
        readers = [model] if model is not tower and isinstance(model, _GRID_READERS) else []
        return [(owner, "forward") for owner in (*readers, tower)]

    def reads_maps(self, owner, options):
        if is_torchdynamo_exporting():  # see attend
            _refuse_masks(options.get("attention_mask"))
        wanted = options.get("output_hidden_states", owner.config.output_hidden_states)  # a flag, or which ones
        return isinstance(owner, (BackboneMixin, *_GRID_READERS)) or bool(wanted)

    def multiply_adds(self, model, before, after):
        total, prefix = 0, self.prefix(model)
        for block, came, left in zip(_layers(_tower(model)), before, after, strict=True):
            attention, tokens = _attention(block), came + prefix
            total += linear_weights(attention) * tokens + 2 * tokens * tokens * attention.q_proj.out_features
            total += matching_multiply_adds(came, left, attention.head_dim)
            total += linear_weights(block.mlp) * (left + prefix)
        return total


def _tower(model: nn.Module) -> PreTrainedModel | None:
    """The part of the model that runs its layers; None where there is none that we know."""
    if not isinstance(model, PreTrainedModel):
        return None
    for part in (model, model.base_model, *(getattr(model, place, None) for place in _PLACES)):
        if isinstance(part, tuple(_TOWERS)):
            return part
    return None


def _layers(tower: PreTrainedModel) -> list[nn.Module]:
    return list(attrgetter(next(path for kind, path in _TOWERS.items() if isinstance(tower, kind)))(tower))


def _is_plain(layer: nn.Module) -> bool:
    """Whether it runs as the host's layer does; subclasses (FSDP makes some) wrap the method, or replace it."""
    return any(
        isinstance(layer, kind) and inspect.unwrap(type(layer).forward) is inspect.unwrap(kind.forward)
        for kind in _LAYERS
    )


def _parts(layer: nn.Module) -> _Parts:
    return next(parts for kind, parts in _LAYERS.items() if isinstance(layer, kind))


def _attention(layer: nn.Module) -> nn.Module:
    return getattr(layer, _parts(layer).attention)


def _attend(layer: nn.Module, tokens: torch.Tensor, bias: torch.Tensor | None, **options) -> torch.Tensor:
    normed = getattr(layer, _parts(layer).norms[0])(tokens)
    attended, _ = _attention(layer)(normed, attention_mask=bias, **options)
    return _scaled(layer, 0, attended) + tokens


def _feed(layer: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return _scaled(layer, 1, layer.mlp(getattr(layer, _parts(layer).norms[1])(tokens))) + tokens


def _scaled(layer: nn.Module, half: int, x: torch.Tensor) -> torch.Tensor:
    """What a layer does to the result of its attention (0) or MLP (1) before adding it."""
    parts = _parts(layer)
    if parts.scales is not None:
        x = getattr(layer, parts.scales[half])(x)
    return x if parts.drop is None else getattr(layer, parts.drop)(x)


def _refuse_masks(*masks: torch.Tensor | None) -> None:
    if any(mask is not None for mask in masks):
        raise ValueError("a fused model takes no attention mask, for its tokens leave their places; remove() first")


def _checkpointed(layer: nn.Module, half, *args, **options) -> torch.Tensor:
    """Half a layer; the host checkpoints whole ones inside the method that fusion stands in for."""
    if layer.gradient_checkpointing and layer.training and torch.is_grad_enabled():
        return layer._gradient_checkpointing_func(partial(half, layer, **options), *args)
    return half(layer, *args, **options)


def check_takes_bias(config: PreTrainedConfig) -> None:
    """Refuse proportional attention where log sizes cannot be added to the scores.

    Raises:
        ValueError: an attention implementation other than "eager" and "sdpa".
    """
    if config._attn_implementation not in _WITH_BIAS:
        raise ValueError(
            f"proportional=True adds log sizes to the attention scores, which {config._attn_implementation!r} does not "
            f"take: use {' or '.join(map(repr, _WITH_BIAS))} (model.set_attn_implementation), or proportional=False"
        )


def register() -> None:
    """Make token fusion know the models of Transformers; doing it again changes nothing."""
    register_host(_HOST)


_HOST = TransformersHost()
