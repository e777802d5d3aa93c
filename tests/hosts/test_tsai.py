"""The main job in tsai: fit, evaluate every sample, predict, export, load."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("tsai", reason="needs jumbo-vit[ts]")

import tsai.inference  # noqa: F401 (gives learners get_X_preds)
from fastai.learner import load_learner
from fastai.optimizer import Adam
from rich.progress import Progress
from tsai.data.core import get_ts_dls
from tsai.learner import ts_learner
from tsai.tslearner import TSForecaster

from ts_ext.tsai import FitBar, JumboPatchTST, jumbo_lr, jumbo_splitter

SMALL = dict(patch_len=8, stride=4, d_model=16, n_layers=2, n_heads=2, d_ff=32, multiplier=2, dropout=0.1)
CPU = torch.device("cpu")


def waves(n=180):
    """Windows (n, 2, 40) of two noisy waves and the 8 steps that follow, in order of time."""
    steps = np.arange(n + 48)
    values = np.stack([np.sin(steps / 3) * 2 + 7, np.cos(steps / 5) * 30 - 100])
    values = (values + np.random.default_rng(0).normal(size=values.shape) * 0.05).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(values, 48, axis=1)[:, :n].swapaxes(0, 1)
    return windows[..., :40].copy(), windows[..., 40:].copy()


def fit(tmp_path, arch=JumboPatchTST, epochs=1, **options):
    x, y = waves()
    splits = list(range(80)), list(range(80, 180))
    config = {} if isinstance(arch, torch.nn.Module) else dict(arch_config=SMALL)
    learner = TSForecaster(
        x, y, splits=splits, arch=arch, bs=32, path=tmp_path, seed=0, device=CPU, **{**config, **options}
    )
    with learner.no_bar(), learner.no_logging():
        if epochs:
            learner.fit_one_cycle(epochs, jumbo_lr(5e-3) if "splitter" in options else 5e-3)
    return learner


@pytest.mark.parametrize("bs", [32, 64, 100])
@pytest.mark.parametrize("n", [100, 127, 130])
def test_every_sample_is_evaluated(tmp_path, n, bs):
    """Under numpy 2 the last batch of an unrepaired loader comes out empty (n=100, bs=32)."""
    x, y = waves(n + 1)
    dls = get_ts_dls(x, y, splits=([0], list(range(1, n + 1))), bs=[1, bs], path=tmp_path, drop_last=False)
    seen = torch.cat([xb for xb, _ in dls.valid])
    assert torch.equal(torch.as_tensor(seen).cpu(), torch.from_numpy(x[1:]))


def test_first_empty_batch_is_an_error_and_repairs_a_tsai_imported_after_the_model():
    code = """
import torch
from ts_ext import JumboPatchTST
model = JumboPatchTST(1, 1, 40, patch_len=8, stride=4, d_model=8, n_heads=2, multiplier=2)
from tsai.data.core import get_ts_dls
x = torch.arange(100.).reshape(100, 1, 1).expand(-1, 1, 40).numpy()
dls = get_ts_dls(x, x[:, 0, 0].copy(), splits=([0], list(range(100))), bs=[1, 32], drop_last=False)
try:
    model(torch.zeros(0, 1, 40))
except ValueError as error:
    print("run the same call again" in str(error), sum(len(b[0]) for b in dls.valid))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "100"]


