"""Stages: where networks of any depth are cut into equal parts, and what teacher and student hold at the cuts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from jumbo_core import checks
from jumbo_core.distill.finite import check_finite
from jumbo_core.jumbo.stack import resolve_index
from jumbo_core.models.surface import PatchModel

if TYPE_CHECKING:
    from jumbo_core.distill.teachers import FrozenTeacher


class StageFeatures(NamedTuple):
    """Patch features at the end of each stage: teacher K x (B, N, Dt), student K x (B, N, Ds); grid (h, w), N = h*w."""

    teacher: list[torch.Tensor]
    student: list[torch.Tensor]
    grid: tuple[int, int]


def stage_ends(depth: int, stages: int) -> list[int]:
    """Last block of each of ``stages`` equal parts: block number ``depth * k // stages`` for k = 1..stages, from 0.

    Raises:
        ValueError: more stages than blocks.
    """
    stages = checks.integer("stages", stages)
    if stages > depth:
        raise ValueError(f"stages={stages} is more than the {depth} blocks there are; use at most {depth}")
    return [depth * k // stages - 1 for k in range(1, stages + 1)]


def stage_blocks(depth: int, stages: int | Sequence[int]) -> list[int]:
    """Block indices from 0 of K equal stages (:func:`stage_ends`), or those given, negatives counted from the end.

    Raises:
        ValueError: more stages than blocks, or none.
        IndexError: a block that there is not.
    """
    if not isinstance(stages, Sequence):
        return stage_ends(depth, stages)
    if not stages:
        raise ValueError("stages must name at least one block, got none")
    return [resolve_index(i, depth) for i in stages]


def find_vit(model: nn.Module) -> nn.Module | None:
    """The one JumboViT or AdventurerViT in ``model`` (itself or a part of a wrapper), None if there is none.

    Raises:
        TypeError: there are several.
    """
    found = [module for module in model.modules() if isinstance(module, PatchModel)]
    if len(found) > 1:
        raise TypeError(f"{type(model).__name__} holds {len(found)} image models, pass the one that is meant")
    return found[0] if found else None


def vit_features(
    vit: nn.Module,
    images: torch.Tensor,
    indices: Sequence[int],
    replace: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> dict[int, torch.Tensor]:
    """Patch features (B, N, D) of blocks of a JumboViT or AdventurerViT, not normalised, without global tokens.

    Args:
        vit: the model.
        images: (B, C, H, W).
        indices: blocks, from 0.
        replace: (bool (B, N), token (D,)): the token stands in for the embeddings of patches that are True.
    """
    patches, mask = vit.embed(images.to(vit.pos_embed.dtype), replace=replace)
    _, collected = vit.encoder(patches, mask, collect=set(indices), stop=max(indices) + 1)
    return {i: vit.encoder.split(tokens).patches for i, tokens in collected.items()}


def stage_features(
    teacher: FrozenTeacher,
    student: nn.Module,
    images: torch.Tensor,
    stages: int | Sequence[int],
    *,
    replace: tuple[torch.Tensor, torch.Tensor] | None = None,
    resample: bool = False,
) -> StageFeatures:
    """Patch features of a teacher and a student (JumboViT or AdventurerViT) on the student's grid.

    ``stages``: K equal stages of each network, or indices of blocks in both. ``replace`` as in ``student.embed``;
    ``resample`` as ``resample_teacher`` of :class:`ViTLinearizer`. Raises as its ``forward``.
    """
    check_images(images)
    grid, teacher_grid = tuple(student.grid_of(images.shape[-2:])), tuple(teacher.grid_of(images.shape[-2:]))
    if grid != teacher_grid and not resample:
        raise ValueError(
            f"teacher has a {_by(teacher_grid)} grid of patches, student {_by(grid)}, on a {_by(images.shape[-2:])} "
            f"image: use resample_teacher=True, or equal patch sizes"
        )
    check_finite(["images"], [images])
    ends = stage_blocks(len(student.blocks), stages)
    seen = teacher(images, stages)
    if grid != teacher_grid:
        seen = [_resample(features, teacher_grid, grid) for features in seen]
    by_block = vit_features(student, images, ends, replace)
    learned = [by_block[i] for i in ends]
    count = learned[0].shape[1]
    if count != grid[0] * grid[1]:
        raise ValueError(
            f"student gives {count} tokens for the {grid[0] * grid[1]} patches of its {_by(grid)} grid: "
            f"set its patch_drop_rate to 0, distillation masks patches itself"
        )
    sides = {"teacher": stage_blocks(teacher.depth, stages), "student": ends}
    names = [f"{side} stage {k} (block {i})" for side, blocks in sides.items() for k, i in enumerate(blocks, 1)]
    check_finite(names, [*seen, *learned])
    return StageFeatures(seen, learned, grid)


def check_images(images: torch.Tensor) -> None:
    """Images are (B, C, H, W) of a floating point dtype."""
    if images.ndim != 4 or not images.is_floating_point():
        raise ValueError(f"images must be floating point (B, C, H, W), got {images.dtype} {tuple(images.shape)}")


def _resample(features: torch.Tensor, old: tuple[int, int], new: tuple[int, int]) -> torch.Tensor:
    """Feature grid (B, h*w, D) resized from ``old`` (h, w) to ``new``: weights of a mean, so values stay in range."""
    image = features.transpose(1, 2).unflatten(2, old)
    image = image.to(torch.promote_types(image.dtype, torch.float32))  # half precision lacks it on some devices
    image = F.interpolate(image, size=new, mode="bilinear", antialias=True)
    return image.flatten(2).transpose(1, 2).to(features.dtype)


def _by(sides: Sequence[int]) -> str:
    return "x".join(str(side) for side in sides)
