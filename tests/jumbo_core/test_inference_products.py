"""How a model optimised for inference computes: rounding, int8 products, other ways where there are none."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from jumbo_core import inference_report
from jumbo_core.jumbo import lowlatency
from jumbo_core.jumbo.lowlatency import Int8Linear, int8_kernel, quantize_rows
from tests.conftest import max_error
from tests.jumbo_core.inference_models import TOLERANCE, images, optimised, relative, trained

needs_int8 = pytest.mark.skipif(not int8_kernel(), reason="this processor has no exact int8 products")


def test_rows_are_rounded_to_half_a_step():
    x = torch.randn(4, 300) * torch.tensor([[1e-3], [1.0], [1e4], [0.0]])
    rounded, scale = quantize_rows(x)
    assert rounded.dtype == torch.int8 and rounded.abs().amax(1).tolist() == [127, 127, 127, 0]
    assert ((rounded * scale - x).abs() <= 0.5001 * scale).all()


@needs_int8
def test_products_are_those_of_the_rounded_numbers():
    layer, x = Int8Linear.of(nn.Linear(96, 40)), torch.randn(5, 96)
    rounded, scale = quantize_rows(x)
    exact = (rounded * scale).double() @ (layer.weight.double() * layer.scale.double()[:, None]).t() + layer.bias
    assert max_error(layer(x).double(), exact) < 1e-5


@contextmanager
def defaulting_to(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@needs_int8
@pytest.mark.parametrize(
    "state",
    [
        lambda: defaulting_to(torch.bfloat16),
        lambda: defaulting_to(torch.float16),
        lambda: defaulting_to(torch.float64),
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        FakeTensorMode,
        torch.inference_mode,
    ],
    ids=["bfloat16", "float16", "float64", "autocast", "meta", "fake", "inference"],
)
def test_the_processor_is_judged_whatever_state_the_first_call_finds(state):
    lowlatency._multiplies_exactly.cache_clear()
    with state():
        assert int8_kernel()
    lowlatency._multiplies_exactly.cache_clear()
    with state(), torch.no_grad():
        torch.func.vmap(lambda x: x if int8_kernel() else None)(torch.ones(2))
    assert int8_kernel()


@needs_int8
def test_all_that_is_multiplied_lies_beside_the_weights():
    layer = Int8Linear.of(nn.Linear(64, 32))
    with torch.inference_mode(), torch.device("meta"):
        layer(torch.randn(3, 64, device="cpu"))
    assert layer._zero.device == layer.weight.device


@needs_int8
def test_a_sample_does_not_depend_on_its_batch():
    fast, x = optimised(trained()), images(8)
    x[1:] *= 30
    with torch.inference_mode():
        assert max_error(fast(x)[:1], fast(x[:1])) < 1e-5


def test_without_int8_products_the_weights_are_expanded(monkeypatch):
    model, x = trained(), images()
    monkeypatch.setattr(lowlatency, "int8_kernel", lambda: False)
    with pytest.warns(UserWarning, match="no exact int8 products"):
        fast = optimised(model)
    assert inference_report(fast)[0].computes == "float32"
    with torch.inference_mode():
        assert 0 < relative(fast(x), model(x)) < TOLERANCE["int8"] / 2  # inputs are not rounded


def test_bfloat16_expansion_of_a_gpu(monkeypatch):
    model, x = trained(), images()
    monkeypatch.setattr(Int8Linear, "kind", lambda self: torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = optimised(model)
    with torch.inference_mode():
        assert fast(x).dtype == torch.float32 and 0 < relative(fast(x), model(x)) < TOLERANCE["int8"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("batch", [1, 3])
def test_nan_and_infinity_stay_visible(batch, value):
    fast, x = optimised(trained()), images(batch)
    x[0, 0, 0, 0] = value
    with torch.inference_mode():
        y = fast(x)
        wide = torch.randn(batch, fast.encoder.jumbo_mlp.fc1.in_features)
        wide[0, 1] = value
        alone = fast.encoder.jumbo_mlp(wide)
    assert y[0].isnan().all() and y[1:].isfinite().all()
    assert not alone[0].isfinite().any() and alone[1:].isfinite().all()
