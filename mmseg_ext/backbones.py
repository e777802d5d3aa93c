"""JumboViT as a backbone of MMSegmentation: feature maps out, the host's options in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import timm
import torch
from mmengine.model import BaseModule
from mmseg.registry import MODELS
from timm.layers import to_2tuple
from torch import nn

from jumbo_core.jumbo.encoder import resolve_index
from jumbo_core.models import JumboViT as CoreJumboViT
from mmseg_ext.checkpoints import load_pretrained

_ARCH = re.compile(r"jumbo_([a-z]+)_patch16_224")


@MODELS.register_module()
class JumboViT(BaseModule):
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
            Blocks after the last wanted one are not built.
        final_norm: apply the final LayerNorm to the map of the last block, as mmseg's VisionTransformer does. Default
            False; then it is not built. True while ``out_indices`` leaves the last block out is an error.
        dynamic_img_pad: pad right and bottom to a multiple of the patch size (default, as mmseg's
            ``patch_pad="corner"``): a map then covers the padded image. False makes such a size an error.
        frozen_stages: -1 (default) trains everything; 0 freezes patch embedding, positions and tokens; k the first k
            blocks as well, with their own Jumbo FFN if unshared; the shared one only when every block is frozen. Frozen
            parts stay in eval mode.
        norm_eval: keep LayerNorms in eval mode while training, as in the host: parameters still train. Default False.
        with_cp: gradient checkpointing. Default False.
        drop_path_rate: one rate for all blocks (default 0.1, as released) or one per block.
        drop_rate: dropout after the positions and after linear layers. Default 0.
        attn_drop_rate: dropout of attention weights. Default 0.
        mlp_ratio, jumbo_mlp_ratio, share_jumbo_ffn, layer_scale, norm_eps: see :class:`jumbo_core.jumbo.JumboEncoder`.
        init: "released" or "short" (Jumbo FFN output starts at 0), see :class:`jumbo_core.models.JumboViT`.
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
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        super().__init__(init_cfg=init_cfg)
        given = dict(embed_dim=embed_dims, depth=num_layers, num_heads=num_heads, multiplier=multiplier)
        sizes = {**arch_sizes(arch), **{k: v for k, v in given.items() if v is not None}}
        self.num_layers = num_layers = sizes["depth"]
        self.embed_dims = sizes["embed_dim"]
        self.out_indices = _resolve_out_indices(out_indices, num_layers)
        self.frozen_stages = _check_frozen_stages(frozen_stages, num_layers)
        self.final_norm, self.norm_eval, self.with_cp = final_norm, norm_eval, with_cp
        if final_norm and num_layers - 1 not in self.out_indices:
            raise ValueError(
                f"final_norm=True normalises the map of the last block ({num_layers - 1}), which out_indices="
                f"{out_indices} does not ask for: add -1 to out_indices or use final_norm=False"
            )
        if not isinstance(drop_path_rate, (int, float)):
            if len(drop_path_rate) != num_layers:
                raise ValueError(f"drop_path_rate has {len(drop_path_rate)} rates for {num_layers} blocks")
            drop_path_rate = list(drop_path_rate)[: max(self.out_indices) + 1]
        sizes["depth"] = max(self.out_indices) + 1

        self.vit = CoreJumboViT(
            img_size=_pair("img_size", img_size),
            patch_size=_pair("patch_size", patch_size),
            in_chans=in_channels,
            num_classes=0,
            registers=registers,
            mlp_ratio=mlp_ratio,
            jumbo_mlp_ratio=jumbo_mlp_ratio,
            share_jumbo_ffn=share_jumbo_ffn,
            layer_scale=layer_scale,
            norm_eps=norm_eps,
            drop_path_rate=drop_path_rate,
            pos_drop_rate=drop_rate,
            proj_drop_rate=drop_rate,
            attn_drop_rate=attn_drop_rate,
            dynamic_img_pad=dynamic_img_pad,
            init=init,
            **sizes,
        )
        if not final_norm:
            self.vit.encoder.norm = nn.Identity()
        # Maps hold patches only: what the last block does to the Jumbo token gets zero gradients, but weight decay.
        self.vit.encoder.freeze_unreachable()
        self.vit.set_grad_checkpointing(with_cp)
        for module in self._frozen_modules():
            module.requires_grad_(False)

    def init_weights(self) -> None:
        """The host's initialisation; a "Pretrained" ``init_cfg`` goes through our reader."""
        configs = self.init_cfg if isinstance(self.init_cfg, (list, tuple)) else [self.init_cfg]
        pretrained = [dict(c) for c in configs if c and c["type"] == "Pretrained"]
        others = [c for c in configs if c and c["type"] != "Pretrained"]
        if self.is_init or not pretrained:
            super().init_weights()
            return
        complete, self.init_cfg = self.init_cfg, others
        super().init_weights()
        self.init_cfg = complete
        for config in pretrained:
            config.pop("type")
            load_pretrained(self, **config)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(B, C, H, W) -> maps (B, D, h, w), one per entry of ``out_indices``."""
        grid = self.vit.grid_of(x.shape[-2:])
        wanted = sorted(set(self.out_indices))
        tokens = self.vit.forward_intermediates(x, wanted, output_fmt="NLC", intermediates_only=True)
        by_block = dict(zip(wanted, tokens, strict=True))
        if self.final_norm:
            by_block[self.num_layers - 1] = self.vit.norm(by_block[self.num_layers - 1])
        maps = {i: y.transpose(1, 2).unflatten(2, grid).contiguous() for i, y in by_block.items()}  # -> (B, D, h, w)
        return tuple(maps[i] for i in self.out_indices)

    def train(self, mode: bool = True) -> JumboViT:
        super().train(mode)
        if mode:
            for module in self._frozen_modules():
                if isinstance(module, nn.Module):
                    module.eval()
            if self.norm_eval:
                for module in self.modules():
                    if isinstance(module, nn.LayerNorm):
                        module.eval()
        return self

    def _frozen_modules(self) -> list[nn.Module | nn.Parameter]:
        """Modules and parameters that ``frozen_stages`` keeps out of training."""
        if self.frozen_stages < 0:
            return []
        vit, encoder = self.vit, self.vit.encoder
        frozen = [
            vit.patch_embed,
            vit.pos_embed,
            vit.pos_drop,
            encoder.jumbo_token if encoder.multiplier else encoder.cls_token,
        ]
        if encoder.registers:
            frozen.append(encoder.reg_token)
        frozen += encoder.blocks[: self.frozen_stages]
        if encoder.multiplier and not encoder.share_jumbo_ffn:
            frozen += encoder.jumbo_mlp[: self.frozen_stages]
        elif encoder.multiplier and self.frozen_stages >= len(encoder.blocks):
            frozen.append(encoder.jumbo_mlp)
        return frozen


@lru_cache
def arch_sizes(arch: str) -> dict[str, int]:
    """``embed_dim``, ``depth``, ``num_heads`` and ``multiplier`` of the timm model ``jumbo_{arch}_patch16_224``."""
    names = {match[1]: match[0] for name in timm.list_models("jumbo_*") if (match := _ARCH.fullmatch(name))}
    if arch not in names:
        raise ValueError(f"arch must be one of {sorted(names)}, got {arch!r}")
    with torch.device("meta"):
        model = timm.create_model(names[arch], num_classes=0)
    encoder = model.encoder
    return dict(embed_dim=encoder.dim, depth=encoder.depth, num_heads=encoder.num_heads, multiplier=encoder.multiplier)


def _pair(name: str, size: int | Sequence[int]) -> tuple[int, int]:
    pair = to_2tuple(size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in pair):
        raise ValueError(f"{name} must be a positive integer or a pair (H, W) of them, got {size!r}")
    return pair


def _resolve_out_indices(out_indices: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    indices = [out_indices] if isinstance(out_indices, int) else out_indices
    if not isinstance(indices, (list, tuple)) or any(isinstance(i, bool) or not isinstance(i, int) for i in indices):
        raise TypeError(f"out_indices must be an int or a list or tuple of ints, got {out_indices!r}")
    if not indices:
        raise ValueError("out_indices is empty: name at least one block")
    return tuple(resolve_index(i, num_layers) for i in indices)


def _check_frozen_stages(frozen_stages: int, num_layers: int) -> int:
    if isinstance(frozen_stages, bool) or not isinstance(frozen_stages, int) or not -1 <= frozen_stages <= num_layers:
        raise ValueError(f"frozen_stages must be an integer in -1..{num_layers}, got {frozen_stages!r}")
    return frozen_stages
