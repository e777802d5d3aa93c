"""Training steps of the series models at equal width, in turn in one process: throughput, and peak memory in another.

    python -m benchmarks.series_speed --out docs/results/series_speed.json [--quick]

A step is forward, squared error, backward and AdamW on 32 windows of 7 channels, look-back 336, horizon 96, at
PatchTST's two published sizes. Before anything is timed every model must give finite losses that fall. Throughput is
over that of tsai's PatchTST and of the ViT with 16 registers of the same width, paired within each round. Peak memory
is what the first step takes beyond weights and windows (activations, gradients, AdamW's moments), the median of three
new processes. Note what differs beside the token: tsai's PatchTST has BatchNorm and torch's dropout, ours LayerNorm
and jumbo_core.dropout; a Jumbo FFN has weights of its own to update in every step. An interrupted command picks up at
the first run that is not in the file.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from benchmarks import outputs
from jumbo_core.dropout import Dropout, replace_dropouts
from jumbo_core.measure import ResultFile, count_parameters, markdown_table
from jumbo_core.measure.memory import peak_memory
from jumbo_core.measure.turns import paired, spread, take_turns
from ts_ext import JumboPatchTST

BATCH, CHANNELS, LOOK_BACK, HORIZON = 32, 7, 336, 96
SIZES = {
    "small": dict(d_model=16, n_layers=3, n_heads=4, d_ff=128, dropout=0.3),
    "large": dict(d_model=128, n_layers=3, n_heads=16, d_ff=256, dropout=0.2),
}
TSAI, VIT = "tsai PatchTST", "ViT + 16 registers"  # each size has a column of throughput over theirs
SHAPE = (CHANNELS, CHANNELS, LOOK_BACK, HORIZON)


def makers(size: dict) -> dict[str, Callable[[], nn.Module]]:
    """What makes each model of one size, patches of 16 with a stride of 8."""
    return {
        TSAI: lambda: tsai_model(size),
        f"{TSAI}, our dropout": lambda: with_our_dropout(tsai_model(size)),
        VIT: lambda: JumboPatchTST(*SHAPE, multiplier=0, registers=16, **size),
        "JumboPatchTST J=2": lambda: JumboPatchTST(*SHAPE, multiplier=2, **size),
        "JumboPatchTST J=6": lambda: JumboPatchTST(*SHAPE, multiplier=6, **size),
        "JumboPatchTST J=6, torch's dropout": lambda: with_torch_dropout(JumboPatchTST(*SHAPE, multiplier=6, **size)),
    }


def tsai_model(size: dict) -> nn.Module:
    from tsai.models.PatchTST import PatchTST

    return PatchTST(*SHAPE, patch_len=16, stride=8, **size)


def with_our_dropout(model: nn.Module) -> nn.Module:
    """The model with jumbo_core's dropout where it has torch's."""
    replace_dropouts(model)
    return model


def with_torch_dropout(model: nn.Module) -> nn.Module:
    """The model with ``nn.Dropout`` where it has jumbo_core's, to tell what that is worth."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Dropout):
                setattr(parent, name, nn.Dropout(child.p))
    return model


def training_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], float]:
    """One step of training, ready to run again and again; gives the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()

    def step() -> float:
        with torch.inference_mode(False), torch.enable_grad():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.item()

    return step


def check(name: str, step: Callable[[], float]) -> None:
    """Losses are finite and fall.

    Raises:
        RuntimeError: they are not, or do not: nothing is timed then.
    """
    losses = [step() for _ in range(6)]
    if not all(0 < loss < 1e6 for loss in losses) or losses[-1] >= losses[0]:
        raise RuntimeError(f"losses of {name} are {losses}: they must be finite and fall; nothing was timed")


def windows(count: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy sines of random phases: what is seen (count, CHANNELS, LOOK_BACK) and what follows."""
    torch.manual_seed(0)
    t = torch.arange(LOOK_BACK + HORIZON) / 12
    series = torch.sin(t + torch.rand(count, CHANNELS, 1) * 6) + 0.1 * torch.randn(count, CHANNELS, len(t))
    return series.split([LOOK_BACK, HORIZON], dim=-1)


