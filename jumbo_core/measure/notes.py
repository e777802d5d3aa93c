"""What stands beside the report's tables: what was tried where a target is missed, figures of other commands."""

from __future__ import annotations

import json
from pathlib import Path

from jumbo_core.measure.page import Section, source_of
from jumbo_core.measure.targets import Target

_LOW_LATENCY = (
    "at small batches int8 by five of torch's operators (the table in "
    "jumbo_core/jumbo/lowlatency.py), bfloat16 and float16, bias and GELU inside the product, packed fp32 "
    "weights for the blocks' other layers, fewer steps around a product. What is left to be had at batch 1 is "
    "in the table of other int8 forms below (of another run, with more models in turn): a model that does no more than "
    "look at its FFN's int8 weights in every block stays under the target, for that is what memory gives; so no form "
    "that reads them twelve times can meet it here."
)
_LINEAR = (
    "convolution, scan, skip, gate and norm a chunk at a time in place, the mixer in spans of 256 to 4,096 steps, "
    "SwiGLU in parts with its products in memory at hand, biases and SiLU inside oneDNN's products and convolution (no "
    "gain over the former), packed weights, chunks of 64 to 256. "
)
# By table of the report; shown where it misses a target.
TRIED: dict[str, str] = {
    "registers_tiny": _LOW_LATENCY,
    "registers_small": _LOW_LATENCY,
    "block": _LINEAR + "Memory from the system is not it: a heap that gives nothing back (the command with "
    "MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_MMAP_THRESHOLD_=4000000000) changes the ratios no more than another run "
    "does. The scan's own products are 5 to 8 % of the block; the rest is convolution, gate, norms, SiLU, residuals.",
    "linear": _LINEAR
    + (
        "At 512x1024 ViT-B takes 2.6 (D=512) and 4.6 (D=384) times the multiply-adds of Jumbo-linear-S, with linear "
        "layers near the processor's fp32 peak in both: at D=512 a factor of 3.5 in time is not there to be had in "
        "fp32. The rest is norms, convolution, gate and scan, which ViT-B has not, and reading the fp32 Jumbo FFN in "
        "every block."
    ),
    "linear_large": _LINEAR
    + "At 1024x2048 ViT-B takes 5.1 (D=512) and 8.8 (D=384) times the multiply-adds of Jumbo-linear-S, nearly all in "
    "large matrix products.",
    "accuracy": (
        "models of width 32 are far from what they are made for: a call of a few milliseconds is mostly the cost of "
        "its fifty operations, not of its multiply-adds, of which Jumbo needs 0.3 times as many. Both run the same "
        "blocks; none was written for this width. Larger batches come nearer to what the multiply-adds promise."
    ),
    "tofu": (
        "fewer operations in matching and fusing, one gather for both ends of every edge, "
        "whole rows instead of elements. The row 'cut off unseen' is the bound: as many tokens in each "
        "block without any choice or fusing. At batch 1 it falls short of the target itself, for every "
        "block reads its weights whatever it does."
    ),
}

# Result files of other commands that belong here: file, title, text.
EVIDENCE = (
    (
        "optimize_cifar",
        "What the low-latency forms cost in accuracy",
        "A Jumbo classifier trained on CIFAR-10, in fp32 and in its low-latency forms.",
    ),
    (
        "lowlatency_bound",
        "Other int8 forms at batch 1",
        "Jumbo with forms of its FFN that give no right answer or will not last: what rounding and dispatch cost, and "
        "what the weights. An operator of another library, which will be removed from torch, is a little faster.",
    ),
    (
        "tofu_diffusion",
        "Token fusion in Stable Diffusion's UNet against tomesd",
        "A UNet of SD 1.5's shape with random weights, ratio 0.5.",
    ),
    (
        "series_speed",
        "Training: series models against the ViT with 16 registers and tsai's PatchTST",
        "Equal width, depth and heads; a step is forward, squared error, backward and AdamW on 32 windows of 7 "
        "channels, look-back 336, horizon 96. Peak memory is what the first step takes beyond weights and windows: "
        "activations, gradients, AdamW's moments.",
    ),
)


def tried(table: str) -> str:
    """What was tried to meet the targets of a table; empty where nothing is written down."""
    return TRIED.get(table, "")


def evidence_sections(results: Path) -> list[Section]:
    """Tables of :data:`EVIDENCE`; a file that is not there is named with the command that makes it."""
    sections = []
    for name, title, text in EVIDENCE:
        path = results / f"{name}.json"
        content = json.loads(path.read_text()) if path.is_file() else {}
        if "table" in content:
            targets = [target.cells() for target in agreement_targets(content)] if name == "optimize_cifar" else []
            sections.append(Section(title, text, content["table"], source_of(content), targets))
        else:
            missing = f"There is no finished {path}: `python -m benchmarks.{name}` makes it."
            sections.append(Section(title, text, missing, ""))
    return sections


def agreement_targets(content: dict) -> list[Target]:
    """What benchmarks.optimize_cifar must show: share of test photos with the class that fp32 gives, in percent."""
    found = {name: row["agreement"] for name, row in content["quality"].items()}
    return [Target(f"same class as fp32 (%), {form}", 99, found.get(form)) for form in ("int8", "bfloat16")]


def accuracy_note(path: Path) -> str:
    """The accuracies that stand against each other in the table at equal accuracy, from benchmarks.cifar's result."""
    if not path.is_file():
        return f"There is no {path}: `python -m benchmarks.cifar` measures the accuracies."
    rows = {(row["contender"], row["width"]): row for row in json.loads(path.read_text())["summary"]}
    narrow, wide = rows["Jumbo J=6", 32], rows["Jumbo J=6", 64]
    registers = rows["ViT + 16 registers", 64]

    def shown(row: dict) -> str:
        return f"{row['test_mean']:.2f} ± {row['test_std']:.2f} %"

    apart = registers["test_mean"] - narrow["test_mean"]
    worth = "less" if abs(apart) < registers["test_std"] else "more"
    return (
        f"Accuracies, {registers['seeds']} seeds each ({path}): registers of width 64 {shown(registers)}, Jumbo of "
        f"width 32 {shown(narrow)}, {abs(apart):.2f} points {'below' if apart > 0 else 'above'} it, {worth} than the "
        f"spread of the former's seeds, at {narrow['multiply_adds'] / registers['multiply_adds']:.2f} of its "
        f"multiply-adds; Jumbo of width 64 {shown(wide)}. The paper's 1.9x is on ImageNet."
    )
