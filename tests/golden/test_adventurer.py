"""The released Adventurer code's outputs, block by block, through core and timm."""

import logging

import pytest
import timm
import torch

from jumbo_core.models import AdventurerViT, load_released
from tests.conftest import Golden, max_error


@pytest.fixture(scope="module")
def golden(shared) -> Golden:
    return Golden(shared / "golden" / "adventurer_d5.safetensors")


def arguments(golden: Golden) -> dict:
    given = golden.arguments
    return dict(
        img_size=given["img_size"], patch_size=given["patch_size"], embed_dim=given["embed_dim"], depth=given["depth"],
        d_state=given["mamba_d_state"], head_dim=given["headdim"], num_classes=given["num_classes"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(golden) -> AdventurerViT:
    model = AdventurerViT(**arguments(golden)).eval()
    report = load_released(model, golden.path)
    assert report.missing == report.unexpected == report.ignored == []
    return model


def test_flip_rule_of_the_released_code_is_set_and_said(golden, caplog):
    model = AdventurerViT(**arguments(golden))
    assert model.encoder.flip == "alternate" and model.encoder.flipped == {1, 3}
    with caplog.at_level(logging.INFO, "jumbo_core"):
        load_released(model, golden.path)
    assert model.encoder.flip == (2, 3) == golden.arguments["flip_layers"]
    assert "flip set to blocks (2, 3)" in caplog.text


def test_a_refused_file_changes_nothing(golden):
    model = AdventurerViT(**arguments(golden))
    with pytest.raises(ValueError, match="another shape"):
        load_released(model, {**golden.weights, "norm_f.weight": torch.ones(7)})
    assert model.encoder.flip == "alternate"


def test_timms_saved_folder_knows_the_rule(golden, tmp_path):
    model = timm.create_model("test_adventurer", **arguments(golden)).eval()
    load_released(model, golden.path)
    timm.models.save_for_hf(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert max_error(again(golden["input"]), golden["logits"]) < 1e-5


@pytest.mark.parametrize("grad", [False, True])
def test_features_logits_and_every_block(model, golden, grad):
    with torch.set_grad_enabled(grad):
        assert max_error(model.forward_features(golden["input"]), golden["features"]) < 1e-5
        assert max_error(model(golden["input"]), golden["logits"]) < 1e-5
        final, maps = model.forward_intermediates(golden["input"], return_prefix_tokens=True, output_fmt="NLC")
    for (patches, last), expected in zip(maps, golden.blocks, strict=True):
        assert max_error(torch.cat([patches, last], dim=1), expected) < 1e-5
    assert max_error(final, golden["features"]) < 1e-5


def test_the_other_flip_rule_would_not_do(golden, model):
    other = AdventurerViT(**arguments(golden)).eval()
    other.load_state_dict(model.state_dict())
    assert max_error(other(golden["input"]), golden["logits"]) > 1e-3


def test_through_timm(golden, tmp_path):
    """create_model builds the same shape from keywords and loads the file by timm's own loader."""
    path = tmp_path / "released.pth"
    torch.save({"model": golden.weights}, path)
    overlay = dict(file=str(path), num_classes=golden.arguments["num_classes"])
    options = {**arguments(golden), "flip": (2, 3), "pretrained": True, "pretrained_cfg_overlay": overlay}
    net = timm.create_model("test_adventurer", features_only=True, out_indices=[-1], **options).eval()
    (feature_map,) = net(golden["input"])
    assert max_error(feature_map.flatten(2), golden.blocks[-1][:, :-1].transpose(1, 2)) < 1e-5
    classifier = timm.create_model("test_adventurer", **options).eval()
    assert max_error(classifier(golden["input"]), golden["logits"]) < 1e-5


def test_timm_sets_the_flip_rule_too(golden, tmp_path):
    path = tmp_path / "released.pth"
    torch.save(golden.weights, path)
    overlay = dict(file=str(path), num_classes=golden.arguments["num_classes"])
    net = timm.create_model(
        "test_adventurer", pretrained=True, pretrained_cfg_overlay=overlay, **arguments(golden)
    ).eval()
    assert max_error(net(golden["input"]), golden["logits"]) < 1e-5
