"""Distil a ViT into a linear-time student with Transformers' Trainer (ViT-Linearizer, arXiv 2504.00037)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_optimizer import is_optimizer_factory
from transformers.trainer_utils import EvalLoopOutput

from jumbo_core import checks
from jumbo_core.distill import ViTLinearizer
from jumbo_core.jumbo import param_groups

# What a checkpoint holds beside the student's folder: mask token and predictor.
EXTRAS = "distillation.safetensors"
LOSSES = ("activation", "masked")


class Linearizer(ViTLinearizer):
    """A :class:`ViTLinearizer` with what the Trainer asks of a model; it acts on the student."""

    main_input_name = "pixel_values"
    _keys_to_ignore_on_save = None

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(pixel_values)

    @property
    def config(self) -> PreTrainedConfig:
        return self.student.config

    def activation_checkpointing_enable(self, **kwargs) -> None:
        self.student.activation_checkpointing_enable(**kwargs)

    def activation_checkpointing_disable(self) -> None:
        self.student.activation_checkpointing_disable()


class LinearizerTrainer(Trainer):
    """Trains ``student`` to have the activation maps and the masked features of a frozen ``teacher``.

    ``LinearizerTrainer(student, "teacher-folder", args, train_dataset=images).train()``. Samples hold ``pixel_values``,
    normalised as the teacher wants them; labels are not used. Both losses are logged beside ``loss``, in evaluation too
    (``eval_loss``, ``eval_loss_activation``, ``eval_loss_masked``); evaluation masks the same patches every time and
    leaves the random state of the training alone.

    A checkpoint opens as the student, ``AutoModel.from_pretrained("run/checkpoint-100")``; mask token and predictor lie
    beside it in ``distillation.safetensors``. ``save_model`` writes the student alone. The teacher is in no optimizer
    and no checkpoint.

    What distillation cannot reach (the final norm, a classifier, parts of the last block) is taken out of training
    while :meth:`train` runs and put back afterwards. Unless an optimizer is given, it gets the groups of
    :func:`jumbo_core.jumbo.param_groups`: no decay of norms, positions, tokens and decay parameters.

    Args:
        student: a model of this package, on any task (:class:`AdventurerModel`, :class:`JumboForImageClassification`,
            …). Trained in place.
        teacher: a Transformers or timm vision model, a model of ours, or the path of a local Transformers folder.
            Frozen in place.
        args: TrainingArguments. Default: Transformers'.
        stages, mask_ratio, mask_weight, activation_weight, beta, normalize_target, resample_teacher: see
            :class:`jumbo_core.distill.ViTLinearizer`. Default 4, 0.75, 1, 1, 1, True and False.
        jumbo_lr_scale: see :func:`jumbo_core.jumbo.param_groups`. Default 0.3.
        **trainer: everything else a Trainer takes, except what is about labels or makes models.

    Raises:
        TypeError: a student or teacher of another kind, or an argument that has no use here.
        ValueError: see :class:`ViTLinearizer`; a way of distributing the model that is not supported: one process and
            DDP (``accelerate launch``, ``torchrun``) are.
        FileNotFoundError: no folder at ``teacher``.
    """

    loss_is_scaled_for_ga = False  # losses are means over a batch

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: nn.Module | str | Path,
        args: TrainingArguments | None = None,
        *,
        stages: int = 4,
        mask_ratio: float = 0.75,
        mask_weight: float = 1.0,
        activation_weight: float = 1.0,
        beta: float = 1.0,
        normalize_target: bool = True,
        resample_teacher: bool = False,
        jumbo_lr_scale: float = 0.3,
        **trainer: Any,
    ) -> None:
        if not isinstance(student, PreTrainedModel):
            raise TypeError(f"student must be a model of hf_ext, got {type(student).__name__}")
        for name in ("model", "model_init", "compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"):
            if trainer.pop(name, None) is not None:
                raise TypeError(f"LinearizerTrainer takes no {name}: it trains student and measures its own losses")
        linearizer = Linearizer(
            load_teacher(teacher),
            student,
            stages=stages,
            mask_ratio=mask_ratio,
            mask_weight=mask_weight,
            activation_weight=activation_weight,
            beta=beta,
            normalize_target=normalize_target,
            resample_teacher=resample_teacher,
        )
        self.jumbo_lr_scale = checks.positive("jumbo_lr_scale", jumbo_lr_scale)
        self._sums, self._steps = None, 0.0
        super().__init__(linearizer, args, **trainer)
        self._check_arguments()

    @property
    def linearizer(self) -> Linearizer:
        """Student, mask token and predictor in one module; the teacher is its ``teacher``."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def student(self) -> PreTrainedModel:
        return self.linearizer.student

    # --- training ---

    def train(self, *args: Any, **kwargs: Any):
        """As for any Trainer, with the student's parameters that no loss reaches frozen for the time."""
        self._sums, self._steps = None, 0.0
        with self.linearizer.vit.encoder.reading("patches"):
            idle = idle_parameters(self.linearizer)
            for parameter in idle:
                parameter.requires_grad_(False)
            try:
                return super().train(*args, **kwargs)
            finally:
                for parameter in idle:
                    parameter.requires_grad_(True)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer that ``args`` name, with the groups of :func:`jumbo_core.jumbo.param_groups`."""
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            if not is_optimizer_factory(kind):  # one of those splits parameters itself
                groups = param_groups(
                    self.linearizer,
                    self.args.learning_rate,
                    self.args.weight_decay,
                    jumbo_lr_scale=self.jumbo_lr_scale,
                )
                options = {"params": groups, **options}
            self.optimizer_cls_and_kwargs = kind, options
        return super().create_optimizer(model)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The distillation loss of a batch; what else than ``pixel_values`` it holds is not used."""
        if "pixel_values" not in inputs:
            raise ValueError(f"a batch must hold pixel_values, it holds {sorted(inputs)}")
        outputs = model(inputs["pixel_values"])
        if model.training:
            share = 1 / self.current_gradient_accumulation_steps
            parts = torch.stack([outputs[name].detach().float() for name in LOSSES]) * share
            self._sums = parts if self._sums is None else self._sums + parts
            self._steps += share
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._sums is not None:  # called by all processes, like the mean of the loss itself
            means = self.accelerator.reduce(self._sums / self._steps, reduction="mean").tolist()
            logs.update({f"loss_{name}": mean for name, mean in zip(LOSSES, means, strict=True)})
            self._sums, self._steps = None, 0.0
        super().log(logs, start_time)

    # --- evaluation ---

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, tuple[torch.Tensor, ...], None]:
        """The losses of a batch, once for every sample of it: what is averaged over samples afterwards."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            _, outputs = self.compute_loss(model, inputs, return_outputs=True)
        count = len(inputs["pixel_values"])
        return None, tuple(outputs[name].float().repeat(count) for name in ("loss", *LOSSES)), None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        with _own_randomness(self.args.seed, self.args.device):
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        losses = output.predictions
        if losses is not None:
            if not self.args.eval_do_concat_batches:
                losses = [np.concatenate(parts) for parts in zip(*losses, strict=True)]
            for name, values in zip(("loss", *(f"loss_{name}" for name in LOSSES)), losses, strict=True):
                output.metrics[f"{metric_key_prefix}_{name}"] = float(np.mean(values))
        return output

    # --- files ---

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the student to ``output_dir`` (default ``args.output_dir``), as a folder of its own."""
        super().save_model(output_dir, _internal_call)
        if _internal_call and output_dir is not None and self.args.should_save:  # a checkpoint, no push to the hub
            state = self.linearizer.state_dict()
            extras = {key: value.contiguous() for key, value in state.items() if not key.startswith("student.")}
            save_file(extras, Path(output_dir) / EXTRAS, metadata={"format": "pt"})

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        linearizer, self.model = self.model, self.student
        try:
            super()._save(output_dir)
        finally:
            self.model = linearizer

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        extras = Path(resume_from_checkpoint) / EXTRAS
        if not extras.is_file():
            raise FileNotFoundError(
                f"{resume_from_checkpoint} has no {EXTRAS}: it is no checkpoint of LinearizerTrainer. A finished "
                f"student goes on as LinearizerTrainer(AutoModel.from_pretrained({str(resume_from_checkpoint)!r}), …)"
            )
        super()._load_from_checkpoint(resume_from_checkpoint, self.student)
        state = load_file(extras)
        report = self.linearizer.load_state_dict(state, strict=False)  # the student has its own file
        missing = [key for key in report.missing_keys if not key.startswith("student.")]
        if missing or report.unexpected_keys:
            raise ValueError(f"{extras} is damaged: it lacks {missing} and holds {report.unexpected_keys} besides")

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    # --- what the host asks for or decides ---

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built = super()._build_accelerator_args(**kwargs)
        if self.args.ddp_find_unused_parameters is None:  # there are none, see train()
            for handler in built["kwargs_handlers"]:
                handler.find_unused_parameters = False
        return built

    def _check_arguments(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError("LinearizerTrainer runs in one process or under DDP, not under FSDP or DeepSpeed")
        if self.args.n_gpu > 1:
            raise ValueError(
                f"{self.args.n_gpu} GPUs in one process are not supported: start one process for each of them with "
                f"accelerate launch or torchrun, or hide all but one (CUDA_VISIBLE_DEVICES)"
            )
        for name in ("label_smoothing_factor", "batch_eval_metrics"):
            if getattr(self.args, name):
                raise ValueError(f"{name} is about labels or metrics, which LinearizerTrainer does not use")


def load_teacher(teacher: nn.Module | str | Path) -> nn.Module:
    """A teacher as it was given, or the model in a local Transformers folder.

    Raises:
        FileNotFoundError: there is no such folder; nothing is downloaded.
    """
    if not isinstance(teacher, (str, Path)):
        return teacher
    if not Path(teacher).is_dir():
        raise FileNotFoundError(f"no folder of a teacher at {teacher}; models of the hub are downloaded beforehand")
    return AutoModel.from_pretrained(teacher)


def idle_parameters(linearizer: ViTLinearizer) -> list[nn.Parameter]:
    """Trainable parameters that distillation cannot reach: those that change no patch, and an unused predictor."""
    vit = linearizer.vit
    with vit.encoder.reading("patches"):
        # Features are taken before the final norm; a head, whoever holds it, is no part of them either.
        parts = [vit.patch_embed, vit.encoder.blocks, getattr(vit.encoder, "jumbo_mlp", None)]
        reached = {id(p) for part in parts if part is not None for p in part.parameters() if p.requires_grad}
    tokens = [vit.pos_embed, *vit.encoder.parameters(recurse=False)]
    reached |= {id(parameter) for parameter in tokens}
    idle = [] if linearizer.mask_weight else list(linearizer.predictor.parameters())
    idle += [parameter for parameter in linearizer.student.parameters() if id(parameter) not in reached]
    return [parameter for parameter in idle if parameter.requires_grad]


@contextmanager
def _own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """The same random numbers every time inside, and those of outside undisturbed."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
