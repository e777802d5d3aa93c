"""From a model and a folder of images to a plan, with what it leaves, as files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import nn

from jumbo_core.tofu.apply import FusionReport, fusion_report
from jumbo_core.tofu.folder import ImageBatches, model_transform
from jumbo_core.tofu.hosts import host_of
from jumbo_core.tofu.linearity import LinearityProfile, linearity_profile
from jumbo_core.tofu.plan import FusionPlan

PRESETS = ("adaptive", "paper", "uniform")


@dataclass(frozen=True)
class FolderProfile:
    """Result of :func:`profile_folder`.

    ``settings`` is what was asked and which images were found, ready for JSON.
    """

    plan: FusionPlan
    profile: LinearityProfile
    report: FusionReport
    settings: dict

    def to_dict(self) -> dict:
        """Everything but the plan, ready for JSON."""
        report = {**asdict(self.report), "clamps": [c._asdict() for c in self.report.clamps]}
        saved = {"multiply_adds": self.report.saved, "token_layers": self.plan.saved(self.report.num_patches)}
        return {**self.settings, **report, "saved": saved, "profile": asdict(self.profile)}

    def __str__(self) -> str:
        lines = [f"{name.replace('_', ' ')}: {value}" for name, value in self.settings.items()]
        lines.append(f"token-layers saved: {100 * self.plan.saved(self.report.num_patches):.1f} %")
        lines.append(str(self.report))
        lines.append("block  operator  leave  linearity  importance")
        rows = zip(self.plan.ops, self.plan.counts, self.profile.linearity, self.profile.importance, strict=True)
        for i, (op, count, linearity, importance) in enumerate(rows):
            lines.append(f"{i:5}  {op:8}  {count:5}  {linearity:9.3f}  {importance:10.3f}")
        return "\n".join(lines)

    def write(self, folder: str | Path) -> list[Path]:
        """Write ``plan.json``, ``profile.json``, ``report.json``, ``report.txt`` and ``profile.png`` into a folder.

        Raises:
            ImportError: matplotlib is missing; the other files are written by then.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.plan.to_json(folder / "plan.json")
        self.profile.to_json(folder / "profile.json")
        (folder / "report.json").write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        (folder / "report.txt").write_text(f"{self}\n")
        self.profile.plot(folder / "profile.png")
        return [folder / name for name in ("plan.json", "profile.json", "report.json", "report.txt", "profile.png")]


def profile_folder(
    model: nn.Module,
    images: str | Path,
    *,
    reduction: float = 0.35,
    preset: str = "adaptive",
    op: str = "mlerp",
    batches: int = 8,
    batch_size: int = 16,
    seed: int = 0,
    transform: Callable[[Image.Image], torch.Tensor] | None = None,
    progress: Callable[[Iterable], Iterable] | None = None,
) -> FolderProfile:
    """Measure a model on a folder of images and make the plan that saves a share of its work.

    Args:
        model: what :func:`apply_tofu` takes, not fused, on any device. Of several outputs the first counts.
        images: folder of jpg and png files, nested as it may be; see :class:`ImageBatches`.
        reduction: share of the token-layers to save, see :meth:`FusionPlan.from_profile`. Default 0.35.
        preset: "adaptive" (default; the budget spread by importance), "paper" (prune, then MLERP) or "uniform" (one
            operator); the last two with the smallest constant r that reaches ``reduction``.
        op: operator of the "uniform" preset. Default "mlerp".
        batches, batch_size, seed: of the images, see :class:`ImageBatches`. Default 8, 16, 0. The seed also chooses
            the token pairs of the profile.
        transform: image -> (C, H, W). Default: what the model's timm data config says; needed for a model without one.
        progress: put around the batches, for example ``tqdm``. Default: no progress bar.

    Raises:
        FileNotFoundError: no such folder, no image in it.
        ValueError: a reduction out of reach, an image that cannot be read, an unknown preset or operator, no
            ``transform`` for a model that is not timm's.
        TypeError: a model that no host knows.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(map(repr, PRESETS))}, got {preset!r}")
    depth = len(host_of(model).blocks(model))
    makers = {
        "paper": lambda r: FusionPlan.paper(depth, r),
        "uniform": lambda r: FusionPlan.uniform(depth, r, op),
    }
    makers["uniform"](0)  # an unknown operator is told before the work, whichever preset
    transform = model_transform(model) if transform is None else transform
    loader = ImageBatches(images, transform, batches=batches, batch_size=batch_size, seed=seed)
    like = next(model.parameters())
    on_device = (batch.to(like.device, like.dtype) for batch in (loader if progress is None else progress(loader)))
    profile = linearity_profile(model, on_device, seed=seed)
    if preset == "adaptive":
        plan = FusionPlan.from_profile(profile, reduction)
    else:
        plan = FusionPlan.reaching(makers[preset], reduction, profile.num_patches)
    settings = {
        "model": f"{type(model).__name__}, {depth} blocks",
        "images": str(images),
        "images_found": loader.found,
        "images_used": loader.used,
        "seed": seed,
        "preset": preset if preset != "uniform" else f"uniform {op}",
        "reduction": reduction,
    }
    return FolderProfile(plan, profile, fusion_report(model, plan, profile.num_patches), settings)
