"""Demo: a Jumbo UPerNet and the registers baseline, trained and tested through MMSegmentation's own runner."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from pathlib import Path

import mmseg_ext

# isort: split
import numpy as np
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmseg.apis import inference_model
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from demo.rows import Row
from demo.scenes import write_scenes
from jumbo_core.measure.turns import median_ms

CONFIG = "jumbo/jumbo-pico_upernet_1xb16-320_digit-scenes-48x48.py"
MODELS = {"ViT + 16 registers": dict(multiplier=0, registers=16), "Jumbo": {}}
SHOWN = 4


def run(out: Path, *, seed: int = 0) -> tuple[list[Row], dict[str, Path]]:
    """Make the scenes, train and test both models at equal width and budget, measure and draw.

    Args:
        out: folder for scenes, checkpoints, the log and the picture.
        seed: of scenes, initial weights and training.

    Returns:
        one row of the closing table, and {"segmentation": picture}.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    data = write_scenes(out / "scenes", seed=seed)
    columns = (
        TextColumn("segmentation: {task.description:20}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    runners, miou = {}, {}
    # The host logs to the standard streams; the bars keep the terminal, the rest goes to a file.
    with (
        (out / "segmentation.log").open("w") as log,
        Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as progress,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        for name, backbone in MODELS.items():
            config = _config(name, backbone, data, out, seed)
            task = progress.add_task(name, total=config.train_cfg.max_iters, state="")
            runner = Runner.from_cfg(config)
            runner.register_hook(ProgressHook(progress, task))
            runner.train()
            miou[name] = float(runner.test()["mIoU"])
            progress.update(task, state=f"mIoU {miou[name]:.1f} %")
            runners[name] = runner
        milliseconds = _time_per_image({name: r.model for name, r in runners.items()})
        picture = _draw(runners, data, out / "segmentation.png")

    baseline, jumbo = MODELS
    row = Row(
        task="segmentation (digit scenes)",
        host="MMSegmentation",
        baseline=baseline,
        metric="mIoU %",
        better="higher",
        baseline_quality=miou[baseline],
        jumbo_quality=miou[jumbo],
        baseline_ms=milliseconds[baseline],
        jumbo_ms=milliseconds[jumbo],
    )
    return [row], {"segmentation": picture}


class ProgressHook(Hook):
    """Moves one bar with every iteration and shows the loss beside it."""

    def __init__(self, progress: Progress, task: int) -> None:
        self.progress, self.task = progress, task

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        self.progress.update(self.task, advance=1, state=f"loss {float(outputs['loss']):.3f}")


def _config(name: str, backbone: dict, data: Path, out: Path, seed: int) -> Config:
    config = Config.fromfile(mmseg_ext.config_path(CONFIG))
    config.model.backbone.update(backbone)
    for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
        loader.dataset.data_root = str(data)
    short = "jumbo" if name == "Jumbo" else "registers"
    config.work_dir = str(out / "mmseg" / short)
    config.experiment_name = f"demo_{short}_{time.time_ns()}"
    config.randomness = dict(seed=seed)
    return config


def _time_per_image(models: dict[str, torch.nn.Module]) -> dict[str, float]:
    """Milliseconds of one image's forward pass, see :func:`median_ms`."""
    device = next(iter(models.values())).data_preprocessor.device
    image = torch.randn(1, 3, 48, 48, device=device)

    def forward(model: torch.nn.Module) -> torch.Tensor:
        return model(image, mode="tensor").cpu()  # waits for a GPU, if there is one

    return median_ms({name: partial(forward, model.eval()) for name, model in models.items()}, repeats=60)


def _draw(runners: dict[str, Runner], data: Path, path: Path) -> Path:
    """One row a scene: image, ground truth, both predictions laid over it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    meta = next(iter(runners.values())).test_dataloader.dataset.metainfo
    palette = np.array(meta["palette"], np.float32)
    images = sorted((data / "images" / "validation").glob("*.jpg"))[:SHOWN]
    figure, axes = plt.subplots(SHOWN, 4, figsize=(8.4, 2.15 * SHOWN + 0.6))
    for number, (row, file) in enumerate(zip(axes, images, strict=True)):
        image = np.asarray(Image.open(file).convert("RGB"), np.float32)
        truth = np.asarray(Image.open(data / "annotations" / "validation" / f"{file.stem}.png"))
        maps = {"scene": None, "ground truth": truth}
        for name, runner in runners.items():
            runner.model.cfg = runner.cfg  # where the host's inference function looks for the pipeline
            maps[name] = inference_model(runner.model, str(file)).pred_sem_seg.data[0].cpu().numpy()
        for axis, (title, labels) in zip(row, maps.items(), strict=True):
            shown = image if labels is None else _overlay(image, labels, palette)
            axis.imshow(shown.astype(np.uint8), interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            if number == 0:
                axis.set_title(title, fontsize=10)
    classes = [plt.Line2D([], [], marker="s", linestyle="", color=palette[i] / 255) for i in range(1, 11)]
    figure.legend(classes, range(10), ncols=10, loc="lower center", frameon=False, fontsize=9, handletextpad=0.1)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _overlay(image: np.ndarray, labels: np.ndarray, palette: np.ndarray) -> np.ndarray:
    """Digits in their class colour, the rest of the image dimmed."""
    mask = (labels > 0)[..., None]
    return np.where(mask, 0.25 * image + 0.75 * palette[labels], 0.5 * image)
