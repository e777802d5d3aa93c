"""The fusion benchmarks: their data, their model, what they compare, how they resume; on a few images."""

import gzip
import io
import json

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from benchmarks import cifar, tofu_cifar, tofu_mnist
from jumbo_core.measure import ResultFile, multiply_adds
from jumbo_core.models import JumboViT
from jumbo_core.tofu import FusionPlan, is_fused
from jumbo_core.tofu.apply import fusion_report
from tests.conftest import max_error


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def comparison() -> tofu_mnist.Comparison:
    """A random JumboViT on 16 patches: 6 calibration images, 20 that count."""
    model = JumboViT(32, 8, 3, 4, 32, 2, 2, 2, init="short").eval()
    torch.nn.init.normal_(model.head.weight, std=0.3)
    rest = multiply_adds(model) - fusion_report(model, FusionPlan.uniform(2, 0, "prune"), 16).multiply_adds
    images = torch.randn(26, 3, 32, 32)
    labels = torch.arange(20) % 4
    return tofu_mnist.Comparison(model, images[:6], images[6:], labels, rest=rest, batch=8)


def test_every_plan_at_equal_multiply_adds(tmp_path):
    compared, file = comparison(), ResultFile(tmp_path / "r.json", {})
    compared.run(file, [2, 4])
    names = [*tofu_mnist.CONSTANT, *tofu_mnist.ADAPTIVE]
    runs = {name: run for name, run in file.runs.items() if "accuracy" in run}
    assert list(runs) == ["no fusion", *(f"{name}|r={r}" for r in (4, 2) for name in names)]
    assert runs["no fusion"]["multiply_adds"] == multiply_adds(compared.model) and not is_fused(compared.model)
    for r in (2, 4):
        budget = runs[f"prune|r={r}"]["multiply_adds"]
        assert all(runs[f"{name}|r={r}"]["multiply_adds"] == budget for name in tofu_mnist.CONSTANT)
        assert all(runs[f"{name}|r={r}"]["multiply_adds"] <= budget for name in tofu_mnist.ADAPTIVE)
        assert budget < runs["no fusion"]["multiply_adds"]
    for name, run in runs.items():
        if "lost" in run:
            assert run["accuracy"] + run["lost"] == pytest.approx(runs["no fusion"]["accuracy"]), name
    assert runs["paper|r=4"]["ops"] == ("prune", "mlerp") and runs["MLERP (mean)|r=4"]["options"] == {"norm": "mean"}
    found = file.runs["search|r=4"]
    assert found["loss"] <= found["start_loss"] and runs["adaptive, searched|r=4"]["counts"] == found["counts"]


def test_score_counts_what_changes():
    compared = comparison()
    plan = FusionPlan.uniform(2, 8, "prune")
    right = compared.score(compared.unfused, {})["right"]
    with torch.no_grad():
        assert right == "".join(str(int(c)) for c in compared.model(compared.images).argmax(-1) == compared.labels)
    ones, zeros = (compared.score(plan, {}, digit * 20) for digit in "10")
    wrong = 100 - ones["accuracy"]
    assert ones["lost"] == pytest.approx(wrong) and zeros["lost"] == pytest.approx(-ones["accuracy"])
    share = wrong / 100
    assert ones["standard_error"] == pytest.approx(100 * (share * (1 - share) / 19) ** 0.5)


