"""Compute by closed forms: parameters counted once, multiply-adds counted per call, attention included.

Counters that hook modules count a shared FFN once per name, and torch's own counter reports 0 for fused attention on
CPU; the formulas below are what both should have said.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from jumbo_core import checks
from jumbo_core.jumbo import BlockStack, JumboEncoder
from jumbo_core.linear import AdventurerEncoder, Mamba2Mixer
from jumbo_core.linear.ssd import chunk_for
from jumbo_core.models.surface import PatchModel


def count_parameters(model: nn.Module) -> int:
    """Number of distinct parameters; one that several modules share counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def encoder_multiply_adds(encoder: BlockStack, num_patches: int) -> int:
    """Multiply-adds of one sequence of N patches through a :class:`JumboEncoder` or :class:`AdventurerEncoder`.

    T tokens of width D, J slices, hidden widths h (patch MLP) and H (Jumbo FFN). A block takes ``2 J D H`` for the
    Jumbo FFN, which is shared in memory but runs in every block, and

    - Jumbo: ``4 T D^2`` for the projections, ``2 T^2 D`` for scores and weighted sums, ``2 (T - J) D h`` for the MLP;
    - Adventurer: the mixer (:func:`mixer_multiply_adds`) on T + 1 tokens, and ``3 (T - J) D h`` for the SwiGLU.

    Raises:
        TypeError: another encoder.
    """
    if not isinstance(encoder, (JumboEncoder, AdventurerEncoder)):
        raise TypeError(f"no closed form for {type(encoder).__name__}; supported: JumboEncoder, AdventurerEncoder")
    d, j = encoder.dim, encoder.multiplier
    t = num_patches + encoder.num_global_tokens + encoder.registers
    total = 0
    for i, block in enumerate(encoder.blocks):
        if isinstance(encoder, JumboEncoder):
            total += 4 * t * d * d + 2 * t * t * d
            total += 2 * (t - j) * d * block.mlp.fc1.out_features
        else:
            total += mixer_multiply_adds(block.mixer, t + 1)
            total += 3 * (t - j) * d * block.mlp.fc2.in_features
        if j:
            total += 2 * j * d * encoder.ffn_of(i).fc1.out_features
    return total


def mixer_multiply_adds(mixer: Mamba2Mixer, length: int) -> int:
    """Multiply-adds of one sequence through a :class:`Mamba2Mixer`, its scan in chunks.

    With inner width E, N states, H heads and chunks of q steps: the projections ``L D (3 E + 2 N + H)``, the
    convolution of kernel k ``(L + k - 1) k (E + 2 N)`` (its end pads are computed and cut off), and the scan
    ``2 L E N`` for states and what they carry over, ``q^2 (N + E)`` per chunk for what happens inside it. Chunks are
    those of training; at inference on a CPU they are twice as long: 2 % more for a block of width 512.
    """
    e, n = mixer.inner, mixer.d_state
    size = chunk_for((1, length)) if mixer.chunk_size == "auto" else mixer.chunk_size
    chunks = [size] * (length // size) + [length % size] * bool(length % size)
    projections = length * mixer.dim * (3 * e + 2 * n + mixer.num_heads)
    convolution = (length + mixer.conv_kernel - 1) * mixer.conv_kernel * (e + 2 * n)
    return projections + convolution + 2 * length * e * n + sum(q * q * (n + e) for q in chunks)


def multiply_adds(model: PatchModel, image_size: int | Sequence[int] | None = None) -> int:
    """Multiply-adds of one image through a JumboViT or AdventurerViT: patch projection, blocks and head.

    Args:
        model: the model; its depth, widths and head are read from it.
        image_size: int or (H, W). Default: the size the model was made for.

    Raises:
        TypeError: a model without a closed form here.
        ValueError: a size that the patch size does not divide.
    """
    if not isinstance(model, PatchModel):
        raise TypeError(
            f"no closed form for {type(model).__name__}; supported: JumboViT and AdventurerViT, and their encoders "
            f"through encoder_multiply_adds"
        )
    if image_size is None:
        image_size = model.patch_embed.img_size
    else:
        image_size = checks.pair("image_size", image_size)
    h, w = model.grid_of(image_size)
    total = h * w * model.patch_embed.proj.weight.numel()
    total += encoder_multiply_adds(model.encoder, h * w)
    if isinstance(model.head, nn.Linear):
        others = model.encoder.num_global_tokens + model.encoder.registers
        per_token = others + h * w if not model.global_pool else 1
        total += per_token * model.head.weight.numel()
    return total
