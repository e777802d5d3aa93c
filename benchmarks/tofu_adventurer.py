"""Does fusing tokens help a linear-time student too? Accuracy on CIFAR-10, and time by the number of patches.

    python -m benchmarks.tofu_adventurer --data ../shared/data/cifar10 --out docs/results/tofu_adventurer.json [--quick]

The student is the Adventurer that benchmarks.distill distilled with maps and masks (64 patches), from its --models; it
was never trained with fusion. Plans are compared as in benchmarks.tofu_cifar; a mixer has no attention, so what needs
attention is left out. Then an untrained adventurer_tiny and a ViT of its width and depth run on larger images, each
unfused and with a quarter of the patches gone by the middle of the network, for time alone: a ViT saves twice, fewer
tokens and a smaller attention, a linear student once.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import timm
import torch

import jumbo_core  # noqa: F401 (registers the models)
from benchmarks import outputs
from benchmarks.cifar import HELD_OUT, load, split
from benchmarks.tofu_mnist import CONSTANT, Comparison, table
from jumbo_core.measure import ResultFile, markdown_table, multiply_adds
from jumbo_core.measure.tofu import fused
from jumbo_core.measure.turns import spread, take_turns
from jumbo_core.models import AdventurerViT
from jumbo_core.tofu import FusionPlan
from jumbo_core.tofu.apply import fusion_report

STUDENT = "Adventurer-maps-and-masks"
LINEAR = {name: case for name, case in CONSTANT.items() if not case[1].get("proportional")}
PAIR = ("adventurer_tiny", "ViT, same width and depth")


def student(folder: Path) -> AdventurerViT:
    """A folder of AdventurerForImageClassification as one AdventurerViT, head included."""
    from hf_ext import AdventurerForImageClassification

    if not (folder / "config.json").is_file():
        raise SystemExit(f"no {folder}: run python -m benchmarks.distill first, it leaves its first students there")
    model = AdventurerForImageClassification.from_pretrained(folder)
    plain = AdventurerViT(**model.config.core_arguments(), num_classes=model.config.num_labels)
    head = {f"head.{name}": tensor for name, tensor in model.classifier.state_dict().items()}
    plain.load_state_dict({**model.adventurer.vit.state_dict(), **head})
    return plain.eval()


def large(size: int) -> dict[str, torch.nn.Module]:
    """Untrained models for time alone."""
    linear = timm.create_model("adventurer_tiny_patch16_224", img_size=size, num_classes=10)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=size, num_classes=10, embed_dim=256, depth=12, num_heads=4)
    return dict(zip(PAIR, (linear.eval(), vit.eval()), strict=True))


def quarter(patches: int, depth: int = 12) -> FusionPlan:
    """MLERP a quarter of the patches away in the first half of the blocks, in equal parts."""
    each = patches // 4 // (depth // 2)
    return FusionPlan(("mlerp",) * depth, (each,) * (depth // 2) + (0,) * (depth - depth // 2))


@torch.inference_mode()
def times(sizes: list[int], repeats: int) -> list[dict]:
    """Milliseconds per image of every model, unfused and fused, all taking turns."""
    rows = []
    for size in sizes:
        patches = (size // 16) ** 2
        models = large(size)
        models |= {f"{name}, fused": fused(model, quarter(patches), {}) for name, model in models.items()}
        image = torch.randn(1, 3, size, size)
        found = take_turns({name: partial(model, image) for name, model in models.items()}, repeats)
        rows.append({"size": size, "patches": patches, "ms": {name: spread(values) for name, values in found.items()}})
    return rows


def times_table(rows: list[dict]) -> str:
    header = ["image", "patches", *(f"{name} (ms, unfused -> fused)" for name in PAIR), "time saved"]
    lines = []
    for row in rows:
        cells, saved = [], []
        for name in PAIR:
            before, after = (row["ms"][key]["median"] for key in (name, f"{name}, fused"))
            cells.append(f"{before:.0f} -> {after:.0f}")
            saved.append(f"{100 * (1 - after / before):.0f} %")
        lines.append([f"{row['size']}x{row['size']}", row["patches"], *cells, " / ".join(saved)])
    return markdown_table(header, lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.parquet and test.parquet")
    parser.add_argument("--models", type=Path, default=Path("out/distill"), help="where benchmarks.distill left them")
    parser.add_argument("--quick", action="store_true", help="a minute: fewer photos and sizes")
    parser.add_argument("--threads", type=int, help="default: what torch chooses")
    options = outputs.parse(parser, "tofu_adventurer", arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    settings = dict(test=5000, calibration=500, rs=[4, 8, 12], sizes=[224, 448, 896], repeats=9)
    if options.quick:
        settings |= dict(test=500, calibration=100, rs=[8], sizes=[224], repeats=3)
    file = ResultFile(options.out, settings)
    model = student(options.models / STUDENT)
    photos, _ = load(options.data / "train.parquet", 20000)
    held, _ = split(len(photos), HELD_OUT)
    images, labels = load(options.data / "test.parquet", settings["test"])
    patches, depth = model.patch_embed.num_patches, len(model.blocks)
    nothing = fusion_report(model, FusionPlan.uniform(depth, 0, "prune"), patches).multiply_adds
    comparison = Comparison(
        model, photos[held[: settings["calibration"]]], images, labels, rest=multiply_adds(model) - nothing, batch=250,
        constant=LINEAR, options=[{}],
    )  # fmt: skip
    comparison.run(file, settings["rs"])
    file.save(speed=comparison.speed(file, settings["repeats"]))
    rows = times(settings["sizes"], settings["repeats"])
    file.save(large=rows, table=f"{table(file.content)}\n\n{times_table(rows)}")
    print(file.content["table"])


if __name__ == "__main__":
    main()
