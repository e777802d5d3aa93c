"""Token fusion in our own Transformers models: the host of jumbo_core's JumboViT around the attention of hf_ext."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_ext.attention import JumboAttention
from hf_ext.tofu_hosts import ConfiguredHost, check_takes_bias
from hf_ext.trunk import Trunk
from jumbo_core.jumbo import JumboBlock, JumboEncoder
from jumbo_core.tofu import register_host
from jumbo_core.tofu.hosts import JumboHost


class JumboModelHost(ConfiguredHost, JumboHost):
    """JumboModel and the models with one as base model. Dense outputs as in :mod:`hf_ext.tofu_hosts`."""

    supported = "hf_ext's JumboModel, JumboForImageClassification, JumboBackbone"

    def accepts(self, model: nn.Module) -> bool:
        trunk = _trunk(model)
        return trunk is not None and all(
            type(block).forward is JumboBlock.forward and isinstance(block.attn, JumboAttention)
            for block in trunk.encoder.blocks
        )

    def check_options(self, model, proportional, importance):
        if proportional:
            check_takes_bias(model.config)

    def blocks(self, model):
        return super().blocks(_trunk(model))

    def prefix(self, model):
        return super().prefix(_trunk(model))

    def num_patches(self, model):
        return super().num_patches(_trunk(model))

    def queries_and_keys(self, block):
        return block.attn.qkv, block.attn.qkv

    def queries(self, block, output):
        return _part_of_qkv(block, output, 0)

    def keys(self, block, output):
        return _part_of_qkv(block, output, 1)

    def scale(self, block):
        return block.attn.attend.scaling

    def attend(self, block, tokens, bias, jumbo_ffn=None, attn_mask=None):
        if bias is not None:  # it may have been set since
            check_takes_bias(block.attn.attend.config)
        return super().attend(block, tokens, bias, jumbo_ffn, attn_mask)

    def mlp_prefix(self, model):
        return super().mlp_prefix(_trunk(model))

    def dense_calls(self, model):
        trunk = _trunk(model)
        return [(trunk, "forward"), *super().dense_calls(trunk)]

    def reads_maps(self, owner, options):
        # A trunk is asked for block outputs, by feature maps and hidden states, or for the last tokens alone.
        return not isinstance(owner, Trunk) or bool(options.get("record") or options.get("collect"))

    def multiply_adds(self, model, before, after):
        return super().multiply_adds(_trunk(model), before, after)


def _trunk(model: nn.Module) -> Trunk | None:
    """The JumboViT in one of our own models; None where there is none."""
    trunk = getattr(model.base_model, "vit", None) if isinstance(model, PreTrainedModel) else None
    return trunk if isinstance(trunk, Trunk) and isinstance(trunk.encoder, JumboEncoder) else None


def _part_of_qkv(block: JumboBlock, output: torch.Tensor, part: int) -> torch.Tensor:
    """(B, T, 3*D) -> (B, H, T, d) of the queries (0), keys (1) or values (2)."""
    return output.unflatten(-1, (3, block.attn.num_heads, -1))[:, :, part].transpose(1, 2)


def register() -> None:
    """Make token fusion know our own models; doing it again changes nothing."""
    register_host(_HOST)


_HOST = JumboModelHost()
