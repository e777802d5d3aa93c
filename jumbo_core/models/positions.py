"""Learned position tables are grids, not lists: they are resampled when the *grid* changes."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def resample_positions(table: torch.Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int]) -> torch.Tensor:
    """Bicubic resize of a position table (1, h*w, D) from ``old_grid`` (h, w) to ``new_grid``; identity on equal grids.

    (2, 8) and (4, 4) hold the same number of patches and still need resampling, so grids are compared, never counts.

    Raises:
        ValueError: the table does not hold ``h*w`` entries of ``old_grid``.
    """
    old_grid, new_grid = tuple(old_grid), tuple(new_grid)
    if table.ndim != 3 or table.shape[1] != old_grid[0] * old_grid[1]:
        raise ValueError(f"a position table for grid {old_grid} is (1, {old_grid[0] * old_grid[1]}, D), "
                         f"got {tuple(table.shape)}")  # fmt: skip
    if old_grid == new_grid:
        return table
    image = table.reshape(1, *old_grid, -1).permute(0, 3, 1, 2)  # (1, h*w, D) -> (1, D, h, w)
    image = image if image.dtype == torch.float64 else image.float()  # half precision has no bicubic on every device
    image = F.interpolate(image, size=new_grid, mode="bicubic", antialias=True)
    return image.flatten(2).transpose(1, 2).to(table.dtype)


def grid_of_table(
    count: int, model_grid: tuple[int, int], *, same_layout: bool, given: tuple[int, int] | None = None
) -> tuple[int, int] | None:
    """Patch grid (h, w) that a position table of ``count`` entries in a file was learned on, or None if unknowable.

    Args:
        count: entries of the table.
        model_grid: grid of the model that reads it.
        same_layout: the file was written by this library from a model of the reader's kind, so that equal counts mean
            equal grids. Published files are square: 196 entries are 14x14, also for a model of 7x28.
        given: the grid if the caller knows it.
    """
    if given is not None:
        return tuple(given)
    fits = count == model_grid[0] * model_grid[1]
    if fits and same_layout:
        return tuple(model_grid)
    return square_grid(count) or (tuple(model_grid) if fits else None)


def square_grid(num_patches: int) -> tuple[int, int] | None:
    """(s, s) if ``num_patches`` is a square, else None: what a table of unknown grid can be assumed to be."""
    side = round(num_patches**0.5)
    return (side, side) if side * side == num_patches else None
