"""``python -m jumbo_core.measure flops``: parameters and multiply-adds of registered models, in closed form."""

from __future__ import annotations

import argparse

import timm
import torch

from jumbo_core.measure.flops import count_parameters, multiply_adds
from jumbo_core.measure.report import markdown_table

SIZES = [f"jumbo_{size}_patch16_224" for size in ("pico", "nano", "tiny", "small", "base", "large")]


def flops_table(names: list[str], image_size: int) -> str:
    """One line a model: width, J, parameters (M), the same with the dead class token of published files, GMAC."""
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
                f"{(parameters + model.embed_dim) / 1e6:.3f}",
                f"{multiply_adds(model, image_size) / 1e9:.3f}",
            ]
        )
    header = ["timm name", "D", "J", "parameters (M)", "with the published file's dead token (M)"]
    return markdown_table([*header, f"GMAC at {image_size} px"], rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jumbo_core.measure", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    flops = commands.add_parser("flops", help="parameters and multiply-adds in closed form, as a table")
    flops.add_argument("models", nargs="*", default=SIZES, help="timm names of Jumbo models (default: every size)")
    flops.add_argument("--image-size", type=int, default=224, help="pixels of each side (default 224)")
    options = parser.parse_args(arguments)
    print(flops_table(options.models, options.image_size))


if __name__ == "__main__":
    main()
