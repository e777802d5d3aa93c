"""JumboPatchTST in Transformers' Trainer: forecasts, pretraining, classes, resuming, gradient checkpointing."""

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments, set_seed

from tests.conftest import max_error
from tests.hosts.hf_series_models import SHAPE, make, windows
from ts_ext.transformers import (
    JumboPatchTSTConfig,
    JumboPatchTSTForClassification,
    JumboPatchTSTForPrediction,
    JumboPatchTSTForPretraining,
)


class Windows(torch.utils.data.Dataset):
    def __init__(self, count, classes=None):
        t = torch.arange(48 + 6).float()
        phase = torch.rand(count, 1, generator=torch.Generator().manual_seed(0)) * 6
        self.kind = torch.arange(count) % 2
        wave = torch.sin(t / 4 * (1 + self.kind[:, None]) + phase)
        self.values = torch.stack([wave, -wave, wave * 2], dim=-1) + 5
        self.classes = classes

    def __len__(self):
        return len(self.values)

    def __getitem__(self, i):
        past = {"past_values": self.values[i, :48]}
        if self.classes:
            return {**past, "target_values": self.kind[i]}
        return {**past, "future_values": self.values[i, 48:]}


def arguments(folder, label, **options):
    return TrainingArguments(
        str(folder), per_device_train_batch_size=16, learning_rate=3e-3, label_names=[label], seed=0, report_to="none",
        use_cpu=True, disable_tqdm=True, logging_strategy="no", **{"num_train_epochs": 6, **options},
    )  # fmt: skip


def test_trainer_forecasts(tmp_path):
    set_seed(0)
    model = JumboPatchTSTForPrediction(JumboPatchTSTConfig(**SHAPE))
    data, held_out = Windows(64), Windows(37)
    trainer = Trainer(
        model, arguments(tmp_path, "future_values", save_strategy="epoch"), train_dataset=data, eval_dataset=held_out
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < 0.5 * before
    predicted = trainer.predict(held_out)
    assert predicted.predictions[0].shape == (37, 6, 3)  # the last partial batch is there
    truth = held_out.values[:, 48:].numpy()
    assert np.square(predicted.predictions[0] - truth).mean() == pytest.approx(after, rel=1e-4)
    # interrupted after the third epoch and resumed: the same weights
    set_seed(0)
    resumed = Trainer(
        JumboPatchTSTForPrediction(JumboPatchTSTConfig(**SHAPE)),
        arguments(tmp_path, "future_values", save_strategy="epoch"),
        train_dataset=data,
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    for (name, a), b in zip(model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_trainer_pretrains_then_classifies(tmp_path):
    set_seed(0)
    data = Windows(64)
    pretraining = Trainer(
        JumboPatchTSTForPretraining(JumboPatchTSTConfig(**{**SHAPE, "patch_stride": 8})),
        arguments(tmp_path, "past_values", num_train_epochs=30),
        train_dataset=[{"past_values": item["past_values"]} for item in data],
        eval_dataset=[{"past_values": item["past_values"]} for item in Windows(20)],
    )
    before = pretraining.evaluate()["eval_loss"]
    pretraining.train()
    assert pretraining.evaluate()["eval_loss"] < 0.8 * before
    pretraining.save_model(str(tmp_path / "pretrained"))
    model = JumboPatchTSTForClassification.from_pretrained(tmp_path / "pretrained", num_targets=2)
    trainer = Trainer(
        model,
        arguments(tmp_path / "classes", "target_values", num_train_epochs=15),
        train_dataset=Windows(64, classes=True),
        eval_dataset=Windows(30, classes=True),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] == 1.0


def test_gradient_checkpointing_changes_no_gradient():
    model, x, y = make(ff_dropout=0.0, positional_dropout=0.0), windows(), torch.randn(4, 6, 3)
    model.train()(x, future_values=y).loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    assert model.model.trunk.series.encoder.gradient_checkpointing
    model(x, future_values=y).loss.backward()
    for expected, parameter in zip(gradients, model.parameters(), strict=True):
        assert max_error(parameter.grad, expected) < 1e-5
    with pytest.raises(ValueError, match="every batch twice in BatchNorm"):
        make(norm_type="batchnorm").gradient_checkpointing_enable()
