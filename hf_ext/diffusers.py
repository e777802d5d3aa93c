"""Token fusion for Stable Diffusion: self-attention of a UNet on fewer tokens, everything else as it was.

Source: Token Merging for Fast Stable Diffusion (arXiv 2303.17604): fuse before self-attention, unmerge before the
residual is added. Operators and the paper's plan: ToFu (arXiv 2312.01026).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

try:
    from diffusers import UNet2DConditionModel
    from diffusers.models.attention import BasicTransformerBlock
    from diffusers.models.transformers.transformer_2d import Transformer2DModel
except ImportError as error:
    raise ImportError(
        f"hf_ext.diffusers needs diffusers>=0.42: pip install 'jumbo-vit[diffusion]' ({error})"
    ) from error

from jumbo_core import checks
from jumbo_core.tofu.matching import Matching
from jumbo_core.tofu.operators import NORMS, OPERATORS, fuse, unmerge
from jumbo_core.tofu.regions import check_ratio, count_for, match_to, region_destinations


@dataclass(frozen=True)
class BlockFusion:
    """Self-attention of the block ``name`` works on ``kept`` of ``tokens`` = height * width tokens.

    ``downsample`` says by how much the grid is coarser than the latents; ``op`` is None where nothing is fused.
    """

    name: str
    downsample: int
    op: str | None
    height: int
    width: int
    tokens: int
    kept: int


@dataclass(frozen=True)
class UNetFusionReport:
    """One :class:`BlockFusion` per transformer block, in the order they run."""

    blocks: list[BlockFusion]

    def __str__(self) -> str:
        return "\n".join(
            f"{b.name}: {b.height}x{b.width} (1/{b.downsample}), {b.tokens} -> {b.kept} tokens"
            + (f" ({b.op})" if b.op else "")
            for b in self.blocks
        )


class FusedUNet:
    """Handle of a fused UNet: ``unet`` is the one that was given, not a copy; call it, or its pipeline, as ever."""

    def __init__(self, unet: UNet2DConditionModel, blocks: list[_Block]) -> None:
        self.unet, self._blocks = unet, blocks

    def report(self, latents: int | Sequence[int] | None = None) -> UNetFusionReport:
        """Grid and tokens per block for latents of this size: an integer or (height, width).

        Default: the latest call's grids, before the first call those of ``unet.config.sample_size``.

        Raises:
            ValueError: nothing is known about the size; a grid that cannot spare what its ratio asks for.
        """
        if latents is None:
            if all(block.size for block in self._blocks):
                return UNetFusionReport([block.report(*block.size) for block in self._blocks])
            latents = self.unet.config.sample_size
            if latents is None:
                raise ValueError("give latents=(height, width): the UNet names no sample_size and was not called yet")
        height, width = checks.pair("latents", latents)
        padded = self.unet.config.downsample_padding > 0  # then odd sides are rounded up
        grids = ([_shrink(side, block.downsample, padded) for side in (height, width)] for block in self._blocks)
        return UNetFusionReport([block.report(*grid) for block, grid in zip(self._blocks, grids, strict=True)])

    def remove(self) -> UNet2DConditionModel:
        """Take the fusion out; the UNet is as before. Raises ValueError if it is not in."""
        return remove_tofu_from_unet(self.unet)


def apply_tofu_to_unet(
    unet,
    ratio: float | Mapping[int, float] = 0.5,
    *,
    op: str = "average",
    norm: str = "max",
    proportional: bool | None = None,
    region: int | Sequence[int] = (2, 2),
    seed: int = 0,
    max_downsample: int | None = None,
) -> FusedUNet:
    """Let the self-attention of a UNet's transformer blocks work on fewer tokens, without training.

    Before ``attn1`` of each chosen block its (normed) input is fused: one token per region stays as a destination, the
    share ``ratio`` of all tokens joins the most similar of those. Attention runs on what is left, its output is
    unmerged to the full grid and added to the residual as ever. Cross-attention, feed-forward, GLIGEN and adapters are
    not touched, any attention processor works, and so do all latent sizes. The destinations depend on ``seed``, the
    block and its grid alone: calls are repeatable, and the global random state is neither read nor changed. The UNet
    can be trained, deep-copied and pickled, fusion included; its state dict does not change. Compile after
    fusing: code compiled before does not notice. With gradient checkpointing, run backward before a call with latents
    of another shape, unlike without fusion: backward runs blocks again with the latest call's grid, which is an error,
    or unnoticed where both have the same area. Fused models, like these UNets, are for one thread at a time.

    Args:
        unet: a UNet2DConditionModel, or a pipeline that holds one as ``.unet``.
        ratio: share of tokens that leave, at most 1 - 1/(sy*sx). A number holds for the blocks chosen by
            ``max_downsample``; {downsample factor: ratio} gives each resolution its own. 0 leaves a block as it is, bit
            by bit.
        op: "average" (default), "mlerp" or "prune" in every fused block, see :func:`jumbo_core.tofu.fuse`; "paper":
            prune in the first half of the UNet's transformer blocks, MLERP in the others.
        norm: length of MLERP groups, "max" (default), "mean" and what else :func:`jumbo_core.tofu.fuse` offers.
        proportional: a token that stays weighs in attention as many as get its output, pruned ones included: the log of
            their number is added to the scores (GPU kernels that take no bias cannot be used then). Default: but in
            MLERP blocks; where members differ, MLERP's vectors are longer than the mean, and counting them overshoots.
        region: (sy, sx), or one number for both; each region keeps one token.
        seed: of the draw.
        max_downsample: with a single ratio, fuse blocks whose grid is at most this much coarser than the latents
            (1, 2, 4, 8 in most UNets). Default 1, the finest, where self-attention costs most.

    Raises:
        TypeError: an object that is no such UNet and holds none.
        ValueError: a ratio out of range, resolutions at which the UNet has no blocks, unknown options, a UNet that is
            fused or compiled already. During a call: a grid too small for its ratio, or an attention_mask for fused
            self-attention, which has no meaning for merged tokens.
    """
    unet = _unet_of(unet)
    if any(module._compiled_call_impl is not None for module in unet.modules()):
        raise ValueError("the UNet is compiled already and would not notice: fuse first, then compile")
    if op not in (*OPERATORS, "paper"):
        raise ValueError(f"op must be one of {', '.join(map(repr, OPERATORS))}, 'paper', got {op!r}")
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(map(repr, NORMS))}, got {norm!r}")
    if proportional is not None:
        checks.flag("proportional", proportional)
    sy, sx = checks.pair("region", region)
    seed = checks.integer("seed", seed, 0)
    found = list(_self_attention(unet))
    ratios = _ratios(ratio, max_downsample, sorted({downsample for _, downsample, _, _ in found}), (sy, sx))
    if _blocks(unet):
        raise ValueError("the UNet is fused already; call remove() on its handle, or remove_tofu_from_unet, first")

    seeds = torch.randint(2**31, (len(found),), generator=torch.Generator().manual_seed(seed)).tolist()
    blocks = []
    for i, (name, downsample, transformer, attention) in enumerate(found):
        chosen = op if op != "paper" else "prune" if i < len(found) // 2 else "mlerp"
        share = ratios.get(downsample, 0.0)
        weighed = chosen != "mlerp" if proportional is None else proportional
        block = _Block(name, downsample, share, chosen, norm, weighed, (sy, sx), seeds[i])
        block.handles.append(transformer.register_forward_pre_hook(block.see, with_kwargs=True))
        if share:
            block.handles.append(attention.register_forward_pre_hook(block.fuse, with_kwargs=True))
            block.handles.append(attention.register_forward_hook(block.unmerge))
        blocks.append(block)
    return FusedUNet(unet, blocks)


def remove_tofu_from_unet(unet) -> UNet2DConditionModel:
    """Take token fusion out of a UNet, or a pipeline's, copies and unpickled ones included; returns the UNet.

    Raises TypeError for an object that is no UNet2DConditionModel and holds none, ValueError if nothing is fused.
    """
    if not (blocks := _blocks(unet := _unet_of(unet))):
        raise ValueError("there is no token fusion in this UNet")
    for block in blocks:
        block.active = False  # compiled code watches this, not the hooks
        for handle in block.handles:
            handle.remove()
    return unet


class _Block:
    """The hooks of one transformer block, and the grid it saw last."""

    def __init__(
        self, name: str, downsample: int, ratio: float, op: str, norm: str, proportional: bool,
        region: tuple[int, int], seed: int,
    ) -> None:  # fmt: skip
        self.name, self.downsample, self.ratio, self.op, self.norm = name, downsample, ratio, op, norm
        self.proportional, self.region, self.seed = proportional, region, seed
        self.active = True
        self.size: tuple[int, int] | None = None
        self.matching: Matching | None = None  # between the two ends of self-attention
        self.handles: list[RemovableHandle] = []  # pickled as well: an unpickled UNet's hooks keep their numbers

    def __getstate__(self) -> dict:
        return {**self.__dict__, "matching": None}

    def report(self, height: int, width: int) -> BlockFusion:
        kept = height * width - count_for(self.ratio, height, width, region=self.region)
        op = self.op if self.ratio else None
        return BlockFusion(self.name, self.downsample, op, height, width, height * width, kept)

    def see(self, transformer: nn.Module, args: tuple, kwargs: dict) -> None:
        picture = args[0] if args else kwargs["hidden_states"]  # (B, C, H, W)
        self.size = (picture.shape[-2], picture.shape[-1])

    def fuse(self, attention: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if not self.active:
            return None
        tokens = args[0]
        if kwargs.get("attention_mask") is not None:
            what = f"{self.name} was given an attention_mask for its self-attention"
            raise ValueError(
                f"{what}: merged tokens have no place in it; call the UNet without it, or remove the fusion"
            )
        destinations = _draw(*self.size, *self.region, self.seed, tokens.device)
        self.matching = match_to(tokens, destinations, count_for(self.ratio, *self.size, region=self.region))
        tokens, _ = fuse(tokens, self.matching, self.op, norm=self.norm)
        if self.proportional:
            # Not fuse's sizes, which count no pruned tokens: here they come back, and the others need them meanwhile.
            place = self.matching.place
            ones = torch.ones_like(place, dtype=torch.float32)
            counts = ones.new_zeros(tokens.shape[:2]).scatter_add(1, place, ones)  # (B, K)
            kwargs = {**kwargs, "attention_mask": counts.log().to(tokens.dtype).unsqueeze(1)}  # added to the scores
        return (tokens, *args[1:]), kwargs

    def unmerge(self, attention: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor | None:
        if not self.active:
            return None
        matching, self.matching = self.matching, None
        return unmerge(output, matching)


# An operator of its own, because compilers cannot look into a generator.
@torch.library.custom_op("jumbo_vit::draw_destinations", mutates_args=())
def _draw(height: int, width: int, sy: int, sx: int, seed: int, device: torch.device) -> torch.Tensor:
    """The destinations of a block, each time the same."""
    own = torch.Generator().manual_seed(seed)
    return region_destinations(height, width, region=(sy, sx), generator=own).to(device)


@_draw.register_fake
def _(height, width, sy, sx, seed, device):
    return torch.empty(-(-height // sy) * -(-width // sx), dtype=torch.long, device=device)


def _unet_of(thing) -> UNet2DConditionModel:
    unet = getattr(thing, "unet", thing)
    if isinstance(unet, UNet2DConditionModel):
        return unet
    kind = f"a {type(thing).__name__}" + ("" if unet is thing else f" whose unet is a {type(unet).__name__}")
    if isinstance(getattr(unet, "_orig_mod", None), UNet2DConditionModel):
        kind += " (compiled already: fuse first, then compile)"
    raise TypeError(f"supported are diffusers' UNet2DConditionModel and pipelines that hold one as .unet, got {kind}")


def _self_attention(unet: UNet2DConditionModel):
    """(name of the block, downsample factor, its Transformer2DModel, its attn1), in the order they run."""
    names = {module: name for name, module in unet.named_modules()}
    downsample = 1
    for stage in filter(None, [*unet.down_blocks, unet.mid_block, *unet.up_blocks]):
        for transformer in (module for module in stage.modules() if isinstance(module, Transformer2DModel)):
            for block in transformer.transformer_blocks:
                # With only_cross_attention, attn1 looks at the prompt.
                if isinstance(block, BasicTransformerBlock) and not block.only_cross_attention:
                    yield names[block], downsample, transformer, block.attn1
        if getattr(stage, "downsamplers", None) is not None:
            downsample *= 2
        if getattr(stage, "upsamplers", None) is not None:
            downsample //= 2


def _ratios(ratio, max_downsample, present: list[int], region: tuple[int, int]) -> dict[int, float]:
    """Ratio of each downsample factor that is fused."""
    if isinstance(ratio, Mapping):
        if not ratio:
            raise ValueError("ratio must name at least one downsample factor, got an empty mapping")
        if max_downsample is not None:
            raise ValueError("max_downsample goes with a single ratio; a mapping names the factors itself")
        if absent := sorted(set(ratio) - set(present), key=str):
            raise ValueError(f"ratio names downsample factors {absent}; self-attention is at {present} in this UNet")
        return {factor: check_ratio(value, region, f"ratio at factor {factor}") for factor, value in ratio.items()}
    most = 1 if max_downsample is None else checks.integer("max_downsample", max_downsample)
    ratio = check_ratio(ratio, region)
    if not (chosen := [factor for factor in present if factor <= most]):
        what = f"no self-attention at downsample factors up to max_downsample={most}"
        raise ValueError(f"{what}; it is at {present} in this UNet")
    return dict.fromkeys(chosen, ratio)


def _blocks(unet: nn.Module) -> list[_Block]:
    """The fused blocks, found by their hooks: a copy has its own."""
    owners = (getattr(hook, "__self__", None) for m in unet.modules() for hook in m._forward_pre_hooks.values())
    return list(dict.fromkeys(owner for owner in owners if isinstance(owner, _Block)))


def _shrink(side: int, factor: int, padded: bool) -> int:
    while factor > 1:
        side, factor = (side + padded) // 2, factor // 2
    return side
