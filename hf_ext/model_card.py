"""The README.md of a converted folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from hf_ext.configuration_vision import VisionConfig


@dataclass(frozen=True)
class ReleasedSize:
    """Shape of a published model and its top-1 on ImageNet-1k in percent, from the released code's README.

    heads: of the attention, 0 where there is none. patch, image: sides in px, None = whatever the file has.
    """

    dim: int
    depth: int
    heads: int
    multiplier: int
    top1: float
    patch: int | None = None
    image: int | None = None

    def fits(self, config: VisionConfig) -> bool:
        """Is this the size of ``config``?"""
        heads = getattr(config, "num_attention_heads", 0)
        shape = (config.hidden_size, config.num_hidden_layers, heads, config.multiplier)
        sides = ((self.patch, config.patch_sides), (self.image, config.image_sides))
        same = shape == (self.dim, self.depth, self.heads, self.multiplier)
        return same and all(own is None or sides == (own, own) for own, sides in sides)


@dataclass(frozen=True)
class Family:
    """What a card says about a kind of model: name, one paragraph, links, citation, published sizes."""

    title: str
    about: str
    paper: str
    code: str
    citation: str
    sizes: dict[str, ReleasedSize]


_JUMBO = Family(
    title="Jumbo ViT",
    about="A plain Vision Transformer with a Jumbo token: one global token, {multiplier} times as wide as a patch, "
    "with its own\nwide feed-forward network that all blocks share.",
    paper="[Thicker and Quicker: A Jumbo Token for Fast Plain Vision Transformers](https://arxiv.org/abs/2502.15021)",
    code="https://github.com/antofuller/jumbo",
    citation="""@inproceedings{fuller2026jumbo,
  title     = {Thicker and Quicker: A Jumbo Token for Fast Plain Vision Transformers},
  author    = {Fuller, Anthony and Yassin, Yousef and Kyrollos, Daniel G. and Shelhamer, Evan and Green, James R.},
  booktitle = {International Conference on Learning Representations},
  year      = {2026}
}""",
    sizes={
        "pico": ReleasedSize(96, 12, 3, 6, 69.156),
        "nano": ReleasedSize(128, 12, 4, 6, 74.528),
        "tiny": ReleasedSize(192, 12, 3, 6, 78.366),
        "small": ReleasedSize(384, 12, 6, 6, 82.558),
        "base": ReleasedSize(768, 12, 12, 3, 84.954),
    },
)

_ADVENTURER = Family(
    title="Adventurer",
    about="An image model in time and memory linear in the number of patches: a causal Mamba-2 mixer in every block, "
    "which some\nblocks run over the patches in reverse, the mean of all tokens in front and the class token last.",
    paper="[Causal Image Modeling for Efficient Visual Understanding](https://arxiv.org/abs/2410.07599)",
    code="https://github.com/wangf3014/Adventurer",
    citation="""@article{wang2024causal,
  title   = {Causal Image Modeling for Efficient Visual Understanding},
  author  = {Wang, Feng and Yang, Timing and Yu, Yaodong and Ren, Sucheng and Wei, Guoyizhe and Wang, Angtian and
             Shao, Wei and Zhou, Yuyin and Yuille, Alan and Xie, Cihang},
  journal = {arXiv preprint arXiv:2410.07599},
  year    = {2024}
}""",
    sizes={
        "tiny": ReleasedSize(256, 12, 0, 0, 78.2, 16, 224),
        "small": ReleasedSize(512, 12, 0, 0, 81.8, 16, 224),
        "base": ReleasedSize(768, 12, 0, 0, 82.6, 16, 224),
        "large": ReleasedSize(1024, 24, 0, 0, 83.4, 16, 224),
        "base_patch16_384": ReleasedSize(768, 12, 0, 0, 84.2, 16, 384),
        "base_patch16_448": ReleasedSize(768, 12, 0, 0, 84.3, 16, 448),
        "base_patch8_224": ReleasedSize(768, 12, 0, 0, 83.9, 8, 224),
        "base_patch8_448": ReleasedSize(768, 12, 0, 0, 84.8, 8, 448),
    },
)

FAMILIES = {"jumbo_vit": _JUMBO, "adventurer": _ADVENTURER}
# Published sizes by model type and name.
RELEASED = {model_type: family.sizes for model_type, family in FAMILIES.items()}

_CARD = """---
library_name: transformers
pipeline_tag: {task}
tags:
- jumbo-vit
- vision
{datasets}---

