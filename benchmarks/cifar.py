"""CIFAR-10 from scratch through the Transformers Trainer: Jumbo against a ViT with 16 registers, tuned alike.

    python -m benchmarks.cifar --data ../shared/data/cifar10 --out docs/results/cifar.json [--quick]

Two widths, patch 4 (64 tokens), depth 4. Every contender tries the same learning rates with the first seed; the rate
that is best on 2,000 held-out training photos is then run with the other seeds, and the table shows accuracy on the
5,000 test photos, which no choice has seen. An interrupted command picks up at the first run that is not in the file.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch.nn import functional as F

from benchmarks import outputs
from benchmarks.pool import run_jobs
from jumbo_core.measure import ResultFile, count_parameters, markdown_table, mean_spread, multiply_adds

HELD_OUT = 2000
# What each contender adds to the common shape; lr_scale: learning rate of the shared Jumbo FFN over the common one.
CONTENDERS = {
    "ViT + 16 registers": dict(multiplier=0, registers=16, init="short", lr_scale=1.0),
    "Jumbo J=6": dict(multiplier=6, registers=0, init="short", lr_scale=0.3),
    "Jumbo J=6, as released": dict(multiplier=6, registers=0, init="released", lr_scale=1.0),
}
NARROW_ONLY = "Jumbo J=6, as released"


def load(path: Path, limit: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (n, 3, 32, 32) normalised per channel and labels (n,) of a parquet file in Hugging Face's layout."""
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: --data is the folder that holds train.parquet and test.parquet")
    frame = pd.read_parquet(path).iloc[:limit]
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(image["bytes"])).convert("RGB")) for image in frame["image"]])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    return (images - mean[:, None, None]) / std[:, None, None], torch.tensor(frame["label"].to_numpy())


class Photos(torch.utils.data.Dataset):
    """Photos in memory; ``flip`` mirrors every other one at random, ``shift`` moves them by up to so many pixels."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, *, flip: bool = False, shift: int = 0) -> None:
        self.images, self.labels, self.flip, self.shift = images, labels, flip, shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict:
        image = self.images[i]
        if self.flip and torch.rand(()) < 0.5:
            image = image.flip(-1)
        if self.shift:
            left, top = torch.randint(0, 2 * self.shift + 1, (2,)).tolist()
            image = F.pad(image, [self.shift] * 4)[:, top : top + 32, left : left + 32]
        return {"pixel_values": image, "labels": self.labels[i]}


def split(photos: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the ``count`` training photos that choices are made on, and of those that are trained on."""
    order = torch.randperm(photos, generator=torch.Generator().manual_seed(0))
    return order[:count], order[count:]


def train(
    contender: str, width: int, lr: float, seed: int, settings: dict, data: str, threads: int, keep: Path | None = None
) -> dict:
    """One training run; accuracies in percent on held-out and test photos.

    ``keep``: a folder for the trained model and, meanwhile, a checkpoint of each epoch that an interrupted run resumes.
    """
    from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed
    from transformers.trainer_utils import get_last_checkpoint

    from hf_ext import JumboConfig, JumboForImageClassification
    from jumbo_core.jumbo import param_groups

    torch.set_num_threads(threads)
    images, labels = load(Path(data) / "train.parquet", settings["train_photos"])
    test = Photos(*load(Path(data) / "test.parquet", settings["test_photos"]))
    held, rest = split(len(labels), settings["held_out"])
    training, validation = Photos(images[rest], labels[rest], flip=True), Photos(images[held], labels[held])

    set_seed(seed)
    options = dict(CONTENDERS[contender])
    lr_scale = options.pop("lr_scale")
    config = JumboConfig(
        image_size=32, patch_size=4, hidden_size=width, num_hidden_layers=settings["depth"],
        num_attention_heads=width // 16, drop_path_rate=0.0, num_labels=10, **options,
    )  # fmt: skip
    model = JumboForImageClassification(config)
    groups = param_groups(model, lr, settings["weight_decay"], jumbo_lr_scale=lr_scale)
    with tempfile.TemporaryDirectory() if keep is None else nullcontext(keep) as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                num_train_epochs=settings["epochs"],
                per_device_train_batch_size=settings["batch"],
                per_device_eval_batch_size=500,
                lr_scheduler_type="cosine",
                warmup_steps=settings["warmup"],
                max_grad_norm=1.0,
                seed=seed,
                use_cpu=True,
                report_to="none",
                save_strategy="no" if keep is None else "epoch",
                save_total_limit=1,
                logging_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=training,
            optimizers=(torch.optim.AdamW(groups), None),
            compute_metrics=lambda p: {"accuracy": 100 * float((p.predictions.argmax(-1) == p.label_ids).mean())},
        )
        trainer.remove_callback(PrinterCallback)
        seconds = trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder))).metrics["train_runtime"]
        held_out = trainer.evaluate(validation)["eval_accuracy"]
        on_test = trainer.evaluate(test)["eval_accuracy"]
        if keep is not None:
            model.save_pretrained(keep)
    core = model.jumbo.vit
    return {
        "contender": contender, "width": width, "lr": lr, "seed": seed,
        "held_out": round(held_out, 3), "test": round(on_test, 3), "seconds": round(seconds, 1),
        "parameters": count_parameters(model), "multiply_adds": multiply_adds(core) + model.classifier.weight.numel(),
    }  # fmt: skip


