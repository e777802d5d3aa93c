"""Teachers: any plain vision transformer behind one call that gives the patch features of its blocks, frozen."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from jumbo_core import checks
from jumbo_core.distill.stages import find_vit, stage_blocks, vit_features
from jumbo_core.models.surface import check_divides

SUPPORTED = (
    "supported: timm models whose blocks all give one grid of one width (ViT, DeiT, CLIP, DINOv2 and v3, EVA, BEiT, "
    "…), Transformers vision models whose hidden states are patches (ViT, DeiT, CLIP, SigLIP, DINOv2 and v3, BEiT, "
    "ViTMAE, …), JumboViT and AdventurerViT alone or in a Transformers model, and modules that follow "
    "jumbo_core.distill.Teacher"
)


@runtime_checkable
class Teacher(Protocol):
    """What distillation asks of a teacher; a module with these four is accepted by :func:`as_teacher` as it is.

    depth: number of blocks. embed_dim: width D of their outputs.
    """

    depth: int
    embed_dim: int

    def grid_of(self, image_size: Sequence[int]) -> tuple[int, int]:
        """Patch grid (h, w) of an image (H, W)."""

    def __call__(self, images: torch.Tensor, stages: int | Sequence[int]) -> list[torch.Tensor]:
        """Patch features (B, h*w, D) of images (B, C, H, W) after each of the named blocks."""


def as_teacher(model: nn.Module) -> FrozenTeacher:
    """Make a teacher of a timm, Transformers or own vision model.

    The model itself is kept, not a copy: its parameters are frozen (``requires_grad`` False, for good) and it is put in
    eval mode, as it is again at every call.

    Args:
        model: see the error message below for what is supported. A teacher comes back as it is.

    Raises:
        TypeError: a model that has no patch tokens, such as a convolutional, hierarchical or pooled one.
    """
    if isinstance(model, FrozenTeacher):
        return model
    if not isinstance(model, nn.Module):
        raise TypeError(f"a teacher is a torch module, got {type(model).__name__}; {SUPPORTED}")
    if (vit := find_vit(model)) is not None:
        return OwnTeacher(vit)
    if isinstance(model, Teacher):
        return CustomTeacher(model)
    vision = _vision_part(model)
    for kind in (TimmTeacher, TransformersTeacher):
        if kind.fits(vision):
            return kind(vision)
    raise TypeError(f"{type(model).__name__} has no patch tokens that can be read; {SUPPORTED}")


class FrozenTeacher(nn.Module):
    """A frozen vision model; called with images it gives patch features, prefix tokens excluded, no gradient recorded.

    Args:
        model: the model, frozen in place.
        depth: number of blocks.
        embed_dim: width of their outputs.
    """

    def __init__(self, model: nn.Module, depth: int, embed_dim: int) -> None:
        super().__init__()
        self.model = model.requires_grad_(False).eval()
        self.depth, self.embed_dim = depth, embed_dim
        self.eval()

    def train(self, mode: bool = True) -> FrozenTeacher:
        """Stays in eval mode, whatever the parent does."""
        return super().train(False)

    def forward(self, images: torch.Tensor, stages: int | Sequence[int]) -> list[torch.Tensor]:
        """Outputs of blocks, not normalised.

        Args:
            images: (B, C, H, W), normalised as the model wants them; cast to the dtype of its parameters.
            stages: K for the ends of K equal stages, see :func:`stage_ends`, or block indices (negative counts from
                the end).

        Returns:
            Patch features (B, h*w, D), one per stage in the order asked for, in row-major order of the grid.

        Raises:
            ValueError: more stages than blocks, or outputs that are no patch tokens.
            IndexError: a block that there is not.
        """
        indices = stage_blocks(self.depth, stages)
        if self.model.training:  # someone else's train() reached it
            self.model.eval()
        h, w = self.grid_of(images.shape[-2:])
        with torch.no_grad():
            features = self.block_outputs(images.to(self._dtype()), sorted(set(indices)))
        for i, tokens in features.items():
            if tuple(tokens.shape) != (len(images), h * w, self.embed_dim):
                raise ValueError(
                    f"{type(self.model).__name__} has no patch tokens of the expected kind: block {i} gives "
                    f"{tuple(tokens.shape)} where (B, h*w, D) = ({len(images)}, {h}*{w}, {self.embed_dim}) was expected"
                )
        return [features[i] for i in indices]

    def grid_of(self, image_size: Sequence[int]) -> tuple[int, int]:
        """Patch grid (h, w) of an image (H, W)."""
        raise NotImplementedError

    def block_outputs(self, images: torch.Tensor, indices: list[int]) -> dict[int, torch.Tensor]:
        """Patch features of the blocks in ``indices`` (rising)."""
        raise NotImplementedError

    def _dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.get_default_dtype())


class OwnTeacher(FrozenTeacher):
    """A JumboViT or AdventurerViT."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__(vit, len(vit.blocks), vit.embed_dim)

    def grid_of(self, image_size: Sequence[int]) -> tuple[int, int]:
        return self.model.grid_of(image_size)

    def block_outputs(self, images: torch.Tensor, indices: list[int]) -> dict[int, torch.Tensor]:
        return vit_features(self.model, images, indices)


class CustomTeacher(FrozenTeacher):
    """A module that follows :class:`Teacher` on its own account."""

    def __init__(self, model: Teacher) -> None:
        super().__init__(model, model.depth, model.embed_dim)

    def grid_of(self, image_size: Sequence[int]) -> tuple[int, int]:
        return self.model.grid_of(image_size)

    def block_outputs(self, images: torch.Tensor, indices: list[int]) -> dict[int, torch.Tensor]:
        return dict(zip(indices, self.model(images, indices), strict=True))


