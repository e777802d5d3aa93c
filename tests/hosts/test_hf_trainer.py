"""Real training through Transformers' Trainer: learn, save, reload; killed and resumed; two processes; the recipe."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import max_error

pytest.importorskip("transformers")
pytest.importorskip("sklearn")
from PIL import Image
from transformers import AutoConfig, AutoModelForImageClassification, pipeline

from hf_ext import PatchDropSchedule
from tests.hosts.hf_training import CONFIG, digits, make_trainer

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "plugins" / "transformers" / "recipes" / "train_image_classification.py"


@pytest.fixture(autouse=True)
def one_thread():
    """Sums are taken in the same order in every process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def start(*command, **environment) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )


def rates(trainer) -> list[float]:
    return sorted({group["lr"] for group in trainer.optimizer.param_groups})


def test_learns_saves_and_reloads(tmp_path):
    easy = dict(drop_path=0.0, patch_drop=False, lr=6e-3, save_strategy="no", logging_steps=50)
    trainer = make_trainer(tmp_path, steps=150, batch=64, **easy)
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    after = trainer.evaluate()["eval_accuracy"]
    assert before < 0.2 and after > 0.45, (before, after)
    trainer.save_model()
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    images = torch.stack([sample["pixel_values"] for sample in digits(slice(1400, None))])
    labels = torch.tensor([sample["labels"] for sample in digits(slice(1400, None))])
    with torch.no_grad():
        assert (loaded(images).logits.argmax(-1) == labels).double().mean().item() == pytest.approx(after)


