"""Token fusion in MMSegmentation: its own VisionTransformer, whole segmentors, and plans written in a config file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from mmcv.cnn.bricks.transformer import FFN, MultiheadAttention
from mmseg.models.backbones import VisionTransformer
from mmseg.models.backbones.vit import TransformerEncoderLayer
from mmseg.models.segmentors.base import BaseSegmentor
from mmseg.registry import MODELS
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from jumbo_core.tofu import FusedModel, FusionHost, FusionPlan, apply_tofu, register_host
from jumbo_core.tofu.apply import OPTIONS
from jumbo_core.tofu.compute import linear_weights, matching_multiply_adds
from jumbo_core.tofu.hosts import _HOSTS, host_of

_PRESETS = {"paper": ("preset", "r"), "uniform": ("preset", "r", "op")}


# --- plans in a config file ---


def fuse(vit: nn.Module, tofu: Mapping[str, Any], depth: int) -> FusedModel:
    """Apply a backbone's ``tofu=`` option to its model, in place.

    Args:
        vit: what :func:`jumbo_core.tofu.apply_tofu` takes; blocks that no map needs may be cut off already.
        tofu: ``plan`` as :func:`plan_of` takes it, and ``proportional``, ``importance``, ``norm``, ``weights``,
            ``order`` as :func:`jumbo_core.tofu.apply_tofu` does.
        depth: blocks of the whole model, which the plan is for.

    Raises:
        TypeError: ``tofu`` is no dict, or a model that no host knows.
        ValueError: no plan, an unknown option, a plan of another depth or with an r that the model cannot meet.
        FileNotFoundError: no such plan file.
    """
    if not isinstance(tofu, Mapping):
        raise TypeError(f"tofu must be a dict with 'plan' and options of apply_tofu, or None, got {tofu!r}")
    unknown = sorted(set(tofu) - {"plan", *OPTIONS})
    if unknown or "plan" not in tofu:
        raise ValueError(f"tofu needs 'plan' and knows {', '.join(OPTIONS)} beside it, got {sorted(tofu)}")
    plan = plan_of(tofu["plan"], depth)
    if len(plan.ops) != depth:
        raise ValueError(f"the plan is for {len(plan.ops)} blocks, the backbone has {depth}")
    built = len(host_of(vit).blocks(vit))
    plan = FusionPlan(plan.ops[:built], plan.counts[:built])
    return apply_tofu(vit, plan, **{name: value for name, value in tofu.items() if name != "plan"})


def plan_of(plan: FusionPlan | str | Path | Mapping[str, Any], depth: int) -> FusionPlan:
    """The plan that a config file means.

    Args:
        plan: a :class:`FusionPlan`; the path of a file that :meth:`FusionPlan.to_json` wrote; ``dict(ops=[…],
            counts=[…])``; ``dict(preset="paper", r=8)``, prune in the first half and MLERP in the rest; or
            ``dict(preset="uniform", r=8, op="mlerp")``.
        depth: number of blocks, for the presets.

    Raises:
        TypeError, ValueError: none of these; the message says which there are.
        FileNotFoundError: no such file.
    """
    if isinstance(plan, FusionPlan):
        return plan
    if isinstance(plan, (str, Path)):
        if not Path(plan).expanduser().is_file():
            raise FileNotFoundError(f"no plan file at {plan}; FusionPlan.to_json(path) writes one")
        return FusionPlan.from_json(Path(plan).expanduser())
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan must be a dict, the path of a plan file or a FusionPlan, got {plan!r}")
    if "preset" not in plan:
        if set(plan) != {"ops", "counts"}:
            raise ValueError(f"a plan is dict(ops=[…], counts=[…]) or has a preset, got the keys {sorted(plan)}")
        return FusionPlan(tuple(plan["ops"]), tuple(plan["counts"]))
    preset = plan["preset"]
    if preset not in _PRESETS:
        raise ValueError(f"preset must be one of {', '.join(map(repr, _PRESETS))}, got {preset!r}")
    if set(plan) != set(_PRESETS[preset]):
        raise ValueError(f"preset {preset!r} takes {', '.join(_PRESETS[preset][1:])}, got the keys {sorted(plan)}")
    if preset == "paper":
        return FusionPlan.paper(depth, plan["r"])
    return FusionPlan.uniform(depth, plan["r"], plan["op"])


# --- the host's own VisionTransformer ---


class VisionTransformerHost(FusionHost):
    """mmseg's VisionTransformer, whose attention is torch's: keys are computed again from what goes into it.

    Its forward gives maps of the full grid, each position with its group's vector. ``with_cp`` checkpoints the two
    halves of a block, attention and MLP, one by one: fusion between them runs once.
    """

    supported = "MMSegmentation's VisionTransformer"

    def accepts(self, model: nn.Module) -> bool:
        return (
            isinstance(model, VisionTransformer)
            and type(model).forward is VisionTransformer.forward
            and all(_is_plain(layer) for layer in model.layers)
        )

    def blocks(self, model):
        return list(model.layers)

    def prefix(self, model):
        return int(model.with_cls_token)

    def num_patches(self, model):
        return model.pos_embed.shape[1] - 1  # its table always has an entry for the class token

    def queries_and_keys(self, block):
        return block.norm1, block.norm1

    def queries(self, block, output):
        return _project(block.attn.attn, output, 0)

    def keys(self, block, output):
        return _project(block.attn.attn, output, 1)

    def scale(self, block):
        return block.attn.attn.head_dim**-0.5

    def attend(self, block, tokens, bias):
        # A float key_padding_mask is added to the scores of each key: (B, T) instead of a mask (B * heads, T, T).
        padding = None if bias is None else bias[:, 0, 0]

        def attention(normed: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            return block.attn(normed, identity=tokens, key_padding_mask=padding)

        # The norm stays outside of the checkpoint: a hook catches its output, and should do so once.
        return _maybe_checkpointed(block, attention, block.norm1(tokens), tokens)

    def feed(self, block, tokens):
        return _maybe_checkpointed(block, lambda x: block.ffn(block.norm2(x), identity=x), tokens)

    def mlp(self, block):
        return block.ffn.layers  # block.ffn itself adds what it is given

    def mlp_norm(self, block):
        return block.norm2

    def mlp_prefix(self, model):
        return self.prefix(model)

    def dense_calls(self, model):
        return [(model, "forward")]

    def multiply_adds(self, model, before, after):
        total, prefix = 0, self.prefix(model)
        for block, came, left in zip(model.layers, before, after, strict=True):
            width, tokens = block.attn.embed_dims, came + prefix
            total += 4 * tokens * width * width + 2 * tokens * tokens * width
            if left < came:  # the keys once more, and the matching
                total += tokens * width * width + matching_multiply_adds(came, left, block.attn.attn.head_dim)
            total += linear_weights(block.ffn) * (left + prefix)
        return total


def _is_plain(layer: nn.Module) -> bool:
    attention = getattr(layer, "attn", None)
    return (
        type(layer).forward is TransformerEncoderLayer.forward
        and type(attention) is MultiheadAttention
        and attention.batch_first
        and type(attention.attn) is nn.MultiheadAttention
        and attention.attn.bias_k is None
        and not attention.attn.add_zero_attn
        and type(layer.ffn) is FFN
    )


def _project(attention: nn.MultiheadAttention, normed: torch.Tensor, part: int) -> torch.Tensor:
    """Queries (part 0) or keys (part 1) of all heads: (B, T, D) -> (B, H, T, d). Only indices are made from them."""
    rows = slice(part * attention.embed_dim, (part + 1) * attention.embed_dim)
    bias = None if attention.in_proj_bias is None else attention.in_proj_bias[rows].detach()
    projected = F.linear(normed, attention.in_proj_weight[rows].detach(), bias)
    return projected.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)


def _maybe_checkpointed(block: nn.Module, function: Callable[..., torch.Tensor], *tensors) -> torch.Tensor:
    if block.with_cp and torch.is_grad_enabled():
        return checkpoint(function, *tensors, use_reentrant=False)
    return function(*tensors)


@MODELS.register_module()
class ToFuVisionTransformer(VisionTransformer):
    """mmseg's own VisionTransformer that fuses tokens: the same options, parameters and checkpoints, and ``tofu``.

    Makes a trained model of the host faster without training: two lines in its config, type and ``tofu``.

    Args:
        tofu: see :func:`fuse`. Default None: the host's backbone as it is.
        others: of ``mmseg.models.VisionTransformer``.
    """

    def __init__(self, *args, tofu: Mapping[str, Any] | None = None, **options) -> None:
        super().__init__(*args, **options)
        self.fusion: FusedModel | None = None if tofu is None else fuse(self, tofu, len(self.layers))


# --- whole segmentors ---


class SegmentorHost:
    """A segmentor around a model that one of the other hosts knows. Its output are logits of maps, which is what
    :func:`jumbo_core.tofu.linearity_profile` needs to find an adaptive plan for segmentation.

    Args:
        inner: the host of the model inside. Whatever is asked of a segmentor is asked of it, about that model.
    """

    supported = "MMSegmentation segmentors around one of the others"

    def __init__(self, inner: FusionHost) -> None:
        self.inner = inner

    def accepts(self, model: nn.Module) -> bool:
        return isinstance(model, BaseSegmentor) and self.inner.accepts(_inside(model))

    def __getattr__(self, name: str):
        if name.startswith("_") or name == "inner":  # while unpickling there is none yet
            raise AttributeError(name)
        method = getattr(self.inner, name)

        def ask(about: nn.Module, *args, **options):
            return method(_inside(about) if isinstance(about, BaseSegmentor) else about, *args, **options)

        return ask


def _inside(segmentor: nn.Module) -> nn.Module | None:
    """The model inside the segmentor's backbone, which for ours is its ``vit``."""
    backbone = getattr(segmentor, "backbone", None)
    return getattr(backbone, "vit", backbone)


register_host(VisionTransformerHost())
for _host in list(_HOSTS):
    register_host(SegmentorHost(_host))