class TimmTeacher(FrozenTeacher):
    """A timm model of one grid and one width throughout, read through ``forward_intermediates``.

    Other image sizes than the model's own are up to the model: ``dynamic_img_size=True`` allows them in a timm ViT.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, len(model.feature_info), model.feature_info[0]["num_chs"])

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Is it a plain timm transformer: blocks, and maps of one width and stride?"""
        infos = getattr(model, "feature_info", None)
        if not hasattr(model, "forward_intermediates") or not isinstance(infos, list) or not infos:
            return False
        return hasattr(model, "blocks") and len({(str(i["num_chs"]), str(i["reduction"])) for i in infos}) == 1

    def grid_of(self, image_size: Sequence[int]) -> tuple[int, int]:
        embedding = getattr(self.model, "patch_embed", None)
        if hasattr(embedding, "dynamic_feat_size"):
            return tuple(embedding.dynamic_feat_size(tuple(image_size)))
        step = checks.pair("reduction", self.model.feature_info[0]["reduction"])
        return image_size[0] // step[0], image_size[1] // step[1]

    def block_outputs(self, images: torch.Tensor, indices: list[int]) -> dict[int, torch.Tensor]:
        maps = self.model.forward_intermediates(
            images, indices=indices, norm=False, output_fmt="NCHW", intermediates_only=True
        )
        # As maps, not as tokens: some models give nothing else, and a map has no prefix tokens in it.
        return {i: m.flatten(2).transpose(1, 2) for i, m in zip(indices, maps, strict=True)}


class TransformersTeacher(FrozenTeacher):
    """A Transformers vision model, read through ``output_hidden_states``; prefix tokens are what exceeds the grid.

    Images of another size than ``config.image_size`` run with ``interpolate_pos_encoding=True`` where the model knows
    it. ViTMAE sees every patch, in order.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, model.config.num_hidden_layers, model.config.hidden_size)
        self.patch_size = checks.pair("config.patch_size", model.config.patch_size)
        self.parameters_of_forward = frozenset(inspect.signature(model.forward).parameters)

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Does its configuration describe a plain vision transformer?"""
        config = getattr(model, "config", None)
        if config is None or getattr(config, "depths", None) is not None:  # depths: a hierarchy, as in Swin
            return False
        sizes = (getattr(config, name, None) for name in ("hidden_size", "num_hidden_layers"))
        return all(isinstance(size, int) for size in sizes) and all(
            getattr(config, name, None) is not None for name in ("patch_size", "image_size")
        )

    def grid_of(self, image_size: Sequence[int]) -> tuple[int, int]:
        check_divides(tuple(image_size), self.patch_size, pad=False)  # the model would drop the rest without a word
        return image_size[0] // self.patch_size[0], image_size[1] // self.patch_size[1]

    def block_outputs(self, images: torch.Tensor, indices: list[int]) -> dict[int, torch.Tensor]:
        config, options = self.model.config, {}
        size, (h, w) = tuple(images.shape[-2:]), self.grid_of(images.shape[-2:])
        if "interpolate_pos_encoding" in self.parameters_of_forward and size != checks.pair("", config.image_size):
            options["interpolate_pos_encoding"] = True
        masks = "noise" in self.parameters_of_forward and hasattr(config, "mask_ratio")
        if masks:  # masked autoencoders keep what has the least noise, in its order
            noise = torch.arange(h * w, dtype=torch.float32, device=images.device)
            options["noise"] = noise.expand(len(images), -1)
        with _temporarily(config, "mask_ratio", 0.0) if masks else nullcontext():
            output = self.model(images, output_hidden_states=True, return_dict=True, **options)
        states = getattr(output, "hidden_states", None)
        if not isinstance(states, tuple) or len(states) != self.depth + 1:
            count = len(states) if isinstance(states, tuple) else "no"
            raise ValueError(
                f"{type(self.model).__name__} has no patch tokens of the expected kind: {count} hidden states where "
                f"the embeddings and {self.depth} blocks make {self.depth + 1}; {SUPPORTED}"
            )
        return {i: self._patches(states[i + 1], h * w) for i in indices}

    def _patches(self, state: torch.Tensor, count: int) -> torch.Tensor:
        """Hidden state (B, prefix + N, D) -> (B, N, D)."""
        prefix = state.shape[1] - count if state.ndim == 3 else -1
        # Class token, distillation token, registers stand in front; a rest of another size may stand anywhere.
        if prefix not in {0, 1, 2, 1 + (getattr(self.model.config, "num_register_tokens", None) or 0)}:
            raise ValueError(
                f"{type(self.model).__name__} has no patch tokens that can be told from others: hidden states are "
                f"{tuple(state.shape)} for {count} patches; {SUPPORTED}"
            )
        return state[:, prefix:]


def _vision_part(model: nn.Module) -> nn.Module:
    """The vision transformer inside of what holds one: a text-image model, a task head, a wrapped timm model."""
    for name in ("timm_model", "vision_model"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module) and inner is not model:
            return _vision_part(inner)
    base = getattr(model, "base_model", None)  # a Transformers model without its head
    if isinstance(base, nn.Module) and "pixel_values" in inspect.signature(base.forward).parameters:
        return base
    return model


@contextmanager
def _temporarily(thing: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, before)
