"""Distillation through Transformers' Trainer: losses, checkpoints, killed and resumed, two processes."""

import math
import os
import signal

import pytest
import torch

from tests.conftest import max_error

pytest.importorskip("transformers")
pytest.importorskip("sklearn")
import timm
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForImageClassification, ViTForImageClassification

from hf_ext import (
    AdventurerBackbone,
    AdventurerForImageClassification,
    AdventurerModel,
    JumboConfig,
    JumboForImageClassification,
    JumboModel,
    LinearizerTrainer,
)
from hf_ext.distillation import EXTRAS, idle_parameters
from jumbo_core.distill import ViTLinearizer
from jumbo_core.models import JumboViT
from tests.hosts.hf_distilling import SHAPE, make_trainer, student, teacher, vit_folder
from tests.hosts.hf_training import digits
from tests.hosts.test_hf_trainer import start


@pytest.fixture(autouse=True)
def one_thread():
    """Sums are taken in the same order in every process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.linearizer.state_dict().items()}


def logged(trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def images(part: slice) -> torch.Tensor:
    return torch.stack([sample["pixel_values"] for sample in digits(part)])


# --- training ---


def test_learns_from_the_teacher_and_logs_both_losses(tmp_path):
    trainer = make_trainer(tmp_path, steps=60, save_strategy="no", logging_steps=20, learning_rate=5e-3)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss_masked"] < 0.8 * before["eval_loss_masked"], (before, after)
    assert after["eval_loss_activation"] < before["eval_loss_activation"]
    assert len(logged(trainer, "loss")) == 3
    for total, *parts in zip(*(logged(trainer, f"loss{n}") for n in ("", "_activation", "_masked")), strict=True):
        assert total == pytest.approx(sum(parts), abs=1e-6) and min(parts) > 1e-3
    masked = logged(trainer, "loss_masked")
    assert masked == sorted(masked, reverse=True)


def test_the_logged_losses_are_means_over_all_micro_batches(tmp_path):
    options = dict(steps=2, save_strategy="no", gradient_accumulation_steps=3, mask_weight=2.0, activation_weight=0.5)
    trainer = make_trainer(tmp_path, logging_steps=2, **options)
    seen = []
    trainer.linearizer.register_forward_hook(lambda module, args, out: seen.append(out))
    trainer.train()
    assert len(seen) == 6 and len(logged(trainer, "loss")) == 1
    for name in ("activation", "masked"):
        mean = sum(out[name].item() for out in seen) / 6
        assert logged(trainer, f"loss_{name}")[0] == pytest.approx(mean, rel=1e-5)
    expected = 2 * logged(trainer, "loss_masked")[0] + 0.5 * logged(trainer, "loss_activation")[0]
    assert logged(trainer, "loss")[0] == pytest.approx(expected, rel=1e-5)


def test_evaluation_is_a_mean_over_samples_and_disturbs_nothing(tmp_path):
    uneven = dict(steps=6, batch=12, save_strategy="no")  # 40 samples to evaluate: three batches of 12, one of 4
    plain = make_trainer(tmp_path, **uneven)
    plain.train()
    trainer = make_trainer(tmp_path, eval_strategy="steps", eval_steps=2, **uneven)
    losses = []
    trainer.linearizer.register_forward_hook(
        lambda module, args, out: None if module.training else losses.append((len(args[0]), out["masked"].item()))
    )
    trainer.train()
    assert all(torch.equal(value, weights(plain)[name]) for name, value in weights(trainer).items())
    assert [count for count, _ in losses] == [12, 12, 12, 4] * 3
    last = losses[-4:]
    assert logged(trainer, "eval_loss_masked")[-1] == pytest.approx(sum(n * x for n, x in last) / 40, rel=1e-5)
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == logged(trainer, "eval_loss")[2] == trainer.evaluate()["eval_loss"]
    assert metrics["eval_loss"] == pytest.approx(metrics["eval_loss_activation"] + metrics["eval_loss_masked"])
    parts = make_trainer(tmp_path, eval_do_concat_batches=False, **uneven)
    parts.linearizer.load_state_dict(weights(trainer))
    assert parts.evaluate()["eval_loss"] == pytest.approx(metrics["eval_loss"])
    assert parts.predict(digits(slice(0, 5))).metrics["test_loss"] > 0


@pytest.mark.parametrize("cls", [AdventurerModel, AdventurerForImageClassification, AdventurerBackbone])
def test_what_no_loss_reaches_is_frozen_for_the_time(cls, tmp_path):
    net = student(cls, multiplier=2, share_jumbo_ffn=False)
    if cls is AdventurerModel:
        net.vit.patch_embed.requires_grad_(False)  # the user's own choice
    before = {name: p.requires_grad for name, p in net.named_parameters()}
    start_values = {name: p.detach().clone() for name, p in net.named_parameters()}
    trainer = make_trainer(tmp_path, net=net, steps=3, save_strategy="no", weight_decay=0.5)
    during = {}
    trainer.linearizer.register_forward_pre_hook(
        lambda module, args: during.update({name: p.requires_grad for name, p in module.student.named_parameters()})
    )
    trainer.train()
    assert {name: p.requires_grad for name, p in net.named_parameters()} == before
    trained = {name for name, grad in during.items() if grad}
    changed = {name for name, p in net.named_parameters() if not torch.equal(p, start_values[name])}
    assert changed == trained
    idle = {name for name in before if before[name] and not during[name]}
    block = [name.split("vit.")[-1] for name in idle]
    assert {"encoder.blocks.1.norm3.weight", "encoder.jumbo_mlp.1.fc1.weight"} <= set(
        block
    ) or cls is AdventurerBackbone
    assert any(name.startswith("classifier") for name in idle) == (cls is AdventurerForImageClassification)
    in_optimizer = sum(len(group["params"]) for group in trainer.optimizer.param_groups)
    assert in_optimizer == len(trained) + 3  # mask token, predictor weight and bias

    # Put back after a failure, too.
    trainer = make_trainer(tmp_path, net=net, steps=3, save_strategy="no")
    trainer.linearizer.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert {name: p.requires_grad for name, p in net.named_parameters()} == before


@pytest.mark.parametrize(
    "net",
    [
        lambda: student(init="short", multiplier=2),
        lambda: student(AdventurerModel, flip=[0]),
        lambda: JumboModel(JumboConfig(**SHAPE, hidden_size=16, num_attention_heads=2, num_hidden_layers=2)),
        lambda: JumboForImageClassification(
            JumboConfig(**SHAPE, hidden_size=16, num_attention_heads=2, num_hidden_layers=2, multiplier=0, registers=1)
        ),
    ],
)
@pytest.mark.parametrize("weights_of_losses", [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0)])
def test_idle_parameters_are_exactly_those_without_a_gradient(net, weights_of_losses):
    masked, activation = weights_of_losses
    linearizer = ViTLinearizer(teacher(), net(), stages=2, mask_weight=masked, activation_weight=activation)
    state = torch.get_rng_state()
    idle = {id(p) for p in idle_parameters(linearizer)}
    assert torch.equal(torch.get_rng_state(), state) and linearizer.vit.training
    assert all(p.grad is None for p in linearizer.parameters())
    with torch.no_grad():
        for parameter in linearizer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    linearizer.eval()(images(slice(0, 8)))["loss"].backward()
    silent = {id(p) for p in linearizer.parameters() if p.grad is None or not p.grad.any()}
    assert idle == silent and 0 < len(idle) < len(list(linearizer.parameters()))


def test_no_decay_where_it_hurts(tmp_path):
    trainer = make_trainer(tmp_path, net=student(multiplier=2), weight_decay=0.3, learning_rate=1e-3)
    trainer.create_optimizer()
    groups = {id(p): group for group in trainer.optimizer.param_groups for p in group["params"]}
    named = dict(trainer.linearizer.named_parameters())
    for name, decay, rate in (
        ("mask_token", 0, 1e-3),
        ("predictor.weight", 0.3, 1e-3),
        ("student.adventurer.vit.pos_embed", 0, 1e-3),
        ("student.adventurer.vit.encoder.blocks.0.mixer.A_log", 0, 1e-3),
        ("student.adventurer.vit.encoder.blocks.0.mixer.D", 0, 1e-3),
        ("student.adventurer.vit.encoder.blocks.0.mixer.in_proj.weight", 0.3, 1e-3),
        ("student.adventurer.vit.encoder.jumbo_mlp.fc1.weight", 0.3, 3e-4),
    ):
        group = groups[id(named[name])]
        assert (group["weight_decay"], group["lr"]) == (decay, pytest.approx(rate)), name
    assert trainer.optimizer.defaults["betas"] == (0.9, 0.999)


# --- teachers and students ---


def test_teachers_of_every_house(tmp_path):
    timm_vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, depth=2, embed_dim=24, num_heads=2
    )
    core = JumboViT(8, 2, 1, 10, 24, 2, 2, 2)
    for guide in (
        vit_folder(tmp_path / "vit"),
        str(vit_folder(tmp_path / "classifier", ViTForImageClassification, num_labels=4)),
        timm_vit,
        core,
        teacher(),
    ):
        trainer = make_trainer(tmp_path / "run", guide=guide, steps=1, save_steps=1)
        inner = trainer.linearizer.teacher
        before = {name: value.clone() for name, value in inner.state_dict().items()}
        trainer.train()
        assert all(math.isfinite(x) for x in logged(trainer, "loss")) and not inner.training
        assert all(torch.equal(value, before[name]) for name, value in inner.state_dict().items())
        trainable = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
        assert not trainable & {id(p) for p in inner.parameters()}
        assert not any(p.requires_grad for p in inner.parameters())
        saved = load_file(tmp_path / "run" / "checkpoint-1" / "model.safetensors")
        assert set(saved) == set(trainer.student.state_dict())
        assert set(load_file(tmp_path / "run" / "checkpoint-1" / EXTRAS)) == {
            "mask_token",
            "predictor.weight",
            "predictor.bias",
        }


def test_students_of_every_kind(tmp_path):
    jumbo = JumboConfig(**SHAPE, hidden_size=16, num_attention_heads=2, num_hidden_layers=2, multiplier=2)
    for net in (student(AdventurerModel), student(AdventurerBackbone), JumboModel(jumbo)):
        trainer = make_trainer(tmp_path / "run", net=net, steps=2, save_steps=2, logging_steps=2)
        trainer.train()
        opened = type(net).from_pretrained(tmp_path / "run" / "checkpoint-2").state_dict()
        assert all(torch.equal(value, opened[name]) for name, value in net.state_dict().items())


# --- checkpoints ---


def test_killed_half_way_and_resumed_equals_the_uninterrupted_run(tmp_path):
    whole = make_trainer(tmp_path / "whole")
    whole.train()
    killed = start("-m", "tests.hosts.hf_distilling", tmp_path / "cut", "--kill-at", 5)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert [p.name for p in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-4"]
    opened = AutoModelForImageClassification.from_pretrained(tmp_path / "cut" / "checkpoint-4")
    assert type(opened) is AdventurerForImageClassification

    resumed = make_trainer(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8
    expected = weights(whole)
    assert {"mask_token", "predictor.weight", "predictor.bias"} <= set(expected)
    for name, value in weights(resumed).items():
        assert torch.equal(value, expected[name]), name
    for key in ("loss", "loss_activation", "loss_masked"):
        assert logged(resumed, key) == logged(whole, key) and len(logged(whole, key)) == 8
    a, b = whole.optimizer.state_dict()["state"], resumed.optimizer.state_dict()["state"]
    assert all(torch.equal(a[i]["exp_avg_sq"], b[i]["exp_avg_sq"]) for i in a) and len(a) == len(b)


def test_the_student_is_saved_alone_and_a_folder_without_the_rest_is_no_checkpoint(tmp_path):
    trainer = make_trainer(tmp_path / "run", steps=4)
    trainer.train()
    trainer.save_model(tmp_path / "student")
    names = {path.name for path in (tmp_path / "student").iterdir()}
    assert names == {"config.json", "model.safetensors", "modeling_adventurer.py", "training_args.bin"}
    encoder = AutoModel.from_pretrained(tmp_path / "student")
    with torch.no_grad():
        x = images(slice(0, 3))
        assert max_error(encoder(x).pooler_output, trainer.student.eval().adventurer(x).pooler_output) < 1e-6
    with pytest.raises(FileNotFoundError, match=r"has no distillation\.safetensors: it is no checkpoint"):
        make_trainer(tmp_path / "run").train(resume_from_checkpoint=str(tmp_path / "student"))
    assert all(p.requires_grad for p in trainer.student.parameters())


def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path):
    # "Best" is the worst here, so that it is not the last one.
    options = dict(eval_strategy="steps", eval_steps=2, save_steps=2, load_best_model_at_end=True)
    trainer = make_trainer(tmp_path, steps=6, metric_for_best_model="loss_masked", greater_is_better=True, **options)
    trainer.train()
    losses = logged(trainer, "eval_loss_masked")
    assert losses[0] > losses[1] > losses[2] and trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert trainer.evaluate()["eval_loss_masked"] == losses[0]
    extras = load_file(tmp_path / "checkpoint-2" / EXTRAS)
    assert torch.equal(trainer.linearizer.predictor.weight, extras["predictor.weight"])

    del extras["predictor.bias"]
    save_file({**extras, "rubbish": torch.zeros(1)}, tmp_path / "checkpoint-2" / EXTRAS)
    with pytest.raises(ValueError, match=r"is damaged: it lacks \['predictor.bias'\] and holds \['rubbish'\] besides"):
        make_trainer(tmp_path, steps=6).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


# --- two processes, memory, precision ---


def test_two_processes_train_what_the_mean_of_their_gradients_says(tmp_path):
    launch = ("-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", 29000 + os.getpid() % 900)
    done = start(*launch, "-m", "tests.hosts.hf_distilling", tmp_path, "--steps", 3, "--batch", 8, "--record")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "find_unused_parameters" not in done.stderr
    ranks = [torch.load(tmp_path / f"rank{i}.pt", weights_only=True) for i in range(2)]
    assert [len(rank["seen"]) for rank in ranks] == [3, 3]
    assert all(torch.equal(value, ranks[1]["state"][name]) for name, value in ranks[0]["state"].items())
    assert not torch.equal(ranks[0]["seen"][0]["images"], ranks[1]["seen"][0]["images"])

    # The same by hand: plain gradient descent on the mean of both ranks' gradients, with their random masks.
    torch.manual_seed(0)
    linearizer = make_trainer(tmp_path / "hand", net=student()).linearizer
    parameters = dict(linearizer.named_parameters())
    for entry, batches in enumerate(zip(ranks[0]["seen"], ranks[1]["seen"], strict=True)):
        linearizer.zero_grad()
        losses = []
        for batch in batches:
            torch.set_rng_state(batch["random"])
            out = linearizer.train()(batch["images"])
            (out["loss"] / 2).backward()
            losses.append([out[name].item() for name in ("activation", "masked")])
        log = [x for x in ranks[0]["log"] if "loss_masked" in x][entry]
        for i, name in enumerate(("loss_activation", "loss_masked")):
            assert log[name] == pytest.approx((losses[0][i] + losses[1][i]) / 2, rel=1e-5)
        with torch.no_grad():
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter -= 0.5 * parameter.grad
    moved = 0.0
    for name, value in linearizer.state_dict().items():
        assert max_error(value, ranks[0]["state"][name]) < 1e-5, name
        moved = max(moved, max_error(value, make_state()[name]))
    assert moved > 1e-2
    assert ranks[0]["metrics"]["eval_loss"] == ranks[1]["metrics"]["eval_loss"]
    assert type(AutoModelForImageClassification.from_pretrained(tmp_path)) is AdventurerForImageClassification


def make_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = student()
    return ViTLinearizer(teacher(), net, stages=2).state_dict() | {
        f"student.{name}": value for name, value in net.state_dict().items()
    }


def test_gradient_checkpointing_changes_memory_alone(tmp_path):
    plain = make_trainer(tmp_path, net=student(multiplier=2), steps=3, save_strategy="no")
    runs = []
    plain.student.adventurer.vit.blocks[0].register_forward_pre_hook(lambda *_: runs.append("plain"))
    plain.train()
    again = make_trainer(tmp_path, net=student(multiplier=2), steps=3, save_strategy="no", gradient_checkpointing=True)
    again.student.adventurer.vit.blocks[0].register_forward_pre_hook(lambda *_: runs.append("again"))
    again.train()
    assert runs.count("plain") == 3 and runs.count("again") == 6  # each block a second time, in backward
    for name, value in weights(again).items():
        assert max_error(value, weights(plain)[name]) < 1e-5, name


def test_mixed_precision_on_a_cpu(tmp_path):
    single = make_trainer(tmp_path, steps=3, save_strategy="no")
    single.train()
    mixed = make_trainer(tmp_path, steps=3, save_strategy="no", bf16=True)
    inside = []
    mixed.student.adventurer.vit.blocks[0].mixer.in_proj.register_forward_hook(
        lambda m, a, out: inside.append(out.dtype)
    )
    mixed.train()
    assert set(inside) == {torch.bfloat16} and {p.dtype for p in mixed.student.parameters()} == {torch.float32}
    for key in ("loss", "loss_activation", "loss_masked"):
        for a, b in zip(logged(single, key), logged(mixed, key), strict=True):
            assert a == pytest.approx(b, abs=3e-2) and math.isfinite(b)
    assert mixed.evaluate()["eval_loss"] == pytest.approx(single.evaluate()["eval_loss"], abs=3e-2)


# --- bad input ---


def test_bad_input_is_named(tmp_path):
    for options, error, message in (
        (dict(stages=3), ValueError, r"stages=3 is more than the blocks there are \(teacher 4, student 2\)"),
        (dict(mask_ratio=1.0), ValueError, "mask_ratio"),
        (dict(net=torch.nn.Linear(2, 2)), TypeError, "student must be a model of hf_ext, got Linear"),
        (dict(guide=tmp_path / "nowhere"), FileNotFoundError, "no folder of a teacher at .*nowhere"),
        (dict(guide=timm.create_model("resnet18")), TypeError, "no patch tokens"),
        (dict(label_smoothing_factor=0.1), ValueError, "label_smoothing_factor is about labels"),
    ):
        with pytest.raises(error, match=message):
            make_trainer(tmp_path, **options)
    with pytest.raises(TypeError, match="LinearizerTrainer takes no compute_metrics"):
        LinearizerTrainer(student(), teacher(), compute_metrics=len)
    coarse = JumboModel(JumboConfig(image_size=8, patch_size=4, num_channels=1, hidden_size=24, num_attention_heads=2))
    trainer = make_trainer(tmp_path, guide=coarse, steps=1, save_strategy="no")
    with pytest.raises(ValueError, match="teacher has a 2x2 grid of patches, student 4x4"):
        trainer.train()
    resampled = make_trainer(tmp_path, guide=coarse, steps=1, save_strategy="no", resample_teacher=True)
    resampled.train()
    assert math.isfinite(logged(resampled, "loss")[0])
    trainer = make_trainer(tmp_path, steps=1, save_strategy="no")
    with pytest.raises(ValueError, match=r"a batch must hold pixel_values, it holds \['labels'\]"):
        trainer.compute_loss(trainer.linearizer, {"labels": torch.zeros(2)})
