"""The linear-time block against its own matrix products: what all that is no product costs.

``measure()`` and ``table(result)``, as the other timings have them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional as F

from jumbo_core.linear import AdventurerBlock
from jumbo_core.linear.ssd import chunk_for
from jumbo_core.measure.report import command_line, environment, markdown_table
from jumbo_core.measure.turns import spread, take_turns

WIDTHS = {"small": 512, "base": 768}  # of Adventurer


def layer_products(block: AdventurerBlock, tokens: int) -> list[Callable[[], torch.Tensor]]:
    """Products of the block's linear layers, without their biases: the mixer's two on one token more, the heading."""
    mixer, mlp = block.mixer, block.mlp
    layers = [(mixer.in_proj, tokens + 1), (mixer.out_proj, tokens + 1)]
    layers += [(layer, tokens) for layer in (mlp.fc1_g, mlp.fc1_x, mlp.fc2)]
    return [
        partial(F.linear, layer.weight.new_empty(1, rows, layer.in_features).normal_(), layer.weight)
        for layer, rows in layers
    ]


def scan_products(block: AdventurerBlock, tokens: int) -> list[Callable[[], torch.Tensor]]:
    """Products of the scan, its chunks batched: scores of steps, outputs from inputs and state, and the state's."""
    mixer = block.mixer
    on_cpu = mixer.in_proj.weight.device.type == "cpu"
    n, wide, q = mixer.d_state, mixer.inner, chunk_for((1, tokens + 1), running=on_cpu)
    count = -(-(tokens + 1) // q)
    shapes = [((q, n), (n, q)), ((q, n + q), (n + q, wide)), ((n, q), (q, wide))]
    like = mixer.in_proj.weight
    return [partial(torch.bmm, *(like.new_empty(count, *size).normal_() for size in pair)) for pair in shapes]


def compiled(block: AdventurerBlock, h: torch.Tensor) -> tuple[Callable[[], torch.Tensor] | None, str]:
    """The compiled block, run once; or None and why there is none."""
    torch._dynamo.reset()
    call = partial(torch.compile(block), h)
    try:
        call()
    except RuntimeError as error:  # dynamo's and inductor's errors are RuntimeErrors: no compiler, for one
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return call, ""


def measure(
    *,
    repeats: int = 15,
    threads: int = 2,
    tokens: int = 2048,
    widths: dict[str, int] | None = None,
    compile: bool = True,
    device: str | None = None,
) -> dict:
    """Milliseconds of one block (norm, mixer, residual, SwiGLU, residual; one sample, fp32) and of products alone.

    ``ratio`` is the block over the products of its linear layers, ``ratio_with_scan`` the block over those and the
    scan's own. ``compile`` also times the block under torch.compile, where a compiler is found. ``device``: "cpu" or
    "cuda"; default CUDA where there is one.

    Raises:
        RuntimeError: inference does not agree with the operators that training runs within 1e-4 (relative; 1e-2 on
            CUDA), or a compiled block does not: nothing is timed then.
    """
    torch.set_num_threads(threads)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    limit, rows = 1e-2 if device == "cuda" else 1e-4, []  # kernels on CUDA may round factors to TF32
    for name, dim in (WIDTHS if widths is None else widths).items():
        torch.manual_seed(0)
        block, h = AdventurerBlock(dim).eval().to(device), torch.randn(1, tokens, dim, device=device)
        with torch.enable_grad():
            expected = block(h).detach()
        layers, scans = layer_products(block, tokens), scan_products(block, tokens)
        calls = {
            "block": partial(block, h),
            "layers": partial(_run, layers),
            "with_scan": partial(_run, layers + scans),
        }
        why = "not asked for"
        with torch.inference_mode():
            if compile:
                call, why = compiled(block, h)
                calls |= {} if call is None else {"compiled": call}
            for which in calls.keys() & {"block", "compiled"}:
                error = (calls[which]() - expected).abs().max().item()
                if not error < limit * expected.abs().max().item():
                    raise RuntimeError(f"{which} differs from the block in training by {error:.1e}: nothing was timed")
        times = take_turns(calls, repeats, device=device)
        rows.append(
            {
                "width": name,
                "dim": dim,
                **{f"{which}_ms": spread(values) for which, values in times.items()},
                "ratio": _ratio(times["block"], times["layers"]),
                "ratio_with_scan": _ratio(times["block"], times["with_scan"]),
                "compiled": _ratio(times["compiled"], times["layers"]) if "compiled" in times else why,
            }
        )
    return {"command": command_line(), "environment": environment(), "device": device, "tokens": tokens, "rows": rows}


def table(result: dict) -> str:
    """The result as the README shows it."""
    header = ["width", f"block, {result['tokens']} tokens (ms)", "products of its linear layers (ms)"]
    header += ["block / products", "block / products with the scan's", "compiled block / products"]
    return markdown_table(
        header,
        [
            [
                f"{row['width']} ({row['dim']})", f"{row['block_ms']['median']:.1f}",
                f"{row['layers_ms']['median']:.1f}", f"{row['ratio']:.2f}", f"{row['ratio_with_scan']:.2f}",
                row["compiled"] if isinstance(row["compiled"], str) else f"{row['compiled']:.2f}",
            ]
            for row in result["rows"]
        ],
    )  # fmt: skip


def _run(calls: Sequence[Callable[[], torch.Tensor]]) -> None:
    for call in calls:
        call()


def _ratio(above: list[float], below: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(above, below, strict=True)), 3)
