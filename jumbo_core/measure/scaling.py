"""Models over image sizes: time, peak memory and multiply-adds of one image, and the exponents they grow with."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from jumbo_core import checks
from jumbo_core.measure import artefacts
from jumbo_core.measure.contenders import contender
from jumbo_core.measure.forms import DTYPES
from jumbo_core.measure.report import command_line, environment, markdown_table
from jumbo_core.measure.speed import compare
from jumbo_core.measure.steps import check_options

SIZES = ((224, 224), (512, 512), (512, 1024), (1024, 2048))


class Preset(NamedTuple):
    """A comparison by name: models, ratios being to the first; sizes; tokens at which a model stops."""

    models: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    until: dict[str, int]


PRESETS = {
    # D=256, 12 blocks, patch 16.
    "width256": Preset(
        (
            "vit_registers_256",
            "vit_registers_256@materialised",
            "jumbo_tiny_patch16_224@embed_dim=256+num_heads=4",
            "adventurer_tiny_patch16_224",
            "jumbo_adventurer_tiny_patch16_224",
        ),
        SIZES,
        {"vit_registers_256@materialised": 2048},
    ),
    # What the linear student is for: in place of a ViT-B, at the sizes of dense prediction. Scores as a tensor take
    # 3 GiB a block with 8,192 tokens, and their softmax as much.
    "vit_b": Preset(
        (
            "vit_b",
            "vit_b@materialised",
            "jumbo_adventurer_small_patch16_224",
            "jumbo_adventurer_small_patch16_224@int8",
            "jumbo_linear_384",
            "jumbo_linear_384@int8",
        ),
        ((512, 512), (512, 1024), (1024, 1024), (1024, 2048)),
        {"vit_b@materialised": 2048},
    ),
}


def measure(
    models: Sequence[str],
    *,
    sizes: Sequence[tuple[int, int]] = SIZES,
    until: dict[str, int] | None = None,
    batch: int = 1,
    repeats: int = 5,
    seconds: float = 40.0,
    threads: int = 2,
    dtype: str = "float32",
    device: str | None = None,
    memory: bool = True,
) -> dict:
    """Every model at every size, its positions made for it; at each size models take turns.

    Args:
        models: names, see :mod:`jumbo_core.measure.contenders`; ratios are to the first.
        sizes: (H, W), at least two.
        until: tokens (patches of 16x16) beyond which a model is left out; the result says so.
        seconds: rounds of a size are cut to about so many, at least 3.
        batch, repeats, threads, dtype, device, memory: see :func:`jumbo_core.measure.speed.measure`.

    Returns:
        JSON-ready dict: "rows", one a model and size; "exponents", by model, of ms, peak_MiB and GMAC over tokens: the
        slope of a straight line through their logarithms.

    Raises:
        ValueError, RuntimeError: as :func:`jumbo_core.measure.speed.measure`.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_options([contender(name) for name in models], dtype, device, train=False)
    checks.integer("repeats", repeats, 2)
    if len(set(sizes)) < 2 or len(set(models)) < len(models) or not models:
        raise ValueError(f"expected at least one model and two sizes, all different, got {list(models)}, {list(sizes)}")
    until = until or {}
    if models[0] in until:
        raise ValueError(f"ratios are to {models[0]}, the first model: it cannot stop at {until[models[0]]} tokens")
    torch.set_num_threads(threads)
    rows, left_out = [], {}
    for size in sizes:
        contenders = [contender(name, size) for name in models]
        for one in contenders:
            if one.tokens > until.get(one.text, math.inf):
                left_out.setdefault(one.text, []).append(list(size))
        contenders = [one for one in contenders if one.tokens <= until.get(one.text, math.inf)]
        found = compare(
            contenders, batch, repeats=repeats, threads=threads, dtype=dtype, device=device, memory=memory,
            seconds=seconds,
        )  # fmt: skip
        rows += [{"size": list(size), "tokens": contenders[0].tokens, **row} for row in found]
    return {
        "command": command_line(), "environment": environment(), "device": device, "dtype": dtype, "batch": batch,
        "rows": rows, "left_out": left_out, "exponents": {name: exponents(rows, name) for name in models},
    }  # fmt: skip


