"""The benchmark of optimised models: what it counts and its table, on a few images."""

import pytest
import torch

from benchmarks import lowlatency_bound, optimize_cifar
from jumbo_core.jumbo.lowlatency import int8_kernel
from jumbo_core.models import JumboViT


@pytest.fixture
def models():
    model = JumboViT(32, 8, 3, 4, 32, 2, 2, 2, init="released").eval()
    torch.nn.init.normal_(model.head.weight, std=0.3)
    return optimize_cifar.forms(model)


def test_quality_counts_answers_and_bytes(models):
    images = torch.randn(20, 3, 32, 32)
    with torch.inference_mode():
        labels = models["float32"](images).argmax(1)
    rows = optimize_cifar.quality(models, images, labels)
    assert list(rows) == ["float32", "bfloat16", "int8"]
    assert rows["float32"]["accuracy"] == rows["float32"]["agreement"] == 100
    for row in rows.values():  # the labels are float32's own answers
        assert row["accuracy"] == row["agreement"] >= 80
    assert rows["float32"]["ffn_megabytes"] == pytest.approx(4 * (64 * 256 * 2 + 320) / 1e6, abs=1e-3)
    assert rows["bfloat16"]["ffn_megabytes"] < 0.51 * rows["float32"]["ffn_megabytes"]
    wrong = optimize_cifar.quality(models, images, (labels + 1) % 4)
    assert wrong["float32"]["accuracy"] == 0 and wrong["float32"]["agreement"] == 100


def test_table_has_every_form_and_batch(models):
    images = torch.randn(4, 3, 32, 32)
    content = {
        "settings": {"batches": [1, 2]},
        "quality": optimize_cifar.quality(models, images, torch.zeros(4, dtype=torch.long)),
        "speed": optimize_cifar.speed(models, [1, 2], 3),
    }
    lines = optimize_cifar.table(content).splitlines()
    assert [line.split("|")[1].strip().split()[0] for line in lines[2:]] == ["float32", "bfloat16", "int8"]
    assert all(line.count("|") == 7 for line in lines) and "ms, batch 2" in lines[0]


@pytest.mark.skipif(not int8_kernel(), reason="needs a processor with exact int8 products")
def test_bounds_are_the_models_they_say(monkeypatch):
    from jumbo_core.measure.contenders import contender

    small = {"jumbo_tiny_patch16_224": "test_jumbo@num_classes=10", "vit_registers_tiny": "test_vit@num_classes=10"}
    monkeypatch.setattr(lowlatency_bound, "contender", lambda name: contender(small[name], 224))
    models = lowlatency_bound.forms("tiny")
    x = torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        out = {name: model(x) for name, model in models.items()}
    names = ["int8, quantized.linear_dynamic", "its int8 products alone", "without its FFN"]
    others = [out[name] for name in [*names, "its int8 weights only looked at"]]
    near, *far = ((other - out["int8"]).norm().item() for other in others)
    assert 0 < near < 0.2 * min(far)
    threads = torch.get_num_threads()
    try:
        result = lowlatency_bound.measure(("tiny",), repeats=2, threads=1)
    finally:
        torch.set_num_threads(threads)
    assert [row["model"] for row in result["rows"]] == list(models) and result["table"].count("\n") == 7
