"""The two forms of the chunked scan: which decay takes which, and that both are right up to the border and beyond."""

import pytest
import torch

from jumbo_core.linear import chunks, factors, pairs, ssd_scan, ssd_scan_reference
from jumbo_core.linear.steps import FLOOR, Steps
from tests.conftest import max_error
from tests.jumbo_core.scan_inputs import scan_inputs


def inputs_with_decay(total: float, length: int = 64, chunk: int = 32) -> dict[str, torch.Tensor]:
    """fp64 inputs whose fastest head loses exp(-total) in its worst chunk."""
    inputs = scan_inputs(2, length, 3, 8, 4, initial_state=True)
    inputs["dt"] = torch.rand_like(inputs["dt"]) + 0.5
    worst = (inputs["dt"] * -inputs["A"]).unflatten(1, (-1, chunk)).sum(2).max()
    inputs["A"] = inputs["A"] * (total / worst)
    return inputs


def steps_of(inputs, dtype, chunk=32) -> Steps:
    x, dt, A, B, C = (inputs[name].to(dtype) for name in ("x", "dt", "A", "B", "C"))
    return Steps.cut(x, dt, A, B, C, 0, x.shape[1], chunk, dtype)


@pytest.mark.parametrize(
    "dtype, total, form",
    [
        (torch.float32, 1, factors),
        (torch.float32, 119, factors),
        (torch.float32, 121, pairs),
        (torch.float64, 1190, factors),
        (torch.float64, 1210, pairs),
    ],
)
def test_which_form(dtype, total, form):
    with torch.no_grad():
        assert chunks.form_of(steps_of(inputs_with_decay(total), dtype)) is form


def test_a_recording_takes_pairs():
    steps = steps_of(inputs_with_decay(1), torch.float32)
    assert torch.is_grad_enabled() and chunks.form_of(steps) is pairs


@pytest.mark.parametrize("total", [0.5, 30, 119, 121, 1000, 20000])
@pytest.mark.parametrize("form", ["chosen", "pairs"])
def test_fp32_outputs_and_gradients_equal_the_reference(total, form, monkeypatch):
    if form == "pairs":
        monkeypatch.setattr(factors, "fit", lambda steps: False)
    double = inputs_with_decay(total)
    single = {name: tensor.float().requires_grad_() for name, tensor in double.items()}
    double = {name: tensor.detach().float().double().requires_grad_() for name, tensor in double.items()}
    weight = torch.randn(double["x"].shape, dtype=torch.float64)
    results = []
    for inputs, options in ((double, None), (single, {"chunk_size": 32})):
        y, state = ssd_scan_reference(**inputs) if options is None else ssd_scan(**inputs, **options)
        ((y * weight.to(y.dtype)).sum() + state.sin().sum()).backward()
        results.append((y.double(), state.double()))
    for got, expected in zip(results[1], results[0], strict=True):
        assert max_error(got, expected) < 1e-5 * max(1.0, expected.abs().max().item())
    for name in double:
        got, expected = single[name].grad.double(), double[name].grad
        assert max_error(got, expected) < 1e-5 * max(1.0, expected.abs().max().item()), name


@pytest.mark.parametrize("total", [5, 5000])
def test_gradcheck_of_either_form(total):
    inputs = inputs_with_decay(total, length=8, chunk=4)
    with torch.no_grad():
        form = chunks.form_of(steps_of(inputs, torch.float64, 4))
    assert form is (factors if total == 5 else pairs)
    names, tensors = list(inputs), [tensor.requires_grad_() for tensor in inputs.values()]

    def run(*values):
        return ssd_scan(**dict(zip(names, values, strict=True)), chunk_size=4)

    assert torch.autograd.gradcheck(run, tensors)


def test_forms_change_inside_of_a_sequence():
    """A burst of long steps in the middle takes pairs, the mild steps around it factors; states pass between them."""
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs_with_decay(20, length=96).items()}
    with torch.no_grad():
        inputs["dt"][:, 32:64] *= 10
    weight = torch.randn(inputs["x"].shape, dtype=torch.float64)
    old, chunks.PAIRS_AT_ONCE = chunks.PAIRS_AT_ONCE, 1  # a run of its own for every chunk
    try:
        single = {name: tensor.detach().float().requires_grad_() for name, tensor in inputs.items()}
        y, state = ssd_scan(**single, chunk_size=32)
        ((y * weight.float()).sum() + state.sum()).backward()
    finally:
        chunks.PAIRS_AT_ONCE = old
    expected, last = ssd_scan_reference(**inputs)
    ((expected * weight).sum() + last.sum()).backward()
    for got, wanted in ((y, expected), (state, last)):
        assert max_error(got.double(), wanted) < 1e-5 * wanted.abs().max().item()
    for name in inputs:
        scale = max(1.0, inputs[name].grad.abs().max().item())
        assert max_error(single[name].grad.double(), inputs[name].grad) < 1e-5 * scale, name


def test_the_floors_leave_factors_that_are_ordinary_numbers():
    for dtype, floor in FLOOR.items():
        info = torch.finfo(dtype)
        assert torch.tensor(floor).double().exp() > info.tiny * 1e10
        assert torch.tensor(-floor).double().exp() < info.max / 1e10
