"""A tiny UNet of Stable Diffusion's kind, its inputs, and a look at its self-attention."""

import diffusers
import torch

CONFIG = dict(
    sample_size=8, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=12, attention_head_dim=2,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    norm_num_groups=4,
)  # fmt: skip
FINE = ["down_blocks.0.attentions.0", "up_blocks.1.attentions.0", "up_blocks.1.attentions.1"]


def make_unet(**options):
    return diffusers.UNet2DConditionModel(**{**CONFIG, **options}).eval().requires_grad_(False)


def inputs(height: int = 8, width: int = 8, batch: int = 2, width_of_prompt: int = 12):
    return torch.randn(batch, 4, height, width), torch.tensor(481), torch.randn(batch, 5, width_of_prompt)


def call(unet, given, **options):
    return unet(*given, **options).sample


def watch_attention(unet) -> dict[str, list]:
    """Self-attention by block name: [what it was given, its bias, what the residual gets], of the latest call."""
    seen = {}

    def watch(name, attention):
        def start(module, args, kwargs):
            seen[name] = [args[0].detach(), kwargs["attention_mask"], None]

        def end(module, args, output):
            seen[name][2] = output.detach()

        attention.register_forward_pre_hook(start, with_kwargs=True)
        attention.register_forward_hook(end)

    for name, module in unet.named_modules():
        if name.endswith("attn1"):
            watch(name.removesuffix(".transformer_blocks.0.attn1"), module)
    return seen
