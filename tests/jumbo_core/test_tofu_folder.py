"""Profiling a model folder on a folder of images: the command, its files, what it refuses."""

import json
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf
from torch import nn

from jumbo_core.models import JumboViT
from jumbo_core.tofu import FusionPlan, LinearityProfile, apply_tofu, is_fused
from jumbo_core.tofu.__main__ import main
from jumbo_core.tofu.folder import ImageBatches, find_images, load_model, model_transform
from jumbo_core.tofu.profiling import profile_folder


def make_images(folder, count=7, seed=0):
    """Photos of several sizes, endings and folders."""
    draw = np.random.default_rng(seed)
    for i in range(count):
        place = folder / ("deep/er" if i % 2 else "")
        place.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 255, (40 + i, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{i}.{['jpg', 'png', 'JPEG'][i % 3]}")
    return folder


def make_model(folder, name="test_vit", **options):
    model = timm.create_model(name, **{"num_classes": 3, "img_size": 64, **options}).eval()
    save_for_hf(model, folder, safe_serialization=True)
    return model


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images")


def test_find_images(images, tmp_path):
    (images / "notes.txt").write_text("no image")
    found = find_images(images)
    assert len(found) == 7 and found == sorted(found)
    assert {p.suffix for p in found} == {".jpg", ".png", ".JPEG"}
    with pytest.raises(FileNotFoundError, match=r"no image folder at .*missing"):
        find_images(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no image in .*empty or below it \(looked for .jpg, .jpeg, .png\)"):
        find_images(tmp_path / "empty")


def test_batches_are_drawn_once_and_by_seed(images):
    def means(**options):
        return [round(i.mean().item(), 6) for b in ImageBatches(images, to_tensor, **options) for i in b]

    def to_tensor(image):
        return torch.from_numpy(np.array(image.convert("RGB").resize((8, 8)))).permute(2, 0, 1).float()

    state = torch.random.get_rng_state()
    everything = means(batch_size=7)
    assert len(set(everything)) == 7
    assert torch.equal(torch.random.get_rng_state(), state)
    assert means(batch_size=7) == everything != means(batch_size=7, seed=1)
    loader = ImageBatches(images, to_tensor, batches=2, batch_size=2)
    assert [len(b) for b in loader] == [2, 2] and (loader.used, loader.found, len(loader)) == (4, 7, 2)
    assert means(batches=2, batch_size=2) == everything[:4]
    loader = ImageBatches(images, to_tensor, batch_size=3)  # the seventh would be alone
    assert [len(b) for b in loader] == [3, 3] and loader.used == 6


def test_a_broken_image_is_named(images):
    (images / "deep" / "broken.png").write_bytes((images / "deep/er/1.png").read_bytes()[:200])
    with pytest.raises(ValueError, match=r"cannot read image .*deep.broken\.png: "):
        list(ImageBatches(images, lambda image: torch.zeros(3, 4, 4)))


def test_one_image_is_too_few(tmp_path):
    with pytest.raises(ValueError, match=r"holds one image, 0\.jpg: at least 2 are needed"):
        ImageBatches(make_images(tmp_path, 1), lambda image: None)


@pytest.mark.parametrize("name", ["test_vit", "test_jumbo"])
def test_load_model(name, tmp_path):
    saved = make_model(tmp_path, name)
    model = load_model(tmp_path)
    x = torch.randn(2, 3, 64, 64)
    assert not model.training and torch.equal(model(x), saved(x))
    larger = load_model(tmp_path, image_size=(64, 96))
    assert larger.patch_embed.img_size == (64, 96) and larger(torch.randn(1, 3, 64, 96)).shape == (1, 3)
    assert torch.equal(larger.blocks[0].attn.qkv.weight, saved.blocks[0].attn.qkv.weight)


def test_what_is_no_model(tmp_path):
    with pytest.raises(
        ValueError, match=r"unknown model 'test_vitt': neither a folder nor .*similar names: .*test_vit"
    ):
        load_model("test_vitt")
    with pytest.raises(ValueError, match="nobody published weights for 'test_jumbo': give a model folder, or ask for"):
        load_model("test_jumbo")
    assert isinstance(load_model("test_jumbo", weights=False), JumboViT)
    with pytest.raises(FileNotFoundError, match=r"is no model folder: it has no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(
        ValueError, match=r"names no timm architecture: Transformers wrote it \(model_type 'vit'\).*transform="
    ):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"architecture": "test_vit"}')
    with pytest.raises(ValueError, match=r"timm cannot load .*: No suitable checkpoints found"):
        load_model(tmp_path)


@pytest.mark.parametrize("channels", [1, 3])
def test_transform_follows_the_model(channels):
    model = timm.create_model("test_vit", in_chans=channels, img_size=(32, 64))
    white = model_transform(model)(Image.new("RGB", (200, 100), "white"))
    assert white.shape == (channels, 32, 64) and white.eq(1).all()  # mean 0.5, deviation 0.5
    with pytest.raises(ValueError, match="images have 1 or 3 channels, the model wants 4"):
        model_transform(timm.create_model("test_vit", in_chans=4))


def test_a_model_that_does_not_say_how_its_images_look(images):
    model = JumboViT(32, 8, embed_dim=16, depth=2, num_heads=2, num_classes=3)
    message = r"JumboViT has no timm pretrained_cfg .*: give transform=\.\.\., a function image -> tensor"
    with pytest.raises(ValueError, match=message):
        model_transform(model)
    with pytest.raises(ValueError, match=message):
        profile_folder(model, images)


@pytest.mark.parametrize("name", ["test_vit", "test_jumbo"])
def test_profile_folder_is_the_profile_of_its_batches(name, images, tmp_path):
    from jumbo_core.tofu import linearity_profile

    model = make_model(tmp_path / "model", name)
    seen = []
    result = profile_folder(
        model,
        images,
        reduction=0.2,
        batch_size=3,
        seed=5,
        progress=lambda batches: seen.append(len(batches)) or batches,
    )
    batches = list(ImageBatches(images, model_transform(model), batch_size=3, seed=5))
    expected = linearity_profile(model, batches, seed=5)
    assert result.profile == expected and seen == [2]
    assert result.plan == FusionPlan.from_profile(expected, 0.2)
    assert result.report == apply_tofu(model, result.plan).report(result.profile.num_patches)
    assert result.report.saved > 0.1
    assert result.settings["images_found"] == 7 and result.settings["images_used"] == 6


@pytest.mark.parametrize("preset, op", [("paper", "mlerp"), ("uniform", "average")])
def test_constant_presets(preset, op, images, tmp_path):
    model = make_model(tmp_path / "model")  # 16 patches, 6 blocks
    plan = profile_folder(model, images, preset=preset, op=op, reduction=0.3).plan
    r = plan.counts[0]
    assert plan == (FusionPlan.paper(6, r) if preset == "paper" else FusionPlan.uniform(6, r, op))
    assert plan.saved(16) >= 0.3 > FusionPlan.paper(6, r - 1).saved(16)
    with pytest.raises(ValueError, match=r"reduction=0.9 is out of reach: r=8, half of 16 patches, saves 0\.8"):
        profile_folder(model, images, preset=preset, op=op, reduction=0.9)


def test_a_model_of_another_kind_by_its_own_transform(images):
    """Several outputs, no data config: what an adapter hands over."""

    class Wrapped(JumboViT):
        def forward(self, x):
            return (super().forward(x), None)

    model = Wrapped(32, 8, num_classes=3, embed_dim=16, depth=2, num_heads=2, multiplier=2, init="short")

    def transform(image):
        return torch.from_numpy(np.array(image.convert("RGB").resize((32, 32)))).permute(2, 0, 1) / 255

    result = profile_folder(model, images, transform=transform)
    assert result.report.num_patches == 16 and not is_fused(model)
    with pytest.raises(TypeError, match="token fusion does not know Linear"):
        profile_folder(nn.Linear(2, 2), images)
    with pytest.raises(ValueError, match="preset must be one of 'adaptive', 'paper', 'uniform', got 'best'"):
        profile_folder(model, images, preset="best")


def test_command(images, tmp_path, capsys, monkeypatch):
    model = make_model(tmp_path / "model")
    arguments = ["profile", str(tmp_path / "model"), "--images", str(images), "--out", str(tmp_path / "out/put")]
    monkeypatch.setattr(sys, "argv", ["tofu", *arguments])
    main()
    out, err = capsys.readouterr()
    plan = FusionPlan.from_json(tmp_path / "out/put/plan.json")
    assert len(plan.counts) == 6 and plan.saved(16) >= 0.35
    report = json.loads((tmp_path / "out/put/report.json").read_text())
    handle = apply_tofu(model, plan)
    assert report["tokens"] == handle.report().tokens and report["clamps"] == []
    assert report["multiply_adds"] == handle.report().multiply_adds < report["unfused"]
    assert report["saved"] == {"multiply_adds": handle.report().saved, "token_layers": plan.saved(16)}
    assert (report["images_found"], report["images_used"], report["seed"]) == (7, 7, 0)
    assert report["command"].endswith(" ".join(arguments)) and report["source"] == arguments[1]
    assert LinearityProfile.from_json(tmp_path / "out/put/profile.json").num_patches == 16
    text = (tmp_path / "out/put/report.txt").read_text()
    assert text in out and f"{handle.report()}" in text and "token-layers saved: 3" in text
    with Image.open(tmp_path / "out/put/profile.png") as plot:
        assert plot.size[0] > 400
    assert "batches: 100%" in err


@pytest.mark.parametrize(
    "change, message",
    [
        (["--reduction", "0.97"], "error: reduction=0.97 is out of reach: halving in every block saves 0.8"),
        (["--images", "nowhere"], "error: no image folder at nowhere"),
        (["--image-size", "1", "2", "3"], "error: --image-size takes a side, or height and width, got [1, 2, 3]"),
        (["--batch-size", "1"], "error: batch_size must be an integer of at least 2, got 1"),
    ],
)
def test_command_refusals(change, message, images, tmp_path, capsys):
    make_model(tmp_path / "model")
    with pytest.raises(SystemExit) as stop:
        main(["profile", str(tmp_path / "model"), "--images", str(images), "--out", str(tmp_path / "out"), *change])
    assert stop.value.code == 1 and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_command_on_a_model_it_does_not_know(images, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["profile", "test_resnet", "--random-weights", "--images", str(images)])
    assert "error: token fusion does not know ResNet" in capsys.readouterr().err
