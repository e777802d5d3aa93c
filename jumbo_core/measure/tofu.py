"""Token fusion in a plain ViT: how much of the multiply-adds that a plan saves comes out as time."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from functools import partial

import timm
import torch
from torch import nn

from jumbo_core.measure.report import command_line, environment, markdown_table
from jumbo_core.measure.turns import spread, take_turns
from jumbo_core.tofu import FusedModel, FusionPlan, apply_tofu, match, source_map
from jumbo_core.tofu.apply import fusion_report
from jumbo_core.tofu.compute import linear_weights
from jumbo_core.tofu.hosts import TimmHost

MODEL = "vit_base_patch16_224"
PLAIN, AGAIN, NOTHING = "no fusion", "no fusion, again", "r = 0"  # the second tells what a difference is worth
BOUND = "cut off unseen"  # as many tokens in each block, but the last ones leave: no choice, no fusing


def plans(depth: int, r: int) -> dict[str, tuple[FusionPlan, dict]]:
    """What is compared: plan and options of :func:`apply_tofu` by name."""
    return {
        NOTHING: (FusionPlan.uniform(depth, 0, "prune"), {}),
        "paper": (FusionPlan.paper(depth, r), {}),
        "prune": (FusionPlan.uniform(depth, r, "prune"), {}),
        "MLERP": (FusionPlan.uniform(depth, r, "mlerp"), {}),
        "average": (FusionPlan.uniform(depth, r, "average"), {}),
        "average, as ToMe": (FusionPlan.uniform(depth, r, "average"), dict(proportional=True, order="released")),
    }


def multiply_adds(model: nn.Module, plan: FusionPlan) -> int:
    """Multiply-adds of one image: patch projection, blocks as the plan leaves them, matching included, head."""
    patches = model.patch_embed.num_patches
    rest = patches * model.patch_embed.proj.weight.numel() + linear_weights(model.head)
    return rest + fusion_report(model, plan, patches).multiply_adds


@torch.inference_mode()
def cut_off(model: nn.Module, images: torch.Tensor, plan: FusionPlan) -> torch.Tensor:
    """Logits of the unfused blocks when each hands on as many tokens as under the plan, the last ones cut off.

    What fusion would cost if choosing and fusing were free: some of a block's time does not depend on its tokens.
    """
    x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    for block, r in zip(model.blocks, plan.resolve(model.patch_embed.num_patches)[0], strict=True):
        x = x + block.attn(block.norm1(x))
        x = x[:, : x.shape[1] - r]
        x = x + block.mlp(block.norm2(x))
    return model.forward_head(model.norm(x))


@torch.inference_mode()
def by_matrices(model: nn.Module, images: torch.Tensor, plan: FusionPlan, *, proportional=False, order="position"):
    """Logits of a fused model, the block written out and groups held as 0/1 matrices: what timed code must agree with.

    Only the choice of groups, :func:`match`, is shared with it.
    """
    x, sizes = model.norm_pre(model._pos_embed(model.patch_embed(images))), None
    for block, op, r in zip(model.blocks, plan.ops, plan.resolve(model.patch_embed.num_patches)[0], strict=True):
        attn = block.attn
        q, k, v = attn.qkv(block.norm1(x)).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, d)
        scores = q @ k.transpose(-2, -1) * attn.scale
        sizes = torch.ones_like(x[..., :1]) if sizes is None else sizes
        if proportional:
            scores = scores + sizes.log().transpose(1, 2)[:, None]
        x = x + attn.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        if r:
            matching = match(k, r, protected=model.num_prefix_tokens, order=order)
            own = nn.functional.one_hot(matching.kept, x.shape[1]).to(x)  # (B, K, T)
            group = own if op == "prune" else source_map(matching.place, matching.kept.shape[1]).to(x)
            if op == "mlerp":
                mean = group @ x
                longest = (group * x.norm(dim=-1)[:, None]).amax(-1, keepdim=True)
                x = mean / mean.norm(dim=-1, keepdim=True) * longest
            else:
                x = group @ (x * sizes) / (group @ sizes)
            sizes = group @ sizes
        x = x + block.mlp(block.norm2(x))
    return model.forward_head(model.norm(x))


class Stopwatch(TimmHost):
    """A timm host that adds up the milliseconds between a block's attention and its MLP: matching and fusing."""

    def __init__(self, handle: FusedModel) -> None:
        self.ms, self.start = 0.0, None
        for block in handle.model.blocks:
            block.forward.host = self

    def keys(self, block, output):
        self.start = time.perf_counter()
        return super().keys(block, output)

    def feed(self, block, tokens, *context, **options):
        if self.start is not None:
            self.ms += 1e3 * (time.perf_counter() - self.start)
            self.start = None
        return super().feed(block, tokens, *context, **options)


