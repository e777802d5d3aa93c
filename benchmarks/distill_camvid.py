r"""Teacher and students of ``benchmarks.distill`` as MMSegmentation backbones on a short CamVid schedule.

    python -m benchmarks.distill_camvid --data ../shared/data/camvid --models out/distill \
        --out docs/results/distill_camvid.json [--quick]

--models is the folder that ``benchmarks.distill`` left: the teacher, and the students of its first seed. Each becomes
the backbone of a UPerNet by one line of config (``init_cfg``), beside the same backbones from scratch. Photos are
120x160, patch 4. An interrupted command picks up at the first model that is not in the file.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

import mmseg_ext
from benchmarks import outputs
from benchmarks.camvid import CONFIG
from jumbo_core.measure.report import ResultFile, markdown_table, mean_spread

# isort: split
from mmengine.config import Config
from mmengine.runner import Runner

VIT = dict(type="JumboViT", multiplier=0, registers=16, num_heads=4, embed_dims=64)
ADVENTURER = dict(type="AdventurerViT", arch="tiny", embed_dims=32, d_state=16, head_dim=32)
LINEAR = dict(ADVENTURER, multiplier=4)
# name: (backbone, folder below --models or None)
CONTENDERS = {
    "ViT + 16 registers (teacher), from scratch": (VIT, None),
    "ViT + 16 registers (teacher), trained": (VIT, "teacher"),
    "Adventurer, from scratch": (ADVENTURER, None),
    "Adventurer, labels only": (ADVENTURER, "Adventurer-labels-only-all-epochs"),
    "Adventurer, distilled": (ADVENTURER, "Adventurer-maps-and-masks"),
    "Jumbo-linear J=4, from scratch": (LINEAR, None),
    "Jumbo-linear J=4, labels only": (LINEAR, "Jumbo-linear-J4-labels-only-all-epochs"),
    "Jumbo-linear J=4, distilled": (LINEAR, "Jumbo-linear-J4-maps-and-masks"),
}


def config_of(backbone: dict, folder: Path | None, settings: dict, data: Path, work_dir: Path, seed: int) -> Config:
    """The CamVid config with small photos, this backbone, and CIFAR-10's statistics, which the models know."""
    config = Config.fromfile(mmseg_ext.config_path(CONFIG))
    crop, photo = tuple(settings["crop"]), tuple(settings["photo"])  # mmseg takes no lists here
    width = backbone["embed_dims"]
    config.model.backbone = dict(
        **backbone, num_layers=4, img_size=crop, patch_size=4, out_indices=(0, 1, 2, 3), drop_path_rate=0.0,
        init="short", init_cfg=None if folder is None else dict(type="Pretrained", checkpoint=str(folder)),
    )  # fmt: skip
    config.model.neck.embed_dim = width
    config.model.decode_head.update(in_channels=[width] * 4, channels=32)
    config.model.data_preprocessor.update(
        mean=[255 * m for m in (0.4914, 0.4822, 0.4465)], std=[255 * s for s in (0.2470, 0.2435, 0.2616)], size=crop
    )
    for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
        loader.dataset.data_root = str(data)
        for step in loader.dataset.pipeline:
            if step.type in ("RandomResize", "Resize"):
                step.scale = photo
            elif step.type == "RandomCrop":
                step.crop_size = crop
    iterations = settings["iterations"]
    config.train_cfg.update(max_iters=iterations, val_interval=iterations)
    warmup, decay = config.param_scheduler
    warmup.end = decay.begin = iterations // 10
    decay.end = iterations
    config.default_hooks.checkpoint.interval = iterations
    config.randomness = dict(seed=seed)
    config.work_dir, config.log_level = str(work_dir), "WARNING"
    config.experiment_name = f"distill_camvid_{time.time_ns()}"
    return config


def train(config: Config) -> dict:
    """Train one model; mIoU on val in percent."""
    runner = Runner.from_cfg(config)
    start = time.perf_counter()
    runner.train()
    scores = {name: runner.message_hub.get_scalar(f"val/{name}").current() for name in ("mIoU", "aAcc")}
    return {name: round(float(value), 2) for name, value in scores.items()} | {
        "seconds": round(time.perf_counter() - start, 1)
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with img_dir and ann_dir")
    parser.add_argument("--models", type=Path, required=True, help="folder that benchmarks.distill left")
    parser.add_argument("--quick", action="store_true", help="20 iterations, one seed")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    options = outputs.parse(parser, "distill_camvid", arguments)
    torch.set_num_threads(options.threads)
    for folder in ("img_dir/train", "img_dir/val", "ann_dir/train", "ann_dir/val"):
        if not (options.data / folder).is_dir():
            parser.error(f"--data {options.data} has no folder {folder}")
    for _, folder in CONTENDERS.values():
        if folder and not (options.models / folder).is_dir():
            parser.error(f"--models {options.models} has no {folder}: run python -m benchmarks.distill first")

    settings = dict(iterations=150, crop=[96, 128], photo=[160, 120], seeds=[0, 1])
    if options.quick:
        settings |= dict(iterations=20, seeds=[0])
    file = ResultFile(options.out, settings)
    for seed in settings["seeds"]:
        for name, (backbone, folder) in CONTENDERS.items():
            work_dir = outputs.work_dir(options.out) / f"{list(CONTENDERS).index(name)}-{seed}"
            place = None if folder is None else options.models / folder
            config = config_of(backbone, place, settings, options.data, work_dir, seed)
            result = file.run(f"{name}|seed={seed}", lambda c=config: train(c))
            print(f"{name}, seed {seed}: mIoU {result['mIoU']:.2f} %", flush=True)
        rows = []
        for name in CONTENDERS:
            runs = [run for key, run in file.runs.items() if key.startswith(f"{name}|")]
            mean, spread = mean_spread(run["mIoU"] for run in runs)
            rows.append([name, len(runs), f"{mean:.1f}" + (f" ± {spread:.1f}" if len(runs) > 1 else "")])
        file.save(table=markdown_table(["backbone", "seeds", "mIoU on val (%)"], rows))
    print(file.content["table"])


if __name__ == "__main__":
    main()
