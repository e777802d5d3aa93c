"""All three tasks, and pretraining, with tsai's own learners: every sample evaluated, exported, loaded, shown."""

import warnings

import matplotlib
import numpy as np
import pytest
import torch

pytest.importorskip("tsai", reason="needs jumbo-vit[ts]")
matplotlib.use("Agg")

import matplotlib.pyplot as plt
import tsai.inference  # noqa: F401 (gives learners get_X_preds)
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
from fastai.learner import load_learner
from fastai.losses import BCEWithLogitsLossFlat
from fastai.metrics import accuracy, accuracy_multi, mae
from tsai.data.core import TSClassification, TSForecasting, TSRegression, get_ts_dls
from tsai.learner import ts_learner
from tsai.tslearner import TSClassifier, TSForecaster, TSRegressor

from ts_ext.tsai import JumboPatchTST, PinballLoss, jumbo_lr, jumbo_splitter, pretraining_loss

SMALL = dict(patch_len=8, stride=4, d_model=16, n_layers=1, n_heads=2, d_ff=24, multiplier=2, dropout=0.0)
TRAIN, VALID = 64, 100  # the last validation batch of 32 has 4 samples
SPLITS = list(range(TRAIN)), list(range(TRAIN, TRAIN + VALID))
Q = (0.1, 0.5, 0.9)


def sines():
    """Windows (n, 2, 40) of unequal frequency, its class as a word, the frequency, and 6 more steps of each."""
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 3, TRAIN + VALID)
    t = np.arange(46) + rng.uniform(0, 20, (TRAIN + VALID, 2, 1))
    series = np.sin(t * np.array([0.2, 0.5, 1.1])[kind][:, None, None]) + rng.normal(size=(TRAIN + VALID, 2, 46)) * 0.05
    return (
        series[..., :40],
        np.array(["slow", "medium", "fast"])[kind],
        np.array([0.2, 0.5, 1.1])[kind],
        series[..., 40:],
    )


X, WORDS, VALUES, FUTURE = sines()
TASKS = {
    "forecast": (TSForecaster, FUTURE, TSForecasting, {}, (2, 6)),
    "quantiles": (TSForecaster, FUTURE, TSForecasting, dict(quantiles=Q), (2, 6, 3)),
    "classify": (TSClassifier, WORDS, TSClassification, dict(head="classify"), (3,)),
    "regress": (TSRegressor, VALUES, TSRegression, dict(head="regress"), ()),
    "regress two": (TSRegressor, np.stack([VALUES, -VALUES], 1), TSRegression, dict(head="regress"), (2,)),
}


def build(task, path, stride=4, **options):
    learner, y, transform, config, _ = TASKS[task]
    config = dict(SMALL, stride=stride) | config
    if task == "quantiles":
        options.setdefault("loss_func", PinballLoss(Q))
    return learner(
        X, y, splits=SPLITS, tfms=[None, transform()], arch=JumboPatchTST, arch_config=config, bs=32, path=path,
        seed=0, device=torch.device("cpu"), splitter=jumbo_splitter, **options,
    )  # fmt: skip


def fit(learner, epochs=6):
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(epochs, jumbo_lr(1e-2))
    return learner


@pytest.mark.parametrize("task", TASKS)
def test_fit_evaluate_show_export_load(task, tmp_path):
    learner = fit(build(task, tmp_path), epochs=6)
    losses = [row[1] for row in learner.recorder.values]
    assert losses[-1] < 0.6 * losses[0]
    reported = learner.recorder.values[-1][-1]
    with learner.no_bar():
        predictions, targets = learner.get_preds(act=None) if task != "classify" else learner.get_preds()
    assert predictions.shape == (VALID, *TASKS[task][-1]) and len(targets) == VALID
    x = torch.from_numpy(X[TRAIN:]).float()
    with torch.no_grad():
        by_hand = learner.model.eval()(x)
    by_hand = by_hand.softmax(-1) if task == "classify" else by_hand
    torch.testing.assert_close(predictions, by_hand, atol=1e-5, rtol=1e-5)
    if task == "classify":
        words = np.array(list(learner.dls.vocab))[predictions.argmax(1)]
        assert abs((words == WORDS[TRAIN:]).mean() - reported) < 1e-6 and reported > 0.7  # the last 4 samples count

    plt.close("all")
    with learner.no_bar():
        learner.show_results()
    axes = [axis for axis in plt.gcf().axes if axis.lines]
    assert len(axes) == 9 and all(axis.get_title().startswith("True: ") for axis in axes)
    plt.close("all")

    with learner.no_bar():
        expected = learner.get_X_preds(X)[0]
        learner.export(tmp_path / "learner.pkl")
        loaded = load_learner(tmp_path / "learner.pkl")
        with loaded.no_bar():
            again = loaded.get_X_preds(X)
    assert torch.equal(again[0], expected)
    if task == "classify":
        words = np.array(list(learner.dls.vocab))[expected.argmax(1)]
        assert [str(word) for word in again[2]] == words.tolist()


