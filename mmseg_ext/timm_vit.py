"""Any plain ViT of timm as a backbone of MMSegmentation, with token fusion on request."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import timm
import torch
from mmseg.registry import MODELS
from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from jumbo_core import checks
from jumbo_core.models.surface import check_divides
from mmseg_ext.plain import PlainBackbone

# What the backbone itself decides, or what would leave holes in its maps.
_OWN = (
    "img_size", "in_chans", "num_classes", "global_pool", "drop_rate", "pos_drop_rate", "proj_drop_rate",
    "attn_drop_rate", "drop_path_rate", "patch_drop_rate", "dynamic_img_size", "dynamic_img_pad",
)  # fmt: skip


@MODELS.register_module()
class ToFuViT(PlainBackbone):
    """Plain ViT of timm (ViT, DeiT, CLIP, DINOv2, SigLIP, …) for dense prediction, fused as a plan says.

    Input images (B, C, H, W) of any size, output a tuple of maps (B, D, h, w), one for each of ``out_indices`` and in
    that order, with (h, w) the patch grid, also where tokens are fused: each position then has its group's vector.
    Class and register tokens are never part of a map. Fusion (ToFu, arXiv 2312.01026) needs no training: parameters and
    checkpoints are those of the model without it.

    Args:
        model_name: timm's name of a model of its class VisionTransformer.
        tofu: ``plan`` (a dict of ops and counts, the path of a plan file, or a preset such as ``dict(preset="paper",
            r=8)``, for all blocks of the model) and options of :func:`jumbo_core.tofu.apply_tofu`, see
            :func:`mmseg_ext.tofu.fuse`. Default None: the plain ViT.
        model_options: of timm's constructor, such as ``patch_size`` or ``depth``. Default none.
        img_size: size the position table is made for, int or (H, W); other inputs resample it by grid. Default 224.
        in_channels: Default 3.
        out_indices, dynamic_img_pad, frozen_stages, norm_eval, with_cp: see :class:`mmseg_ext.JumboViT`.
        final_norm: apply the model's last norm to the map of the last block. Default False. Where timm averages the
            patches first (its ``fc_norm``), that norm is applied to every patch.
        drop_path_rate: of the last block, rising from 0 in the first (timm's rule). Default 0.
        drop_rate: dropout after the positions and after linear layers. Default 0.
        attn_drop_rate: dropout of attention weights. Default 0.
        init_cfg: the host's; ``dict(type="Pretrained", checkpoint=…)`` is read by
            :func:`mmseg_ext.checkpoints.load_pretrained`: a timm folder, its ``model.safetensors``, a timm checkpoint.

    Raises:
        ValueError, TypeError, IndexError: an option out of its range, named with what was expected.
        FileNotFoundError: no such plan file.
    """

    def __init__(
        self,
        model_name: str,
        *,
        tofu: Mapping[str, Any] | None = None,
        model_options: Mapping[str, Any] | None = None,
        img_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        out_indices: int | Sequence[int] = -1,
        final_norm: bool = False,
        dynamic_img_pad: bool = True,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        drop_path_rate: float = 0.0,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        options = dict(model_options or {})
        if taken := sorted(set(options) & set(_OWN)):
            raise ValueError(f"model_options must not name {', '.join(taken)}: the backbone decides or has its own")
        like = _on_meta(model_name, options)
        img_size, patch = checks.pair("img_size", img_size), like.patch_embed.patch_size
        check_divides(img_size, patch, pad=checks.flag("dynamic_img_pad", dynamic_img_pad))

        def core(*, embed_dim: int, depth: int, **rest) -> nn.Module:
            return timm.create_model(model_name, dynamic_img_size=True, **rest, **options)

        super().__init__(
            core,
            dict(embed_dim=like.embed_dim, depth=len(like.blocks)),
            img_size=tuple(-(-side // step) * step for side, step in zip(img_size, patch, strict=True)),
            in_channels=in_channels,
            out_indices=out_indices,
            final_norm=final_norm,
            dynamic_img_pad=dynamic_img_pad,
            frozen_stages=frozen_stages,
            norm_eval=norm_eval,
            with_cp=with_cp,
            drop_path_rate=checks.rate("drop_path_rate", drop_path_rate),
            drop_rate=checks.rate("drop_rate", drop_rate),
            attn_drop_rate=checks.rate("attn_drop_rate", attn_drop_rate),
            tofu=tofu,
            init_cfg=init_cfg,
        )
        # It is initialised. The host would call timm's method of the same name after the init_cfg, and undo that.
        self.vit.is_init = True

    def _grid(self, x: torch.Tensor) -> tuple[int, int]:
        vit = self.vit
        if x.ndim != 4 or x.shape[1] != vit.patch_embed.proj.in_channels:
            raise ValueError(
                f"ToFuViT expects images (B, {vit.patch_embed.proj.in_channels}, H, W), got {tuple(x.shape)}"
            )
        check_divides(tuple(x.shape[-2:]), vit.patch_embed.patch_size, pad=vit.patch_embed.dynamic_img_pad)
        return vit.patch_embed.dynamic_feat_size(x.shape[-2:])

    def _last_norm(self) -> nn.Module:
        return self.vit.fc_norm if isinstance(self.vit.norm, nn.Identity) else self.vit.norm

    def _cut(self, blocks: int) -> None:
        vit, norm = self.vit, self._last_norm()
        if self.final_norm and isinstance(norm, nn.Identity):
            raise ValueError("final_norm=True, but the model has no norm behind its blocks: use final_norm=False")
        vit.blocks = vit.blocks[:blocks]
        vit.attn_pool = None
        if not self.final_norm:
            vit.norm, vit.fc_norm = nn.Identity(), nn.Identity()

    def _frozen_modules(self) -> list[nn.Module | nn.Parameter]:
        if self.frozen_stages < 0:
            return []
        vit = self.vit
        tokens = [getattr(vit, name, None) for name in ("pos_embed", "cls_token", "reg_token", "dist_token")]
        stem = [vit.patch_embed, vit.pos_drop, vit.norm_pre, *(token for token in tokens if token is not None)]
        return [*stem, *vit.blocks[: self.frozen_stages]]


def _on_meta(model_name: str, options: dict[str, Any]) -> VisionTransformer:
    """The model without memory for its weights, after a check that it is one this backbone can be made of."""
    if not isinstance(model_name, str) or not timm.is_model(model_name):
        close = difflib.get_close_matches(str(model_name), timm.list_models(), n=3)
        raise ValueError(f"timm has no model {model_name!r}" + (f"; did you mean {', '.join(close)}?" if close else ""))
    with torch.device("meta"):
        model = timm.create_model(model_name, num_classes=0, **options)
    if not isinstance(model, VisionTransformer) or not isinstance(model.patch_embed, PatchEmbed):
        inside = "".join(f" with {type(p).__name__}" for p in [getattr(model, "patch_embed", None)] if p is not None)
        raise TypeError(
            f"model_name must name a timm VisionTransformer with PatchEmbed, {model_name} is a "
            f"{type(model).__name__}{inside} (the models of this library have their own backbones, type='JumboViT')"
        )
    return model
