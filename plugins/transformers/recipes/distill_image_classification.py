"""Distil a vision transformer into a linear-time student (ViT-Linearizer), then fine-tune the student on the labels.

One process:      python distill_image_classification.py --teacher clip-folder --student ../adventurer_tiny
                  --train_data photos/train --output_dir run ...
Several devices:  accelerate launch distill_image_classification.py --teacher clip-folder ...

Teacher: a local folder of a Transformers vision model, or a timm model with a local weight file (--teacher timm:NAME
--teacher_weights FILE). Images are normalised as the teacher wants them, for the student ever after. Data as in
train_image_classification.py; labels are used by fine-tuning alone (--finetune_epochs). Every option of
TrainingArguments is an option here (--output_dir, --learning_rate, --num_train_epochs, --bf16, ...).

--output_dir holds the distilled student, its folder finetuned/ the classifier. Started again with the same options the
run goes on from the last checkpoint of either stage.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import timm
import torch
from PIL import Image
from timm.data import resolve_model_data_config
from torch import nn
from torchvision.transforms import InterpolationMode
from train_image_classification import accuracy, collate, open_data, prepare, train_transform
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    BaseImageProcessor,
    HfArgumentParser,
    PreTrainedModel,
    Trainer,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.image_utils import PILImageResampling
from transformers.trainer_utils import get_last_checkpoint

import jumbo_core.models  # noqa: F401 (timm knows our models too)
from hf_ext import LinearizerTrainer, jumbo_image_processor
from hf_ext.distillation import load_teacher
from jumbo_core.jumbo import param_groups

logger = logging.getLogger(__name__)


@dataclass
class RecipeArguments:
    """What to distil into what, on what."""

    teacher: str = field(metadata={"help": "local folder of a Transformers vision model, or timm:NAME"})
    student: str = field(metadata={"help": "folder with config.json (new weights) or a saved model of ours"})
    train_data: str = field(metadata={"help": "image folder, parquet file, or folder of parquet files"})
    teacher_weights: str | None = field(default=None, metadata={"help": "weight file of a timm teacher"})
    teacher_options: str | None = field(
        default=None, metadata={"help": 'JSON of what else a timm teacher is made with, such as {"img_size": 32}'}
    )
    eval_data: str | None = field(default=None, metadata={"help": "the same, to measure losses and accuracy on"})
    image_size: int | None = field(default=None, metadata={"help": "side to train at; default: the student's"})
    augment: str = field(
        default="crop",
        metadata={
            "help": "crop: random resized crop and flip; shift: pad by 1/8, crop, flip; none",
            "choices": ["crop", "shift", "none"],
        },
    )
    stages: int = field(default=4, metadata={"help": "stages of equal depth whose activation maps are matched"})
    mask_ratio: float = field(default=0.75, metadata={"help": "share of patches that the student does not see"})
    mask_weight: float = field(default=1.0, metadata={"help": "weight of masked prediction"})
    activation_weight: float = field(default=1.0, metadata={"help": "weight of activation matching"})
    beta: float = field(default=1.0, metadata={"help": "where SmoothL1 turns from square to linear"})
    normalize_target: bool = field(default=True, metadata={"help": "LayerNorm on the teacher's features to predict"})
    resample_teacher: bool = field(default=False, metadata={"help": "resize the teacher's grid if it is another one"})
    jumbo_lr_scale: float = field(default=0.3, metadata={"help": "learning rate of the Jumbo FFN over the common one"})
    init: str = field(default="short", metadata={"help": "start of new weights", "choices": ["short", "released"]})
    finetune_epochs: float = field(default=0.0, metadata={"help": "epochs on the labels afterwards; 0 = none"})
    finetune_learning_rate: float | None = field(default=None, metadata={"help": "default: --learning_rate"})


def open_teacher(options: RecipeArguments) -> tuple[nn.Module, BaseImageProcessor | None]:
    """The teacher and the preprocessing that belongs to it, None if none is known."""
    kind, _, name = options.teacher.partition(":")
    if kind != "timm":
        for given in ("teacher_weights", "teacher_options"):
            if getattr(options, given) is not None:
                raise ValueError(f"--{given} is for a timm teacher, --teacher is {options.teacher}")
        model = load_teacher(options.teacher)
        known = (Path(options.teacher) / "preprocessor_config.json").is_file()
        return model, AutoImageProcessor.from_pretrained(options.teacher) if known else None
    if options.teacher_weights is None or not Path(options.teacher_weights).is_file():
        raise FileNotFoundError(f"a timm teacher needs --teacher_weights FILE, got {options.teacher_weights}")
    model = timm.create_model(
        name,
        pretrained=True,
        pretrained_cfg_overlay={"file": options.teacher_weights},
        num_classes=0,
        **json.loads(options.teacher_options or "{}"),
    )
    data = resolve_model_data_config(model)
    processor = jumbo_image_processor(
        data["input_size"][-2:],
        crop_pct=data["crop_pct"],
        image_mean=list(data["mean"]),
        image_std=list(data["std"]),
        resample=PILImageResampling[InterpolationMode(data["interpolation"]).name],
    )
    return model, processor


def processor_for(size: tuple[int, int], teachers: BaseImageProcessor | None) -> BaseImageProcessor:
    """The teacher's preprocessing, at the student's size; ImageNet's statistics where the teacher has none."""
    if teachers is None:
        logger.warning("the teacher's folder has no preprocessor_config.json: ImageNet statistics are used")
        return jumbo_image_processor(size)
    blank = Image.new("RGB", (3 * size[1], 2 * size[0]))
    if tuple(prepare(teachers, blank).shape[-2:]) == tuple(size):
        return teachers
    normalises = teachers.do_normalize
    return jumbo_image_processor(
        size,
        image_mean=list(teachers.image_mean) if normalises else [0.0] * 3,
        image_std=list(teachers.image_std) if normalises else [1.0] * 3,
        resample=teachers.resample,
    )


