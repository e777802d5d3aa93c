"""What the backbones share: feature maps for detection and segmentation frameworks on Transformers."""

from __future__ import annotations

import torch
from torch import nn
from transformers.backbone_utils import BackboneMixin
from transformers.modeling_outputs import BackboneOutput
from transformers.utils.output_capturing import capture_outputs

from hf_ext.configuration_vision import VisionConfig
from hf_ext.modeling_vision import VisionModel


class VisionBackbone(BackboneMixin):
    """Mixed into a :class:`VisionPreTrainedModel`, feature maps of its encoder (of ``encoder_class``).

    One map (B, D, h, w) per stage of ``config.out_features``, of the patches alone.

    Blocks after the last wanted stage are not run. What cannot reach a feature map (those blocks, the last block's
    Jumbo norm, …) does not require gradients, so distributed training waits for nothing; it is still saved and loaded.
    """

    encoder_class: type[VisionModel]

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        self.num_features = [config.hidden_size] * (config.num_hidden_layers + 1)
        setattr(self, self.base_model_prefix, self.encoder_class(config))
        self.post_init()
        self._norm_frozen = False
        self._freeze_unreachable()

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As for any model; the host's loader makes new parameters, so what is idle is frozen again afterwards."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info=True
        model._freeze_unreachable()
        return loaded

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.get_input_embeddings()

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
        encoder = self.base_model.vit.encoder
        encoder.freeze_unreachable("patches", blocks=max(self.stages))
        for parameter in encoder.norm.parameters():  # taken out, and put back if it was this method that took it
            if not self.config.apply_layernorm and parameter.requires_grad:
                parameter.requires_grad_(False)
                self._norm_frozen = True
            elif self.config.apply_layernorm and self._norm_frozen:
                parameter.requires_grad_(True)

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
            pixel_values, pixel_mask, output_attentions: see :meth:`VisionModel.forward`.
            **kwargs: ``output_hidden_states`` and ``return_dict``.

        Raises:
            ValueError: ``patch_drop_rate`` is above 0 in training, which would leave holes in the maps.
        """
        vit = self.base_model.vit
        if vit.training and vit.patch_drop_rate:
            raise ValueError(f"feature maps have holes while patch_drop_rate is {vit.patch_drop_rate}; set it to 0")
        stages, grid = self.stages, vit.grid_of(pixel_values.shape[-2:])
        wanted = [stage - 1 for stage in stages]
        trunk = self._run_trunk(pixel_values, pixel_mask, output_attentions, kwargs, collect=wanted, stop=max(stages))
        # The stem's map is the embeddings: there are no global tokens among them.
        patches = {-1: trunk.embeddings} | {i: vit.encoder.split(x).patches for i, x in trunk.collected.items()}
        return BackboneOutput(feature_maps=tuple(self._map(patches[i], grid) for i in wanted))

    def _map(self, patches: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        patches = self.base_model.vit.norm(patches) if self.config.apply_layernorm else patches
        return patches.transpose(1, 2).unflatten(2, grid).contiguous()  # (B, h*w, D) -> (B, D, h, w)
