"""The MLPs at inference: the same answers as timm's forward, and only where nobody looks at the activations."""

import copy

import pytest
import torch
from timm.layers import Mlp
from torch import nn

from jumbo_core.jumbo import JumboBlock, JumboFFN
from jumbo_core.jumbo.mlp import TightMlp, WideMlp
from tests.conftest import max_error


def pair(cls=TightMlp, width: int = 24, hidden: int = 96, **options) -> tuple[nn.Module, Mlp]:
    """One of ours and timm's with the same parameters."""
    ours = cls(width, hidden, **options).eval()
    theirs = Mlp(width, hidden, **options).eval()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def test_timms_results():
    ours, theirs = pair()
    x = torch.randn(3, 7, 24)
    before = x.clone()
    with torch.inference_mode():
        assert max_error(ours(x), theirs(x)) < 1e-6 and torch.equal(x, before)
    with torch.no_grad():
        assert max_error(ours(x[:, 2:]), theirs(x[:, 2:])) < 1e-6 and torch.equal(x, before)


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 128, 129])
def test_wide_products_agree_in_both_orders(rows):
    ours, theirs = pair(WideMlp, 96, 384)
    x = torch.randn(rows, 96)
    with torch.inference_mode():
        assert max_error(ours(x), theirs(x)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 8])
def test_other_dtypes_and_autocast(dtype, rows):
    ours, theirs = pair(WideMlp)
    x = torch.randn(rows, 24)
    with torch.inference_mode():
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(ours(x), theirs(x)) and ours(x).dtype == torch.bfloat16
        assert torch.equal(ours.to(dtype)(x.to(dtype)), theirs.to(dtype)(x.to(dtype)))


def test_without_biases_and_with_tanh_gelu():
    x = torch.randn(8, 24)
    with torch.inference_mode():
        for options in (dict(bias=False), dict(act_layer=lambda: nn.GELU(approximate="tanh")), dict(act_layer=nn.SiLU)):
            ours, theirs = pair(WideMlp, **options)
            assert max_error(ours(x), theirs(x)) < 1e-5


@pytest.mark.parametrize("shape", [(0, 3, 24), (3, 0, 24), (0, 24)])
def test_empty_inputs(shape):
    with torch.inference_mode():
        for mlp in (TightMlp(24, 96), WideMlp(24, 96)):
            assert mlp.eval()(torch.zeros(shape)).shape == shape


def test_real_widths_agree_with_timms():
    torch.manual_seed(0)
    theirs = Mlp(192, 768).eval()
    ours = copy.deepcopy(theirs)
    ours.__class__ = TightMlp
    x = torch.randn(2, 197, 192)
    with torch.inference_mode():
        assert max_error(ours(x), theirs(x)) < 1e-5


def test_hooks_of_all_modules_see_what_they_would_of_timms():
    mlp, x, seen = TightMlp(24, 96).eval(), torch.randn(3, 24), []
    expected = mlp.fc1(x).detach()
    handle = nn.modules.module.register_module_forward_hook(lambda module, _, out: seen.append((module, out)))
    try:
        with torch.inference_mode():
            mlp(x)
    finally:
        handle.remove()
    assert [module for module, _ in seen if module in (mlp.fc1, mlp.act, mlp.fc2)] == [mlp.fc1, mlp.act, mlp.fc2]
    assert max_error(next(out for module, out in seen if module is mlp.fc1), expected) < 1e-6


def test_hooks_see_what_they_would_of_timms():
    ours, theirs = pair(WideMlp)
    x = torch.randn(8, 24)
    seen: dict[str, list] = {"ours": [], "theirs": []}
    for name, mlp in (("ours", ours), ("theirs", theirs)):
        for part in (mlp.fc1, mlp.act, mlp.fc2):
            part.register_forward_hook(lambda module, inputs, output, name=name: seen[name].append(output))
    with torch.inference_mode():
        ours(x), theirs(x)
    assert len(seen["ours"]) == 3 and all(map(torch.equal, seen["ours"], seen["theirs"]))


def test_replaced_layers_and_forwards_are_called():
    ours, theirs = pair(WideMlp)
    x = torch.randn(8, 24)
    calls = []
    replaced = copy.deepcopy(ours)
    replaced.fc1 = nn.Sequential(replaced.fc1)  # what an adapter does
    own = ours.fc1.forward
    ours.fc1.forward = lambda x: (calls.append(1), own(x))[1]  # what offloading does
    with torch.inference_mode():
        assert torch.equal(ours(x), theirs(x)) and calls == [1]
        assert torch.equal(replaced(x), theirs(x))


def test_dropout_in_training_and_gradients():
    ours, theirs = pair(WideMlp, drop=0.5)
    x = torch.randn(8, 24)
    for mlp in (ours, theirs):
        mlp(x).sum().backward()
    assert all(max_error(a.grad, b.grad) == 0 for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    ours.train()
    with torch.no_grad():
        assert not torch.equal(ours(x), ours(x))


@pytest.mark.parametrize("cls", [TightMlp, WideMlp])
@pytest.mark.parametrize("which", ["drop1", "drop2"])
def test_monte_carlo_dropout(cls, which):
    """Dropout alone in training, the rest of the model in eval mode."""
    ours, theirs = pair(cls, drop=0.5)
    x = torch.randn(8, 24)
    for mlp in (ours, theirs):
        getattr(mlp, which).train()
    with torch.no_grad():
        torch.manual_seed(1)
        expected = theirs(x)
        torch.manual_seed(1)
        assert torch.equal(ours(x), expected) and not torch.equal(ours(x), expected)


def test_vmap_and_compile():
    ours, theirs = pair(WideMlp)
    x = torch.randn(4, 8, 24)
    with torch.no_grad():
        assert max_error(torch.func.vmap(ours)(x), theirs(x)) < 1e-5
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
        assert max_error(compiled(x[0]), theirs(x[0])) < 1e-5


def test_a_block_leaves_its_input_alone():
    block, ffn = JumboBlock(16, 2, multiplier=2).eval(), JumboFFN(16, 2).eval()
    x = torch.randn(6, 9, 16)
    before = x.clone()
    expected = block(x, ffn)  # with gradients
    with torch.no_grad():
        assert max_error(block(x, ffn), expected) < 1e-6 and torch.equal(x, before)
