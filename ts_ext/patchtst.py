"""JumboPatchTST: PatchTST's recipe around a Jumbo or linear encoder, on torch and timm, with tsai's argument names."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from jumbo_core import checks
from ts_ext.heads import ForecastHead, PatchHead, PoolHead
from ts_ext.losses import check_quantiles
from ts_ext.options import HEADS, check_choice, only_forecasts
from ts_ext.pretraining import PretrainOutput, check_masking, rebuild
from ts_ext.targets import choose_channels, class_shape, target_shape, value_shape
from ts_ext.trunk import SeriesTrunk
from ts_ext.values import refuse_exogenous, tensor_of


class JumboPatchTST(SeriesTrunk):
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
        refuse_exogenous(list(exogenous), inspect.signature(JumboPatchTST).parameters)
        check_choice("head", head, HEADS)
        only_forecasts(head, quantiles=quantiles, target_channels=target_channels)
        if seq_len is None:
            raise TypeError(
                "JumboPatchTST needs seq_len, the length of the window. tsai passes it to classes with 'patchtst' in "
                "their name; for any other name give it in arch_config=dict(seq_len=…)"
            )
        super().__init__(
            c_in,
            seq_len,
            patch_len=patch_len,
            stride=stride,
            multiplier=multiplier,
            registers=registers,
            encoder=encoder,
            channels=channels,
            norm=norm,
            d_model=d_model,
            n_layers=n_layers,
            n_heads=n_heads,
            d_state=d_state,
            head_dim=head_dim,
            d_ff=d_ff,
            dropout=dropout,
            attn_dropout=attn_dropout,
            drop_path=drop_path,
            revin=revin,
            affine=affine,
            missing=missing,
            jumbo_mlp_ratio=jumbo_mlp_ratio,
            share_jumbo_ffn=share_jumbo_ffn,
            layer_scale=layer_scale,
            init=init,
        )
        self.task = head
        self.quantiles = None if quantiles is None else check_quantiles(quantiles)
        self.mask_ratio, self.target_shape = None, None
        if head == "pretrain":
            self.mask_ratio = check_masking(mask_ratio, self.seq_len, self.series.patch_len, self.series.stride)
            self.head = PatchHead(self, drop=head_dropout)
            return
        c_out = checks.integer("c_out", c_out)
        shape_of = dict(forecast=target_shape, classify=class_shape, regress=value_shape)[head]
        self.target_shape: tuple[int, ...] = shape_of(c_out, pred_dim, custom_head)
        if head == "forecast":
            chosen = choose_channels(target_channels, self.c_in, (1, 1, *self.target_shape)[-2])
            self.head = ForecastHead(
                self, self.target_shape, chosen, quantiles=len(self.quantiles or ()), drop=head_dropout
            )
        else:
            self.head = PoolHead(self, self.target_shape, drop=head_dropout)

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
            x: values, of any floating dtype; numpy arrays are taken as well, and the output is a tensor.
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
            return rebuild(self, self.head, *self.read(x, observed_mask), self.mask_ratio, generator)
        if generator is not None:
            raise ValueError(f"generator is for head='pretrain'; this model has head={self.task!r}")
        x = tensor_of(x)
        encoded = self.encode(x, observed_mask)
        y = self.head(encoded, self.revin) if self.task == "forecast" else self.head(encoded)
        return y.to(x.dtype)