def test_repair_comes_with_a_model_made_after_tsai_was_imported():
    code = """
import torch
from ts_ext import JumboPatchTST
from tsai.data.core import get_ts_dls
x = torch.arange(100.).reshape(100, 1, 1).expand(-1, 1, 40).numpy()
dls = get_ts_dls(x, x[:, 0, 0].copy(), splits=([0], list(range(100))), bs=[1, 32], drop_last=False)
JumboPatchTST(1, 1, 40, patch_len=8, stride=4, d_model=8, n_heads=2, multiplier=2)
print(sum(len(b[0]) for b in dls.valid))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["100"]


def test_class_trains_validates_and_predicts(tmp_path):
    learner = fit(tmp_path, epochs=6)
    x, y = waves()
    losses = [row[learner.recorder.metric_names.index("valid_loss") - 1] for row in learner.recorder.values]
    predictions, targets = learner.get_preds()
    assert predictions.shape == targets.shape == (100, 2, 8)  # 3 batches of 32 and one of 4
    by_hand = (learner.model.eval()(torch.from_numpy(x[80:])) - torch.from_numpy(y[80:])).square().mean()
    assert abs(losses[-1] - by_hand.item()) < 1e-3 * by_hand.item()
    assert losses[-1] < 0.5 * losses[0]
    again = learner.get_X_preds(x[80:], y[80:])[0]
    assert torch.equal(again, learner.get_X_preds(x[80:], y[80:])[0])
    torch.testing.assert_close(again, predictions, atol=1e-4, rtol=1e-5)


def test_instance_is_accepted(tmp_path):
    model = JumboPatchTST(2, 2, 40, 8, **SMALL)
    learner = fit(tmp_path, arch=model)
    assert learner.model is model
    assert learner.get_X_preds(waves()[0])[0].shape == (180, 2, 8)


def test_float64_series(tmp_path):
    x, y = waves()
    learner = TSForecaster(
        x.astype(np.float64), y.astype(np.float64), splits=(list(range(80)), list(range(80, 180))), arch=JumboPatchTST,
        arch_config=SMALL, bs=32, path=tmp_path, device=CPU,
    )  # fmt: skip
    with learner.no_bar(), learner.no_logging():
        learner.fit(1)
    assert learner.get_X_preds(x.astype(np.float64))[0].shape == y.shape


def test_get_ts_dls_and_ts_learner_export_and_load(tmp_path):
    x, y = waves()
    dls = get_ts_dls(x, y, splits=(list(range(80)), list(range(80, 180))), bs=32, path=tmp_path)
    learner = ts_learner(dls, JumboPatchTST, device=CPU, path=tmp_path, **SMALL)
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(1, 1e-3)
    expected = learner.get_X_preds(x)[0]
    learner.export(tmp_path / "model.pkl")
    loaded = load_learner(tmp_path / "model.pkl")
    assert torch.equal(loaded.get_X_preds(x)[0], expected)
    # in a process of its own, with tsai's tools alone
    np.save(tmp_path / "x.npy", x)
    code = (
        "import sys, numpy as np, torch, tsai.inference; from fastai.learner import load_learner\n"
        "p = load_learner(sys.argv[1] + '/model.pkl').get_X_preds(np.load(sys.argv[1] + '/x.npy'), bs=64)[0]\n"
        "torch.save(p, sys.argv[1] + '/p.pt')"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], check=True, capture_output=True)
    alone = torch.load(tmp_path / "p.pt", weights_only=True)
    torch.testing.assert_close(alone, expected, atol=1e-5, rtol=1e-6)
    # weights alone, without pickled code
    learner.save("weights")
    other = ts_learner(dls, JumboPatchTST, device=CPU, path=tmp_path, **SMALL)
    other.load("weights")
    assert torch.equal(other.get_X_preds(x)[0], expected)


def test_splitter_gives_the_jumbo_ffn_its_own_rate(tmp_path):
    learner = fit(tmp_path, splitter=jumbo_splitter, opt_func=Adam)
    ffn = {id(p) for p in learner.model.series.encoder.jumbo_mlp.parameters()}
    first, second = learner.opt.param_lists
    assert {id(p) for p in first} == ffn
    assert len(first) + len(second) == len(list(learner.model.parameters()))
    slow, fast = (group["lr"] for group in learner.opt.hypers)
    assert abs(slow / fast - 0.3) < 1e-6
    assert len(jumbo_splitter(JumboPatchTST(2, 2, 40, 8, **{**SMALL, "multiplier": 0}))) == 1
    with pytest.raises(ValueError, match="above 0"):
        jumbo_lr(0)


def test_missing_values_are_an_error_not_a_nan_loss(tmp_path):
    x, y = waves()
    x[5, 1, 7] = np.nan
    learner = TSForecaster(
        x, y, splits=(list(range(80)), list(range(80, 180))), arch=JumboPatchTST, arch_config=SMALL, bs=32,
        path=tmp_path, device=CPU,
    )  # fmt: skip
    with learner.no_bar(), learner.no_logging(), pytest.raises(ValueError, match="channel 1, step 7"):
        learner.fit(1)


def test_learner_with_a_fit_bar_can_be_copied_exported_and_loaded(tmp_path):
    x, _ = waves()
    with Progress(disable=True) as progress:
        learner = fit(tmp_path, cbs=FitBar(progress, "training"))
        copied = copy.deepcopy(learner)
        learner.export(tmp_path / "model.pkl")
        assert learner.fit_bar.progress is progress  # the learner at hand keeps its bar
    expected = learner.get_X_preds(x)[0]
    for other in (copied, load_learner(tmp_path / "model.pkl")):
        assert torch.equal(other.get_X_preds(x)[0], expected)
        assert other.fit_bar.progress is None and other.fit_bar.seconds == learner.fit_bar.seconds
    with copied.no_bar(), copied.no_logging():
        copied.fit(1, 1e-3)
    assert len(copied.fit_bar.seconds) == 2 and len(learner.fit_bar.seconds) == 1


def test_what_freezing_means_with_these_groups(tmp_path):
    learner = fit(tmp_path, splitter=jumbo_splitter, epochs=0)
    ffn = dict(learner.model.series.encoder.jumbo_mlp.named_parameters())
    learner.freeze()
    trained = [p for p in learner.model.parameters() if p.requires_grad]
    assert trained and not any(p is q for p in trained for q in ffn.values() if q.ndim > 1)
    assert len(trained) > len(list(learner.model.head.parameters()))  # not the head alone
    learner.unfreeze()
    learner.model.series.requires_grad_(False)  # the documented way to train the head alone
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(1, jumbo_lr(1e-2))
    moved = {name for name, p in learner.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"head.weight", "head.bias"}
