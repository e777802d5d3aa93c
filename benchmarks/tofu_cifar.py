"""Token fusion on a Jumbo classifier trained on CIFAR-10 here: every operator and plan at the same multiply-adds.

    python -m benchmarks.tofu_cifar --data ../shared/data/cifar10 --out docs/results/tofu_cifar.json [--quick]

The model is the wide Jumbo of benchmarks.cifar (D=64, J=6, depth 4, 64 patches), trained once as there and kept in
--models. The J slices are never fused. The adaptive plans are made on 500 of the 2,000 training photos that were held
out; accuracy is counted on the 5,000 test photos, which no choice has seen. An interrupted command picks up at the last
epoch or at the first run that is not in the file; speed is measured anew at the end of each.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks import outputs
from benchmarks.cifar import HELD_OUT, load, split, train
from benchmarks.tofu_mnist import Comparison, table
from jumbo_core.measure import ResultFile, multiply_adds
from jumbo_core.models import JumboViT
from jumbo_core.tofu import FusionPlan
from jumbo_core.tofu.apply import fusion_report

CONTENDER, WIDTH, LR, SEED = "Jumbo J=6", 64, 1e-3, 0
PATCHES = 64


def trained(folder: Path, settings: dict, data: Path, threads: int) -> JumboViT:
    """The classifier as a JumboViT, trained first where the folder does not hold it."""
    from hf_ext import JumboForImageClassification

    if not (folder / "config.json").is_file():
        train(CONTENDER, WIDTH, LR, SEED, settings, str(data), threads, folder)
    return classifier(JumboForImageClassification.from_pretrained(folder))


def classifier(model) -> JumboViT:
    """A JumboForImageClassification's weights in one JumboViT, head included."""
    config = model.config
    plain = JumboViT(
        config.image_size, config.patch_size, config.num_channels, config.num_labels, config.hidden_size,
        config.num_hidden_layers, config.num_attention_heads, config.multiplier,
    )  # fmt: skip
    head = {f"head.{name}": tensor for name, tensor in model.classifier.state_dict().items()}
    plain.load_state_dict({**model.jumbo.vit.state_dict(), **head})
    return plain.eval()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.parquet and test.parquet")
    parser.add_argument("--models", type=Path, default=Path("out/tofu_cifar"), help="folder for the trained model")
    parser.add_argument("--quick", action="store_true", help="a minute: fewer photos and epochs, r = 12 only")
    parser.add_argument("--threads", type=int, help="default: what torch chooses")
    options = outputs.parse(parser, "tofu_cifar", arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    training = dict(
        depth=4, epochs=6, batch=128, warmup=140, weight_decay=0.05, train_photos=20000, test_photos=5000,
        held_out=HELD_OUT,
    )  # fmt: skip
    settings = dict(training=training, lr=LR, width=WIDTH, calibration=500, rs=[4, 8, 12, 18], repeats=15)
    if options.quick:
        training |= dict(epochs=1, train_photos=3000, test_photos=1000, held_out=500, warmup=5)
        settings |= dict(calibration=100, rs=[12], repeats=3)
    file = ResultFile(options.out, settings)  # other settings are refused before anything is trained
    model = trained(
        options.models / ("quick" if options.quick else "model"), training, options.data, torch.get_num_threads()
    )
    photos, _ = load(options.data / "train.parquet", training["train_photos"])
    held, _ = split(len(photos), training["held_out"])
    images, labels = load(options.data / "test.parquet", training["test_photos"])
    nothing = fusion_report(model, FusionPlan.uniform(training["depth"], 0, "prune"), PATCHES).multiply_adds
    comparison = Comparison(
        model, photos[held[: settings["calibration"]]], images, labels, rest=multiply_adds(model) - nothing, batch=250
    )
    comparison.run(file, settings["rs"])
    file.save(speed=comparison.speed(file, settings["repeats"]))
    file.save(table=table(file.content))
    print(file.content["table"])


if __name__ == "__main__":
    main()
