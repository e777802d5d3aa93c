"""Pre-train JumboPatchTST on masked patches, then fine-tune it to forecast, through the Trainer of Transformers.

    python plugins/timeseries/pretrain_finetune.py ETTh1.csv --horizon 96 --look-back 336 --out out/etth1

The file has a column of dates, evenly spaced, and one numeric column per series; missing values may be empty. Rows are
split by time: the oldest train, the next are watched, the newest test. Pre-training reads the past of every training
window; fine-tuning sees the --label-share newest of them, once from the pre-trained encoder and once from a fresh one,
for the same steps: the table says what pre-training was worth. An interrupted command, run again, goes on from its
last checkpoint. OUT then holds

    metrics.json        losses, and errors over every test window, on scaled data and in the file's own units
    pretrain.png        a test window, what was hidden of it and what the model makes of that; test errors
    pretrained/, finetuned/, from_scratch/   folders for from_pretrained, after ``import ts_ext.transformers``
"""

from __future__ import annotations

import argparse
import hashlib
import json
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(arguments: list[str] | None = None) -> dict:
    options = parse(arguments)
    # Here and not above, so that --help and bad arguments are answered at once.
    from transformers import set_seed

    from ts_ext.frames import read_frame
    from ts_ext.transformers import JumboPatchTSTConfig, JumboPatchTSTForPrediction, JumboPatchTSTForPretraining

    frame = pd.read_csv(options.csv)
    if options.date_column not in frame.columns:
        raise SystemExit(f"{options.csv} has no column {options.date_column!r}; it has {list(frame.columns)}")
    columns = [c for c in frame.columns if c != options.date_column]
    try:
        frame[options.date_column] = pd.to_datetime(frame[options.date_column])
        data = read_frame(frame, columns, options.date_column, "mask")
    except ValueError as error:  # says what of the file cannot be used, and what to do
        raise SystemExit(f"{options.csv}: {error}") from None
    borders = [round(len(data.values) * share) for share in (0, 0.7, 0.8, 1)]
    rows = data.values[: borders[1]]
    if np.isnan(rows).all(axis=0).any():
        raise SystemExit(f"{columns[int(np.isnan(rows).all(axis=0).argmax())]} has no value in the training rows")
    mean, std = np.nanmean(rows, axis=0), np.nanstd(rows, axis=0)
    if not (std > 0).any():
        raise SystemExit(f"every column of {options.csv} is constant in the training rows: there is nothing to learn")
    std = np.where(std > 0, std, 1)
    scaled = (data.values - mean) / std
    train, valid, test = (Windows(scaled, *part, options) for part in pairwise(borders))
    for name, part in (("training", train), ("validation", valid), ("test", test)):
        if not len(part):
            raise SystemExit(
                f"no {name} window in {len(scaled)} rows: a window needs {options.look_back} + {options.horizon} of "
                f"them with a value in every column; shorten --look-back or --horizon"
            )
    shape = dict(
        num_input_channels=len(columns),
        context_length=options.look_back,
        prediction_length=options.horizon,
        patch_length=options.patch_len,
        patch_stride=options.patch_len,  # no overlap: hidden patches then lie between whole visible ones
        d_model=options.d_model,
        num_hidden_layers=options.n_layers,
        num_attention_heads=options.n_heads,
        ffn_dim=2 * options.d_model,
        multiplier=options.multiplier,
        random_mask_ratio=options.mask_ratio,
        missing="mask",
    )
    labelled = train.newest(options.label_share)
    set_seed(options.seed)
    model = JumboPatchTSTForPretraining(JumboPatchTSTConfig(**shape))
    left_out = {name: part.left_out for name, part in (("training", train), ("validation", valid), ("test", test))}
    if any(left_out.values()):
        print(f"windows left out, for a column without any past value: {left_out}")
    metrics = {
        "rows": len(scaled),
        "windows_left_out": left_out,
        "windows": {"pretrain": len(train), "finetune": len(labelled), "valid": len(valid), "test": len(test)},
        "parameters": sum(p.numel() for p in model.parameters()),
        "scaling": {"mean": mean.tolist(), "std": std.tolist()},
        "pretraining_loss": {"before": evaluate(model, valid, options, "past")},
    }
    model = train_or_load(model, "pretrained", train, options, options.pretrain_epochs, "past")
    metrics["pretraining_loss"]["after"] = evaluate(model, valid, options, "past")
    metrics["test"] = {"repeat the last value": errors(test.repeated(), test.targets(), std)}
    for name in ("from_scratch", "finetuned"):
        set_seed(options.seed)
        if name == "finetuned":
            forecaster = JumboPatchTSTForPrediction.from_pretrained(options.out / "pretrained", **shape)
        else:
            forecaster = JumboPatchTSTForPrediction(JumboPatchTSTConfig(**shape))
        forecaster = train_or_load(forecaster, name, labelled, options, options.finetune_epochs, "future")
        metrics["test"][name] = errors(evaluate(forecaster, test, options, "future"), test.targets(), std)
    (options.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    draw(model, test, columns, metrics, options.out / "pretrain.png")
    for name, found in metrics["test"].items():
        print(
            f"{name}: MSE {found['scaled_mse']:.4f}, MAE {found['scaled_mae']:.4f} (scaled), {len(test)} test windows"
        )
    print(f"wrote {options.out}/metrics.json, pretrain.png, pretrained, finetuned, from_scratch")
    return metrics


class Windows:
    """Windows whose targets all lie in rows start to stop - 1; without those that have a column of no past value."""

    def __init__(self, values: np.ndarray, start: int, stop: int, options: argparse.Namespace) -> None:
        self.values, self.past, self.future = values.astype(np.float32), options.look_back, options.horizon
        first = range(max(0, start - self.past), stop - self.past - self.future + 1)
        seen = np.cumsum(np.pad(~np.isnan(values), ((1, 0), (0, 0))), axis=0)
        self.starts = [i for i in first if (seen[i + self.past] > seen[i]).all()]
        self.left_out = len(first) - len(self.starts)
        self.labelled = True

    def newest(self, share: float) -> Windows:
        """The newest windows, a share of them."""
        part = object.__new__(Windows)
        part.__dict__ = {**self.__dict__, "starts": self.starts[-max(1, round(share * len(self.starts))) :]}
        return part

    def unlabelled(self) -> Windows:
        part = object.__new__(Windows)
        part.__dict__ = {**self.__dict__, "labelled": False}
        return part

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        start = self.starts[i]
        past, future = np.split(self.values[start : start + self.past + self.future], [self.past])
        if not self.labelled:
            return {"past_values": past}
        return {"past_values": past, "future_values": np.nan_to_num(future), "future_observed_mask": ~np.isnan(future)}

    def targets(self) -> np.ndarray:
        return np.stack([self.values[s + self.past : s + self.past + self.future] for s in self.starts])

    def repeated(self) -> np.ndarray:
        """The last value there is of each column's past, for every step to come."""
        past = pd.DataFrame(self.values).ffill().to_numpy()
        last = np.stack([past[s + self.past - 1] for s in self.starts])
        return np.repeat(last[:, None], self.future, axis=1)


def arguments_of(options: argparse.Namespace, folder: Path, epochs: float, labels: str):
    from transformers import TrainingArguments

    return TrainingArguments(
        str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=256,
        learning_rate=options.lr,
        warmup_steps=0.1,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        label_names=["past_values"] if labels == "past" else ["future_values", "future_observed_mask"],
        remove_unused_columns=False,
        seed=options.seed,
        use_cpu=options.device == "cpu",
        save_strategy="epoch",
        save_total_limit=1,
        logging_strategy="epoch",
        report_to="none",
    )


def train_or_load(model, name: str, windows: Windows, options: argparse.Namespace, epochs: float, labels: str):
    """Train and save; what an earlier command finished is opened, what it began goes on."""
    import torch
    from transformers import Trainer
    from transformers.trainer_utils import get_last_checkpoint

    from jumbo_core.jumbo import param_groups

    target, work = options.out / name, options.out / f"{name}-training"
    # What was trained depends on the file's values, not on where it or its results lie.
    shaping = {k: v for k, v in sorted(vars(options).items()) if k not in ("device", "out", "csv")}
    shaping["csv_sha256"] = hashlib.sha256(options.csv.read_bytes()).hexdigest()
    settings = json.dumps(shaping, indent=1)
    note = options.out / "settings.json"
    if note.is_file() and note.read_text() != settings:
        raise SystemExit(f"{note} tells of other arguments or data: choose another --out, or delete {options.out}")
    options.out.mkdir(parents=True, exist_ok=True)
    note.write_text(settings)
    if (target / "config.json").is_file():
        print(f"{target} is there already")
        return type(model).from_pretrained(target)
    print(f"{name}: {len(windows)} windows")
    optimizer = torch.optim.AdamW(param_groups(model, options.lr, 0.01, jumbo_lr_scale=0.3))
    data = windows.unlabelled() if labels == "past" else windows
    trainer = Trainer(
        model, arguments_of(options, work, epochs, labels), train_dataset=data, optimizers=(optimizer, None)
    )
    work.mkdir(exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(work)))
    trainer.save_model(str(target))
    return model


