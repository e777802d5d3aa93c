"""What is shipped: fused models as ONNX files, in fp32 and with int8 linear layers, run by onnxruntime.

    python -m benchmarks.tofu_onnx --data ../shared/data/vit_mnist --out docs/results/tofu_onnx.json [--quick]

Accuracy is that of the trained MNIST ViT on the 9,500 images that benchmarks.tofu_mnist counts on, fused by the plan
for 35 % fewer token-layers that a profile of the other 500 makes. Size and time are those of a ViT-B/16 at 224 pixels
(random weights, one image, files taking turns), fused by a plan of the paper for as much. The seed's own case.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import timm
import torch

from benchmarks import outputs
from benchmarks.tofu_mnist import load, load_model
from jumbo_core.measure import ResultFile, markdown_table
from jumbo_core.measure.turns import spread, take_turns
from jumbo_core.tofu import FusionPlan, apply_tofu, linearity_profile
from jumbo_core.tofu.apply import fusion_report
from jumbo_core.tofu.deploy import export_model

REDUCTION = 0.35
FILES = {"fp32": (False, False), "fp32, fused": (True, False), "int8": (False, True), "int8, fused": (True, True)}


def session(path: Path, threads: int):
    """onnxruntime on a file; call it with images (B, C, H, W)."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    made = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = made.get_inputs()[0].name
    return lambda images: torch.from_numpy(made.run(None, {name: images.numpy()})[0])


def exported(model, plan: FusionPlan, images: torch.Tensor, folder: Path, threads: int) -> dict:
    """File of every kind -> what export_model says of it, and a session that runs it."""
    found = {}
    for name, (fuse, int8) in FILES.items():
        handle = apply_tofu(model, plan) if fuse else None
        path = folder / f"{name.replace(', ', '-')}.onnx"
        found[name] = (export_model(model, path, images, int8=int8), session(path, threads))
        if handle is not None:
            handle.remove()
    return found


def accuracies(data: Path, settings: dict, threads: int) -> dict:
    """Percent of the MNIST test images, of every kind of file; and what each differs from the model it was made of."""
    images, labels = load(data)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held, counted = order[:500], order[500 : 500 + settings["test"]]
    model = load_model(data)
    plan = FusionPlan.from_profile(linearity_profile(model, images[held].split(250)), REDUCTION)
    nothing, left = (
        fusion_report(model, p, 49).multiply_adds for p in (FusionPlan.uniform(len(plan.ops), 0, "prune"), plan)
    )
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (done, run) in exported(model, plan, images[held[:8]], Path(folder), threads).items():
            guess = torch.cat([run(part).argmax(-1) for part in images[counted].split(250)])
            rows[name] = {"accuracy": 100 * (guess == labels[counted]).double().mean().item(), "error": done.error}
    return {"rows": rows, "saved": 1 - left / nothing, "counts": plan.counts, "ops": plan.ops}


def sizes_and_times(settings: dict, threads: int) -> dict:
    """Megabytes and milliseconds of every kind of file of a ViT."""
    torch.manual_seed(0)
    model = timm.create_model(settings["model"]).eval()
    depth, size = len(model.blocks), model.patch_embed.img_size[0]
    patches = model.patch_embed.num_patches
    nothing = fusion_report(model, FusionPlan.uniform(depth, 0, "prune"), patches).multiply_adds
    r = next(
        r
        for r in range(1, patches)
        if fusion_report(model, FusionPlan.paper(depth, r), patches).multiply_adds <= (1 - REDUCTION) * nothing
    )
    plan, images = FusionPlan.paper(depth, r), torch.randn(2, 3, size, size)
    with tempfile.TemporaryDirectory() as folder:
        files = exported(model, plan, images, Path(folder), threads)
        times = take_turns({name: partial(run, images[:1]) for name, (_, run) in files.items()}, settings["repeats"])
        rows = {name: {"MB": round(done.size / 1e6, 1), "ms": spread(times[name])} for name, (done, _) in files.items()}
    return {"rows": rows, "r": r, "saved": 1 - fusion_report(model, plan, patches).multiply_adds / nothing}


def table(mnist: dict, vit: dict, model: str) -> str:
    header = ["file", "MNIST accuracy (%)", f"{model}: MB", "ms per image", "times fp32's speed"]
    base, lines = vit["rows"]["fp32"]["ms"]["median"], []
    for name in FILES:
        row = vit["rows"][name]
        low, high = row["ms"]["quartiles"]
        lines.append([
            name, f"{mnist['rows'][name]['accuracy']:.2f}", f"{row['MB']:.0f}",
            f"{row['ms']['median']:.0f} ({low:.0f} to {high:.0f})", f"{base / row['ms']['median']:.2f}",
        ])  # fmt: skip
    saved = (
        f"Multiply-adds saved by fusion: {100 * mnist['saved']:.0f} % (MNIST), {100 * vit['saved']:.0f} % ({model})."
    )
    return f"{markdown_table(header, lines)}\n\n{saved}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with model.safetensors and the t10k files")
    parser.add_argument("--quick", action="store_true", help="a minute: fewer images, a ViT-Ti")
    parser.add_argument("--threads", type=int, default=2, help="default 2")
    options = outputs.parse(parser, "tofu_onnx", arguments)
    torch.set_num_threads(options.threads)
    settings = dict(test=9500, model="vit_base_patch16_224", repeats=15)
    if options.quick:
        settings |= dict(test=500, model="vit_tiny_patch16_224", repeats=3)
    file = ResultFile(options.out, settings)
    mnist = file.run("mnist", lambda: accuracies(options.data, settings, options.threads))
    vit = file.run("vit", lambda: sizes_and_times(settings, options.threads))
    file.save(table=table(mnist, vit, settings["model"]))
    print(file.content["table"])


if __name__ == "__main__":
    main()
