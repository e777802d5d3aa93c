"""Attention received against a plain softmax; sizes stand for duplicates; |gradient x activation|."""

import pytest
import torch

from jumbo_core.tofu import attention_received, gradient_importance
from tests.conftest import max_error


def test_against_a_plain_softmax():
    q, k = torch.randn(2, 3, 7, 5), torch.randn(2, 3, 7, 5)
    received = attention_received(q, k)
    assert received.shape == (2, 7)
    assert max_error(received, (q @ k.transpose(-2, -1) / 5**0.5).softmax(-1).mean((1, 2))) < 1e-6
    assert max_error(received.sum(1), torch.ones(2)) < 1e-6
    assert max_error(attention_received(q, k, scale=2.0), (q @ k.transpose(-2, -1) * 2).softmax(-1).mean((1, 2))) < 1e-6


def test_sizes_stand_for_duplicates():
    q, k = torch.randn(1, 2, 4, 5), torch.randn(1, 2, 4, 5)
    copies = torch.tensor([1, 3, 2, 1])
    together = attention_received(q, k, sizes=copies.view(1, 4, 1).float())
    apart = attention_received(q.repeat_interleave(copies, 2), k.repeat_interleave(copies, 2))
    owner = torch.arange(4).repeat_interleave(copies)
    assert max_error(together, torch.zeros(1, 4).index_add(1, owner, apart)) < 1e-6
    assert max_error(together, attention_received(q, k)) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_fp32(dtype):
    q, k = torch.randn(1, 2, 9, 5).to(dtype), torch.randn(1, 2, 9, 5).to(dtype)
    expected = attention_received(q.float(), k.float())
    assert torch.equal(attention_received(q, k), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention_received(q, k), expected)


def test_gradient_importance_is_first_order_exact_for_a_linear_loss():
    x = torch.randn(2, 5, 3, requires_grad=True)
    weight = torch.rand(2, 5, 3)
    (gradient,) = torch.autograd.grad((x.abs() * weight).sum(), x)
    assert max_error(gradient_importance(x, gradient), (x.abs() * weight).sum(-1).detach()) < 1e-6
    assert not gradient_importance(x, gradient).requires_grad


def test_refusals():
    x = torch.zeros(1, 2, 4, 3)
    with pytest.raises(ValueError, match=r"queries and keys must be \(B, H, N, D\) alike"):
        attention_received(x, x[:, :1])
    with pytest.raises(ValueError, match=r"sizes must be \(B, N, 1\) = \(1, 4, 1\)"):
        attention_received(x, x, sizes=torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"activations and gradients must be \(B, N, D\) alike"):
        gradient_importance(x[0], x[0, :1])
