"""What optimize_for_inference costs in accuracy and saves in time, on a Jumbo classifier trained on CIFAR-10 here.

    python -m benchmarks.optimize_cifar --data ../shared/data/cifar10 [--quick]

The model is that of benchmarks.tofu_cifar (D=64, J=6, depth 4, 64 patches), trained once and kept in --models. Accuracy
and agreement with float32 are counted on the 5,000 test photos; the forms take turns in the timing. Its Jumbo FFN is
small (4.7 MB in float32) and mostly stays in the processor's caches: on the ImageNet sizes, whose FFNs do not, more is
saved (python -m jumbo_core.measure speed).
"""

from __future__ import annotations

import argparse
import copy
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks import outputs
from benchmarks.cifar import HELD_OUT, load
from benchmarks.tofu_cifar import trained
from jumbo_core import inference_report, optimize_for_inference
from jumbo_core.measure import ResultFile, markdown_table
from jumbo_core.measure.turns import spread, take_turns

FORMS = ("float32", "bfloat16", "int8")


def forms(model: nn.Module) -> dict[str, nn.Module]:
    """The trained model in every form."""
    others = {dtype: optimize_for_inference(copy.deepcopy(model), dtype=dtype) for dtype in FORMS[1:]}
    return {"float32": model.eval(), **others}


def quality(models: dict[str, nn.Module], images: torch.Tensor, labels: torch.Tensor) -> dict[str, dict]:
    """Accuracy of each form and how often its first choice is float32's, in percent, and the FFN's megabytes."""
    rows, reference = {}, None
    ffn = models["float32"].encoder.jumbo_mlp
    full = sum(4 * parameter.numel() for parameter in ffn.parameters()) / 1e6
    with torch.inference_mode():
        for name, model in models.items():
            chosen = torch.cat([model(batch) for batch in images.split(250)]).argmax(1)
            reference = chosen if reference is None else reference
            size = sum(entry.megabytes for entry in inference_report(model)) or full
            rows[name] = {
                "accuracy": round(100 * (chosen == labels).double().mean().item(), 3),
                "agreement": round(100 * (chosen == reference).double().mean().item(), 3),
                "computes": next((entry.computes for entry in inference_report(model)), "float32"),
                "ffn_megabytes": round(size, 3),
            }
    return rows


def speed(models: dict[str, nn.Module], batches: list[int], repeats: int) -> dict[str, dict[str, dict]]:
    """Milliseconds of each form by batch size, the forms taking turns."""
    rows: dict[str, dict[str, dict]] = {name: {} for name in models}
    for batch in batches:
        images = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        for name, values in take_turns({name: partial(m, images) for name, m in models.items()}, repeats).items():
            rows[name][str(batch)] = spread(values)
    return rows


def table(content: dict) -> str:
    """The result as the README shows it."""
    batches = content["settings"]["batches"]
    return markdown_table(
        ["Jumbo FFN", "test accuracy (%)", "same answer as float32 (%)", "FFN (MB)"]
        + [f"ms, batch {batch}" for batch in batches],
        [
            [
                name if row["computes"] == name else f"{name} (computes {row['computes']})",
                f"{row['accuracy']:.2f}",
                f"{row['agreement']:.2f}",
                f"{row['ffn_megabytes']:.1f}",
                *(f"{content['speed'][name][str(batch)]['median']:.2f}" for batch in batches),
            ]
            for name, row in content["quality"].items()
        ],
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.parquet and test.parquet")
    parser.add_argument("--models", type=Path, default=Path("out/tofu_cifar"), help="folder for the trained model")
    parser.add_argument("--quick", action="store_true", help="a minute: fewer photos and epochs")
    parser.add_argument("--threads", type=int, default=2, help="of the timing; default 2")
    options = outputs.parse(parser, "optimize_cifar", arguments)
    torch.set_num_threads(options.threads)
    training = dict(
        depth=4, epochs=6, batch=128, warmup=140, weight_decay=0.05, train_photos=20000, test_photos=5000,
        held_out=HELD_OUT,
    )  # fmt: skip
    settings = dict(training=training, batches=[1, 8, 32], repeats=101, threads=options.threads)
    if options.quick:
        training |= dict(epochs=1, train_photos=3000, test_photos=1000, held_out=500, warmup=5)
        settings |= dict(repeats=5)
    file = ResultFile(options.out, settings)  # other settings are refused before anything is trained
    model = trained(
        options.models / ("quick" if options.quick else "model"), training, options.data, torch.get_num_threads()
    )
    models = forms(model)
    file.save(quality=quality(models, *load(options.data / "test.parquet", training["test_photos"])))
    file.save(speed=speed(models, settings["batches"], settings["repeats"]))
    file.save(table=table(file.content))
    print(file.content["table"])


if __name__ == "__main__":
    main()