def exponents(rows: Sequence[dict], model: str) -> dict[str, float]:
    """Slopes of log(ms), log(peak_MiB) and log(GMAC) over log(tokens) of one model's rows, where there are two."""
    own, found = [row for row in rows if row["model"] == model], {}
    for key in ("ms", "peak_MiB", "GMAC"):
        points = [(row["tokens"], row[key]["median"] if key == "ms" else row[key]) for row in own if row.get(key)]
        if len({tokens for tokens, _ in points}) > 1:
            x, y = zip(*((math.log(tokens), math.log(value)) for tokens, value in points), strict=True)
            found[key] = round(statistics.linear_regression(x, y).slope, 3)
    return found


def table(result: dict) -> str:
    """The result as markdown; exponents stand with the largest image of a model."""
    first = result["rows"][0]["model"]
    largest = {row["model"]: row["tokens"] for row in result["rows"]}
    lines = []
    for row in result["rows"]:
        slopes = result["exponents"][row["model"]] if row["tokens"] == largest[row["model"]] else {}
        lines.append([
            "x".join(map(str, row["size"])), f"{row['tokens']:,}", row["model"],
            "-" if row["GMAC"] is None else f"{row['GMAC']:.2f}", f"{row['ms']['median']:.0f}",
            f"{row['times_first']['median']:.2f}", f"{row['peak_MiB']:.0f}" if "peak_MiB" in row else "-",
            f"{slopes['ms']:.2f}" if "ms" in slopes else "",
            f"{slopes['peak_MiB']:.2f}" if "peak_MiB" in slopes else "",
        ])  # fmt: skip
    header = ["image", "tokens", "model", "GMAC", "ms per image" if result["batch"] == 1 else "ms"]
    header += [f"times the speed of {first}", "peak memory (MiB)", "time ~ tokens^", "memory ~ tokens^"]
    text = markdown_table(header, lines)
    for model, sizes in result["left_out"].items():
        text += f"\n\n{model} was left out at {', '.join('x'.join(map(str, size)) for size in sizes)}."
    return text


def picture(result: dict, axes) -> None:
    """Milliseconds over tokens, both logarithmic, with the fitted exponent of each model."""
    for model, slopes in result["exponents"].items():
        rows = [row for row in result["rows"] if row["model"] == model]
        if not rows:
            continue  # left out at every size
        label = f"{model} (exponent {slopes['ms']:.2f})" if "ms" in slopes else model
        axes.plot([row["tokens"] for row in rows], [row["ms"]["median"] for row in rows], marker="o", label=label)
    artefacts.log_axes(axes, sorted({row["tokens"] for row in result["rows"]}), "tokens (patches of 16x16)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", help="names as for speed; ratios are to the first")
    parser.add_argument("--preset", choices=PRESETS, help="models and sizes by name, in place of naming models")
    parser.add_argument("--sizes", type=artefacts.size, nargs="+", help="N or HxW (default 224 512 512x1024 1024x2048)")
    parser.add_argument("--batch", type=artefacts.at_least(1), default=1, help="images at a time (default 1)")
    parser.add_argument("--repeats", type=artefacts.at_least(2), default=5, help="timed rounds at most (default 5)")
    parser.add_argument("--seconds", type=float, default=40, help="of rounds at one size, about (default 40; 3 rounds)")
    parser.add_argument("--threads", type=artefacts.at_least(1), default=2, help="default 2")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the whole model (default float32)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--no-memory", action="store_true", help="skip peak memory, a new process for each row")


def result_of(options: argparse.Namespace) -> dict:
    if bool(options.models) == bool(options.preset):
        raise SystemExit(f"scaling takes names of models or --preset ({', '.join(PRESETS)}), one of the two")
    chosen = PRESETS[options.preset] if options.preset else Preset(tuple(options.models), SIZES, {})
    return measure(
        chosen.models, sizes=options.sizes or chosen.sizes, until=chosen.until, batch=options.batch,
        repeats=options.repeats, seconds=options.seconds, threads=options.threads, dtype=options.dtype,
        device=options.device, memory=not options.no_memory,
    )  # fmt: skip
