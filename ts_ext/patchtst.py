"""JumboPatchTST: PatchTST's recipe around a Jumbo or linear encoder, on torch and timm, with tsai's argument names."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import nn

from jumbo_core import checks
from jumbo_core.models.series import ENCODERS, JumboSeries
from ts_ext.scaling import RevIN
from ts_ext.targets import check_targets, target_shape

HEADS = ("forecast",)


class JumboPatchTST(nn.Module):
    """Forecast every channel with one shared Jumbo encoder: (B, C, L) -> (B, C_out, H).

    PatchTST (arXiv 2211.14730): RevIN, patches padded at the END, channels folded into the batch, one flatten head for
    all channels. The encoder is Jumbo's (arXiv 2502.15021): J slices per series, or with ``multiplier=0, registers=16``
    the paper's baseline of a class token and registers. The head reads the slices as well: its input is
    [J slices joined ; N patches flattened], width (J + N) * D, so the wide token reaches the forecast directly.

    For long windows ``encoder="linear"`` mixes the patches with Mamba-2 (:class:`jumbo_core.linear.AdventurerEncoder`)
    instead of attention: time and memory grow linearly with L, where attention's time grows with its square. J slices
    (or, with ``multiplier=0``, a class token) stand behind the patches there; the head is the same.

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
        registers: register tokens, of attention alone. Default 0.
        encoder: "attention" (default) or "linear", see above.
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
        revin: normalise each window by its own statistics and undo it on the forecast. Default True.
        affine: RevIN's learned weight and bias per channel. Default False.
        head: only "forecast" exists so far.
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
        ValueError: a size out of range (horizon 0, a window shorter than a patch, …), an unknown head or encoder, an
            option that the chosen encoder does not have. Sizes may be any integer type, numpy's included.
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
        encoder: str = "attention",
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
            checks.integer(name, value)
            for name, value in dict(c_in=c_in, c_out=c_out, d_model=d_model, d_ff=d_ff).items()
        )
        multiplier, registers = checks.integer("multiplier", multiplier, 0), checks.integer("registers", registers, 0)
        if not 0 < jumbo_mlp_ratio < math.inf or (multiplier and int(multiplier * d_model * jumbo_mlp_ratio) < 1):
            raise ValueError(
                f"jumbo_mlp_ratio must be above 0 and leave the Jumbo FFN a hidden unit, got {jumbo_mlp_ratio!r}: its "
                f"hidden width is jumbo_mlp_ratio * multiplier {multiplier} * d_model {d_model}"
            )
        own = _own_options(encoder, d_model, registers, attn_dropout, layer_scale, d_state=d_state, head_dim=head_dim)
        if affine and not revin:
            raise ValueError("affine=True is RevIN's affine and needs revin=True")
        shape = target_shape(c_out, pred_dim, custom_head)
        channels_out, horizon = (1, 1, *shape)[-2:]
        self.c_in, self.target_shape = c_in, shape

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
            encoder=encoder,
            multiplier=multiplier,
            mlp_ratio=(d_ff + 0.5) / d_model,  # the block truncates ratio * width: half a unit keeps it exactly d_ff
            jumbo_mlp_ratio=jumbo_mlp_ratio,
            share_jumbo_ffn=share_jumbo_ffn,
            drop_path=drop_path,
            proj_drop=dropout,
            **own,
        )
        self.seq_len = self.series.seq_len
        tokens = self.series.encoder.num_global_tokens + self.series.num_patches
        self.head_drop = nn.Dropout(head_dropout)
        self.head = nn.Linear(tokens * d_model, horizon)
        trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

        if target_channels is None and channels_out == c_in:
            target_channels = range(c_in)
        self.target_channels = None if target_channels is None else check_targets(target_channels, c_in, channels_out)
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


def _own_options(
    encoder: str,
    d_model: int,
    registers: int,
    attn_dropout: float,
    layer_scale: float | None,
    *,
    d_state: int,
    head_dim: int | None,
) -> dict[str, Any]:
    """Arguments that one kind of encoder alone has; what it does not have must be off."""
    if encoder not in ENCODERS:
        raise ValueError(f"encoder must be one of {ENCODERS}, got {encoder!r}")
    if encoder == "attention":
        if head_dim is not None:
            raise ValueError(
                f"head_dim {head_dim} is an option of encoder='linear'; the size of attention's heads is d_model "
                f"{d_model} over n_heads"
            )
        return dict(registers=registers, attn_drop=attn_dropout, layer_scale=layer_scale)
    for name, value, off in (
        ("registers", registers, 0),
        ("attn_dropout", attn_dropout, 0),
        ("layer_scale", layer_scale, None),
    ):
        if value != off:
            raise ValueError(f"encoder='linear' has no {name}, got {value!r}: leave it at {off} or use 'attention'")
    if head_dim is None:
        head_dim = math.gcd(64, 2 * d_model)
    return dict(d_state=checks.integer("d_state", d_state), head_dim=checks.integer("head_dim", head_dim))


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
