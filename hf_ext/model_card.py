"""The README.md of a converted folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel


@dataclass(frozen=True)
class ReleasedSize:
    """Shape of a published model and its top-1 on ImageNet-1k in percent, from the released code's README."""

    dim: int
    depth: int
    heads: int
    multiplier: int
    top1: float


RELEASED = {
    "pico": ReleasedSize(96, 12, 3, 6, 69.156),
    "nano": ReleasedSize(128, 12, 4, 6, 74.528),
    "tiny": ReleasedSize(192, 12, 3, 6, 78.366),
    "small": ReleasedSize(384, 12, 6, 6, 82.558),
    "base": ReleasedSize(768, 12, 12, 3, 84.954),
}

_CARD = """---
library_name: transformers
pipeline_tag: {task}
tags:
- jumbo-vit
- vision
{datasets}---

# {title}

A plain Vision Transformer with a Jumbo token: one global token, {multiplier} times as wide as a patch, with its own
wide feed-forward network that all blocks share.

| | |
|---|---|
| patch width | {dim} |
| blocks | {depth} |
| attention heads | {heads} |
| Jumbo multiplier | {multiplier} |
| patch size, image size | {patch}, {image} |
| parameters | {parameters:.3f} M |

Paper: [Thicker and Quicker: A Jumbo Token for Fast Plain Vision Transformers](https://arxiv.org/abs/2502.15021)
Code of the authors: https://github.com/antofuller/jumbo
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
@inproceedings{{fuller2026jumbo,
  title     = {{Thicker and Quicker: A Jumbo Token for Fast Plain Vision Transformers}},
  author    = {{Fuller, Anthony and Yassin, Yousef and Kyrollos, Daniel G. and Shelhamer, Evan and Green, James R.}},
  booktitle = {{International Conference on Learning Representations}},
  year      = {{2026}}
}}
```
"""

_CLASSIFY = """import hf_ext  # registers Jumbo with Transformers; or leave it out and pass trust_remote_code=True
from transformers import pipeline

classify = pipeline("image-classification", model="{folder}")
print(classify("photo.jpg"))"""

_FEATURES = """import hf_ext  # registers Jumbo with Transformers; or leave it out and pass trust_remote_code=True
from PIL import Image
from transformers import AutoImageProcessor, AutoModel

processor, model = AutoImageProcessor.from_pretrained("{folder}"), AutoModel.from_pretrained("{folder}")
features = model(**processor(Image.open("photo.jpg"), return_tensors="pt")).pooler_output"""


def write_model_card(folder: Path, model: PreTrainedModel, *, source: str, assumed: list[str]) -> None:
    """Write ``folder/README.md`` for ``model``, converted from the file named ``source`` under what was ``assumed``."""
    config = model.config
    shape = (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.multiplier)
    size = next((n for n, s in RELEASED.items() if (s.dim, s.depth, s.heads, s.multiplier) == shape), None)
    classifier = hasattr(model, "classifier")
    imagenet = classifier and config.num_labels == 1000 and size is not None
    accuracy = (
        f"\nReported by the authors for the released {size} weights: {RELEASED[size].top1} % top-1 on ImageNet-1k at "
        f"224 px. This number\nwas not measured again during conversion.\n"
        if imagenet
        else ""
    )
    card = _CARD.format(
        task="image-classification" if classifier else "image-feature-extraction",
        datasets="datasets:\n- imagenet-1k\n" if imagenet else "",
        title=f"Jumbo ViT {size}" if size else "Jumbo ViT",
        multiplier=config.multiplier,
        dim=config.hidden_size,
        depth=config.num_hidden_layers,
        heads=config.num_attention_heads,
        patch="x".join(map(str, config.patch_sides)),
        image="x".join(map(str, config.image_sides)),
        parameters=model.num_parameters() / 1e6,
        source=source,
        assumed="\n".join(f"- {line}" for line in assumed),
        accuracy=accuracy,
        usage=(_CLASSIFY if classifier else _FEATURES).format(folder=folder.name),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
