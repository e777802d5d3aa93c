"""Adventurer: a causal linear-time mixer made to see an image both ways, and our Jumbo-linear variant of it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

import torch
from timm.layers import DropPath, SwiGLU, trunc_normal_
from torch import nn

from jumbo_core import checks
from jumbo_core.dropout import replace_dropouts
from jumbo_core.jumbo.stack import BlockStack, JumboOutput, check_mask, rates_per_block
from jumbo_core.jumbo.token import join_slices, split_slices
from jumbo_core.linear.feed import feed_in_parts, feeds_in_parts, with_heading
from jumbo_core.linear.mamba2 import Mamba2Mixer
from jumbo_core.linear.running import runs
from jumbo_core.modes import hooked, recorded


class Padding(NamedTuple):
    """Where padded patches go: to the front of the sequence, where a causal mixer has not begun yet.

    order, back (B, N): index that sorts patches so, and its inverse. flip (B, T): index that reverses the real patches
    in place. real (B, T): which tokens are real. insert, remove (B, T+1) and (B, T): index that puts the heading token,
    first in [heading | tokens], right before the first real patch, and the one that takes it out again.
    """

    order: torch.Tensor
    back: torch.Tensor
    flip: torch.Tensor
    real: torch.Tensor
    insert: torch.Tensor
    remove: torch.Tensor


class AdventurerBlock(nn.Module):
    """Mamba-2 over [mean of all tokens | patches | global tokens], then a feed-forward network.

    With h the tokens and g the J slices joined (Adventurer, released code; ``multiplier > 0`` is ours)::

        u = norm(h)
        h = h + mixer([mean(u) ; u])[1:]      # heading average: the causal mixer starts from a summary of the image
        p = p + mlp(norm_mlp(p))              # SwiGLU; the class token goes through it as well
        g = g + jumbo_ffn(norm3(g))           # instead of the class token, with multiplier > 0

    Whether patches run forwards or reversed is the encoder's business.

    Args:
        dim: token width D.
        multiplier: J, number of slices at the end of the sequence; 0 = one class token there.
        mlp_ratio: hidden width of the SwiGLU over D. Default 2.5.
        drop_path, proj_drop: stochastic depth and dropout inside the SwiGLU. Default 0.
        norm_eps: epsilon of the RMSNorms. Default 1e-5.
        **mixer: options of :class:`Mamba2Mixer`.
    """

    def __init__(
        self,
        dim: int,
        *,
        multiplier: int = 0,
        mlp_ratio: float = 2.5,
        drop_path: float = 0.0,
        proj_drop: float = 0.0,
        norm_eps: float = 1e-5,
        **mixer,
    ) -> None:
        super().__init__()
        self.multiplier = multiplier
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.mixer = Mamba2Mixer(dim, norm_eps=norm_eps, **mixer)
        self.norm_mlp = nn.RMSNorm(dim, eps=norm_eps)
        self.mlp = SwiGLU(dim, int(dim * mlp_ratio), drop=proj_drop)
        if multiplier:
            self.norm3 = nn.RMSNorm(dim * multiplier, eps=norm_eps)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(
        self,
        h: torch.Tensor,
        jumbo_ffn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        padding: Padding | None = None,
    ) -> torch.Tensor:
        """(B, N + globals, D) -> the same; global tokens last."""
        return self.feed(self.mix(h, padding), jumbo_ffn)

    def mix(self, h: torch.Tensor, padding: Padding | None = None) -> torch.Tensor:
        """The first half, the mixer with its residual: a new tensor of the shape of ``h``."""
        if padding is None:
            u = with_heading(h, self.norm)
            if runs(h) and type(self.mixer) is Mamba2Mixer and not hooked(self.mixer) and not self.drop_path.training:
                return self.mixer.add_to(h, u)
            y = self.mixer(u)[:, 1:]
        else:
            u = self.norm(h)
            real = padding.real[..., None].to(u.dtype)
            mean = (u * real).sum(dim=1, keepdim=True) / real.sum(dim=1, keepdim=True)
            mask = torch.cat([padding.real.new_ones(len(u), 1), padding.real], dim=1)
            sequence = _take(torch.cat([mean, u], dim=1), padding.insert)
            y = _take(self.mixer(sequence, mask.gather(1, padding.insert)), padding.remove)
        return h + self.drop_path(y)

    def feed(self, h: torch.Tensor, jumbo_ffn: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        """The second half, the feed-forward networks; overwrites ``h`` when gradients are off."""
        # h is the first half's own result: nobody else holds it but hooks that are given parts of it.
        in_place = not (recorded() or hooked(self.norm_mlp, self.mlp, *([self.norm3] if self.multiplier else [])))
        patches, slices = h, None
        if self.multiplier:  # split: one gradient for both parts
            patches, slices = h.split([h.shape[1] - self.multiplier, self.multiplier], dim=1)
        if slices is not None:
            g = join_slices(slices)  # (B, J, D) -> (B, J*D)
            g = split_slices(self.drop_path(jumbo_ffn(self.norm3(g))), self.multiplier)
            slices = slices.add_(g) if in_place else slices + g
        if in_place and feeds_in_parts(patches, self.norm_mlp, self.mlp) and not self.drop_path.training:
            feed_in_parts(patches, self.norm_mlp, self.mlp)
            return h
        update = self.drop_path(self.mlp(self.norm_mlp(patches)))
        patches = patches.add_(update) if in_place else patches + update
        return h if in_place else patches if slices is None else torch.cat([patches, slices], dim=1)


class AdventurerEncoder(BlockStack):
    """Linear-time encoder: patches (B, N, D) -> global token and patches, in time and memory linear in N.

    ``multiplier=0`` is Adventurer (released code): a class token stands last and is never reversed. ``multiplier=J``
    above 0 is Jumbo-linear, **our own combination, not from a paper**: J slices of a Jumbo token stand there instead,
    and are joined for one wide FFN that all blocks share, as in :class:`JumboEncoder`.

    Tokens run ``[patches | class token or J slices]``; the position table belongs to the embedding in front.

    Args:
        dim: patch width D.
        depth: number of blocks.
        flip: blocks that see the patches reversed: "alternate" (paper; blocks 1, 3, 5, …, the default) or their
            indices, (2, 3) for the released weights.
        multiplier: J. Default 0.
        d_state, head_dim, expand, conv_kernel, chunk_size, backend: see :class:`Mamba2Mixer`.
        mlp_ratio: hidden width of the SwiGLU over D. Default 2.5.
        jumbo_mlp_ratio, share_jumbo_ffn: see :class:`JumboEncoder`. Default 4 and True.
        drop_path: a number p for the released rule (block i gets entry i of ``[0] + linspace(0, p, depth)``, so the
            last block stays one step below p), or one rate per block. Default 0.
        proj_drop: dropout inside the FFNs. Default 0.
        norm_eps: RMSNorm epsilon. Default 1e-5.

    Raises:
        ValueError: an option out of range; a head size that does not divide ``expand * dim``.
        IndexError: a block in ``flip`` that the depth does not have.
    """

    global_parts = ("norm3",)
    patch_parts = ("norm_mlp", "mlp")
    registers = 0
    num_prefix_tokens = 0  # global tokens stand behind the patches

    def __init__(
        self,
        dim: int,
        depth: int,
        *,
        flip: str | Sequence[int] = "alternate",
        multiplier: int = 0,
        d_state: int = 64,
        head_dim: int = 64,
        expand: float = 2,
        conv_kernel: int = 4,
        mlp_ratio: float = 2.5,
        jumbo_mlp_ratio: float = 4.0,
        share_jumbo_ffn: bool = True,
        drop_path: float | Sequence[float] = 0.0,
        proj_drop: float = 0.0,
        norm_eps: float = 1e-5,
        chunk_size: int | str = "auto",
        backend: str = "auto",
    ) -> None:
        super().__init__(
            dim,
            depth,
            multiplier=multiplier,
            jumbo_mlp_ratio=jumbo_mlp_ratio,
            share_jumbo_ffn=share_jumbo_ffn,
            proj_drop=proj_drop,
        )
        self.set_flip(flip)
        if not isinstance(drop_path, Sequence):
            peak = checks.rate("drop_path", drop_path)
            drop_path = [0.0, *torch.linspace(0, peak, self.depth, device="cpu").tolist()][: self.depth]
        self.blocks = nn.ModuleList(
            AdventurerBlock(
                dim,
                multiplier=multiplier,
                mlp_ratio=checks.positive("mlp_ratio", mlp_ratio),
                drop_path=rate,
                proj_drop=proj_drop,
                norm_eps=checks.positive("norm_eps", norm_eps),
                d_state=d_state,
                head_dim=head_dim,
                expand=expand,
                conv_kernel=conv_kernel,
                chunk_size=chunk_size,
                backend=backend,
            )
            for rate in rates_per_block(drop_path, self.depth)
        )
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        replace_dropouts(self)
        self.reset_parameters()

    def set_flip(self, flip: str | Sequence[int]) -> None:
        """Choose the blocks that see the patches reversed, see the class's ``flip``."""
        if isinstance(flip, str):
            if flip != "alternate":
                raise ValueError(f"flip must be 'alternate' or a sequence of block indices, got {flip!r}")
            self.flip, self.flipped = flip, frozenset(range(1, self.depth, 2))
            return
        if not isinstance(flip, Iterable):
            raise ValueError(f"flip must be 'alternate' or a sequence of block indices, got {flip!r}")
        indices = tuple(checks.integer("flip", i, 0) for i in flip)
        if any(i >= self.depth for i in indices):
            raise IndexError(f"flip {indices} names a block outside of 0..{self.depth - 1}")
        if len(set(indices)) != len(indices):
            raise ValueError(f"flip {indices} names a block twice")
        self.flip, self.flipped = indices, frozenset(indices)

    def reset_parameters(self) -> None:
        """Matrices and tokens from a truncated normal of 0.02, biases 0; convolution and decay as Mamba-2 has them."""
        for name, parameter in self.named_parameters():
            if ".conv1d." in name:
                continue  # torch's default, of its bias too
            if parameter.ndim > 1:
                trunc_normal_(parameter, std=0.02)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)

    def forward(
        self,
        patches: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        collect: Container[int] | None = None,
        stop: int | None = None,
    ) -> JumboOutput | tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Encode patches (B, N, D); ``mask`` (B, N) bool, True = real. Padding changes nothing; its output is 0.

        With ``collect``, a set of block indices, nothing is normalised or split: the return value is the tokens
        (B, N + globals, D) after the first ``stop`` blocks (default all) and the outputs of the blocks in ``collect``.
        """
        if patches.ndim != 3 or patches.shape[-1] != self.dim or not patches.shape[1]:
            raise ValueError(f"AdventurerEncoder expects patches (B, N, {self.dim}), got {tuple(patches.shape)}")
        padding = None if mask is None else self._padding(patches, mask)
        if padding is not None:
            patches = _take(patches.masked_fill(~mask[..., None], 0), padding.order)
        tokens = torch.cat([patches, self.global_token(patches)], dim=1)
        reverse = self._reversal if padding is None else lambda _: padding.flip
        collected, reversed_now, blocks = {}, False, range(len(self.blocks[:stop]))
        passes = self.shared_passes(len(blocks))
        for i in blocks:
            # Tokens stay as the last block left them: one reversal where the direction changes, not two per block.
            if reversed_now != (i in self.flipped):
                tokens, reversed_now = _take(tokens, reverse(tokens)), not reversed_now
            tokens = self.run_block(i, tokens, padding, passes)
            if collect is not None and i in collect:
                collected[i] = self._in_order(tokens, reverse(tokens) if reversed_now else None, padding)
        tokens = self._in_order(tokens, reverse(tokens) if reversed_now else None, padding)
        return self.split(self.norm(tokens)) if collect is None else (tokens, collected)

    def split(self, tokens: torch.Tensor) -> JumboOutput:
        """(B, N + globals, D) -> global token and patches."""
        return JumboOutput(tokens[:, -self.num_global_tokens :], tokens[:, : -self.num_global_tokens])

    def without_patches(self, tokens: torch.Tensor) -> torch.Tensor:
        """Every token that is no patch (B, globals, D)."""
        return tokens[:, -self.num_global_tokens :]

    def _reversal(self, tokens: torch.Tensor) -> torch.Tensor:
        """Index (T,) that reverses the patches of ``tokens``, fewer where fusion took some, but no global token."""
        index = torch.arange(tokens.shape[1], device=tokens.device)
        count = self.num_global_tokens
        return torch.cat([index[:-count].flip(0), index[-count:]])

    def _padding(self, patches: torch.Tensor, mask: torch.Tensor) -> Padding:
        check_mask(patches, mask)
        batch, n = mask.shape
        order = mask.to(torch.uint8).argsort(dim=1, stable=True)  # padding first, real patches in their order
        count = (~mask).sum(dim=1, keepdim=True)  # padded patches of each sample (B, 1)
        at = torch.arange(n + self.num_global_tokens, device=mask.device).expand(batch, -1)
        flip = torch.where((at >= count) & (at < n), count + n - 1 - at, at)
        long = torch.arange(n + self.num_global_tokens + 1, device=mask.device).expand(batch, -1)
        insert = torch.where(long < count, long + 1, torch.where(long == count, 0, long))
        remove = torch.where(at < count, at, at + 1)
        return Padding(order, order.argsort(dim=1), flip, at >= count, insert, remove)

    def _in_order(self, tokens: torch.Tensor, reverse: torch.Tensor | None, padding: Padding | None) -> torch.Tensor:
        """Tokens as the caller ordered them: forwards, and padding where it was, set to 0."""
        tokens = tokens if reverse is None else _take(tokens, reverse)
        if padding is None:
            return tokens
        tokens = tokens.masked_fill(~padding.real[..., None], 0)
        n = padding.order.shape[1]
        return torch.cat([_take(tokens[:, :n], padding.back), tokens[:, n:]], dim=1)


def _take(tokens: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Tokens (B, T, D) by index (K,) for all samples or (B, K) for each -> (B, K, D)."""
    if index.ndim == 1:
        return tokens.index_select(1, index)
    return tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[-1]))
