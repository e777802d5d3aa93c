"""plugins/timeseries/classify_set.py and pretrain_finetune.py, from arguments to what they write."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pd = pytest.importorskip("pandas")
pytest.importorskip("tsai", reason="needs jumbo-vit[ts]")
pytest.importorskip("aeon", reason="needs aeon")

from ts_ext import JumboPatchTST, pad_windows  # noqa: E402 (after the hosts are known to be there)
from ts_ext.transformers import JumboPatchTSTForPrediction, JumboPatchTSTForPretraining  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "plugins" / "timeseries"
SMALL = "--d-model 8 --n-layers 1 --n-heads 2 --multiplier 2".split()


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def classify():
    return load("classify_set")


@pytest.fixture(scope="module")
def pretrain():
    return load("pretrain_finetune")


def cases(count, seed, lengths=(24, 24)):
    """Two channels; what tells the classes apart is the frequency of the first."""
    random = np.random.default_rng(seed)
    found = []
    for i in range(count):
        t = np.arange(random.integers(lengths[0], lengths[1] + 1))
        wave = np.sin(t * (0.5 + i % 2) + random.uniform(0, 6)) + 0.05 * random.normal(size=len(t))
        found.append((np.stack([wave * 3 + 50, random.normal(size=len(t))]), ("slow", "fast")[i % 2]))
    return found


def write_ts(path, found, equal=True):
    head = ["problemName Mine", "timestamps false", "missing false", "univariate false", "dimensions 2"]
    head += ["equalLength true", "seriesLength 24"] if equal else ["equalLength false"]
    head = "".join(f"@{line}\n" for line in [*head, "classLabel true fast slow", "data"])
    rows = [":".join(",".join(f"{v:.6f}" for v in channel) for channel in x) + f":{y}" for x, y in found]
    path.write_text(head + "\n".join(rows) + "\n")


@pytest.mark.parametrize("equal", [True, False], ids=["equal lengths", "unequal lengths"])
def test_classify_writes_metrics_predictions_plot_and_weights(classify, tmp_path, equal):
    lengths = (24, 24) if equal else (14, 24)
    train, test = cases(80, 0, lengths), cases(31, 1, lengths)
    write_ts(tmp_path / "a.ts", train, equal)
    write_ts(tmp_path / "b.ts", test, equal)
    files = ["--train", str(tmp_path / "a.ts"), "--test", str(tmp_path / "b.ts"), "--out", str(tmp_path / "out")]
    metrics = classify.main(["Mine", *files, *SMALL, "--epochs", "25", "--lr", "0.01"])
    assert metrics == json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["cases"] == {"train": 64, "valid": 16, "test": 31}
    assert metrics["classes"] == ["fast", "slow"]
    assert metrics["test"]["accuracy"] > 0.9 and metrics["test"]["accuracy_of_commonest_class"] < 0.53
    assert metrics["model"]["patch_len"] == 3
    table = pd.read_csv(tmp_path / "out" / "predictions.csv")
    assert list(table["truth"]) == [y for _, y in test]
    assert (table["truth"] == table["prediction"]).mean() == pytest.approx(metrics["test"]["accuracy"])
    assert (tmp_path / "out" / "confusion.png").stat().st_size > 5000

    model = JumboPatchTST(**metrics["model"]).eval()
    model.load_state_dict(torch.load(tmp_path / "out" / "models" / "model.pth", weights_only=True))
    mean, std = (np.array(metrics["scaling"][k])[:, None] for k in ("mean", "std"))
    values, mask = pad_windows([torch.from_numpy((x.round(6) - mean) / std).float() for x, _ in test], 24)
    with torch.no_grad():
        by_hand = model(values, mask).softmax(-1)
    got = table[["probability of fast", "probability of slow"]].to_numpy()
    np.testing.assert_allclose(got, by_hand, atol=1e-5)


def test_test_cases_change_no_weight(classify, tmp_path):
    found = []
    for factor in (1, 100):
        test = [(x * factor, y) for x, y in cases(10, 1)]
        write_ts(tmp_path / "a.ts", cases(20, 0))
        write_ts(tmp_path / "b.ts", test)
        out = tmp_path / f"out{factor}"
        files = ["--train", str(tmp_path / "a.ts"), "--test", str(tmp_path / "b.ts"), "--out", str(out)]
        metrics = classify.main(["Mine", *files, *SMALL, "--epochs", "1"])
        found.append((metrics["scaling"], torch.load(out / "models" / "model.pth", weights_only=True)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][key], found[1][1][key]) for key in found[0][1])


def test_a_set_that_lies_in_aeon(classify):
    x, y, count = classify.read(classify.parse(["JapaneseVowels"]))
    assert x.shape == (640, 12, 29) and count == 270 and len(set(y)) == 9
    assert np.isnan(x[0]).any() and not np.isnan(x[:, :, -1]).any()  # shorter ones end with the window
    train, valid = classify.split(y[:count], 0.2, 0)
    assert sorted(train + valid) == list(range(270)) and len(valid) == 54
    assert {c: (y[valid] == c).sum() for c in set(y)} == dict.fromkeys(set(y), 6)
    assert classify.split(np.array(["a", "b", "b"]), 0.2, 0)[1] != [0]  # the only case of a class is trained on


def test_unusable_sets_are_refused(classify, tmp_path):
    with pytest.raises(SystemExit, match="could not load the set 'NoSuchSetHere'"):
        classify.main(["NoSuchSetHere", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"absent\.ts is no file"):
        classify.main(["Mine", "--train", "absent.ts", "--test", "absent.ts"])
    write_ts(tmp_path / "a.ts", [case for case in cases(20, 0) if case[1] == "slow"])
    write_ts(tmp_path / "b.ts", cases(10, 0))
    files = ["--train", str(tmp_path / "a.ts"), "--test", str(tmp_path / "b.ts"), "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match=r"classes \['fast'\]: a training set needs two, and every one"):
        classify.main(["Mine", *files])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--train a.ts", "--train and --test go together"),
        ("--n-heads 5", "--d-model 32 is not divisible by --n-heads 5"),
        ("--lr nan", "--lr must be above 0, got nan"),
        ("--epochs 0", "--epochs must be at least 1, got 0"),
        ("--valid-share 1", "--valid-share must be at least 0 and below 1"),
    ],
)
def test_unusable_options_of_classify(classify, capsys, options, message):
    with pytest.raises(SystemExit):
        classify.main(["GunPoint", *options.split()])
    assert message in capsys.readouterr().err


def frame(rows=400):
    hours = np.arange(rows)
    wave = np.sin(hours * 2 * np.pi / 12)
    return pd.DataFrame(
        {
            "date": pd.date_range("2024-01-01", periods=rows, freq="h").astype(str),
            "load": 1000 + 50 * wave,
            "heat": -wave,
        }
    )


TINY = [*SMALL, *"--horizon 6 --look-back 24 --patch-len 4 --pretrain-epochs 8 --finetune-epochs 4 --lr 0.01".split()]


def test_pretrain_then_finetune(pretrain, tmp_path, capsys):
    data = frame()
    data.loc[[30, 31, 380], "heat"] = np.nan
    data.to_csv(tmp_path / "data.csv", index=False)
    call = [str(tmp_path / "data.csv"), "--out", str(tmp_path / "out"), *TINY]
    metrics = pretrain.main(call)
    assert metrics == json.loads((tmp_path / "out" / "metrics.json").read_text())
    # 400 rows: 280 to train on, 40 to watch, 80 to test; a window belongs to the part that holds its targets
    assert metrics["windows"] == {"pretrain": 280 - 29, "finetune": 50, "valid": 40 - 5, "test": 80 - 5}
    assert metrics["pretraining_loss"]["after"] < metrics["pretraining_loss"]["before"]
    assert list(metrics["test"]) == ["repeat the last value", "from_scratch", "finetuned"]
    for name in ("from_scratch", "finetuned"):
        assert metrics["test"][name]["scaled_mse"] < metrics["test"]["repeat the last value"]["scaled_mse"]
    assert (tmp_path / "out" / "pretrain.png").stat().st_size > 5000
    pretrained = JumboPatchTSTForPretraining.from_pretrained(tmp_path / "out" / "pretrained")
    assert pretrained.config.context_length == 24
    model = JumboPatchTSTForPrediction.from_pretrained(tmp_path / "out" / "finetuned")
    past = (data[["load", "heat"]].to_numpy()[-30:-6] - metrics["scaling"]["mean"]) / metrics["scaling"]["std"]
    future = (data[["load", "heat"]].to_numpy()[-6:] - metrics["scaling"]["mean"]) / metrics["scaling"]["std"]
    with torch.no_grad():
        forecast = model(past_values=torch.from_numpy(past).float()[None]).prediction_outputs[0].numpy()
    assert np.abs(forecast - future).mean() < 0.6
    # the same command again: all is there; other arguments: another folder
    capsys.readouterr()
    assert pretrain.main(call) == metrics
    assert capsys.readouterr().out.count("is there already") == 3
    assert metrics["windows_left_out"] == {"training": 0, "validation": 0, "test": 0}
    with pytest.raises(SystemExit, match="tells of other arguments or data"):
        pretrain.main([*call, "--seed", "1"])
    (tmp_path / "out").rename(tmp_path / "moved")
    assert pretrain.main([*call[:2], str(tmp_path / "moved"), *call[3:]]) == metrics
    data.assign(heat=data["heat"] * 2).to_csv(tmp_path / "data.csv", index=False)
    with pytest.raises(SystemExit, match="tells of other arguments or data"):
        pretrain.main([*call[:2], str(tmp_path / "moved"), *call[3:]])


def test_windows_that_cannot_be_read_are_counted(pretrain, tmp_path, capsys):
    data = frame(200)
    data.loc[20:49, "heat"] = np.nan
    data.to_csv(tmp_path / "data.csv", index=False)
    metrics = pretrain.main([str(tmp_path / "data.csv"), "--out", str(tmp_path / "out"), *TINY])
    assert metrics["windows_left_out"] == {"training": 7, "validation": 0, "test": 0}  # 24 rows within those 30
    assert "windows left out" in capsys.readouterr().out


def test_an_interrupted_pretraining_goes_on(pretrain, tmp_path, monkeypatch):
    frame(200).to_csv(tmp_path / "data.csv", index=False)
    import transformers

    call = [str(tmp_path / "data.csv"), *TINY]
    whole = pretrain.main([*call, "--out", str(tmp_path / "whole")])

    class Stop(transformers.TrainerCallback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            if state.epoch >= 1:
                raise KeyboardInterrupt

    original = transformers.Trainer.__init__
    with monkeypatch.context() as patch:
        patch.setattr(
            transformers.Trainer, "__init__",
            lambda self, *a, **k: (original(self, *a, **k), self.add_callback(Stop()))[0],
        )  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            pretrain.main([*call, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out" / "pretrained").exists()
    resumed = pretrain.main([*call, "--out", str(tmp_path / "out")])
    assert resumed["pretraining_loss"]["after"] == whole["pretraining_loss"]["after"]
    assert resumed["test"] == whole["test"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.iloc[::-1], "date goes back|sort"),
        (lambda d: pd.concat([d[:9], d[8:]]), "2024-01-01 08:00:00"),
        (lambda d: d.rename(columns={"date": "time"}), "has no column 'date'"),
        (lambda d: d.assign(place="here"), r"columns \['place'\] are not numeric"),
        (lambda d: d.assign(load=1.0, heat=2.0), "every column of .* is constant in the training rows"),
        (lambda d: d[:40], "no training window in 40 rows|no validation window in 40 rows"),
    ],
)
def test_unusable_files_are_refused(pretrain, tmp_path, change, message):
    change(frame()).to_csv(tmp_path / "data.csv", index=False)
    with pytest.raises(SystemExit, match=message):
        pretrain.main([str(tmp_path / "data.csv"), "--out", str(tmp_path / "out"), *TINY])


@pytest.mark.parametrize("name", ["classify_set", "pretrain_finetune"])
def test_help(name):
    script = str(FOLDER / f"{name}.py")
    done = subprocess.run([sys.executable, "-W", "ignore", script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--multiplier" in done.stdout