def open_student(options: RecipeArguments) -> PreTrainedModel:
    """The encoder of a saved model, or a new one by a configuration."""
    if any(Path(options.student).glob("*.safetensors")):
        return AutoModel.from_pretrained(options.student)
    changes = {"image_size": options.image_size} if options.image_size else {}
    return AutoModel.from_config(AutoConfig.from_pretrained(options.student, init=options.init, **changes))


def run(trainer: Trainer) -> dict[str, float]:
    """Train from the last checkpoint on if there is one, save, measure; a run that is complete is left as it is."""
    folder, args = Path(trainer.args.output_dir), trainer.args
    checkpoint = args.resume_from_checkpoint or (get_last_checkpoint(folder) if folder.is_dir() else None)
    results = folder / "all_results.json"
    steps = args.max_steps
    if steps <= 0:
        steps_per_epoch = math.ceil(len(trainer.get_train_dataloader()) / args.gradient_accumulation_steps)
        steps = math.ceil(args.num_train_epochs * steps_per_epoch)
    if checkpoint is not None and results.is_file():
        done = TrainerState.load_from_json(Path(checkpoint) / "trainer_state.json").global_step
        if done >= steps:
            logger.info("%s has its %d steps already", folder, done)
            return json.loads(results.read_text())
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    trainer.save_model()
    trainer.save_state()
    if trainer.eval_dataset is not None:
        metrics |= trainer.evaluate()
    trainer.save_metrics("all", metrics, combined=False)
    trainer.accelerator.wait_for_everyone()  # what comes next reads what the first process wrote
    return metrics


def fine_tune(options: RecipeArguments, distillation: Trainer, classes: list[str], processor, datasets) -> dict:
    """Train the distilled student and a new classifier on the labels, in the folder finetuned/."""
    args = copy.copy(distillation.args)
    student = args.output_dir
    args.output_dir = str(Path(student) / "finetuned")
    args.num_train_epochs, args.max_steps, args.resume_from_checkpoint = options.finetune_epochs, -1, None
    args.learning_rate = options.finetune_learning_rate or args.learning_rate
    labels = dict(
        num_labels=len(classes), id2label=dict(enumerate(classes)), label2id={c: i for i, c in enumerate(classes)}
    )
    set_seed(args.seed)
    model = AutoModelForImageClassification.from_pretrained(student, **labels).to(args.device)
    groups = param_groups(model, args.learning_rate, args.weight_decay, jumbo_lr_scale=options.jumbo_lr_scale)
    optimizer = torch.optim.AdamW(groups, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)
    return run(
        Trainer(
            model=model,
            args=args,
            **datasets,
            data_collator=collate,
            compute_metrics=accuracy,
            processing_class=processor,
            optimizers=(optimizer, None),
        )
    )


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = HfArgumentParser((RecipeArguments, TrainingArguments), description=__doc__)
    options, training = parser.parse_args_into_dataclasses(arguments)
    training.remove_unused_columns = False  # the datasets have no columns
    logging.basicConfig(level=logging.INFO if training.should_log else logging.WARNING)
    set_seed(training.seed)

    teacher, teachers_processor = open_teacher(options)
    student = open_student(options)
    size = (options.image_size,) * 2 if options.image_size else student.config.image_sides
    processor = processor_for(size, teachers_processor)
    train = open_data(options.train_data, train_transform(processor, size, options.augment))
    evaluation = open_data(options.eval_data, partial(prepare, processor)) if options.eval_data else None
    if evaluation is not None and evaluation.classes != train.classes[: len(evaluation.classes)]:
        raise ValueError(f"eval_data has classes {evaluation.classes}, train_data has {train.classes}")
    datasets = {"train_dataset": train, "eval_dataset": evaluation}
    parameters = student.num_parameters() / 1e6
    logger.info("%d images, %s into %.1f M parameters", len(train), type(teacher).__name__, parameters)

    distillation = LinearizerTrainer(
        student,
        teacher,
        training,
        stages=options.stages,
        mask_ratio=options.mask_ratio,
        mask_weight=options.mask_weight,
        activation_weight=options.activation_weight,
        beta=options.beta,
        normalize_target=options.normalize_target,
        resample_teacher=options.resample_teacher,
        jumbo_lr_scale=options.jumbo_lr_scale,
        **datasets,
        data_collator=collate,
        processing_class=processor,
    )
    metrics = {"distillation": run(distillation)}
    if options.finetune_epochs:
        metrics["finetuning"] = fine_tune(options, distillation, train.classes, processor, datasets)
    if training.should_save:
        print(json.dumps(metrics))
    return metrics


if __name__ == "__main__":
    main()