# {title}

{about}

| | |
|---|---|
{rows}

Paper: {paper}
Code of the authors: {code}
Converted from `{source}` with `python -m hf_ext.convert` of the package jumbo-vit.

A file of tensors does not show everything. Taken for granted:

{assumed}

The weights are their makers'. If they come from the authors' release, see the terms of their repository before
passing them on.
{accuracy}
## Use

```
pip install "jumbo-vit[hf]"
```

```python
{usage}
```

Any image size works that the patch size divides; the position table is resampled.

## Cite

```bibtex
{citation}
```
"""

_CLASSIFY = """import hf_ext  # registers the model with Transformers; or leave it out and pass trust_remote_code=True
from transformers import pipeline

classify = pipeline("image-classification", model="{folder}")
print(classify("photo.jpg"))"""

_FEATURES = """import hf_ext  # registers the model with Transformers; or leave it out and pass trust_remote_code=True
from PIL import Image
from transformers import AutoImageProcessor, AutoModel

processor, model = AutoImageProcessor.from_pretrained("{folder}"), AutoModel.from_pretrained("{folder}")
features = model(**processor(Image.open("photo.jpg"), return_tensors="pt")).pooler_output"""


def write_model_card(folder: Path, model: PreTrainedModel, *, source: str, assumed: list[str]) -> None:
    """Write ``folder/README.md`` for ``model``, converted from the file named ``source`` under what was ``assumed``."""
    config = model.config
    family = FAMILIES[config.model_type]
    size = next((name for name, size in family.sizes.items() if size.fits(config)), None)
    classifier = hasattr(model, "classifier")
    imagenet = classifier and config.num_labels == 1000 and size is not None
    accuracy = ""
    if imagenet:
        top1, pixels = family.sizes[size].top1, family.sizes[size].image or 224
        accuracy = (
            f"\nReported by the authors for the released {size} weights: {top1} % top-1 on ImageNet-1k at "
            f"{pixels} px. This number\nwas not measured again during conversion.\n"
        )
    rows = {
        "patch width": config.hidden_size,
        "blocks": config.num_hidden_layers,
        **_mixing(config),
        "Jumbo multiplier": config.multiplier,
        "patch size, image size": ", ".join("x".join(map(str, s)) for s in (config.patch_sides, config.image_sides)),
        "parameters": f"{model.num_parameters() / 1e6:.3f} M",
    }
    card = _CARD.format(
        task="image-classification" if classifier else "image-feature-extraction",
        datasets="datasets:\n- imagenet-1k\n" if imagenet else "",
        title=f"{family.title} {size}" if size else family.title,
        about=_about(family, config),
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        paper=family.paper,
        code=family.code,
        source=source,
        assumed="\n".join(f"- {line}" for line in assumed),
        accuracy=accuracy,
        usage=(_CLASSIFY if classifier else _FEATURES).format(folder=folder.name),
        citation=family.citation,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _mixing(config: VisionConfig) -> dict[str, object]:
    """Rows on how the blocks mix tokens."""
    if config.model_type == "jumbo_vit":
        return {"attention heads": config.num_attention_heads}
    return {
        "mixer": f"state {config.state_size}, heads of {config.head_dim}, {config.expand:g} times as wide",
        "reversed blocks": config.flip if config.flip == "alternate" else ", ".join(map(str, config.flip)) or "none",
    }


def _about(family: Family, config: VisionConfig) -> str:
    text = family.about.format(multiplier=config.multiplier)
    if config.model_type == "adventurer" and config.multiplier:
        text += (
            f"\nHere {config.multiplier} slices of a Jumbo token stand in place of the class token: "
            f"a combination of the package jumbo-vit,\nnot from a paper."
        )
    return text
