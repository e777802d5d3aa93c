"""A segmentation task of a few seconds: images in ADE20K's layout, and a config of plugins/mmseg cut down to it."""

from pathlib import Path

import numpy as np
from mmengine.config import Config
from PIL import Image

import mmseg_ext

SIZE = 48
BASE = "jumbo/jumbo-tiny_upernet_8xb2-160k_ade20k-512x512.py"


def write_ade20k(root: Path, *, training: int = 8, validation: int = 3) -> Path:
    """Images of coloured squares; labels 1 = left colour, 2 = right colour, 0 = other, as ADE20K numbers them."""
    rng = np.random.default_rng(0)
    for split, count in (("training", training), ("validation", validation)):
        for kind in ("images", "annotations"):
            (root / kind / split).mkdir(parents=True)
        for i in range(count):
            image = rng.integers(0, 60, (SIZE, SIZE, 3), dtype=np.uint8)
            label = np.zeros((SIZE, SIZE), np.uint8)
            for value, channel in ((1, 0), (2, 2)):
                x, y = rng.integers(0, SIZE // 2, 2)
                image[y : y + 20, x : x + 20, channel] += 190
                label[y : y + 20, x : x + 20] = value
            Image.fromarray(image).save(root / "images" / split / f"ADE_{i}.jpg", quality=95)
            Image.fromarray(label).save(root / "annotations" / split / f"ADE_{i}.png")
    return root


def tiny_config(data: Path, work: Path, *, iterations: int = 6, drop: float = 0.3) -> Config:
    """The ADE20K UPerNet config at toy size; its dataset, pipelines, hooks and optimizer groups stay."""
    config = Config.fromfile(mmseg_ext.config_path(BASE))
    config.merge_from_dict(overrides(data, work, iterations=iterations, drop=drop))
    for pipeline in (config.train_dataloader.dataset.pipeline, config.val_dataloader.dataset.pipeline):
        for step in pipeline:
            if step.type in ("RandomResize", "Resize"):
                step.scale = (SIZE, SIZE)
            if step.type == "RandomCrop":
                step.crop_size = (32, 32)
    config.test_dataloader = config.val_dataloader
    return config


def overrides(data: Path, work: Path, *, iterations: int, drop: float) -> dict:
    backbone = dict(arch="pico", num_layers=4, num_heads=2, embed_dims=16, multiplier=2, img_size=32, patch_size=8)
    backbone.update(out_indices=(0, 1, 2, 3), drop_path_rate=drop, init_cfg=None)
    changes = {f"model.backbone.{key}": value for key, value in backbone.items()}
    head = dict(num_classes=150, channels=8, norm_cfg=dict(type="BN"))
    changes.update({f"model.decode_head.{key}": value for key, value in head.items()})
    changes.update({f"model.auxiliary_head.{key}": value for key, value in (head | dict(in_channels=16)).items()})
    for loader in ("train", "val"):
        changes[f"{loader}_dataloader.dataset.data_root"] = str(data)
        changes[f"{loader}_dataloader.num_workers"] = 0
        changes[f"{loader}_dataloader.persistent_workers"] = False
    return changes | {
        "model.decode_head.in_channels": [16] * 4,
        "model.neck.embed_dim": 16,
        "model.neck.norm_cfg": dict(type="BN"),
        "model.data_preprocessor.size": (32, 32),
        "model.test_cfg": dict(mode="slide", crop_size=(32, 32), stride=(16, 16)),
        "train_cfg.max_iters": iterations,
        "train_cfg.val_interval": iterations // 2,
        "optim_wrapper.optimizer.lr": 1e-3,
        "param_scheduler": [dict(type="PolyLR", eta_min=0.0, power=1.0, begin=0, end=iterations, by_epoch=False)],
        "default_hooks.checkpoint.interval": iterations // 2,
        "default_hooks.logger.interval": 1,
        "randomness": dict(seed=0),
        "work_dir": str(work),
    }
