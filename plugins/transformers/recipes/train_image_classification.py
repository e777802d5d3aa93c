"""Train or fine-tune a Jumbo image classifier with Transformers' Trainer.

One process:      python train_image_classification.py --model ../jumbo_tiny --train_data photos/train ...
Several devices:  accelerate launch train_image_classification.py --model ../jumbo_tiny --train_data photos/train ...

Data: a folder with one sub-folder of images a class, or a parquet file (or folder of them) in the layout of Hugging
Face datasets, columns image {bytes, path} and label. Every option of TrainingArguments is an option here
(--output_dir, --learning_rate, --num_train_epochs, --bf16, --gradient_checkpointing, --push_to_hub, ...).
Started again with the same --output_dir it goes on from the last checkpoint there.
"""

from __future__ import annotations

import io
import json
import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_ext import PatchDropSchedule, jumbo_image_processor
from jumbo_core.jumbo import param_groups

logger = logging.getLogger(__name__)
IMAGE, LABEL = "image", "label"


@dataclass
class RecipeArguments:
    """What to train on what."""

    model: str = field(metadata={"help": "folder with config.json (new weights) or a saved model (fine-tuning)"})
    train_data: str = field(metadata={"help": "image folder, parquet file, or folder of parquet files"})
    eval_data: str | None = field(default=None, metadata={"help": "the same, to measure accuracy on after training"})
    image_size: int | None = field(default=None, metadata={"help": "side to train at; default: the model's"})
    augment: str = field(
        default="crop",
        metadata={
            "help": "crop: random resized crop and flip; shift: pad by 1/8, crop, flip; none",
            "choices": ["crop", "shift", "none"],
        },
    )
    jumbo_lr_scale: float = field(default=0.3, metadata={"help": "learning rate of the Jumbo FFN over the common one"})
    layer_decay: float | None = field(default=None, metadata={"help": "layer-wise decay of the rate, for fine-tuning"})
    init: str = field(default="short", metadata={"help": "start of new weights", "choices": ["short", "released"]})
    patch_drop: str | None = field(
        default=None, metadata={"help": "START,END: share of patches dropped, linear over training; the paper: 0.9,0.1"}
    )


class ParquetImages(Dataset):
    """Images and labels of parquet files in the layout of Hugging Face datasets, decoded when asked for."""

    def __init__(self, files: list[Path], transform) -> None:
        try:
            import pyarrow.parquet as pq
        except ImportError as error:
            raise ImportError("reading parquet needs pyarrow: pip install pyarrow") from error
        tables = [pq.read_table(file) for file in files]
        for file, table in zip(files, tables, strict=True):
            if not {IMAGE, LABEL} <= set(table.column_names):
                raise ValueError(f"{file} must have columns {IMAGE} and {LABEL}, it has {table.column_names}")
        rows = [row for table in tables for row in table[IMAGE].to_pylist()]
        self.images = [row["bytes"] if row.get("bytes") else Path(row["path"]) for row in rows]
        self.targets = [int(label) for table in tables for label in table[LABEL].to_pylist()]
        self.classes = self._names(tables[0]) or [str(i) for i in range(max(self.targets) + 1)]
        self.transform = transform

    @staticmethod
    def _names(table) -> list[str] | None:
        """Class names, where the file carries the schema of Hugging Face datasets."""
        described = (table.schema.metadata or {}).get(b"huggingface")
        if described is None:
            return None
        return json.loads(described)["info"]["features"].get(LABEL, {}).get("names")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        source = self.images[index]
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return self.transform(image.convert("RGB")), self.targets[index]


def open_data(path: str, transform) -> Dataset:
    """An image folder or parquet files as a dataset of (transformed image, class), with ``classes`` and ``targets``."""
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"no data at {place}")
    files = [place] if place.is_file() else sorted(place.glob("*.parquet"))
    return ParquetImages(files, transform) if files else ImageFolder(place, transform)