def first_step(size: dict, name: str) -> Callable[[], float]:
    """The first training step of a model in a new process, for :func:`~jumbo_core.measure.memory.peak_memory`.

    Libraries load their workspaces in a step of a small model of its kind on two windows.
    """
    with torch.inference_mode(False):
        small = dict(d_model=8, n_layers=1, n_heads=2, d_ff=8, dropout=0.1)
        training_step(makers(small)[name](), *windows(2))()
        return training_step(makers(size)[name](), *windows())


def timing(size: dict, repeats: int, only: Sequence[str] | None = None) -> dict[str, dict]:
    """Parameters, milliseconds of a step, and steps per second over those of the peers, by model.

    Args:
        size: arguments that all models share.
        repeats: timed rounds, at least 2.
        only: names of :func:`makers`, :data:`TSAI` and :data:`VIT` among them. Default: all.

    Raises:
        RuntimeError: a model whose losses do not fall.
    """
    x, y = windows()
    built = {name: make() for name, make in makers(size).items() if only is None or name in only}
    steps = {name: training_step(model, x, y) for name, model in built.items()}
    for name, step in steps.items():
        check(name, step)
    times = take_turns(steps, repeats)
    return {
        name: {
            "parameters": count_parameters(built[name]), "ms": spread(values),
            "times_tsai": paired(times[TSAI], values), "times_vit": paired(times[VIT], values),
        }
        for name, values in times.items()
    }  # fmt: skip


def memory(size: dict, name: str, processes: int, threads: int) -> dict:
    """MiB that the first step of a model takes at most: the median and each of so many new processes.

    They differ, by up to a sixth, for what was freed is used again or not.
    """
    found = [round(peak_memory(first_step, size, name, threads=threads), 1) for _ in range(processes)]
    return {"peak_MiB": statistics.median(found), "processes_MiB": found}


def table(file: ResultFile) -> str:
    lines = []
    for label, size in file.content["settings"]["sizes"].items():
        for name, row in file.runs[f"timing|{label}"].items():
            low, high = row["ms"]["quartiles"]
            lines.append([
                f"D={size['d_model']}, FFN {size['d_ff']}", name, f"{row['parameters']:,}",
                f"{row['ms']['median']:.1f} ({low:.1f} to {high:.1f})", f"{row['times_tsai']['median']:.2f}",
                f"{row['times_vit']['median']:.2f}", f"{file.runs[f'memory|{label}|{name}']['peak_MiB']:.0f}",
            ])  # fmt: skip
    header = ["size", "model", "parameters", "ms per training step", "times tsai's throughput"]
    return markdown_table([*header, "times the ViT's throughput", "peak memory of a step (MiB)"], lines)


def run(path: Path, settings: dict, only: Sequence[str] | None = None) -> ResultFile:
    """Measure what the file has not; ``settings``: sizes, repeats, threads, processes; ``only``: see :func:`timing`."""
    file, threads = ResultFile(path, settings), settings["threads"]
    for label, size in settings["sizes"].items():
        file.run(f"timing|{label}", lambda size=size: timing(size, settings["repeats"], only))
    for label, size in settings["sizes"].items():
        for name in file.runs[f"timing|{label}"]:
            file.run(
                f"memory|{label}|{name}",
                lambda size=size, name=name: memory(size, name, settings["processes"], threads),
            )
    file.save(table=table(file))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute or two: the small size, few rounds")
    parser.add_argument("--threads", type=int, default=2, help="default 2")
    options = outputs.parse(parser, "series_speed")
    settings = dict(sizes=SIZES, repeats=15, processes=3, threads=options.threads)
    if options.quick:
        settings |= dict(sizes={"small": SIZES["small"]}, repeats=3, processes=1)
    torch.set_num_threads(options.threads)
    print(run(options.out, settings).content["table"])


if __name__ == "__main__":
    main()
