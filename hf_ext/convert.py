"""Published weights -> a folder that ``from_pretrained``, ``pipeline`` and the hub open.

``python -m hf_ext.convert jumbo_tiny.pth jumbo-tiny``, and alike for published Adventurer files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification, BaseImageProcessor, PreTrainedModel

from hf_ext.configuration_adventurer import AdventurerConfig
from hf_ext.configuration_jumbo import JumboConfig
from hf_ext.configuration_vision import VisionConfig, remote_module
from hf_ext.image_processing_adventurer import adventurer_image_processor
from hf_ext.image_processing_jumbo import jumbo_image_processor
from hf_ext.labels import imagenet_labels, read_labels
from hf_ext.model_card import RELEASED, write_model_card
from hf_ext.shapes import Weights, assumptions, infer_config, is_adventurer
from jumbo_core.models import AdventurerViT, JumboViT, LoadReport, load_released
from jumbo_core.models.released import read_state_dict

# The files of a folder converted to a Jumbo ViT; an Adventurer's has a remote-code module of another name.
WRITTEN = (
    "config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "README.md",
    f"{remote_module(JumboConfig.family)}.py",
)
SIZES = sorted({name for sizes in RELEASED.values() for name in sizes})


def convert_weights(state: Weights, config: VisionConfig) -> tuple[PreTrainedModel, LoadReport]:
    """Build the Transformers model of ``config`` with these weights: a classifier when the file has a head.

    Raises:
        ValueError: a tensor is missing, unexpected, of another shape, or not finite.
    """
    has_head = any(key.endswith("head.weight") for key in state)
    model = (AutoModelForImageClassification if has_head else AutoModel).from_config(config)
    # The published names are translated by the core's own loader, into the core's own model.
    core_class = AdventurerViT if isinstance(config, AdventurerConfig) else JumboViT
    core = core_class(num_classes=config.num_labels if has_head else 0, **config.core_arguments())
    report = load_released(core, state, grid=config.grid)
    if report.missing or report.unexpected:
        raise ValueError(f"incomplete file: missing {report.missing}, unexpected {report.unexpected}")
    if isinstance(config, AdventurerConfig):
        core.encoder.set_flip(config.flip)  # the loader set the released rule; another one may have been asked for
    weights = core.state_dict()
    head = {key.removeprefix("head."): weights.pop(key) for key in list(weights) if key.startswith("head.")}
    model.base_model.vit.load_state_dict(weights)
    if has_head:
        model.classifier.load_state_dict(head)

    model.eval(), core.eval()
    probe = torch.randn(1, config.num_channels, *config.image_sides, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = core(probe)
        got = model(probe).logits if has_head else model(probe).pooler_output
    error = (got - expected).abs().max().item()
    if not error <= 1e-4 * max(1.0, expected.abs().max().item()):
        raise ValueError(f"the converted model differs from the file's by {error:.1e}: nothing was written")
    return model, report


def convert(
    source: str | Path,
    folder: str | Path,
    *,
    size: str | None = None,
    num_attention_heads: int | None = None,
    image_size: tuple[int, int] | None = None,
    flip: str | Sequence[int] | None = None,
    id2label: str | Path | None = None,
    force: bool = False,
) -> LoadReport:
    """Write config.json, model.safetensors, preprocessor_config.json, model card and remote-code file to ``folder``.

    Args:
        source: a published Jumbo or Adventurer file (.pth, .pt, .bin, .safetensors), a golden file, or the state dict
            of a ``JumboViT`` or ``AdventurerViT``.
        folder: where to write; made when missing, must be empty unless ``force``. Nothing in it is ever deleted.
        size: a released size, checked against the tensors. Default None: recognised from them.
        num_attention_heads, image_size, flip: see :func:`infer_config`.
        id2label: JSON file, a list of names or {"0": name}; or a text file, one name a line. Default: ImageNet's
            names for 1000 classes, else LABEL_0, …
        force: write into a folder that has files, over those of the five names above.

    Tensors do not show heads, flip rule, image size and pooling; what was assumed of them stands in the model card, see
    :func:`assumptions`.

    Returns:
        LoadReport; its ``ignored`` names the keys of the file that have no use here.

    Raises:
        FileNotFoundError: no such file. FileExistsError: ``folder`` is a file, or has files and ``force`` is off, or
            ``source`` or ``id2label`` is one of the files that would be written.
        ValueError: a damaged or unsafe file, see :func:`jumbo_core.models.released.read_state_dict`; for others see
            :func:`infer_config` and :func:`convert_weights`; a size or labels that do not fit.
    """
    folder = Path(folder)
    if folder.is_file():
        raise FileExistsError(f"{folder} is a file; give a folder")
    occupied = folder.is_dir() and any(folder.iterdir())
    if occupied and not force:
        raise FileExistsError(f"{folder} is not empty; choose another folder or use --force to write into it")
    for given in filter(None, (source, id2label)):
        if Path(given).resolve() in [(folder / name).resolve() for name in WRITTEN]:
            raise FileExistsError(f"{given} would be overwritten by the conversion; choose another folder")

    state = read_state_dict(source)
    sizes = RELEASED[AdventurerConfig.model_type if is_adventurer(state) else JumboConfig.model_type]
    if size is not None and size not in sizes:
        raise ValueError(f"size must be one of {', '.join(sizes)}, got {size!r}")
    given = {"num_attention_heads": num_attention_heads, "image_size": image_size, "flip": flip}
    heads = sizes[size].heads or None if size is not None and num_attention_heads is None else num_attention_heads
    config = infer_config(state, **{**given, "num_attention_heads": heads})
    if size is not None:
        expected, found = sizes[size], (config.hidden_size, config.num_hidden_layers, config.multiplier)
        if found != (expected.dim, expected.depth, expected.multiplier):
            raise ValueError(
                f"size {size} has D={expected.dim}, depth {expected.depth}, J={expected.multiplier}; "
                f"the file has D={found[0]}, depth {found[1]}, J={found[2]}"
            )
    model, report = convert_weights(state, config)
    if hasattr(model, "classifier"):
        names = None
        if id2label is not None:
            names = read_labels(id2label, config.num_labels)
        elif config.num_labels == 1000:
            names = imagenet_labels()
        if names is not None:
            model.config.id2label = dict(enumerate(names))
            model.config.label2id = {name: i for i, name in enumerate(names)}
    elif id2label is not None:
        raise ValueError("labels were given, but the file has no classifier")

    model.save_pretrained(folder)
    released_processor(config).save_pretrained(folder)
    write_model_card(folder, model, source=Path(source).name, assumed=assumptions(config, **given))
    return report


def released_processor(config: VisionConfig) -> BaseImageProcessor:
    """The released evaluation transform for models of this configuration."""
    if isinstance(config, AdventurerConfig):
        return adventurer_image_processor(config.image_sides, config.patch_sides)
    return jumbo_image_processor(config.image_sides)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hf_ext.convert", description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="published weights: .pth, .pt, .bin or .safetensors")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--size", choices=SIZES, help="released size; default: recognised from the tensors")
    parser.add_argument("--num-attention-heads", type=int, help="needed when the shape is no released size")
    parser.add_argument("--image-size", type=int, nargs=2, metavar=("H", "W"), help="needed for non-square tables")
    parser.add_argument(
        "--flip", nargs="*", metavar="BLOCK", help="Adventurer: blocks that see the patches reversed, or: alternate"
    )
    parser.add_argument("--id2label", type=Path, help="JSON list, JSON {index: name}, or text file of one name a line")
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    options = parser.parse_args(arguments)
    try:
        flip = options.flip if options.flip is None else _flip(options.flip)
        open_points = {
            "num_attention_heads": options.num_attention_heads,
            "image_size": tuple(options.image_size) if options.image_size else None,
            "flip": flip,
        }
        report = convert(
            options.source,
            options.folder,
            size=options.size,
            **open_points,
            id2label=options.id2label,
            force=options.force,
        )
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    config = AutoConfig.from_pretrained(options.folder)
    print(
        f"wrote {options.folder}: {config.architectures[0]}, D={config.hidden_size}, "
        f"{config.num_hidden_layers} blocks, J={config.multiplier}"
    )
    for line in assumptions(config, **open_points):
        print(f"assumed: {line}")
    if report.ignored:
        print(f"ignored keys of the file: {', '.join(report.ignored)}")


def _flip(words: list[str]) -> str | list[int]:
    if words == ["alternate"]:
        return "alternate"
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"--flip takes block numbers or the word alternate, got {' '.join(words)}")
    return [int(word) for word in words]


if __name__ == "__main__":
    main()
