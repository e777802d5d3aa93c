"""What keeps an int8 Jumbo model from the speed of a ViT at batch 1: other forms of its FFN, and parts of it.

    python -m benchmarks.lowlatency_bound [--quick]

Beside timm's ViT with 16 registers and the model after optimize_for_inference stand some that give no right answers,
or none that will last: the same model with the FFN's int8 products alone (bias and GELU inside, inputs rounded
beforehand); with nothing but a look at every int8 weight, as fast as the memory gives them; without any FFN; and with
torch's older quantized.linear_dynamic, which rounds inputs, multiplies and adds the bias in one operator of another
library, but needs quantized tensors, whose removal torch has announced. "int8" less "products alone" is what rounding
and dispatch cost. No int8 form that reads its weights in every block can be faster than "weights only looked at".
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from functools import partial

import torch
from torch import nn

from benchmarks import outputs
from jumbo_core import optimize_for_inference
from jumbo_core.jumbo.lowlatency import LowLatencyFFN, _multiply, int8_kernel
from jumbo_core.measure import environment, markdown_table
from jumbo_core.measure.contenders import contender
from jumbo_core.measure.report import command_line
from jumbo_core.measure.turns import paired, spread, take_turns

SIZES = ("tiny", "small")


class ProductsAlone(nn.Module):
    """The two products of an int8 FFN, on rows that were rounded before: (1, J*D) -> (1, J*D), whatever the input."""

    def __init__(self, ffn: LowLatencyFFN) -> None:
        super().__init__()
        self.parts = []
        for layer in (ffn.fc1, ffn.fc2):
            rows = torch.randint(-127, 128, (1, layer.in_features), dtype=torch.int8)
            _, weight, scale, bias = layer._weights()
            self.parts.append((rows, weight, scale, layer._zero, bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.parts
        _multiply(*first, 0.01, "gelu")
        return _multiply(*second, 0.01)


class WeightsAlone(nn.Module):
    """The greatest of the int8 weights, four at a time taken for a number: it reads them all and does hardly more."""

    def __init__(self, ffn: LowLatencyFFN) -> None:
        super().__init__()
        self.weights = [layer.weight.view(torch.int32) for layer in (ffn.fc1, ffn.fc2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            weight.amax()
        return x


class OneOperator(nn.Module):
    """torch's older dynamic int8 linear layers around the GELU."""

    def __init__(self, ffn: nn.Module) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that quantized tensors will be removed
            self.packed = [self._pack(layer) for layer in (ffn.fc1, ffn.fc2)]

    @staticmethod
    def _pack(layer: nn.Linear) -> object:
        weight = layer.weight.detach()
        scale = weight.abs().amax(1) / 127
        zero = torch.zeros(len(weight), dtype=torch.long)
        rounded = torch.quantize_per_channel(weight, scale, zero, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(rounded, layer.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.ops.quantized.linear_dynamic(x, self.packed[0], False)
        return torch.ops.quantized.linear_dynamic(torch.ops.aten.gelu_(hidden), self.packed[1], False)


def forms(size: str) -> dict[str, nn.Module]:
    """The ViT first, then the model in every form."""
    model = contender(f"jumbo_{size}_patch16_224").build().eval()
    plain = copy.deepcopy(model.encoder.jumbo_mlp)
    model = optimize_for_inference(model, dtype="int8")

    def with_ffn(ffn: nn.Module) -> nn.Module:
        other = copy.deepcopy(model)
        other.encoder.jumbo_mlp = ffn
        return other.eval()

    return {
        f"vit_registers_{size}": contender(f"vit_registers_{size}").build().eval(),
        "int8": model,
        "int8, quantized.linear_dynamic": with_ffn(OneOperator(plain)),
        "its int8 products alone": with_ffn(ProductsAlone(model.encoder.jumbo_mlp)),
        "its int8 weights only looked at": with_ffn(WeightsAlone(model.encoder.jumbo_mlp)),
        "without its FFN": with_ffn(nn.Identity()),
    }


def measure(sizes=SIZES, *, repeats: int = 60, threads: int = 2) -> dict:
    """Milliseconds of one image and how many times the ViT's speed each form has.

    Raises:
        RuntimeError: a processor without exact int8 products, or the two int8 forms disagree: nothing is timed.
    """
    if not int8_kernel():
        raise RuntimeError("this processor has no exact int8 products: there is nothing to bound")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    rows, image = [], torch.randn(1, 3, 224, 224)
    for size in sizes:
        models = forms(size)
        with torch.inference_mode():
            one, other = (models[name](image) for name in ("int8", "int8, quantized.linear_dynamic"))
        if not (one - other).norm() < 0.1 * one.norm():
            raise RuntimeError(f"two int8 forms of jumbo_{size} disagree: nothing was timed")
        times = take_turns({name: partial(model, image) for name, model in models.items()}, repeats)
        first = next(iter(times.values()))
        rows += [
            {"size": size, "model": name, "ms": spread(ms), "times_vit": paired(first, ms)}
            for name, ms in times.items()
        ]
    result = {"command": command_line(), "environment": environment(), "repeats": repeats, "rows": rows}
    return result | {"table": table(result)}


def table(result: dict) -> str:
    return markdown_table(
        ["", "FFN", "ms, batch 1", "times the ViT's speed"],
        [
            [
                row["model"] if row["model"].startswith("vit") else f"Jumbo-{row['size']}",
                "" if row["model"].startswith("vit") else row["model"],
                "{:.1f} ({:.1f} to {:.1f})".format(row["ms"]["median"], *row["ms"]["quartiles"]),
                f"{row['times_vit']['median']:.2f}",
            ]
            for row in result["rows"]
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds: Jumbo-tiny alone, few rounds")
    parser.add_argument("--threads", type=int, default=2, help="default 2")
    options = outputs.parse(parser, "lowlatency_bound")
    result = measure(**(dict(sizes=("tiny",), repeats=5) if options.quick else {}), threads=options.threads)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(result["table"])


if __name__ == "__main__":
    main()
