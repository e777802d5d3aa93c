"""Token fusion in our linear-time Transformers models: the host of jumbo_core's AdventurerViT on their trunk."""

from __future__ import annotations

from torch import nn

from hf_ext.tofu_trunks import TrunkHost
from jumbo_core.linear import AdventurerEncoder
from jumbo_core.tofu import register_host
from jumbo_core.tofu.hosts_adventurer import AdventurerHost


class AdventurerModelHost(TrunkHost, AdventurerHost):
    """AdventurerModel and the models with one as base model."""

    supported = "hf_ext's AdventurerModel, AdventurerForImageClassification, AdventurerBackbone"
    encoder_class = AdventurerEncoder

    def accepts(self, model: nn.Module) -> bool:
        trunk = self.trunk(model)
        return trunk is not None and super().accepts(trunk)


def register() -> None:
    """Make token fusion know our linear-time models; doing it again changes nothing."""
    register_host(_HOST)


_HOST = AdventurerModelHost()