def collate(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    images, labels = zip(*samples, strict=True)
    return {"pixel_values": torch.stack(images), "labels": torch.tensor(labels)}


def accuracy(prediction) -> dict[str, float]:
    logits, labels = prediction
    return {"accuracy": float(np.mean(np.argmax(logits, axis=-1) == labels))}


def train_transform(processor, size: tuple[int, int], augment: str) -> v2.Transform:
    if augment == "crop":
        steps = [v2.RandomResizedCrop(size, scale=(0.25, 1.0), antialias=True), v2.RandomHorizontalFlip()]
    elif augment == "shift":
        steps = [
            v2.Resize(size, antialias=True),
            v2.RandomCrop(size, padding=[size[1] // 8, size[0] // 8]),
            v2.RandomHorizontalFlip(),
        ]
    else:
        steps = [v2.Resize(size, antialias=True)]
    tail = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    return v2.Compose([*steps, *tail, v2.Normalize(processor.image_mean, processor.image_std)])


def prepare(processor, image: Image.Image) -> torch.Tensor:
    return processor(image, return_tensors="pt")["pixel_values"][0]


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = HfArgumentParser((RecipeArguments, TrainingArguments), description=__doc__)
    options, training = parser.parse_args_into_dataclasses(arguments)
    training.remove_unused_columns = False  # the datasets have no columns
    logging.basicConfig(level=logging.INFO if training.should_log else logging.WARNING)
    set_seed(training.seed)

    # Labels come from the data, the shape from the folder, and the weights too if it has some.
    classes = open_data(options.train_data, None).classes
    labels = dict(
        num_labels=len(classes), id2label=dict(enumerate(classes)), label2id={c: i for i, c in enumerate(classes)}
    )
    folder = Path(options.model)
    pretrained = not folder.is_dir() or any(folder.glob("*.safetensors"))
    if pretrained:
        model = AutoModelForImageClassification.from_pretrained(options.model, **labels, ignore_mismatched_sizes=True)
    else:
        changes = {"image_size": options.image_size} if options.image_size else {}
        config = AutoConfig.from_pretrained(options.model, **labels, init=options.init, **changes)
        model = AutoModelForImageClassification.from_config(config)
    size = (options.image_size,) * 2 if options.image_size else model.config.image_sides
    if pretrained and not options.image_size:
        processor = AutoImageProcessor.from_pretrained(options.model)
    else:
        processor = jumbo_image_processor(size)

    train = open_data(options.train_data, train_transform(processor, size, options.augment))
    evaluation = None
    if options.eval_data:
        evaluation = open_data(options.eval_data, partial(prepare, processor))
        if evaluation.classes != train.classes[: len(evaluation.classes)]:
            raise ValueError(f"eval_data has classes {evaluation.classes}, train_data has {train.classes}")
    logger.info("%d images of %d classes, %.1f M parameters", len(train), len(classes), model.num_parameters() / 1e6)

    callbacks = []
    if options.patch_drop:
        start, end = (float(part) for part in options.patch_drop.split(","))
        callbacks.append(PatchDropSchedule(start, end))
    # An optimizer made beforehand must hold the parameters where the Trainer will train them.
    model.to(training.device)
    groups = param_groups(
        model,
        training.learning_rate,
        training.weight_decay,
        jumbo_lr_scale=options.jumbo_lr_scale,
        layer_decay=options.layer_decay,
    )
    optimizer = torch.optim.AdamW(groups, betas=(training.adam_beta1, training.adam_beta2), eps=training.adam_epsilon)
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=collate,
        compute_metrics=accuracy,
        processing_class=processor,
        optimizers=(optimizer, None),
        callbacks=callbacks,
    )
    checkpoint = training.resume_from_checkpoint
    if checkpoint is None and Path(training.output_dir).is_dir():
        checkpoint = get_last_checkpoint(training.output_dir)
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    trainer.save_model()
    trainer.save_state()
    if evaluation is not None:
        metrics |= trainer.evaluate()
    trainer.save_metrics("all", metrics)
    if training.should_save:
        print(json.dumps(metrics))
    if training.push_to_hub:
        trainer.push_to_hub()
    return metrics


if __name__ == "__main__":
    main()
