"""The real Runner on a config of plugins/mmseg: train, validate, save, resume, test; the stock tools as users do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("mmseg", reason="needs the extra mmseg-lite")

import mmseg
from mmengine.runner import Runner

from tests.hosts.mmseg_run import tiny_config, write_ade20k
from tests.mmseg_ext.helpers import trainable_without_gradient

TOOLS = Path(mmseg.__file__).parent / ".mim" / "tools"
ITERATIONS = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_ade20k(tmp_path_factory.mktemp("ade"))


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory) -> Path:
    """Work folder of one complete run."""
    work = tmp_path_factory.mktemp("whole")
    config = tiny_config(data, work, iterations=ITERATIONS)
    config.dump(str(work / "config.py"))
    runner = Runner.from_cfg(config)
    runner.train()
    assert trainable_without_gradient_after(runner) == []
    return work


def trainable_without_gradient_after(runner) -> list[str]:
    runner.model.train()
    runner.model.zero_grad(set_to_none=True)
    batch = runner.model.data_preprocessor(next(iter(runner.train_dataloader)), True)
    losses = runner.model(**batch, mode="loss")
    runner.model.parse_losses(losses)[0].backward()
    return trainable_without_gradient(runner.model)


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def assert_same_weights(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_checkpoint_is_plain_and_complete(uninterrupted):
    checkpoint = load(uninterrupted / f"iter_{ITERATIONS}.pth")
    assert checkpoint["meta"]["iter"] == ITERATIONS and checkpoint["optimizer"]["state"]
    scalars = checkpoint["message_hub"]["log_scalars"]
    assert len(scalars["train/loss"]["values"]) == ITERATIONS
    assert torch.isfinite(scalars["train/loss"]["values"]).all()


def test_resumed_run_ends_bit_equal(uninterrupted, data, tmp_path):
    """mmengine replays the data; with RandomStateHook drop path and dropout go on too. Log history is whole."""
    config = tiny_config(data, tmp_path, iterations=ITERATIONS)
    config.load_from, config.resume = str(uninterrupted / f"iter_{ITERATIONS // 2}.pth"), True
    torch.manual_seed(123)
    Runner.from_cfg(config).train()
    resumed, whole = (load(folder / f"iter_{ITERATIONS}.pth") for folder in (tmp_path, uninterrupted))
    assert_same_weights(resumed["state_dict"], whole["state_dict"])
    for key in ("exp_avg", "exp_avg_sq", "step"):
        for state, expected in zip(
            resumed["optimizer"]["state"].values(), whole["optimizer"]["state"].values(), strict=True
        ):
            assert torch.equal(state[key], expected[key])
    assert resumed["param_schedulers"] == whole["param_schedulers"]
    for name in ("train/loss", "train/lr"):
        history, expected = (c["message_hub"]["log_scalars"][name]["values"] for c in (resumed, whole))
        assert torch.equal(history, expected), name


def test_checkpoint_as_pretrained_weights(uninterrupted, data, tmp_path):
    config = tiny_config(data, tmp_path)
    path = uninterrupted / f"iter_{ITERATIONS}.pth"
    config.model.backbone.init_cfg = dict(type="Pretrained", checkpoint=str(path))
    runner = Runner.from_cfg(config)
    runner._init_model_weights()
    expected = {
        k.removeprefix("backbone."): v for k, v in load(path)["state_dict"].items() if k.startswith("backbone.")
    }
    assert_same_weights(dict(runner.model.backbone.state_dict()), expected)


def stock(tool: str, *arguments, cwd: Path) -> subprocess.Popen:
    command = [sys.executable, "-W", "ignore", str(TOOLS / tool), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-3000:]
    return output


@pytest.mark.slow
def test_stock_tools_kill_resume_test(data, tmp_path):
    """tools/train.py is killed after a checkpoint, resumed with --resume, and the result tested with tools/test.py."""
    iterations, work = 60, tmp_path / "work"
    config = tiny_config(data, work, iterations=iterations)
    config.default_hooks.checkpoint.interval = 4
    config.dump(str(tmp_path / "config.py"))
    first = stock("train.py", "config.py", cwd=tmp_path)
    deadline = time.monotonic() + 500
    while not (work / "last_checkpoint").exists() and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    output, _ = first.communicate()
    assert first.returncode == -signal.SIGKILL, output[-3000:]
    saved = Path((work / "last_checkpoint").read_text())
    stopped_at = load(saved)["meta"]["iter"]
    assert 0 < stopped_at < iterations

    log = finish(stock("train.py", "config.py", "--resume", cwd=tmp_path))
    assert f"resumed epoch: 0, iter: {stopped_at}" in log and "mIoU" in log
    final = load(work / f"iter_{iterations}.pth")
    assert len(final["message_hub"]["log_scalars"]["train/loss"]["values"]) == iterations

    whole = tiny_config(data, tmp_path / "whole", iterations=iterations)
    torch.set_num_threads(1)
    Runner.from_cfg(whole).train()
    assert_same_weights(final["state_dict"], load(tmp_path / "whole" / f"iter_{iterations}.pth")["state_dict"])

    log = finish(stock("test.py", "config.py", work / f"iter_{iterations}.pth", cwd=tmp_path))
    assert "mIoU" in log
