"""Token fusion in our own Transformers models: the host of jumbo_core's JumboViT around the attention of hf_ext."""

from __future__ import annotations

import torch
from torch import nn

from hf_ext.attention import JumboAttention
from hf_ext.tofu_hosts import check_takes_bias
from hf_ext.tofu_trunks import TrunkHost
from jumbo_core.jumbo import JumboBlock, JumboEncoder
from jumbo_core.tofu import register_host
from jumbo_core.tofu.hosts import JumboHost


class JumboModelHost(TrunkHost, JumboHost):
    """JumboModel and the models with one as base model."""

    supported = "hf_ext's JumboModel, JumboForImageClassification, JumboBackbone"
    encoder_class = JumboEncoder

    def accepts(self, model: nn.Module) -> bool:
        trunk = self.trunk(model)
        return trunk is not None and all(
            type(block).forward is JumboBlock.forward and isinstance(block.attn, JumboAttention)
            for block in trunk.encoder.blocks
        )

    def check_options(self, model, proportional, importance):
        if proportional:
            check_takes_bias(model.config)

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


def _part_of_qkv(block: JumboBlock, output: torch.Tensor, part: int) -> torch.Tensor:
    """(B, T, 3*D) -> (B, H, T, d) of the queries (0), keys (1) or values (2)."""
    return output.unflatten(-1, (3, block.attn.num_heads, -1))[:, :, part].transpose(1, 2)


def register() -> None:
    """Make token fusion know our own models; doing it again changes nothing."""
    register_host(_HOST)


_HOST = JumboModelHost()
