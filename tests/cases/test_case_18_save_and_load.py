"""Case 18: save_pretrained with a shared FFN works, the reload is bit-equal and still shared.

Seen at: transformers 33807, 48892.
"""

import json

import pytest
import torch
from safetensors import safe_open

pytest.importorskip("transformers")
from transformers import AutoModel, AutoModelForImageClassification

from hf_ext import JumboBackbone, JumboConfig, JumboForImageClassification, JumboModel
from jumbo_core.jumbo import JumboFFN

SMALLEST = dict(
    image_size=32, patch_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, multiplier=2, num_labels=3
)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("cls", [JumboForImageClassification, JumboModel, JumboBackbone])
def test_saved_and_loaded_bit_equal_and_still_shared(tmp_path, cls, shared):
    model = cls(JumboConfig(**SMALLEST, share_jumbo_ffn=shared, layer_scale=0.5)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)

    auto = {JumboForImageClassification: AutoModelForImageClassification, JumboModel: AutoModel}.get(cls, cls)
    loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not loaded.training and list(loaded.state_dict()) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name

    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for ours, theirs in zip(model(images).to_tuple(), loaded(images).to_tuple(), strict=True):
            pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
            assert all(torch.equal(a, b) for a, b in pairs)

    # One instance for both blocks, before and after, and once in the file; two when it is not shared.
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = [key for key in file.keys() if "jumbo_mlp" in key and key.endswith("fc1.weight")]
    for net in (model, loaded):
        encoder = next(m for m in net.modules() if type(m).__name__ == "JumboEncoder")
        assert (encoder.ffn_of(0) is encoder.ffn_of(1)) == shared
        assert sum(isinstance(m, JumboFFN) for m in net.modules()) == len(stored) == (1 if shared else 2)
    trained = loaded.train()
    optimizer = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=0.1)
    sum(
        t.square().sum() for out in [trained(images)[0]] for t in (out if isinstance(out, tuple) else (out,))
    ).backward()
    optimizer.step()
    trained.save_pretrained(tmp_path / "again")
    again = cls.from_pretrained(tmp_path / "again")
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in trained.state_dict().items())


def test_no_computed_buffer_is_left_to_chance(tmp_path):
    model = JumboForImageClassification(JumboConfig(**SMALLEST))
    assert not list(model.buffers())  # nothing a load on the meta device could leave as garbage
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {k: saved[k] for k in SMALLEST if k != "num_labels"} == {
        k: v for k, v in SMALLEST.items() if k != "num_labels"
    }
