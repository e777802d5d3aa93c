"""JumboSeries: patches of a univariate series in front of an encoder with a global token, on torch and timm."""

from __future__ import annotations

import torch
from timm.layers import trunc_normal_
from torch import nn

from jumbo_core import checks
from jumbo_core.jumbo import JumboEncoder, JumboOutput, take_patches
from jumbo_core.linear import AdventurerEncoder

ENCODERS = ("attention", "linear")


def num_patches(seq_len: int, patch_len: int, stride: int) -> int:
    """Patches of a series: ``(L - P) // S + 2``. L=100, P=16, S=8 gives 12.

    The ``+ 2`` is the usual ``+ 1`` and the one patch that the padding of S values at the end adds (PatchTST,
    arXiv 2211.14730, section 3.1).

    Raises:
        ValueError: a length below 1, a series shorter than one patch, a stride that skips steps.
    """
    seq_len, patch_len = checks.integer("seq_len", seq_len), checks.integer("patch_len", patch_len)
    stride = checks.integer("stride", stride)
    if stride > patch_len:
        raise ValueError(
            f"stride {stride} is longer than patch_len {patch_len}, so that {stride - patch_len} of every {stride} "
            f"steps would never be read: use a stride of at most {patch_len}"
        )
    if seq_len < patch_len:
        raise ValueError(
            f"a window of {seq_len} steps is shorter than one patch of {patch_len}: "
            f"use a longer window or patch_len of at most {seq_len}"
        )
    return (seq_len - patch_len) // stride + 2


def to_patches(series: torch.Tensor, patch_len: int, stride: int) -> torch.Tensor:
    """Overlapping patches (B, L) -> (B, N, P), after repeating the last value S times at the END.

    The newest values are what a forecast leans on most, so it is they that must not be cut off when the stride does
    not divide the window.
    """
    end = series[:, -1:].expand(-1, stride)
    return torch.cat([series, end], dim=1).unfold(1, patch_len, stride)


class JumboSeries(nn.Module):
    """Patching, linear embedding and learned positions in front of an encoder: (B, L) -> JumboOutput.

    Patching as in PatchTST (end padding, N = (L - P)//S + 2 patches); each row of the batch is one univariate series,
    so channel independence is folding channels into the batch. The values should be about unit-scale: normalise in
    front (``ts_ext.scaling.RevIN``).

    Args:
        seq_len: L, steps of every series.
        dim: patch width D. Default 128.
        depth: blocks. Default 3.
        num_heads: attention heads, must divide ``dim``; of no effect with ``encoder="linear"``. Default 16.
        patch_len: P, steps of a patch. Default 16.
        stride: S, steps between the starts of two patches, at most P. Default 8.
        drop: dropout after embedding and positions. Default 0.
        init: "short" (Jumbo FFN output starts at zero, default: training runs on series are short) or "released"
            (trunc-normal there too).
        encoder: "attention" (default) = :class:`JumboEncoder`; "linear" = :class:`AdventurerEncoder`, whose time and
            memory grow linearly with L where attention's time grows with its square.
        **options: further arguments of that encoder (multiplier, drop_path, …). The defaults are the encoder's, but
            ``drop_path`` is 0.

    Raises:
        ValueError: a size out of range, a window shorter than a patch, a stride longer than a patch.
        TypeError: an option that the encoder does not have.
    """

    def __init__(
        self,
        seq_len: int,
        *,
        dim: int = 128,
        depth: int = 3,
        num_heads: int = 16,
        patch_len: int = 16,
        stride: int = 8,
        drop: float = 0.0,
        init: str = "short",
        encoder: str = "attention",
        **options,
    ) -> None:
        super().__init__()
        if encoder not in ENCODERS:
            raise ValueError(f"encoder must be one of {ENCODERS}, got {encoder!r}")
        if init not in ("released", "short"):
            raise ValueError(f"init must be 'released' or 'short', got {init!r}")
        self.num_patches = num_patches(seq_len, patch_len, stride)
        self.seq_len, self.patch_len, self.stride = map(int, (seq_len, patch_len, stride))
        dim, depth = checks.integer("dim", dim), checks.integer("depth", depth)
        num_heads = checks.integer("num_heads", num_heads)
        self.patch_embed = nn.Linear(self.patch_len, dim)
        self.pos_embed = nn.Parameter(torch.zeros(1, self.num_patches, dim))
        self.pos_drop = nn.Dropout(drop)
        options = {"drop_path": 0.0, **options}
        if encoder == "linear":
            self.encoder = AdventurerEncoder(dim, depth, **options)
        else:
            self.encoder = JumboEncoder(dim, depth, num_heads, **options)
        trunc_normal_(self.patch_embed.weight, std=0.02)
        nn.init.zeros_(self.patch_embed.bias)
        trunc_normal_(self.pos_embed, std=0.02)
        if init == "short":
            self.encoder.zero_jumbo_output()

    def forward(
        self, series: torch.Tensor, mask: torch.Tensor | None = None, keep: torch.Tensor | None = None
    ) -> JumboOutput:
        """Encode series (B, L).

        Args:
            series: values, in the dtype of the parameters.
            mask: (B, L) bool, True = a real value. What stands at the other steps has no influence: it is read as 0,
                and a patch without any real value is seen by nobody. Default: all real.
            keep: long index (B, K) of the patches to use, the others are dropped before the first block
                (:func:`jumbo_core.jumbo.random_keep` makes one). Default: all.

        Returns:
            JumboOutput: jumbo (B, J, D), or the class token (B, 1, D) when ``multiplier=0``; patches (B, N or K, D).

        Raises:
            ValueError: another shape than (B, L), or a mask of another shape or dtype.
        """
        if series.ndim != 2 or series.shape[1] != self.seq_len:
            raise ValueError(f"JumboSeries expects series (B, {self.seq_len}), got {tuple(series.shape)}")
        patch_mask = None
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape != series.shape:
                raise ValueError(
                    f"mask must be bool of the series' shape {tuple(series.shape)} with True for real values, "
                    f"got {mask.dtype} {tuple(mask.shape)}"
                )
            series = series.masked_fill(~mask, 0)
            patch_mask = to_patches(mask, self.patch_len, self.stride).any(dim=-1)  # (B, L) -> (B, N)
        patches = to_patches(series, self.patch_len, self.stride)  # (B, L) -> (B, N, P)
        patches = self.pos_drop(self.patch_embed(patches) + self.pos_embed)
        if keep is not None:
            patches = take_patches(patches, keep)
            patch_mask = None if patch_mask is None else take_patches(patch_mask, keep)
        return self.encoder(patches, patch_mask)
