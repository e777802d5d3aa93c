"""How straight the MLP of each block is, and how much hangs on its tokens: what an adaptive plan is made from.

Source: ToFu (arXiv 2312.01026): pruning suits blocks that are far from linear, merging those that are close to it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from jumbo_core import checks
from jumbo_core.modes import evaluating
from jumbo_core.tofu.apply import is_fused
from jumbo_core.tofu.hosts import FusionHost, host_of
from jumbo_core.tofu.importance import gradient_importance
from jumbo_core.tofu.outputs import first_output
from jumbo_core.tofu.plan import read_json

PAIRS = 256  # token pairs measured per batch and block


@dataclass(frozen=True)
class LinearityProfile:
    """Result of :func:`linearity_profile`, one number per block.

    Args:
        linearity: in (0, 1], 1 = the MLP is linear along straight paths.
        importance: |gradient x activation| of its patches, scaled to mean 1 over the blocks.
        num_patches: N of the images it was measured on.

    Raises:
        ValueError: unequal lengths, no block, values that are out of range or not finite.
    """

    linearity: tuple[float, ...]
    importance: tuple[float, ...]
    num_patches: int

    def __post_init__(self) -> None:
        linearity, importance = tuple(self.linearity), tuple(self.importance)
        if len(linearity) != len(importance) or not linearity:
            raise ValueError(
                f"a profile needs one linearity and one importance per block, "
                f"got {len(linearity)} and {len(importance)}"
            )
        if not all(0 < value <= 1 for value in linearity):
            raise ValueError(f"linearity must lie in (0, 1], got {linearity}")
        if not all(math.isfinite(value) and value >= 0 for value in importance):
            raise ValueError(f"importance must be finite and not negative, got {importance}")
        object.__setattr__(self, "linearity", linearity)
        object.__setattr__(self, "importance", importance)
        object.__setattr__(self, "num_patches", checks.integer("num_patches", self.num_patches))

    def to_json(self, path: str | Path | None = None) -> str:
        """The profile as JSON; also written to ``path`` if one is given."""
        text = json.dumps(asdict(self))
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> LinearityProfile:
        """Read what :meth:`to_json` wrote: the JSON text itself (it begins with a brace) or the path of a file."""
        return cls(**read_json(source, ("linearity", "importance", "num_patches"), "LinearityProfile"))

    def plot(self, path: str | Path) -> Path:
        """Draw linearity and importance over the blocks; the ending of ``path`` says which format (png, pdf, svg).

        Raises:
            ImportError: matplotlib is missing.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("LinearityProfile.plot needs matplotlib: pip install matplotlib") from None
        figure = Figure(figsize=(6, 5), layout="constrained")
        upper, lower = figure.subplots(2, sharex=True)
        blocks = range(len(self.linearity))
        upper.plot(blocks, self.linearity, marker="o")
        upper.set(ylabel="linearity of the MLP", title=f"{len(blocks)} blocks, {self.num_patches} patches")
        lower.bar(blocks, self.importance)
        lower.set(ylabel="importance (mean 1)", xlabel="block", xticks=list(blocks))
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        return path


