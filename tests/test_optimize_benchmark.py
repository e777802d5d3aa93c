"""The benchmark of optimised models: what it counts and its table, on a few images."""

import pytest
import torch

from benchmarks import optimize_cifar
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
