"""Masked patches: hide some, rebuild them from the rest, and take the encoder over to another task."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from jumbo_core.distill.masked import check_mask_ratio
from jumbo_core.jumbo import JumboOutput
from jumbo_core.models.released import LoadReport
from jumbo_core.models.series import num_patches, to_patches
from ts_ext.scaling import standardize

LARGE = 3.0  # visible deviations


class PretrainOutput(NamedTuple):
    """What a masked model gives back, in units of the visible values' deviation around their mean.

    loss: mean squared error over the observed steps of the masked patches; a window whose hidden values are more than
    three visible deviations large (root mean square) counts as if they were three, so that an outlier in a nearly flat
    window does not drown all others. reconstruction, target: (B, C, N, P). masked: (B, C, N), True = rebuilt without
    any of its steps being visible. blocks: only if asked for, see ``ts_ext.trunk.Encoded``.
    """

    loss: torch.Tensor
    reconstruction: torch.Tensor
    target: torch.Tensor
    masked: torch.Tensor
    blocks: tuple[JumboOutput, ...] = ()


class Hidden(NamedTuple):
    """visible (B, C, L): observed steps that the model may see. masked (B, C, N): patches left without one."""

    visible: torch.Tensor
    masked: torch.Tensor


def check_masking(mask_ratio: float, seq_len: int, patch_len: int, stride: int) -> float:
    """A share that hides at least one patch of a full window and can never hide all of its steps.

    Raises:
        ValueError: otherwise; the message says which ratio fits, or that patches should not overlap.
    """
    mask_ratio, count = check_mask_ratio(mask_ratio), num_patches(seq_len, patch_len, stride)
    own = sum(i * stride < seq_len for i in range(count))  # without a last patch that is padding alone
    cover, end = 0, 0  # the fewest patches that hold every step
    while end < seq_len:
        cover, end = cover + 1, min(end // stride, count - 1) * stride + patch_len
    hidden = round(mask_ratio * own)
    if not 0 < hidden < cover:
        raise ValueError(
            f"mask_ratio {mask_ratio} hides {hidden} of {own} patches (seq_len {seq_len}, patch_len {patch_len}, "
            f"stride {stride}): it must hide at least 1 and less than the {cover} that together hold every step; use "
            f"another ratio" + (f", or stride={patch_len}, where patches do not overlap" if stride < patch_len else "")
        )
    return mask_ratio


def hide_patches(
    observed: torch.Tensor,
    patch_len: int,
    stride: int,
    mask_ratio: float,
    *,
    together: bool = False,
    generator: torch.Generator | None = None,
) -> Hidden:
    """Draw ``round(mask_ratio * patches)`` patches of every channel and hide their steps in every patch that has them.

    Hiding is as if the steps had not been observed: with overlapping patches (``stride < patch_len``) the neighbours of
    a drawn patch lose steps too, so more than ``mask_ratio`` of the steps are hidden, and none leaks. The count is of
    the patches with observed steps; where nothing would stay visible (short or broken series) one patch is drawn, and
    where even that leaves nothing, none. A last patch that is padding alone is never drawn.

    Args:
        observed: bool (B, C, L).
        patch_len, stride, mask_ratio: P, S and the share.
        together: draw once per sample, for all channels. Default False: for every channel on its own.
        generator: of the draw, of any device. Default: torch's global generator of the device of ``observed``.
    """
    length = observed.shape[-1]
    own = _own_patches(observed, patch_len, stride)  # (B, C, N, P): steps of the window, padding is not observed
    candidates = own.any(dim=-1)
    if together:
        candidates = candidates.any(dim=1, keepdim=True)
    device = observed.device if generator is None else generator.device
    noise = torch.rand(candidates.shape, generator=generator, device=device).to(observed.device)
    rank = (noise + (~candidates).to(noise.dtype)).argsort(dim=-1).argsort(dim=-1)  # what can be drawn comes first
    count = (candidates.sum(dim=-1, keepdim=True) * mask_ratio).round()
    visible = observed & ~_steps_of(rank < count, length, patch_len, stride)
    for limit in (1, 0):  # where nothing is left to see: one patch, then none
        blind = ~visible.any(dim=-1, keepdim=True)
        blind = blind.any(dim=1, keepdim=True) if together else blind
        count = torch.where(blind, count.clamp(max=limit), count)
        visible = observed & ~_steps_of(rank < count, length, patch_len, stride)
    masked = own.any(dim=-1) & ~_own_patches(visible, patch_len, stride).any(dim=-1)
    return Hidden(visible, masked)


def _own_patches(mask: torch.Tensor, patch_len: int, stride: int) -> torch.Tensor:
    """(..., L) -> (..., N, P), padding False."""
    return F.pad(mask, (0, stride)).unfold(-1, patch_len, stride)


def _steps_of(patches: torch.Tensor, length: int, patch_len: int, stride: int) -> torch.Tensor:
    """Which steps the chosen patches hold: (..., N) bool -> (..., L) bool, in time that grows with L alone."""
    starts = torch.arange(patches.shape[-1], device=patches.device) * stride
    change = torch.zeros(*patches.shape[:-1], length + stride + 1, dtype=torch.int32, device=patches.device)
    change[..., starts] += patches.int()
    change[..., starts + patch_len] -= patches.int()
    return change.cumsum(dim=-1)[..., :length] > 0


def rebuild(
    trunk: nn.Module,
    head: nn.Module,
    x: torch.Tensor,
    observed: torch.Tensor | None,
    mask_ratio: float,
    generator: torch.Generator | None = None,
    *,
    every_block: bool = False,
) -> PretrainOutput:
    """Hide, encode what is left, rebuild: statistics and tokens know the visible values alone.

    Args:
        trunk, head: a SeriesTrunk and its PatchHead.
        x, observed: values (B, C, L) and which of them are observed, None = all.
        mask_ratio: share of patches to hide.
        every_block: give the blocks' tokens as well.
        generator: of the draw. Default: torch's global one in training, one that starts anew in eval mode.
    """
    series, everything = trunk.series, torch.ones_like(x, dtype=torch.bool) if observed is None else observed
    if generator is None and not trunk.training:
        generator = torch.Generator().manual_seed(0)
    hidden = hide_patches(
        everything, series.patch_len, series.stride, mask_ratio, together=trunk.mixing, generator=generator
    )
    if trunk.revin is None:
        normal, standard, masked = x.masked_fill(~hidden.visible, 0), x, hidden.masked
    else:
        normal, stats = trunk.revin.normalize(x, hidden.visible)
        standard, masked = standardize(x, stats), hidden.masked & (stats.std > 0)  # else there is no unit to compare in
    # Hidden patches are there, as zeros; missing ones are not.
    tokens, _ = trunk.embed(normal, observed, every_block=every_block)
    *blocks, tokens = tokens if every_block else [tokens]
    patches = head(tokens.patches)
    if trunk.mixing:
        patches = patches.unflatten(-1, (trunk.c_in, -1)).transpose(1, 2)  # (B, N, C*P) -> (B, C, N, P)
    else:
        patches = patches.unflatten(0, (-1, trunk.c_in))  # (B*C, N, P) -> (B, C, N, P)
    patches = patches.to(torch.promote_types(x.dtype, torch.float32))  # half precision has no digits for the loss
    out = reconstruction_loss(patches, standard, everything, masked, series.stride)
    return out._replace(blocks=tuple(blocks))


def reconstruction_loss(
    reconstruction: torch.Tensor, standard: torch.Tensor, observed: torch.Tensor, masked: torch.Tensor, stride: int
) -> PretrainOutput:
    """Compare patches (B, C, N, P) with the steps (B, C, L) they stand for, where masked, observed and no padding."""
    patch_len = reconstruction.shape[-1]
    counts = masked[..., None] & _own_patches(observed, patch_len, stride)
    if not torch.compiler.is_compiling() and not counts.is_meta and not counts.any():
        raise ValueError(
            f"no patch to rebuild in {masked.shape[0]} sample(s): every window has its observed values in one patch, "
            f"or a constant in what is visible; use fuller or longer windows, or shorter patches"
        )
    target = to_patches(standard.masked_fill(~observed, 0), patch_len, stride).to(reconstruction.dtype)
    error = (reconstruction - target).square() * counts
    size = (target.square() * counts).sum(dim=(-2, -1)) / counts.sum(dim=(-2, -1)).clamp(min=1)  # (B, C)
    error = error / (size / LARGE**2).clamp(min=1)[..., None, None]
    return PretrainOutput(error.sum() / counts.sum(), reconstruction, target, masked)


def load_encoder(model: nn.Module, source: str | Path | Mapping | nn.Module, *, strict: bool = True) -> LoadReport:
    """Embedding, positions, encoder and RevIN's affine of another model; see ``JumboPatchTST.load_pretrained``."""
    state = _read_state(source)
    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(("series.", "revin."))}
    found = {name: tensor for name, tensor in state.items() if name.startswith(("series.", "revin."))}
    ignored = sorted(name for name in state if name.startswith("head."))
    clash = [name for name in own if name in found and own[name].shape != found[name].shape]
    if clash:
        name = clash[0]
        raise ValueError(
            f"{len(clash)} of {len(own)} tensors of the encoder have another shape, the first is {name}: "
            f"{tuple(found[name].shape)} in the source, {tuple(own[name].shape)} here. Both models need the same "
            f"seq_len, patch_len, stride, channels, d_model, d_ff, multiplier, registers and norm"
        )
    missing = sorted(own.keys() - found.keys())
    unexpected = sorted(state.keys() - own.keys() - set(ignored))
    if len(missing) == len(own) or (strict and (missing or unexpected)):
        raise ValueError(
            f"the source does not fit: {len(missing)} of {len(own)} tensors of the encoder are missing {missing[:5]}, "
            f"{len(unexpected)} are unexpected {unexpected[:5]}"
            + ("; strict=False loads what fits and reports the rest" if len(missing) < len(own) else "")
        )
    model.load_state_dict({name: found[name] for name in own if name in found}, strict=False)
    return LoadReport(missing, unexpected, ignored)


def _read_file(path: str | Path) -> Mapping:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors and is not opened, since it could run code: save the state dict alone (in "
            f"fastai learner.save(…, with_opt=False)). {error}"
        ) from None


def _read_state(source: str | Path | Mapping | nn.Module) -> Mapping:
    """A state dict, from a model, a file (weights only) or a dict; {"model": …} is opened."""
    if isinstance(source, nn.Module):
        return source.state_dict()
    if isinstance(source, (str, Path)):
        if str(source).endswith(".safetensors"):
            from safetensors.torch import load_file

            source = load_file(source)
        else:
            source = _read_file(source)
    if not isinstance(source, Mapping):
        raise TypeError(f"expected a state dict, a file of one, or a model, got {type(source).__name__}")
    return source["model"] if isinstance(source.get("model"), Mapping) else source
