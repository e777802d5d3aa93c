"""Models by name for the timing commands: timm's, ours, named peers, and forms of them as options of the name.

A name is ``MODEL`` or ``MODEL@option+option``. MODEL is any timm name, ours included, or one of :data:`PRESETS`. An
option is one of :data:`~jumbo_core.measure.forms.OPTIONS`, or ``key=value`` for the model's constructor:
``jumbo_tiny_patch16_224@int8``, ``vit_base_patch16_224@materialised``, ``adventurer_tiny_patch16_224@embed_dim=192``.
MODEL can be one of :data:`jumbo_core.measure.diffusion.UNETS` as well, with options of their own: ``sd15_unet@tofu``.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from functools import cached_property

import timm
import torch
from timm.models import get_pretrained_cfg, is_model, model_entrypoint
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from jumbo_core import checks
from jumbo_core.measure import diffusion
from jumbo_core.measure.contract import Contender, check_flags, read_name
from jumbo_core.measure.flops import count_parameters, multiply_adds
from jumbo_core.measure.forms import OPTIONS, apply_forms, materialise_attention
from jumbo_core.models import registry
from jumbo_core.models.surface import PatchModel


def widened(parameters: int, *, registers: int = 16) -> dict:
    """Constructor arguments of the ViT (depth 12, patch 16, 224 px, 1,000 classes) of about so many parameters.

    Widened symmetrically: width and heads grow, depth stays. Of the widths with a head size that is a multiple of 8
    from 48 to 80 (64 is the usual one), the nearest to the solution D of

        12 (12 D^2 + 13 D) + (768 + 1) D + (196 + 2 (1 + R)) D + 2 D + 1000 (D + 1) = parameters
    """
    linear = 12 * 13 + 769 + 196 + 2 * (1 + registers) + 2 + 1000
    exact = (-linear + math.sqrt(linear**2 + 4 * 144 * (parameters - 1000))) / (2 * 144)
    widths = {heads * size: heads for size in (48, 56, 72, 80, 64) for heads in range(1, 33)}  # 64 where it will do
    width = min(widths, key=lambda d: abs(d - exact))
    return dict(embed_dim=width, num_heads=widths[width], reg_tokens=registers)


CIFAR = dict(patch_size=4, depth=4, num_classes=10)

# Name: timm name and constructor arguments. What "nearest" means: ratio of parameters, at 224 pixels, 1,000 classes.
PRESETS: dict[str, tuple[str, dict]] = {
    **{f"vit_{size}": (f"vit_{size}_patch16_224", {}) for size in ("tiny", "small", "base")},
    "vit_b": ("vit_base_patch16_224", {}),
    # timm's own class with the class token and 16 registers: the baseline of the Jumbo paper.
    **{f"vit_registers_{size}": (f"vit_{size}_patch16_224", dict(reg_tokens=16)) for size in ("tiny", "small", "base")},
    # As wide as adventurer_tiny and jumbo_adventurer_tiny.
    "vit_registers_256": ("vit_tiny_patch16_224", dict(embed_dim=256, num_heads=4, reg_tokens=16)),
    # Nearest in parameters to Jumbo-tiny (17.5 M) and, with _l, to Jumbo-small (66.9 M).
    "efficientvit": ("efficientvit_b2", {}),
    "efficientvit_l": ("efficientvit_l2", {}),
    "shvit": ("shvit_s4", {}),
    "mobilenetv4": ("mobilenetv4_hybrid_large_075", {}),
    "mobilenetv4_l": ("mobilenetv4_hybrid_large", {}),
    "vit_wide_tiny": ("vit_tiny_patch16_224", widened(17_520_424)),
    "vit_wide_small": ("vit_small_patch16_224", widened(66_890_344)),
    # Those of benchmarks.cifar, for photos of 32x32; timm's class where they are plain ViTs.
    **{f"cifar_jumbo_{d}": ("jumbo_tiny_patch16_224", CIFAR | dict(embed_dim=d, num_heads=d // 16)) for d in (32, 64)},
    "cifar_registers_64": ("vit_tiny_patch16_224", CIFAR | dict(embed_dim=64, num_heads=4, reg_tokens=16)),
    # Jumbo-linear at the width of Jumbo-small and ViT-S; jumbo_adventurer_small has that of Adventurer-S, 512.
    "jumbo_linear_384": ("jumbo_adventurer_small_patch16_224", dict(embed_dim=384)),
    # adventurer_tiny with the mixers of Transformers' Mamba-2 in place of ours.
    "transformers:mamba2": ("adventurer_tiny_patch16_224@transformers", {}),
}


@dataclass(frozen=True)
class TimmContender(Contender):
    """A timm model that classifies images; ``arguments`` are of its constructor."""

    timm_name: str = ""

    def build(self, dtype: str = "float32", device: str = "cpu", *, plain: bool = False) -> nn.Module:
        """As :meth:`Contender.build`.

        Weights that start at zero (heads, residual branches of some recipes) get values: zero times anything is right.
        """
        torch.manual_seed(0)
        model = self._create().eval()
        for name, parameter in model.named_parameters():
            if parameter.any() or name.endswith("bias"):
                continue
            if parameter.ndim > 1:
                nn.init.trunc_normal_(parameter, std=0.02)
            else:  # of a norm
                nn.init.ones_(parameter)
        return model.to(device) if plain else apply_forms(model, self.options, dtype, device, self.text)

    def inputs(self, batch: int, dtype: str = "float32", device: str = "cpu") -> tuple[torch.Tensor]:
        """Random images (batch, 3, H, W)."""
        images = torch.randn(batch, 3, *self.image_size, generator=torch.Generator().manual_seed(1))
        images = images.to(device, getattr(torch, dtype))
        if "channels-last" in self.options:
            images = images.contiguous(memory_format=torch.channels_last)
        return (images,)

    def output_shape(self, model: nn.Module, batch: int) -> tuple[int, int]:
        """Logits, or features where there are no classes."""
        return batch, model.num_classes or model.num_features

    def warm_up(self) -> None:
        for name, options in (("test_vit", dict(img_size=32)), ("test_jumbo_adventurer", {})):
            timm.create_model(name, **options).eval()(torch.randn(1, 3, 32, 32))

    @property
    def moves(self) -> float:
        return sum(OPTIONS[option] for option in self.options)

    @cached_property
    def parameters(self) -> int:
        with torch.device("meta"):
            return count_parameters(self._create())

    @cached_property
    def multiply_adds(self) -> int | None:
        """Closed forms for our models, counted by torch without fused attention for others.

        None with Transformers' mixers, whose scan multiplies outside the operations that a counter sees.
        """
        if "transformers" in self.options:
            return None
        with torch.device("meta"):
            model, image = self._create().eval(), torch.empty(1, 3, *self.image_size)
        if isinstance(model, PatchModel):
            return multiply_adds(model, self.image_size)
        materialise_attention(model, None)
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            model(image)
        return counter.get_total_flops() // 2

    def _create(self) -> nn.Module:
        arguments = dict(self.arguments)
        if model_entrypoint(self.timm_name).__module__ == registry.__name__:
            arguments.setdefault("img_size", self.image_size)
            arguments.setdefault("drop_path_rate", 0.0)  # as timm's peers: it only matters in training
        elif get_pretrained_cfg(self.timm_name).fixed_input_size:
            arguments.setdefault("img_size", self.image_size)
        return timm.create_model(self.timm_name, **arguments)


def contender(text: str, image_size=224) -> Contender:
    """The contender of a name, see the head of this file.

    Raises:
        ValueError: a model or an option that does not exist; the message lists what does.
    """
    name, arguments, flags = read_name(text)
    size = checks.pair("image_size", image_size)
    if name in diffusion.UNETS:
        return diffusion.unet_contender(text, size)
    timm_name, given = PRESETS.get(name, (name, {}))
    timm_name, _, more = timm_name.partition("@")
    if not is_model(timm_name):
        known = [*PRESETS, *diffusion.UNETS]
        close = difflib.get_close_matches(name, [*known, *timm.list_models()], 5)
        raise ValueError(
            f"no model {name!r}: a timm name (timm.list_models()) or one of {', '.join(known)}"
            + (f"; near: {', '.join(close)}" if close else "")
        )
    check_flags(text, flags, OPTIONS, "the constructor")
    options = tuple(dict.fromkeys(filter(None, [more, *flags])))
    return TimmContender(text, given | arguments, options, size, timm_name)
