"""What the vision models share: the kernel of jumbo_core behind Transformers' interfaces."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, initialization
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from hf_ext.configuration_vision import VisionConfig
from hf_ext.optimize import finish_loading, note, plan_loading
from hf_ext.tofu import is_fused, restore, saying
from hf_ext.trunk import Recorder, Trunk, TrunkOutput
from jumbo_core import optimize_for_inference
from jumbo_core.jumbo import JumboFFN
from jumbo_core.jumbo.stack import BlockStack
from jumbo_core.models.surface import PatchModel, init_head


class VisionPreTrainedModel(PreTrainedModel):
    """What all vision models here share: initialisation, loading and saving, the host's features they support."""

    config_class = VisionConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": Recorder}
    restores_tofu = True

    def __init__(self, config: VisionConfig, *args, **kwargs) -> None:
        config.check()  # fields may have been set since it was made
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, **kwargs):
        """As for any model; fused and optimised as the configuration says, see :mod:`hf_ext.tofu`, :mod:`.optimize`.

        Raises:
            ValueError: the position table was saved for another patch grid than ``image_size`` makes, even one of as
                many patches; a fusion plan that does not fit; ``optimize`` asks for what was rounded away.
        """
        saved = _saved_config(cls.config_class, pretrained_model_name_or_path, dict(kwargs))
        by_path = isinstance(config, (str, os.PathLike))
        asked = _saved_config(cls.config_class, config, dict(kwargs)) if by_path else None
        config, kwargs, wanted = plan_loading(saved, config, kwargs, asked)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info=True
        finish_loading(model, wanted)
        if saved is not None and saved.grid != model.config.grid:
            (h, w), (new_h, new_w) = saved.grid, model.config.grid
            raise ValueError(
                f"positions in {pretrained_model_name_or_path} are a {h}x{w} grid (image_size {saved.image_size}), "
                f"image_size {model.config.image_size} makes {new_h}x{new_w}: load without image_size; images of other "
                f"sizes run as they are, and set_input_size of the model's vit resamples the table for good"
            )
        restore(model)
        return loaded

    def save_pretrained(self, *args, **kwargs) -> None:
        """As for any model; the configuration says what ``vit.set_input_size`` or optimising have changed."""
        for vit in (module for module in self.modules() if isinstance(module, Trunk)):
            for name, own, said in (
                ("image_size", vit.img_size, self.config.image_sides),
                ("patch_size", tuple(vit.patch_embed.patch_size), self.config.patch_sides),
            ):
                if own != said:
                    setattr(self.config, name, own[0] if own[0] == own[1] else list(own))
        note(self)
        if is_fused(self):
            super().save_pretrained(*args, **kwargs)
            return
        with saying(self, None):  # made from the configuration of a fused folder, it is not fused for that
            super().save_pretrained(*args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        """The rule of jumbo_core, through functions that leave tensors alone which a checkpoint has filled."""
        if module is getattr(self, "classifier", None) and isinstance(module, nn.Linear):
            like = module.weight
            fresh = nn.Linear(module.in_features, module.out_features, device=like.device, dtype=like.dtype)
            init_head(fresh, self.config.init)
            initialization.copy_(module.weight, fresh.weight)
            initialization.copy_(module.bias, fresh.bias)
        elif isinstance(module, nn.Linear):
            if self.config.init == "short" and self._ends_jumbo_ffn(module):
                initialization.zeros_(module.weight)
            else:
                initialization.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                initialization.zeros_(module.bias)
        elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.RMSNorm)):
            module.reset_parameters()  # torch's default, as released; the host guards it while it loads
        elif isinstance(module, (BlockStack, PatchModel)):
            for token in module.parameters(recurse=False):  # learned tokens and positions
                initialization.trunc_normal_(token, std=0.02)

    def _ends_jumbo_ffn(self, module: nn.Module) -> bool:
        # Asked of the layer itself: the host never hands over modules that hold no parameter of their own.
        return any(module is ffn.fc2 for ffn in self.modules() if isinstance(ffn, JumboFFN))

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func=checkpoint, every_n_layers: int = 1
    ) -> None:
        if every_n_layers != 1:
            raise ValueError(
                f"{self.config.family} models checkpoint every block; every_n_layers must be 1, got {every_n_layers}"
            )
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Does nothing, see :meth:`VisionConfig.register_for_auto_class`."""

    def _check_attentions(self, requested: bool | None) -> None:
        """Refuse to be asked for attention weights where there are none to give."""
        raise NotImplementedError

    def _run_trunk(
        self,
        pixel_values: torch.Tensor,
        pixel_mask: torch.Tensor | None,
        output_attentions: bool | None,
        options: dict,
        **stages,
    ) -> TrunkOutput:
        """The trunk's output for what a user passed to ``forward``; ``stages`` are its ``collect`` and ``stop``."""
        self._check_attentions(output_attentions)
        encoder = self.base_model
        mask = encoder.patch_mask(pixel_values, pixel_mask)
        record = bool(options.get("output_hidden_states", self.config.output_hidden_states))
        return encoder.vit(pixel_values.to(encoder.vit.pos_embed.dtype), mask, record=record, **stages)


