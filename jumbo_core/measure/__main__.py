"""``python -m jumbo_core.measure``: what models cost, in closed form (``flops``) and by the clock (all others)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import timm
import torch

from jumbo_core.measure import scaling, scan, speed, tofu
from jumbo_core.measure.flops import count_parameters, multiply_adds
from jumbo_core.measure.report import markdown_table

SIZES = [f"jumbo_{size}_patch16_224" for size in ("pico", "nano", "tiny", "small", "base", "large")]
SIZES += [f"adventurer_{size}_patch16_224" for size in ("tiny", "small", "base", "large")]
SIZES += [f"jumbo_adventurer_{size}_patch16_224" for size in ("tiny", "small", "base")]


def flops_table(names: list[str], image_size: int) -> str:
    """One line a model: width, J, parameters (M), those of the published file if there is one, GMAC.

    A published file holds D numbers more: a dead class token (Jumbo), or the class token's own entry in the position
    table, which is part of the learned token here (Adventurer).
    """
    rows = []
    for name in names:
        with torch.device("meta"):
            model = timm.create_model(name)
        parameters = count_parameters(model)
        rows.append(
            [
                name,
                model.embed_dim,
                model.encoder.multiplier,
                f"{parameters / 1e6:.3f}",
                f"{(parameters + model.embed_dim) / 1e6:.3f}" if model.pretrained_cfg.get("hf_hub_id") else "-",
                f"{multiply_adds(model, image_size) / 1e9:.3f}",
            ]
        )
    header = ["timm name", "D", "J", "parameters (M)", "published file (M)"]
    return markdown_table([*header, f"GMAC at {image_size} px"], rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jumbo_core.measure", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    flops = commands.add_parser("flops", help="parameters and multiply-adds in closed form, as a table")
    flops.add_argument("models", nargs="*", default=SIZES, help="timm names of our models (default: every size)")
    flops.add_argument("--image-size", type=int, default=224, help="pixels of each side (default 224)")
    for module, purpose in (
        (speed, "whole models by name against each other, ours and peers: inference or training"),
        (scaling, "time and memory over image sizes"),
    ):
        parser_of = commands.add_parser(module.__name__.rpartition(".")[2], help=purpose, description=module.__doc__)
        module.add_arguments(parser_of)
        parser_of.set_defaults(run=module.run)
    for name, repeats, purpose in (
        ("scan", 15, "the scan against Transformers' torch path, and how it grows with length"),
        ("tofu", 15, "token fusion in a ViT-B: time saved against multiply-adds saved"),
    ):
        timing = commands.add_parser(name, help=purpose)
        timing.add_argument("--repeats", type=int, default=repeats, help=f"timed rounds (default {repeats})")
        timing.add_argument("--threads", type=int, default=2, help="default 2")
        timing.add_argument("--out", type=Path, help="write the result as JSON as well")
        if name == "tofu":
            timing.add_argument("--batch", type=int, nargs="+", default=[8, 1], help="batch sizes (default 8 1)")
            timing.add_argument("-r", type=int, default=16, help="tokens that leave in each block (default 16)")
    options = parser.parse_args(arguments)
    if hasattr(options, "run"):
        options.run(options)
        return
    if options.command == "flops":
        print(flops_table(options.models, options.image_size))
        return
    module = {"scan": scan, "tofu": tofu}[options.command]
    settings = dict(batches=options.batch, r=options.r) if module is tofu else {}
    result = module.measure(repeats=options.repeats, threads=options.threads, **settings)
    result["table"] = module.table(result)
    print(result["table"])
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
