"""Configuration of the Jumbo vision models for Transformers (model type "jumbo_vit").

Annotations are kept as types, not strings: the host checks every field against them.
"""

import os
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.backbone_utils import BackboneConfigMixin

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

    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    num_channels: int = 3
    hidden_size: int = 384
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    multiplier: int = 6
    registers: int = 0
    mlp_ratio: float | int = 4.0
    jumbo_mlp_ratio: float | int = 4.0
    share_jumbo_ffn: bool = True
    layer_scale: float | int | None = None
    drop_path_rate: float | int | list[float] | tuple[float, ...] = 0.1
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    patch_drop_rate: float | int = 0.0
    layer_norm_eps: float = 1e-5
    dynamic_img_pad: bool = False
    init: str = "released"
    apply_layernorm: bool = True
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check()
        self.stage_names = ["stem"] + [f"stage{i}" for i in range(1, self.num_hidden_layers + 1)]
        self.set_output_features_output_indices(
            out_indices=kwargs.pop("out_indices", None), out_features=kwargs.pop("out_features", None)
        )
        kwargs["auto_map"] = dict(AUTO_MAP)
        super().__post_init__(**kwargs)

    def _check(self) -> None:
        for name, least in (
            ("num_channels", 1),
            ("hidden_size", 1),
            ("num_hidden_layers", 1),
            ("num_attention_heads", 1),
            ("multiplier", 0),
            ("registers", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}"
            )
        for name in ("image_size", "patch_size"):
            value = getattr(self, name)
            sides = (value, value) if isinstance(value, int) else tuple(value)
            if len(sides) != 2 or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in sides):
                raise ValueError(f"{name} must be a positive integer or (height, width), got {value!r}")
        if not self.dynamic_img_pad:
            for side, length, step in zip(("height", "width"), self.image_sides, self.patch_sides, strict=True):
                if length % step:
                    raise ValueError(
                        f"image_size {side} {length} is not a multiple of patch_size {step}; "
                        f"use {max(1, round(length / step)) * step} or dynamic_img_pad=True"
                    )
        for name in ("mlp_ratio", "jumbo_mlp_ratio", "layer_norm_eps", "layer_scale"):
            value = getattr(self, name)
            if not (value is None and name == "layer_scale") and not value > 0:
                raise ValueError(f"{name} must be greater than 0, got {value!r}")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "patch_drop_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)!r}")
        rates = self.drop_path_rate
        rates = [rates] * self.num_hidden_layers if isinstance(rates, (int, float)) else list(rates)
        if len(rates) != self.num_hidden_layers or any(not 0 <= rate < 1 for rate in rates):
            raise ValueError(
                f"drop_path_rate must be one rate in [0, 1) or {self.num_hidden_layers} of them "
                f"(num_hidden_layers), got {self.drop_path_rate!r}"
            )
        if self.init not in ("released", "short"):
            raise ValueError(f"init must be 'released' or 'short', got {self.init!r}")

    @property
    def image_sides(self) -> tuple[int, int]:
        """(height, width) of ``image_size``."""
        return (self.image_size,) * 2 if isinstance(self.image_size, int) else tuple(self.image_size)

    @property
    def patch_sides(self) -> tuple[int, int]:
        """(height, width) of ``patch_size``."""
        return (self.patch_size,) * 2 if isinstance(self.patch_size, int) else tuple(self.patch_size)

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
