"""A short segmentation run on CamVid through MMSegmentation's own runner: does mIoU rise from a config alone?

    python -m benchmarks.camvid --data PATH [--quick] --out docs/results/camvid.json

PATH holds ``img_dir/{train,val}`` and ``ann_dir/{train,val}`` (367 and 101 photos of 360x480, labels 0..10,
11 = ignore). The model, its data pipeline and schedule are the config named below, trained from scratch. Every
validation is written to the result file at once; the same command after an interrupt goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

import mmseg_ext
from benchmarks import outputs
from jumbo_core.measure.report import ResultFile, markdown_table

# isort: split
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner

CONFIG = "jumbo/jumbo-pico_upernet_1xb4-500_camvid-360x480.py"


class CurveHook(Hook):
    """Writes each validation into a result file; after an interrupted validation it is run again on resuming."""

    priority = "LOW"

    def __init__(self, results: ResultFile) -> None:
        self.results = results
        self.start = time.perf_counter()  # seconds count from the start of this process

    def before_train(self, runner) -> None:
        if runner.iter and _point(runner.iter) not in self.results.runs:
            runner.val_loop.run()

    def after_val_epoch(self, runner, metrics: dict | None = None) -> None:
        scores = {name: round(float(metrics[name]), 2) for name in ("mIoU", "mAcc", "aAcc")}
        self.results.runs[_point(runner.iter)] = {**scores, "seconds": round(time.perf_counter() - self.start, 1)}
        self.results.save()
        print(f"iteration {runner.iter:4d} of {runner.max_iters}: mIoU {scores['mIoU']:.2f} %, "
              f"pixel accuracy {scores['aAcc']:.2f} %", flush=True)  # fmt: skip


def main(arguments: list[str] | None = None) -> ResultFile:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with img_dir and ann_dir")
    parser.add_argument("--quick", action="store_true", help="60 iterations instead of the config's 500")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    parser.add_argument(
        "--work-dir", type=Path, help="checkpoints and logs; default out/camvid, beside an --out of yours"
    )
    options = outputs.parse(parser, "camvid", arguments)
    torch.set_num_threads(options.threads)
    for folder in ("img_dir/train", "img_dir/val", "ann_dir/train", "ann_dir/val"):
        if not (options.data / folder).is_dir():
            parser.error(f"--data {options.data} has no folder {folder}")

    config = Config.fromfile(mmseg_ext.config_path(CONFIG))
    config.work_dir = str(options.work_dir or outputs.work_dir(options.out))
    for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
        loader.dataset.data_root = str(options.data)
    if options.quick:
        _shorten(config, iterations=60, val_interval=20)

    iterations = config.train_cfg.max_iters
    started = options.out.exists()
    results = ResultFile(options.out, dict(config=CONFIG, iterations=iterations, seed=config.randomness.seed))
    if _point(iterations) not in results.runs:
        if not started and Path(config.work_dir).exists():
            parser.error(f"{config.work_dir} holds another run, and {options.out} does not exist: delete or move it")
        results.save()
        config.resume = started and (Path(config.work_dir) / "last_checkpoint").exists()
        config.log_level = "WARNING"
        runner = Runner.from_cfg(config)
        runner.register_hook(CurveHook(results))
        runner.train()
    curve = sorted((int(name.split()[-1]), run["mIoU"]) for name, run in results.runs.items())
    rows = [["mIoU on val (%)", *(f"{miou:.1f}" for _, miou in curve)]]
    results.save(
        curve=[{"iteration": iteration, "mIoU": miou} for iteration, miou in curve],
        table=markdown_table(["iteration", *(str(iteration) for iteration, _ in curve)], rows),
    )
    print("mIoU on val: " + " -> ".join(f"{miou:.1f}" for _, miou in curve))
    return results


def _point(iteration: int) -> str:
    return f"iteration {iteration}"


def _shorten(config: Config, *, iterations: int, val_interval: int) -> None:
    config.train_cfg.update(max_iters=iterations, val_interval=val_interval)
    config.default_hooks.checkpoint.interval = val_interval
    warmup, decay = config.param_scheduler
    warmup.end = decay.begin = iterations // 6
    decay.end = iterations


if __name__ == "__main__":
    main()
