"""JumboPatchTST: PatchTST's recipe for forecasting around a Jumbo encoder. Needs torch only; tsai's argument names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import nn

from jumbo_core.models.series import JumboSeries
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
        patch_len, stride: P and S; N = (L - P)//S + 2 patches. Defaults 16 and 8.
        multiplier: J, width of the Jumbo token in patches. Default 6. 0 = a class token instead.
        registers: register tokens. Default 0.
        d_model, n_layers, n_heads, d_ff: width D, blocks, attention heads, hidden width of the patch MLP. Defaults 128,
            3, 16, 256.
        dropout: after embedding, attention and linear layers. Default 0.2. Off in eval, as all the others.
        attn_dropout, head_dropout, drop_path: on attention weights, before the head, of whole residuals. Default 0.
        revin: normalise each window by its own statistics and undo it on the forecast. Default True.
        affine: RevIN's learned weight and bias per channel. Default False.
        head: only "forecast" exists so far.
        target_channels: which input channels the outputs continue, for fewer targets than inputs. Default: all of them
            in order when there are as many outputs as inputs; else a learned mixture of the channels' forecasts.
            Its weights sum to one, so that shifting or scaling all inputs shifts and scales the outputs.
        jumbo_mlp_ratio, share_jumbo_ffn, layer_scale: see :class:`jumbo_core.jumbo.JumboEncoder`.
        init: "short" (default) or "released", see :class:`jumbo_core.models.series.JumboSeries`.
        custom_head: what tsai passes to every class of its own making, ``partial(lin_nd_head, d=shape of a target)``.
            Only ``d`` is read: the output then has exactly the shape of the target. Any other head is refused.

    Raises:
        ValueError: a size out of range (horizon 0, a window shorter than a patch, …) or an unknown head.
        TypeError: no ``seq_len``: tsai passes one only to classes with "patchtst" in their name.
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
        _check_sizes(c_in=c_in, c_out=c_out, d_ff=d_ff)
        if affine and not revin:
            raise ValueError("affine=True is RevIN's affine and needs revin=True")
        target_shape = _target_shape(c_out, pred_dim, custom_head)
        channels_out, horizon = (1, 1, *target_shape)[-2:]
        self.c_in, self.seq_len = c_in, seq_len
        self.target_shape = target_shape

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
        tokens = self.series.encoder.num_global_tokens + self.series.num_patches
        self.head_drop = nn.Dropout(head_dropout)
        self.head = nn.Linear(tokens * d_model, horizon)
        trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

        if target_channels is None and channels_out == c_in:
            target_channels = range(c_in)
        self.target_channels = None if target_channels is None else _check_targets(target_channels, c_in, channels_out)
        self.mix = None if self.target_channels is not None else nn.Parameter(torch.zeros(channels_out, c_in))
        _repair_tsai_if_loaded()

    @property
    def patch_num(self) -> int:
        """N, patches of a window (tsai's name)."""
        return self.series.num_patches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, L) -> (B, C_out, H), or (B, H), or (B,): see ``pred_dim``.

        Raises:
            ValueError: another shape or dtype than the model was built for, no sample, a NaN or infinite value.
                (torch.compile, torch.export and tracing cannot look at values: there NaN goes in and NaN comes out.)
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
        given = tuple(pred_dim) if isinstance(pred_dim, Sequence) else pred_dim
        if given not in (None, shape, shape[-1]):
            raise ValueError(f"pred_dim {pred_dim} and the targets of tsai's custom_head, {shape}, disagree")
    elif pred_dim is None:
        if c_out != 1:
            raise ValueError(f"without pred_dim there is one value per sample and c_out must be 1, got {c_out}")
        shape = ()
    elif isinstance(pred_dim, Sequence):
        shape = tuple(pred_dim)
    else:
        shape = (c_out, pred_dim)
    if len(shape) > 2:
        raise ValueError(f"a forecast has channels and steps, [C_out, H]; got targets of shape {shape}")
    for name, value in zip(("horizon", "output channels"), reversed(shape), strict=False):
        _check_sizes(**{name: value})
    return shape


def _shape_from_tsai(custom_head: Any) -> tuple[int, ...]:
    """The shape of a target, which tsai hands over inside the head it proposes."""
    is_tsai = isinstance(custom_head, partial) and custom_head.func.__name__ == "lin_nd_head"
    if not is_tsai or "d" not in custom_head.keywords:
        raise ValueError(
            f"JumboPatchTST brings its own head and accepts only tsai's partial(lin_nd_head, d=…), got {custom_head!r}"
        )
    d = custom_head.keywords["d"]
    return (d,) if isinstance(d, int) else tuple(d)


def _check_targets(channels: Sequence[int], c_in: int, channels_out: int) -> list[int]:
    channels = list(channels)
    if len(channels) != channels_out or any(not 0 <= c < c_in for c in channels):
        raise ValueError(
            f"target_channels must name {channels_out} of the input channels 0..{c_in - 1}, got {channels}"
        )
    return channels


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def _check_values(x: torch.Tensor) -> None:
    if not x.shape[0]:
        raise ValueError(
            f"no sample in {tuple(x.shape)}. tsai makes such batches under numpy 2 until `import ts_ext.tsai` repairs "
            f"its loader"
        )
    finite = torch.isfinite(x)
    if not finite.all():
        bad = (~finite).nonzero()
        sample, channel, step = bad[0].tolist()
        raise ValueError(
            f"{len(bad)} of {x.numel()} values are NaN or infinite, the first at sample {sample}, channel {channel}, "
            f"step {step}: fill or drop missing values before the model"
        )


def _repair_tsai_if_loaded() -> None:
    """A model that meets tsai needs tsai's loader repaired (see ``ts_ext.tsai``), however it was imported."""
    if "tsai.data.core" in sys.modules:
        import ts_ext.tsai  # noqa: F401
