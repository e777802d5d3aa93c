"""Dropout from random bytes: what nn.Dropout promises, on every way a training run takes through it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from jumbo_core.dropout import Dropout, replace_dropouts
from jumbo_core.jumbo import JumboEncoder
from jumbo_core.linear import AdventurerEncoder
from ts_ext import JumboPatchTST


@pytest.mark.parametrize("p", [0.05, 0.2, 0.5, 0.9])
def test_drops_the_share_it_was_asked_for_and_keeps_the_expectation(p):
    torch.manual_seed(0)
    y = Dropout(p)(torch.ones(1000, 1001))
    kept = y != 0
    assert kept.float().mean().item() == pytest.approx(1 - p, abs=4 * (p * (1 - p) / y.numel()) ** 0.5)
    assert y[kept].unique().numel() == 1
    assert y[kept][0].item() == pytest.approx(1 / (1 - p), rel=1e-4)


def test_neighbours_rows_and_calls_are_independent():
    torch.manual_seed(0)
    drop = Dropout(0.3)
    masks = torch.stack([drop(torch.ones(512, 512)) != 0 for _ in range(2)]).double() - 0.7
    pairs = [(masks[0], masks[1])]
    pairs += [(masks[0][:, k:], masks[0][:, :-k]) for k in (1, 2, 3, 4, 8)] + [(masks[0][1:], masks[0][:-1])]
    for a, b in pairs:
        assert abs((a * b).mean().item() / 0.21) < 4 / a.numel() ** 0.5  # a correlation of 0, to four deviations


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 3), (1,), (0, 4), (2, 5, 8), ()])
def test_gradient_is_the_mask_of_the_output(dtype, shape):
    x = torch.full(shape, 2.0, dtype=dtype, requires_grad=True)
    y = Dropout(0.5)(x)
    y.sum().backward()
    assert y.dtype == dtype and y.shape == shape
    assert torch.equal(y, 2 * x.grad) and set(x.grad.flatten().tolist()) <= {0.0, 2.0}


def test_the_seed_decides_and_strides_do_not_matter():
    x = torch.randn(64, 32)
    drop = Dropout(0.4)
    torch.manual_seed(3)
    first = drop(x)
    torch.manual_seed(3)
    again = drop(x.t().contiguous().t())
    assert torch.equal(first, again) and not torch.equal(first, drop(x))
    kept = first != 0
    torch.testing.assert_close(first[kept], x[kept] * 65536 / (65536 - round(0.4 * 65536)))


def test_eval_and_rate_0_give_the_very_input_and_rate_1_gives_zeros():
    x = torch.randn(4, 5)
    assert Dropout(0.5).eval()(x) is x
    assert torch.equal(Dropout(0.0)(x), x)
    assert torch.equal(Dropout(1.0)(x), torch.zeros_like(x))


def test_rates_too_small_for_16_bits_are_left_to_torch():
    torch.manual_seed(0)
    ours = Dropout(1e-6)(torch.ones(3_000_000))
    torch.manual_seed(0)
    assert torch.equal(ours, nn.Dropout(1e-6)(torch.ones(3_000_000))) and (ours == 0).any()


def test_checkpointing_draws_the_same_mask_again():
    drop = Dropout(0.5)
    x = torch.randn(32, 32, requires_grad=True)
    y = checkpoint(lambda t: drop(t).square(), x, use_reentrant=False)
    y.sum().backward()
    torch.testing.assert_close(x.grad * x.detach(), 2 * y.detach())


def test_transforms_and_compilers_get_torch_s_own():
    """At a rate whose kept values differ: 1 / 0.7 there, 65536 / 45875 here."""
    x, drop = torch.ones(64, 64), Dropout(0.3)

    def values(y: torch.Tensor) -> set[float]:
        return set(y.flatten().tolist())

    own, theirs = values(drop(x)), values(nn.Dropout(0.3)(x))
    assert len(own) == len(theirs) == 2 and own != theirs
    value, tangent = torch.func.jvp(drop, (x,), (x,))
    assert values(value) == theirs and torch.equal(value, tangent)
    masks = torch.func.vmap(drop, randomness="different")(x)
    assert values(masks) == theirs and not torch.equal(masks[0], masks[1])
    same = torch.func.vmap(drop, randomness="same")(x)
    assert values(same) == theirs and torch.equal(same[0], same[1])
    assert values(torch.compile(drop, backend="eager", fullgraph=True)(x)) == theirs
    assert values(torch.jit.trace(drop, x, check_trace=False)(x)) == theirs


def test_whatever_the_default_device():
    with torch.device("meta"):
        assert Dropout(0.5)(torch.ones(8, device="cpu")).device.type == "cpu"
        assert Dropout(0.5)(torch.ones(8)).is_meta


def test_nested_tensors_are_torchs_business():
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=torch.jagged)
    assert Dropout(0.5)(nested).is_nested


def test_replaces_plain_dropouts_alone_and_keeps_names_rates_and_mode():
    module = nn.ModuleDict({
        "a": nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), "b": nn.Dropout(0.2, inplace=True), "c": nn.Dropout2d(0.3)
    }).eval()  # fmt: skip
    replace_dropouts(module)
    assert type(module["a"][1]) is type(module["b"]) is Dropout and type(module["c"]) is nn.Dropout2d
    twice = nn.Module()
    twice.first = twice.second = nn.Dropout(0.1)
    replace_dropouts(twice)
    assert type(twice.first) is type(twice.second) is Dropout
    assert (module["a"][1].p, module["b"].p, module["b"].inplace, module["b"].training) == (0.1, 0.2, True, False)


def test_models_have_no_slow_dropout():
    models = [
        JumboEncoder(16, 2, 2, multiplier=2, proj_drop=0.1),
        AdventurerEncoder(16, 2, multiplier=2, head_dim=16, proj_drop=0.1),
        JumboPatchTST(2, 2, 64, 8, d_model=16, n_heads=2, head_dropout=0.1),
    ]
    for model in models:
        dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout) and m.p]
        assert dropouts and all(type(m) is Dropout for m in dropouts)


def test_gradients_of_a_block_whose_parts_are_split_agree_with_numbers():
    torch.manual_seed(0)
    for encoder in (
        JumboEncoder(4, 1, 1, multiplier=2, drop_path=0.0),
        AdventurerEncoder(4, 1, multiplier=2, head_dim=4, drop_path=0.0),
    ):
        encoder = encoder.double()
        x = torch.randn(1, 3, 4, dtype=torch.double, requires_grad=True)
        assert torch.autograd.gradcheck(lambda t, e=encoder: tuple(e(t)), x)
