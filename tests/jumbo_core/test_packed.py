"""Packed linear layers: the same answers, the same state, and ready weights that follow what they were made of."""

import copy
import pickle

import pytest
import timm
import torch
from timm.layers import Mlp
from torch import nn

from jumbo_core import optimize_for_inference
from jumbo_core.jumbo.mlp import TightMlp
from jumbo_core.jumbo.packed import PackedLinear
from tests.conftest import max_error


@pytest.fixture(autouse=True)
def _any_size(monkeypatch):
    monkeypatch.setattr("jumbo_core.jumbo.packed.LEAST", 1)


def test_small_products_are_left_alone(monkeypatch):
    monkeypatch.undo()
    ours, _ = packed(24, 40)
    with torch.inference_mode():
        ours(torch.randn(3, 24))
        assert "_ready" not in vars(ours)
        ours(torch.randn(70000, 24))
        assert "_ready" in vars(ours)


def packed(*sizes, **options) -> tuple[nn.Linear, nn.Linear]:
    plain = nn.Linear(*sizes, **options)
    ours = copy.deepcopy(plain)
    PackedLinear.take_over(ours)
    return ours, plain


@pytest.mark.parametrize("shape", [(1, 24), (3, 7, 24), (2, 2, 5, 24), (0, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_same_answers(shape, bias):
    ours, plain = packed(24, 40, bias=bias)
    x = torch.randn(shape)
    with torch.inference_mode():
        assert max_error(ours(x), plain(x)) < 1e-5 if x.numel() else ours(x).shape == (0, 40)
        assert ours(x).shape == plain(x).shape
        assert torch.allclose(ours(x, gelu=True), nn.functional.gelu(plain(x)), atol=1e-5)
        if x.ndim > 2:
            strided = torch.randn(*shape[:-2], 9, 24)[..., 2:, :]
            assert max_error(ours(strided), plain(strided)) < 1e-5


def test_weights_that_end_at_the_address_where_they_began():
    ours, x = packed(24, 40)[0], torch.randn(3, 24)
    for _ in range(20):  # whether an address is used again is the allocator's choice
        with torch.inference_mode():
            ours(x)
        ours.half().float()
        ours.weight = nn.Parameter(ours.weight + 1)
        ours.weight = nn.Parameter(ours.weight + 1)
        with torch.inference_mode():
            expected = nn.functional.linear(x, ours.weight, ours.bias)
            assert (ours(x) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_other_dtypes_gradients_and_autocast_are_as_before():
    ours, plain = packed(24, 40)
    x = torch.randn(3, 24)
    assert torch.equal(ours(x), plain(x)) and ours(x).requires_grad
    with torch.inference_mode():
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(ours(x), plain(x)) and ours(x).dtype == torch.bfloat16
        for dtype in (torch.float64, torch.bfloat16):
            assert torch.equal(ours.to(dtype)(x.to(dtype)), plain.to(dtype)(x.to(dtype)))


def test_state_copies_and_changes():
    ours, plain = packed(24, 40)
    x = torch.randn(3, 24)
    assert ours.state_dict().keys() == plain.state_dict().keys() and isinstance(ours, nn.Linear)
    with torch.inference_mode():
        expected = ours(x)
        assert torch.equal(copy.deepcopy(ours)(x), expected) and torch.equal(
            pickle.loads(pickle.dumps(ours))(x), expected
        )
        other = nn.Linear(24, 40)
        ours.load_state_dict(other.state_dict())
        assert max_error(ours(x), other(x)) < 1e-5
    with torch.no_grad():
        ours.weight.zero_()
        assert max_error(ours(x), ours.bias.expand(3, -1)) == 0
        ours.weight = nn.Parameter(torch.ones(40, 24))
        assert max_error(ours(x), ours.bias + x.sum(1, keepdim=True)) < 1e-5


def test_weights_made_in_inference_mode_change_unseen_and_are_followed():
    with torch.inference_mode():
        ours, plain = packed(24, 40)
        x, other = torch.randn(3, 24), nn.Linear(24, 40)
        assert ours.weight.is_inference() and max_error(ours(x), plain(x)) < 1e-5
        ours.load_state_dict(other.state_dict())
        assert max_error(ours(x), other(x)) < 1e-5
        ours.weight.zero_()
        assert max_error(ours(x), ours.bias.expand(3, -1)) == 0


def test_loading_drops_what_was_packed():
    ours, _ = packed(24, 40)
    with torch.inference_mode():
        ours(torch.randn(3, 24))
        assert "_ready" in vars(ours)
        ours.load_state_dict(nn.Linear(24, 40).state_dict(), assign=True)
    assert "_ready" not in vars(ours)


def test_inside_an_mlp_with_and_without_hooks():
    mlp, plain = TightMlp(24, 96).eval(), Mlp(24, 96).eval()
    plain.load_state_dict(mlp.state_dict())
    for layer in (mlp.fc1, mlp.fc2):
        PackedLinear.take_over(layer)
    x, seen = torch.randn(2, 5, 24), []
    with torch.inference_mode():
        assert max_error(mlp(x), plain(x)) < 1e-5
        mlp.fc1.register_forward_hook(lambda module, inputs, output: seen.append(output))
        assert max_error(mlp(x), plain(x)) < 1e-5 and max_error(seen[0], plain.fc1(x)) < 1e-5
        compiled = torch.compile(mlp, backend="aot_eager")
        assert max_error(compiled(x), plain(x)) < 1e-5


@pytest.mark.parametrize(("name", "expected"), [("test_jumbo", True), ("test_jumbo_adventurer", False)])
def test_who_gets_it(name, expected):
    """Blocks with attention; linear ones take their products into memory of their own, which saves as much."""
    model = optimize_for_inference(timm.create_model(name))
    assert any(type(module) is PackedLinear for module in model.modules()) == expected
