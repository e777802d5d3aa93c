"""What token fusion of our own Transformers models shares: the host of jumbo_core's model is asked about the trunk."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from hf_ext.tofu_hosts import ConfiguredHost
from hf_ext.trunk import Trunk


class TrunkHost(ConfiguredHost):
    """Mixed into a host of jumbo_core, in front of it. Dense outputs as in :mod:`hf_ext.tofu_hosts`."""

    encoder_class: type[nn.Module]  # of the trunks it is for

    def trunk(self, model: nn.Module) -> Trunk | None:
        """The image model in one of our own models; None where there is none of this kind."""
        trunk = getattr(model.base_model, "vit", None) if isinstance(model, PreTrainedModel) else None
        return trunk if isinstance(trunk, Trunk) and isinstance(trunk.encoder, self.encoder_class) else None

    def blocks(self, model):
        return super().blocks(self.trunk(model))

    def prefix(self, model):
        return super().prefix(self.trunk(model))

    def num_patches(self, model):
        return super().num_patches(self.trunk(model))

    def mlp_prefix(self, model):
        return super().mlp_prefix(self.trunk(model))

    def mlp_suffix(self, model):
        trunk = self.trunk(model)
        return super().mlp_suffix(model if trunk is None else trunk)  # the core's own methods ask it about the encoder

    def arrangement(self, model, index):
        return super().arrangement(self.trunk(model), index)

    def dense_calls(self, model):
        trunk = self.trunk(model)
        return [(trunk, "forward"), *super().dense_calls(trunk)]

    def reads_maps(self, owner, options):
        # A trunk is asked for block outputs, by feature maps and hidden states, or for the last tokens alone.
        return not isinstance(owner, Trunk) or bool(options.get("record") or options.get("collect"))

    def multiply_adds(self, model, before, after):
        return super().multiply_adds(self.trunk(model), before, after)
