"""What the plain backbones have in common: feature maps out, the host's options in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import timm
import torch
from mmengine.model import BaseModule
from timm.layers import RmsNorm
from torch import nn

from jumbo_core import optimize_for_inference
from jumbo_core.jumbo.stack import BlockStack, resolve_index
from jumbo_core.linear.mamba2 import GatedRMSNorm
from jumbo_core.models.surface import PatchModel
from jumbo_core.tofu import FusedModel
from mmseg_ext.checkpoints import load_pretrained
from mmseg_ext.tofu import fuse

_NORMS = (nn.LayerNorm, nn.RMSNorm, RmsNorm, GatedRMSNorm)


class PlainBackbone(BaseModule):
    """Base of our backbones: a headless model, of the core or of timm, behind the host's interface.

    Input images (B, C, H, W), output a tuple of maps (B, D, h, w), one for each of ``out_indices`` and in that order,
    with (h, w) the patch grid. Tokens that are no patches are never part of a map, wherever the encoder has them.

    Args:
        core: makes the model, of ``sizes`` (``embed_dim`` and ``depth`` among them) and ``options``.
        others: see the subclasses.

    Attributes:
        fusion: what :func:`jumbo_core.tofu.apply_tofu` gave for ``tofu``, None without: ``report()``, ``remove()``.
    """

    def __init__(
        self,
        core: type[PatchModel] | Callable[..., nn.Module],
        sizes: dict[str, Any],
        *,
        in_channels: int,
        out_indices: int | Sequence[int],
        final_norm: bool,
        frozen_stages: int,
        norm_eval: bool,
        with_cp: bool,
        drop_rate: float,
        init_cfg: dict | list[dict] | None,
        tofu: Mapping[str, Any] | None = None,
        optimize: str | None = None,
        **options,
    ) -> None:
        super().__init__(init_cfg=init_cfg)
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
        self.vit = core(
            in_chans=in_channels,
            num_classes=0,
            pos_drop_rate=drop_rate,
            proj_drop_rate=drop_rate,
            **sizes,
            **options,
        )
        self._cut(max(self.out_indices) + 1)
        self.vit.set_grad_checkpointing(with_cp)
        for module in self._frozen_modules():
            module.requires_grad_(False)
        self.fusion: FusedModel | None = None if tofu is None else fuse(self.vit, tofu, num_layers)
        if optimize is not None:  # before any weights: loading rounds those that are not yet
            optimize_for_inference(self.vit, dtype=optimize)

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
        grid = self._grid(x)
        wanted = sorted(set(self.out_indices))
        tokens = self.vit.forward_intermediates(x, wanted, output_fmt="NLC", intermediates_only=True)
        by_block = dict(zip(wanted, tokens, strict=True))
        if self.final_norm:
            by_block[self.num_layers - 1] = self._last_norm()(by_block[self.num_layers - 1])
        maps = {i: y.transpose(1, 2).unflatten(2, grid).contiguous() for i, y in by_block.items()}  # -> (B, D, h, w)
        return tuple(maps[i] for i in self.out_indices)

    def train(self, mode: bool = True) -> PlainBackbone:
        super().train(mode)
        if mode:
            for module in self._frozen_modules():
                if isinstance(module, nn.Module):
                    module.eval()
            if self.norm_eval:
                for module in self.modules():
                    if isinstance(module, _NORMS):
                        module.eval()
        return self

    def _grid(self, x: torch.Tensor) -> tuple[int, int]:
        """Patch grid (h, w) of images (B, C, H, W)."""
        return self.vit.grid_of(x.shape[-2:])

    def _last_norm(self) -> nn.Module:
        return self.vit.norm

    def _cut(self, blocks: int) -> None:
        """Leave out what no map needs: later blocks than the first ``blocks``, and the final norm if it is not used."""
        encoder: BlockStack = self.vit.encoder
        encoder.keep_blocks(blocks)
        if not self.final_norm:
            encoder.norm = nn.Identity()
        # Maps hold patches only: what the last block does to the global token gets zero gradients, but weight decay.
        encoder.freeze_unreachable()

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
def timm_encoder(pattern: str, arch: str) -> BlockStack:
    """The encoder (on meta) of the timm model whose name ``pattern`` matches with groups that make up ``arch``.

    Raises:
        ValueError: no such model; the message lists those there are.
    """
    matches = {name: re.fullmatch(pattern, name) for name in timm.list_models()}
    names = {"".join(filter(None, match.groups())): name for name, match in matches.items() if match}
    if arch not in names:
        raise ValueError(f"arch must be one of {sorted(names)}, got {arch!r}")
    with torch.device("meta"):
        return timm.create_model(names[arch], num_classes=0).encoder


def chosen(defaults: dict[str, Any], **given) -> dict[str, Any]:
    """``defaults`` with those of ``given`` that are not None in their place."""
    return {**defaults, **{name: value for name, value in given.items() if value is not None}}


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
