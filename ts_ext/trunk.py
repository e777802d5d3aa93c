"""SeriesTrunk: RevIN, patches and encoder, what every head of JumboPatchTST reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from jumbo_core import checks
from jumbo_core.jumbo import JumboOutput
from jumbo_core.models.released import LoadReport
from jumbo_core.models.series import JumboSeries
from ts_ext.options import CHANNELS, check_choice, check_jumbo_ffn, encoder_options
from ts_ext.pretraining import load_encoder
from ts_ext.scaling import RevIN, WindowStats
from ts_ext.values import MISSING, read_values, repair_tsai_if_loaded, tensor_of


class Encoded(NamedTuple):
    """A batch without a head. Rows R: B*C series, sample by sample, or B with channel mixing.

    tokens: J slices (R, J, D) and patches (R, N, D). real (R, N): patches with an observed value, None = all.
    stats: RevIN's, (B, C, 1) each, None without RevIN. blocks: only if asked for, what the first block was given and
    every block's output, none of it normalised.
    """

    tokens: JumboOutput
    real: torch.Tensor | None
    stats: WindowStats | None
    blocks: tuple[JumboOutput, ...] = ()


class SeriesTrunk(nn.Module):
    """Series (B, C, L) -> tokens: :class:`ts_ext.JumboPatchTST` without its head.

    The arguments are described there; ``pos_dropout`` is the dropout after the embedding, by default ``dropout``.
    """

    def __init__(
        self,
        c_in: int,
        seq_len: int,
        *,
        patch_len: int = 16,
        stride: int = 8,
        multiplier: int = 6,
        registers: int = 0,
        encoder: str = "attention",
        channels: str = "independent",
        norm: str | None = None,
        d_model: int = 128,
        n_layers: int = 3,
        n_heads: int = 16,
        d_state: int = 16,
        head_dim: int | None = None,
        d_ff: int = 256,
        dropout: float = 0.2,
        pos_dropout: float | None = None,
        attn_dropout: float = 0.0,
        drop_path: float = 0.0,
        revin: bool = True,
        affine: bool = False,
        missing: str = "error",
        jumbo_mlp_ratio: float = 4.0,
        share_jumbo_ffn: bool = True,
        layer_scale: float | None = None,
        init: str = "short",
    ) -> None:
        super().__init__()
        self.missing = check_choice("missing", missing, MISSING)
        self.mixing = check_choice("channels", channels, CHANNELS) == "mixing"
        c_in, d_model, d_ff = (
            checks.integer(name, value) for name, value in dict(c_in=c_in, d_model=d_model, d_ff=d_ff).items()
        )
        multiplier, registers = checks.integer("multiplier", multiplier, 0), checks.integer("registers", registers, 0)
        check_jumbo_ffn(jumbo_mlp_ratio, multiplier, d_model)
        own = encoder_options(
            encoder, d_model, registers, attn_dropout, layer_scale, d_state=d_state, head_dim=head_dim
        )
        if affine and not revin:
            raise ValueError("affine=True is RevIN's affine and needs revin=True")
        self.c_in = c_in
        self.revin = RevIN(c_in, affine=affine) if revin else None
        self.series = JumboSeries(
            seq_len,
            dim=d_model,
            depth=n_layers,
            num_heads=n_heads,
            patch_len=patch_len,
            stride=stride,
            in_channels=c_in if self.mixing else 1,
            drop=dropout if pos_dropout is None else pos_dropout,
            init=init,
            encoder=encoder,
            norm=norm,
            multiplier=multiplier,
            mlp_ratio=(d_ff + 0.5) / d_model,  # the block truncates ratio * width: half a unit keeps it exactly d_ff
            jumbo_mlp_ratio=jumbo_mlp_ratio,
            share_jumbo_ffn=share_jumbo_ffn,
            drop_path=drop_path,
            proj_drop=dropout,
            **own,
        )
        self.seq_len = self.series.seq_len
        repair_tsai_if_loaded()

    @property
    def patch_num(self) -> int:
        """N, patches of a window (tsai's name)."""
        return self.series.num_patches

    @property
    def rows(self) -> int:
        """Rows of tokens of one sample: C, or 1 with channel mixing."""
        return 1 if self.mixing else self.c_in

    def encode(
        self, x: torch.Tensor, observed_mask: torch.Tensor | None = None, *, every_block: bool = False
    ) -> Encoded:
        """What the head is given: the encoder's tokens of (B, C, L), for a head of one's own. Errors as in a call."""
        x, observed_mask = self.read(x, observed_mask)
        normal, stats = (x, None) if self.revin is None else self.revin.normalize(x, observed_mask)
        tokens, real = self.embed(normal, observed_mask, every_block=every_block)
        *blocks, tokens = tokens if every_block else [tokens]
        return Encoded(tokens, real, stats, tuple(blocks))

    def load_pretrained(
        self, source: str | Path | Mapping[str, torch.Tensor] | nn.Module, *, strict: bool = True
    ) -> LoadReport:
        """Take embedding, positions, encoder and RevIN's affine over from another JumboPatchTST, of any head.

        Args:
            source: a state dict, a file of one (``torch.save`` or safetensors, read as weights only; fastai's
                ``learner.save(…, with_opt=False)`` writes one), or a model. It needs the same sizes, channels and
                seq_len.
            strict: with False, load what is there and report the rest. Default True.

        Returns:
            LoadReport: missing and unexpected names; ignored, the source's head, whatever it is.

        Raises:
            ValueError: tensors of another shape; with ``strict`` missing or unexpected ones; nothing that fits.
        """
        return load_encoder(self, source, strict=strict)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations.

        Raises:
            ValueError: with ``norm="BatchNorm"``, whose running statistics would count every batch twice.
        """
        if enable and self.series.norm == "BatchNorm":
            raise ValueError("gradient checkpointing would count every batch twice in BatchNorm: use norm='LayerNorm'")
        self.series.encoder.gradient_checkpointing = enable

    def read(self, x: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Values (B, C, L) and the mask of those observed, None when all are; errors as in a call."""
        x, mask = tensor_of(x), tensor_of(mask)
        if not isinstance(x, torch.Tensor) or not isinstance(mask, torch.Tensor | None):
            raise TypeError(
                f"JumboPatchTST takes a tensor or numpy array (B, C, L) and as much of a mask, got {type(x).__name__} "
                f"and {type(mask).__name__}"
            )
        if x.ndim != 3 or x.shape[1] != self.c_in or x.shape[2] != self.seq_len:
            raise ValueError(
                f"JumboPatchTST was built for (B, {self.c_in} channels, {self.seq_len} steps), got {tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise ValueError(f"JumboPatchTST expects a floating dtype, got {x.dtype}: convert with x.float()")
        return read_values(x, mask, self.missing)

    def embed(
        self, normal: torch.Tensor, mask: torch.Tensor | None, *, every_block: bool = False
    ) -> tuple[JumboOutput | list[JumboOutput], torch.Tensor | None]:
        """Normalised values (B, C, L) and which are observed -> tokens of the rows, and which patches are real."""
        rows, row_mask = normal, mask
        if self.series.in_channels == 1:  # (B, C, L) -> (B*C, L): channel independence
            rows, row_mask = normal.flatten(0, 1), None if mask is None else mask.flatten(0, 1)
        rows = rows.to(self.series.patch_embed.weight.dtype)
        real = None if mask is None else self.series.real_patches(row_mask, rows)
        return self.series(rows, row_mask, every_block=every_block), real

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        repair_tsai_if_loaded()
