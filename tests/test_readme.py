"""Every python block of the README runs as it stands, on small files of the names it uses; its tables are current."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from PIL import Image

import jumbo_core  # noqa: F401
from benchmarks import tables
from jumbo_core.measure import __main__ as measure

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = dict(re.findall(r"### (\w+)\n(?:(?!###).)*?```python\n(.*?)```", README, re.DOTALL))


def run(block: str) -> dict:
    namespace = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec"), namespace)
    return namespace


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def published(path: Path, size: str = "tiny", **options) -> Path:
    """A file under the released names with random weights and a dead class token."""
    model = timm.create_model(f"jumbo_{size}_patch16_224", init="short", **options)
    state = {name.removeprefix("encoder."): value for name, value in model.state_dict().items()}
    torch.save({**state, "cls_token": torch.zeros(1, 1, model.embed_dim)}, path)
    return path


def test_there_is_a_block_for_every_host():
    hosts = {"timm", "Transformers", "MMSegmentation", "tsai", "neuralforecast"}
    assert set(BLOCKS) == hosts | {"Students", "Fusion", "Frame", "Series", "Optimized"}
    for name, block in BLOCKS.items():
        assert len([line for line in block.splitlines() if line.strip()]) <= 15, name


def test_timm_block():
    done = run(BLOCKS["timm"])
    assert done["logits"].shape == (2, 10)
    assert done["tokens"].shape == (2, 6 + 160, 192)
    assert [tuple(m.shape) for m in done["maps"]] == [(1, 192, 16, 20)] * 2
    assert done["baseline"].num_prefix_tokens == 17


def test_fusion_block(folder, capsys):
    done = run(BLOCKS["Fusion"])
    assert done["logits"].shape == (4, 10) and (folder / "plan.json").is_file()
    assert "196 patches" in capsys.readouterr().out
    assert done["plan"].saved(196) >= 0.35


def test_optimized_block(folder, capsys):
    done = run(BLOCKS["Optimized"])
    assert "int8" in capsys.readouterr().out
    assert torch.load("small.pt", weights_only=True)["encoder.jumbo_mlp.fc1.weight"].dtype == torch.int8
    image = torch.randn(2, 3, 224, 224)
    with torch.inference_mode():
        assert torch.equal(done["again"](image), done["model"](image))


def test_students_block(folder, capsys):
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64)
    transformers.ViTModel(config).save_pretrained("teacher")
    done = run(BLOCKS["Students"])
    assert "'train_loss'" in capsys.readouterr().out
    for got, trained in zip(done["model"].parameters(), done["student"].parameters(), strict=True):
        assert torch.equal(got, trained)


def test_transformers_block(folder, capsys):
    pytest.importorskip("transformers", reason="needs the extra hf")
    published(folder / "jumbo_tiny.pth")
    convert = re.search(r"`python (-m hf_ext\.convert [^`]+)`", README)[1]
    subprocess.run([sys.executable, *convert.split()], check=True, cwd=folder, capture_output=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (240, 300, 3), dtype=np.uint8)).save("photo.jpg")
    done = run(BLOCKS["Transformers"])
    assert "score" in capsys.readouterr().out
    assert done["model"].classifier.weight.std() > 0.005  # a head that a short run can use
    (best, *_) = done["pipeline"]("image-classification", model="my_jumbo")("photo.jpg")
    assert best["label"].startswith("LABEL_") and 0 < best["score"] < 1


@pytest.mark.slow
def test_mmsegmentation_block(folder):
    """The block as a file of its own through the stock tools, shortened on the command line as users do."""
    mmseg = pytest.importorskip("mmseg", reason="needs the extra mmseg-lite")
    from tests.hosts.mmseg_run import write_ade20k

    write_ade20k(folder / "data" / "ade", training=2, validation=1)
    published(folder / "jumbo_tiny.pth")
    (folder / "my_config.py").write_text(BLOCKS["MMSegmentation"])
    options = [
        "train_cfg.max_iters=1", "train_cfg.val_interval=1", "default_hooks.checkpoint.interval=1",
        "model.decode_head.channels=16", "model.auxiliary_head.channels=8",
        *(f"{split}_dataloader.{key}" for split in ("train", "val", "test")
          for key in ("num_workers=0", "persistent_workers=False")),
    ]  # fmt: skip
    tools = Path(mmseg.__file__).parent / ".mim" / "tools"
    commands = [line for line in README.splitlines() if line.startswith("python tools/")]
    assert len(commands) == 2
    for command in commands:
        words = command.replace("tools/", f"{tools}/", 1).replace("iter_160000", "iter_1").split()[1:]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *words, "--cfg-options", *options],
            cwd=folder, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        assert "mIoU" in done.stdout + done.stderr


def test_tsai_block(folder):
    pytest.importorskip("tsai", reason="needs the extra ts")
    hours = pd.date_range("2024-01-01", periods=500, freq="h", name="date")
    values = np.sin(np.arange(500)[:, None] / np.array([12, 24]) * 2 * np.pi)
    pd.DataFrame(values, index=hours, columns=["a", "b"]).to_csv("series.csv")
    done = run(BLOCKS["tsai"])
    assert done["forecast"].shape == (len(done["splits"][2]), 2, 24)


def test_frame_block(folder, capsys):
    pytest.importorskip("tsai", reason="needs the extra ts")
    hours = pd.date_range("2024-01-01", periods=600, freq="h", name="date")
    values = np.sin(np.arange(600)[:, None] / np.array([12, 24]) * 2 * np.pi)
    pd.DataFrame(values, index=hours, columns=["a", "b"]).to_csv("series.csv")
    run(BLOCKS["Frame"])
    assert "2024-01-26" in capsys.readouterr().out


def test_series_block(folder):
    assert run(BLOCKS["Series"])["forecast"].shape == (1, 96, 7)


def test_neuralforecast_block(folder):
    pytest.importorskip("neuralforecast", reason="needs the extra nixtla")
    days = pd.date_range("2024-01-01", periods=200)
    frame = pd.concat(
        pd.DataFrame({"unique_id": name, "ds": days, "y": 5 + np.sin(np.arange(200) / k)})
        for name, k in (("a", 2), ("b", 3))
    )
    frame.to_csv("long.csv", index=False)
    done = run(BLOCKS["neuralforecast"])
    assert len(done["folds"]) == 2 * 3 * 12 and done["folds"]["JumboPatchTST"].notna().all()


def test_tables_are_what_the_result_files_say():
    assert tables.main(["--check"]) == 0


def test_sizes_are_what_the_command_prints(capsys):
    measure.main(["flops"])
    assert capsys.readouterr().out.strip() in README
