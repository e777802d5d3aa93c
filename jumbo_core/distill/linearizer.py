"""ViT-Linearizer: a linear-time student learns the activation maps and the masked features of a frozen ViT."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real

import torch
from timm.layers import trunc_normal_
from torch import nn

from jumbo_core import checks
from jumbo_core.distill.activation import activation_matching_loss
from jumbo_core.distill.masked import check_mask_ratio, masked_count, prediction_loss, random_mask
from jumbo_core.distill.stages import StageFeatures, check_images, find_vit, stage_features
from jumbo_core.distill.teachers import FrozenTeacher, as_teacher
from jumbo_core.jumbo.dropping import take_patches
from jumbo_core.modes import evaluating


class ViTLinearizer(nn.Module):
    """Distils a frozen vision transformer into a linear-time student (ViT-Linearizer, arXiv 2504.00037).

    The teacher sees the whole image. The student sees it with a share ``mask_ratio`` of its patch embeddings replaced
    by a learned token (positions stay). Both are cut into ``stages`` equal parts, each on its own, so that depths may
    differ; stage k ends with block ``depth * k // stages``. Prefix tokens of both sides are left out. Then::

        loss = activation_weight * activation + mask_weight * masked

    activation: how far the student's maps of the visible tokens are from the teacher's, mean over stages, see
    :func:`activation_matching_loss`; masked tokens would leak the target. masked: SmoothL1 between the teacher's last
    block at the masked tokens and a linear prediction from the student's, see :func:`masked_prediction_loss`.

    The state dict holds ``student.*``, ``mask_token`` and ``predictor.*``. The teacher is no submodule: it follows
    ``to`` and ``half``, is in neither ``parameters()`` nor the state dict, and stays frozen and in eval mode. The
    student's head and final norm get no gradient here, fine-tuning trains them: under DDP set
    ``find_unused_parameters=True``.

    Args:
        teacher: anything :func:`as_teacher` takes; frozen in place.
        student: JumboViT or AdventurerViT, alone or in a Transformers model (``hf_ext``).
        stages: K. Default 4.
        mask_ratio: share of masked patches, strictly between 0 and 1. Default 0.75.
        mask_weight: weight of the masked loss (lambda in the paper). Default 1. A loss of weight 0 is not computed and
            reported as 0.
        activation_weight: weight of the map loss. Default 1.
        beta, normalize_target: see :func:`masked_prediction_loss`. Default 1 and True.
        resample_teacher: resize the teacher's feature grid to the student's (bilinear, antialiased) when they differ.
            Default False: an error.

    Raises:
        TypeError: a teacher without patch tokens, a student that is none of ours.
        ValueError: an option out of range, more stages than blocks, a module that is part of both networks.
    """

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        *,
        stages: int = 4,
        mask_ratio: float = 0.75,
        mask_weight: float = 1.0,
        activation_weight: float = 1.0,
        beta: float = 1.0,
        normalize_target: bool = True,
        resample_teacher: bool = False,
    ) -> None:
        super().__init__()
        _check_apart(teacher, student)
        vit = _student_vit(student)
        self.stages = checks.integer("stages", stages)
        self.mask_ratio = check_mask_ratio(mask_ratio)
        self.mask_weight = _check_weight("mask_weight", mask_weight)
        self.activation_weight = _check_weight("activation_weight", activation_weight)
        if not self.mask_weight and not self.activation_weight:
            raise ValueError("mask_weight and activation_weight are both 0: there is nothing to learn")
        self.beta = checks.positive("beta", beta)
        self.normalize_target = checks.flag("normalize_target", normalize_target)
        self.resample_teacher = checks.flag("resample_teacher", resample_teacher)
        teacher = as_teacher(teacher)
        _check_depths(teacher, vit, self.stages)
        # Past nn.Module's registration: no optimizer, wrapper or checkpoint shall meet the teacher.
        object.__setattr__(self, "teacher", teacher)
        self.student = student
        self._vit_name = next(name for name, module in student.named_modules() if module is vit)
        like = next(vit.parameters())
        self.mask_token = nn.Parameter(torch.zeros(vit.embed_dim, device=like.device, dtype=like.dtype))
        self.predictor = nn.Linear(vit.embed_dim, teacher.embed_dim, device=like.device, dtype=like.dtype)
        trunc_normal_(self.mask_token, std=0.02)
        trunc_normal_(self.predictor.weight, std=0.02)
        nn.init.zeros_(self.predictor.bias)

    @property
    def vit(self) -> nn.Module:
        """The JumboViT or AdventurerViT that is the student, or is inside of it."""
        return self.student.get_submodule(self._vit_name)

    def forward(self, images: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Losses of a batch.

        Args:
            images: (B, C, H, W), normalised as the teacher wants them: both networks see the same.
            mask: bool (B, N), True = masked, as many in every sample. Default: a random one of ``mask_ratio``.

        Returns:
            ``loss``, ``activation`` and ``masked``, scalars with gradients.

        Raises:
            ValueError: unequal grids without ``resample_teacher``; NaN or infinite images or features (the stage is
                named; not looked for under ``torch.compile``, where looking would cut the graph); a mask that does not
                fit.
        """
        check_images(images)
        h, w = self.vit.grid_of(images.shape[-2:])
        if mask is None:
            mask = random_mask(len(images), h * w, self.mask_ratio, device=images.device)
            count = masked_count(self.mask_ratio, h * w)
        else:
            count = _masked_count(mask, len(images), h * w)
        if self.activation_weight and h * w - count < 2:
            raise ValueError(
                f"{count} of {h * w} patches are masked: a map of {h * w - count} visible tokens says nothing; use "
                f"larger images, smaller patches, a smaller mask_ratio, or activation_weight=0"
            )
        stages = self.stages if self.activation_weight else [-1]
        teacher, student, _ = self.features(images, mask, stages)
        order = mask.to(torch.uint8).argsort(dim=1, stable=True)  # visible ones first, each part in its order
        visible, masked = order[:, :-count], order[:, -count:]

        zero = torch.zeros((), device=images.device)
        activation, prediction = zero, zero
        if self.activation_weight:
            activation = activation_matching_loss(
                [take_patches(f, visible) for f in teacher], [take_patches(f, visible) for f in student]
            )
        if self.mask_weight:
            prediction = prediction_loss(
                take_patches(teacher[-1], masked),
                self.predictor(take_patches(student[-1], masked)),
                beta=self.beta,
                normalize_target=self.normalize_target,
            )
        loss = self.activation_weight * activation + self.mask_weight * prediction
        return {"loss": loss, "activation": activation, "masked": prediction}

    def features(
        self, images: torch.Tensor, mask: torch.Tensor | None = None, stages: int | Sequence[int] | None = None
    ) -> StageFeatures:
        """Features of both networks at the ends of the stages (or after the blocks ``stages`` names in both).

        ``mask`` (B, N) bool, True = the student sees the mask token there. Default: it sees everything.
        """
        return stage_features(
            self.teacher,
            self.vit,
            images,
            self.stages if stages is None else stages,
            replace=None if mask is None else (mask, self.mask_token),
            resample=self.resample_teacher,
        )

    def extra_repr(self) -> str:
        return (
            f"teacher={type(self.teacher.model).__name__}, stages={self.stages}, mask_ratio={self.mask_ratio}, "
            f"mask_weight={self.mask_weight}, activation_weight={self.activation_weight}"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ViTLinearizer:
        self.teacher._apply(fn, recurse)  # to(), half(), cuda(): the teacher goes where the student goes
        return super()._apply(fn, recurse)


def unmasked_features(pair: ViTLinearizer | tuple[nn.Module, nn.Module], images: torch.Tensor) -> StageFeatures:
    """Features of whole images in eval mode, without gradients; modes are as before afterwards.

    Args:
        pair: a linearizer, or (teacher, student), for 4 stages (fewer in a network of fewer blocks) and with the
            teacher's grid resampled if need be.
        images: (B, C, H, W), normalised.
    """
    if isinstance(pair, ViTLinearizer):
        teacher, student, stages, resample = pair.teacher, pair.vit, pair.stages, pair.resample_teacher
    else:
        _check_apart(*pair)
        teacher, student, resample = as_teacher(pair[0]), _student_vit(pair[1]), True
        stages = min(4, teacher.depth, len(student.blocks))
    with torch.no_grad(), evaluating(student):
        return stage_features(teacher, student, images, stages, resample=resample)


def map_distance(linearizer: ViTLinearizer | tuple[nn.Module, nn.Module], images: torch.Tensor) -> list[float]:
    """Distance of the student's activation maps from the teacher's on whole images, one number per stage.

    The number is :func:`activation_matching_loss` of all patches: mean of 1 - cosine between map rows, 0 = equal maps.

    Args:
        linearizer: see :func:`unmasked_features`.
        images: (B, C, H, W), normalised.
    """
    features = unmasked_features(linearizer, images)
    return [activation_matching_loss(t, s).item() for t, s in zip(features.teacher, features.student, strict=True)]


def _student_vit(student: nn.Module) -> nn.Module:
    vit = find_vit(student) if isinstance(student, nn.Module) else None
    if vit is None:
        raise TypeError(
            f"student must be a JumboViT or AdventurerViT, or a Transformers model that holds one, "
            f"got {type(student).__name__}"
        )
    return vit


def _check_apart(teacher: nn.Module, student: nn.Module) -> None:
    sides = [side.parameters() if isinstance(side, nn.Module) else () for side in (teacher, student)]
    if {id(p) for p in sides[0]} & {id(p) for p in sides[1]}:
        raise ValueError(
            "teacher and student share parameters, which freezing the teacher would freeze: use copy.deepcopy(student)"
        )


def _check_depths(teacher: FrozenTeacher, vit: nn.Module, stages: int) -> None:
    depths = {"teacher": teacher.depth, "student": len(vit.blocks)}
    if stages > min(depths.values()):
        raise ValueError(
            f"stages={stages} is more than the blocks there are (teacher {depths['teacher']}, student "
            f"{depths['student']}); use at most {min(depths.values())}"
        )


def _check_weight(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    return float(value)


def _masked_count(mask: torch.Tensor, batch: int, patches: int) -> int:
    """How many patches a given mask hides in every sample."""
    if mask.dtype != torch.bool or tuple(mask.shape) != (batch, patches):
        raise ValueError(
            f"mask must be bool of shape (B, N) = ({batch}, {patches}) with True for masked patches, "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    counts = mask.sum(dim=1).unique().tolist()
    if len(counts) != 1 or not 0 < counts[0] < patches:
        raise ValueError(
            f"mask must hide as many of the {patches} patches in every sample, at least 1 and not all, got {counts}"
        )
    return counts[0]
