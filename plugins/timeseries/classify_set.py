"""Classify a set of the UCR/UEA archive with JumboPatchTST through tsai.

    python plugins/timeseries/classify_set.py GunPoint --out out/gunpoint
    python plugins/timeseries/classify_set.py Mine --train mine_TRAIN.ts --test mine_TEST.ts --out out/mine

A NAME is loaded by aeon: some sets lie inside its package, others it downloads into --data where there is a network.
Series may have several channels, unequal lengths and missing values. A stratified part of the training set is set aside
to watch; what the model is scaled by comes from the rest, and the test set is read once, at the end. OUT then holds

    metrics.json      accuracy, balanced accuracy and the recall of each class on the test set, next to always
                      answering with the commonest class; the arguments of the model
    predictions.csv   case, truth, prediction, and the probability of each class
    confusion.png     which classes are taken for which, and the loss of every epoch
    models/model.pth  the weights (torch.load(…, weights_only=True)), with the classes' order in metrics.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(arguments: list[str] | None = None) -> dict:
    options = parse(arguments)
    x, y, count = read(options)
    classes = sorted(set(y[:count].tolist()))
    unknown = sorted(set(y[count:].tolist()) - set(classes))
    if unknown or len(classes) < 2:
        raise SystemExit(f"classes {unknown or classes}: a training set needs two, and every one that the test set has")
    train, valid = split(y[:count], options.valid_share, options.seed)
    values = x[train]
    mean, std = np.nanmean(values, axis=(0, 2)), np.nanstd(values, axis=(0, 2))
    if np.isnan(mean).any():
        raise SystemExit(f"channel {int(np.isnan(mean).argmax())} has no value in the training set: leave it out")
    std = np.where(std > 0, std, 1)
    x = ((x - mean[:, None]) / std[:, None]).astype(np.float32)
    length = x.shape[2]
    patch = options.patch_len or max(1, min(16, length // 8))
    if patch > length:
        raise SystemExit(f"--patch-len {patch} is longer than the series, {length} steps")
    config = dict(
        head="classify",
        missing="mask",
        revin=options.revin,
        patch_len=patch,
        stride=max(1, patch // 2),
        multiplier=options.multiplier,
        registers=options.registers,
        d_model=options.d_model,
        n_layers=options.n_layers,
        n_heads=options.n_heads,
        d_ff=2 * options.d_model,
        dropout=options.dropout,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    probabilities, history, parameters = fit(x, y, train, valid, count, config, options)
    truth = np.searchsorted(classes, y[count:])
    guess = probabilities.argmax(axis=1)
    confusion = np.zeros((len(classes), len(classes)), dtype=int)
    np.add.at(confusion, (truth, guess), 1)
    recall = {c: row[i] / row.sum() for i, (c, row) in enumerate(zip(classes, confusion, strict=True)) if row.sum()}
    common = max(classes, key=list(y[:count]).count)
    metrics = {
        "set": options.name,
        "cases": {"train": len(train), "valid": len(valid), "test": len(truth)},
        "classes": classes,
        "model": dict(c_in=x.shape[1], c_out=len(classes), seq_len=length, **config),
        "parameters": parameters,
        "scaling": {"mean": mean.tolist(), "std": std.tolist()},
        "test": {
            "accuracy": float((guess == truth).mean()),
            "balanced_accuracy": float(np.mean(list(recall.values()))),
            "recall": {c: float(r) for c, r in recall.items()},
            "accuracy_of_commonest_class": float((y[count:] == common).mean()),
        },
    }
    (options.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    table = pd.DataFrame({"case": range(len(truth)), "truth": y[count:], "prediction": np.array(classes)[guess]})
    for i, name in enumerate(classes):
        table[f"probability of {name}"] = probabilities[:, i]
    table.to_csv(options.out / "predictions.csv", index=False)
    draw(confusion, classes, history, metrics, options.out / "confusion.png")
    print(
        f"{options.name}: {100 * metrics['test']['accuracy']:.2f} % of {len(truth)} test cases right "
        f"(commonest class: {100 * metrics['test']['accuracy_of_commonest_class']:.2f} %)"
    )
    print(f"wrote {options.out}/metrics.json, predictions.csv, confusion.png, models/model.pth")
    return metrics


def read(options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray, int]:
    """Series (n, channels, length), NaN where missing or in front of a shorter one, classes, and how many to train."""
    try:
        from aeon.datasets import load_classification, load_from_ts_file
    except ImportError as error:
        raise SystemExit(f"this script reads sets with aeon: pip install aeon ({error})") from None

    parts = []
    for part, path in (("train", options.train), ("test", options.test)):
        if path is not None:
            if not path.is_file():
                raise SystemExit(f"--{part} {path} is no file; expected one in the .ts format of the archive")
            found = load_from_ts_file(str(path))
        else:
            try:
                found = load_classification(options.name, split=part, extract_path=options.data)
            except Exception as error:  # whatever the download meets: no network, no such name, a broken file
                raise SystemExit(
                    f"aeon could not load the set {options.name!r} ({type(error).__name__}: {error}). Check the name, "
                    f"or give files with --train and --test"
                ) from None
        parts.append(found)
    (train, train_y), (test, test_y) = parts
    series = [np.asarray(s, dtype=np.float64) for s in (*train, *test)]
    if len({s.shape[0] for s in series}) > 1:
        raise SystemExit(f"series have {sorted({s.shape[0] for s in series})} channels: all need the same number")
    length = max(s.shape[1] for s in series)
    x = np.full((len(series), series[0].shape[0], length), np.nan)
    for row, one in zip(x, series, strict=True):
        row[:, length - one.shape[1] :] = one
    empty = np.isnan(x).all(axis=2)
    if empty.any() or np.isinf(x).any():
        case = int(np.argwhere(empty.any(axis=1) | np.isinf(x).any(axis=(1, 2)))[0, 0])
        raise SystemExit(f"case {case} has an infinite value, or a channel without any: leave it out")
    return x, np.concatenate([train_y, test_y]).astype(str), len(train)


def split(y: np.ndarray, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Cases to train on and to watch, each class in the same proportion; a class of one case is trained on."""
    random, train, valid = np.random.default_rng(seed), [], []
    for name in sorted(set(y)):
        cases = random.permutation(np.flatnonzero(y == name))
        held = min(max(1, round(share * len(cases))), len(cases) - 1)
        valid += cases[:held].tolist()
        train += cases[held:].tolist()
    if not valid:
        raise SystemExit("no class has two training cases: there is nothing to watch the training with")
    return sorted(train), sorted(valid)


