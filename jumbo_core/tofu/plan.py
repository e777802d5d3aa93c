"""How many tokens leave in which block, and by which operator: written down, counted, saved with a model.

Source: ToFu (arXiv 2312.01026): prune in the first half, MLERP in the rest, constant r; and its adaptive variant.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jumbo_core import checks
from jumbo_core.tofu.matching import largest_r
from jumbo_core.tofu.operators import OPERATORS

if TYPE_CHECKING:
    from jumbo_core.tofu.linearity import LinearityProfile


class Clamp(NamedTuple):
    """A block that could not remove as many tokens as the plan asks: half of its patches were left."""

    block: int
    asked: int
    possible: int


@dataclass(frozen=True)
class FusionPlan:
    """Per block, an operator and the number of tokens that leave between its attention and its MLP.

    Args:
        ops: one of "prune", "average", "mlerp" per block.
        counts: r per block, 0 for none.

    Raises:
        ValueError: unknown operator, a count that is no integer or negative, unequal lengths, no block at all.
    """

    ops: tuple[str, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if isinstance(self.ops, str) or len(self.ops) != len(self.counts) or not len(self.ops):
            raise ValueError(f"a plan needs one operator and one count per block, got {self.ops!r} and {self.counts!r}")
        for op in self.ops:
            _operator("ops", op)
        counts = tuple(checks.integer(f"counts[{i}]", count, 0) for i, count in enumerate(self.counts))
        object.__setattr__(self, "ops", tuple(self.ops))
        object.__setattr__(self, "counts", counts)

    @classmethod
    def paper(cls, depth: int, r: int) -> FusionPlan:
        """The paper's plan: prune in the first half of the blocks (6 of 12), MLERP in the rest, r in each."""
        depth = checks.integer("depth", depth)
        half = depth // 2
        return cls(("prune",) * half + ("mlerp",) * (depth - half), (r,) * depth)

    @classmethod
    def uniform(cls, depth: int, r: int, op: str) -> FusionPlan:
        """The same operator and the same r in every block."""
        depth = checks.integer("depth", depth)
        return cls((op,) * depth, (r,) * depth)

    @classmethod
    def from_profile(
        cls, profile: LinearityProfile, reduction: float = 0.35, *, tokens: int | None = None
    ) -> FusionPlan:
        """The adaptive plan: prune in the least linear half of the blocks, MLERP in the rest, a budget over all.

        The budget is in token-layers, patches times MLPs they pass: without fusion depth * N. Each block removes
        tokens in proportion to 1 / importance, at most half of the patches it sees, as few as reach ``reduction``.

        Args:
            profile: from :func:`linearity_profile`.
            reduction: share of the token-layers to save, in [0, 1). Default 0.35.
            tokens: number of patches N of the images the plan is for. Default: as in the profile.

        Raises:
            ValueError: ``reduction`` outside [0, 1), or more than halving in every block reaches (both are named).
        """
        reduction = checks.rate("reduction", reduction)
        tokens = profile.num_patches if tokens is None else checks.integer("tokens", tokens)
        depth = len(profile.linearity)
        straightest_last = sorted(range(depth), key=lambda i: (profile.linearity[i], i))
        pruned = set(straightest_last[: depth // 2])
        ops = tuple("prune" if i in pruned else "mlerp" for i in range(depth))
        # A block nothing depends on would get an infinite share; a millionth of the mean is as good as nothing.
        least = sum(profile.importance) / depth * 1e-6 or 1.0
        shares = [1 / max(value, least) for value in profile.importance]
        return cls(ops, tuple(_spread(tokens, shares, reduction)))

    def saved(self, num_patches: int) -> float:
        """Share of the token-layers (see :meth:`from_profile`) that the plan saves on N patches."""
        return 1 - sum(self.tokens_after(num_patches)) / (num_patches * len(self.counts))

    @classmethod
    def reaching(cls, make: Callable[[int], FusionPlan], reduction: float, tokens: int) -> FusionPlan:
        """Of the plans ``make(r)``, r = 0, 1, 2, …, the first that saves ``reduction`` of N patches' token-layers.

        For example ``reaching(lambda r: FusionPlan.paper(12, r), 0.35, 196)``: r = 11.

        Raises:
            ValueError: ``reduction`` outside [0, 1), or out of reach (both numbers are named).
        """
        reduction = checks.rate("reduction", reduction)
        tokens = checks.integer("tokens", tokens)
        for r in range(largest_r(tokens) + 1):
            if (plan := make(r)).saved(tokens) >= reduction:
                return plan
        raise ValueError(
            f"reduction={reduction} is out of reach: r={r}, half of {tokens} patches, saves "
            f"{plan.saved(tokens):.3f} of the token-layers"
        )

    def resolve(self, num_patches: int) -> tuple[list[int], list[Clamp]]:
        """Tokens that really leave in each block for N patches, and the blocks where that is less than asked.

        A block removes at most half of the patches it sees, rounded down: later blocks that cannot meet their count
        are capped there, as ToMe and the paper do.

        Raises:
            ValueError: a count above half of N, which no block could ever meet (asked and possible are named).
        """
        num_patches = checks.integer("num_patches", num_patches)
        left, real, clamps = num_patches, [], []
        for i, asked in enumerate(self.counts):
            if asked > largest_r(num_patches):
                raise ValueError(
                    f"block {i} is to remove {asked} tokens, but of {num_patches} patches at most "
                    f"{largest_r(num_patches)} can leave in one block: half of them"
                )
            if asked > (possible := largest_r(left)):
                clamps.append(Clamp(i, asked, possible))
            real.append(min(asked, possible))
            left -= real[-1]
        return real, clamps

    def tokens_after(self, num_patches: int) -> list[int]:
        """Patches that each block hands on, of N that come in. Raises as :meth:`resolve` does."""
        after = []
        for removed in self.resolve(num_patches)[0]:
            after.append((after[-1] if after else num_patches) - removed)
        return after

    def multiply_adds(
        self,
        num_patches: int,
        dim: int,
        *,
        prefix: int = 1,
        mlp_ratio: float = 4.0,
        attention_dim: int | None = None,
        key_dim: int = 0,
    ) -> int:
        """Multiply-adds that the plan leaves in the blocks of a plain ViT, for one image.

        With T tokens before and T' after fusion, widths D, A (of all heads together) and h (hidden), a block takes
        ``4 T D A`` for projections, ``2 T^2 A`` for scores and weighted sums and ``2 T' D h`` for the MLP. Matching by
        similarity adds ``sources * destinations * key_dim`` where tokens leave.

        Args:
            num_patches: N.
            dim: D.
            prefix: tokens in front of the patches. Default 1, a class token.
            mlp_ratio: h / D. Default 4.
            attention_dim: A. Default D.
            key_dim: width of one head's keys to count the matching too; 0 (default) leaves it out.
        """
        dim, prefix = checks.integer("dim", dim), checks.integer("prefix", prefix, 0)
        hidden = int(dim * checks.positive("mlp_ratio", mlp_ratio))
        attention_dim = dim if attention_dim is None else checks.integer("attention_dim", attention_dim)
        key_dim = checks.integer("key_dim", key_dim, 0)
        total, patches = 0, num_patches
        for removed in self.resolve(num_patches)[0]:
            before = patches + prefix
            total += 4 * before * dim * attention_dim + 2 * before * before * attention_dim
            if removed:
                total += (patches // 2) * (patches - patches // 2) * key_dim
            patches -= removed
            total += 2 * (patches + prefix) * dim * hidden
        return total

    def to_json(self, path: str | Path | None = None) -> str:
        """The plan as JSON; also written to ``path`` if one is given."""
        text = json.dumps({"ops": self.ops, "counts": self.counts})
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> FusionPlan:
        """Read what :meth:`to_json` wrote: the JSON text itself (it begins with a brace) or the path of a file.

        Raises:
            ValueError: no JSON, or other keys than "ops" and "counts".
            OSError: the file cannot be read.
        """
        content = read_json(source, ("ops", "counts"), "FusionPlan")
        return cls(_sequence("ops", content["ops"]), _sequence("counts", content["counts"]))


def read_json(source: str | Path, keys: Sequence[str], what: str) -> dict:
    """A JSON object with exactly ``keys``, from its text or from a file."""
    given = isinstance(source, str) and source.lstrip().startswith("{")
    where = f"the text of a {what}" if given else str(source)
    try:
        content = json.loads(source if given else Path(source).read_text(encoding="utf-8"))
    except ValueError as error:  # of the encoding, where the file is no text
        raise ValueError(f"{where} is no JSON: {error}. A {what} is read from what its to_json wrote") from None
    if not isinstance(content, dict) or set(content) != set(keys):
        found = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{where}: the JSON of a {what} is an object with the keys {sorted(keys)}, got {found}")
    return content


def _sequence(name: str, value) -> tuple:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list with one entry per block, got {value!r}")
    return tuple(value)


def _operator(name: str, op) -> str:
    if op not in OPERATORS:
        raise ValueError(f"{name} must be among {', '.join(map(repr, OPERATORS))}, got {op!r}")
    return op


def _spread(tokens: int, shares: Sequence[float], reduction: float) -> list[int]:
    """Counts in proportion to ``shares``, capped at half of what is left, that save at least ``reduction``."""
    goal = reduction * tokens * len(shares)

    def counts_at(scale: float) -> list[int]:
        left, counts = tokens, []
        for share in shares:
            counts.append(min(int(scale * share), largest_r(left)))
            left -= counts[-1]
        return counts

    def saved(counts: Sequence[int]) -> int:
        """Token-layers: who leaves in block i misses the MLPs of blocks i, i + 1, ..."""
        return sum(count * (len(shares) - i) for i, count in enumerate(counts))

    most = tokens / min(shares)  # every block is at its cap
    possible = saved(counts_at(most))
    if goal > possible:
        raise ValueError(
            f"reduction={reduction} is out of reach: halving in every block saves "
            f"{possible / (tokens * len(shares)):.3f} of the token-layers of {tokens} patches"
        )
    low, high = 0.0, most
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if saved(counts_at(middle)) >= goal else (middle, high)
    counts = counts_at(high) if goal else [0] * len(shares)
    # Several blocks may gain a token at the same scale: give back what is not needed, from the most important ones.
    for i in sorted(range(len(shares)), key=lambda i: shares[i]):
        while counts[i] and saved(counts) - (len(shares) - i) >= goal:
            counts[i] -= 1
    return counts