def run_all(jobs: list[tuple], file: ResultFile, settings: dict, arguments: argparse.Namespace) -> None:
    """Run the jobs that the file lacks, ``arguments.workers`` at a time, saving each as it ends."""
    threads = max(1, (os.cpu_count() or 1) // arguments.workers)
    run_jobs(
        {name_of(*job): (train, *job, settings, arguments.data, threads) for job in jobs},
        file,
        arguments.workers,
        lambda name, r: f"{name}: held-out {r['held_out']:.2f} %, test {r['test']:.2f} %, {r['seconds']:.0f} s",
    )


def name_of(contender: str, width: int, lr: float, seed: int) -> str:
    return f"{contender}|D={width}|lr={lr:g}|seed={seed}"


def best_lr(file: ResultFile, contender: str, width: int, settings: dict) -> float:
    """The learning rate with the best held-out accuracy of the first seed."""
    seed = settings["seeds"][0]
    return max(settings["lrs"], key=lambda lr: file.runs[name_of(contender, width, lr, seed)]["held_out"])


def summarise(file: ResultFile, settings: dict, pairs: list[tuple[str, int]]) -> list[dict]:
    """Mean and spread of each contender over the seeds that the file has so far."""
    rows = []
    for contender, width in pairs:
        lr = best_lr(file, contender, width, settings)
        names = [name_of(contender, width, lr, seed) for seed in settings["seeds"]]
        runs = [file.runs[name] for name in names if name in file.runs]
        mean, spread = mean_spread(run["test"] for run in runs)
        rows.append({
            "contender": contender, "width": width, "lr": lr, "test_mean": round(mean, 2), "test_std": round(spread, 2),
            "test": [run["test"] for run in runs], "parameters": runs[0]["parameters"],
            "multiply_adds": runs[0]["multiply_adds"], "seeds": len(runs),
        })  # fmt: skip
    return rows


def table(rows: list[dict]) -> str:
    """The summary as the README shows it."""
    return markdown_table(
        ["model", "width D", "parameters (M)", "MMAC", "lr", "seeds", "test accuracy (%)"],
        [
            [
                r["contender"], r["width"], f"{r['parameters'] / 1e6:.2f}", f"{r['multiply_adds'] / 1e6:.1f}",
                f"{r['lr']:g}", r["seeds"],
                f"{r['test_mean']:.2f}" + (f" ± {r['test_std']:.2f}" if r["seeds"] > 1 else ""),
            ]
            for r in rows
        ],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with train.parquet and test.parquet")
    parser.add_argument("--quick", action="store_true", help="a few minutes: fewer photos and epochs, one seed")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, each on its share of the cores")
    arguments = outputs.parse(parser, "cifar")

    settings = dict(
        widths=[32, 64], depth=4, epochs=6, batch=128, warmup=140, weight_decay=0.05, lrs=[1e-3, 3e-3, 6e-3],
        seeds=[0, 1, 2], train_photos=20000, test_photos=5000, held_out=HELD_OUT,
    )  # fmt: skip
    if arguments.quick:
        settings |= dict(epochs=2, lrs=[3e-3], seeds=[0], train_photos=6000, test_photos=2000, held_out=500, warmup=20)
    narrow, wide = settings["widths"]
    pairs = [(c, w) for w in (narrow, wide) for c in CONTENDERS if w == narrow or c != NARROW_ONLY]
    file = ResultFile(arguments.out, settings)
    first, *others = settings["seeds"]
    run_all([(c, w, lr, first) for c, w in pairs for lr in settings["lrs"]], file, settings, arguments)
    chosen = [(c, w, best_lr(file, c, w, settings)) for c, w in pairs]
    for seed in others:  # every contender has a seed more before any has two: an interrupted file stays fair
        rows = summarise(file, settings, pairs)
        file.save(summary=rows, table=table(rows))
        run_all([(*choice, seed) for choice in chosen], file, settings, arguments)
    rows = summarise(file, settings, pairs)
    file.save(summary=rows, table=table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