def linearity_profile(
    model: nn.Module,
    batches: Iterable[torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
    *,
    steps: int = 8,
    seed: int = 0,
) -> LinearityProfile:
    """Measure a model on calibration data; it is left as it was, training mode, gradients and random state included.

    Linearity of block l, f its MLP and x_0 … x_s equally spaced on the straight line between the MLP inputs of two
    patches of different samples: ``||f(x_s) - f(x_0)|| / sum ||f(x_(t+1)) - f(x_t)||``, mean over 256 pairs per
    batch; 1 where f stands still. Importance: |gradient x activation| of the patches between attention and MLP, the
    loss being cross-entropy where labels are given, else half the squared output.

    Args:
        model: what :func:`apply_tofu` takes, not fused. Of several outputs the first counts.
        batches: images (B, C, H, W), or (images, labels (B,)); B at least 2, all of one size, on the model's device.
        steps: pieces of the path. Default 8; with 1 everything looks linear, so at least 2.
        seed: of the choice of pairs, drawn by a generator of its own. Default 0.

    Raises:
        TypeError: a model that no host knows.
            A model whose first output is no tensor.
        ValueError: no batch, a batch of one, images of several sizes, a fused model, one that was made under
            ``torch.inference_mode()`` (calling this function there is fine).
    """
    steps, host = checks.integer("steps", steps, 2), host_of(model)
    if is_fused(model):
        raise ValueError("profile the model before it is fused; call remove_tofu(model) first")
    if any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "the profile needs gradients, and this model was made under torch.inference_mode(): make or load it "
            "outside, or profile copy.deepcopy(model), copied outside"
        )
    generator = torch.Generator().manual_seed(seed)
    straight, important, count, patches = [], [], 0, None
    with evaluating(model):
        for batch in batches:
            images, labels = batch if isinstance(batch, (tuple, list)) else (batch, None)
            if len(images) < 2:
                raise ValueError("a calibration batch needs at least 2 samples: paths run between two of them")
            tokens, inputs, gradients = _record(model, host, images, labels)
            only = slice(host.mlp_prefix(model), inputs[0].shape[1] - host.mlp_suffix(model))
            if patches is not None and only.stop - only.start != patches:
                raise ValueError(f"batches of one size, please: {patches} patches, then {only.stop - only.start}")
            patches, count = only.stop - only.start, count + 1
            straight.append([])
            important.append([])
            for i, block in enumerate(host.blocks(model)):
                start, end = _pairs(inputs[i][:, only], generator)
                straight[-1].append(_straightness(host.mlp(block), start, end, steps))
                important[-1].append(gradient_importance(tokens[i], gradients[i])[:, only].mean().item())
    if not count:
        raise ValueError("no calibration batch was given")
    linearity = [sum(values) / count for values in zip(*straight, strict=True)]
    importance = [sum(values) / count for values in zip(*important, strict=True)]
    mean = sum(importance) / len(importance) or 1.0
    return LinearityProfile(tuple(linearity), tuple(value / mean for value in importance), patches)


def _record(model, host: FusionHost, images, labels) -> tuple[list, list, list]:
    """Per block: tokens in front of the MLP's norm, inputs of the MLP, gradients of the former."""
    tokens, inputs, handles = [], [], []
    try:
        for block in host.blocks(model):
            # Appended in the order the blocks run, each once per call.
            handles.append(host.mlp_norm(block).register_forward_pre_hook(lambda _, args: tokens.append(args[0])))
            handles.append(host.mlp(block).register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach())))
        # A caller's inference mode is left meanwhile, and clones of what was made in it may be differentiated.
        with torch.inference_mode(False), torch.enable_grad():
            # The input asks for gradients, so that a model whose parameters are all frozen has some too.
            output = first_output(model(images.detach().clone().requires_grad_(True)))
            if labels is None:
                loss = output.float().square().sum() / 2
            else:
                loss = F.cross_entropy(output.float(), labels.clone(), reduction="sum")
            gradients = torch.autograd.grad(loss, tokens)
    finally:
        for handle in handles:
            handle.remove()
    return [t.detach() for t in tokens], inputs, list(gradients)


def _pairs(x: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, N, D) -> two (PAIRS, D): random tokens, the second of each pair from another sample."""
    batch, tokens, _ = x.shape
    first = torch.randint(batch, (PAIRS,), generator=generator)
    second = (first + torch.randint(1, batch, (PAIRS,), generator=generator)) % batch
    places = torch.randint(tokens, (2, PAIRS), generator=generator)
    return x[first, places[0]], x[second, places[1]]


@torch.no_grad()
def _straightness(mlp: nn.Module, start: torch.Tensor, end: torch.Tensor, steps: int) -> float:
    """Mean over pairs of chord over path; 1 where the path has no length."""
    share = torch.linspace(0, 1, steps + 1, device=start.device, dtype=start.dtype).view(-1, 1, 1)
    path = mlp(torch.lerp(start, end, share)).double()  # (steps + 1, pairs, D)
    chord = (path[-1] - path[0]).norm(dim=-1)
    length = path.diff(dim=0).norm(dim=-1).sum(0)
    ratio = torch.where(length > 0, chord / torch.where(length > 0, length, 1), 1)
    return ratio.clamp(max=1).mean().item()  # rounding may lift a straight path above 1
