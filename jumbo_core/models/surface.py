"""The surface timm's users expect of a plain image model, for any encoder over patches and a global token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import PatchEmbed, trunc_normal_
from timm.models._features import feature_take_indices
from timm.models._input import update_model_args, update_model_input_size
from torch import nn

from jumbo_core import checks
from jumbo_core.dropout import Dropout
from jumbo_core.jumbo.dropping import random_keep, take_patches
from jumbo_core.jumbo.stack import BlockStack
from jumbo_core.models.positions import resample_positions

POOLS = ("jumbo", "token", "avg", "")


class PatchModel(nn.Module):
    """Patch embedding, positions, an encoder and a head; base of :class:`JumboViT` and :class:`AdventurerViT`.

    Args: see there. ``encoder`` is a :class:`BlockStack` of width ``embed_dim``.
    """

    def __init__(
        self,
        encoder: BlockStack,
        *,
        img_size: int | tuple[int, int],
        patch_size: int | tuple[int, int],
        in_chans: int,
        num_classes: int,
        global_pool: str | None,
        drop_rate: float,
        pos_drop_rate: float,
        patch_drop_rate: float,
        dynamic_img_size: bool,
        dynamic_img_pad: bool,
        init: str,
    ) -> None:
        super().__init__()
        if init not in ("released", "short"):
            raise ValueError(f"init must be 'released' or 'short', got {init!r}")
        img_size, patch_size = checks.pair("img_size", img_size), checks.pair("patch_size", patch_size)
        check_divides(img_size, patch_size, pad=dynamic_img_pad)
        self.in_chans = checks.integer("in_chans", in_chans)
        self.embed_dim = self.num_features = encoder.dim
        self.init = init
        self.img_size = img_size
        self.dynamic_img_size = checks.flag("dynamic_img_size", dynamic_img_size)
        self.dynamic_img_pad = checks.flag("dynamic_img_pad", dynamic_img_pad)
        self.patch_drop_rate = checks.rate("patch_drop_rate", patch_drop_rate)

        self.patch_embed = PatchEmbed(
            _round_up(img_size, patch_size),
            patch_size,
            self.in_chans,
            encoder.dim,
            strict_img_size=False,
            dynamic_img_pad=dynamic_img_pad,
        )
        self.pos_embed = nn.Parameter(torch.zeros(1, self.patch_embed.num_patches, encoder.dim))
        self.pos_drop = Dropout(pos_drop_rate)
        self.encoder = encoder
        self._describe_features()
        self.head_drop = Dropout(drop_rate)
        trunc_normal_(self.pos_embed, std=0.02)
        if init == "short":
            self.encoder.zero_jumbo_output()
        if global_pool is None:
            global_pool = "jumbo" if encoder.multiplier else "token"
        self.reset_classifier(num_classes, global_pool)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.encoder.blocks

    @property
    def norm(self) -> nn.Module:
        return self.encoder.norm

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens in front of the patches in ``forward_features``."""
        return self.encoder.num_prefix_tokens

    # --- forward ---

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, keep: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(B, C, H, W) -> (B, num_classes). ``mask`` and ``keep``: see :meth:`forward_features`."""
        x, mask = self.embed(x, mask, keep)
        return self.forward_head(self.encoder.forward_tokens(x, mask), mask=mask)

    def forward_features(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, keep: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normalised tokens (B, T, D), in the encoder's order; ``encoder.split`` parts them.

        Args:
            x: images (B, C, H, W).
            mask: (B, N) bool, True = real patch; padded patches have no influence on any other token.
            keep: long index (B, K) of the patches to use; the others are dropped before the first block.
        """
        return self.encoder.forward_tokens(*self.embed(x, mask, keep))

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Pool tokens (B, T, D) and classify; ``pre_logits=True`` stops before the classifier."""
        x = self.head_drop(self.pool(x, mask))
        return x if pre_logits else self.head(x)

    def pool(self, x: torch.Tensor, mask: torch.Tensor | None = None, pool_type: str | None = None) -> torch.Tensor:
        """Pooled vector of the tokens; the mean is over (real) patches only, never over other tokens.

        ``pool_type`` is one of the values of ``global_pool``, which is the default.
        """
        pool_type = self.global_pool if pool_type is None else pool_type
        self._check_pool(pool_type)
        if not pool_type:
            return x
        jumbo, patches = self.encoder.split(x)
        if pool_type == "token":
            return jumbo.flatten(1)
        if mask is None:
            mean = patches.mean(dim=1)
        else:
            real = mask.unsqueeze(-1).to(patches.dtype)
            mean = (patches * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)
        return mean if pool_type == "avg" else torch.cat([jumbo.flatten(1), mean], dim=1)

    def forward_intermediates(
        self,
        x: torch.Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        mask: torch.Tensor | None = None,
    ) -> Any:
        """Block outputs as timm gives them.

        Args:
            indices: the last n blocks if an int, all if None, these blocks if a list.
            return_prefix_tokens: pair every map with all tokens that are no patches, wherever they stand.
            norm: apply the final norm to every map.
            stop_early: do not run blocks after the last wanted one (implied by ``intermediates_only``).
            output_fmt: "NCHW" (B, D, h, w) or "NLC" (B, N, D).
            intermediates_only: return the maps alone instead of (final tokens, maps).
            mask: (B, N) bool, True = real patch.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        if self.training and self.patch_drop_rate and output_fmt == "NCHW":
            raise ValueError(
                f"maps have holes while patch_drop_rate is {self.patch_drop_rate}: set it to 0 or use output_fmt='NLC'"
            )
        take, last = _take_indices(len(self.blocks), indices)
        grid = self.grid_of(x.shape[-2:])
        patches, mask = self.embed(x, mask)
        stop = last + 1 if stop_early or intermediates_only else None
        tokens, collected = self.encoder(patches, mask, collect=take, stop=stop)
        maps = []
        for y in collected.values():
            y = self.norm(y) if norm else y
            _, patches = self.encoder.split(y)
            if output_fmt == "NCHW":
                patches = patches.transpose(1, 2).unflatten(2, grid).contiguous()
            maps.append((patches, self.encoder.without_patches(y)) if return_prefix_tokens else patches)
        return maps if intermediates_only else (self.norm(tokens), maps)

    def grid_of(self, image_size: Sequence[int]) -> tuple[int, int]:
        """Patch grid (h, w) of an image (H, W).

        Raises:
            ValueError: a side that the patch size does not divide (unless ``dynamic_img_pad``), or another size than
                ``img_size`` while ``dynamic_img_size`` is off.
        """
        size, patch = tuple(image_size), self.patch_embed.patch_size
        if not self.dynamic_img_size and size != self.img_size:
            raise ValueError(
                f"image is {size[0]}x{size[1]}, the model is for {self.img_size[0]}x{self.img_size[1]}; "
                f"use dynamic_img_size=True or set_input_size"
            )
        check_divides(size, patch, pad=self.dynamic_img_pad)
        return self.patch_embed.dynamic_feat_size(size)

    def embed(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        keep: torch.Tensor | None = None,
        *,
        replace: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Images (B, C, H, W) -> what the encoder takes: patches with positions (B, N, D), and their mask.

        Args:
            mask, keep: see :meth:`forward_features`.
            replace: (which (B, N) bool, token (D,)): the token stands in for these patches' embeddings, positions are
                added to it as to any other. For masked prediction; the length stays N.
        """
        if x.ndim != 4 or x.shape[1] != self.in_chans:
            raise ValueError(f"{type(self).__name__} expects images (B, {self.in_chans}, H, W), got {tuple(x.shape)}")
        grid = self.grid_of(x.shape[-2:])
        patches = self.patch_embed(x)  # (B, C, H, W) -> (B, N, D)
        for name, given in (("mask", mask), ("replace", None if replace is None else replace[0])):
            if given is not None and (given.shape != patches.shape[:2] or given.dtype != torch.bool):
                raise ValueError(
                    f"{name} must be bool (B, N) = {tuple(patches.shape[:2])}, got {given.dtype} {tuple(given.shape)}"
                )
        if replace is not None:
            patches = torch.where(replace[0][..., None], replace[1].to(patches.dtype), patches)
        patches = self.pos_drop(patches + resample_positions(self.pos_embed, self.patch_embed.grid_size, grid))
        rate = checks.rate("patch_drop_rate", self.patch_drop_rate)
        if keep is None and self.training and rate:
            keep = random_keep(*patches.shape[:2], rate, mask=mask, device=patches.device)
        if keep is not None:
            patches = take_patches(patches, keep)
            mask = None if mask is None else take_patches(mask, keep)
        return patches, mask

    # --- what timm's tools call ---

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        tokens = {"encoder.jumbo_token", "encoder.cls_token", "encoder.reg_token"}
        return {"pos_embed"} | {n for n, _ in self.named_parameters() if n in tokens}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return dict(
            stem=r"^(?:pos_embed|patch_embed|encoder\.(?:jumbo|cls|reg)_token)",
            # An unshared Jumbo FFN belongs to its block, the shared one to none: it counts as the last layer.
            blocks=[
                (r"^encoder\.(?:blocks|jumbo_mlp)\.(\d+)", None),
                (r"^encoder\.(?:norm|jumbo_mlp)", (99999,)),
            ],
        )

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.encoder.gradient_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """New head for ``num_classes`` (0 = none), initialised as the model was."""
        if global_pool is not None:
            self._check_pool(global_pool)
            self.global_pool = global_pool
            update_model_args(self, global_pool=global_pool)
        num_classes = checks.integer("num_classes", num_classes, 0)
        tokens = {"jumbo": self.encoder.multiplier + 1, "token": self.encoder.num_global_tokens}
        self.num_classes = num_classes
        self.head_hidden_size = self.embed_dim * tokens.get(self.global_pool, 1)
        self.head = nn.Identity()
        if num_classes:
            like = self.pos_embed
            self.head = nn.Linear(self.head_hidden_size, num_classes, device=like.device, dtype=like.dtype)
            init_head(self.head, self.init)
        self.head.train(self.training)
        self.encoder.freeze_unreachable({"avg": "patches", "token": "global"}.get(self.global_pool, "all"))

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Change the size the position table (and, if asked, the patch projection) is made for, by resampling."""
        img_size = checks.pair("img_size", img_size) if img_size is not None else self.img_size
        patch_size = checks.pair("patch_size", patch_size) if patch_size is not None else self.patch_embed.patch_size
        check_divides(img_size, patch_size, pad=self.dynamic_img_pad)
        old_grid = self.patch_embed.grid_size
        self.img_size = img_size
        self.patch_embed.set_input_size(img_size=_round_up(img_size, patch_size), patch_size=patch_size)
        self._describe_features()
        table = resample_positions(self.pos_embed.data, old_grid, self.patch_embed.grid_size)
        self.pos_embed = nn.Parameter(table, requires_grad=self.pos_embed.requires_grad)
        update_model_input_size(self, img_size, patch_size=self.patch_embed.patch_size)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Cut off the blocks after the last wanted one; the remaining Jumbo parts that maps cannot see are frozen."""
        take, last = _take_indices(len(self.blocks), indices)
        self.encoder.keep_blocks(last + 1)
        if prune_norm:
            self.encoder.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
            self.encoder.freeze_unreachable("patches")
        return take

    def _check_pool(self, pool: str) -> None:
        if pool not in POOLS or (pool == "jumbo" and not self.encoder.multiplier):
            raise ValueError(f"global_pool must be one of {POOLS} ('jumbo' needs multiplier > 0), got {pool!r}")

    def _describe_features(self) -> None:
        """timm's description of the maps: width and stride of every block."""
        step = self.patch_embed.patch_size
        reduction = step[0] if step[0] == step[1] else step
        self.feature_info = [
            dict(module=f"encoder.blocks.{i}", num_chs=self.embed_dim, reduction=reduction)
            for i in range(len(self.blocks))
        ]


def init_head(head: nn.Linear, init: str) -> None:
    """ "released": weight 0, bias -ln(classes). "short": weight trunc-normal 0.02, bias 0."""
    if init == "released":
        nn.init.zeros_(head.weight)
        nn.init.constant_(head.bias, -math.log(head.out_features))
    else:
        trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)


def check_divides(size: tuple[int, int], patch: tuple[int, int], *, pad: bool) -> None:
    """Whether the patch size divides an image (H, W); the error names both numbers."""
    for side, length, step in zip(("height", "width"), size, patch, strict=True):
        if length % step and not pad:
            raise ValueError(
                f"image {side} {length} is not a multiple of the patch size {step}; "
                f"resize to {max(1, round(length / step)) * step} or use dynamic_img_pad=True"
            )


def _take_indices(depth: int, indices: int | Sequence[int] | None) -> tuple[list[int], int]:
    if isinstance(indices, Sequence) and not indices:
        raise ValueError("indices must name at least one block, got none")
    return feature_take_indices(depth, indices)


def _round_up(size: tuple[int, int], patch: tuple[int, int]) -> tuple[int, int]:
    """The size after padding: the grid of the position table is the one the padded image has."""
    return tuple(math.ceil(length / step) * step for length, step in zip(size, patch, strict=True))
