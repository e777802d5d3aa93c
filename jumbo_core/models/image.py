"""JumboViT and AdventurerViT: image classifiers and feature extractors with timm's surface."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from timm.layers import Attention
from timm.models._input import update_model_args
from torch import nn

from jumbo_core.jumbo.encoder import JumboEncoder
from jumbo_core.linear.adventurer import AdventurerEncoder
from jumbo_core.models.surface import PatchModel


class JumboViT(PatchModel):
    """Plain ViT with a Jumbo token (arXiv 2502.15021 v3; released code for layout, defaults and initialisation).

    Input (B, C, H, W); any H and W that the patch size divides, the position table is resampled to the grid.
    Output (B, num_classes). Token order everywhere: prefix (J slices or class token, then registers), patches.

    Args:
        img_size: size the position table is made for, int or (H, W). Default 224.
        patch_size: int or (h, w). Default 16.
        in_chans: input channels. Default 3.
        num_classes: classes, 0 for no head. Default 1000.
        embed_dim: patch width D. Default 384.
        depth: blocks. Default 12.
        num_heads: attention heads. Default 6.
        multiplier: J, width of the global token in patches; 0 = class token (the registers baseline). Default 6.
        registers: register tokens. Default 0; the paper's baseline is ``multiplier=0, registers=16``.
        global_pool: what the head reads. "jumbo" = [J slices ; mean of the patches], width (J+1)*D, the default;
            "token" = the global token alone, the default when ``multiplier=0``; "avg" = mean of the patches;
            "" = every token. What a head cannot reach in the last block is frozen, see
            :meth:`JumboEncoder.freeze_unreachable`.
        mlp_ratio, jumbo_mlp_ratio, share_jumbo_ffn, layer_scale, norm_eps: see :class:`JumboEncoder`.
        drop_path_rate: one rate for every block (default 0.1, as released) or one per block.
        drop_rate, pos_drop_rate, proj_drop_rate, attn_drop_rate: dropout before the head, after the positions, after
            linear layers, on attention weights. Default 0.
        patch_drop_rate: share of patches dropped at random in training. Default 0. May be set between steps, see
            :func:`jumbo_core.jumbo.linear_drop_rate`.
        dynamic_img_size: accept other sizes than ``img_size`` (default); False makes them an error.
        dynamic_img_pad: pad right and bottom to a multiple of the patch size instead of refusing. Default False.
        init: "released" (head weights 0, head bias -ln(classes): long runs with BCE) or "short" (head weights
            trunc-normal, Jumbo FFN output 0: short runs). Default "released".
        attn_layer: attention class, see :class:`JumboBlock`.

    Raises:
        ValueError: an option outside its range, named with what was expected.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        multiplier: int = 6,
        *,
        registers: int = 0,
        global_pool: str | None = None,
        mlp_ratio: float = 4.0,
        jumbo_mlp_ratio: float = 4.0,
        share_jumbo_ffn: bool = True,
        layer_scale: float | None = None,
        norm_eps: float = 1e-5,
        drop_path_rate: float | Sequence[float] = 0.1,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        patch_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        dynamic_img_size: bool = True,
        dynamic_img_pad: bool = False,
        init: str = "released",
        attn_layer: Callable[..., nn.Module] = Attention,
    ) -> None:
        encoder = JumboEncoder(
            embed_dim,
            depth,
            num_heads,
            multiplier=multiplier,
            registers=registers,
            mlp_ratio=mlp_ratio,
            jumbo_mlp_ratio=jumbo_mlp_ratio,
            share_jumbo_ffn=share_jumbo_ffn,
            layer_scale=layer_scale,
            drop_path=drop_path_rate,
            attn_drop=attn_drop_rate,
            proj_drop=proj_drop_rate,
            norm_eps=norm_eps,
            attn_layer=attn_layer,
        )
        super().__init__(
            encoder,
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            drop_rate=drop_rate,
            pos_drop_rate=pos_drop_rate,
            patch_drop_rate=patch_drop_rate,
            dynamic_img_size=dynamic_img_size,
            dynamic_img_pad=dynamic_img_pad,
            init=init,
        )


