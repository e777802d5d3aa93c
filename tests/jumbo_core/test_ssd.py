"""The scan: gradients, states, masks, precision, memory, compile and export, errors."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jumbo_core.linear import ssd_scan, ssd_scan_reference
from tests.conftest import max_error
from tests.jumbo_core.scan_inputs import loop, scan_inputs


def test_reference_equals_the_loop():
    inputs = scan_inputs(2, 9, 3, 4, 5, initial_state=True)
    for got, expected in zip(ssd_scan_reference(**inputs), loop(**inputs), strict=True):
        assert max_error(got, expected) < 1e-12


@pytest.mark.parametrize("chunk", [5, 16, 64])
@pytest.mark.parametrize("skip", [True, False])
def test_gradcheck(chunk, skip):
    inputs = scan_inputs(2, 17, 2, 3, 4, initial_state=True, skip=skip)
    names = list(inputs)
    tensors = [inputs[name].requires_grad_() for name in names]

    def run(*values):
        return ssd_scan(**dict(zip(names, values, strict=True)), chunk_size=chunk)

    assert torch.autograd.gradcheck(run, tensors)


@pytest.mark.parametrize("length", [64, 197])
def test_fp32_gradients_equal_the_reference(length):
    double = scan_inputs(2, length, 2, 8, 4, initial_state=True)
    single = {name: tensor.float().requires_grad_() for name, tensor in double.items()}
    double = {name: tensor.requires_grad_() for name, tensor in double.items()}
    weight = torch.randn(2, length, 2, 8, dtype=torch.float64)
    for inputs, scan in ((double, ssd_scan_reference), (single, ssd_scan)):
        y, state = scan(**inputs)
        ((y * weight.to(y.dtype)).mean() + state.mean()).backward()
    for name in double:
        assert max_error(single[name].grad.double(), double[name].grad) < 1e-5, name


def test_gradients_without_an_initial_state_and_with_a_mask():
    inputs = {name: t.requires_grad_() for name, t in scan_inputs(2, 11, 2, 3, 4).items()}
    mask = torch.rand(2, 11) > 0.3
    for scan in (ssd_scan_reference, ssd_scan):
        y, state = scan(**inputs, mask=mask)
        (y.sin().sum() + state.cos().sum()).backward()
    # Both added the same gradient: half of the sum is one of them, and padding received none.
    x = inputs["x"].grad
    assert not x[~mask].any() and x[mask].abs().min() > 0
    single = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
    y, state = ssd_scan(**single, mask=mask)
    (y.sin().sum() + state.cos().sum()).backward()
    for name in inputs:
        assert max_error(2 * single[name].grad, inputs[name].grad) < 1e-10, name


def test_long_decay_keeps_its_digits():
    """Differences of fp32 running sums have lost 1e-4 after sums in the thousands: the segment sums must not have."""
    inputs = scan_inputs(1, 256, 1, 4, 4)
    inputs["dt"][:, :128] = 8.0  # running sums go into the thousands, then decays that matter follow
    inputs["dt"][:, 128:] = 0.01
    expected, _ = loop(**inputs)
    y, _ = ssd_scan(**{name: t.float() for name, t in inputs.items()}, chunk_size=256)
    scale = expected[:, 128:].std()
    assert max_error(y[:, 128:].double() / scale, expected[:, 128:] / scale) < 1e-6
    sums = (inputs["dt"] * inputs["A"]).float().cumsum(1)
    naive = (sums[:, 255] - sums[:, 200]).double()
    exact = (inputs["dt"] * inputs["A"])[:, 201:].sum(1)
    assert max_error(naive, exact) > 1e-5  # so this input would show it


def test_nan_is_not_lost():
    for name in ("x", "dt", "A", "B", "C"):
        inputs = {k: v.float() for k, v in scan_inputs(1, 70, 1, 2, 2, skip=False).items()}
        inputs[name].view(-1)[0] = float("nan")
        assert ssd_scan(**inputs)[0].isnan().any(), name


@pytest.mark.parametrize("extreme", [1e-30, 1e4, 1e30])
def test_extreme_steps_stay_finite(extreme):
    inputs = {name: t.float() for name, t in scan_inputs(1, 70, 2, 4, 4).items()}
    inputs["dt"] = torch.full_like(inputs["dt"], extreme)
    inputs["x"] = inputs["x"] / max(extreme, 1)
    inputs = {name: t.requires_grad_() for name, t in inputs.items()}
    y, state = ssd_scan(**inputs)
    (y.sum() + state.sum()).backward()
    assert y.isfinite().all() and state.isfinite().all()
    assert all(t.grad.isfinite().all() for t in inputs.values())


def test_state_continues_a_sequence_and_is_not_modified():
    inputs = scan_inputs(2, 50, 2, 3, 4, initial_state=True)
    start = inputs["initial_state"].clone()
    whole, last = ssd_scan(**inputs, chunk_size=16)
    assert torch.equal(inputs["initial_state"], start)
    sequence = ("x", "dt", "B", "C")
    first = {k: v[:, :23] if k in sequence else v for k, v in inputs.items()}
    y1, middle = ssd_scan(**first, chunk_size=16)
    kept = middle.clone()
    second = {k: v[:, 23:] if k in sequence else v for k, v in inputs.items()} | {"initial_state": middle}
    y2, end = ssd_scan(**second, chunk_size=16)
    assert torch.equal(middle, kept)
    assert max_error(torch.cat([y1, y2], dim=1), whole) < 1e-12 and max_error(end, last) < 1e-12


def test_one_step_does_not_alias_the_initial_state():
    inputs = scan_inputs(1, 1, 1, 2, 2, initial_state=True)
    _, state = ssd_scan(**inputs)
    before = inputs["initial_state"].clone()
    state.zero_()
    assert torch.equal(inputs["initial_state"], before)


def test_backward_inside_autocast_is_fp32_too():
    inputs = {k: v.float().requires_grad_() for k, v in scan_inputs(2, 70, 2, 8, 8).items()}
    grads = []
    for enabled in (False, True):
        y, _ = ssd_scan(**inputs)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            grads.append(torch.autograd.grad(y.sin().sum(), list(inputs.values())))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_an_empty_batch():
    inputs = {k: v.float() for k, v in scan_inputs(0, 9, 2, 3, 4).items()}
    y, state = ssd_scan(**inputs)
    assert y.shape == (0, 9, 2, 3) and state.shape == (0, 2, 3, 4)


def test_mask_ignores_padding_wherever_it_is():
    inputs = scan_inputs(1, 12, 2, 3, 4)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 0]], dtype=torch.bool)
    real = {k: v[:, mask[0]] if k in ("x", "dt", "B", "C") else v for k, v in inputs.items()}
    expected, state = ssd_scan(**real)
    for bad in (1e4, math.inf, math.nan):
        spoiled = {k: v.masked_fill(~mask.view(1, 12, *[1] * (v.ndim - 2)), bad) if k in ("x", "dt", "B", "C") else v
                   for k, v in inputs.items()}  # fmt: skip
        y, last = ssd_scan(**spoiled, mask=mask)
        assert max_error(y[:, mask[0]], expected) < 1e-12 and max_error(last, state) < 1e-12
        assert not y[:, ~mask[0]].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 5e-3), (torch.bfloat16, 3e-2)])
def test_half_precision(dtype, tolerance):
    """Inputs of unit variance, rounded first, so that what is measured is the scan's own error; sums stay fp32."""
    inputs = scan_inputs(2, 197, 2, 16, 16)
    halves = {k: v.to(dtype) for k, v in inputs.items()} | {"A": inputs["A"].float(), "dt": inputs["dt"].float()}
    expected, _ = ssd_scan(**{k: v.double() for k, v in halves.items()})
    y, state = ssd_scan(**halves)
    assert y.dtype == dtype and state.dtype == torch.float32
    assert max_error(y.double() / expected.std(), expected / expected.std()) < tolerance
    with torch.autocast("cpu", dtype):
        under, _ = ssd_scan(**halves)
    assert torch.equal(under, y)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor any operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_memory_holds_no_decay_matrices_of_the_whole_sequence():
    """Decay matrices of all chunks would be L * q * H = 8.4 M numbers; B expanded per head 4.2 M. Inputs are 0.5 M."""
    inputs = {k: v.float().requires_grad_() for k, v in scan_inputs(1, 8192, 16, 4, 32).items()}
    with Largest() as seen:
        y, _ = ssd_scan(**inputs, chunk_size=64)
        saved = y.grad_fn.saved_tensors
        y.sum().backward()
    assert seen.numel <= 1 << 20
    assert sum(t.numel() for t in saved if t is not None) < 1.1 * (
        sum(t.numel() for t in inputs.values()) + 8192 // 64 * 16 * 4 * 32  # and a state per chunk
    )


