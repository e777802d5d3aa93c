"""The distillation recipe of plugins/transformers: launched, resumed, fine-tuned, with teachers of both houses."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("sklearn")
import timm
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoImageProcessor, AutoModel, pipeline

from hf_ext import AdventurerModel
from tests.hosts.hf_distilling import student, vit_folder
from tests.hosts.test_hf_trainer import ROOT, start, write_digits, write_parquet

RECIPE = ROOT / "plugins" / "transformers" / "recipes" / "distill_image_classification.py"


@pytest.fixture
def recipe(monkeypatch):
    import importlib

    monkeypatch.syspath_prepend(RECIPE.parent)  # as when it is run: it uses its neighbour
    yield importlib.import_module(RECIPE.stem)
    for name in (RECIPE.stem, "train_image_classification"):
        sys.modules.pop(name, None)


def student_folder(path: Path, **changes) -> Path:
    path.mkdir()
    shape = dict(image_size=8, patch_size=2, hidden_size=16, num_hidden_layers=2, state_size=4, head_dim=8)
    (path / "config.json").write_text(json.dumps({"model_type": "adventurer", **shape, **changes}))
    return path


def test_recipe(tmp_path, recipe):
    write_digits(tmp_path / "train", slice(0, 64))
    write_digits(tmp_path / "test", slice(64, 96))
    guide = vit_folder(tmp_path / "teacher", num_channels=3)
    command = [
        *("--teacher", guide, "--student", student_folder(tmp_path / "small"), "--stages", 2),
        *("--train_data", tmp_path / "train", "--eval_data", tmp_path / "test", "--augment", "shift"),
        *("--per_device_train_batch_size", 16, "--use_cpu", "--report_to", "none", "--save_steps", 2),
        *("--learning_rate", 2e-3, "--logging_steps", 1, "--output_dir", tmp_path / "out"),
    ]

    def losses(folder):
        history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        return [(entry["step"], entry["loss"]) for entry in history if "loss_masked" in entry]

    launched = start("-m", "accelerate.commands.launch", "--cpu", RECIPE, *command, "--max_steps", 2)
    assert launched.returncode == 0, launched.stderr[-3000:]
    assert "2/2" in launched.stderr  # the progress bar
    first = json.loads(launched.stdout.strip().splitlines()[-1])["distillation"]
    assert {"eval_loss", "eval_loss_activation", "eval_loss_masked"} <= set(first)
    assert type(AutoModel.from_pretrained(tmp_path / "out")) is AdventurerModel

    # Started again with more steps and fine-tuning it goes on from the checkpoint.
    again = [*map(str, command), "--max_steps", "3", "--finetune-epochs", "1", "--finetune-learning-rate", "1e-3"]
    done = losses(tmp_path / "out")
    metrics = recipe.main(again)
    assert losses(tmp_path / "out")[:2] == done and [step for step, _ in losses(tmp_path / "out")] == [1, 2, 3]
    assert 0 <= metrics["finetuning"]["eval_accuracy"] <= 1
    tuned = tmp_path / "out" / "finetuned"
    assert json.loads((tuned / "trainer_state.json").read_text())["global_step"] == 4
    answer = pipeline("image-classification", model=str(tuned))(Image.new("RGB", (20, 20)))
    assert answer[0]["label"].startswith("digit ")
    for folder in (tmp_path / "out", tuned):  # the teacher's own preprocessing
        processor = AutoImageProcessor.from_pretrained(folder)
        assert list(processor.image_mean) == [0.1, 0.2, 0.3] and list(processor.image_std) == [0.4, 0.5, 0.6]

    # Once more with nothing left to do: nothing is touched.
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert recipe.main(again) == metrics
    assert files == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.is_file()}


def test_recipe_with_a_timm_teacher_and_parquet(tmp_path, recipe):
    write_parquet(tmp_path / "few.parquet", slice(0, 24))
    shape = dict(img_size=8, patch_size=2, depth=2, embed_dim=24, num_heads=2)
    guide = timm.create_model("vit_tiny_patch16_224", num_classes=7, **shape)
    save_file(guide.state_dict(), tmp_path / "vit.safetensors")
    saved = student(AdventurerModel, num_channels=3, image_size=16, patch_size=4)
    saved.save_pretrained(tmp_path / "saved")
    command = [
        *("--teacher", "timm:vit_tiny_patch16_224", "--student", tmp_path / "saved", "--stages", 2),
        *("--train_data", tmp_path / "few.parquet", "--augment", "none", "--image_size", 8, "--max_steps", 1),
        *("--resample_teacher", "--mask_ratio", 0.5, "--use_cpu", "--report_to", "none"),
        *("--output_dir", tmp_path / "out"),
    ]
    with pytest.raises(FileNotFoundError, match="a timm teacher needs --teacher_weights FILE, got None"):
        recipe.main([*map(str, command)])
    extra = ["--teacher_weights", str(tmp_path / "vit.safetensors"), "--teacher_options", json.dumps(shape)]
    metrics = recipe.main([*map(str, command), *extra])
    assert math.isfinite(metrics["distillation"]["train_loss"])
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert processor.crop_size["height"] == 8 and list(processor.image_mean) == [0.5, 0.5, 0.5]
    trained = AutoModel.from_pretrained(tmp_path / "out")
    assert trained.config.image_size == 16 and not torch.equal(trained.vit.pos_embed, saved.vit.pos_embed)
    options = recipe.RecipeArguments(str(tmp_path / "saved"), "student", "data", teacher_weights="x")
    with pytest.raises(ValueError, match=r"--teacher_weights is for a timm teacher, --teacher is .*saved"):
        recipe.open_teacher(options)
    model, _ = recipe.open_teacher(
        recipe.RecipeArguments("timm:vit_tiny_patch16_224", "", "", extra[1], teacher_options=extra[3])
    )
    assert all(torch.equal(v, guide.state_dict()[k]) for k, v in model.state_dict().items())


def test_recipe_says_what_it_takes():
    done = start(RECIPE, "--help")
    assert done.returncode == 0, done.stderr[-2000:]
    for option in ("--teacher", "--teacher-weights", "--finetune-epochs", "--mask-ratio", "--output_dir"):
        assert option in done.stdout
