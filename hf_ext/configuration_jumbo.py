"""Configuration of the Jumbo vision models for Transformers (model type "jumbo_vit").

Annotations are kept as types, not strings: the host checks every field against them.
"""

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.backbone_utils import BackboneConfigMixin

from jumbo_core import checks

Integer = int | np.integer
Number = float | int | np.floating | np.integer

# What a saved folder carries so that `trust_remote_code=True` opens it where nobody has imported hf_ext.
REMOTE_MODULE = "modeling_jumbo"
REMOTE_CODE = '''"""Opens this folder through the Auto classes; the model itself is in the package jumbo-vit."""

try:
    from hf_ext import JumboBackbone, JumboConfig, JumboForImageClassification, JumboModel
except ImportError as error:
    raise ImportError("this model needs the package jumbo-vit: pip install 'jumbo-vit[hf]'") from error

__all__ = ["JumboBackbone", "JumboConfig", "JumboForImageClassification", "JumboModel"]
'''
AUTO_MAP = {
    "AutoConfig": f"{REMOTE_MODULE}.JumboConfig",
    "AutoModel": f"{REMOTE_MODULE}.JumboModel",
    "AutoModelForImageClassification": f"{REMOTE_MODULE}.JumboForImageClassification",
    "AutoBackbone": f"{REMOTE_MODULE}.JumboBackbone",
}


