"""What encoders with a global token have in common: a stack of blocks, a Jumbo FFN they may share, who reads what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from jumbo_core import checks
from jumbo_core.jumbo.shared import SharedPasses
from jumbo_core.jumbo.token import JumboFFN


class JumboOutput(NamedTuple):
    """jumbo (B, J, D): the J slices, or the class token (B, 1, D) when ``multiplier=0``. patches (B, N, D)."""

    jumbo: torch.Tensor
    patches: torch.Tensor


class BlockStack(nn.Module):
    """Base of :class:`JumboEncoder` and :class:`AdventurerEncoder`.

    A subclass sets ``blocks`` and ``norm``, runs them in ``forward(patches, mask, *, collect, stop)`` and says in
    ``split`` where global tokens and patches stand. Token tensors (B, T, D) hold both, in the subclass's order.

    Args:
        dim: patch width D.
        depth: number of blocks.
        multiplier: J, width of the global token in patches; 0 = a class token of width D.
        jumbo_mlp_ratio: hidden width of the Jumbo FFN over J*D.
        share_jumbo_ffn: one Jumbo FFN for all blocks, or one per block.
        proj_drop: dropout inside the Jumbo FFN.
    """

    # Parts of a block that change the global token alone, and those that change every other token alone.
    global_parts: tuple[str, ...] = ()
    patch_parts: tuple[str, ...] = ()

    def __init__(
        self, dim: int, depth: int, *, multiplier: int, jumbo_mlp_ratio: float, share_jumbo_ffn: bool, proj_drop: float
    ) -> None:
        super().__init__()
        self.dim, self.depth = checks.integer("dim", dim), checks.integer("depth", depth)
        self.multiplier = checks.integer("multiplier", multiplier, 0)
        self.share_jumbo_ffn = checks.flag("share_jumbo_ffn", share_jumbo_ffn)
        jumbo_mlp_ratio = checks.positive("jumbo_mlp_ratio", jumbo_mlp_ratio)
        proj_drop = checks.rate("proj_drop", proj_drop)
        self.num_global_tokens = self.multiplier or 1
        self._unreachable: list[str] = []  # names of the parameters that freeze_unreachable took out of training
        # Transformers flips these two on every module that has them; timm's set_grad_checkpointing sets the first.
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        if self.multiplier:
            self.jumbo_token = nn.Parameter(torch.zeros(1, self.multiplier, self.dim))
            # The shared FFN lives here and only here: a module that several blocks own has several names in a state
            # dict.
            make_ffn = partial(JumboFFN, self.dim, self.multiplier, jumbo_mlp_ratio, drop=proj_drop)
            self.jumbo_mlp = make_ffn() if share_jumbo_ffn else nn.ModuleList(make_ffn() for _ in range(self.depth))
        else:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, self.dim))

    def split(self, tokens: torch.Tensor) -> JumboOutput:
        """(B, T, D) -> global token and patches."""
        raise NotImplementedError

    def forward_tokens(self, patches: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """As ``forward``, but one normalised tensor (B, T, D) of all tokens in the encoder's order."""
        tokens, _ = self(patches, mask, collect=())  # called, not run: offloading hooks sit on calls
        return self.norm(tokens)

    def intermediates(
        self,
        patches: torch.Tensor,
        indices: Sequence[int],
        mask: torch.Tensor | None = None,
        *,
        norm: bool = False,
    ) -> list[JumboOutput]:
        """Outputs of the blocks named in ``indices`` (negative counts from the end), in the order asked for.

        Blocks after the last wanted one are not run. ``norm=True`` applies the final norm to each.
        """
        if not len(indices):
            raise ValueError("indices must name at least one block, got none")
        wanted = [resolve_index(i, len(self.blocks)) for i in indices]
        _, collected = self(patches, mask, collect=wanted, stop=max(wanted) + 1)
        return [self.split(self.norm(collected[i]) if norm else collected[i]) for i in wanted]

    def shared_passes(self, count: int) -> SharedPasses | None:
        """For a forward through ``count`` blocks; None where the FFN's gradient is better left to autograd."""
        ffn = self.jumbo_mlp if self.multiplier and self.share_jumbo_ffn else None
        return SharedPasses(ffn, count) if SharedPasses.serve(ffn, count) else None

    def run_block(
        self, index: int, tokens: torch.Tensor, context: Any, passes: SharedPasses | None = None
    ) -> torch.Tensor:
        """One block with its Jumbo FFN, checkpointed if that is on; ``context`` is its last argument."""
        # Its call, not the FFN itself: offloading hooks try to move every argument that has a device.
        ffn, block = self.ffn_of(index).__call__ if self.multiplier else None, self.blocks[index]
        if passes is not None:
            ffn = partial(ffn, passes=passes, index=index)
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(block.__call__, tokens, ffn, context)
        return block(tokens, ffn, context)

    def global_token(self, like: torch.Tensor) -> torch.Tensor:
        """The learned global token (B, J or 1, D) for patches ``like``."""
        token = self.jumbo_token if self.multiplier else self.cls_token
        return token.to(like.dtype).expand(like.shape[0], -1, -1)

    def ffn_of(self, block_index: int) -> nn.Module | None:
        """The Jumbo FFN that block runs with."""
        if not self.multiplier:
            return None
        return self.jumbo_mlp if self.share_jumbo_ffn else self.jumbo_mlp[block_index]

    def zero_jumbo_output(self) -> None:
        """Start with Jumbo FFNs that add nothing: part of ``init="short"``, which short runs want."""
        if self.multiplier:
            for name, parameter in self.jumbo_mlp.named_parameters():
                if name.endswith("fc2.weight"):
                    nn.init.zeros_(parameter)

    def keep_blocks(self, count: int) -> None:
        """Cut off every block after the first ``count``."""
        self.blocks = self.blocks[:count]
        if self.multiplier and not self.share_jumbo_ffn:
            self.jumbo_mlp = self.jumbo_mlp[:count]
        self.depth = count

    def freeze_unreachable(self, reads: str = "patches", *, blocks: int | None = None) -> None:
        """Take out of training what cannot reach what a head reads, and put back what an earlier call took out.

        In the last block the Jumbo FFN changes the Jumbo token alone and the MLP every other token alone. A head that
        reads one side only would leave the other without a gradient: weight decay would shrink it, and distributed
        training would wait for gradients that never come.

        Args:
            reads: "patches" (feature maps, patch mean), "global" (the global token alone) or "all".
            blocks: how many blocks are run; later ones are unreachable too. Default all.
        """
        if reads not in ("patches", "global", "all"):
            raise ValueError(f"reads must be 'patches', 'global' or 'all', got {reads!r}")
        depth = len(self.blocks)
        blocks = depth if blocks is None else checks.integer("blocks", blocks, 0)
        if blocks > depth:
            raise ValueError(f"blocks must be at most {depth}, the number there is, got {blocks}")
        parameters = dict(self.named_parameters())
        for name in self._unreachable:
            if name in parameters:
                parameters[name].requires_grad_(True)
        idle = [f"blocks.{i}." for i in range(blocks, depth)]
        ffn_runs = blocks  # blocks whose Jumbo FFN reaches the head
        if self.multiplier and blocks and reads != "all":
            parts = self.global_parts if reads == "patches" else self.patch_parts
            idle += [f"blocks.{blocks - 1}.{part}." for part in parts]
            ffn_runs -= reads == "patches"
        if self.multiplier and not self.share_jumbo_ffn:
            idle += [f"jumbo_mlp.{i}." for i in range(ffn_runs, depth)]
        elif self.multiplier and not ffn_runs:
            idle.append("jumbo_mlp.")
        if not blocks:
            idle += ["jumbo_token", "cls_token", "reg_token"]
        self._unreachable = [n for n, p in parameters.items() if n.startswith(tuple(idle)) and p.requires_grad]
        for name in self._unreachable:
            parameters[name].requires_grad_(False)

    @contextmanager
    def reading(self, reads: str) -> Iterator[None]:
        """:meth:`freeze_unreachable` for a while, for another reader than the model's own head; then as it was."""
        parameters, before = dict(self.named_parameters()), list(self._unreachable)
        self.freeze_unreachable(reads)
        try:
            yield
        finally:
            for name in self._unreachable:
                parameters[name].requires_grad_(True)
            for name in before:
                parameters[name].requires_grad_(False)
            self._unreachable = before


def check_mask(patches: torch.Tensor, mask: torch.Tensor) -> None:
    """A mask of patches is bool (B, N)."""
    if mask.dtype != torch.bool or mask.shape != patches.shape[:2]:
        raise ValueError(
            f"mask must be bool of shape (B, N) = {tuple(patches.shape[:2])} with True for real patches, "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )


def resolve_index(index: int, depth: int) -> int:
    """A block index with negatives counted from the end; IndexError names the range when it is outside."""
    if not -depth <= index < depth:
        raise IndexError(f"block index {index} is outside of a model with {depth} blocks ({-depth}..{depth - 1})")
    return index % depth


def rates_per_block(rates: Sequence[float], depth: int) -> list[float]:
    """Stochastic depth rates, checked: one per block, each in [0, 1)."""
    if len(rates) != depth:
        raise ValueError(f"drop_path has {len(rates)} rates for {depth} blocks; give one number or one per block")
    return [checks.rate("drop_path", rate) for rate in rates]
