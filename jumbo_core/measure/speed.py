"""Whole models against each other: time of a call or a training step, images per second, peak memory, multiply-adds."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from jumbo_core import checks
from jumbo_core.measure import artefacts
from jumbo_core.measure.contenders import contender
from jumbo_core.measure.contract import Contender
from jumbo_core.measure.diffusion import FUSIONS, UNETS
from jumbo_core.measure.forms import DTYPES, OPTIONS
from jumbo_core.measure.memory import peak_memory, peak_memory_cuda
from jumbo_core.measure.report import command_line, environment, markdown_table
from jumbo_core.measure.steps import (
    check_inference,
    check_options,
    check_training,
    inference,
    prepared,
    training,
)
from jumbo_core.measure.turns import paired, spread, take_turns


def measure(
    models: Sequence[str],
    *,
    batches: Sequence[int] = (1,),
    image_size: int | tuple[int, int] = 224,
    repeats: int = 15,
    threads: int = 2,
    dtype: str = "float32",
    device: str | None = None,
    train: bool = False,
    memory: bool = True,
    seconds: float = math.inf,
    processes: int = 1,
) -> dict:
    """Time models in turns; every one passes a gate first, and nothing is timed otherwise.

    Args:
        models: names, see :mod:`jumbo_core.measure.contenders`; ratios are to the first.
        batches: images at a time; for UNets, calls at once.
        image_size: int or (H, W); UNets take latents of an eighth.
        repeats: timed rounds, at least 2.
        threads: of torch.
        dtype: of the models, one of float32, bfloat16, float16; for training bfloat16 means autocast.
        device: "cpu" or "cuda". Default: CUDA where there is one.
        train: time training steps (forward, cross-entropy, backward, AdamW) in place of inference.
        memory: also measure peak memory; on the CPU that is a new process for every row, some seconds each.
        seconds: rounds of a batch size are cut to about so many in each process, at least 3. Default: none are cut.
        processes: with more than one (default 1), the rounds of so many new processes, one after the other, are pooled.
            Where a process's memory comes to lie can cost or save a model a tenth of its time in all of its rounds.

    Returns:
        JSON-ready dict; one of "rows" per batch and model. "ms" and "times_first" have median and quartiles, the latter
        paired within each round. "peak_MiB" is what a call takes beyond weights and images; in training the first step,
        so that gradients and AdamW's moments count. "distance" is the output's from the plain fp32 model's, relative
        L2, 0 for that model itself; "repeat", of models that draw at random alone, that between two calls.

    Raises:
        ValueError: a name or setting that does not exist (the message lists what does), or two models of one name.
        ImportError: an option that needs another library; the message names the extra.
        RuntimeError: a model that does not pass the gate, see :mod:`jumbo_core.measure.steps`.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    contenders = [contender(name, image_size) for name in models]
    check_options(contenders, dtype, device, train)
    checks.integer("repeats", repeats, 2)
    if len(set(models)) < len(models) or not models:
        raise ValueError(f"models must be at least one name and all different, got {list(models)}")
    torch.set_num_threads(threads)
    settings = dict(repeats=repeats, threads=threads, dtype=dtype, device=device, train=train)
    settings |= dict(memory=memory, seconds=seconds)
    batches = [checks.integer("batch", batch) for batch in batches]
    if len(set(batches)) < len(batches):
        raise ValueError(f"batches must be all different, got {batches}")
    if checks.integer("processes", processes) > 1:
        rows = _in_new_processes(processes, list(models), image_size, batches, settings)
    else:
        rows = [row for batch in batches for row in compare(contenders, batch, **settings)]
    return {
        "command": command_line(), "environment": environment(), "device": device, "dtype": dtype, "train": train,
        "image_size": list(contenders[0].image_size), "repeats": repeats, "processes": processes, "rows": rows,
    }  # fmt: skip


