"""Models of one width on images of growing size: where linear time begins to pay."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import timm
import torch

from jumbo_core.measure.flops import multiply_adds
from jumbo_core.measure.memory import peak_memory
from jumbo_core.measure.report import command_line, environment, markdown_table
from jumbo_core.measure.turns import spread, take_turns

SIZES = ((224, 224), (512, 512), (512, 1024), (1024, 2048))
WIDTH = dict(embed_dim=256, num_classes=0)
# timm name and what makes all of them equally wide and deep: D=256, 12 blocks, patch 16.
MODELS = {
    "AdventurerViT": ("adventurer_tiny_patch16_224", {}),
    "Jumbo-linear J=6": ("jumbo_adventurer_tiny_patch16_224", {}),
    "JumboViT J=6": ("jumbo_tiny_patch16_224", dict(num_heads=4)),
    "ViT + 16 registers": ("jumbo_tiny_patch16_224", dict(num_heads=4, multiplier=0, registers=16)),
}


def build(name: str, size: tuple[int, int]) -> torch.nn.Module:
    """One of MODELS with random weights, its positions made for images of ``size`` (H, W)."""
    timm_name, options = MODELS[name]
    return timm.create_model(timm_name, img_size=size, **WIDTH, **options).eval()


def prepared(name: str, size: tuple[int, int]) -> Callable[[], torch.Tensor]:
    """One image through a model, ready to run, for :func:`peak_memory`."""
    model = build(name, size)
    model(torch.randn(1, 3, 64, 64))  # libraries load their workspaces
    return partial(model.forward_features, torch.randn(1, 3, *size))


def measure(*, sizes=SIZES, repeats: int = 5, threads: int = 2) -> dict:
    """Milliseconds, multiply-adds and peak memory of one image through every model at every size.

    Raises:
        RuntimeError: features that are not finite: nothing is timed then.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    rows = []
    for size in sizes:
        models = {name: build(name, size) for name in MODELS}
        image = torch.randn(1, 3, *size)
        with torch.inference_mode():
            bad = [name for name, model in models.items() if not model.forward_features(image).isfinite().all()]
        if bad:
            raise RuntimeError(f"features of {', '.join(bad)} are not finite: nothing was timed")
        times = take_turns({name: partial(m.forward_features, image) for name, m in models.items()}, repeats)
        for name, model in models.items():
            rows.append(
                {
                    "model": name,
                    "size": list(size),
                    "ms": spread(times[name]),
                    "times_vit": round(
                        statistics.median(v / o for v, o in zip(times["ViT + 16 registers"], times[name], strict=True)),
                        2,
                    ),
                    "GMAC": round(multiply_adds(model, size) / 1e9, 2),
                    "peak_MiB": round(peak_memory(prepared, name, size, threads=threads), 1),
                }
            )
    return {"command": command_line(), "environment": environment(), "width": WIDTH["embed_dim"], "rows": rows}


def table(result: dict) -> str:
    """The result as the README shows it."""
    return markdown_table(
        ["image", "model, D=256, 12 blocks", "GMAC", "ms per image", "times the ViT's speed", "peak memory (MiB)"],
        [
            [
                "x".join(map(str, row["size"])), row["model"], row["GMAC"], f"{row['ms']['median']:.0f}",
                f"{row['times_vit']:.2f}", f"{row['peak_MiB']:.0f}",
            ]
            for row in result["rows"]
        ],
    )  # fmt: skip
