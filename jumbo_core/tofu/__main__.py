"""``python -m jumbo_core.tofu``: ``profile`` (measure a model, write a plan), ``apply`` (try the plan), ``export``."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from tqdm import tqdm

from jumbo_core.measure.report import command_line
from jumbo_core.measure.turns import median_ms
from jumbo_core.tofu.apply import IMPORTANCE, WEIGHTS, apply_tofu
from jumbo_core.tofu.deploy import FORMATS, export_model, load_exported
from jumbo_core.tofu.folder import ImageBatches, load_model, model_transform
from jumbo_core.tofu.operators import NORMS, OPERATORS
from jumbo_core.tofu.plan import FusionPlan
from jumbo_core.tofu.profiling import PRESETS, profile_folder
from jumbo_core.tofu.trial import try_folder


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jumbo_core.tofu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_profile(commands)
    _add_apply(commands)
    _add_export(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, TypeError, OSError, ImportError) as error:
        parser.exit(1, f"error: {error}\n")


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", help="timm folder (config.json, model.safetensors) or timm name")
    command.add_argument("--image-size", type=int, nargs="+", metavar="PX", help="side, or height and width")
    command.add_argument("--random-weights", action="store_true", help="do not load weights: to try the command out")


def _load(options: argparse.Namespace):
    size = options.image_size
    if size is not None and len(size) > 2:
        raise ValueError(f"--image-size takes a side, or height and width, got {size}")
    size = size if size is None or len(size) > 1 else size[0]
    return load_model(options.model, image_size=size, weights=not options.random_weights)


def _add_images(command: argparse.ArgumentParser, *, batches: int, batch_size: int) -> None:
    command.add_argument("--batches", type=int, default=batches, help=f"default {batches}")
    command.add_argument("--batch-size", type=int, default=batch_size, help=f"default {batch_size}")
    command.add_argument("--seed", type=int, default=0, help="which images, which token pairs (default 0)")


def _add_fusion(command: argparse.ArgumentParser) -> None:
    command.add_argument("--plan", type=Path, required=True, help="plan.json, as profile wrote it")
    command.add_argument("--proportional", action="store_true", help="attention weighs a token by what it stands for")
    command.add_argument("--importance", choices=IMPORTANCE, default="similarity", help="default similarity")
    command.add_argument("--norm", choices=NORMS, default="max", help="of MLERP groups (default max)")
    command.add_argument(
        "--weights", choices=WEIGHTS, help="what members of a group count by (default: the operator's)"
    )


def _fusion(options: argparse.Namespace) -> dict:
    return {name: getattr(options, name) for name in ("proportional", "importance", "norm", "weights")}


def _progress(batches):
    return tqdm(batches, desc="batches", file=sys.stderr)


def _add_profile(commands) -> None:
    command = commands.add_parser("profile", help="measure a model on a folder of images and write a fusion plan")
    _add_model(command)
    command.add_argument("--images", type=Path, required=True, help="folder of jpg and png files, nested or not")
    command.add_argument("--reduction", type=float, default=0.35, help="share of token-layers to save (default 0.35)")
    command.add_argument("--preset", choices=PRESETS, default="adaptive", help="default adaptive")
    command.add_argument("--op", choices=OPERATORS, default="mlerp", help="of --preset uniform (default mlerp)")
    _add_images(command, batches=8, batch_size=16)
    command.add_argument("--out", type=Path, default=Path("tofu"), help="folder for plan and report (default tofu)")
    command.set_defaults(run=_profile)


def _profile(options: argparse.Namespace) -> None:
    result = profile_folder(
        _load(options),
        options.images,
        reduction=options.reduction,
        preset=options.preset,
        op=options.op,
        batches=options.batches,
        batch_size=options.batch_size,
        seed=options.seed,
        progress=_progress,
    )
    origin = {"command": command_line(), "source": options.model}
    result = dataclasses.replace(result, settings={**origin, **result.settings})
    print(result)
    print("wrote " + ", ".join(map(str, result.write(options.out))))


def _add_apply(commands) -> None:
    command = commands.add_parser("apply", help="try a plan: same predictions? how much faster?")
    _add_model(command)
    _add_fusion(command)
    command.add_argument("--images", type=Path, required=True, help="folder of jpg and png files, nested or not")
    _add_images(command, batches=8, batch_size=16)
    command.set_defaults(run=_apply)


def _apply(options: argparse.Namespace) -> None:
    trial = try_folder(
        _load(options),
        FusionPlan.from_json(options.plan),
        options.images,
        batches=options.batches,
        batch_size=options.batch_size,
        seed=options.seed,
        progress=_progress,
        **_fusion(options),
    )
    print(trial)


def _add_export(commands) -> None:
    command = commands.add_parser("export", help="write the fused model to a file and check it against eager")
    _add_model(command)
    _add_fusion(command)
    command.add_argument("--out", type=Path, required=True, help="model.onnx or model.pt2")
    command.add_argument("--format", choices=FORMATS, help="default: what --out ends in")
    command.add_argument("--int8", action="store_true", help="int8 linear layers (onnx)")
    command.add_argument("--one-image", action="store_true", help="a batch of exactly one image, not of any size")
    command.add_argument("--images", type=Path, help="images to check with (default: random numbers)")
    _add_images(command, batches=1, batch_size=8)
    command.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> None:
    plan, model = FusionPlan.from_json(options.plan), _load(options)
    transform = model_transform(model)
    if options.images is None:
        like = transform(Image.new("RGB", (64, 64)))
        images = torch.randn(options.batch_size, *like.shape, generator=torch.Generator().manual_seed(options.seed))
    else:
        draw = {"batches": options.batches, "batch_size": options.batch_size, "seed": options.seed}
        images = torch.cat(list(ImageBatches(options.images, transform, **draw)))
    plain = copy.deepcopy(model)
    print(apply_tofu(model, plan, **_fusion(options)).report())
    done = export_model(
        model, options.out, images, format=options.format, dynamic_batch=not options.one_image, int8=options.int8
    )
    run = load_exported(done.path)
    calls = {"eager, unfused": plain, "eager, fused": model, done.path.name: run}
    ms = median_ms({name: partial(call, images[:1]) for name, call in calls.items()}, repeats=15)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    print(f"wrote {done.path}: {done.size / 1e6:.2f} MB (weights in eager: {weights / 1e6:.2f} MB)")
    print(
        f"against eager, {len(images)} images: largest difference {done.error:.2g}, "
        f"same prediction for {100 * done.agreement:.1f} %"
    )
    print("ms for one image, median: " + ", ".join(f"{name} {value:.2f}" for name, value in ms.items()))


if __name__ == "__main__":
    main()
