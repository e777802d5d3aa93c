"""A small real training run through Transformers' Trainer, as a function and as a program that can be killed.

``python -m tests.hosts.hf_training FOLDER [--steps 12] [--kill-at 7] [--batch 16]``
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
from sklearn.datasets import load_digits
from torch.optim import AdamW
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_ext import JumboConfig, JumboForImageClassification, PatchDropSchedule
from jumbo_core.jumbo import param_groups

CONFIG = dict(
    image_size=8,
    patch_size=2,
    num_channels=1,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    multiplier=2,
    num_labels=10,
    init="short",
)


def digits(part: slice) -> list[dict]:
    """scikit-learn's handwritten digits, 8x8 scans of 1797, as samples for the Trainer."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    return [{"pixel_values": x, "labels": int(y)} for x, y in zip(images[part], data.target[part], strict=True)]


class KillAt(TrainerCallback):
    """Ends the process as a power cut would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def make_trainer(
    folder, *, steps=12, batch=16, kill_at=None, drop_path=0.1, patch_drop=True, lr=2e-3, **arguments
) -> Trainer:
    torch.manual_seed(0)
    model = JumboForImageClassification(JumboConfig(**CONFIG, drop_path_rate=drop_path))
    settings = dict(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        max_steps=steps,
        save_steps=4,
        logging_steps=1,
        learning_rate=lr,
        warmup_steps=3,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        dataloader_num_workers=0,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    callbacks = [PatchDropSchedule(0.5, 0.1)] if patch_drop else []
    return Trainer(
        model=model,
        args=TrainingArguments(**{**settings, **arguments}),
        train_dataset=digits(slice(0, 1400)),
        eval_dataset=digits(slice(1400, None)),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        optimizers=(AdamW(param_groups(model, lr, 0.05)), None),
        callbacks=callbacks + ([KillAt(kill_at)] if kill_at else []),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--plain", action="store_true", help="nothing random in the model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    randomness = dict(drop_path=0.0, patch_drop=False) if options.plain else {}
    trainer = make_trainer(
        options.folder, steps=options.steps, batch=options.batch, kill_at=options.kill_at, **randomness
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