class AdventurerViT(PatchModel):
    """Linear-time image model on Mamba-2 (Adventurer, released code), and our Jumbo-linear variant of it.

    Input (B, C, H, W); any H and W that the patch size divides, the position table is resampled to the grid.
    Output (B, num_classes). Token order everywhere: patches, then the class token (or the J slices), which stands LAST
    because the mixer is causal: ``num_prefix_tokens`` is 0.

    ``multiplier=J`` above 0 (timm names ``jumbo_adventurer_*``) is **our own combination**, Jumbo-linear: no paper
    describes it and nobody has published weights for it. See :class:`AdventurerEncoder`.

    The released files give the class token an entry of its own in the position table; here that entry is part of the
    learned token (:func:`load_released` adds the two), so the table holds patches only.

    The flip rule is an argument, not a weight: state dicts do not hold it, timm's and Transformers' saved folders do.

    Args:
        img_size, patch_size, in_chans, num_classes, global_pool, drop_rate, pos_drop_rate, patch_drop_rate,
            dynamic_img_size, dynamic_img_pad, init: see :class:`JumboViT`. ``global_pool`` is "token" (the class token,
            as released) by default, "jumbo" with ``multiplier > 0``.
        embed_dim: patch width D. Default 256.
        depth: blocks. Default 12.
        d_state, head_dim, expand: sizes of the mixer, see :class:`Mamba2Mixer`. Default 64, 64, 2.
        flip: blocks that see the patches reversed: "alternate" (paper, default) or indices; released weights need
            (2, 3), which :func:`load_released` sets.
        multiplier: J, see above. Default 0.
        mlp_ratio: hidden width of the SwiGLU over D. Default 2.5.
        jumbo_mlp_ratio, share_jumbo_ffn, norm_eps, conv_kernel, chunk_size, backend: see :class:`AdventurerEncoder`.
        drop_path_rate: a number for the released rising list, or one rate per block. Default 0.
        proj_drop_rate: dropout inside the FFNs. Default 0.

    Raises:
        ValueError: an option outside its range, named with what was expected.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 256,
        depth: int = 12,
        d_state: int = 64,
        head_dim: int = 64,
        expand: float = 2,
        flip: str | Sequence[int] = "alternate",
        multiplier: int = 0,
        *,
        conv_kernel: int = 4,
        global_pool: str | None = None,
        mlp_ratio: float = 2.5,
        jumbo_mlp_ratio: float = 4.0,
        share_jumbo_ffn: bool = True,
        norm_eps: float = 1e-5,
        drop_path_rate: float | Sequence[float] = 0.0,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        patch_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        dynamic_img_size: bool = True,
        dynamic_img_pad: bool = False,
        init: str = "released",
        chunk_size: int | str = "auto",
        backend: str = "auto",
    ) -> None:
        encoder = AdventurerEncoder(
            embed_dim,
            depth,
            flip=flip,
            multiplier=multiplier,
            d_state=d_state,
            head_dim=head_dim,
            expand=expand,
            conv_kernel=conv_kernel,
            mlp_ratio=mlp_ratio,
            jumbo_mlp_ratio=jumbo_mlp_ratio,
            share_jumbo_ffn=share_jumbo_ffn,
            drop_path=drop_path_rate,
            proj_drop=proj_drop_rate,
            norm_eps=norm_eps,
            chunk_size=chunk_size,
            backend=backend,
        )
        super().__init__(
            encoder,
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            drop_rate=drop_rate,
            pos_drop_rate=pos_drop_rate,
            patch_drop_rate=patch_drop_rate,
            dynamic_img_size=dynamic_img_size,
            dynamic_img_pad=dynamic_img_pad,
            init=init,
        )

    def set_flip(self, flip: str | Sequence[int]) -> None:
        """Choose the blocks that see the patches reversed, see ``flip``; timm's saved folders remember it."""
        self.encoder.set_flip(flip)
        update_model_args(self, flip=self.encoder.flip)
