"""Tiny models of JumboPatchTST in Transformers, and windows of a series for them."""

import torch

from ts_ext.transformers import JumboPatchTSTConfig, JumboPatchTSTForPrediction

SHAPE = dict(
    patch_length=8, patch_stride=4, d_model=16, num_hidden_layers=2, num_attention_heads=4, ffn_dim=24, multiplier=2,
    context_length=48, num_input_channels=3, prediction_length=6,
)  # fmt: skip
VARIANTS = {
    "attention": {},
    "registers, batch norm": dict(multiplier=0, num_register_tokens=4, norm_type="batchnorm"),
    "linear": dict(encoder_type="linear", state_size=8),
    "mixing": dict(channels="mixing", scaling_affine=True),
    "layer scale, own FFNs": dict(layer_scale=0.1, share_jumbo_ffn=False),
    "quantiles": dict(quantiles=[0.1, 0.5, 0.9], target_channels=[2, 0]),
}


def make(cls=JumboPatchTSTForPrediction, seed=0, **options):
    torch.manual_seed(seed)
    model = cls(JumboPatchTSTConfig(**{**SHAPE, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def windows(count=4, seed=1):
    return torch.randn(count, 48, 3, generator=torch.Generator().manual_seed(seed)) * 3 + 20
