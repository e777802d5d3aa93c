"""Token fusion in Stable Diffusion's UNet, side by side with tomesd: time of a denoising step, distance to the unfused.

    python -m benchmarks.tofu_diffusion --out docs/results/tofu_diffusion.json [--quick]

A UNet of SD 1.5's shape with random weights (fp32), ratio 0.5 at the finest resolution for both. First ratio 0 must
equal the unfused UNet bit by bit. Then each contender's predicted noise is compared with the unfused UNet's: relative
L2 distance, for several seeds and timesteps. Then they take turns at one step against the clock. Latents are what the
scheduler makes of a smooth random picture: nearly pure noise at timestep 981, nearly the picture at 21. tomesd draws
its destinations at random for even batches only. An interrupted command picks up at the first run that is not in the
file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import version

import tomesd
import torch
from diffusers import UNet2DConditionModel
from tqdm import tqdm

from benchmarks import outputs
from hf_ext.diffusers import apply_tofu_to_unet
from jumbo_core.measure import ResultFile, markdown_table, mean_spread
from jumbo_core.measure.diffusion import UNETS, alias, make_unet, step_inputs
from jumbo_core.measure.turns import spread, take_turns

SD15, SMALL = UNETS["sd15_unet"], UNETS["test_unet"]
OPS = ("average", "mlerp", "paper", "prune")
TOMESD = f"tomesd {version('tomesd')}"


def contenders(ratio: float, seed: int) -> dict[str, Callable[[UNet2DConditionModel], object]]:
    """How each of them is put into a UNet."""

    def ours(op: str, proportional: bool | None = None):
        return lambda unet: apply_tofu_to_unet(unet, ratio, op=op, proportional=proportional, seed=seed)

    def theirs(unet):
        torch.manual_seed(seed)  # its generator starts from torch's own at the first call
        tomesd.apply_patch(unet, ratio=ratio)

    others = {
        "ours, average, not proportional": ours("average", False),
        "ours, mlerp, proportional": ours("mlerp", True),
    }
    return {TOMESD: theirs} | {f"ours, {op}": ours(op) for op in OPS} | others


def arguments_of_call(unet: UNet2DConditionModel, batch: int, seed: int, timestep: int) -> tuple:
    """(latents, timestep, prompt) of one step at the UNet's own size, see :func:`step_inputs`."""
    side = unet.config.sample_size
    return step_inputs(unet.config, (side, side), batch, seed=seed, timestep=timestep)


def exactness(unet: UNet2DConditionModel, batch: int, ratio: float) -> dict:
    """Ratio 0 and a removed fusion against the unfused UNet; what the fusion leaves of the tokens."""
    given, copied = arguments_of_call(unet, batch, 0, 501), alias(unet)
    with torch.inference_mode():
        plain = unet(*given).sample
        handle = apply_tofu_to_unet(copied, 0.0)
        equal = torch.equal(copied(*given).sample, plain)
        handle.remove()
        handle = apply_tofu_to_unet(copied, ratio)
        fused = copied(*given).sample
        handle.remove()
        removed = torch.equal(copied(*given).sample, plain)
    if not (equal and removed and fused.shape == plain.shape and fused.dtype == plain.dtype):
        raise AssertionError("ratio 0 or a removed fusion is not the unfused UNet: no use measuring")
    return {"ratio_0_equal": equal, "removed_equal": removed, "report": str(handle.report(unet.config.sample_size))}


def timing(unet: UNet2DConditionModel, batch: int, ratio: float, repeats: int) -> dict:
    """Milliseconds of one step, all taking turns in this process."""
    given, calls = arguments_of_call(unet, batch, 0, 501), {"unfused": unet}
    puts = {"ours, ratio 0": lambda copied: apply_tofu_to_unet(copied, 0.0)} | contenders(ratio, 0)
    for name in ("ours, ratio 0", TOMESD, "ours, average", "ours, paper", "ours, average, not proportional"):
        calls[name] = alias(unet)
        puts[name](calls[name])
    times = take_turns({name: lambda copied=copied: copied(*given) for name, copied in calls.items()}, repeats)
    return {name: spread(values) | {"times": [round(v, 1) for v in values]} for name, values in times.items()}


def distances(unet: UNet2DConditionModel, batch: int, ratio: float, seed: int, timestep: int) -> dict[str, float]:
    """Relative L2 distance of each contender's output to the unfused."""
    given, found = arguments_of_call(unet, batch, seed, timestep), {}
    with torch.inference_mode():
        plain = unet(*given).sample
        for name, put in contenders(ratio, seed).items():
            copied = alias(unet)
            put(copied)
            found[name] = float(f"{((copied(*given).sample - plain).norm() / plain.norm()).item():.4g}")
    return found


def table(file: ResultFile, settings: dict) -> str:
    rows = []
    for batch in settings["batches"]:
        times = file.runs[f"timing|batch={batch}"]
        shots = [run for name, run in file.runs.items() if name.startswith(f"distance|batch={batch}|")]
        for name in dict.fromkeys([*times, *shots[0]]):
            time = "–"
            if name in times:
                low, high = times[name]["quartiles"]
                time = f"{times[name]['median']:.0f} ({low:.0f}–{high:.0f})"
                faster = f"{times['unfused']['median'] / times[name]['median']:.2f}"
            else:
                faster = "–"
            distance = closer = "–"
            if name in shots[0]:
                values = [shot[name] for shot in shots]
                mean, deviation = mean_spread(values)
                distance = f"{mean:.4f} ± {deviation:.4f}"
                if name != TOMESD:
                    closer = f"{sum(shot[name] <= shot[TOMESD] for shot in shots)} of {len(shots)}"
            elif name == "ours, ratio 0":
                distance = "0 (bit by bit)"
            rows.append([batch, name, time, faster, distance, closer])
    header = ["batch", "UNet", "ms per step (quartiles)", "times as fast", "distance to unfused", "as close as tomesd"]
    return markdown_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[2], help="default 2, one guided picture")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of latents, prompts and destinations")
    parser.add_argument("--quick", action="store_true", help="about a minute: a small UNet")
    arguments = outputs.parse(parser, "tofu_diffusion")

    settings = dict(
        unet=SMALL if arguments.quick else SD15, ratio=0.5, batches=arguments.batches, repeats=arguments.repeats,
        seeds=arguments.seeds, timesteps=[981, 501, 21],
    )  # fmt: skip
    file, unet, ratio = ResultFile(arguments.out, settings), make_unet(settings["unet"]), settings["ratio"]
    for batch in settings["batches"]:
        print(file.run(f"exact|batch={batch}", lambda b=batch: exactness(unet, b, ratio))["report"])
        shots = [(seed, timestep) for seed in settings["seeds"] for timestep in settings["timesteps"]]
        for seed, timestep in tqdm(shots, desc=f"distances, batch {batch}"):
            name = f"distance|batch={batch}|seed={seed}|timestep={timestep}"
            file.run(name, lambda b=batch, s=seed, t=timestep: distances(unet, b, ratio, s, t))
        file.run(f"timing|batch={batch}", lambda b=batch: timing(unet, b, ratio, settings["repeats"]))
    file.save(table=table(file, settings))
    print(table(file, settings))


if __name__ == "__main__":
    main()
