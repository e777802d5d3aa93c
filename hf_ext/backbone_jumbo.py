"""Jumbo as a backbone: feature maps for detection and segmentation frameworks on Transformers."""

from __future__ import annotations

import torch
from torch import nn
from transformers.backbone_utils import BackboneMixin
from transformers.modeling_outputs import BackboneOutput
from transformers.utils.output_capturing import capture_outputs

from hf_ext.configuration_jumbo import JumboConfig
from hf_ext.modeling_jumbo import JumboModel, JumboPreTrainedModel


class JumboBackbone(BackboneMixin, JumboPreTrainedModel):
    """Feature maps (B, D, h, w), one per stage of ``config.out_features``, of the patches alone.

    Blocks after the last wanted stage are not run. What cannot reach a feature map (those blocks, the last block's
    Jumbo norm, …) does not require gradients, so distributed training waits for nothing; it is still saved and loaded.
    """

    def __init__(self, config: JumboConfig) -> None:
        super().__init__(config)
        self.num_features = [config.hidden_size] * (config.num_hidden_layers + 1)
        self.jumbo = JumboModel(config)
        self.post_init()
        self._frozen: set[str] = set()
        self._freeze_unreachable()

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As for any model; the host's loader makes new parameters, so what is idle is frozen again afterwards."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info=True
        model._frozen = set()
        model._freeze_unreachable()
        return loaded

    def get_input_embeddings(self) -> nn.Module:
        return self.jumbo.get_input_embeddings()

    @property
    def out_features(self) -> list[str]:
        return self.config.out_features

    @out_features.setter
    def out_features(self, out_features: list[str]) -> None:
        self.config.out_features = out_features
        self._freeze_unreachable()

    @property
    def out_indices(self) -> list[int]:
        return self.config.out_indices

    @out_indices.setter
    def out_indices(self, out_indices: list[int]) -> None:
        self.config.out_indices = out_indices
        self._freeze_unreachable()

    @property
    def stages(self) -> list[int]:
        """Wanted stages as numbers, 0 = stem, i = after block i."""
        return [self.stage_names.index(name) for name in self.out_features]

    def _freeze_unreachable(self) -> None:
        parameters = dict(self.named_parameters())
        for name in self._frozen:
            parameters[name].requires_grad_(True)
        before = {name for name, parameter in parameters.items() if parameter.requires_grad}
        encoder, last = self.jumbo.vit.encoder, max(self.stages)
        idle = list(encoder.blocks[last:])
        if not self.config.apply_layernorm:
            idle.append(encoder.norm)
        if encoder.multiplier:
            # Patches of block `last` still see the slices that block `last - 1` wrote; what `last` writes is unseen.
            if last:
                idle += [encoder.blocks[last - 1].norm3, encoder.blocks[last - 1].ls3]
            if not encoder.share_jumbo_ffn:
                idle += encoder.jumbo_mlp[max(last - 1, 0) :]
            elif last <= 1:
                idle.append(encoder.jumbo_mlp)
        for module in idle:
            module.requires_grad_(False)
        if last == 0:
            for parameter in encoder.parameters(recurse=False):  # prefix tokens, which the stem's map does not hold
                parameter.requires_grad_(False)
        self._frozen = {name for name in before if not parameters[name].requires_grad}

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        pixel_mask: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        **kwargs,
    ) -> BackboneOutput:
        """Images (B, C, H, W) -> feature_maps, a tuple of (B, D, h, w).

        Args:
            pixel_values, pixel_mask, output_attentions: see :meth:`JumboModel.forward`.
            **kwargs: ``output_hidden_states`` and ``return_dict``.

        Raises:
            ValueError: ``patch_drop_rate`` is above 0 in training, which would leave holes in the maps.
        """
        self._check_attentions(output_attentions)
        vit = self.jumbo.vit
        if vit.training and vit.patch_drop_rate:
            raise ValueError(f"feature maps have holes while patch_drop_rate is {vit.patch_drop_rate}; set it to 0")
        stages, grid = self.stages, vit.grid_of(pixel_values.shape[-2:])
        mask = self.jumbo.patch_mask(pixel_values, pixel_mask)
        wanted = [stage - 1 for stage in stages]
        trunk = vit(pixel_values.to(vit.pos_embed.dtype), mask, collect=wanted, stop=max(stages))
        # The stem's map is the embeddings: it has no prefix tokens to take off.
        patches = {-1: trunk.embeddings} | {i: x[:, vit.num_prefix_tokens :] for i, x in trunk.collected.items()}
        return BackboneOutput(feature_maps=tuple(self._map(patches[i], grid) for i in wanted))

    def _map(self, patches: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        patches = self.jumbo.vit.norm(patches) if self.config.apply_layernorm else patches
        return patches.transpose(1, 2).unflatten(2, grid).contiguous()  # (B, h*w, D) -> (B, D, h, w)
