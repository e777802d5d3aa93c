"""Learned position tables are grids, not lists: they are resampled when the *grid* changes."""

from __future__ import annotations

import torch
from timm.layers import resample_abs_pos_embed


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
    return resample_abs_pos_embed(table, new_size=list(new_grid), old_size=list(old_grid), num_prefix_tokens=0)


def square_grid(num_patches: int) -> tuple[int, int] | None:
    """(s, s) if ``num_patches`` is a square, else None: what a table of unknown grid can be assumed to be."""
    side = round(num_patches**0.5)
    return (side, side) if side * side == num_patches else None
