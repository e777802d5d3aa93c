"""Training throughput of JumboPatchTST and tsai's PatchTST at equal width, the models taking turns in one process.

    python -m benchmarks.series_speed --out docs/results/series_speed.json [--quick]

A step is forward, squared error, backward and AdamW on 32 windows of 7 channels, look-back 336, horizon 96, at
PatchTST's two published sizes. Before anything is timed every model must give finite losses that fall. Note what
differs beside the token: tsai's PatchTST has BatchNorm and torch's dropout, ours LayerNorm and jumbo_core.dropout;
a Jumbo FFN has weights of its own to update in every step.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from torch import nn

from benchmarks import outputs
from jumbo_core.dropout import Dropout, replace_dropouts
from jumbo_core.measure import count_parameters, environment, markdown_table
from jumbo_core.measure.report import command_line
from jumbo_core.measure.turns import spread, take_turns
from ts_ext import JumboPatchTST

BATCH, CHANNELS, LOOK_BACK, HORIZON = 32, 7, 336, 96
SIZES = {
    "small": dict(d_model=16, n_layers=3, n_heads=4, d_ff=128, dropout=0.3),
    "large": dict(d_model=128, n_layers=3, n_heads=16, d_ff=256, dropout=0.2),
}
PEER = "tsai PatchTST"


def models(size: dict) -> dict[str, nn.Module]:
    """The models of one size, patches of 16 with a stride of 8."""
    from tsai.models.PatchTST import PatchTST

    shape = (CHANNELS, CHANNELS, LOOK_BACK, HORIZON)
    faster = PatchTST(*shape, patch_len=16, stride=8, **size)
    replace_dropouts(faster)
    return {
        PEER: PatchTST(*shape, patch_len=16, stride=8, **size),
        f"{PEER}, our dropout": faster,
        "ViT + 16 registers": JumboPatchTST(*shape, multiplier=0, registers=16, **size),
        "JumboPatchTST J=2": JumboPatchTST(*shape, multiplier=2, **size),
        "JumboPatchTST J=6": JumboPatchTST(*shape, multiplier=6, **size),
        "JumboPatchTST J=6, torch's dropout": with_torch_dropout(JumboPatchTST(*shape, multiplier=6, **size)),
    }


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


def measure(*, sizes: dict[str, dict] = SIZES, repeats: int = 15, threads: int = 2) -> dict:
    """Milliseconds of a step, and steps per second over those of tsai's PatchTST, round by round."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    t = torch.arange(LOOK_BACK + HORIZON) / 12
    series = torch.sin(t + torch.rand(BATCH, CHANNELS, 1) * 6) + 0.1 * torch.randn(BATCH, CHANNELS, len(t))
    x, y = series.split([LOOK_BACK, HORIZON], dim=-1)
    rows = []
    for size, options in sizes.items():
        built = models(options)
        steps = {name: training_step(model, x, y) for name, model in built.items()}
        for name, step in steps.items():
            check(name, step)
        times = take_turns(steps, repeats)
        for name, values in times.items():
            ratios = [peer / own for peer, own in zip(times[PEER], values, strict=True)]
            row = {"size": size, "model": name, "parameters": count_parameters(built[name]), "ms": spread(values)}
            rows.append(row if name == PEER else {**row, "ratio": round(statistics.median(ratios), 3)})
    return {"command": command_line(), "environment": environment(), "sizes": sizes, "repeats": repeats, "rows": rows}


def table(result: dict) -> str:
    lines = []
    for row in result["rows"]:
        low, high = row["ms"]["quartiles"]
        size = result["sizes"][row["size"]]
        lines.append([
            f"D={size['d_model']}, FFN {size['d_ff']}", row["model"], f"{row['parameters']:,}",
            f"{row['ms']['median']:.1f} ({low:.1f} to {high:.1f})", f"{row['ratio']:.2f}" if "ratio" in row else "1",
        ])  # fmt: skip
    return markdown_table(["size", "model", "parameters", "ms per training step", "times tsai's throughput"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds: the small size, few rounds")
    parser.add_argument("--threads", type=int, default=2, help="default 2")
    options = outputs.parse(parser, "series_speed")
    some = dict(sizes={"small": SIZES["small"]}, repeats=3) if options.quick else {}
    result = measure(threads=options.threads, **some)
    result["table"] = table(result)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(result["table"])


if __name__ == "__main__":
    main()