def share_of_fusion(model: nn.Module, plan: FusionPlan, options: dict, images: torch.Tensor, repeats: int) -> float:
    """Share of a fused model's time that goes into matching and fusing, median over the repeats."""
    watch, shares = Stopwatch(apply_tofu(model, plan, **options)), []
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            watch.ms, start = 0.0, time.perf_counter()
            model(images)
            if repeat:  # the first one warms caches up
                shares.append(watch.ms / (1e3 * (time.perf_counter() - start)))
    return statistics.median(shares)


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy of the model on the same parameters, to be fused in its own way."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in model.parameters()})


def check(model: nn.Module, image_size: int, cases: dict) -> None:
    """Raise RuntimeError unless r = 0 changes no bit and every plan agrees with :func:`by_matrices` in fp64."""
    image = torch.randn(1, 3, image_size, image_size)
    with torch.inference_mode():
        if not torch.equal(fused(model, *cases[NOTHING])(image), model(image)):
            raise RuntimeError("r = 0 changes the logits: nothing was timed")
        exact, image = copy.deepcopy(model).double(), image.double()
        for name, (plan, options) in cases.items():
            expected = by_matrices(exact, image, plan, **options)
            error = ((fused(exact, plan, options)(image) - expected).abs().max() / expected.abs().max()).item()
            if not error < 1e-9:
                raise RuntimeError(f"{name!r} is off its plain form by {error:.1e} of the logits: nothing was timed")


def fused(model: nn.Module, plan: FusionPlan, options: dict) -> nn.Module:
    """A copy of the model on the same parameters that follows the plan."""
    return apply_tofu(shared_copy(model), plan, **options).model


def measure(
    *, model: str = MODEL, r: int = 16, batches: Sequence[int] = (8, 1), repeats: int = 15, threads: int = 2
) -> dict:
    """Time and multiply-adds saved by r tokens a block, for several plans, in fp32 with random weights.

    Raises:
        RuntimeError: a fused model that does not compute what it should, see :func:`check`: nothing is timed then.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    plain = timm.create_model(model).eval()
    cases = plans(len(plain.blocks), r)
    size = plain.patch_embed.img_size[0]
    check(plain, size, cases)
    full, bound = multiply_adds(plain, cases[NOTHING][0]), cases["prune"][0]
    models = {PLAIN: plain, AGAIN: shared_copy(plain), BOUND: partial(cut_off, plain, plan=bound)}
    models |= {name: fused(plain, *case) for name, case in cases.items()}
    rows = []
    for batch in batches:
        images = torch.randn(batch, 3, size, size)
        times = take_turns({name: partial(m, images) for name, m in models.items()}, repeats)
        possible = spread(_saved(times[BOUND], times[PLAIN]))["median"]
        for name, values in times.items():
            left = full
            if name in cases or name == BOUND:
                left = multiply_adds(plain, bound if name == BOUND else cases[name][0])
            paired = _saved(values, times[PLAIN])
            row = {"batch": batch, "plan": name, "GMAC": round(left / 1e9, 2), "ms": spread(values)}
            if name != PLAIN:
                row["time_saved"] = spread(paired)
            if left < full:
                row["multiply_adds_saved"] = round(1 - left / full, 4)
                row["kept_of_the_saving"] = round(row["time_saved"]["median"] / (1 - left / full), 3)
                row["kept_of_the_possible"] = round(row["time_saved"]["median"] / possible, 3)
            if left < full and name != BOUND:
                watched = share_of_fusion(shared_copy(plain), *cases[name], images, repeats)
                row["matching_and_fusing"] = round(watched, 4)
            rows.append(row)
    return {
        "command": command_line(), "environment": environment(), "model": model, "image_size": size, "r": r,
        "dtype": "float32", "repeats": repeats, "rows": rows,
    }  # fmt: skip


def _saved(values: list[float], unfused: list[float]) -> list[float]:
    """Share of the unfused time saved, round by round."""
    return [1 - value / before for value, before in zip(values, unfused, strict=True)]


def table(result: dict) -> str:
    """The result as the README shows it."""
    return markdown_table(
        [
            "batch", f"plan, r = {result['r']}", "GMAC", "ms", "multiply-adds saved", "time saved",
            "time saved / multiply-adds saved", f"time saved / that of {BOUND!r}", "matching and fusing, of the time",
        ],
        [
            [
                row["batch"], row["plan"], f"{row['GMAC']:.2f}", f"{row['ms']['median']:.0f}",
                f"{100 * row['multiply_adds_saved']:.1f} %" if "multiply_adds_saved" in row else "-",
                f"{100 * row['time_saved']['median']:.1f} %" if "time_saved" in row else "-",
                f"{100 * row['kept_of_the_saving']:.0f} %" if "kept_of_the_saving" in row else "-",
                f"{100 * row['kept_of_the_possible']:.0f} %" if "kept_of_the_possible" in row else "-",
                f"{100 * row['matching_and_fusing']:.1f} %" if "matching_and_fusing" in row else "-",
            ]
            for row in result["rows"]
        ],
    )  # fmt: skip