def compare(
    contenders: Sequence[Contender],
    batch: int,
    *,
    repeats: int,
    threads: int,
    dtype: str = "float32",
    device: str = "cpu",
    train: bool = False,
    memory: bool = True,
    seconds: float = math.inf,
) -> list[dict]:
    """Rows of :func:`measure` for one batch size; ``seconds`` cuts the rounds to what they may take, at least 3."""
    make = training if train else inference
    calls = {one.text: make(one, batch, dtype, device) for one in contenders}
    checked, took = {}, 0.0
    for one in contenders:
        if train:
            took += check_training(one, calls[one.text])
        else:
            checked[one.text] = check_inference(one, calls[one.text], batch, dtype, device)
            took += checked[one.text].seconds
    rounds = repeats if seconds == math.inf else max(3, int(min(seconds / took, repeats)))
    times = take_turns(calls, rounds, warmup=1 if took < 5 else 0, device=device)  # the gate warmed up slow ones
    first, rows = times[contenders[0].text], []
    for one in contenders:
        row = describe(one, batch) | timed(batch, first, times[one.text])
        if not train:
            row["distance"] = float(f"{checked[one.text].distance:.2g}")
            if one.repeat_tolerance(batch):
                row["repeat"] = float(f"{checked[one.text].repeat:.2g}")
        if memory:
            row["peak_MiB"] = round(peak(one, calls[one.text], batch, dtype, device, train, threads), 1)
        rows.append(row)
    return rows


def timed(batch: int, first: list[float], own: list[float]) -> dict:
    """What a row says of a model's rounds, in milliseconds, and of the first model's beside them."""
    return {
        "ms": spread(own),
        "images_per_s": round(1e3 * batch / statistics.median(own), 2),
        "times_first": paired(first, own),
        "rounds_ms": [round(ms, 3) for ms in own],
    }


def _in_new_processes(count: int, models: list[str], image_size, batches: list[int], settings: dict) -> list[dict]:
    """Rows of processes that have done nothing before, pooled. The first decides on the rounds and measures memory."""
    runs, begun, rounds = [], environment()["commit"], {}
    for _ in range(count):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            call = pool.submit(_compare_by_name, models, image_size, batches, settings, rounds)
            rows, commit = call.result()
        runs.append(rows)
        if commit != begun:
            raise RuntimeError(f"the code changed under way, from commit {begun} to {commit}: measure again")
        rounds = {row["batch"]: len(row["rounds_ms"]) for row in rows}
        settings = settings | {"memory": False, "seconds": math.inf}
    return _pooled(runs)


def _compare_by_name(models, image_size, batches, settings, rounds) -> tuple[list[dict], str | None]:
    torch.set_num_threads(settings["threads"])
    contenders, rows = [contender(name, image_size) for name in models], []
    for batch in batches:
        own = settings | {"repeats": rounds.get(batch, settings["repeats"])}
        rows += compare(contenders, batch, **own)
    return rows, environment()["commit"]


def _pooled(runs: list[list[dict]]) -> list[dict]:
    """Rows of several processes as one list: their rounds together, all else from the first."""
    rounds = {}
    for row in (row for rows in runs for row in rows):
        rounds.setdefault((row["batch"], row["model"]), []).extend(row["rounds_ms"])
    first = runs[0][0]["model"]
    return [
        row | timed(row["batch"], rounds[row["batch"], first], rounds[row["batch"], row["model"]]) for row in runs[0]
    ]


def describe(one: Contender, batch: int) -> dict:
    """What a row says of a model before any clock runs."""
    gmac = None if one.multiply_adds is None else round(one.multiply_adds / 1e9, 6)
    return {
        "batch": batch, "model": one.text, "timm_name": one.timm_name, "arguments": one.arguments,
        "parameters": one.parameters, "GMAC": gmac,
    }  # fmt: skip


def peak(one: Contender, call, batch: int, dtype: str, device: str, train: bool, threads: int) -> float:
    """MiB, see :func:`measure`."""
    if device == "cpu":
        return peak_memory(prepared, one.text, one.image_size, batch, dtype, train, threads=threads)
    if train:  # a step of its own: the one that was timed has its optimiser's state already
        call = training(one, batch, dtype, device)
    return peak_memory_cuda(call)


