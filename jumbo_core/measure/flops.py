"""Compute by closed forms: parameters counted once, multiply-adds counted per call, attention included.

Counters that hook modules count a shared FFN once per name, and torch's own counter reports 0 for fused attention on
CPU; the formulas below are what both should have said.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from jumbo_core import checks
from jumbo_core.jumbo.encoder import JumboEncoder
from jumbo_core.models.image import JumboViT


def count_parameters(model: nn.Module) -> int:
    """Number of distinct parameters; one that several modules share counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def encoder_multiply_adds(encoder: JumboEncoder, num_patches: int) -> int:
    """Multiply-adds of one sequence of N patches through a :class:`JumboEncoder`.

    With T = prefix + N tokens of width D, J slices and hidden widths h (patch MLP) and H (Jumbo FFN), a block takes
    ``4 T D^2`` for the projections, ``2 T^2 D`` for scores and weighted sums, ``2 (T - J) D h`` for the MLP and
    ``2 J D H`` for the Jumbo FFN, which is shared in memory but runs in every block.
    """
    d, j, t = encoder.dim, encoder.multiplier, encoder.num_prefix_tokens + num_patches
    total = 0
    for i, block in enumerate(encoder.blocks):
        total += 4 * t * d * d + 2 * t * t * d
        total += 2 * (t - j) * d * block.mlp.fc1.out_features
        if j:
            total += 2 * j * d * encoder.ffn_of(i).fc1.out_features
    return total


def multiply_adds(model: JumboViT, image_size: int | Sequence[int] | None = None) -> int:
    """Multiply-adds of one image through a :class:`JumboViT`: patch projection, blocks and head.

    Args:
        model: the model; its depth, widths and head are read from it.
        image_size: int or (H, W). Default: the size the model was made for.

    Raises:
        TypeError: a model without a closed form here.
        ValueError: a size that the patch size does not divide.
    """
    if not isinstance(model, JumboViT):
        raise TypeError(f"no closed form for {type(model).__name__}; supported: JumboViT, and JumboEncoder through "
                        "encoder_multiply_adds")  # fmt: skip
    if image_size is None:
        image_size = model.patch_embed.img_size
    else:
        image_size = checks.pair("image_size", image_size)
    h, w = model.grid_of(image_size)
    total = h * w * model.patch_embed.proj.weight.numel()
    total += encoder_multiply_adds(model.encoder, h * w)
    if isinstance(model.head, nn.Linear):
        per_token = model.num_prefix_tokens + h * w if not model.global_pool else 1
        total += per_token * model.head.weight.numel()
    return total
