"""mamba 6, gluonts 3198: decay parameters and sums stay fp32, output dtype = input dtype, float64 series accepted."""

import pytest
import timm
import torch

from tests.conftest import max_error
from ts_ext import JumboPatchTST

NAMES = ["test_adventurer", "test_jumbo_adventurer", "test_jumbo"]


def build(name: str) -> torch.nn.Module:
    return timm.create_model(name, num_classes=5, init="short").eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_autocast(name, dtype):
    net, image = build(name), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = net.forward_features(image)
        with torch.autocast("cpu", dtype):
            features = net.forward_features(image)
    assert max_error(features.float(), expected) < 3e-2


@pytest.mark.parametrize("name", NAMES)
def test_bf16_weights(name):
    net, image = build(name), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = net.forward_features(image)
        features = net.to(torch.bfloat16).forward_features(image.bfloat16())
    assert features.dtype == torch.bfloat16
    error = (features.float() - expected).square().mean().sqrt().item()
    assert error < 3e-2  # root mean square: one rounding of a value of 3 in bf16 is 8e-3 by itself


@pytest.mark.parametrize("name", NAMES[:2])
def test_training_under_autocast_gives_fp32_gradients(name):
    net = build(name).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(torch.randn(2, 3, 32, 32)).float().square().sum()
    loss.backward()
    for parameter_name, parameter in net.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all(), parameter_name


def test_float64_series():
    model = JumboPatchTST(2, 2, 40, 6, patch_len=8, stride=4, d_model=16, n_layers=2, n_heads=2, d_ff=24).eval()
    series = torch.randn(3, 2, 40, dtype=torch.float64) + 1e9
    with torch.no_grad():
        forecast = model(series)
        assert forecast.dtype == torch.float64
        assert max_error(forecast - 1e9, model(series - 1e9)) < 1e-4  # 1e9 in fp32 would have lost whole units
