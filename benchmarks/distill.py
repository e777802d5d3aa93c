"""Distilling a ViT into linear-time students on CIFAR-10: what maps, masks and both are worth, at equal budgets.

    python -m benchmarks.distill --data ../shared/data/cifar10 --out docs/results/distill.json [--quick]

The teacher is a ViT (class token and 16 registers) trained on 18,000 photos. Students see 1,000 of them, for so many
epochs that labels have nothing more to give. (Where they still had, with 2,000 photos and 20 epochs in all, distilling
was not worth its epochs.) They are an Adventurer and a Jumbo-linear of equal shape, each (a) trained with labels only,
for the epochs of fine-tuning and for all epochs together, or distilled first with (b) masked prediction only, (c)
activation maps only, (d) both, then fine-tuned as in (a). All share optimizer, rates and batch size. The table shows
accuracy on the 5,000 test photos, and how far the student's activation maps of 500 of them are from the teacher's (mean
over stages of 1 - cosine of map rows).

An interrupted command picks up at the first run that is not in the file. Teacher and first students stay in --models.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import fmean

import torch

from benchmarks import outputs
from benchmarks.cifar import HELD_OUT, Photos, load
from benchmarks.pool import run_jobs
from jumbo_core.measure import ResultFile, count_parameters, markdown_table, mean_spread

KINDS = {"Adventurer": 0, "Jumbo-linear J=4": 4}  # multiplier
# Epochs before fine-tuning come from settings; weights of (maps, masks) while distilling, None = labels.
RECIPES = {
    "labels only": None,
    "labels only, all epochs": None,
    "masks only": (0.0, 1.0),
    "maps only": (1.0, 0.0),
    "maps and masks": (1.0, 1.0),
}


def split(data: str, settings: dict) -> tuple[Photos, Photos, Photos]:
    """Photos of the teacher, those of the students (a part of them), and the test photos."""
    images, labels = load(Path(data) / "train.parquet", settings["train_photos"])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[settings["held_out"] :]
    few = order[: settings["student_photos"]]
    test = Photos(*load(Path(data) / "test.parquet", settings["test_photos"]))
    return (
        Photos(images[order], labels[order], flip=True, shift=2),
        Photos(images[few], labels[few], flip=True),
        test,
    )


def arguments_of(folder: str, settings: dict, *, epochs: int, seed: int, batch: int, **options):
    from transformers import TrainingArguments

    return TrainingArguments(
        folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=500,
        learning_rate=settings["lr"],
        weight_decay=settings["weight_decay"],
        lr_scheduler_type="cosine",
        warmup_steps=settings["warmup"],
        max_grad_norm=1.0,
        seed=seed,
        use_cpu=True,
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        **{"save_strategy": "no", **options},
    )


def supervise(
    model, photos: Photos, test: Photos, settings: dict, *, folder: str, resume: bool = False, **run
) -> float:
    """Train with labels through the Trainer; accuracy on the test photos in percent."""
    from transformers import PrinterCallback, Trainer
    from transformers.trainer_utils import get_last_checkpoint

    from jumbo_core.jumbo import param_groups

    trainer = Trainer(
        model,
        arguments_of(folder, settings, **run),
        train_dataset=photos,
        optimizers=(torch.optim.AdamW(param_groups(model, settings["lr"], settings["weight_decay"])), None),
        compute_metrics=lambda p: {"accuracy": 100 * float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if resume else None)
    return round(trainer.evaluate(test)["eval_accuracy"], 3)


def train_teacher(settings: dict, data: str, folder: Path) -> dict:
    """Train the teacher and save it; an interrupted training goes on from its last epoch."""
    from transformers import set_seed

    from hf_ext import JumboConfig, JumboForImageClassification

    photos, _, test = split(data, settings)
    set_seed(0)
    width = settings["teacher_width"]
    model = JumboForImageClassification(
        JumboConfig(
            image_size=32, patch_size=4, hidden_size=width, num_hidden_layers=settings["teacher_depth"],
            num_attention_heads=width // 16, multiplier=0, registers=16, drop_path_rate=0.0, num_labels=10,
            init="short",
        )
    )  # fmt: skip
    work = folder / "teacher-training"
    work.mkdir(parents=True, exist_ok=True)
    accuracy = supervise(
        model, photos, test, settings, folder=str(work), resume=True, epochs=settings["teacher_epochs"], seed=0,
        batch=128, save_strategy="epoch", save_total_limit=1,
    )  # fmt: skip
    model.save_pretrained(folder / "teacher")
    return {"test": accuracy, "parameters": count_parameters(model)}


def train_student(kind: str, recipe: str, seed: int, settings: dict, data: str, models: str, threads: int) -> dict:
    """One student from its first step to its test accuracy."""
    from transformers import AutoModelForImageClassification, PrinterCallback, set_seed

    from hf_ext import AdventurerConfig, AdventurerForImageClassification, LinearizerTrainer
    from jumbo_core.distill import map_distance

    torch.set_num_threads(threads)
    _, photos, test = split(data, settings)
    teacher = AutoModelForImageClassification.from_pretrained(Path(models) / "teacher")
    set_seed(seed)
    model = AdventurerForImageClassification(
        AdventurerConfig(
            image_size=32, patch_size=4, hidden_size=settings["width"], num_hidden_layers=settings["depth"],
            state_size=16, head_dim=32, multiplier=KINDS[kind], num_labels=10, init="short",
        )
    )  # fmt: skip
    whole = test.images[:500]
    result = {"kind": kind, "recipe": recipe, "seed": seed, "parameters": count_parameters(model)}
    epochs, weights = settings["finetune_epochs"], RECIPES[recipe]
    with tempfile.TemporaryDirectory() as folder:
        if weights is not None:
            trainer = LinearizerTrainer(
                model,
                teacher,
                arguments_of(folder, settings, epochs=settings["distill_epochs"], seed=seed, batch=64),
                train_dataset=photos,
                activation_weight=weights[0],
                mask_weight=weights[1],
                mask_ratio=settings["mask_ratio"],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            result["maps_after_distilling"] = round(fmean(map_distance((teacher, model), whole)), 5)
        elif recipe.endswith("all epochs"):
            epochs += settings["distill_epochs"]
        result["test"] = supervise(model, photos, test, settings, folder=folder, epochs=epochs, seed=seed, batch=64)
    result["maps"] = round(fmean(map_distance((teacher, model), whole)), 5)
    if seed == 0:
        model.save_pretrained(Path(models) / f"{kind} {recipe}".replace(" ", "-").replace(",", "").replace("=", ""))
    return result


def name_of(kind: str, recipe: str, seed: int) -> str:
    return f"{kind}|{recipe}|seed={seed}"


def summarise(file: ResultFile, settings: dict) -> list[dict]:
    """Mean and spread over the seeds that the file has so far."""
    rows = []
    for kind in KINDS:
        for recipe in RECIPES:
            names = [name_of(kind, recipe, seed) for seed in settings["seeds"]]
            runs = [file.runs[name] for name in names if name in file.runs]
            if not runs:
                continue
            mean, spread = mean_spread(run["test"] for run in runs)
            distilled = [run["maps_after_distilling"] for run in runs if "maps_after_distilling" in run]
            rows.append({
                "kind": kind, "recipe": recipe, "seeds": len(runs), "test_mean": round(mean, 2),
                "test_std": round(spread, 2), "maps": round(fmean(run["maps"] for run in runs), 4),
                "maps_after_distilling": round(fmean(distilled), 4) if distilled else None,
                "parameters": runs[0]["parameters"],
            })  # fmt: skip
    return rows


def table(rows: list[dict], settings: dict) -> str:
    """The summary as the README shows it."""
    before, after = settings["distill_epochs"], settings["finetune_epochs"]
    budget = {"labels only": f"0 + {after}", "labels only, all epochs": f"0 + {before + after}"}
    return markdown_table(
        ["student", "trained with", "epochs", "seeds", "test accuracy (%)", "maps' distance, distilled", "at the end"],
        [
            [
                r["kind"], r["recipe"], budget.get(r["recipe"], f"{before} + {after}"), r["seeds"],
                f"{r['test_mean']:.2f}" + (f" ± {r['test_std']:.2f}" if r["seeds"] > 1 else ""),
                "-" if r["maps_after_distilling"] is None else f"{r['maps_after_distilling']:.4f}", f"{r['maps']:.4f}",
            ]
            for r in rows
        ],
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with train.parquet and test.parquet")
    parser.add_argument(
        "--models", type=Path, help="folder for the models; default out/distill, beside an --out of yours"
    )
    parser.add_argument("--quick", action="store_true", help="a few minutes: fewer photos and epochs, one seed")
    parser.add_argument("--workers", type=int, default=2, help="students at a time, each on its share of the cores")
    parser.add_argument("--student-photos", type=int, help="photos that students see (default 1000)")
    parser.add_argument("--epochs", type=int, nargs=2, metavar=("DISTILLING", "LABELS"), help="default 45 15")
    options = outputs.parse(parser, "distill", arguments)

    settings = dict(
        train_photos=20000, held_out=HELD_OUT, student_photos=1000, test_photos=5000, seeds=[0, 1, 2],
        teacher_width=64, teacher_depth=4, teacher_epochs=14, width=32, depth=4, distill_epochs=45, finetune_epochs=15,
        lr=3e-3, weight_decay=0.05, warmup=0.1, mask_ratio=0.75,
    )  # fmt: skip
    if options.quick:
        settings |= dict(
            train_photos=4000, held_out=1000, student_photos=1000, test_photos=1000, seeds=[0], teacher_epochs=3,
            distill_epochs=1, finetune_epochs=1,
        )  # fmt: skip
    if min(options.student_photos or 1, *(options.epochs or [1])) < 1 or options.student_photos == 0:
        parser.error(f"--student-photos {options.student_photos} and --epochs {options.epochs}: at least 1 each")
    if options.student_photos is not None:
        settings["student_photos"] = options.student_photos
    if options.epochs is not None:
        settings["distill_epochs"], settings["finetune_epochs"] = options.epochs
    models = options.models or outputs.work_dir(options.out)
    file = ResultFile(options.out, settings)
    teacher = file.run("teacher", lambda: train_teacher(settings, options.data, models))
    print(f"teacher: {teacher['test']:.2f} % of the test photos", flush=True)
    if not (models / "teacher").is_dir():
        parser.error(f"{options.out} tells of a teacher, but {models / 'teacher'} is gone: give --models or delete it")
    threads = max(1, (os.cpu_count() or 1) // options.workers)
    for seed in settings["seeds"]:  # every recipe has a seed more before any has two: an interrupted file stays fair
        jobs = [(kind, recipe, seed) for kind in KINDS for recipe in RECIPES]
        run_jobs(
            {name_of(*job): (train_student, *job, settings, options.data, str(models), threads) for job in jobs},
            file,
            options.workers,
            lambda name, run: f"{name}: {run['test']:.2f} %",
        )
        rows = summarise(file, settings)
        file.save(summary=rows, table=table(rows, settings))
    print(table(summarise(file, settings), settings))


if __name__ == "__main__":
    main()
