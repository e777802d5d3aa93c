"""A fused model as a file that runs without this library: ONNX or torch.export, with int8 linear layers if wanted."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from jumbo_core.modes import evaluating
from jumbo_core.tofu.outputs import first_output

FORMATS = ("onnx", "pt2")
TOLERANCE = 1e-4
ONE_FILE = 1_900_000_000  # bytes of weights; a protobuf file ends at 2 GiB


@dataclass(frozen=True)
class Exported:
    """What :func:`export_model` wrote and how it compares with the model it was made from.

    Args:
        path: the file. ONNX weights beyond 2 GB lie in a second file beside it, named ``path`` + ".data".
        size: bytes, of both.
        error: largest absolute difference from the model's outputs on the images it was checked with.
        agreement: share of these images with the same largest output.
    """

    path: Path
    size: int
    error: float
    agreement: float


def export_model(
    model: nn.Module,
    path: str | Path,
    images: torch.Tensor,
    *,
    format: str | None = None,
    dynamic_batch: bool = True,
    int8: bool = False,
    tolerance: float = TOLERANCE,
) -> Exported:
    """Write a model, fused or not, to a file, and check the file against the model.

    The file is exported in eval mode; the model stays as it is and works on, its fusion included.

    Args:
        model: image model on the CPU. The file gives one tensor: of several outputs the first, for Transformers'
            models logits or the last hidden state.
        path: of the file, ending in .onnx or .pt2.
        images: (B, C, H, W), B at least 2, to trace with and to check with; H and W are the only size the file takes.
        format: "onnx" or "pt2" (torch.export). Default: what the ending of ``path`` says.
        dynamic_batch: the file takes any batch (default). False: exactly one image.
        int8: linear layers with 8-bit weights, one scale per output, and inputs quantised as they come (onnxruntime's
            dynamic quantisation; ONNX alone). Attention scores, matching and norms stay in floating point.
        tolerance: largest difference accepted from a file without ``int8``. Default 1e-4.

    Raises:
        ValueError: an unknown format, int8 with "pt2", fewer than 2 images, a file that differs beyond the tolerance
            (it is deleted).
        TypeError: a model that gives no tensor first.
        ImportError: onnx, onnxscript or onnxruntime is missing.
    """
    path = Path(path)
    format = _format(path, format)
    if int8 and format != "onnx":
        raise ValueError("int8 is made by onnxruntime: it goes with format 'onnx' alone")
    if images.ndim != 4 or len(images) < 2:
        raise ValueError(f"images must be (B, C, H, W) with B of at least 2, got {tuple(images.shape)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with evaluating(model), torch.no_grad():
        expected = model(images)
        if not isinstance(expected, torch.Tensor):
            expected, model = first_output(expected), _FirstOutput(model)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            draft = Path(folder) / path.name
            example = images[: 2 if dynamic_batch else 1].contiguous()
            batch = ({0: torch.export.Dim("batch", min=1)},) if dynamic_batch else None
            (_to_onnx if format == "onnx" else _to_pt2)(model, draft, example, batch)
            if int8:
                _quantize(draft)
            run = load_exported(draft)
            pieces = [images, images[:1]] if dynamic_batch else images.split(1)
            found = torch.cat([run(piece) for piece in pieces])
            expected = torch.cat([expected, expected[:1]]) if dynamic_batch else expected
            error = (found - expected).abs().max().item()
            if not int8 and not error <= tolerance:
                raise ValueError(
                    f"the exported file differs from the model by {error:.2g}, more than {tolerance:.2g}; "
                    f"nothing was written. Where it is small, tokens that are nearly alike may have been told apart "
                    f"otherwise: check with other images or allow more by tolerance"
                )
            del run  # the file is free to be moved
            files = sorted(Path(folder).iterdir())
            size = sum(file.stat().st_size for file in files)
            for file in files:
                file.replace(path.parent / file.name)
    agreement = (found.argmax(-1) == expected.argmax(-1)).float().mean().item()
    return Exported(path, size, error, agreement)


def load_exported(path: str | Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function images (B, C, H, W) -> output that runs an exported file, by onnxruntime or by torch.

    Raises:
        ValueError: neither .onnx nor .pt2.
        ImportError: onnxruntime is missing.
    """
    if _format(Path(path), None) == "pt2":
        return torch.export.load(path).module()
    runtime = _import("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


class _FirstOutput(nn.Module):
    """A model that gives several outputs, in eval mode, as one that gives the first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.training = model, False

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return first_output(self.model(images))


def _format(path: Path, format: str | None) -> str:
    format = path.suffix.removeprefix(".") if format is None else format
    if format not in FORMATS or path.suffix != f".{format}":
        raise ValueError(f"the file must end in .onnx or .pt2, as its format says, got {path.name!r} and {format!r}")
    return format


def _to_pt2(model: nn.Module, path: Path, example: torch.Tensor, batch) -> None:
    torch.export.save(torch.export.export(model, (example,), dynamic_shapes=batch), path)


def _to_onnx(model: nn.Module, path: Path, example: torch.Tensor, batch) -> None:
    _import("onnx"), _import("onnxscript")
    weights = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's exporter, about its own code
        torch.onnx.export(
            model,
            (example,),
            path,
            dynamo=True,
            dynamic_shapes=batch,
            input_names=["images"],
            output_names=["output"],
            external_data=weights > ONE_FILE,
            verbose=False,
        )


def _quantize(path: Path) -> None:
    """Rewrite an ONNX file with int8 linear layers: products with a constant, which matching and attention have not."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole = path.with_stem(f"{path.stem}-float")
    path.rename(whole)
    logging.disable(logging.WARNING)  # advice to prepare the graph, which torch's exporter has done
    try:
        quantize_dynamic(
            whole, path, op_types_to_quantize=["MatMul", "Gemm"], weight_type=QuantType.QInt8, per_channel=True
        )
    finally:
        logging.disable(logging.NOTSET)
    whole.unlink()
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)  # weights of the file that went in


def _import(name: str):
    try:
        return __import__(name)
    except ImportError:
        raise ImportError(f"export to ONNX needs {name}: pip install onnx onnxscript onnxruntime") from None
