r"""Token fusion in a segmentation model that was trained without it: mIoU and time per photo at three reductions.

    python -m benchmarks.tofu_camvid --data ../shared/data/camvid --out docs/results/tofu_camvid.json [--quick]

A ViT of timm under a UPerNet is trained once on CamVid (photos of 180x240, patch 8: 690 patches), from scratch and
without fusion. Then its blocks fuse tokens, untrained, by two plans for each share of the token-layers to save: the
paper's (prune in the first half, MLERP in the rest, the same r everywhere) and the adaptive one, from a linearity
profile measured with the labels of training photos. mIoU is on the validation photos, which no choice has seen, at the
labels' full size. Times are of one photo, the models taking turns. An interrupted command picks up where it stopped.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import mmseg_ext
from benchmarks import outputs
from benchmarks.camvid import CONFIG
from jumbo_core.measure.report import ResultFile, markdown_table
from jumbo_core.measure.turns import spread, take_turns
from jumbo_core.tofu import FusionPlan, LinearityProfile, apply_tofu, linearity_profile

# isort: split
from mmengine.config import Config
from mmengine.runner import Runner
from mmengine.runner.checkpoint import load_checkpoint
from mmseg.registry import DATASETS, MODELS

UNFUSED = "unfused"
BATCH = 4  # photos of a calibration batch


def config_of(settings: dict, data: Path, work_dir: Path) -> Config:
    """The CamVid config with a plain ViT of timm in place of its backbone, and a head that costs less than that."""
    config = Config.fromfile(mmseg_ext.config_path(CONFIG))
    width, depth, iterations = settings["width"], settings["depth"], settings["iterations"]
    config.model.backbone = dict(
        type="ToFuViT",
        model_name="vit_tiny_patch16_224",
        model_options=dict(patch_size=8, embed_dim=width, depth=depth, num_heads=settings["heads"]),
        img_size=config.crop_size,
        out_indices=[(i + 1) * depth // 4 - 1 for i in range(4)],
    )
    config.model.neck.embed_dim = width
    config.model.decode_head.update(in_channels=[width] * 4, channels=settings["channels"])
    config.optim_wrapper = dict(
        type="OptimWrapper",
        optimizer=dict(type="AdamW", lr=settings["lr"], betas=(0.9, 0.999), weight_decay=0.05),
        clip_grad=dict(max_norm=1.0),
        paramwise_cfg=dict(
            norm_decay_mult=0.0,
            bias_decay_mult=0.0,
            custom_keys={name: dict(decay_mult=0.0) for name in ("pos_embed", "cls_token")},
        ),
    )
    for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
        loader.dataset.data_root = str(data)
    config.test_dataloader.dataset.indices = settings["val_photos"]
    config.val_dataloader = config.val_cfg = config.val_evaluator = None  # every model is tested below, this one too
    config.train_cfg.update(max_iters=iterations)
    config.train_cfg.pop("val_interval")
    config.default_hooks.checkpoint.interval = max(1, iterations // 6)
    warmup, decay = config.param_scheduler
    warmup.end = decay.begin = iterations // 10
    decay.end = iterations
    config.randomness = dict(seed=settings["seed"])
    config.work_dir, config.log_level = str(work_dir), "WARNING"
    return config


def train(config: Config, *, resume: bool) -> dict:
    """Train the model without fusion, from the last checkpoint if there is one."""
    config = copy.deepcopy(config)
    config.resume = resume and (Path(config.work_dir) / "last_checkpoint").exists()
    config.experiment_name = f"tofu_camvid_train_{time.time_ns()}"
    runner = Runner.from_cfg(config)
    start = time.perf_counter()
    runner.train()
    losses = runner.message_hub.get_scalar("train/loss")
    return {"loss": round(float(losses.mean(10)), 4), "seconds": round(time.perf_counter() - start, 1)}


def calibration(model: nn.Module, config: Config, photos: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of training photos as the model takes them, with labels at the size of its logits."""
    dataset = dict(
        config.test_dataloader.dataset, data_prefix=config.train_dataloader.dataset.data_prefix, indices=None
    )
    dataset = DATASETS.build(dataset)
    step, ignore = len(dataset) // photos, config.model.decode_head.ignore_index
    items = [dataset[i * step] for i in range(photos)]
    batches = []
    for start in range(0, photos, BATCH):
        chosen = items[start : start + BATCH]
        batch = {name: [item[name] for item in chosen] for name in ("inputs", "data_samples")}
        images = model.data_preprocessor(batch, False)["inputs"]
        with torch.no_grad():
            size = model(images).shape[-2:]
        labels = torch.stack([sample.gt_sem_seg.data for sample in batch["data_samples"]])  # (B, 1, H, W)
        labels = F.interpolate(labels.float(), size=size, mode="nearest").squeeze(1).long()
        batches.append((images, labels.masked_fill(labels == ignore, -100)))
    return batches


def plans_of(profile: LinearityProfile, settings: dict) -> dict[str, FusionPlan]:
    """By name: the paper's and the adaptive plan for every reduction."""
    depth, patches, plans = settings["depth"], profile.num_patches, {}
    for reduction in settings["reductions"]:
        paper = FusionPlan.reaching(partial(FusionPlan.paper, depth), reduction, patches)
        plans[f"paper, r={paper.counts[0]}"] = paper
        plans[f"adaptive, {100 * reduction:.0f} %"] = FusionPlan.from_profile(profile, reduction)
    return plans


