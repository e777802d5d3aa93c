"""Configuration of JumboPatchTST for Transformers (model type "jumbo_patchtst"), with PatchTST's argument names.

Annotations are kept as types, not strings: the host checks every field against them.
"""

from dataclasses import fields
from typing import Any

import numpy as np
from huggingface_hub.dataclasses import strict
from transformers import PatchTSTConfig, PreTrainedConfig

from jumbo_core import checks
from ts_ext.losses import check_quantiles

Integer = int | np.integer
Number = float | int | np.floating | np.integer

NORMS = {"layernorm": "LayerNorm", "batchnorm": "BatchNorm", None: None}
# What PatchTST can be told and this model is anyway: saying so is no error, saying anything else is one.
SAME = dict(
    share_embedding=True,
    channel_attention=False,
    bias=True,
    activation_function="gelu",
    pre_norm=True,
    norm_eps=1e-5,
    init_std=0.02,
    share_projection=True,
    do_mask_input=None,
    mask_type="random",
    channel_consistent_masking=False,
    unmasked_channel_indices=None,
    mask_value=0,
    output_range=None,
)


@strict
class JumboPatchTSTConfig(PreTrainedConfig):
    """Shape and training options of a JumboPatchTST; names that PatchTST has mean what they mean there.

    What they are in :class:`ts_ext.JumboPatchTST`, where each is described, stands in brackets. Every argument is a
    keyword.

    Args:
        num_input_channels: C [c_in]. Default 1.
        context_length: L, steps of the window [seq_len]. Default 336.
        prediction_length: H, steps of a forecast. Default 96.
        patch_length, patch_stride: [patch_len, stride]. Defaults 16 and 8. Patches are padded at the end.
        d_model, num_hidden_layers, num_attention_heads, ffn_dim: [d_model, n_layers, n_heads, d_ff]. Defaults 128, 3,
            16 and 256.
        multiplier: J, width of the Jumbo token in patches. Default 6; 0 = a class token instead.
        num_register_tokens: [registers]. Default 0.
        encoder_type: "attention" (default) or "linear" [encoder]; of the latter ``state_size`` [d_state], default 16,
            and ``head_dim``, default None.
        channels: "independent" (default) or "mixing".
        norm_type: "layernorm" (default with attention) or "batchnorm" [norm].
        attention_dropout, ff_dropout, positional_dropout, path_dropout, head_dropout: [attn_dropout, dropout, that
            after the embedding, drop_path, head_dropout]. Defaults 0, 0.2, 0.2, 0 and 0.
        scaling: "std" (default), which is RevIN, undone on forecasts, or None. [revin]
        scaling_affine: a learned weight and bias per channel in it [affine]. Default False.
        missing: "error" (default) or "mask", what a NaN is that ``past_observed_mask`` does not cover.
        quantiles: of a forecast, for example [0.1, 0.5, 0.9], and trained with the pinball loss. Default None: the
            mean, trained with the squared error.
        loss: None (default), "mse" or, with quantiles, "pinball"; nothing else.
        target_channels: the input channels to forecast, in that order. Default None: all.
        num_targets: classes. Default 1, which is one logit of a yes/no question.
        random_mask_ratio: share of patches that pre-training hides [mask_ratio]. Default 0.4.
        jumbo_mlp_ratio, share_jumbo_ffn, layer_scale, init: as there. Defaults 4, True, None and "short".
        **kwargs: of any configuration. PatchTST's other options are accepted where they say what this model does.

    Raises:
        ValueError: one of PatchTST's options that this model does not have. Sizes are checked when a model is made.
    """

    model_type = "jumbo_patchtst"
    attribute_map = {"hidden_size": "d_model"}

    num_input_channels: Integer = 1
    context_length: Integer = 336
    prediction_length: Integer = 96
    patch_length: Integer = 16
    patch_stride: Integer = 8
    d_model: Integer = 128
    num_hidden_layers: Integer = 3
    num_attention_heads: Integer = 16
    ffn_dim: Integer = 256
    multiplier: Integer = 6
    num_register_tokens: Integer = 0
    encoder_type: str = "attention"
    state_size: Integer = 16
    head_dim: Integer | None = None
    channels: str = "independent"
    norm_type: str | None = None
    attention_dropout: Number = 0.0
    ff_dropout: Number = 0.2
    positional_dropout: Number = 0.2
    path_dropout: Number = 0.0
    head_dropout: Number = 0.0
    scaling: str | bool | None = "std"
    scaling_affine: bool = False
    missing: str = "error"
    quantiles: list[Number] | tuple[Number, ...] | None = None
    loss: str | None = None
    target_channels: list[Integer] | tuple[Integer, ...] | None = None
    num_targets: Integer = 1
    random_mask_ratio: Number = 0.4
    jumbo_mlp_ratio: Number = 4.0
    share_jumbo_ffn: bool = True
    layer_scale: Number | None = None
    init: str = "short"

    def __post_init__(self, **kwargs: Any) -> None:
        own = {f.name for f in fields(JumboPatchTSTConfig)}
        theirs = {f.name for f in fields(PatchTSTConfig)} - {f.name for f in fields(PreTrainedConfig)} - own
        for name in sorted(theirs & kwargs.keys()):
            value = kwargs.pop(name)
            if name not in SAME or value != SAME[name]:
                raise ValueError(
                    f"JumboPatchTST has no {name}, got {value!r}"
                    + (f": it is always {SAME[name]!r} here" if name in SAME else "")
                    + "; leave it out"
                )
        self.check()
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Check every value that no model checks and put sizes into plain Python types.

        Raises:
            ValueError: a value outside its range.
        """
        for field in fields(JumboPatchTSTConfig):
            value = getattr(self, field.name)
            if isinstance(value, np.generic):
                setattr(self, field.name, value.item())
        self.num_targets = checks.integer("num_targets", self.num_targets)
        self.prediction_length = checks.integer("prediction_length", self.prediction_length)
        if self.norm_type not in NORMS:
            raise ValueError(f"norm_type must be 'layernorm' or 'batchnorm', got {self.norm_type!r}")
        if self.scaling not in ("std", None) or self.scaling is True:
            raise ValueError(
                f"scaling must be 'std' (by each window's mean and deviation) or None, got {self.scaling!r}"
            )
        if self.quantiles is not None:
            self.quantiles = list(check_quantiles(self.quantiles))
        if self.target_channels is not None:
            self.target_channels = [checks.integer("target_channels", c, 0) for c in self.target_channels]
        fitting = "mse" if self.quantiles is None else "pinball"
        if self.loss not in (None, fitting):
            raise ValueError(
                f"loss {self.loss!r} with quantiles {self.quantiles}: it is {fitting!r} then. For the uncertainty of a "
                f"forecast give quantiles, for example [0.1, 0.5, 0.9]; there is no likelihood here"
            )

    def trunk_arguments(self) -> dict[str, Any]:
        """What a :class:`ts_ext.trunk.SeriesTrunk` of this shape is made with."""
        return dict(
            c_in=self.num_input_channels,
            seq_len=self.context_length,
            patch_len=self.patch_length,
            stride=self.patch_stride,
            multiplier=self.multiplier,
            registers=self.num_register_tokens,
            encoder=self.encoder_type,
            channels=self.channels,
            norm=NORMS[self.norm_type],
            d_model=self.d_model,
            n_layers=self.num_hidden_layers,
            n_heads=self.num_attention_heads,
            d_state=self.state_size,
            head_dim=self.head_dim,
            d_ff=self.ffn_dim,
            dropout=self.ff_dropout,
            pos_dropout=self.positional_dropout,
            attn_dropout=self.attention_dropout,
            drop_path=self.path_dropout,
            revin=self.scaling is not None,
            affine=self.scaling_affine,
            missing=self.missing,
            jumbo_mlp_ratio=self.jumbo_mlp_ratio,
            share_jumbo_ffn=self.share_jumbo_ffn,
            layer_scale=self.layer_scale,
            init=self.init,
        )
