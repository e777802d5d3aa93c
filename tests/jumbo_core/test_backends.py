"""CUDA kernels of other packages: what is chosen, and that arguments mean there what they mean here.

No kernel runs on this machine. Arguments are checked against functions of the same documented convention that do:
Transformers' own fallback of ``mamba_chunk_scan_combined``, and the recurrence that flash-linear-attention documents.
"""

import pytest
import torch
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from jumbo_core.linear import backends, ssd_scan
from tests.conftest import max_error
from tests.jumbo_core.scan_inputs import loop, scan_inputs


def simple_gla(q, k, v, g, scale, initial_state, output_final_state):
    """o_t = scale * q_t S_t with S_t = exp(g_t) S_{t-1} + k_t^T v_t; q, k (B,T,H,K), v (B,T,H,V), S (B,H,K,V)."""
    assert output_final_state and q.is_contiguous() and k.is_contiguous()
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None, None] * state + k[:, t][..., None] * v[:, t][..., None, :]
        outputs.append(scale * (q[:, t][..., None] * state).sum(-2))
    return torch.stack(outputs, dim=1), state


def as_mamba(*args, **kwargs):
    assert kwargs["chunk_size"] >= 16 and kwargs["chunk_size"].bit_count() == 1
    return mamba2_chunk_scan.__wrapped__(*args, **kwargs)


@pytest.mark.parametrize(("name", "kernel"), [("mamba_ssm", as_mamba), ("fla", simple_gla)])
@pytest.mark.parametrize("options", [{}, {"initial_state": True}, {"skip": False}])
def test_arguments(name, kernel, options, monkeypatch):
    monkeypatch.setattr(backends, "_kernel", lambda backend: kernel)
    inputs = scan_inputs(2, 21, 2, 3, 4, **options)
    expected, last = loop(**inputs)
    single = {k: v.float() for k, v in inputs.items()}
    y, state = backends.fused_scan(
        name, *(single[k] for k in ("x", "dt", "A", "B", "C")), single.get("D"), 21, single.get("initial_state")
    )
    assert max_error(y.double(), expected) < 1e-5 and max_error(state.double(), last) < 1e-5


class OnCuda(torch.Tensor):
    """A tensor that says it is on CUDA: choosing needs no more."""

    is_cuda = True


def test_choice(monkeypatch, caplog):
    backends._first_installed.cache_clear()
    x = torch.randn(1, 2, 1, 1).as_subclass(OnCuda)
    monkeypatch.setattr(backends, "_kernel", lambda backend: simple_gla if backend == "fla" else None)
    with caplog.at_level("INFO", "jumbo_core"):
        assert backends.fused_backend(x, "auto") == "fla"
    assert "ssd_scan on CUDA uses fla" in caplog.text
    assert backends.fused_backend(x.double(), "auto") == "torch"
    assert backends.fused_backend(x, "torch") == "torch"
    with pytest.raises(ValueError, match="'mamba_ssm' is not installed"):
        backends.fused_backend(x, "mamba_ssm")
    backends._first_installed.cache_clear()


def test_nothing_installed_falls_back_to_torch():
    backends._first_installed.cache_clear(), backends._kernel.cache_clear()
    if any(backends._kernel(name) for name in backends.KERNELS):
        pytest.skip("a kernel package is installed here")
    assert backends.fused_backend(torch.randn(1).as_subclass(OnCuda), "auto") == "torch"
    assert ssd_scan(**scan_inputs(1, 3, 1, 2, 2))[0].shape == (1, 3, 1, 2)
