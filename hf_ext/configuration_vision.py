"""What the configurations of the vision models share: fields, checks, feature maps, the code a saved folder carries.

Annotations are kept as types, not strings: the host checks every field against them.
"""

import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

import numpy as np
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.backbone_utils import BackboneConfigMixin

from hf_ext.optimize import check_optimize
from jumbo_core import checks

Integer = int | np.integer
Number = float | int | np.floating | np.integer

_REMOTE_CODE = '''"""Opens this folder through the Auto classes; the model itself is in the package jumbo-vit."""

try:
    from hf_ext import {names}
except ImportError as error:
    raise ImportError("this model needs the package jumbo-vit: pip install 'jumbo-vit[hf]'") from error

__all__ = [{quoted}]
'''


def remote_module(family: str) -> str:
    """Name of the module that opens a saved folder of this family where nobody has imported hf_ext."""
    return f"modeling_{family.lower()}"


@strict
class VisionConfig(BackboneConfigMixin, PreTrainedConfig):
    """Base of :class:`JumboConfig` and :class:`AdventurerConfig`, which describe the fields.

    A subclass sets ``model_type`` and ``family``, the prefix of its classes' names, adds its own fields and extends
    :meth:`check` and :meth:`core_arguments` to them.
    """

    family = ""

    image_size: Integer | list[Integer] | tuple[Integer, Integer] = 224
    patch_size: Integer | list[Integer] | tuple[Integer, Integer] = 16
    num_channels: Integer = 3
    hidden_size: Integer = 384
    num_hidden_layers: Integer = 12
    multiplier: Integer = 0
    mlp_ratio: Number = 4.0
    jumbo_mlp_ratio: Number = 4.0
    share_jumbo_ffn: bool = True
    drop_path_rate: Number | list[Number] | tuple[Number, ...] = 0.0
    hidden_dropout_prob: Number = 0.0
    patch_drop_rate: Number = 0.0
    layer_norm_eps: Number = 1e-5
    dynamic_img_pad: bool = False
    init: str = "released"
    apply_layernorm: bool = True
    optimize: str | None = None
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        wanted = {name: kwargs.pop(name, None) for name in ("out_indices", "out_features")}
        kwargs.pop("stage_names", None)  # follows from the number of blocks
        self.stage_names = []
        self.check()
        self.set_output_features_output_indices(**wanted)
        # What a saved folder carries so that `trust_remote_code=True` opens it.
        kwargs["auto_map"] = {auto: f"{remote_module(self.family)}.{name}" for auto, name in self._classes().items()}
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
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
        for name in ("num_channels", "hidden_size", "num_hidden_layers"):
            setattr(self, name, checks.integer(name, getattr(self, name)))
        self.multiplier = checks.integer("multiplier", self.multiplier, 0)
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
        for name in ("mlp_ratio", "jumbo_mlp_ratio", "layer_norm_eps"):
            setattr(self, name, checks.positive(name, getattr(self, name)))
        for name in ("hidden_dropout_prob", "patch_drop_rate"):
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
        check_optimize(self)
        stages = ["stem"] + [f"stage{i}" for i in range(1, self.num_hidden_layers + 1)]
        if self.stage_names and self.stage_names != stages:  # the number of blocks was set since
            last_was_chosen = self._out_features == self.stage_names[-1:]
            self.stage_names = stages
            features = None if last_was_chosen else self._out_features
            self.set_output_features_output_indices(out_features=features, out_indices=None)
        self.stage_names = stages

    def core_arguments(self) -> dict[str, Any]:
        """What the core's model of this shape is made with, ``num_classes`` aside."""
        return dict(
            img_size=self.image_sides,
            patch_size=self.patch_sides,
            in_chans=self.num_channels,
            embed_dim=self.hidden_size,
            depth=self.num_hidden_layers,
            multiplier=self.multiplier,
            mlp_ratio=self.mlp_ratio,
            jumbo_mlp_ratio=self.jumbo_mlp_ratio,
            share_jumbo_ffn=self.share_jumbo_ffn,
            norm_eps=self.layer_norm_eps,
            drop_path_rate=self.drop_path_rate,
            pos_drop_rate=self.hidden_dropout_prob,
            proj_drop_rate=self.hidden_dropout_prob,
            patch_drop_rate=self.patch_drop_rate,
            dynamic_img_pad=self.dynamic_img_pad,
            init=self.init,
        )

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
            names = sorted(self._classes().values())
            code = _REMOTE_CODE.format(names=", ".join(names), quoted=", ".join(f'"{name}"' for name in names))
            (folder / f"{remote_module(self.family)}.py").write_text(code)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: the host would copy this library's source into saved folders, which only import it."""

    @classmethod
    def _classes(cls) -> dict[str, str]:
        """Class of the family behind each Auto class."""
        kinds = {
            "AutoConfig": "Config",
            "AutoModel": "Model",
            "AutoModelForImageClassification": "ForImageClassification",
            "AutoBackbone": "Backbone",
        }
        return {auto: cls.family + kind for auto, kind in kinds.items()}
