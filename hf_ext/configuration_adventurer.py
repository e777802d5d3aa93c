"""Configuration of the linear-time vision models for Transformers (model type "adventurer").

Annotations are kept as types, not strings: the host checks every field against them.
"""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_ext.configuration_vision import Integer, Number, VisionConfig
from jumbo_core import checks


@strict
class AdventurerConfig(VisionConfig):
    """Shape and training options of an Adventurer. The defaults are the released tiny model (11.61 M parameters).

    ``multiplier > 0`` puts J slices of a Jumbo token in place of the class token (Jumbo-linear): our own combination,
    not from a paper. Every argument is a keyword. Source of the defaults: Adventurer (arXiv 2410.07599) and its
    released code.

    Args:
        image_size: size the position table is made for, int or (H, W). Other sizes run too. Default 224.
        patch_size: int or (h, w). Default 16.
        num_channels: input channels. Default 3.
        hidden_size: patch width D. Default 256.
        num_hidden_layers: blocks. Default 12.
        state_size: state N per channel of the Mamba-2 mixer. Default 64.
        head_dim: channels of a mixer head; must divide ``expand * hidden_size``. Default 64.
        expand: inner width of the mixer over D. Default 2.
        conv_kernel: steps of the mixer's causal convolution. Default 4.
        multiplier: J, see above; 0 (default) = the class token as released.
        flip: blocks that see the patches reversed: "alternate" (paper; blocks 1, 3, 5, …, the default) or their
            indices, [2, 3] for the released weights.
        mlp_ratio: hidden width of the SwiGLU over D. Default 2.5.
        jumbo_mlp_ratio, share_jumbo_ffn: hidden width of the Jumbo FFN over J*D, and one for all blocks. Default 4 and
            True.
        drop_path_rate: stochastic depth: a number p for the released list that rises from 0 towards p, or one rate per
            block. Default 0.
        hidden_dropout_prob: dropout after the positions and inside the FFNs. Default 0.
        patch_drop_rate: share of patches dropped at random in training. Default 0.
        layer_norm_eps: epsilon of the RMSNorms. Default 1e-5.
        dynamic_img_pad, init, apply_layernorm, optimize, out_features, out_indices, **kwargs: see :class:`JumboConfig`.

    Raises:
        ValueError: a value outside its range, named with what was expected.
    """

    model_type = "adventurer"
    family = "Adventurer"

    hidden_size: Integer = 256
    state_size: Integer = 64
    head_dim: Integer = 64
    expand: Number = 2
    conv_kernel: Integer = 4
    flip: str | list[Integer] | tuple[Integer, ...] = "alternate"
    mlp_ratio: Number = 2.5

    def check(self) -> None:
        """As for any configuration of ours, and the fields of this one."""
        super().check()
        for name in ("state_size", "head_dim", "conv_kernel"):
            setattr(self, name, checks.integer(name, getattr(self, name)))
        self.expand = checks.positive("expand", self.expand)
        inner = int(self.expand * self.hidden_size)
        if not inner or inner % self.head_dim:
            raise ValueError(
                f"head_dim {self.head_dim} does not divide the mixer's width {inner} "
                f"(expand {self.expand:g} x hidden_size {self.hidden_size})"
            )
        expected = f"flip must be 'alternate' or block indices in 0..{self.num_hidden_layers - 1} (num_hidden_layers)"
        if isinstance(self.flip, str):
            if self.flip != "alternate":
                raise ValueError(f"{expected}, got {self.flip!r}")
        else:
            indices = [checks.integer("flip", i, 0) for i in self.flip]
            if any(i >= self.num_hidden_layers for i in indices) or len(set(indices)) != len(indices):
                raise ValueError(f"{expected}, each once, got {indices}")
            self.flip = sorted(indices)

    def core_arguments(self) -> dict[str, Any]:
        """What a :class:`jumbo_core.models.AdventurerViT` of this shape is made with, ``num_classes`` aside."""
        return super().core_arguments() | dict(
            d_state=self.state_size,
            head_dim=self.head_dim,
            expand=self.expand,
            conv_kernel=self.conv_kernel,
            flip=self.flip,
        )