@pytest.mark.parametrize(("task", "metric"), [("classify", accuracy), ("regress", mae)])
def test_callbacks(task, metric, tmp_path):
    stop = EarlyStoppingCallback(monitor="valid_loss", patience=1, min_delta=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learner = build(task, tmp_path, metrics=metric, cbs=[stop, SaveModelCallback(fname="best")])
        fit(learner, epochs=5)
    assert len(learner.recorder.values) == 2  # stopped after an epoch that did not gain 10
    assert (tmp_path / "models" / "best.pth").exists()
    assert learner.recorder.metric_names[3] == metric.__name__


def test_get_ts_dls_and_ts_learner(tmp_path):
    dls = get_ts_dls(X, WORDS, splits=SPLITS, tfms=[None, TSClassification()], bs=32, path=tmp_path)
    learner = ts_learner(dls, JumboPatchTST, device=torch.device("cpu"), metrics=accuracy, head="classify", **SMALL)
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(1, 1e-2)
        assert learner.get_preds()[0].shape == (VALID, 3)
    seen = torch.cat([xb for xb, _ in dls.valid]).as_subclass(torch.Tensor)
    assert torch.equal(seen, torch.from_numpy(X[TRAIN:]).float())


def test_several_labels_at_once(tmp_path):
    labels = np.stack([VALUES > 0.3, VALUES > 0.8, VALUES < 0.3], 1).astype(np.float32)
    learner = TSClassifier(
        X, labels, splits=SPLITS, arch=JumboPatchTST, arch_config=dict(SMALL, head="classify"), bs=32, path=tmp_path,
        seed=0, device=torch.device("cpu"), loss_func=BCEWithLogitsLossFlat(), metrics=accuracy_multi,
        splitter=jumbo_splitter,
    )  # fmt: skip
    fit(learner, epochs=8)
    assert learner.model.head.out_features == 3
    assert learner.recorder.values[-1][2] > 0.9


def test_missing_values(tmp_path):
    x = X.copy()
    x[np.random.default_rng(0).random(x.shape) < 0.1] = np.nan
    learner = TSClassifier(
        x, WORDS, splits=SPLITS, tfms=[None, TSClassification()], arch=JumboPatchTST, bs=32, path=tmp_path, seed=0,
        arch_config=dict(SMALL, head="classify", missing="mask"), device=torch.device("cpu"), splitter=jumbo_splitter,
    )  # fmt: skip
    fit(learner, epochs=10)
    assert learner.recorder.values[-1][2] > 0.8


def test_pretrain_then_fine_tune(tmp_path):
    config = dict(SMALL, stride=8)  # patches that do not overlap, as PatchTST pretrains
    learner = TSForecaster(
        X, X, splits=SPLITS, arch=JumboPatchTST, arch_config=dict(config, head="pretrain"), loss_func=pretraining_loss,
        bs=32, path=tmp_path, seed=0, device=torch.device("cpu"), splitter=jumbo_splitter,
    )  # fmt: skip
    fit(learner, epochs=8)
    losses = [row[1] for row in learner.recorder.values]
    assert losses[-1] < losses[0]
    with learner.no_bar(), learner.no_logging():
        assert learner.validate()[0] == learner.validate()[0]
    learner.save("pretrained", with_opt=False)
    learner.save("with_optimizer")
    classifier = build("classify", tmp_path, stride=8)
    with pytest.raises(ValueError, match=r"holds more than tensors.*with_opt=False"):
        classifier.model.load_pretrained(tmp_path / "models" / "with_optimizer.pth")
    report = classifier.model.load_pretrained(tmp_path / "models" / "pretrained.pth")
    assert not report.missing and not report.unexpected
    assert torch.equal(classifier.model.series.pos_embed, learner.model.series.pos_embed)
    fit(classifier, epochs=6)
    assert classifier.recorder.values[-1][2] > 0.6