def evaluate(runner: Runner, plan: FusionPlan | None, patches: int) -> dict:
    """mIoU of the runner's model on its test photos, fused for the time of the test."""
    told = {}
    if plan is not None:
        handle = apply_tofu(runner.model, plan)
        told = {
            "plan": {"ops": list(plan.ops), "counts": list(plan.counts)},
            "token_layers_saved": round(plan.saved(patches), 4),
            "multiply_adds_saved": round(handle.report(patches).saved, 4),
        }
    metrics = runner.test()
    if plan is not None:
        handle.remove()
    return {name: round(float(metrics[name]), 2) for name in ("mIoU", "aAcc")} | told


def measure(model: nn.Module, plans: dict[str, FusionPlan], image: torch.Tensor, repeats: int) -> dict:
    """Milliseconds of one photo through the backbone and the whole segmentor, unfused and by each plan, in turns.

    Raises:
        RuntimeError: a plan that removes nothing changes the output: nothing is timed then.
    """
    model.eval()
    idle = copy.deepcopy(model)
    apply_tofu(idle, FusionPlan.paper(len(model.backbone.vit.blocks), 0))
    with torch.inference_mode():
        if not torch.equal(idle(image), model(image)):
            raise RuntimeError("fusing 0 tokens changes the output: nothing was timed")
    models = {UNFUSED: model, "fused, r=0": idle}
    for name, plan in plans.items():
        models[name] = copy.deepcopy(model)
        apply_tofu(models[name], plan)
    parts = {"backbone": lambda m: m.backbone(image), "whole": lambda m: m(image)}
    calls = {f"{name}|{part}": partial(run, m) for name, m in models.items() for part, run in parts.items()}
    times = take_turns(calls, repeats)
    result = {}
    for name in models:
        result[name] = {part: spread(times[f"{name}|{part}"]) for part in parts}
        for part in parts:
            pairs = zip(times[f"{UNFUSED}|{part}"], times[f"{name}|{part}"], strict=True)
            result[name][part]["speedup"] = round(statistics.median(whole / fused for whole, fused in pairs), 3)
    return result


def table(runs: dict[str, dict]) -> str:
    """The result as the README shows it."""
    rows = []
    for name, run in runs.items():
        if "mIoU" not in run:
            continue
        saved = [f"{100 * run.get(kind, 0):.0f} %" for kind in ("token_layers_saved", "multiply_adds_saved")]
        times = [runs["times"][name][part] for part in ("backbone", "whole")]
        times = [text for time in times for text in (f"{time['median']:.0f}", f"{time['speedup']:.2f}")]
        rows.append([name, *saved, f"{run['mIoU']:.1f}", *times])
    header = ["plan", "token-layers saved", "multiply-adds of the blocks saved", "mIoU on val (%)"]
    header += ["backbone, ms per photo", "its speed over unfused", "with head, ms", "its speed over unfused"]
    return markdown_table(header, rows)


def main(arguments: list[str] | None = None) -> ResultFile:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with img_dir and ann_dir")
    parser.add_argument("--quick", action="store_true", help="a few iterations and photos")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    parser.add_argument("--work-dir", type=Path, help="checkpoints and logs; default out/NAME_OF_RESULT_FILE")
    options = outputs.parse(parser, "tofu_camvid", arguments)
    torch.set_num_threads(options.threads)
    for folder in ("img_dir/train", "img_dir/val", "ann_dir/train", "ann_dir/val"):
        if not (options.data / folder).is_dir():
            parser.error(f"--data {options.data} has no folder {folder}")

    settings = dict(
        width=192, depth=8, heads=3, channels=32, lr=1e-3, iterations=450, val_photos=None, calibration_photos=32,
        reductions=[0.2, 0.35, 0.5], repeats=21, seed=0,
    )  # fmt: skip
    if options.quick:
        settings |= dict(width=64, heads=2, depth=4, iterations=12, val_photos=4, calibration_photos=8, repeats=3)
    work_dir = options.work_dir or outputs.work_dir(options.out)
    started = options.out.exists()
    file = ResultFile(options.out, settings)
    if "training" not in file.runs and not started and work_dir.exists():
        parser.error(f"{work_dir} holds another run, and {options.out} does not exist: delete or move it")
    file.save()
    config = config_of(settings, options.data, work_dir)
    trained = file.run("training", lambda: train(config, resume=started))
    print(f"trained {settings['iterations']} iterations, loss {trained['loss']:.3f}", flush=True)

    config.load_from = str(work_dir / f"iter_{settings['iterations']}.pth")
    config.experiment_name = f"tofu_camvid_test_{time.time_ns()}"
    runner = Runner.from_cfg(config)
    model = MODELS.build(config.model)
    load_checkpoint(model, config.load_from, map_location="cpu")
    model.eval()
    batches = calibration(model, config, settings["calibration_photos"])
    profile = file.run("profile", lambda: {"json": linearity_profile(model, batches).to_json()})
    profile = LinearityProfile.from_json(profile["json"])
    plans = plans_of(profile, settings)
    for name, plan in {UNFUSED: None, **plans}.items():
        result = file.run(name, lambda plan=plan: evaluate(runner, plan, profile.num_patches))
        print(f"{name}: mIoU {result['mIoU']:.2f} %", flush=True)
    file.run("times", lambda: measure(model, plans, batches[0][0][:1], settings["repeats"]))
    file.save(table=table(file.runs))
    print(file.content["table"])
    return file


if __name__ == "__main__":
    main()
