"""Token fusion on a trained MNIST ViT, without training: every operator and plan at the same multiply-adds.

    python -m benchmarks.tofu_mnist --data ../shared/data/vit_mnist --out docs/results/tofu_mnist.json [--quick]

The model (depth 6, 49 patches) comes with the 10,000 MNIST test images only. A fixed 500 of them, drawn with seed 0,
are set apart: the adaptive plans are made on these (images only, no labels), and accuracy is counted on the other
9,500, which no choice has seen. Every r is a number of tokens per block; the adaptive plans spread the same
multiply-adds as they like, and the searched one also chooses operators and apply_tofu's options. An interrupted command
picks up at the first run that is not in the file; speed is measured anew at the end of each.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from tqdm import tqdm

from benchmarks import outputs
from jumbo_core.measure import ResultFile, environment, markdown_table
from jumbo_core.measure.tofu import fused
from jumbo_core.measure.turns import median_ms
from jumbo_core.tofu import FusionPlan, apply_tofu, linearity_profile
from jumbo_core.tofu.apply import fusion_report
from jumbo_core.tofu.search import search_plan

# What apply_tofu may be told; the search chooses among them on the calibration images.
OPTIONS = [
    dict(importance=importance, proportional=proportional)
    for importance in ("similarity", "attention")
    for proportional in (False, True)
]
# Constant r in every block; options of apply_tofu that differ from its defaults.
CONSTANT: dict[str, tuple[Callable[[int, int], FusionPlan], dict]] = {
    "average": (partial(FusionPlan.uniform, op="average"), {}),
    "average, proportional": (partial(FusionPlan.uniform, op="average"), {"proportional": True}),
    "MLERP (max)": (partial(FusionPlan.uniform, op="mlerp"), {}),
    "MLERP (mean)": (partial(FusionPlan.uniform, op="mlerp"), {"norm": "mean"}),
    "prune": (partial(FusionPlan.uniform, op="prune"), {}),
    "paper": (FusionPlan.paper, {}),
}
ADAPTIVE = ("adaptive, from the profile", "adaptive, searched")
UNFUSED = "no fusion"


def load(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The test set, images (n, 1, 28, 28) as the model wants them and labels (n,)."""
    pixels, labels = (folder / f"t10k-{name}.gz" for name in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    if not pixels.is_file():
        raise FileNotFoundError(f"no {pixels}: --data is the folder with model.safetensors and MNIST's t10k files")
    images = np.frombuffer(gzip.decompress(pixels.read_bytes()), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    classes = np.frombuffer(gzip.decompress(labels.read_bytes()), np.uint8, offset=8)
    return (torch.tensor(images).float() / 255 - 0.1307) / 0.3081, torch.tensor(classes).long()


def load_model(folder: Path) -> VisionTransformer:
    """The trained ViT: width 64, 4 heads of 64."""
    model = VisionTransformer(
        img_size=28, patch_size=4, in_chans=1, num_classes=10, embed_dim=64, depth=6, num_heads=4, mlp_ratio=2,
        qkv_bias=False, act_layer=nn.ReLU, norm_layer=partial(nn.LayerNorm, eps=1e-5), attn_layer=WideAttention,
    )  # fmt: skip
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


class WideAttention(Attention):
    """timm's attention with heads as wide as the model."""

    def __init__(self, dim: int, **options) -> None:
        super().__init__(dim, **options, attn_head_dim=64)


class Comparison:
    """Plans compared on one classifier at equal multiply-adds.

    Args:
        model: (B, C, H, W) -> logits, as :func:`apply_tofu` takes it.
        calibration: images that the adaptive plans are made on.
        images, labels: that accuracy is counted on.
        rest: multiply-adds outside the blocks.
        batch: images per call.
        constant, options: plans with the same r in every block and what the search chooses among. Default: all of them,
            which needs attention.
    """

    def __init__(
        self, model, calibration, images, labels, *, rest: int, batch: int, constant=CONSTANT, options=OPTIONS
    ) -> None:
        self.model, self.calibration, self.images, self.labels = model, calibration, images, labels
        self.constant, self.options = constant, options
        self.rest, self.batch, self.depth = rest, batch, len(model.blocks)
        self.patches = model.patch_embed.num_patches
        self.unfused = FusionPlan.uniform(self.depth, 0, "prune")

    def multiply_adds(self, plan: FusionPlan) -> int:
        return self.rest + fusion_report(self.model, plan, self.patches).multiply_adds

    @torch.inference_mode()
    def score(self, plan: FusionPlan, options: dict, before: str | None = None) -> dict:
        """Accuracy in percent; points lost to ``before``, which tells the right answers, and their standard error."""
        handle = apply_tofu(self.model, plan, **options)
        try:
            logits = torch.cat([self.model(images) for images in self.images.split(self.batch)])
        finally:
            handle.remove()
        right = logits.argmax(-1) == self.labels
        result = {
            "ops": plan.ops, "counts": plan.counts, "options": options, "accuracy": 100 * right.double().mean().item(),
            "multiply_adds": self.multiply_adds(plan),
        }  # fmt: skip
        if before is None:
            return {**result, "right": "".join(map(str, right.int().tolist()))}
        difference = torch.tensor([int(c) for c in before]) - right.int()  # 1 lost, -1 won
        error = difference.double().std().item() / len(right) ** 0.5
        return {**result, "lost": 100 * difference.double().mean().item(), "standard_error": 100 * error}

    def profile(self):
        return linearity_profile(self.model, self.calibration.split(self.batch))

    def matched(self, profile, budget: int) -> FusionPlan:
        """The plan of the profile that saves least among those within the budget of multiply-adds."""
        plans = (FusionPlan.from_profile(profile, step / 400) for step in range(400))
        return next(plan for plan in plans if self.multiply_adds(plan) <= budget)

    def search(self, starts: list[FusionPlan], budget: int) -> dict:
        # Small batches: a plan that is worse than the best so far is dropped between two of them.
        batches = self.calibration.split(self.batch // 4)
        found = search_plan(self.model, batches, starts, budget=budget - self.rest, options=self.options)
        return {
            "ops": found.plan.ops, "counts": found.plan.counts, "options": found.options, "loss": found.loss,
            "start_loss": found.start_loss, "tried": found.tried,
        }  # fmt: skip

    def run(self, file: ResultFile, rs: list[int]) -> None:
        """Every plan at every r, into the file."""
        before = file.run(UNFUSED, lambda: self.score(self.unfused, {}))["right"]
        profile = None
        for r in tqdm(sorted(rs, reverse=True), desc="tokens per block"):  # what is hardest to do well comes first
            for name, (make, options) in self.constant.items():
                plan = make(self.depth, r)
                file.run(f"{name}|r={r}", partial(self.score, plan, options, before))
            from_profile, searched = (f"{name}|r={r}" for name in ADAPTIVE)
            if searched in file.runs:
                continue
            profile = profile or self.profile()
            budget = file.runs[f"prune|r={r}"]["multiply_adds"]
            start = self.matched(profile, budget)
            file.run(from_profile, partial(self.score, start, {}, before))
            starts = [start, FusionPlan.uniform(self.depth, r, "average")]
            found = file.run(f"search|r={r}", partial(self.search, starts, budget))
            plan = FusionPlan(tuple(found["ops"]), tuple(found["counts"]))
            file.run(searched, partial(self.score, plan, found["options"], before))

    def speed(self, file: ResultFile, repeats: int) -> dict:
        """Images per second of every plan; all of them take turns."""
        models = {UNFUSED: self.model}
        for name, run in file.runs.items():
            if "accuracy" in run and name != UNFUSED:
                models[name] = fused(self.model, FusionPlan(tuple(run["ops"]), tuple(run["counts"])), run["options"])
        calls = {name: partial(model, self.images[: self.batch]) for name, model in models.items()}
        ms = median_ms(calls, samples=len(self.images[: self.batch]), repeats=repeats)
        return {"images_per_s": {name: round(1e3 / value) for name, value in ms.items()}, "environment": environment()}


def table(content: dict) -> str:
    """The result as the README shows it: unfused, then every plan at every r; adaptive ones with their counts."""
    speed, full = content["speed"]["images_per_s"], content["runs"][UNFUSED]["multiply_adds"]
    order, rows = [UNFUSED, *CONSTANT, *ADAPTIVE], []
    for name, run in content["runs"].items():
        if "accuracy" not in run:
            continue
        plan, _, r = name.partition("|r=")
        saved = 100 * (1 - run["multiply_adds"] / full)
        lost = f"{run['lost']:.2f} ± {run['standard_error']:.2f}" if "lost" in run else "-"
        shown = f"{plan}: {', '.join(map(str, run['counts']))}" if plan in ADAPTIVE else plan
        rows.append(
            (int(r or 0), order.index(plan), shown, f"{run['accuracy']:.2f}", lost,
             f"{run['multiply_adds'] / 1e6:.2f}", f"{saved:.1f} %", f"{speed[name]:,}")
        )  # fmt: skip
    header = ["r", "plan", "accuracy (%)", "points lost", "MMAC per image", "saved", "images/s"]
    return markdown_table(header, [[r, *cells] for r, _, *cells in sorted(rows)])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with model.safetensors and the t10k files")
    parser.add_argument("--quick", action="store_true", help="a minute: fewer images, r = 7 only")
    parser.add_argument("--threads", type=int, help="default: what torch chooses")
    options = outputs.parse(parser, "tofu_mnist", arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    settings = dict(calibration=500, test=9500, rs=[2, 4, 6, 7], seed=0, repeats=15)
    if options.quick:
        settings |= dict(calibration=100, test=1000, rs=[7], repeats=3)
    images, labels = load(options.data)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(settings["seed"]))
    held, counted = order.split([settings["calibration"], len(order) - settings["calibration"]])
    counted = counted[: settings["test"]]
    model = load_model(options.data)
    comparison = Comparison(
        model, images[held], images[counted], labels[counted],
        rest=49 * model.patch_embed.proj.weight.numel() + model.head.weight.numel(), batch=250,
    )  # fmt: skip
    file = ResultFile(options.out, settings)
    comparison.run(file, settings["rs"])
    file.save(speed=comparison.speed(file, settings["repeats"]))
    file.save(table=table(file.content))
    print(file.content["table"])


if __name__ == "__main__":
    main()
