"""The released Jumbo code's outputs, block by block, through core and timm."""

import pytest
import timm
import torch

from jumbo_core.models import JumboViT, load_released
from tests.conftest import max_error


@pytest.fixture(scope="module", params=["no_grad", "grad"])
def grad_mode(request):
    """Both paths of the block: updates in place (no_grad) and concatenation (grad)."""
    return torch.no_grad if request.param == "no_grad" else torch.enable_grad


@pytest.fixture(scope="module")
def model(golden) -> JumboViT:
    model = JumboViT(**golden.arguments).eval()
    report = load_released(model, golden.path)
    assert report.missing == report.unexpected == []
    assert report.ignored == ["cls_token"]
    return model


def test_features_and_logits(model, golden, grad_mode):
    with grad_mode():
        assert max_error(model.forward_features(golden["input"]), golden["features"]) < 1e-5
        assert max_error(model(golden["input"]), golden["logits"]) < 1e-5


def test_every_block(model, golden, grad_mode):
    with grad_mode():
        final, maps = model.forward_intermediates(golden["input"], return_prefix_tokens=True, output_fmt="NLC")
    for (patches, prefix), expected in zip(maps, golden.blocks, strict=True):
        assert max_error(torch.cat([prefix, patches], dim=1), expected) < 1e-5
    assert max_error(final, golden["features"]) < 1e-5


def test_through_timm_features_only(golden, tmp_path):
    """create_model builds the same shape from keywords, loads the file by timm's own loader, and gives the last map."""
    overlay = dict(file=golden_as_pth(golden, tmp_path), num_classes=golden.arguments["num_classes"])
    arguments = {**golden.arguments, "pretrained_cfg_overlay": overlay}
    net = timm.create_model("test_jumbo", pretrained=True, features_only=True, out_indices=[-1], **arguments).eval()
    (feature_map,) = net(golden["input"])
    j = golden.arguments["multiplier"]
    expected = golden.blocks[-1][:, j:].transpose(1, 2)
    assert max_error(feature_map.flatten(2), expected) < 1e-5

    classifier = timm.create_model("test_jumbo", pretrained=True, **arguments).eval()
    assert max_error(classifier(golden["input"]), golden["logits"]) < 1e-5


def golden_as_pth(golden, folder) -> str:
    path = folder / "released.pth"
    torch.save(golden.weights, path)
    return str(path)
