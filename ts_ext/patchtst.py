"""JumboPatchTST: PatchTST's recipe around a Jumbo or linear encoder, on torch and timm, with tsai's argument names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from jumbo_core import checks
from jumbo_core.jumbo import JumboOutput
from jumbo_core.models.released import LoadReport
from jumbo_core.models.series import JumboSeries
from ts_ext.heads import FlattenHead, PatchHead, PoolHead
from ts_ext.losses import check_quantiles
from ts_ext.options import CHANNELS, HEADS, check_choice, check_jumbo_ffn, encoder_options, only_forecasts
from ts_ext.pretraining import PretrainOutput, check_masking, load_encoder, rebuild
from ts_ext.scaling import RevIN, WindowStats
from ts_ext.targets import choose_channels, class_shape, target_shape, value_shape
from ts_ext.values import MISSING, read_values, refuse_exogenous, repair_tsai_if_loaded


class Encoded(NamedTuple):
    """A batch without a head. Rows R: B*C series, sample by sample, or B with channel mixing.

    tokens: J slices (R, J, D) and patches (R, N, D). real (R, N): patches with an observed value, None = all.
    stats: RevIN's, (B, C, 1) each, None without RevIN.
    """

    tokens: JumboOutput
    real: torch.Tensor | None
    stats: WindowStats | None


class JumboPatchTST(nn.Module):
    """Series (B, C, L) -> forecasts (B, C_out, H), classes, values or rebuilt patches, by a Jumbo encoder of patches.

    PatchTST (arXiv 2211.14730): RevIN, patches padded at the END, channels folded into the batch, one flatten head for
    all channels. The encoder is Jumbo's (arXiv 2502.15021): J slices per series, or with ``multiplier=0, registers=16``
    the paper's baseline of a class token and registers. Heads:

    - "forecast": reads [J slices joined ; N patches flattened], width (J + N) * D, so the wide token reaches the
      forecast directly. In the units of the input: RevIN is undone.
    - "classify": one score per class (B, c_out), and "regress": values (B,) or (B, c_out), from [J slices joined ; mean
      of the real patches], width (J + 1) * D, of all channels joined. RevIN takes a window's level and scale away;
      where they tell classes or values apart, use ``revin=False`` (and scale the data).
    - "pretrain": hides patches and rebuilds them from the rest, :class:`PretrainOutput`; :meth:`load_pretrained` of
      another model then takes the encoder over.

    For long windows ``encoder="linear"`` mixes the patches with Mamba-2 (:class:`jumbo_core.linear.AdventurerEncoder`)
    instead of attention: time and memory grow linearly with L, where attention's time grows with its square. J slices
    (or, with ``multiplier=0``, a class token) stand behind the patches there; the heads are the same.

    The output has the dtype of the input; the encoder computes in the dtype of its parameters, RevIN in double
    precision, so float64 series keep their digits through a huge offset. A shorter window is a padded one:
    ``ts_ext.pad_windows`` makes values and mask.

    Args:
        c_in: C, channels of the input.
        c_out: channels of a forecast when ``pred_dim`` is an int; classes; values. Of no meaning with "pretrain".
        seq_len: L, steps of the window.
        pred_dim: what to forecast: H -> (B, c_out, H); [C_out, H] -> (B, C_out, H); [H] -> (B, H); None -> (B,), one
            value per sample. With "regress" the shape of a target (default: () or (c_out,)), with "classify" None,
            or [labels] for as many independent 0/1 labels.
        patch_len, stride: P and S <= P; N = (L - P)//S + 2 patches, whatever the data. Defaults 16 and 8.
        multiplier: J, width of the Jumbo token in patches. Default 6. 0 = a class token instead.
        registers: register tokens, of attention alone. Default 0.
        encoder: "attention" (default) or "linear", see above.
        channels: "independent" (default): one series per channel, weights shared. "mixing", as the PatchTST paper calls
            it: a token reads the same patch of all channels, joined, and forecasts of a channel depend on all.
        norm: "LayerNorm" (default) or "BatchNorm", of attention alone; see :class:`JumboSeries`.
        d_model, n_layers, d_ff: width D, blocks, hidden width of the patch MLP (with "linear": of its SwiGLU, which has
            three matrices, not two). Defaults 128, 3, 256.
        n_heads: attention heads; of no effect with "linear". Default 16.
        d_state: state per channel of the linear encoder; of no effect with "attention". Default 16.
        head_dim: channels of a head of the linear encoder, must divide 2 * D. Default None: the largest of 64, 32, 16,
            … that does.
        dropout: after embedding, attention and linear layers (with "linear": after embedding and in the FFNs). Default
            0.2. Off in eval, as all the others.
        head_dropout, drop_path: before the head, of whole residuals. Default 0. With "linear" a drop_path of p rises
            from 0 in the first two blocks to just below p.
        attn_dropout: on attention weights, of attention alone. Default 0.
        revin: normalise each window by its own statistics (of what is observed) and undo it on forecasts. Default True.
        affine: RevIN's learned weight and bias per channel. Default False.
        missing: what NaN is: "error" (default) or "mask", a missing value. It enters no statistic, is read as the
            window's mean, and a patch of missing values alone is seen by nobody. ``observed_mask`` of a call says the
            same with any dtype of value.
        head: see above. Default "forecast".
        quantiles: rising probabilities, for example (0.1, 0.5, 0.9): a forecast then has one more, last dimension of
            these quantiles, in order and never crossing; train with :class:`ts_ext.PinballLoss`. Default None: the
            mean.
        mask_ratio: share of patches that "pretrain" hides. Default 0.4 (PatchTST).
        target_channels: which input channels the outputs continue: give it whenever the number of outputs is not the
            number of inputs and the targets are among the inputs. Default: all of them in order when there are as many
            outputs as inputs; else, with a warning, a learned mixture of the channels' forecasts. Its weights sum to
            one, so that shifting or scaling all inputs shifts and scales the outputs; but it starts at the plain mean
            of the channels, and with channels of different levels a short run does not get away from there.
        jumbo_mlp_ratio, share_jumbo_ffn, layer_scale: see :class:`jumbo_core.jumbo.JumboEncoder`; the last one of
            attention alone.
        init: "short" (default) or "released", see :class:`jumbo_core.models.series.JumboSeries`.
        custom_head: what tsai passes to every class of its own making, ``partial(lin_nd_head, d=shape of a target)``.
            Only ``d`` is read: the output then has exactly the shape of the target. Any other head is refused.

    Raises:
        ValueError: a size out of range (horizon 0, a window shorter than a patch, …), an unknown word, an option that
            the chosen encoder or head does not have. Sizes may be any integer type, numpy's included.
        TypeError: no ``seq_len``: tsai passes one only to classes with "patchtst" in their name. An argument of
            exogenous inputs, or any other unknown one.

    Warns:
        UserWarning: the outputs are a learned mixture, see ``target_channels``.
    """

    def __init__(
        self,
        c_in: int,
        c_out: int,
        seq_len: int | None = None,
        pred_dim: int | Sequence[int] | None = None,
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
        attn_dropout: float = 0.0,
        head_dropout: float = 0.0,
        drop_path: float = 0.0,
        revin: bool = True,
        affine: bool = False,
        missing: str = "error",
        head: str = "forecast",
        quantiles: Sequence[float] | None = None,
        mask_ratio: float = 0.4,
        target_channels: Sequence[int] | None = None,
        jumbo_mlp_ratio: float = 4.0,
        share_jumbo_ffn: bool = True,
        layer_scale: float | None = None,
        init: str = "short",
        custom_head: Any = None,
        **exogenous: Any,
    ) -> None:
        super().__init__()
        refuse_exogenous(list(exogenous))
        self.task = check_choice("head", head, HEADS)
        self.missing = check_choice("missing", missing, MISSING)
        self.mixing = check_choice("channels", channels, CHANNELS) == "mixing"
        only_forecasts(head, quantiles=quantiles, target_channels=target_channels)
        if seq_len is None:
            raise TypeError(
                "JumboPatchTST needs seq_len, the length of the window. tsai passes it to classes with 'patchtst' in "
                "their name; for any other name give it in arch_config=dict(seq_len=…)"
            )
        c_in, c_out, d_model, d_ff = (
            checks.integer(name, value)
            for name, value in dict(c_in=c_in, c_out=c_out, d_model=d_model, d_ff=d_ff).items()
        )
        multiplier, registers = checks.integer("multiplier", multiplier, 0), checks.integer("registers", registers, 0)
        check_jumbo_ffn(jumbo_mlp_ratio, multiplier, d_model)
        own = encoder_options(
            encoder, d_model, registers, attn_dropout, layer_scale, d_state=d_state, head_dim=head_dim
        )
        if affine and not revin:
            raise ValueError("affine=True is RevIN's affine and needs revin=True")
        self.c_in = c_in
        self.quantiles = None if quantiles is None else check_quantiles(quantiles)
        self.target_shape: tuple[int, ...] | None = None
        if head != "pretrain":
            shape_of = dict(forecast=target_shape, classify=class_shape, regress=value_shape)[head]
            self.target_shape = shape_of(c_out, pred_dim, custom_head)

        self.revin = RevIN(c_in, affine=affine) if revin else None
        self.series = JumboSeries(
            seq_len,
            dim=d_model,
            depth=n_layers,
            num_heads=n_heads,
            patch_len=patch_len,
            stride=stride,
            in_channels=c_in if self.mixing else 1,
            drop=dropout,
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
        self.mask_ratio = None
        self.target_channels, self.mix = None, None
        if head == "forecast":
            channels_out = (1, 1, *self.target_shape)[-2]
            self.target_channels = choose_channels(target_channels, c_in, channels_out)
            self.mix = None if self.target_channels is not None else nn.Parameter(torch.zeros(channels_out, c_in))
        self.head = self._make_head(head_dropout, mask_ratio)
        repair_tsai_if_loaded()

    @property
    def patch_num(self) -> int:
        """N, patches of a window (tsai's name)."""
        return self.series.num_patches

    def forward(
        self,
        x: torch.Tensor,
        observed_mask: torch.Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
        **exogenous: Any,
    ) -> torch.Tensor | PretrainOutput:
        """(B, C, L) -> (B, C_out, H), or (B, H), or (B,): see ``pred_dim``; with ``quantiles`` one dimension more.

        Args:
            x: values, of any floating dtype.
            observed_mask: bool (B, C, L), True = observed; the other values may be anything. Default: all observed,
                but NaN with ``missing="mask"``.
            generator: of the patches that head="pretrain" hides. Default: torch's global one in training; in eval mode
                one that starts anew in every call, so that two validations are equal.

        Raises:
            ValueError: another shape or dtype than the model was built for, no sample, a NaN or infinite value that is
                not masked, a channel of a window without an observed value. (torch.compile, torch.export, tracing and
                meta tensors cannot look at values: there NaN goes in and NaN comes out.)
            TypeError: any further input.
        """
        refuse_exogenous(list(exogenous))
        if self.task == "pretrain":
            return rebuild(self, *self._read(x, observed_mask), generator)
        if generator is not None:
            raise ValueError(f"generator is for head='pretrain'; this model has head={self.task!r}")
        encoded = self.encode(x, observed_mask)
        y = self.head(encoded.tokens, encoded.real)
        y = self._forecast(y, encoded.stats) if self.task == "forecast" else y.reshape(-1, *self.target_shape)
        return y.to(x.dtype)

    def encode(self, x: torch.Tensor, observed_mask: torch.Tensor | None = None) -> Encoded:
        """What the head is given: the encoder's tokens of (B, C, L), for a head of one's own. Errors as in a call."""
        x, observed_mask = self._read(x, observed_mask)
        normal, stats = (x, None) if self.revin is None else self.revin.normalize(x, observed_mask)
        return Encoded(*self.embed(normal, observed_mask), stats)

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

    def _read(self, x: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"JumboPatchTST takes one tensor (B, C, L), got {type(x).__name__}")
        if x.ndim != 3 or x.shape[1] != self.c_in or x.shape[2] != self.seq_len:
            raise ValueError(
                f"JumboPatchTST was built for (B, {self.c_in} channels, {self.seq_len} steps), got {tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise ValueError(f"JumboPatchTST expects a floating dtype, got {x.dtype}: convert with x.float()")
        return read_values(x, mask, self.missing)

    def embed(self, normal: torch.Tensor, mask: torch.Tensor | None) -> tuple[JumboOutput, torch.Tensor | None]:
        """Normalised values (B, C, L) and which are observed -> tokens of the rows, and which patches are real."""
        rows, row_mask = normal, mask
        if self.series.in_channels == 1:  # (B, C, L) -> (B*C, L): channel independence
            rows, row_mask = normal.flatten(0, 1), None if mask is None else mask.flatten(0, 1)
        rows = rows.to(self.head.weight.dtype)
        return self.series(rows, row_mask), None if mask is None else self.series.real_patches(row_mask, rows)

    def _forecast(self, y: torch.Tensor, stats: WindowStats | None) -> torch.Tensor:
        """What the head says of the rows -> targets, in original units."""
        known = self.target_channels if self.mixing else None  # the head was made for these channels alone
        y = y.unflatten(1, (self._series, -1)) if self.mixing else y.unflatten(0, (-1, self.c_in))
        if stats is not None:  # (B, C, H), or (B, C, H*Q)
            y = self.revin.inverse(y, stats, known)
        if self.mix is not None:
            weights = self.mix + (1 - self.mix.sum(dim=1, keepdim=True)) / self.c_in  # every row sums to one
            y = weights.to(y.dtype) @ y
        elif known is None and self.target_channels != list(range(self.c_in)):
            y = y[:, self.target_channels]
        if self.quantiles is None:
            return y.reshape(-1, *self.target_shape)
        return y.reshape(-1, *self.target_shape, len(self.quantiles)).sort(dim=-1).values

    def _make_head(self, drop: float, mask_ratio: float) -> nn.Module:
        encoder, patches = self.series.encoder, self.series.num_patches
        width, slices = encoder.dim, encoder.num_global_tokens
        if self.task == "pretrain":
            self.mask_ratio = check_masking(mask_ratio, self.seq_len, self.series.patch_len, self.series.stride)
            encoder.freeze_unreachable("patches")  # nothing after the last block's patches has a gradient
            return PatchHead(width, self.series.in_channels * self.series.patch_len, drop)
        if self.task == "forecast":
            steps = (1, *self.target_shape)[-1] * len(self.quantiles or (0.5,))
            # with mixing the forecasts of all target channels come from one row, else every row makes its channel's
            self._series = len(self.target_channels or range(self.c_in)) if self.mixing else 1
            return FlattenHead((slices + patches) * width, self._series * steps, drop)
        rows = 1 if self.mixing else self.c_in
        return PoolHead(rows * (slices + 1) * width, math.prod(self.target_shape), drop, rows=rows)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        repair_tsai_if_loaded()