class VisionModel:
    """Mixed into a :class:`VisionPreTrainedModel`, its encoder: images -> normalised tokens and the pooled vector.

    ``trunk_class`` is the trunk's class.
    """

    trunk_class: type[Trunk]

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        self.vit = self.trunk_class(**self._trunk_arguments())
        if config.optimize is not None:
            optimize_for_inference(self.vit, dtype=config.optimize)
        self.post_init()

    def _trunk_arguments(self) -> dict:
        return self.config.core_arguments()

    def get_input_embeddings(self) -> nn.Module:
        return self.vit.patch_embed

    @property
    def pooled_size(self) -> int:
        """Width of ``pooler_output``: (J+1)*D, or D when ``multiplier=0``."""
        return self.vit.head_hidden_size

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        pixel_mask: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPooling:
        """Encode images.

        Args:
            pixel_values: (B, C, H, W); any H and W that the patch size divides (all, with ``dynamic_img_pad``).
            pixel_mask: (B, H, W), nonzero = picture, 0 = padding. Patches of nothing but padding have no influence on
                any other token and are left out of the mean. Default None: all is picture.
            output_attentions: return the attention weights of every block, (B, heads, T, T) each; needs a model with
                attention and the implementation "eager".
            **kwargs: ``output_hidden_states`` (embeddings, then every block's output before the final norm, each
                (B, T, D) in the order of ``last_hidden_state``) and ``return_dict``.

        Returns:
            BaseModelOutputWithPooling: last_hidden_state (B, T, D), pooler_output (B, (J+1)*D).

        Raises:
            ValueError: a shape or an option that does not fit, named with what was expected.
        """
        trunk = self._run_trunk(pixel_values, pixel_mask, output_attentions, kwargs)
        tokens = self.vit.norm(trunk.tokens)
        return BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=self.vit.pool(tokens, trunk.mask))

    def patch_mask(self, pixel_values: torch.Tensor, pixel_mask: torch.Tensor | None) -> torch.Tensor | None:
        """Mask of pixels (B, H, W) -> mask of patches (B, N), True where any pixel of the patch is picture."""
        if pixel_mask is None:
            return None
        expected = (pixel_values.shape[0], *pixel_values.shape[-2:])
        if tuple(pixel_mask.shape) != expected:
            raise ValueError(
                f"pixel_mask must be (B, H, W) = {expected} as pixel_values, got {tuple(pixel_mask.shape)}"
            )
        (h, w), (p, q) = self.vit.grid_of(expected[1:]), self.vit.patch_embed.patch_size
        padded = nn.functional.pad(pixel_mask.bool(), (0, w * q - expected[2], 0, h * p - expected[1]))
        return padded.unflatten(2, (w, q)).unflatten(1, (h, p)).any(dim=4).any(dim=2).flatten(1)


class VisionForImageClassification:
    """Mixed into a :class:`VisionPreTrainedModel`: an encoder (of ``encoder_class``) and a linear classifier.

    ``config.num_labels`` classes (0 = no classifier: logits are the pooled vector); ``config.init`` says how a new
    classifier starts.
    """

    encoder_class: type[VisionModel]

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        encoder = self.encoder_class(config)
        setattr(self, self.base_model_prefix, encoder)
        self.classifier = nn.Linear(encoder.pooled_size, config.num_labels) if config.num_labels else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        pixel_mask: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> ImageClassifierOutput:
        """Classify images (B, C, H, W) -> logits (B, num_labels).

        Args:
            pixel_values, pixel_mask, output_attentions: see :meth:`VisionModel.forward`.
            labels: class indices (B,), or (B, num_labels) floats for the problem types "multi_label_classification"
                and "regression"; with them the output holds ``loss``.
            output_hidden_states: return every block's output.
            **kwargs: handed to the loss. As everywhere in the host, ``num_items_in_batch`` counts for the problem type
                "single_label_classification" alone; the other losses are means over the batch whatever it says.
        """
        wanted = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        outputs = self.base_model(
            pixel_values, pixel_mask=pixel_mask, **{name: value for name, value in wanted.items() if value is not None}
        )
        logits = self.classifier(outputs.pooler_output)
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


def _saved_config(config_class: type[VisionConfig], place, options: dict) -> VisionConfig | None:
    """Configuration that lies beside weights; None where there is none to compare with."""
    if place is None:
        return None
    try:
        saved, _ = config_class.get_config_dict(place, **options)
    except OSError:
        return None
    return config_class.from_dict(saved) if saved.get("model_type") == config_class.model_type else None
