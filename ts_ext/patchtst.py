"""JumboPatchTST: PatchTST's recipe around a Jumbo encoder, on torch and timm, with tsai's argument names."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import nn

from jumbo_core.models.series import JumboSeries, as_size
from ts_ext.scaling import RevIN

HEADS = ("forecast",)


class JumboPatchTST(nn.Module):
    """Forecast every channel with one shared Jumbo encoder: (B, C, L) -> (B, C_out, H).

    PatchTST (arXiv 2211.14730): RevIN, patches padded at the END, channels folded into the batch, one flatten head for
    all channels. The encoder is Jumbo's (arXiv 2502.15021): J slices per series, or with ``multiplier=0, registers=16``
    the paper's baseline of a class token and registers. The head reads the slices as well: its input is
    [J slices joined ; N patches flattened], width (J + N) * D, so the wide token reaches the forecast directly.

    The output has the dtype of the input; the encoder computes in the dtype of its parameters, RevIN in double
    precision, so float64 series keep their digits through a huge offset.

    Args:
        c_in: C, channels of the input.
        c_out: channels of the output when ``pred_dim`` is an int.
        seq_len: L, steps of the window.
        pred_dim: what to predict: H -> (B, c_out, H); [C_out, H] -> (B, C_out, H); [H] -> (B, H); None -> (B,), one
            value per sample.
        patch_len, stride: P and S <= P; N = (L - P)//S + 2 patches. Defaults 16 and 8.
        multiplier: J, width of the Jumbo token in patches. Default 6. 0 = a class token instead.
        registers: register tokens. Default 0.
        d_model, n_layers, n_heads, d_ff: width D, blocks, attention heads, hidden width of the patch MLP. Defaults 128,
            3, 16, 256.
        dropout: after embedding, attention and linear layers. Default 0.2. Off in eval, as all the others.
        attn_dropout, head_dropout, drop_path: on attention weights, before the head, of whole residuals. Default 0.
        revin: normalise each window by its own statistics and undo it on the forecast. Default True.
        affine: RevIN's learned weight and bias per channel. Default False.
        head: only "forecast" exists so far.
        target_channels: which input channels the outputs continue: give it whenever the number of outputs is not the
            number of inputs and the targets are among the inputs. Default: all of them in order when there are as many
            outputs as inputs; else, with a warning, a learned mixture of the channels' forecasts. Its weights sum to
            one, so that shifting or scaling all inputs shifts and scales the outputs; but it starts at the plain mean
            of the channels, and with channels of different levels a short run does not get away from there.
        jumbo_mlp_ratio, share_jumbo_ffn, layer_scale: see :class:`jumbo_core.jumbo.JumboEncoder`.
        init: "short" (default) or "released", see :class:`jumbo_core.models.series.JumboSeries`.
        custom_head: what tsai passes to every class of its own making, ``partial(lin_nd_head, d=shape of a target)``.
            Only ``d`` is read: the output then has exactly the shape of the target. Any other head is refused.

    Raises:
        ValueError: a size out of range (horizon 0, a window shorter than a patch, …) or an unknown head. Sizes may be
            any integer type, numpy's included.
        TypeError: no ``seq_len``: tsai passes one only to classes with "patchtst" in their name.

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
        d_model: int = 128,
        n_layers: int = 3,
        n_heads: int = 16,
        d_ff: int = 256,
        dropout: float = 0.2,
        attn_dropout: float = 0.0,
        head_dropout: float = 0.0,
        drop_path: float = 0.0,
        revin: bool = True,
        affine: bool = False,
        head: str = "forecast",
        target_channels: Sequence[int] | None = None,
        jumbo_mlp_ratio: float = 4.0,
        share_jumbo_ffn: bool = True,
        layer_scale: float | None = None,
        init: str = "short",
        custom_head: Any = None,
    ) -> None:
        super().__init__()
        if head not in HEADS:
            raise ValueError(f"unknown head {head!r}; JumboPatchTST has: {', '.join(HEADS)}")
        if seq_len is None:
            raise TypeError(
                "JumboPatchTST needs seq_len, the length of the window. tsai passes it to classes with 'patchtst' in "
                "their name; for any other name give it in arch_config=dict(seq_len=…)"
            )
        c_in, c_out, d_model, d_ff = (
            as_size(name, value) for name, value in dict(c_in=c_in, c_out=c_out, d_model=d_model, d_ff=d_ff).items()
        )
        multiplier, registers = as_size("multiplier", multiplier, 0), as_size("registers", registers, 0)
        if not 0 < jumbo_mlp_ratio < math.inf or (multiplier and int(multiplier * d_model * jumbo_mlp_ratio) < 1):
            raise ValueError(
                f"jumbo_mlp_ratio must be above 0 and leave the Jumbo FFN a hidden unit, got {jumbo_mlp_ratio!r}: its "
                f"hidden width is jumbo_mlp_ratio * multiplier {multiplier} * d_model {d_model}"
            )
        if affine and not revin:
            raise ValueError("affine=True is RevIN's affine and needs revin=True")
        target_shape = _target_shape(c_out, pred_dim, custom_head)
        channels_out, horizon = (1, 1, *target_shape)[-2:]
        self.c_in, self.target_shape = c_in, target_shape

        self.revin = RevIN(c_in, affine=affine) if revin else None
        self.series = JumboSeries(
            seq_len,
            dim=d_model,
            depth=n_layers,
            num_heads=n_heads,
            patch_len=patch_len,
            stride=stride,
            drop=dropout,
            init=init,
            multiplier=multiplier,
            registers=registers,
            mlp_ratio=(d_ff + 0.5) / d_model,  # the block truncates ratio * width: half a unit keeps it exactly d_ff
            jumbo_mlp_ratio=jumbo_mlp_ratio,
            share_jumbo_ffn=share_jumbo_ffn,
            layer_scale=layer_scale,
            drop_path=drop_path,
            attn_drop=attn_dropout,
            proj_drop=dropout,
        )
        self.seq_len = self.series.seq_len
        tokens = self.series.encoder.num_global_tokens + self.series.num_patches
        self.head_drop = nn.Dropout(head_dropout)
        self.head = nn.Linear(tokens * d_model, horizon)
        trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

        if target_channels is None and channels_out == c_in:
            target_channels = range(c_in)
        self.target_channels = None if target_channels is None else _check_targets(target_channels, c_in, channels_out)
        self.mix = None if self.target_channels is not None else nn.Parameter(torch.zeros(channels_out, c_in))
        if self.mix is not None:
            warnings.warn(
                f"{c_in} input channels, {channels_out} output channel(s) and no target_channels: every output starts "
                f"as the mean of all channels' forecasts and has to learn which of them it continues. If the targets "
                f"are among the inputs, say which: target_channels={[i % c_in for i in range(channels_out)]} for the "
                f"first ones (in tsai: arch_config=dict(target_channels=…))",
                UserWarning,
                stacklevel=2,
            )
        _repair_tsai_if_loaded()

    @property
    def patch_num(self) -> int:
        """N, patches of a window (tsai's name)."""
        return self.series.num_patches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, L) -> (B, C_out, H), or (B, H), or (B,): see ``pred_dim``.

        Raises:
            ValueError: another shape or dtype than the model was built for, no sample, a NaN or infinite value.
                (torch.compile, torch.export, tracing and meta tensors cannot look at values: there NaN goes in and
                NaN comes out.)
        """
        self._check_shape(x)
        if not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            x = x.as_subclass(torch.Tensor)  # tsai's tensor types would follow every operation
            _check_values(x)
        normal, stats = self.revin.normalize(x) if self.revin is not None else (x, None)
        rows = normal.flatten(0, 1).to(self.head.weight.dtype)  # (B, C, L) -> (B*C, L): channel independence
        jumbo, patches = self.series(rows)
        tokens = torch.cat([jumbo, patches], dim=1).flatten(1)  # (B*C, J + N, D) -> (B*C, (J + N)*D)
        y = self.head(self.head_drop(tokens)).unflatten(0, (-1, self.c_in))  # (B*C, H) -> (B, C, H)
        if stats is not None:
            y = self.revin.inverse(y, stats)
        return self._select(y).to(x.dtype).reshape(-1, *self.target_shape)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.series.encoder.gradient_checkpointing = enable

    def _select(self, y: torch.Tensor) -> torch.Tensor:
        """Forecasts of the input channels (B, C, H) -> targets (B, C_out, H)."""
        if self.mix is None:
            same = self.target_channels == list(range(self.c_in))
            return y if same else y[:, self.target_channels]
        weights = self.mix + (1 - self.mix.sum(dim=1, keepdim=True)) / self.c_in  # every row sums to one
        return weights.to(y.dtype) @ y

    def _check_shape(self, x: torch.Tensor) -> None:
        if x.ndim != 3 or x.shape[1] != self.c_in or x.shape[2] != self.seq_len:
            raise ValueError(
                f"JumboPatchTST was built for (B, {self.c_in} channels, {self.seq_len} steps), got {tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise ValueError(f"JumboPatchTST expects a floating dtype, got {x.dtype}: convert with x.float()")

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        _repair_tsai_if_loaded()


def _target_shape(c_out: int, pred_dim: int | Sequence[int] | None, custom_head: Any) -> tuple[int, ...]:
    """Shape of one target: (), (H,) or (C_out, H)."""
    if custom_head is not None:
        shape = _shape_from_tsai(custom_head)
        if pred_dim is not None and _sizes("pred_dim", pred_dim) not in (shape, shape[-1:]):
            raise ValueError(f"pred_dim {pred_dim} and the targets of tsai's custom_head, {shape}, disagree")
    elif pred_dim is None:
        if c_out != 1:
            raise ValueError(f"without pred_dim there is one value per sample and c_out must be 1, got {c_out}")
        shape = ()
    elif isinstance(pred_dim, Sequence):
        shape = _sizes("pred_dim", pred_dim)
    else:
        shape = (c_out, *_sizes("pred_dim", pred_dim))
    return shape


def _sizes(name: str, given: int | Sequence[int]) -> tuple[int, ...]:
    """H, [H] or [C_out, H] as a tuple of one or two sizes."""
    shape = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    if not 1 <= len(shape) <= 2:
        raise ValueError(f"{name}: a forecast has steps, [H], or channels and steps, [C_out, H]; got {given!r}")
    return tuple(
        as_size(part, size) for part, size in zip(("output channels", "horizon")[-len(shape) :], shape, strict=True)
    )


def _shape_from_tsai(custom_head: Any) -> tuple[int, ...]:
    """The shape of a target, which tsai hands over inside the head it proposes."""
    is_tsai = isinstance(custom_head, partial) and custom_head.func.__name__ == "lin_nd_head"
    if not is_tsai or "d" not in custom_head.keywords:
        raise ValueError(
            f"JumboPatchTST brings its own head and accepts only tsai's partial(lin_nd_head, d=…), got {custom_head!r}"
        )
    return _sizes("d of custom_head", custom_head.keywords["d"])


def _check_targets(channels: Sequence[int], c_in: int, channels_out: int) -> list[int]:
    error = ValueError(
        f"target_channels must be a list of {channels_out} of the input channels 0..{c_in - 1}, got {channels!r}"
    )
    try:
        found = [as_size("channel", channel, 0) for channel in channels]
    except (TypeError, ValueError):  # not a list, or not of integers
        raise error from None
    if len(found) != channels_out or max(found) >= c_in:
        raise error
    return found


def _check_values(x: torch.Tensor) -> None:
    if not x.shape[0]:
        repaired = _repair_tsai_if_loaded()
        raise ValueError(
            f"no sample in {tuple(x.shape)}"
            + ". tsai's loader makes such batches under numpy 2; it is repaired now: run the same call again" * repaired
        )
    if x.is_meta:
        return
    finite = torch.isfinite(x)
    if not finite.all():
        bad = (~finite).nonzero()
        sample, channel, step = bad[0].tolist()
        raise ValueError(
            f"{len(bad)} of {x.numel()} values are NaN or infinite, the first at sample {sample}, channel {channel}, "
            f"step {step}: fill or drop missing values before the model"
        )


def _repair_tsai_if_loaded() -> bool:
    """Repair tsai's loader (see ``ts_ext.tsai``) if tsai has been imported; says whether it has.

    Called when a model is made or unpickled. Where tsai is imported only after that, and ``ts_ext.tsai`` is not, the
    first empty batch is an error, and repairs it then.
    """
    loaded = "tsai.data.core" in sys.modules
    if loaded:
        import ts_ext.tsai  # noqa: F401
    return loaded
