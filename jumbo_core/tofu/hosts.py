"""What fusion asks of a model: where its blocks are, where attention ends, what stands in front of the patches.

A host is one object per kind of model, a subclass of :class:`FusionHost`; adapters register their own with
:func:`register_host`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from jumbo_core.jumbo import JumboBlock, JumboEncoder
from jumbo_core.tofu.compute import attention_multiply_adds, linear_weights, matching_multiply_adds

if TYPE_CHECKING:
    from jumbo_core.tofu.plan import FusionPlan


class Arrangement(Protocol):
    """How a model whose tokens do not stand in fusion's order, prefix first and patches rising, gets there and back."""

    def arrange(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The model's order -> fusion's order, along ``dim``; the patches may be fewer by now."""

    def restore(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Fusion's order -> the model's."""


class FusionHost(Protocol):
    """How to fuse inside one kind of model. ``tokens`` are (B, T, D), prefix first (but see ``arrangement``);
    ``context`` is what the model hands its block besides the tokens.
    """

    supported: str  # what it is for, in an error message's words

    def accepts(self, model: nn.Module) -> bool:
        """Whether the model is of this kind."""

    def check_options(self, model: nn.Module, proportional: bool, importance: str) -> None:
        """Refuse, by ValueError, options that the model has no part for. Default: it has all."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Blocks in the order they run."""

    def prefix(self, model: nn.Module) -> int:
        """Leading tokens of a block's input that are no patches."""

    def num_patches(self, model: nn.Module) -> int | None:
        """Patches of the input the model was made for; None if it takes any number."""

    def queries_and_keys(self, block: nn.Module) -> tuple[nn.Module, nn.Module]:
        """Modules whose outputs hold the queries and the keys; hooks catch them there."""

    def queries(self, block: nn.Module, output: torch.Tensor) -> torch.Tensor:
        """Queries (B, H, T, d) from what the first of those modules gave. Default: its output itself."""
        return output

    def keys(self, block: nn.Module, output: torch.Tensor) -> torch.Tensor:
        """Keys (B, H, T, d) from what the second of those modules gave. Default: its output itself."""
        return output

    def scale(self, block: nn.Module) -> float:
        """What attention multiplies its scores by."""

    def attend(self, block: nn.Module, tokens: torch.Tensor, bias: torch.Tensor | None, *context) -> torch.Tensor:
        """The block up to the end of its attention, residual included; ``bias`` (B, 1, 1, T) is added to the scores."""

    def feed(self, block: nn.Module, tokens: torch.Tensor, *context) -> torch.Tensor:
        """The rest of the block."""

    def mlp(self, block: nn.Module) -> nn.Module:
        """The MLP of the patches."""

    def mlp_norm(self, block: nn.Module) -> nn.Module:
        """The module in front of it, whose input are the tokens as fusion sees them."""

    def mlp_prefix(self, model: nn.Module) -> int:
        """Leading tokens of the MLP's input that are no patches."""

    def mlp_suffix(self, model: nn.Module) -> int:
        """Tokens at the end of the MLP's input that are no patches. Default 0."""
        return 0

    def arrangement(self, model: nn.Module, index: int | None) -> Arrangement | None:
        """Order of the tokens in block ``index``; None: of the model's output. Default None: fusion's own order."""
        return None

    def dense_calls(self, model: nn.Module) -> list[tuple[nn.Module, str]]:
        """(owner, method) that read block outputs as maps, and so need every original position."""

    def reads_maps(self, owner: nn.Module, options: dict) -> bool:
        """Whether a call of one of them, about to be made with these keyword arguments, does. Default: it does."""
        return True

    def moved(self, origin: torch.Tensor, context: tuple, options: dict) -> tuple[tuple, dict]:
        """What the model hands its block besides the tokens, positional and by keyword, once patches have left:
        ``origin`` (B, K) is where among all patches each of the K stood. Default: the same.
        """
        return context, options

    def remember(self, model: nn.Module, plan: FusionPlan, options: dict) -> None:
        """Note in the model's own configuration, if it has one, how it was fused. Default: nothing."""

    def forget(self, model: nn.Module) -> None:
        """Undo :meth:`remember`: the fusion was taken out."""

    def multiply_adds(self, model: nn.Module, before: Sequence[int], after: Sequence[int]) -> int | None:
        """Multiply-adds of all blocks for one image, matching included, when block i takes ``before[i]`` patches in and
        hands ``after[i]`` on. Default None: no closed form.
        """
        return None


_HOSTS: list[FusionHost] = []


def register_host(host: FusionHost) -> None:
    """Make :func:`apply_tofu` and :func:`linearity_profile` know another kind of model; the latest is asked first."""
    if host not in _HOSTS:
        _HOSTS.insert(0, host)


def host_of(model: nn.Module) -> FusionHost:
    """The host that knows the model.

    Raises:
        TypeError: none does; the message names what is supported.
    """
    for host in _HOSTS:
        if host.accepts(model):
            return host
    supported = "; ".join(dict.fromkeys(host.supported for host in _HOSTS))
    raise TypeError(
        f"token fusion does not know {_describe(model)}; supported: {supported}. Importing hf_ext adds models of "
        f"Transformers, mmseg_ext MMSegmentation's; hf_ext.diffusers.apply_tofu_to_unet is for UNets"
    )


class TimmHost(FusionHost):
    """timm's VisionTransformer with its plain pre-norm block: ViT, DeiT, CLIP, DINOv2, SigLIP, … of that class."""

    supported = "timm VisionTransformer (and subclasses) made of its Block and Attention"

    def accepts(self, model: nn.Module) -> bool:
        return isinstance(model, VisionTransformer) and all(
            type(block).forward is Block.forward and _plain_attention(block) for block in model.blocks
        )

    def blocks(self, model):
        return list(model.blocks)

    def prefix(self, model):
        return model.num_prefix_tokens

    def num_patches(self, model):
        return model.patch_embed.num_patches

    def queries_and_keys(self, block):
        return block.attn.q_norm, block.attn.k_norm

    def scale(self, block):
        return block.attn.scale

    def attend(self, block, tokens, bias, attn_mask=None, is_causal=False):
        if attn_mask is not None or is_causal:
            raise ValueError("a fused model takes no attention mask, for its tokens leave their places; remove() first")
        return tokens + block.drop_path1(block.ls1(block.attn(block.norm1(tokens), attn_mask=bias)))

    def feed(self, block, tokens, attn_mask=None, is_causal=False):
        return tokens + block.drop_path2(block.ls2(block.mlp(block.norm2(tokens))))

    def mlp(self, block):
        return block.mlp

    def mlp_norm(self, block):
        return block.norm2

    def mlp_prefix(self, model):
        return model.num_prefix_tokens

    def dense_calls(self, model):
        return [(model, "forward_intermediates")]

    def multiply_adds(self, model, before, after):
        total, prefix = 0, model.num_prefix_tokens
        for block, came, left in zip(model.blocks, before, after, strict=True):
            total += attention_multiply_adds(block.attn, came + prefix)
            total += matching_multiply_adds(came, left, block.attn.head_dim)
            total += linear_weights(block.mlp) * (left + prefix)
        return total


class JumboHost(FusionHost):
    """JumboEncoder, alone or as ``.encoder`` of a model (JumboViT): the J slices and the registers are protected."""

    supported = "JumboEncoder and models with one as .encoder (JumboViT)"

    def accepts(self, model: nn.Module) -> bool:
        encoder = _encoder(model)
        return isinstance(encoder, JumboEncoder) and all(
            type(block).forward is JumboBlock.forward and _plain_attention(block) for block in encoder.blocks
        )

    def blocks(self, model):
        return list(_encoder(model).blocks)

    def prefix(self, model):
        return _encoder(model).num_prefix_tokens

    def num_patches(self, model):
        return model.patch_embed.num_patches if hasattr(model, "patch_embed") else None

    def queries_and_keys(self, block):
        return block.attn.q_norm, block.attn.k_norm

    def scale(self, block):
        return block.attn.scale

    def attend(self, block, tokens, bias, jumbo_ffn=None, attn_mask=None):
        if attn_mask is not None:
            raise ValueError("a fused model takes no padding mask, for its tokens leave their places; remove() first")
        return block.attend(tokens, bias)

    def feed(self, block, tokens, jumbo_ffn=None, attn_mask=None):
        return block.feed(tokens, jumbo_ffn)

    def mlp(self, block):
        return block.mlp

    def mlp_norm(self, block):
        return block.norm2

    def mlp_prefix(self, model):
        encoder = _encoder(model)
        return encoder.num_prefix_tokens - encoder.multiplier

    def dense_calls(self, model):
        encoder = _encoder(model)
        calls = [(encoder, "intermediates")]
        return calls if model is encoder else [(model, "forward_intermediates"), *calls]

    def multiply_adds(self, model, before, after):
        encoder, total = _encoder(model), 0
        prefix = encoder.num_prefix_tokens
        for i, (came, left) in enumerate(zip(before, after, strict=True)):
            block = encoder.blocks[i]
            total += attention_multiply_adds(block.attn, came + prefix)
            total += matching_multiply_adds(came, left, block.attn.head_dim)
            total += linear_weights(block.mlp) * (left + prefix - encoder.multiplier)
            if encoder.multiplier:
                total += linear_weights(encoder.ffn_of(i))
        return total


def _encoder(model: nn.Module) -> nn.Module | None:
    return model if isinstance(model, JumboEncoder) else getattr(model, "encoder", None)


def _plain_attention(block: nn.Module) -> bool:
    return type(block.attn).forward is Attention.forward


def _describe(model: object) -> str:
    """Class of the model, of its blocks and of their attention, as far as there are any."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(model, nn.Module) or not isinstance(blocks, nn.Module) or not len(list(blocks.children())):
        return type(model).__name__
    block = next(blocks.children())
    attention = getattr(block, "attn", None)
    inside = "" if attention is None else f" with {type(attention).__name__}"
    return f"{type(model).__name__} made of {type(block).__name__}{inside}"


register_host(JumboHost())
register_host(TimmHost())