def test_killed_half_way_and_resumed_equals_the_uninterrupted_run(tmp_path):
    whole = make_trainer(tmp_path / "whole")
    whole.train()

    killed = start("-m", "tests.hosts.hf_training", tmp_path / "cut", "--kill-at", 7)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert [p.name for p in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-4"]

    resumed = make_trainer(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 12
    expected = whole.model.state_dict()
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    losses = [[x["loss"] for x in t.state.log_history if "loss" in x] for t in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 12
    a, b = whole.optimizer.state_dict()["state"], resumed.optimizer.state_dict()["state"]
    assert all(torch.equal(a[i]["exp_avg_sq"], b[i]["exp_avg_sq"]) for i in a)


def test_scheduler_keeps_the_slower_rate_of_the_jumbo_ffn(tmp_path):
    trainer = make_trainer(tmp_path, steps=6, save_strategy="no", gradient_checkpointing=True)
    seen = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda *a, **k: (seen.append(rates(trainer)), step(*a, **k))[1]
    trainer.train()
    assert len(seen) == 6 and seen[0] == [0.0]  # warm-up begins at nothing
    for low, high in seen[1:]:
        assert low / high == pytest.approx(0.3)
    assert max(high for _, high in seen[1:]) == pytest.approx(2e-3)


def test_patch_drop_schedule(tmp_path):
    trainer = make_trainer(tmp_path, steps=5, save_strategy="no")
    vit, counts = trainer.model.jumbo.vit, []
    vit.patch_drop_rate = 0.25
    vit.encoder.blocks[0].register_forward_pre_hook(
        lambda module, args: counts.append((module.training, args[0].shape[1] - vit.num_prefix_tokens))
    )
    trainer.train()
    trainer.evaluate()
    in_training = [n for training, n in counts if training]
    assert in_training == [16 - int(16 * (0.5 - 0.4 * step / 5)) for step in range(5)]
    assert {n for training, n in counts if not training} == {16}
    assert vit.patch_drop_rate == 0.25
    with pytest.raises(ValueError, match="needs a Jumbo or Adventurer model, got Linear"):
        PatchDropSchedule().on_train_begin(None, None, None, model=torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"1\.5"):
        PatchDropSchedule(start=1.5)


def test_two_processes_train_what_one_would(tmp_path):
    launch = ("-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", 29000 + os.getpid() % 900)
    done = start(*launch, "-m", "tests.hosts.hf_training", tmp_path / "two", "--steps", 5, "--batch", 8, "--plain")
    assert done.returncode == 0, done.stderr[-3000:]
    alone = make_trainer(tmp_path / "one", steps=5, batch=16, drop_path=0.0, patch_drop=False, save_strategy="no")
    alone.train()
    together = AutoModelForImageClassification.from_pretrained(tmp_path / "two")
    for name, value in alone.model.state_dict().items():
        assert max_error(value, together.state_dict()[name]) < 1e-4, name


# --- the recipe of plugins/transformers ---


def write_digits(root: Path, part: slice) -> None:
    for i, sample in enumerate(digits(part)):
        folder = root / f"digit {sample['labels']}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = ((sample["pixel_values"][0] + 1) * 127).byte().numpy()
        Image.fromarray(pixels).save(folder / f"{i}.png")


def write_parquet(path: Path, part: slice) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images, labels = [], []
    for sample in digits(part):
        file = io.BytesIO()
        Image.fromarray(((sample["pixel_values"][0] + 1) * 127).byte().numpy()).save(file, "PNG")
        images.append({"bytes": file.getvalue(), "path": None})
        labels.append(sample["labels"])
    pq.write_table(pa.table({"image": images, "label": labels}), path)


@pytest.fixture
def recipe(monkeypatch):
    import importlib.util

    spec = importlib.util.spec_from_file_location("train_image_classification", RECIPE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module.main


def test_recipe(tmp_path, recipe):
    write_digits(tmp_path / "train", slice(0, 64))
    write_digits(tmp_path / "test", slice(64, 96))
    small = tmp_path / "small"
    small.mkdir()
    shape = {k: v for k, v in CONFIG.items() if k not in ("num_labels", "num_channels", "init")}
    (small / "config.json").write_text(json.dumps({"model_type": "jumbo_vit", **shape}))
    common = (
        f"--per_device_train_batch_size 16 --use_cpu --report_to none --save_steps 2 --output_dir {tmp_path / 'out'}"
    )
    command = [
        *("--model", small, "--train_data", tmp_path / "train", "--eval_data", tmp_path / "test"),
        *("--augment", "shift", "--patch_drop", "0.5,0.1", *common.split(), "--save_steps", 2),
    ]
    launched = start("-m", "accelerate.commands.launch", "--cpu", RECIPE, *command, "--max_steps", 2)
    assert launched.returncode == 0, launched.stderr[-3000:]
    assert "eval_accuracy" in json.loads(launched.stdout.strip().splitlines()[-1])

    # Started again with more steps it goes on from the checkpoint; the folder opens in a pipeline.
    metrics = recipe([*map(str, command), "--max_steps", "4"])
    assert 0 <= metrics["eval_accuracy"] <= 1
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 4 and (tmp_path / "out" / "checkpoint-4").is_dir()
    answer = pipeline("image-classification", model=str(tmp_path / "out"))(Image.new("RGB", (20, 20)))
    assert answer[0]["label"].startswith("digit ")
    assert AutoConfig.from_pretrained(tmp_path / "out").init == "short"

    # Fine-tuning of that folder on a parquet file with another number of classes.
    write_parquet(tmp_path / "few.parquet", slice(0, 3))
    few = f"--train_data {tmp_path / 'few.parquet'} --augment crop --layer_decay 0.8 --max_steps 1 --use_cpu"
    recipe(f"--model {tmp_path / 'out'} {few} --report_to none --output_dir {tmp_path / 'tuned'}".split())
    assert AutoModelForImageClassification.from_pretrained(tmp_path / "tuned").config.num_labels == 3
    with pytest.raises(FileNotFoundError, match="no data at"):
        recipe(["--model", str(small), "--train_data", str(tmp_path / "nowhere"), "--output_dir", str(tmp_path / "x")])


@pytest.mark.parametrize("size", ["pico", "nano", "tiny", "small", "base", "large"])
def test_plugin_configurations_are_the_registered_sizes(size):
    import timm

    import jumbo_core.models  # noqa: F401

    config = AutoConfig.from_pretrained(ROOT / "plugins" / "transformers" / f"jumbo_{size}", num_labels=1000)
    with torch.device("meta"):
        ours = AutoModelForImageClassification.from_config(config)
        theirs = timm.create_model(f"jumbo_{size}_patch16_224")
    assert ours.num_parameters() == sum(p.numel() for p in theirs.parameters())
    assert config.num_attention_heads == theirs.encoder.num_heads
