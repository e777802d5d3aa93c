"""Published weights -> a folder that ``from_pretrained``, ``pipeline`` and the hub open.

``python -m hf_ext.convert jumbo_tiny.pth jumbo-tiny``
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_ext.configuration_jumbo import REMOTE_MODULE, JumboConfig
from hf_ext.image_processing_jumbo import jumbo_image_processor
from hf_ext.labels import imagenet_labels, read_labels
from hf_ext.model_card import RELEASED, write_model_card
from hf_ext.modeling_jumbo import JumboForImageClassification, JumboModel
from jumbo_core.models import JumboViT, LoadReport, load_released
from jumbo_core.models.positions import square_grid
from jumbo_core.models.released import read_state_dict

Weights = Mapping[str, torch.Tensor]
# The files of a converted folder.
WRITTEN = ("config.json", "model.safetensors", "preprocessor_config.json", "README.md", f"{REMOTE_MODULE}.py")


def infer_config(
    state: Weights, *, num_attention_heads: int | None = None, image_size: tuple[int, int] | None = None
) -> JumboConfig:
    """Read a model's shape off its tensors, under published or current names.

    Args:
        state: a state dict as :func:`jumbo_core.models.released.read_state_dict` returns it.
        num_attention_heads: tensors do not show it; known only for the released sizes, else it must be given.
        image_size: (H, W) of the position table; needed when the table is not square.

    Raises:
        ValueError: the tensors are not a Jumbo ViT's, or leave heads or image size open.
    """
    state = {key.removeprefix("encoder."): value for key, value in state.items()}
    for key, axes in (("patch_embed.proj.weight", 4), ("pos_embed", 3), ("blocks.0.mlp.fc1.weight", 2)):
        if key not in state:
            raise ValueError(f"not a Jumbo ViT: the file has no {key}, only {sorted(state)[:5]}…")
        if state[key].ndim != axes:
            raise ValueError(f"not a Jumbo ViT: {key} has shape {tuple(state[key].shape)}, expected {axes} axes")
    dim, channels, *patch = state["patch_embed.proj.weight"].shape
    depth = 1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks."))
    multiplier = state["jumbo_token"].shape[1] if "jumbo_token" in state else 0
    shape = {
        "patch_size": patch[0] if patch[0] == patch[1] else list(patch),
        "num_channels": channels,
        "hidden_size": dim,
        "num_hidden_layers": depth,
        "multiplier": multiplier,
        "registers": state["reg_token"].shape[1] if "reg_token" in state else 0,
        "mlp_ratio": len(state["blocks.0.mlp.fc1.weight"]) / dim,
    }
    if multiplier:
        shape["share_jumbo_ffn"] = "jumbo_mlp.fc1.weight" in state
        first = "jumbo_mlp.fc1.weight" if shape["share_jumbo_ffn"] else "jumbo_mlp.0.fc1.weight"
        shape["jumbo_mlp_ratio"] = len(state[first]) / (dim * multiplier)
    if "blocks.0.ls1.gamma" in state:
        shape["layer_scale"] = 1e-4  # the paper's initial value; the trained scales come with the weights
    if "head.weight" in state:
        classes, width = state["head.weight"].shape
        pooled = dim * (multiplier + 1 if multiplier else 1)
        if width != pooled:
            raise ValueError(
                f"the head reads {width} features, a Jumbo classifier with D={dim}, J={multiplier} reads {pooled}: "
                f"heads on another pooling than [Jumbo token ; mean of the patches] are not supported here"
            )
        shape["num_labels"] = classes

    num_patches = state["pos_embed"].shape[1]
    if image_size is None:
        grid = square_grid(num_patches)
        if grid is None:
            raise ValueError(f"the position table has {num_patches} entries, not a square: give --image-size H W")
        image_size = (grid[0] * patch[0], grid[1] * patch[1])
    elif image_size[0] // patch[0] * (image_size[1] // patch[1]) != num_patches:
        raise ValueError(
            f"--image-size {image_size[0]} {image_size[1]} means {image_size[0] // patch[0]}x"
            f"{image_size[1] // patch[1]} patches of {patch[0]}x{patch[1]}, the position table has {num_patches}"
        )
    shape["image_size"] = image_size[0] if image_size[0] == image_size[1] else list(image_size)

    if num_attention_heads is None:
        known = [s.heads for s in RELEASED.values() if (s.dim, s.depth, s.multiplier) == (dim, depth, multiplier)]
        if not known:
            raise ValueError(
                f"the tensors do not show the number of attention heads and D={dim}, depth {depth}, J={multiplier} "
                f"is no released size: give --num-attention-heads"
            )
        num_attention_heads = known[0]
    return JumboConfig(num_attention_heads=num_attention_heads, **shape)


def assumptions(
    config: JumboConfig, *, num_attention_heads: int | None = None, image_size: tuple[int, int] | None = None
) -> list[str]:
    """What a file of tensors leaves open and the conversion took for granted, as lines to read.

    Args:
        config: the result of :func:`infer_config`.
        num_attention_heads, image_size: what the caller gave, None = it was assumed.
    """
    height, width = config.image_sides
    heads, source = config.num_attention_heads, "as given"
    if num_attention_heads is None:
        source = f"as in the released size of D={config.hidden_size}"
    size = "as given" if image_size is not None else "a square position table"
    pooled = "[Jumbo token ; mean of the patches]" if config.multiplier else "the class token"
    return [
        f"{heads} attention heads ({source})",
        f"positions for images of {height}x{width} px ({size})",
        f"the classifier or pooled vector reads {pooled}",
    ]


def convert_weights(state: Weights, config: JumboConfig) -> tuple[PreTrainedModel, LoadReport]:
    """Build the Transformers model of ``config`` with these weights: a classifier when the file has a head.

    Raises:
        ValueError: a tensor is missing, unexpected, of another shape, or not finite.
    """
    has_head = any(key.endswith("head.weight") for key in state)
    model = JumboForImageClassification(config) if has_head else JumboModel(config)
    encoder = model.jumbo if has_head else model
    # The published names are translated by the core's own loader, into the core's own model.
    core = JumboViT(
        config.image_sides,
        config.patch_sides,
        config.num_channels,
        config.num_labels if has_head else 0,
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.multiplier,
        registers=config.registers,
        mlp_ratio=config.mlp_ratio,
        jumbo_mlp_ratio=config.jumbo_mlp_ratio,
        share_jumbo_ffn=config.share_jumbo_ffn,
        layer_scale=config.layer_scale,
        norm_eps=config.layer_norm_eps,
    )
    report = load_released(core, state)
    if report.missing or report.unexpected:
        raise ValueError(f"incomplete file: missing {report.missing}, unexpected {report.unexpected}")
    weights = core.state_dict()
    head = {key.removeprefix("head."): weights.pop(key) for key in list(weights) if key.startswith("head.")}
    encoder.vit.load_state_dict(weights)
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
    id2label: str | Path | None = None,
    force: bool = False,
) -> LoadReport:
    """Write config.json, model.safetensors, preprocessor_config.json, model card and remote-code file to ``folder``.

    Args:
        source: a published file (.pth, .pt, .bin, .safetensors), a golden file, or the state dict of a ``JumboViT``.
        folder: where to write; made when missing, must be empty unless ``force``. Nothing in it is ever deleted.
        size: a released size, checked against the tensors. Default None: recognised from them.
        num_attention_heads, image_size: see :func:`infer_config`.
        id2label: JSON file, a list of names or {"0": name}; or a text file, one name a line. Default: ImageNet's
            names for 1000 classes, else LABEL_0, …
        force: write into a folder that has files, over those of the five names above.

    Tensors do not show heads, image size and pooling; what was assumed of them stands in the model card, see
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
    if size is not None and size not in RELEASED:
        raise ValueError(f"size must be one of {', '.join(RELEASED)}, got {size!r}")
    heads = RELEASED[size].heads if size is not None and num_attention_heads is None else num_attention_heads
    config = infer_config(state, num_attention_heads=heads, image_size=image_size)
    if size is not None:
        expected, found = RELEASED[size], (config.hidden_size, config.num_hidden_layers, config.multiplier)
        if found != (expected.dim, expected.depth, expected.multiplier):
            raise ValueError(
                f"size {size} has D={expected.dim}, depth {expected.depth}, J={expected.multiplier}; "
                f"the file has D={found[0]}, depth {found[1]}, J={found[2]}"
            )
    model, report = convert_weights(state, config)
    if isinstance(model, JumboForImageClassification):
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
    jumbo_image_processor(config.image_sides).save_pretrained(folder)
    assumed = assumptions(config, num_attention_heads=num_attention_heads, image_size=image_size)
    write_model_card(folder, model, source=Path(source).name, assumed=assumed)
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hf_ext.convert", description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="published weights: .pth, .pt, .bin or .safetensors")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--size", choices=list(RELEASED), help="released size; default: recognised from the tensors")
    parser.add_argument("--num-attention-heads", type=int, help="needed when the shape is no released size")
    parser.add_argument("--image-size", type=int, nargs=2, metavar=("H", "W"), help="needed for non-square tables")
    parser.add_argument("--id2label", type=Path, help="JSON list, JSON {index: name}, or text file of one name a line")
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    options = parser.parse_args(arguments)
    image_size = tuple(options.image_size) if options.image_size else None
    try:
        report = convert(
            options.source,
            options.folder,
            size=options.size,
            num_attention_heads=options.num_attention_heads,
            image_size=image_size,
            id2label=options.id2label,
            force=options.force,
        )
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    config = JumboConfig.from_pretrained(options.folder)
    print(
        f"wrote {options.folder}: {config.architectures[0]}, D={config.hidden_size}, "
        f"{config.num_hidden_layers} blocks, J={config.multiplier}"
    )
    for line in assumptions(config, num_attention_heads=options.num_attention_heads, image_size=image_size):
        print(f"assumed: {line}")
    if report.ignored:
        print(f"ignored keys of the file: {', '.join(report.ignored)}")


if __name__ == "__main__":
    main()
