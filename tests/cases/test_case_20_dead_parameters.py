"""timm 1214, MONAI 3454: after one backward no trainable parameter is without a gradient."""

import pytest
import timm
import torch

from ts_ext import JumboPatchTST

HEADS = {
    "jumbo": {},
    "token": {"global_pool": "token"},
    "unshared token": {"share_jumbo_ffn": False, "layer_scale": 1e-4, "global_pool": "token"},
    "avg": {"global_pool": "avg"},
    "all tokens": {"global_pool": "", "num_classes": 0},
    "registers baseline": {"multiplier": 0, "registers": 16},
    "registers and jumbo": {"registers": 3},
    "unshared": {"share_jumbo_ffn": False, "layer_scale": 1e-4},
    "unshared avg": {"share_jumbo_ffn": False, "layer_scale": 1e-4, "global_pool": "avg"},
    "one block avg": {"depth": 1, "global_pool": "avg"},
}


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """No weight at zero, so that a gradient of exactly zero means that a parameter cannot matter."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def without_gradient(model: torch.nn.Module) -> list[str]:
    return [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]


@pytest.mark.parametrize("head", HEADS)
def test_classifier(head):
    model = randomised(timm.create_model("test_jumbo", **{"num_classes": 5, "drop_path_rate": 0.0, **HEADS[head]}))
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert without_gradient(model) == []


@pytest.mark.parametrize("out_indices", [[0], [-1], [0, 1, 2]])
@pytest.mark.parametrize("options", [{}, {"share_jumbo_ffn": False}, {"multiplier": 0, "registers": 4}])
def test_feature_maps(out_indices, options):
    options = dict(features_only=True, out_indices=out_indices, depth=3, drop_path_rate=0.0, **options)
    net = randomised(timm.create_model("test_jumbo", **options))
    sum(feature.square().sum() for feature in net(torch.randn(2, 3, 32, 32))).backward()
    assert without_gradient(net) == []


@pytest.mark.parametrize(
    "name", [f"jumbo_{size}_patch16_224" for size in ("pico", "nano", "tiny", "small", "base", "large")]
)
def test_every_registered_model_at_tiny_size(name):
    small = dict(img_size=32, patch_size=16, num_classes=5, embed_dim=24, num_heads=2, depth=2)
    model = randomised(timm.create_model(name, drop_path_rate=0.0, **small))
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert without_gradient(model) == []


@pytest.mark.parametrize("name", timm.list_models("*adventurer*"))
def test_every_linear_model_at_tiny_size(name):
    small = dict(img_size=32, patch_size=16, num_classes=5, embed_dim=24, depth=2, d_state=8, head_dim=8)
    model = randomised(timm.create_model(name, **small))
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert without_gradient(model) == []


def test_the_check_sees_a_dead_parameter(monkeypatch):
    monkeypatch.setattr("jumbo_core.jumbo.JumboEncoder.freeze_unreachable", lambda self, reads="patches": None)
    for pool in ("avg", "token"):
        model = randomised(timm.create_model("test_jumbo", num_classes=5, global_pool=pool, drop_path_rate=0.0))
        model(torch.randn(2, 3, 32, 32)).square().sum().backward()
        assert without_gradient(model)


SERIES = dict(patch_len=8, stride=4, d_model=16, n_layers=2, n_heads=2, d_ff=24, multiplier=2, dropout=0.0)


@pytest.mark.filterwarnings("ignore:.*no target_channels:UserWarning")
@pytest.mark.parametrize("c_out", [3, 1])  # one forecast per channel; a learned mixture of them
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"multiplier": 0, "registers": 16},
        {"registers": 3},
        {"share_jumbo_ffn": False, "layer_scale": 1e-4},
        {"affine": True, "init": "released"},
        {"n_layers": 1},
    ],
)
def test_series(c_out, options):
    model = randomised(JumboPatchTST(3, c_out, 40, 6, **{**SERIES, **options}))
    model(torch.randn(4, 3, 40)).square().sum().backward()
    assert without_gradient(model) == []