def fit(
    x: np.ndarray,
    y: np.ndarray,
    train: list[int],
    valid: list[int],
    count: int,
    config: dict,
    options: argparse.Namespace,
) -> tuple[np.ndarray, list[list[float]], int]:
    """Train and save; probabilities of the test cases (n, classes), losses of every epoch, parameters."""
    # Here and not above, so that --help and bad arguments are answered at once.
    import torch
    import tsai.inference  # noqa: F401 (gives learners get_X_preds)
    from rich.progress import Progress
    from tsai.data.preprocessing import TSClassification
    from tsai.tslearner import TSClassifier

    from ts_ext.tsai import FitBar, JumboPatchTST, jumbo_lr, jumbo_splitter

    with Progress() as progress:
        learner = TSClassifier(
            x[:count], y[:count], splits=(train, valid), tfms=[None, TSClassification()], arch=JumboPatchTST,
            arch_config=config, splitter=jumbo_splitter, bs=[options.batch_size, 256], seed=options.seed,
            path=options.out, device=torch.device(options.device), drop_last=len(train) > options.batch_size,
            cbs=FitBar(progress, "training"),
        )  # fmt: skip
        with learner.no_bar(), learner.no_logging():
            learner.fit_one_cycle(options.epochs, jumbo_lr(options.lr))
            history = [[float(v) for v in row[:2]] for row in learner.recorder.values]  # predicting overwrites them
            probabilities = learner.get_X_preds(x[count:], bs=256)[0].numpy()
    learner.save("model", with_opt=False)
    return probabilities, history, sum(p.numel() for p in learner.model.parameters())


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="set of the archive, or any name with --train and --test")
    parser.add_argument("--train", type=Path, help=".ts file to train on, instead of a set of that name")
    parser.add_argument("--test", type=Path, help=".ts file to test on")
    parser.add_argument("--data", help="folder of sets that aeon downloads (default: in aeon's package)")
    parser.add_argument("--valid-share", type=float, default=0.2, help="of the training set, to watch (default 0.2)")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak rate; the Jumbo FFN gets 0.3 of it")
    parser.add_argument("--multiplier", type=int, default=6, help="J, width of the Jumbo token in patches; 0 = none")
    parser.add_argument("--registers", type=int, default=0)
    parser.add_argument(
        "--patch-len", type=int, help="default: an eighth of the series, 16 at most; stride: half of it"
    )
    parser.add_argument("--revin", action="store_true", help="take level and scale of every single case away")
    parser.add_argument("--d-model", type=int, default=32)
    parser.add_argument("--n-layers", type=int, default=3)
    parser.add_argument("--n-heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("out/classify"))
    options = parser.parse_args(arguments)
    if (options.train is None) != (options.test is None):
        parser.error("--train and --test go together: give both files or a set's name alone")
    for name in ("epochs", "batch_size", "patch_len", "d_model", "n_layers", "n_heads", "multiplier", "registers"):
        least, given = 0 if name in ("multiplier", "registers") else 1, getattr(options, name)
        if given is not None and given < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {given}")
    if not 0 < options.lr < np.inf:
        parser.error(f"--lr must be above 0, got {options.lr}")
    for name in ("dropout", "valid_share"):
        if not 0 <= getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 0 and below 1, got {getattr(options, name)}")
    if options.d_model % options.n_heads:
        parser.error(f"--d-model {options.d_model} is not divisible by --n-heads {options.n_heads}: choose a divisor")
    return options


def draw(confusion: np.ndarray, classes: list[str], history: list[list[float]], metrics: dict, path: Path) -> None:
    size = 3.5 + 0.25 * len(classes)
    figure, (left, right) = plt.subplots(1, 2, figsize=(size + 4.5, size), layout="constrained")
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    left.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    left.set_xticks(range(len(classes)), classes, rotation=90 if len(classes) > 6 else 0)
    left.set_yticks(range(len(classes)), classes)
    if len(classes) <= 20:
        for (i, j), number in np.ndenumerate(confusion):
            if number:
                left.text(j, i, number, ha="center", va="center", color="white" if shares[i, j] > 0.5 else "0.2")
    left.set_xlabel("prediction")
    left.set_ylabel("truth")
    left.set_title(f"{metrics['set']}: {100 * metrics['test']['accuracy']:.1f} % right")
    epochs = range(1, len(history) + 1)
    for i, name in enumerate(("trained on", "watched")):
        right.plot(epochs, [row[i] for row in history], label=name)
    right.set_xlabel("epoch")
    right.set_ylabel("cross-entropy")
    right.grid(alpha=0.3)
    right.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