def test_resumes_and_makes_its_table(tmp_path, monkeypatch):
    compared, path = comparison(), tmp_path / "r.json"
    compared.run(ResultFile(path, {}), [2, 4])
    for method in ("search", "score", "profile"):
        monkeypatch.setattr(compared, method, lambda *_: pytest.fail("what the file holds is done again"))
    file = ResultFile(path, {})
    compared.run(file, [2, 4])
    speed = compared.speed(file, 2)
    assert set(speed["images_per_s"]) == {name for name, run in file.runs.items() if "accuracy" in run}
    lines = tofu_mnist.table({**file.content, "speed": speed}).splitlines()
    assert len(lines) == 2 + 1 + 16 and lines[2].startswith("| 0 | no fusion |") and "| 0.0 % |" in lines[2]
    assert [line[2] for line in lines[3:]] == ["2"] * 8 + ["4"] * 8
    counts = ", ".join(map(str, file.runs["adaptive, searched|r=4"]["counts"]))
    assert f"| 4 | adaptive, searched: {counts} |" in lines[-1]
    run = file.runs["paper|r=4"]
    paper = next(line for line in lines if "| 4 | paper |" in line)
    assert f"| {run['accuracy']:.2f} | {run['lost']:.2f} ± {run['standard_error']:.2f} |" in paper


def test_trained_vit_is_what_it_is_said_to_be(shared):
    folder = shared / "data" / "vit_mnist"
    images, labels = tofu_mnist.load(folder)
    assert images.shape == (10000, 1, 28, 28) and labels.bincount().tolist()[:2] == [980, 1135]
    with torch.no_grad():
        right = tofu_mnist.load_model(folder)(images[:300]).argmax(-1) == labels[:300]
    assert right.sum().item() == 289


def test_made_up_mnist_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--data is the folder with model.safetensors and MNIST's t10k files"):
        tofu_mnist.load(tmp_path)
    pixels = np.arange(2 * 784, dtype=np.uint8)
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(16) + pixels.tobytes()))
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(8) + bytes([3, 9])))
    images, labels = tofu_mnist.load(tmp_path)
    assert labels.tolist() == [3, 9] and images.shape == (2, 1, 28, 28)
    assert images[0, 0, 3, 16].item() == pytest.approx((100 / 255 - 0.1307) / 0.3081)


@pytest.fixture
def photos(tmp_path):
    """32 made-up photos to train on, 8 to test on, in Hugging Face's layout."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    rows = []
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(png := io.BytesIO(), "png")
        rows.append({"image": {"bytes": png.getvalue(), "path": f"{i}.png"}, "label": i % 10})
    pd.DataFrame(rows[:32]).to_parquet(tmp_path / "train.parquet")
    pd.DataFrame(rows[32:]).to_parquet(tmp_path / "test.parquet")
    return tmp_path


def test_training_keeps_its_model_and_resumes(photos, tmp_path):
    from hf_ext import JumboForImageClassification

    keep = tmp_path / "kept" / "model"
    settings = dict(depth=2, epochs=2, batch=8, warmup=1, weight_decay=0.05, train_photos=32, test_photos=8, held_out=8)
    first = cifar.train("Jumbo J=6", 16, 1e-3, 0, settings, str(photos), 1, keep)
    [checkpoint] = keep.glob("checkpoint-*")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["global_step"] == 6  # 24 photos, batches of 8, 2 epochs
    again = cifar.train("Jumbo J=6", 16, 1e-3, 0, settings, str(photos), 1, keep)  # nothing is left to train
    assert {**again, "seconds": 0} == {**first, "seconds": 0} and again["seconds"] < first["seconds"]

    kept = JumboForImageClassification.from_pretrained(keep)
    plain = tofu_cifar.classifier(kept)
    images, labels = cifar.load(photos / "test.parquet", None)
    with torch.no_grad():
        logits = plain(images)
        assert max_error(logits, kept(images).logits) < 1e-5
    assert 100 * (logits.argmax(-1) == labels).double().mean().item() == pytest.approx(first["test"], abs=1e-3)
    # What is kept is not trained again.
    assert tofu_cifar.trained(keep, settings, photos / "missing", 1).embed_dim == 16


def test_held_out_photos_are_not_trained_on():
    held, rest = cifar.split(20, 5)
    assert len(held) == 5 and sorted([*held.tolist(), *rest.tolist()]) == list(range(20))
    assert torch.equal(held, cifar.split(20, 5)[0])