def evaluate(model, windows: Windows, options: argparse.Namespace, labels: str):
    """The mean pre-training loss, or scaled forecasts (n, horizon, columns)."""
    from transformers import Trainer

    trainer = Trainer(model, arguments_of(options, options.out / "evaluation", 1, labels))
    if labels == "past":
        return trainer.evaluate(windows.unlabelled())["eval_loss"]
    return trainer.predict(windows).predictions[0]


def errors(forecast: np.ndarray, truth: np.ndarray, std: np.ndarray) -> dict[str, float]:
    difference = forecast.astype(np.float64) - truth
    found = {"scaled_mse": np.nanmean(difference**2), "scaled_mae": np.nanmean(np.abs(difference))}
    found["mae_in_units"] = np.nanmean(np.abs(difference * std))
    return {name: float(value) for name, value in found.items()}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--date-column", default="date", help="default: date")
    parser.add_argument("--horizon", type=int, default=24, help="rows to forecast (default 24)")
    parser.add_argument("--look-back", type=int, default=96, help="rows the model sees (default 96)")
    parser.add_argument("--mask-ratio", type=float, default=0.4, help="share of patches hidden (default 0.4)")
    parser.add_argument("--label-share", type=float, default=0.2, help="of the training windows (default 0.2)")
    parser.add_argument("--pretrain-epochs", type=int, default=5)
    parser.add_argument("--finetune-epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak rate; the Jumbo FFN gets 0.3 of it")
    parser.add_argument("--multiplier", type=int, default=6, help="J, width of the Jumbo token in patches; 0 = none")
    parser.add_argument("--patch-len", type=int, default=8)
    parser.add_argument("--d-model", type=int, default=32)
    parser.add_argument("--n-layers", type=int, default=3)
    parser.add_argument("--n-heads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "auto"], help="auto: what the Trainer finds")
    parser.add_argument("--out", type=Path, default=Path("out/pretrain"))
    options = parser.parse_args(arguments)
    if not options.csv.is_file():
        parser.error(f"{options.csv} is no file")
    sizes = ("horizon", "look_back", "pretrain_epochs", "finetune_epochs", "batch_size", "patch_len", "d_model")
    for name in (*sizes, "n_layers", "n_heads", "multiplier"):
        least = 0 if name == "multiplier" else 1
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    if not 0 < options.label_share <= 1:
        parser.error(f"--label-share must be above 0 and at most 1, got {options.label_share}")
    if not 0 < options.lr < np.inf:
        parser.error(f"--lr must be above 0, got {options.lr}")
    if options.patch_len > options.look_back:
        parser.error(f"--patch-len {options.patch_len} is longer than --look-back {options.look_back}")
    if options.d_model % options.n_heads:
        parser.error(f"--d-model {options.d_model} is not divisible by --n-heads {options.n_heads}: choose a divisor")
    return options


def draw(model, test: Windows, columns: list[str], metrics: dict, path: Path) -> None:
    """One window of the first column: what was visible, what was hidden, what was made of it; then test errors."""
    import torch

    window = torch.from_numpy(test[len(test) // 2]["past_values"])[None]
    config = model.config
    with torch.no_grad():
        trunk = model.eval().model.trunk
        x, mask = trunk.read(*model.model.arrange(window, None))
        from ts_ext.pretraining import rebuild

        out = rebuild(trunk, model.reconstruction_head, x, mask, config.random_mask_ratio)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained", width_ratios=[3, 2])
    length, count = config.context_length, out.target.shape[2]
    for i in range(count):
        steps = np.arange(i * config.patch_stride, min(i * config.patch_stride + config.patch_length, length))
        hidden, n = bool(out.masked[0, 0, i]), len(steps)
        label = {False: "visible", True: "hidden"}[hidden]
        left.plot(steps, out.target[0, 0, i, :n], color="0.7" if hidden else "0.2", label=label)
        if hidden:
            left.plot(steps, out.reconstruction[0, 0, i, :n], color="tab:red", label="rebuilt")
    handles = dict(zip(*left.get_legend_handles_labels()[::-1], strict=True))
    left.legend(handles.values(), handles.keys(), fontsize=8)
    left.set_title(f"{columns[0]}, in deviations of what is visible")
    left.set_xlabel("row of the window")
    names = list(metrics["test"])
    right.barh(names, [metrics["test"][n]["scaled_mse"] for n in names], color=["0.6", "tab:blue", "tab:red"])
    right.set_title("test MSE, scaled")
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
