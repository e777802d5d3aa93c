"""Sizes of our models in closed form: width, J, parameters, those of the published file, multiply-adds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import timm
import torch

from jumbo_core.measure.flops import count_parameters, multiply_adds
from jumbo_core.measure.report import markdown_table

MODELS = [f"jumbo_{size}_patch16_224" for size in ("pico", "nano", "tiny", "small", "base", "large")]
MODELS += [f"adventurer_{size}_patch16_224" for size in ("tiny", "small", "base", "large")]
MODELS += [f"jumbo_adventurer_{size}_patch16_224" for size in ("tiny", "small", "base")]


def measure(models: Sequence[str] = MODELS, image_size: int = 224) -> dict:
    """One row a model, see :func:`table`.

    Raises:
        TypeError: a timm name that is not one of our models: there is no closed form for it here.
    """
    rows = []
    for name in models:
        with torch.device("meta"):
            model = timm.create_model(name)
        macs, parameters = multiply_adds(model, image_size), count_parameters(model)
        published = parameters + model.embed_dim if model.pretrained_cfg.get("hf_hub_id") else None
        rows.append(
            {
                "model": name,
                "D": model.embed_dim,
                "J": model.encoder.multiplier,
                "parameters": parameters,
                "published": published,
                "multiply_adds": macs,
            }
        )
    return {"image_size": image_size, "rows": rows}


def table(result: dict) -> str:
    """One line a model: width, J, parameters (M), those of the published file if there is one, GMAC.

    A published file holds D numbers more: a dead class token (Jumbo), or the class token's own entry in the position
    table, which is part of the learned token here (Adventurer).
    """
    header = ["timm name", "D", "J", "parameters (M)", "published file (M)", f"GMAC at {result['image_size']} px"]
    return markdown_table(
        header,
        [
            [
                row["model"], row["D"], row["J"], f"{row['parameters'] / 1e6:.3f}",
                "-" if row["published"] is None else f"{row['published'] / 1e6:.3f}",
                f"{row['multiply_adds'] / 1e9:.3f}",
            ]
            for row in result["rows"]
        ],
    )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", default=MODELS, help="timm names of our models (default: every size)")
    parser.add_argument("--image-size", type=int, default=224, help="pixels of each side (default 224)")


def result_of(options: argparse.Namespace) -> dict:
    return measure(options.models, options.image_size)