@strict
class JumboConfig(BackboneConfigMixin, PreTrainedConfig):
    """Shape and training options of a Jumbo ViT. The defaults are the released small model (66.9 M parameters).

    Every argument is a keyword. Source of the defaults: Jumbo paper (arXiv 2502.15021 v3) and its released code.

    Args:
        image_size: size the position table is made for, int or (H, W). Other sizes run too. Default 224.
        patch_size: int or (h, w). Default 16.
        num_channels: input channels. Default 3.
        hidden_size: patch width D. Default 384.
        num_hidden_layers: blocks. Default 12.
        num_attention_heads: heads; must divide ``hidden_size``. Default 6.
        multiplier: J, width of the Jumbo token in patches; 0 = an ordinary class token. Default 6.
        registers: register tokens. Default 0; the paper's baseline is ``multiplier=0, registers=16``.
        mlp_ratio, jumbo_mlp_ratio: hidden widths of the two FFNs over D and over J*D. Default 4.
        share_jumbo_ffn: one Jumbo FFN for all blocks. Default True.
        layer_scale: initial LayerScale value, or None (default) for none.
        drop_path_rate: stochastic depth, one rate for every block (default 0.1, as released) or one per block.
        hidden_dropout_prob: dropout after the positions and after linear layers. Default 0.
        attention_probs_dropout_prob: dropout of attention weights. Default 0.
        patch_drop_rate: share of patches dropped at random in training. Default 0; see
            :class:`hf_ext.PatchDropSchedule` for a schedule.
        layer_norm_eps: LayerNorm epsilon. Default 1e-5.
        dynamic_img_pad: pad right and bottom to a multiple of the patch size instead of refusing. Default False.
        init: "released" (head weights 0, head bias -ln(classes): long runs) or "short" (head weights trunc-normal,
            Jumbo FFN output 0: short runs and fine-tuning). Default "released".
        apply_layernorm: as a backbone, pass every feature map through the final norm. Default True.
        out_features, out_indices: as a backbone, stages to return, of "stem", "stage1" … "stageN". Default the last.
        **kwargs: everything else a Transformers configuration takes (``num_labels``, ``id2label``, …).

    Raises:
        ValueError: a value outside its range, named with what was expected.
    """

    model_type = "jumbo_vit"

    image_size: Integer | list[Integer] | tuple[Integer, Integer] = 224
    patch_size: Integer | list[Integer] | tuple[Integer, Integer] = 16
    num_channels: Integer = 3
    hidden_size: Integer = 384
    num_hidden_layers: Integer = 12
    num_attention_heads: Integer = 6
    multiplier: Integer = 6
    registers: Integer = 0
    mlp_ratio: Number = 4.0
    jumbo_mlp_ratio: Number = 4.0
    share_jumbo_ffn: bool = True
    layer_scale: Number | None = None
    drop_path_rate: Number | list[Number] | tuple[Number, ...] = 0.1
    hidden_dropout_prob: Number = 0.0
    attention_probs_dropout_prob: Number = 0.0
    patch_drop_rate: Number = 0.0
    layer_norm_eps: Number = 1e-5
    dynamic_img_pad: bool = False
    init: str = "released"
    apply_layernorm: bool = True
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        wanted = {name: kwargs.pop(name, None) for name in ("out_indices", "out_features")}
        kwargs.pop("stage_names", None)  # follows from the number of blocks
        self.stage_names = []
        self.check()
        self.set_output_features_output_indices(**wanted)
        kwargs["auto_map"] = dict(AUTO_MAP)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "JumboConfig":
        """As for any configuration, but changes of a saved one are checked as if it had been made with them.

        Feature maps follow a changed number of blocks when the saved choice was the last one.
        """
        own = {f.name for f in fields(cls)} - {f.name for f in fields(PreTrainedConfig)}
        own |= {"out_features", "out_indices"}
        changes = {name: kwargs.pop(name) for name in sorted(own & kwargs.keys())}
        config_dict = dict(config_dict)
        last_was_chosen = config_dict.get("out_features") == [f"stage{config_dict.get('num_hidden_layers', 12)}"]
        if {"out_features", "out_indices"} & changes.keys() or ("num_hidden_layers" in changes and last_was_chosen):
            config_dict.pop("out_features", None), config_dict.pop("out_indices", None)
        return super().from_dict({**config_dict, **changes}, **kwargs)

    def check(self) -> None:
        """Check every value and put it into plain Python types; models do so again with what was set since.

        Raises:
            ValueError: a value outside its range.
        """
        for name in ("num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            setattr(self, name, checks.integer(name, getattr(self, name)))
        for name in ("multiplier", "registers"):
            setattr(self, name, checks.integer(name, getattr(self, name), 0))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}"
            )
        for name in ("image_size", "patch_size"):
            sides = checks.pair(name, getattr(self, name))
            setattr(self, name, list(sides) if isinstance(getattr(self, name), (list, tuple)) else sides[0])
        if not self.dynamic_img_pad:
            for side, length, step in zip(("height", "width"), self.image_sides, self.patch_sides, strict=True):
                if length % step:
                    raise ValueError(
                        f"image_size {side} {length} is not a multiple of patch_size {step}; "
                        f"use {max(1, round(length / step)) * step} or dynamic_img_pad=True"
                    )
        for name in ("mlp_ratio", "jumbo_mlp_ratio", "layer_norm_eps", "layer_scale"):
            if not (getattr(self, name) is None and name == "layer_scale"):
                setattr(self, name, checks.positive(name, getattr(self, name)))
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "patch_drop_rate"):
            setattr(self, name, checks.rate(name, getattr(self, name)))
        rates = self.drop_path_rate
        if isinstance(rates, (list, tuple)):
            if len(rates) != self.num_hidden_layers:
                raise ValueError(
                    f"drop_path_rate must be one rate or {self.num_hidden_layers} of them (num_hidden_layers), "
                    f"got {rates!r}"
                )
            self.drop_path_rate = [checks.rate("drop_path_rate", rate) for rate in rates]
        else:
            self.drop_path_rate = checks.rate("drop_path_rate", rates)
        if self.init not in ("released", "short"):
            raise ValueError(f"init must be 'released' or 'short', got {self.init!r}")
        stages = ["stem"] + [f"stage{i}" for i in range(1, self.num_hidden_layers + 1)]
        if self.stage_names and self.stage_names != stages:  # the number of blocks was set since
            last_was_chosen = self._out_features == self.stage_names[-1:]
            self.stage_names = stages
            features = None if last_was_chosen else self._out_features
            self.set_output_features_output_indices(out_features=features, out_indices=None)
        self.stage_names = stages

    @property
    def image_sides(self) -> tuple[int, int]:
        """(height, width) of ``image_size``."""
        return (self.image_size,) * 2 if isinstance(self.image_size, int) else tuple(self.image_size)

    @property
    def patch_sides(self) -> tuple[int, int]:
        """(height, width) of ``patch_size``."""
        return (self.patch_size,) * 2 if isinstance(self.patch_size, int) else tuple(self.patch_size)

    @property
    def grid(self) -> tuple[int, int]:
        """Patches (h, w) of an image of ``image_size``: the grid of the position table."""
        h, w = (-(-length // step) for length, step in zip(self.image_sides, self.patch_sides, strict=True))
        return h, w  # rounded up: dynamic_img_pad

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """As for any configuration; adds the few lines of code that ``trust_remote_code=True`` needs.

        Models save their configuration through this, so every saved or pushed folder carries them.
        """
        folder = Path(save_directory)
        if not folder.is_file():  # the host refuses a file, with its own message
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{REMOTE_MODULE}.py").write_text(REMOTE_CODE)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: the host would copy this library's source into saved folders, which only import it."""
