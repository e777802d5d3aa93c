"""A small real distillation through LinearizerTrainer, as a function and as a program that can be killed.

``python -m tests.hosts.hf_distilling FOLDER [--steps 8] [--batch 16] [--kill-at 5] [--record]``
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from transformers import TrainingArguments, ViTConfig, ViTImageProcessor, ViTModel

from hf_ext import AdventurerConfig, AdventurerForImageClassification, JumboConfig, JumboModel, LinearizerTrainer
from tests.hosts.hf_training import KillAt, digits

SHAPE = dict(image_size=8, patch_size=2, num_channels=1, num_labels=10)


def teacher() -> JumboModel:
    """A ViT of random weights, which are what the student shall reproduce."""
    torch.manual_seed(7)
    shape = dict(hidden_size=24, num_hidden_layers=4, num_attention_heads=2, multiplier=0, registers=2)
    model = JumboModel(JumboConfig(**SHAPE, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def student(cls=AdventurerForImageClassification, **changes) -> AdventurerForImageClassification:
    torch.manual_seed(0)
    shape = dict(hidden_size=16, num_hidden_layers=2, state_size=4, head_dim=8)
    return cls(AdventurerConfig(**{**SHAPE, **shape, **changes}))


def vit_folder(path: Path, cls=ViTModel, **changes) -> Path:
    """A local Transformers folder of a small ViT with its preprocessing."""
    torch.manual_seed(3)
    shape = dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
    config = ViTConfig(**{**dict(image_size=8, patch_size=2, num_channels=1), **shape, **changes})
    cls(config).save_pretrained(path)
    size = {"height": config.image_size, "width": config.image_size}
    ViTImageProcessor(size=size, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]).save_pretrained(path)
    return path


def make_trainer(folder, *, steps=8, batch=16, kill_at=None, net=None, guide=None, **options) -> LinearizerTrainer:
    own = ("stages", "mask_ratio", "mask_weight", "activation_weight", "beta", "normalize_target", "resample_teacher")
    method = {name: options.pop(name) for name in own if name in options}
    settings = dict(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        max_steps=steps,
        save_steps=4,
        logging_steps=1,
        learning_rate=2e-3,
        use_cpu=True,
        dataloader_num_workers=0,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    return LinearizerTrainer(
        student(drop_path_rate=0.1) if net is None else net,
        teacher() if guide is None else guide,
        TrainingArguments(**{**settings, **options}),
        **{"stages": 2, **method},
        train_dataset=digits(slice(0, 400)),
        eval_dataset=digits(slice(400, 440)),
        callbacks=[KillAt(kill_at)] if kill_at else [],
    )


def record(trainer: LinearizerTrainer) -> list[dict]:
    """Collect, in the returned list, every training batch and the random state it met the model with."""
    seen = []

    def look(module, args):
        if module.training:
            seen.append({"images": args[0].clone(), "random": torch.get_rng_state()})

    trainer.linearizer.register_forward_pre_hook(look)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--record", action="store_true", help="plain gradient descent; write down what each rank saw")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {}
    if options.record:
        settings = dict(optim="sgd", lr_scheduler_type="constant", learning_rate=0.5, max_grad_norm=0.0)
        settings |= dict(weight_decay=0.0, net=student())
    trainer = make_trainer(
        options.folder, steps=options.steps, batch=options.batch, kill_at=options.kill_at, **settings
    )
    seen = record(trainer)
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    if options.record:
        state = {name: value.clone() for name, value in trainer.linearizer.state_dict().items()}
        result = {"seen": seen, "state": state, "metrics": metrics, "log": trainer.state.log_history}
        torch.save(result, options.folder / f"rank{os.environ.get('RANK', 0)}.pt")


if __name__ == "__main__":
    main()
