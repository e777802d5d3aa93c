"""A picture of what was distilled: activation maps of teacher and student side by side."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from jumbo_core.distill.activation import activation_map
from jumbo_core.distill.linearizer import ViTLinearizer, unmasked_features


def plot_activation_maps(
    linearizer: ViTLinearizer | tuple[nn.Module, nn.Module],
    images: torch.Tensor,
    path: str | Path,
    *,
    query: tuple[int, int] | None = None,
) -> Path:
    """Draw, for every image, the photo and the cosine of one patch with all others, stage by stage, for both networks.

    Above each of the student's maps stands its correlation with the teacher's, the query patch itself left out.

    Args:
        linearizer: a linearizer, or (teacher, student); see :func:`unmasked_features`.
        images: (B, C, H, W), normalised as the networks want them; a few. C of 1 or 3; drawn stretched to [0, 1].
        path: the file to write; its ending says which format (png, pdf, svg).
        query: row and column of the patch on the grid. Default: the centre.

    Returns:
        ``path``.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: a query outside of the grid, or images of another number of channels.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plot_activation_maps needs matplotlib: pip install matplotlib") from None
    features = unmasked_features(linearizer, images)
    if images.shape[1] not in (1, 3):
        raise ValueError(f"images of {images.shape[1]} channels cannot be drawn, 1 or 3 can")
    h, w = features.grid
    row, column = (h // 2, w // 2) if query is None else query
    if not (0 <= row < h and 0 <= column < w):
        raise ValueError(f"query {query} is outside of the {h}x{w} grid of patches")
    at, stages = row * w + column, len(features.teacher)
    maps = [  # K x (B, n) of each network
        [activation_map(stage)[:, at].float().cpu() for stage in side] for side in (features.teacher, features.student)
    ]
    count = len(images)
    # A figure of its own with the Agg canvas: no window, and none of pyplot's global state is touched.
    figure = Figure(figsize=(1.6 * (stages + 1), 3.5 * count), layout="constrained")
    axes = figure.subplots(2 * count, stages + 1, squeeze=False)
    for b in range(count):
        photo, empty = axes[2 * b, 0], axes[2 * b + 1, 0]
        photo.imshow(_stretched(images[b]).numpy(), extent=(-0.5, w - 0.5, h - 0.5, -0.5), aspect="auto")
        photo.set_box_aspect(images.shape[-2] / images.shape[-1])
        photo.plot(column, row, "s", color="red", fillstyle="none", markersize=7)
        photo.set_title("image, query", fontsize=8)
        empty.set_visible(False)
        for k in range(stages):
            pair = [side[k][b] for side in maps]
            # One scale for both: without the query's own 1, and the same colours for the same cosine.
            others = torch.stack([torch.cat([m[:at], m[at + 1 :]]) for m in pair])
            low, high = (others.min().item(), others.max().item()) if others.numel() else (0.0, 1.0)
            titles = f"teacher, stage {k + 1}", f"student, r = {_correlation(*others):.2f}"
            for line, (values, title) in enumerate(zip(pair, titles, strict=True)):
                axis = axes[2 * b + line, k + 1]
                axis.imshow(values.reshape(h, w).numpy(), vmin=low, vmax=high, cmap="viridis", aspect="auto")
                axis.set_box_aspect(images.shape[-2] / images.shape[-1])
                axis.plot(column, row, "s", color="red", fillstyle="none", markersize=5)
                axis.set_title(title, fontsize=8)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _stretched(image: torch.Tensor) -> torch.Tensor:
    """(C, H, W) of any range -> (H, W, 3) in [0, 1]."""
    image = image.detach().float().cpu().expand(3, -1, -1)
    low, high = image.min(), image.max()
    return ((image - low) / (high - low).clamp(min=1e-12)).permute(1, 2, 0)


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Pearson correlation; nan if one side is constant."""
    a, b = a - a.mean(), b - b.mean()
    return ((a * b).sum() / (a.norm() * b.norm())).item()
