"""Diffusers' UNets as contenders: Stable Diffusion 1.5's shape with random weights, plain or with tokens fused.

``sd15_unet`` · ``sd15_unet@tomesd`` · ``sd15_unet@tofu+op=mlerp+ratio=0.25``. An option of :data:`FUSIONS` names whose
fusion it is, ``key=value`` its arguments; ratio is 0.5 if none is given. A call is one denoising step at timestep 501:
latents of an eighth of the image size, a prompt of 77 tokens; a batch counts UNet calls at once, 2 being one picture
with classifier-free guidance.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from jumbo_core.measure.contract import Contender, check_flags, read_name
from jumbo_core.measure.flops import count_parameters
from jumbo_core.tofu.regions import check_ratio

# What of SD 1.5's config.json differs from the class's defaults, and what matters here; and a small one like it.
SD15 = dict(
    sample_size=64, in_channels=4, out_channels=4, block_out_channels=(320, 640, 1280, 1280), layers_per_block=2,
    cross_attention_dim=768, attention_head_dim=8,
    down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
)  # fmt: skip
SMALL = SD15 | dict(sample_size=16, block_out_channels=(32, 64, 64, 64), norm_num_groups=8, cross_attention_dim=32)
UNETS = {"sd15_unet": SD15, "test_unet": SMALL}
SCHEDULE = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")  # SD 1.5's

# Whose fusion, and the arguments it takes: of tomesd.apply_patch and of hf_ext.diffusers.apply_tofu_to_unet.
FUSIONS = {
    "tomesd": ("ratio", "max_downsample", "sx", "sy", "use_rand", "merge_attn", "merge_crossattn", "merge_mlp"),
    "tofu": ("ratio", "op", "norm", "proportional", "region", "seed", "max_downsample"),
}
RATIO = 0.5
# Relative L2 distance that is let pass: of fused from unfused, and between two calls that draw at random. Ratios up to
# 0.75 came to 0.06 at most. With random weights attention is nearly a mean of all tokens: what leaves it out is off by
# 0.25 (sd15_unet; test_unet 0.27) and noise in its place by 0.32 (0.41), but a mere mix-up of positions by 0.03 (0.07)
# only, which this gate cannot tell: that is for the tests of hf_ext.diffusers.
APART = 0.1

# UNets whose weights some model here uses, by name, dtype and device: forms share them, for SD 1.5's take 3.4 GB.
_in_use: WeakValueDictionary = WeakValueDictionary()


@dataclass(frozen=True)
class UNetContender(Contender):
    """A UNet of :data:`UNETS`; ``arguments`` are of the fusion that ``options`` names."""

    name: str = ""

    not_trained = "training steps of UNets are not measured; drop --train"

    def build(self, dtype: str = "float32", device: str = "cpu", *, plain: bool = False) -> nn.Module:
        """As :meth:`Contender.build`; gives the predicted noise. Models of one UNet share its weights."""
        key = self.name, "float32" if plain else dtype, device
        unet = _in_use.get(key)
        if unet is None:
            # Diffusers' own to() warns of modules to be kept in fp32, of which these UNets have none.
            unet = nn.Module.to(make_unet(UNETS[self.name]), device, getattr(torch, key[1]))
            _in_use[key] = unet
        own = alias(unet)
        if not plain:
            self._fuse(own)
        torch.manual_seed(0)  # tomesd's generator starts from torch's own at the first call
        return _Noise(own, unet)

    def inputs(self, batch: int, dtype: str = "float32", device: str = "cpu") -> tuple[torch.Tensor, ...]:
        """Of :func:`step_inputs`: latents (batch, 4, H/8, W/8), timestep (), prompt (batch, 77, width)."""
        latents, timestep, prompt = step_inputs(UNETS[self.name], self._latents, batch)
        to = dict(device=device, dtype=getattr(torch, dtype))
        return latents.to(**to), timestep.to(device), prompt.to(**to)

    def output_shape(self, model: nn.Module, batch: int) -> tuple[int, ...]:
        return batch, 4, *self._latents

    def warm_up(self) -> None:
        small = UNetContender("test_unet", {}, (), (64, 64), "test_unet")
        with torch.inference_mode():
            small.build()(*small.inputs(1))

    @property
    def moves(self) -> float:
        return APART if self.options else 0.0

    def repeat_tolerance(self, batch: int) -> float:
        """Not 0 with tomesd: it draws destinations anew in every call, in even batches and unless use_rand=False."""
        draws = "tomesd" in self.options and self.arguments.get("use_rand", True) and batch % 2 == 0
        return APART if draws else 0.0

    @cached_property
    def parameters(self) -> int:
        with torch.device("meta"):
            return count_parameters(make_unet(UNETS[self.name]))

    @cached_property
    def multiply_adds(self) -> int:
        """Counted by torch, with attention scores as a tensor, which a counter sees; those of the matching are in it.

        In a call on the CPU: what is fused goes by values, so that the meta device will not do.
        """
        model = self.build()
        model.unet.set_attn_processor(_diffusers("models.attention_processor").AttnProcessor())
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            model(*self.inputs(1))
        return counter.get_total_flops() // 2

    @property
    def _latents(self) -> tuple[int, int]:
        return self.image_size[0] // 8, self.image_size[1] // 8

    def _fuse(self, unet: nn.Module) -> None:
        arguments = {"ratio": RATIO} | self.arguments
        if "tomesd" in self.options:
            try:
                tomesd = importlib.import_module("tomesd")
            except ImportError as error:
                raise ImportError(
                    f"{self.text} needs tomesd: pip install tomesd, or 'jumbo-vit[dev]', which has it"
                ) from error
            # Which clamps ratios out of range without a word: what was timed would not be what was asked for.
            check_ratio(arguments["ratio"], (arguments.get("sy", 2), arguments.get("sx", 2)))
            tomesd.apply_patch(unet, **arguments)
        elif "tofu" in self.options:
            # Looked up by name when it is asked for: nothing in jumbo_core knows an adapter, arrows point down.
            importlib.import_module("hf_ext.diffusers").apply_tofu_to_unet(unet, **arguments)


class _Noise(nn.Module):
    """A UNet that gives its prediction as a tensor."""

    def __init__(self, unet: nn.Module, weights_of: nn.Module) -> None:
        super().__init__()
        self.unet = unet
        self._kept = (weights_of,)  # not a child: it stays in _in_use as long as this model does

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        return self.unet(latents, timestep, prompt, return_dict=False)[0]


def unet_contender(text: str, image_size: tuple[int, int]) -> UNetContender:
    """The contender of a name that begins with one of :data:`UNETS`; nothing is imported yet.

    Raises:
        ValueError: options or arguments that a UNet has not, more than one fusion, an image size that is no multiple
            of 8.
    """
    name, arguments, flags = read_name(text)
    check_flags(text, flags, FUSIONS, "its arguments")
    if len(set(flags)) > 1:
        raise ValueError(f"{text}: {' and '.join(FUSIONS)} are two fusions of the same tokens; use one of them")
    if arguments and not flags:
        raise ValueError(f"{text}: key=value is for a fusion's arguments; name {' or '.join(FUSIONS)} as well")
    for key in arguments:
        if key not in FUSIONS[flags[0]]:
            raise ValueError(f"unknown key {key!r} of {text!r}: {flags[0]} takes {', '.join(FUSIONS[flags[0]])}")
    if any(side < 8 or side % 8 for side in image_size):
        height, width = image_size
        nearest = "x".join(str(max(8, 8 * round(side / 8))) for side in image_size)
        raise ValueError(
            f"{text}: latents are an eighth of the image, so that both sides must be multiples of 8, got "
            f"{height}x{width}; use {nearest}"
        )
    return UNetContender(text, arguments, tuple(flags[:1]), image_size, name)


def make_unet(config: dict) -> nn.Module:
    """A UNet2DConditionModel for inference with random weights, the same at every call.

    Raises:
        ImportError: diffusers is missing.
    """
    torch.manual_seed(0)
    return _diffusers().UNet2DConditionModel(**config).eval().requires_grad_(False)


def alias(unet: nn.Module) -> nn.Module:
    """A copy that shares the weights and can be patched on its own."""
    return copy.deepcopy(unet, {id(p): p for p in unet.parameters()})


def step_inputs(
    config: dict, latents: tuple[int, int], batch: int, *, seed: int = 0, timestep: int = 501
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(latents, timestep, prompt) of one denoising step.

    Latents are what the scheduler makes of a smooth random picture, nearly pure noise at timestep 981 and nearly the
    picture at 21; all of a batch are the same, as in classifier-free guidance, where only prompts differ.

    Args:
        config: of the UNet.
        latents: their (height, width).
        batch: of the UNet.
        seed: of the draw. Default 0.
        timestep: 0 to 999. Default 501.

    Raises:
        ImportError: diffusers is missing.
    """
    random = torch.Generator().manual_seed(seed)
    coarse = [max(1, side // 8) for side in latents]
    picture = F.interpolate(torch.randn(1, 4, *coarse, generator=random), size=latents, mode="bicubic")
    noise = torch.randn(1, 4, *latents, generator=random)
    noisy = _diffusers().DDPMScheduler(**SCHEDULE).add_noise(picture, noise, torch.tensor([timestep]))
    prompt = torch.randn(batch, 77, config["cross_attention_dim"], generator=random)
    return noisy.expand(batch, -1, -1, -1), torch.tensor(timestep), prompt


def _diffusers(module: str = "") -> ModuleType:
    try:
        return importlib.import_module(f"diffusers.{module}" if module else "diffusers")
    except ImportError as error:
        raise ImportError(f"{' and '.join(UNETS)} need diffusers: pip install 'jumbo-vit[diffusion]'") from error