def table(result: dict) -> str:
    """The result as markdown; columns that no row has are left out. Below it, what draws at random."""
    rows = result["rows"]
    memory, distance = any("peak_MiB" in row for row in rows), any(row.get("distance") for row in rows)
    header = ["batch", "model", "parameters (M)", "GMAC", "ms per step" if result["train"] else "ms", "images/s"]
    header += [f"times the speed of {rows[0]['model']}"]
    header += ["peak memory (MiB)"] * memory + ["output off fp32 by"] * distance
    text = markdown_table(header, [_cells(row, memory, distance) for row in rows])
    for row in rows:
        if "repeat" in row:
            text += (
                f"\n\n{row['model']}, batch {row['batch']}, draws at random in every call: two calls were "
                f"{100 * row['repeat']:.1g} % of the output's norm apart."
            )
    return text


def _cells(row: dict, memory: bool, distance: bool) -> list[str]:
    low, high = row["ms"]["quartiles"]
    slow, fast = row["times_first"]["quartiles"]
    cells = [
        str(row["batch"]), row["model"], f"{row['parameters'] / 1e6:.1f}",
        "-" if row["GMAC"] is None else f"{row['GMAC']:.2f}",
        f"{row['ms']['median']:.1f} ({low:.1f} to {high:.1f})", f"{row['images_per_s']:.1f}",
        f"{row['times_first']['median']:.2f} ({slow:.2f} to {fast:.2f})",
    ]  # fmt: skip
    if memory:
        cells.append(f"{row['peak_MiB']:.0f}")
    if distance:
        cells.append(f"{100 * row['distance']:.1g} %" if row["distance"] else "-")
    return cells


def picture(result: dict, axes) -> None:
    """Bars of images per second over those of the first model, one group a batch size."""
    models = list(dict.fromkeys(row["model"] for row in result["rows"]))
    batches = list(dict.fromkeys(row["batch"] for row in result["rows"]))
    for i, model in enumerate(models):
        rows = [row for row in result["rows"] if row["model"] == model]
        ratios = [row["times_first"]["median"] for row in rows]
        errors = [
            [abs(r - row["times_first"]["quartiles"][side]) for r, row in zip(ratios, rows, strict=True)]
            for side in (0, 1)
        ]
        places = [b + 0.8 * (i - (len(models) - 1) / 2) / len(models) for b in range(len(batches))]
        bars = axes.bar(places, ratios, 0.75 / len(models), yerr=errors, label=model, capsize=2)
        axes.bar_label(bars, [f"{r:.2f}" for r in ratios], fontsize=7, padding=2)
    axes.axhline(1, color="0.4", linewidth=0.8)
    axes.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axes.set_ylabel(f"speed over that of {models[0]}")
    axes.margins(y=0.12)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        nargs="+",
        help=f"MODEL or MODEL@option+option, for example jumbo_tiny_patch16_224@int8; options: {', '.join(OPTIONS)}, "
        f"or key=value for the constructor. Of diffusers: {' and '.join(UNETS)}, with {' or '.join(FUSIONS)} and "
        "key=value for its arguments (sd15_unet@tofu+ratio=0.25), needing the extra diffusion. Ratios are to the first",
    )
    parser.add_argument("--batch", type=artefacts.at_least(1), nargs="+", default=[1], help="batch sizes (default 1)")
    parser.add_argument(
        "--image-size",
        type=artefacts.size,
        default=(224, 224),
        help="N or HxW (default 224); UNets: latents are an eighth",
    )
    parser.add_argument("--repeats", type=artefacts.at_least(2), default=15, help="timed rounds (default 15)")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="cut rounds to about so many a process, at least 3 rounds"
    )
    parser.add_argument(
        "--processes", type=artefacts.at_least(1), default=1, help="pool the rounds of so many processes (default 1)"
    )
    parser.add_argument("--threads", type=artefacts.at_least(1), default=2, help="default 2")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the whole model (default float32)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--train", action="store_true", help="forward, backward and optimiser step")
    parser.add_argument("--no-memory", action="store_true", help="skip peak memory, a new process for each row")


def result_of(options: argparse.Namespace) -> dict:
    return measure(
        options.models, batches=options.batch, image_size=options.image_size, repeats=options.repeats,
        threads=options.threads, dtype=options.dtype, device=options.device, train=options.train,
        memory=not options.no_memory, seconds=options.seconds, processes=options.processes,
    )  # fmt: skip
