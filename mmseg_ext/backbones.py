"""JumboViT and AdventurerViT as backbones of MMSegmentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mmseg.registry import MODELS

from jumbo_core import checks
from jumbo_core.jumbo.stack import resolve_index
from jumbo_core.models import AdventurerViT as CoreAdventurerViT
from jumbo_core.models import JumboViT as CoreJumboViT
from mmseg_ext.plain import PlainBackbone, chosen, timm_encoder


@MODELS.register_module()
class JumboViT(PlainBackbone):
    """Plain ViT with a Jumbo token (arXiv 2502.15021 v3) for dense prediction.

    Input images (B, C, H, W), output a tuple of maps (B, D, h, w), one for each of ``out_indices`` and in that order,
    with (h, w) the patch grid. The Jumbo token and registers are attended to and never part of a map.

    Args:
        arch: "pico", "nano", "tiny", "small" (default), "base" or "large": sizes of the timm model of that name. The
            next four override single sizes. Default of each: from ``arch``.
        embed_dims: patch width D.
        num_layers: blocks.
        num_heads: attention heads.
        multiplier: J, width of the Jumbo token in patches; 0 = a class token (with ``registers=16``: the baseline).
        img_size: size the position table is made for, int or (H, W); other inputs resample it by grid. Default 224.
        patch_size: int or (h, w). Default 16.
        in_channels: Default 3.
        registers: register tokens. Default 0.
        out_indices: blocks whose output is returned, an int, list or tuple; negative counts from the end. Default -1.
            Blocks after the last wanted one are left out.
        final_norm: apply the final norm to the map of the last block, as mmseg's VisionTransformer does. Default
            False; then it is left out. True while ``out_indices`` leaves the last block out is an error.
        dynamic_img_pad: pad right and bottom to a multiple of the patch size (default, as mmseg's
            ``patch_pad="corner"``): a map then covers the padded image. False makes such a size an error.
        frozen_stages: -1 (default) trains everything; 0 freezes patch embedding, positions and tokens; k the first k
            blocks as well, with their own Jumbo FFN if unshared; the shared one only when every block is frozen. Frozen
            parts stay in eval mode.
        norm_eval: keep norms in eval mode while training, as in the host: parameters still train. Default False.
        with_cp: gradient checkpointing. Default False.
        drop_path_rate: one rate for all blocks (default 0.1, as released) or one per block.
        drop_rate: dropout after the positions and after linear layers. Default 0.
        attn_drop_rate: dropout of attention weights. Default 0.
        mlp_ratio, jumbo_mlp_ratio, share_jumbo_ffn, layer_scale, norm_eps: see :class:`jumbo_core.jumbo.JumboEncoder`.
        init: "released" or "short" (Jumbo FFN output starts at 0), see :class:`jumbo_core.models.JumboViT`.
        tofu: fuse tokens between attention and MLP, without training: ``plan`` (a dict of ops and counts, the path of a
            plan file, or a preset such as ``dict(preset="paper", r=8)``, for all ``num_layers`` blocks) and options of
            :func:`jumbo_core.tofu.apply_tofu`, see :func:`mmseg_ext.tofu.fuse`. Maps keep the full grid, each position
            with its group's vector; parameters and checkpoints stay the same. Default None.
        optimize: "int8" or "bfloat16": the Jumbo FFN in that form, for testing and deployment alone, see
            :func:`jumbo_core.optimize_for_inference`. Checkpoints of the trained model are rounded while they are
            loaded, those of an optimised one load as they are; training is refused by the first forward. Default None.
        init_cfg: the host's; ``dict(type="Pretrained", checkpoint=…)`` is read by
            :func:`mmseg_ext.checkpoints.load_pretrained`, whose other arguments may stand beside ``checkpoint``.

    Raises:
        ValueError, TypeError, IndexError: an option out of its range, named with what was expected.
    """

    def __init__(
        self,
        arch: str = "small",
        *,
        embed_dims: int | None = None,
        num_layers: int | None = None,
        num_heads: int | None = None,
        multiplier: int | None = None,
        img_size: int | Sequence[int] = 224,
        patch_size: int | Sequence[int] = 16,
        in_channels: int = 3,
        registers: int = 0,
        out_indices: int | Sequence[int] = -1,
        final_norm: bool = False,
        dynamic_img_pad: bool = True,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        drop_path_rate: float | Sequence[float] = 0.1,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        mlp_ratio: float = 4.0,
        jumbo_mlp_ratio: float = 4.0,
        share_jumbo_ffn: bool = True,
        layer_scale: float | None = None,
        norm_eps: float = 1e-5,
        init: str = "released",
        tofu: Mapping[str, Any] | None = None,
        optimize: str | None = None,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        like = timm_encoder(r"jumbo_([a-z]+)_patch16_224", arch)
        sizes = dict(embed_dim=like.dim, depth=like.depth, num_heads=like.num_heads, multiplier=like.multiplier)
        super().__init__(
            CoreJumboViT,
            chosen(sizes, embed_dim=embed_dims, depth=num_layers, num_heads=num_heads, multiplier=multiplier),
            img_size=img_size,
            patch_size=patch_size,
            in_channels=in_channels,
            registers=registers,
            out_indices=out_indices,
            final_norm=final_norm,
            dynamic_img_pad=dynamic_img_pad,
            frozen_stages=frozen_stages,
            norm_eval=norm_eval,
            with_cp=with_cp,
            drop_path_rate=drop_path_rate,
            drop_rate=drop_rate,
            attn_drop_rate=attn_drop_rate,
            mlp_ratio=mlp_ratio,
            jumbo_mlp_ratio=jumbo_mlp_ratio,
            share_jumbo_ffn=share_jumbo_ffn,
            layer_scale=layer_scale,
            norm_eps=norm_eps,
            init=init,
            tofu=tofu,
            optimize=optimize,
            init_cfg=init_cfg,
        )


@MODELS.register_module()
class AdventurerViT(PlainBackbone):
    """Adventurer (arXiv 2410.07599), linear in the number of patches, for dense prediction; and our Jumbo-linear.

    Input images (B, C, H, W), output a tuple of maps (B, D, h, w), one for each of ``out_indices`` and in that order,
    with (h, w) the patch grid. The class token (or the J slices), which stands behind the patches, is never part of a
    map. ``multiplier`` above 0 is **our own combination**, described in no paper, see
    :class:`jumbo_core.linear.AdventurerEncoder`.

    Weights are meaningless under another flip rule than theirs. A published file or a Transformers folder therefore
    sets it, whatever ``flip`` says, and the log tells; checkpoints of this backbone carry it as the buffer ``flipped``,
    so that testing and resuming need no such file.

    Args:
        arch: "tiny", "small" (default), "base", "large", or "jumbo_tiny", "jumbo_small", "jumbo_base": sizes of the
            timm model (jumbo_)adventurer_…. The next three override single sizes. Default of each: from ``arch``.
        embed_dims: patch width D.
        num_layers: blocks.
        multiplier: J, width of the Jumbo token in patches; 0 = a class token.
        d_state, head_dim, expand, conv_kernel: sizes of the mixer, see :class:`jumbo_core.linear.Mamba2Mixer`. Default
            64, 64, 2 and 4.
        flip: blocks that see the patches reversed: "alternate" (paper, default) or their indices.
        img_size, patch_size, in_channels, out_indices, final_norm, dynamic_img_pad, frozen_stages, norm_eval, with_cp:
            see :class:`JumboViT`.
        drop_path_rate: a number p for the released rule (from 0 in the first two blocks up to almost p, over all
            ``num_layers``), or one rate per block. Default 0.1.
        drop_rate: dropout after the positions and inside the FFNs. Default 0.
        mlp_ratio: hidden width of the SwiGLU over D. Default 2.5.
        jumbo_mlp_ratio, share_jumbo_ffn, norm_eps: see :class:`jumbo_core.linear.AdventurerEncoder`.
        init, optimize, init_cfg: see :class:`JumboViT`.

    Raises:
        ValueError, TypeError, IndexError: an option out of its range, named with what was expected.
    """

    def __init__(
        self,
        arch: str = "small",
        *,
        embed_dims: int | None = None,
        num_layers: int | None = None,
        multiplier: int | None = None,
        d_state: int = 64,
        head_dim: int = 64,
        expand: float = 2,
        conv_kernel: int = 4,
        flip: str | Sequence[int] = "alternate",
        img_size: int | Sequence[int] = 224,
        patch_size: int | Sequence[int] = 16,
        in_channels: int = 3,
        out_indices: int | Sequence[int] = -1,
        final_norm: bool = False,
        dynamic_img_pad: bool = True,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        drop_path_rate: float | Sequence[float] = 0.1,
        drop_rate: float = 0.0,
        mlp_ratio: float = 2.5,
        jumbo_mlp_ratio: float = 4.0,
        share_jumbo_ffn: bool = True,
        norm_eps: float = 1e-5,
        init: str = "released",
        optimize: str | None = None,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        like = timm_encoder(r"(jumbo_)?adventurer_([a-z]+)_patch16_224", arch)
        sizes = dict(embed_dim=like.dim, depth=like.depth, multiplier=like.multiplier)
        super().__init__(
            CoreAdventurerViT,
            chosen(sizes, embed_dim=embed_dims, depth=num_layers, multiplier=multiplier),
            d_state=d_state,
            head_dim=head_dim,
            expand=expand,
            conv_kernel=conv_kernel,
            flip=flip,
            img_size=img_size,
            patch_size=patch_size,
            in_channels=in_channels,
            out_indices=out_indices,
            final_norm=final_norm,
            dynamic_img_pad=dynamic_img_pad,
            frozen_stages=frozen_stages,
            norm_eval=norm_eval,
            with_cp=with_cp,
            drop_path_rate=drop_path_rate,
            drop_rate=drop_rate,
            mlp_ratio=mlp_ratio,
            jumbo_mlp_ratio=jumbo_mlp_ratio,
            share_jumbo_ffn=share_jumbo_ffn,
            norm_eps=norm_eps,
            init=init,
            optimize=optimize,
            init_cfg=init_cfg,
        )
        self.register_buffer("flipped", torch.zeros(self.num_layers, dtype=torch.bool))
        self.set_flip(flip)

    def set_flip(self, flip: str | Sequence[int]) -> None:
        """Choose the blocks that see the patches reversed, of all ``num_layers``, see the class's ``flip``."""
        if isinstance(flip, str) and flip != "alternate":
            raise ValueError(f"flip must be 'alternate' or a sequence of block indices, got {flip!r}")
        blocks = range(1, self.num_layers, 2) if isinstance(flip, str) else [checks.integer("flip", i, 0) for i in flip]
        blocks = [resolve_index(i, self.num_layers) for i in blocks]
        self.vit.encoder.set_flip([i for i in blocks if i < len(self.vit.blocks)])
        self.flipped.copy_(torch.tensor([i in blocks for i in range(self.num_layers)], device=self.flipped.device))

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        """The module's own part of a state dict, which is the flip rule that the weights were trained under."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        if prefix + "flipped" in state_dict and not self.flipped.is_meta:
            self.set_flip(self.flipped.nonzero().flatten().tolist())
