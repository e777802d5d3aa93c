"""mamba 6, gluonts 3198 for series: every head under autocast and in half precision, float64 in and float64 out."""

import copy

import pytest
import torch

from tests.conftest import max_error
from ts_ext import JumboPatchTST

SERIES = dict(patch_len=8, stride=4, d_model=16, n_layers=2, n_heads=2, d_ff=24, multiplier=2)
TASKS = {
    "forecast": dict(c_out=2, pred_dim=6),
    "quantiles": dict(c_out=2, pred_dim=6, quantiles=(0.1, 0.5, 0.9)),
    "classify": dict(c_out=3, head="classify"),
    "regress": dict(c_out=1, head="regress"),
}
VARIANTS = [{}, dict(channels="mixing"), dict(norm="BatchNorm"), dict(encoder="linear")]


def build(task: str, **options) -> JumboPatchTST:
    return JumboPatchTST(**{**dict(c_in=2, seq_len=40), **SERIES, **TASKS[task], **options}).eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("task", TASKS)
def test_half_precision(task, dtype):
    for options in VARIANTS:
        model, x = build(task, **options), torch.randn(4, 2, 40)
        with torch.no_grad():
            expected = model(x)
            with torch.autocast("cpu", dtype):
                out = model(x)
            assert out.dtype == torch.float32 and max_error(out, expected) < 3e-2, options
            half = copy.deepcopy(model).to(dtype)(x.to(dtype))
        assert half.dtype == dtype
        assert (half.float() - expected).square().mean().sqrt() < 3e-2, options


def test_half_precision_pretraining():
    x = torch.randn(4, 2, 40)
    model = JumboPatchTST(2, 1, 40, head="pretrain", **SERIES).eval()
    expected = model(x).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).loss
    assert loss.dtype == torch.float32 and abs(loss - expected) < 3e-2 * expected
    half = copy.deepcopy(model).bfloat16()(x.bfloat16()).loss
    assert half.dtype == torch.float32 and abs(half - expected) < 3e-2 * expected


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("masked", [False, True])
def test_float64_series(task, masked):
    """The offset goes before the single precision of the weights begins; 1e9 in fp32 would have lost whole units."""
    model, x = build(task), torch.randn(3, 2, 40, dtype=torch.float64)
    mask = torch.rand(3, 2, 40) < 0.8 if masked else None
    with torch.no_grad():
        out, far = model(x, mask), model(x + 1e9, mask)
    assert out.dtype == far.dtype == torch.float64
    assert max_error(far - 1e9 if task in ("forecast", "quantiles") else far, out) < 1e-4