def test_a_compiled_training_graph_keeps_no_decay_matrices():
    inputs = {k: v.float().requires_grad_() for k, v in scan_inputs(1, 512, 8, 4, 4).items()}
    names, saved = list(inputs), []

    def run(*values):
        return ssd_scan(**dict(zip(names, values, strict=True)), chunk_size=64)[0]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        compiled(*inputs.values()).sum().backward()
    assert 0 < sum(saved) < 512 * 64 * 8  # all decay matrices


@pytest.mark.parametrize("train", [False, True])
def test_compile_full_graph(train):
    inputs = {k: v.float().requires_grad_(train) for k, v in scan_inputs(2, 37, 2, 4, 4).items()}
    names = list(inputs)

    def run(*values):
        return ssd_scan(**dict(zip(names, values, strict=True)), chunk_size=16)[0]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(train):
        y, expected = compiled(*inputs.values()), run(*inputs.values())
    assert max_error(y, expected) < 1e-5
    if train:
        got = torch.autograd.grad(y.sin().sum(), list(inputs.values()))
        want = torch.autograd.grad(expected.sin().sum(), list(inputs.values()))
        assert all(max_error(a, b) < 1e-4 for a, b in zip(got, want, strict=True))


def test_export_with_dynamic_batch():
    class Scan(torch.nn.Module):
        def forward(self, x, dt, A, B, C):
            return ssd_scan(x, dt, A, B, C, chunk_size=16)[0]

    inputs = {k: v.float() for k, v in scan_inputs(2, 37, 2, 4, 4, skip=False).items()}
    batch = torch.export.Dim("batch", min=1, max=64)
    shapes = {k: None if k == "A" else {0: batch} for k in inputs}
    program = torch.export.export(Scan(), tuple(inputs.values()), dynamic_shapes=shapes)
    for size in (1, 5):
        other = {k: v.float() for k, v in scan_inputs(size, 37, 2, 4, 4, skip=False).items()}
        assert max_error(program.module()(*other.values()), ssd_scan(**other)[0]) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dt=torch.ones(2, 5, 3)), r"dt must have shape \(2, 5, 2\).*got \(2, 5, 3\)"),
        (dict(A=-torch.ones(3)), r"A must have shape \(2,\)"),
        (dict(B=torch.ones(2, 5, 1, 4)), r"B must be \(batch, length, state\)"),
        (dict(C=torch.ones(2, 5, 3)), r"C must have shape \(2, 5, 4\)"),
        (dict(D=torch.ones(1)), r"D must have shape \(2,\)"),
        (dict(initial_state=torch.ones(2, 2, 4, 3)), r"initial_state must have shape \(2, 2, 3, 4\)"),
        (dict(mask=torch.ones(2, 4, dtype=torch.bool)), r"mask must have shape \(2, 5\)"),
        (dict(mask=torch.ones(2, 5)), "mask must be bool"),
        (dict(x=torch.ones(2, 0, 2, 3)), "length > 0"),
        (dict(x=torch.ones(2, 5, 2, 3, dtype=torch.long)), "floating point, got torch.int64"),
        (dict(chunk_size=0), "chunk_size must be an integer of at least 1, got 0"),
        (dict(chunk_size="big"), "chunk_size must be"),
        (dict(A=torch.tensor([-1.0, 0.5])), r"A must not be positive.*got 0.5"),
        (dict(dt=torch.full((2, 5, 2), -0.25)), r"dt must not be negative, got -0.25"),
        (dict(backend="cuda"), r"backend must be one of .*got 'cuda'"),
        (dict(backend="mamba_ssm"), r"'mamba_ssm' runs .*on CUDA, x is torch.float32 on cpu"),
        (dict(backend="fla"), r"'fla' runs .*on CUDA"),
    ],
)
def test_bad_input(change, message):
    inputs = {k: v.float() for k, v in scan_inputs(2, 5, 2, 3, 4, skip=False).items()}
    with pytest.raises(ValueError, match=message):
        ssd_scan(**{**inputs, **change})
