"""JumboSeries: patches of a series in front of an encoder with a global token, on torch and timm."""

from __future__ import annotations

import torch
from timm.layers import trunc_normal_
from torch import nn

from jumbo_core import checks
from jumbo_core.dropout import Dropout
from jumbo_core.jumbo import JumboEncoder, JumboOutput, take_patches
from jumbo_core.linear import AdventurerEncoder
from jumbo_core.models.batchnorm import use_batch_norm

ENCODERS = ("attention", "linear")
NORMS = {"attention": ("LayerNorm", "BatchNorm"), "linear": ("RMSNorm",)}


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
    """Overlapping patches (..., L) -> (..., N, P), after repeating the last value S times at the END.

    The newest values are what a forecast leans on most, so it is they that must not be cut off when the stride does
    not divide the window.
    """
    end = series[..., -1:].expand(*series.shape[:-1], stride)
    return torch.cat([series, end], dim=-1).unfold(-1, patch_len, stride)


class JumboSeries(nn.Module):
    """Patching, linear embedding and learned positions in front of an encoder: (B, L) -> JumboOutput.

    Patching as in PatchTST (end padding, N = (L - P)//S + 2 patches); each row of the batch is one univariate series,
    so channel independence is folding channels into the batch. With ``in_channels`` C above 1 a row is a multivariate
    series (C, L) and a token reads the patches of all its channels, joined: what PatchTST calls channel mixing. The
    values should be about unit-scale: normalise in front (``ts_ext.scaling.RevIN``).

    Args:
        seq_len: L, steps of every series.
        dim: patch width D. Default 128.
        depth: blocks. Default 3.
        num_heads: attention heads, must divide ``dim``; of no effect with ``encoder="linear"``. Default 16.
        patch_len: P, steps of a patch. Default 16.
        stride: S, steps between the starts of two patches, at most P. Default 8.
        in_channels: C, channels that one token reads. Default 1.
        drop: dropout after embedding and positions. Default 0.
        init: "short" (Jumbo FFN output starts at zero, default: training runs on series are short) or "released"
            (trunc-normal there too).
        encoder: "attention" (default) = :class:`JumboEncoder`; "linear" = :class:`AdventurerEncoder`, whose time and
            memory grow linearly with L where attention's time grows with its square.
        norm: "LayerNorm" or "BatchNorm" (PatchTST's: over the tokens of the whole batch, see
            :mod:`jumbo_core.models.batchnorm`) with attention; the linear encoder has "RMSNorm" alone. Default None:
            the first of these.
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
        in_channels: int = 1,
        drop: float = 0.0,
        init: str = "short",
        encoder: str = "attention",
        norm: str | None = None,
        **options,
    ) -> None:
        super().__init__()
        if encoder not in ENCODERS:
            raise ValueError(f"encoder must be one of {ENCODERS}, got {encoder!r}")
        norm = NORMS[encoder][0] if norm is None else norm
        if norm not in NORMS[encoder]:
            raise ValueError(f"norm with encoder={encoder!r} must be one of {NORMS[encoder]}, got {norm!r}")
        if init not in ("released", "short"):
            raise ValueError(f"init must be 'released' or 'short', got {init!r}")
        self.num_patches = num_patches(seq_len, patch_len, stride)
        self.seq_len, self.patch_len, self.stride = map(int, (seq_len, patch_len, stride))
        dim, depth = checks.integer("dim", dim), checks.integer("depth", depth)
        num_heads = checks.integer("num_heads", num_heads)
        self.in_channels, self.norm = checks.integer("in_channels", in_channels), norm
        self.patch_embed = nn.Linear(self.in_channels * self.patch_len, dim)
        self.pos_embed = nn.Parameter(torch.zeros(1, self.num_patches, dim))
        self.pos_drop = Dropout(drop)
        options = {"drop_path": 0.0, **options}
        if encoder == "linear":
            self.encoder = AdventurerEncoder(dim, depth, **options)
        else:
            self.encoder = JumboEncoder(dim, depth, num_heads, **options)
        if norm == "BatchNorm":
            use_batch_norm(self.encoder)
        trunc_normal_(self.patch_embed.weight, std=0.02)
        nn.init.zeros_(self.patch_embed.bias)
        trunc_normal_(self.pos_embed, std=0.02)
        if init == "short":
            self.encoder.zero_jumbo_output()

    def forward(
        self,
        series: torch.Tensor,
        mask: torch.Tensor | None = None,
        keep: torch.Tensor | None = None,
        *,
        every_block: bool = False,
    ) -> JumboOutput | list[JumboOutput]:
        """Encode series (B, L), or (B, C, L) with ``in_channels`` C above 1.

        Args:
            series: values, in the dtype of the parameters.
            mask: bool of the same shape, True = a real value. What stands at the other steps has no influence: it is
                read as 0, and a patch without any real value is seen by nobody. Default: all real.
            keep: long index (B, K) of the patches to use, the others are dropped before the first block
                (:func:`jumbo_core.jumbo.random_keep` makes one). Default: all.
            every_block: return what the first block is given and every block's output, none of it normalised, and
                last the normalised output.

        Returns:
            JumboOutput: jumbo (B, J, D), or the class token (B, 1, D) when ``multiplier=0``; patches (B, N or K, D).
            With ``every_block`` a list of depth + 2 of them.

        Raises:
            ValueError: another shape than that, a mask of another shape or dtype, or, in training with
                ``norm="BatchNorm"``, a single row or a patch without any real value.
        """
        channels = () if self.in_channels == 1 else (self.in_channels,)
        if series.shape[1:] != (*channels, self.seq_len) or series.ndim != 2 + len(channels):
            expected = ", ".join(map(str, ("B", *channels, self.seq_len)))
            raise ValueError(f"JumboSeries expects series ({expected}), got {tuple(series.shape)}")
        patch_mask = None
        if mask is not None:
            patch_mask = self.real_patches(mask, series)
            series = series.masked_fill(~mask, 0)
        patches = to_patches(series, self.patch_len, self.stride)  # (B, L) -> (B, N, P), or (B, C, L) -> (B, C, N, P)
        if channels:
            patches = patches.transpose(1, 2).flatten(2)  # (B, C, N, P) -> (B, N, C*P)
        patches = self.pos_drop(self.patch_embed(patches) + self.pos_embed)
        if keep is not None:
            patches = take_patches(patches, keep)
            patch_mask = None if patch_mask is None else take_patches(patch_mask, keep)
        if self.norm == "BatchNorm" and self.training:
            _check_batch(patches, patch_mask)
        if not every_block:
            return self.encoder(patches, patch_mask)
        encoder = self.encoder
        first, _ = encoder(patches, patch_mask, collect=(), stop=0)
        last, blocks = encoder(patches, patch_mask, collect=range(encoder.depth))
        return [encoder.split(tokens) for tokens in (first, *(blocks[i] for i in sorted(blocks)), encoder.norm(last))]

    def real_patches(self, mask: torch.Tensor, series: torch.Tensor) -> torch.Tensor:
        """Mask of the steps of ``series`` -> mask of the patches (B, N): those with a real value in any channel."""
        if mask.dtype != torch.bool or mask.shape != series.shape:
            raise ValueError(
                f"mask must be bool of the series' shape {tuple(series.shape)} with True for real values, "
                f"got {mask.dtype} {tuple(mask.shape)}"
            )
        real = to_patches(mask, self.patch_len, self.stride).any(dim=-1)
        return real if real.ndim == 2 else real.any(dim=1)  # (B, C, N) -> (B, N)


def _check_batch(patches: torch.Tensor, patch_mask: torch.Tensor | None) -> None:
    """Batch statistics need more than one row, and can not leave out what nobody should see."""
    if patches.shape[0] < 2:
        raise ValueError(
            f"norm='BatchNorm' trains on the statistics of a batch and got one row of {patches.shape[1]} patches: use "
            f"larger batches, drop the last one, or norm='LayerNorm'"
        )
    if patch_mask is not None and (torch.compiler.is_compiling() or not patch_mask.all()):
        raise ValueError(
            f"norm='BatchNorm' can not leave patches without a real value out of its statistics, and "
            f"{int((~patch_mask).sum()) if not torch.compiler.is_compiling() else 'some'} of {patch_mask.numel()} "
            f"have none: use norm='LayerNorm' for series with such gaps"
        )
