"""JumboPatchTST in neuralforecast: a model for ``NeuralForecast(models=[…])``, with fit, predict, cross_validation.

The same weights work outside: ``nf.models[0].model`` is a plain :class:`ts_ext.JumboPatchTST`, its state dict loads
into another one, and its ``load_pretrained`` takes an encoder over before the fit.

Importing this module has one effect: it adds JumboPatchTST to ``neuralforecast.core.MODEL_FILENAME_DICT``, the list of
names that ``NeuralForecast.save`` and ``NeuralForecast.load`` know. A program that loads must import it first.
neuralforecast 3.3 saves safetensors and JSON, and its ``load`` executes nothing of them; older folders are pickles,
which it reads only with ``allow_pickle=True`` and then executes what they contain. This module adds no file of its own.

What neuralforecast does with a frame before a model sees it: rows are sorted by time; equal or absent timestamps are
not noticed, each row is one step after the last; NaN in ``y`` is an error, unless the row has ``available_mask`` 0;
columns that no model lists are left aside; values are kept in float32.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

import torch

import ts_ext
from jumbo_core import checks
from jumbo_core.jumbo import param_groups
from ts_ext.values import refuse_exogenous

try:
    from neuralforecast.common._base_model import BaseModel
    from neuralforecast.core import MODEL_FILENAME_DICT
    from neuralforecast.losses.pytorch import MAE, HuberMQLoss, MQLoss
    from pytorch_lightning import Trainer
except ImportError as error:
    raise ImportError(
        f"ts_ext.neuralforecast needs neuralforecast: pip install 'jumbo-vit[nixtla]' ({error})"
    ) from error

__all__ = ["JumboPatchTST"]

# Arguments of neuralforecast's PatchTST that mean nothing here, and what there is instead.
_OTHERS = {
    "fc_dropout": "PatchTST gives it to a head for pre-training that it never builds; use dropout and head_dropout",
    "revin_subtract_last": "RevIN takes the mean of the observed values off, and forecasts get it back",
    "activation": "the patch MLP has GELU, with encoder='linear' SwiGLU",
    "res_attention": "attention scores are not passed from block to block",
    "batch_normalization": "use norm='BatchNorm' or norm='LayerNorm'",
    "learn_pos_embed": "positions are always learned",
}


class JumboPatchTST(BaseModel):
    """One series of L steps -> its next h, by :class:`ts_ext.JumboPatchTST`; arguments as neuralforecast's PatchTST.

    Univariate: one model for all series, each forecast from its own past. Windows, in neuralforecast's layout:
    ``insample_y`` and ``insample_mask`` (W, L, 1) -> (W, h, K), K being the loss' ``outputsize_multiplier``.

    Missing values: steps that neuralforecast pads in front of a shorter series, or whose row has ``available_mask`` 0,
    enter no statistic and no forecast. In predict ``y`` may be anything there; to train on, fill it with a number,
    since the gradient of most of neuralforecast's losses at a NaN target is NaN even where it is masked. A window
    without any observed step is read as zeros, as other models read padding, and with RevIN its forecast is 0 (with the
    scalers "minmax" and "minmax1" neuralforecast's way back from such a window is NaN or infinite, for any model).
    ``norm="BatchNorm"`` cannot train on patches without a value, and says so: it needs series of one length.

    Losses: with MQLoss and HuberMQLoss the model has their quantiles, sorted, so that they never cross. Other losses
    get K values per step, mapped by their ``domain_map``. RevIN is undone on all that the head says, as in
    neuralforecast's PatchTST. For a point or a quantile that is the unit of the series. For a parameter of a
    distribution it is ``raw * std + mean`` before ``domain_map``: right for a location or a Poisson rate, but a scale
    then starts near the LEVEL of the series (500 +- 1 gets intervals of some hundreds), or at 0 for a negative level.
    With these losses use ``revin=False, scaler_type="standard"``: neuralforecast then scales the window, by what is
    observed of it, and gives each parameter what it needs of level and scale.

    Args:
        h, input_size: H, steps of a forecast, and L >= ``patch_len``, steps of a window.
        encoder_layers, hidden_size, n_heads: blocks, width D, attention heads. Defaults 3, 128, 16.
        linear_hidden_size: hidden width of the patch MLP. Default 256.
        dropout: after embedding, attention and linear layers. Default 0.2. Off in predict, as all the others.
        head_dropout, attn_dropout: before the head, on attention weights. Default 0.
        patch_len, stride: P and S <= P; N = (L - P)//S + 2 patches. Defaults 16 and 8. Never shortened to fit.
        revin, revin_affine: normalise each window by its own statistics and undo it; its learned weight and bias.
            Defaults True and False. The scale of a series is then of no effect, whatever ``scaler_type`` is.
        multiplier: J, width of the Jumbo token in patches. Default 6. 0 = a class token instead.
        registers: register tokens, of attention alone. Default 0.
        encoder: "attention" (default) or "linear" (Mamba-2), for long windows.
        jumbo_lr_scale: the wide Jumbo FFN learns at this share of ``learning_rate``: it collects gradients from every
            block and wants less on short runs. Default 0.3. The optimizer then has two groups, all else and that FFN;
            an ``lr_scheduler`` that sets rates itself takes one for each (OneCycleLR: ``max_lr=[lr, 0.3 * lr]``). 1
            leaves one group.
        norm, d_state, head_dim, drop_path, jumbo_mlp_ratio, share_jumbo_ffn, layer_scale, init: see
            :class:`ts_ext.JumboPatchTST`.
        loss: default MAE().
        stat_exog_list, hist_exog_list, futr_exog_list, exclude_insample_y: refused, since this model reads no exogenous
            variable.
        valid_loss, max_steps, learning_rate, …, dataloader_kwargs, **trainer_kwargs: training, data loading and
            Lightning's Trainer, as for any model of neuralforecast, with PatchTST's defaults.

    Raises:
        ValueError: h or another size out of range, ``input_size`` below ``patch_len``; an option that the chosen
            encoder does not have; quantiles that are not between 0 and 1; ``optimizer_kwargs`` without an optimizer;
            in use, an infinite value in the series.
        TypeError: an argument that neither this model nor the Trainer has, with what takes its place if it is one of
            PatchTST's.
        Exception: exogenous variables, and what else neuralforecast refuses.

    Warns:
        UserWarning: RevIN with the loss of a distribution other than Poisson, see above.
    """

    EXOGENOUS_FUTR = False
    EXOGENOUS_HIST = False
    EXOGENOUS_STAT = False
    MULTIVARIATE = False
    RECURRENT = False

    def __init__(
        self,
        h: int,
        input_size: int,
        stat_exog_list: list[str] | None = None,
        hist_exog_list: list[str] | None = None,
        futr_exog_list: list[str] | None = None,
        exclude_insample_y: bool = False,
        encoder_layers: int = 3,
        n_heads: int = 16,
        hidden_size: int = 128,
        linear_hidden_size: int = 256,
        dropout: float = 0.2,
        head_dropout: float = 0.0,
        attn_dropout: float = 0.0,
        patch_len: int = 16,
        stride: int = 8,
        revin: bool = True,
        revin_affine: bool = False,
        *,
        multiplier: int = 6,
        registers: int = 0,
        encoder: str = "attention",
        jumbo_lr_scale: float = 0.3,
        norm: str | None = None,
        d_state: int = 16,
        head_dim: int | None = None,
        drop_path: float = 0.0,
        jumbo_mlp_ratio: float = 4.0,
        share_jumbo_ffn: bool = True,
        layer_scale: float | None = None,
        init: str = "short",
        loss: torch.nn.Module | None = None,
        valid_loss: torch.nn.Module | None = None,
        max_steps: int = 5000,
        learning_rate: float = 1e-4,
        num_lr_decays: int = -1,
        early_stop_patience_steps: int = -1,
        val_monitor: str = "ptl/val_loss",
        val_check_steps: int = 100,
        batch_size: int = 32,
        valid_batch_size: int | None = None,
        windows_batch_size: int | None = 1024,
        inference_windows_batch_size: int = 1024,
        start_padding_enabled: bool = False,
        training_data_availability_threshold: float | list[float] = 0.0,
        step_size: int = 1,
        scaler_type: str | None = "identity",
        random_seed: int | None = 1,
        drop_last_loader: bool = False,
        alias: str | None = None,
        optimizer: type[torch.optim.Optimizer] | None = None,
        optimizer_kwargs: dict[str, Any] | None = None,
        lr_scheduler: type[torch.optim.lr_scheduler.LRScheduler] | None = None,
        lr_scheduler_kwargs: dict[str, Any] | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
        **trainer_kwargs: Any,
    ) -> None:
        _check_names(trainer_kwargs)
        lists = dict(stat_exog_list=stat_exog_list, hist_exog_list=hist_exog_list, futr_exog_list=futr_exog_list)
        refuse_exogenous([name for name, given in lists.items() if given])
        h, input_size = checks.integer("h", h), checks.integer("input_size", input_size)
        patch_len = checks.integer("patch_len", patch_len)
        if input_size < patch_len:
            raise ValueError(
                f"input_size {input_size} is shorter than one patch of {patch_len} steps: use a longer window, or "
                f"patch_len of at most {input_size}"
            )
        jumbo_lr_scale = checks.positive("jumbo_lr_scale", jumbo_lr_scale)
        if optimizer is None and optimizer_kwargs:
            raise ValueError(
                f"optimizer_kwargs {optimizer_kwargs} need an optimizer, without which neuralforecast leaves them "
                f"aside: give optimizer=torch.optim.Adam, its default, or another"
            )
        loss = MAE() if loss is None else loss
        if revin and getattr(loss, "is_distribution_output", False) and getattr(loss, "distribution", "") != "Poisson":
            warnings.warn(
                f"RevIN is undone on every parameter of {type(loss).__name__}, also on those that are no location; "
                "these then start near the level of the series, as in neuralforecast's PatchTST: use revin=False, "
                "scaler_type='standard' with this loss",
                UserWarning,
                stacklevel=2,
            )
        super().__init__(
            h=h,
            input_size=input_size,
            stat_exog_list=stat_exog_list,
            hist_exog_list=hist_exog_list,
            futr_exog_list=futr_exog_list,
            exclude_insample_y=exclude_insample_y,
            loss=loss,
            valid_loss=valid_loss,
            max_steps=max_steps,
            learning_rate=learning_rate,
            num_lr_decays=num_lr_decays,
            early_stop_patience_steps=early_stop_patience_steps,
            val_monitor=val_monitor,
            val_check_steps=val_check_steps,
            batch_size=batch_size,
            valid_batch_size=valid_batch_size,
            windows_batch_size=windows_batch_size,
            inference_windows_batch_size=inference_windows_batch_size,
            start_padding_enabled=start_padding_enabled,
            training_data_availability_threshold=training_data_availability_threshold,
            step_size=step_size,
            scaler_type=scaler_type,
            random_seed=random_seed,
            drop_last_loader=drop_last_loader,
            alias=alias,
            optimizer=optimizer,
            optimizer_kwargs=optimizer_kwargs,
            lr_scheduler=lr_scheduler,
            lr_scheduler_kwargs=lr_scheduler_kwargs,
            dataloader_kwargs=dataloader_kwargs,
            **trainer_kwargs,
        )
        self.jumbo_lr_scale = jumbo_lr_scale
        rising, self.quantile_places = _quantiles(self.loss)
        self.model = ts_ext.JumboPatchTST(
            1,
            1,
            input_size,
            [h if rising else h * self.loss.outputsize_multiplier],
            quantiles=rising,
            patch_len=patch_len,
            stride=stride,
            multiplier=multiplier,
            registers=registers,
            encoder=encoder,
            norm=norm,
            d_model=hidden_size,
            n_layers=encoder_layers,
            n_heads=n_heads,
            d_state=d_state,
            head_dim=head_dim,
            d_ff=linear_hidden_size,
            dropout=dropout,
            attn_dropout=attn_dropout,
            head_dropout=head_dropout,
            drop_path=drop_path,
            revin=revin,
            affine=revin_affine,
            jumbo_mlp_ratio=jumbo_mlp_ratio,
            share_jumbo_ffn=share_jumbo_ffn,
            layer_scale=layer_scale,
            init=init,
        )

    def forward(self, windows_batch: dict[str, Any]) -> torch.Tensor:
        """neuralforecast's batch of windows -> what the head says of them, (W, h, K), not yet mapped by the loss."""
        y, observed = windows_batch["insample_y"].mT, windows_batch["insample_mask"].mT > 0  # (W, 1, L)
        y = y.masked_fill(~observed, 0)
        if not torch.isfinite(y).all():
            raise ValueError(
                f"{int((~torch.isfinite(y)).sum())} of {y.numel()} values of these windows are NaN or infinite: give "
                f"their rows available_mask 0, or fill them before NeuralForecast"
            )
        out = self.model(y, observed | ~observed.any(dim=-1, keepdim=True))
        if self.quantile_places is None:
            return out.unflatten(1, (self.h, -1))
        return out[..., self.quantile_places]

    def configure_optimizers(self) -> dict[str, Any]:
        """neuralforecast's optimizer and schedule, with the Jumbo FFN in a group of its own at a slower rate."""
        groups = [
            {name: group[name] for name in ("params", "lr")}
            for group in param_groups(self, self.learning_rate, 0.0, jumbo_lr_scale=self.jumbo_lr_scale)
        ]
        if len(groups) == 1:
            return super().configure_optimizers()
        chosen = self.optimizer
        make = torch.optim.Adam if chosen is None else chosen

        @functools.wraps(make, updated=())  # neuralforecast looks into the signature for "lr"
        def grouped(params, **options):
            return make(groups, **options)

        self.optimizer = grouped
        try:
            return super().configure_optimizers()
        finally:
            self.optimizer = chosen


def _quantiles(loss: torch.nn.Module) -> tuple[tuple[float, ...] | None, list[int] | None]:
    """The quantiles of a loss in rising order, and where each of its own, which begin with the median, is in it."""
    if not isinstance(loss, (MQLoss, HuberMQLoss)):
        return None, None
    own = loss.quantiles.tolist()
    rising = tuple(sorted(set(own)))
    return rising, [rising.index(q) for q in own]


def _check_names(given: dict[str, Any]) -> None:
    """Refuse at once what the Trainer would refuse in the fit."""
    known = {name for place in (Trainer, BaseModel) for name in inspect.signature(place).parameters}
    for name in given:
        if name in _OTHERS:
            raise TypeError(f"JumboPatchTST has no {name}: {_OTHERS[name]}. Leave it out")
        if name not in known:
            raise TypeError(f"JumboPatchTST has no {name!r}, and neither have neuralforecast's models nor the Trainer")


MODEL_FILENAME_DICT.setdefault("jumbopatchtst", JumboPatchTST)
