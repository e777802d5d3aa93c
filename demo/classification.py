"""Demo part (a): Jumbo and the registers baseline through Transformers' Trainer, on real handwritten digits.

``python -m demo.classification`` runs this part alone.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import AutoModelForImageClassification, Trainer, TrainingArguments, pipeline

from demo.rows import Row
from hf_ext import JumboConfig, JumboForImageClassification, jumbo_image_processor
from jumbo_core.jumbo import param_groups
from jumbo_core.measure.turns import median_ms

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SIDE, PATCH, WIDTH, DEPTH, HEADS = 24, 4, 48, 4, 4
EPOCHS, BATCH, RATE = 16, 32, 3e-3
CONTENDERS = {
    "Jumbo (J=6)": dict(multiplier=6, registers=0),
    "ViT + CLS + 16 registers": dict(multiplier=0, registers=16),
}
JUMBO, BASELINE = CONTENDERS


def run(out: Path, *, seed: int = 0) -> tuple[list[Row], dict[str, Path]]:
    """Train both models at equal width, depth and budget; save, reload through the Auto classes, run the pipeline.

    Args:
        out: folder for the saved models and the picture.
        seed: of the split, the weights and the order of the data.

    Returns:
        One row for the closing table, and the picture by name: {"attention": …}.
    """
    out = Path(out) / "classification"
    out.mkdir(parents=True, exist_ok=True)
    train, test = pictures(seed)
    accuracy, folders = {}, {}
    for name, tokens in CONTENDERS.items():
        folders[name] = out / ("jumbo" if tokens["multiplier"] else "registers")
        print(f"classification: training {name} on {len(train)} digits, {EPOCHS} epochs")
        fit(train, tokens, folders[name], seed)
        accuracy[name] = pipeline_accuracy(folders[name], test)
        print(f"classification: {name}: {accuracy[name]:.1f} % of {len(test)} test digits")

    models = {name: AutoModelForImageClassification.from_pretrained(folder) for name, folder in folders.items()}
    milliseconds = time_per_image(models)
    picture = draw_attention(folders[JUMBO], test, out / "attention.png")
    row = Row(
        task="classification (digits)",
        host="Transformers",
        baseline=BASELINE,
        metric="accuracy %",
        better="higher",
        baseline_quality=accuracy[BASELINE],
        jumbo_quality=accuracy[JUMBO],
        baseline_ms=milliseconds[BASELINE],
        jumbo_ms=milliseconds[JUMBO],
    )
    return [row], {"attention": picture}


def pictures(seed: int) -> tuple[list[tuple[Image.Image, int]], list[tuple[Image.Image, int]]]:
    """scikit-learn's 1,797 scanned digits (8x8, 16 grey levels) as RGB pictures of 24 px, split 80/20 by class."""
    data = load_digits()
    samples = []
    for scan, label in zip(data.images, data.target, strict=True):
        grey = Image.fromarray((scan * (255 / 16)).round().astype(np.uint8))
        samples.append((grey.resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGB"), int(label)))
    return train_test_split(samples, test_size=0.2, random_state=seed, stratify=data.target)


def fit(train: list[tuple[Image.Image, int]], tokens: dict, folder: Path, seed: int) -> None:
    """Train one contender and save model and preprocessing to ``folder``."""
    processor = jumbo_image_processor(SIDE)
    pixels = processor([image for image, _ in train], return_tensors="pt")["pixel_values"]
    dataset = [{"pixel_values": x, "labels": label} for x, (_, label) in zip(pixels, train, strict=True)]
    torch.manual_seed(seed)
    names = [str(digit) for digit in range(10)]
    config = JumboConfig(
        image_size=SIDE,
        patch_size=PATCH,
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        init="short",  # head and FFN start for a run of minutes, not of 400 epochs
        id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)},
        **tokens,
    )
    model = JumboForImageClassification(config)
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,  # below 1: a share of all steps
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=seed,
    )
    optimizer = torch.optim.AdamW(param_groups(model, lr=RATE, weight_decay=0.05))
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        processing_class=processor,
        optimizers=(optimizer, None),
    )
    trainer.train()
    trainer.save_model(str(folder))


def pipeline_accuracy(folder: Path, test: list[tuple[Image.Image, int]]) -> float:
    """Accuracy in percent of ``pipeline("image-classification")`` on the saved folder."""
    classify = pipeline("image-classification", model=str(folder), device="cpu")
    answers = classify([image for image, _ in test], top_k=1, batch_size=64)
    right = [answer[0]["label"] == str(label) for answer, (_, label) in zip(answers, test, strict=True)]
    return 100 * sum(right) / len(right)


def time_per_image(models: dict[str, torch.nn.Module], *, batch: int = 32) -> dict[str, float]:
    """Milliseconds per image in batches, see :func:`median_ms`."""
    images = torch.randn(batch, 3, SIDE, SIDE)
    return median_ms({name: partial(model.eval(), images) for name, model in models.items()}, samples=batch)


@torch.inference_mode()
def draw_attention(folder: Path, test: list[tuple[Image.Image, int]], path: Path, *, columns: int = 8) -> Path:
    """One test picture of each of the first digits; below, where the Jumbo token looks in the last two blocks.

    The map is the attention of the J slices to the patches, averaged over slices, heads and the two blocks, as a
    share of what an even spread would give.
    """
    model = AutoModelForImageClassification.from_pretrained(folder, attn_implementation="eager").eval()
    chosen = [next(sample for sample in test if sample[1] == digit) for digit in range(columns)]
    pixels = jumbo_image_processor(SIDE)([image for image, _ in chosen], return_tensors="pt")["pixel_values"]
    output = model(pixels, output_attentions=True)
    prefix, slices, grid = model.jumbo.vit.num_prefix_tokens, model.config.multiplier, SIDE // PATCH
    weights = torch.stack(output.attentions[-2:])[..., :slices, prefix:].mean(dim=(0, 2, 3))  # (B, N)
    maps = (weights / weights.mean(dim=1, keepdim=True)).reshape(-1, grid, grid)

    figure, axes = plt.subplots(2, columns, figsize=(1.35 * columns + 0.9, 3.4), layout="constrained")
    for column, ((image, label), guess) in enumerate(zip(chosen, output.logits.argmax(-1).tolist(), strict=True)):
        axes[0, column].imshow(image)
        axes[0, column].set_title(f"{label} read as {guess}", fontsize=9, color="black" if label == guess else "red")
        axes[1, column].imshow(image.convert("L"), cmap="gray", extent=(0, grid, grid, 0))
        shown = axes[1, column].imshow(
            maps[column], cmap="magma", alpha=0.75, vmin=0, vmax=maps.max(), extent=(0, grid, grid, 0)
        )
    for axis in axes.flat:
        axis.set_axis_off()
    figure.colorbar(shown, ax=axes[1], label="x even spread", shrink=0.9)
    figure.suptitle("Where the Jumbo token looks (last two blocks, mean of slices and heads)", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


if __name__ == "__main__":
    for result in run(Path("out"))[0]:
        print(result)
