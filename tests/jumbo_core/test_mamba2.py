"""The mixer: Transformers' own Mamba-2 as an independent oracle, streaming, padding, precision."""

import pytest
import torch
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer as TheirMixer

from jumbo_core.linear import Mamba2Mixer
from tests.conftest import max_error


@pytest.fixture(scope="module")
def pair():
    config = Mamba2Config(
        num_heads=4, head_dim=32, hidden_size=64, state_size=16, expand=2, n_groups=1, conv_kernel=4, use_bias=False,
        use_conv_bias=True, layer_norm_epsilon=1e-5, chunk_size=16, num_hidden_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs, ours = TheirMixer(config, 0).eval(), Mamba2Mixer(64, d_state=16, head_dim=32).eval()
    for parameter in theirs.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, std=0.5)
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    return theirs, ours


@pytest.mark.parametrize("length", [1, 15, 16, 17, 197])
def test_equals_transformers(pair, length):
    theirs, ours = pair
    x = torch.randn(2, length, 64)
    with torch.no_grad():
        assert max_error(ours(x), theirs(x)) < 1e-5


@pytest.mark.parametrize("length", [15, 37])
def test_gradients_equal_transformers(pair, length):
    theirs, ours = pair
    x = torch.randn(2, length, 64)
    grads = []
    for mixer in (theirs, ours):
        inner = x.clone().requires_grad_()
        wanted = [inner, *(p for _, p in sorted(mixer.named_parameters()))]
        grads.append(torch.autograd.grad(mixer(inner).square().mean(), wanted))
    assert all(max_error(a, b) < 1e-5 for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("prefill", [0, 1, 2, 9])
def test_streaming_equals_the_whole_sequence(pair, prefill):
    _, mixer = pair
    x = torch.randn(2, 12, 64)
    with torch.no_grad():
        expected = mixer(x)
        state, outputs = mixer.empty_state(2), []
        if prefill:
            y, state = mixer(x[:, :prefill], return_state=True)
            outputs = list(y.unbind(1))
        sizes = [t.shape for t in state]
        for t in range(prefill, 12):
            kept = [t.clone() for t in state]
            y, after = mixer.step(x[:, t], state)
            assert all(torch.equal(a, b) for a, b in zip(state, kept, strict=True))  # the given state is not touched
            state = after
            outputs.append(y)
        assert [t.shape for t in state] == sizes  # constant memory
        assert max_error(torch.stack(outputs, dim=1), expected) < 1e-5
        y, _ = mixer(x[:, 5:], state=mixer(x[:, :5], return_state=True)[1], return_state=True)
        assert max_error(y, expected[:, 5:]) < 1e-5


@pytest.mark.parametrize("front", [True, False])
def test_padding_on_either_side_changes_nothing(pair, front):
    _, mixer = pair
    x = torch.randn(1, 5, 64)
    padded, mask = torch.full((1, 9, 64), 1e4), torch.zeros(1, 9, dtype=torch.bool)
    place = slice(4, 9) if front else slice(0, 5)
    padded[:, place], mask[:, place] = x, True
    with torch.no_grad():
        y = mixer(padded, mask)
        assert max_error(y[:, place], mixer(x)) < 1e-6
    assert not y[~mask].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decay_parameters_stay_fp32_under_autocast(pair, dtype):
    _, mixer = pair
    x = torch.randn(2, 40, 64)
    seen = {}

    def record(module, args, kwargs, output):
        seen["dtype"] = output.dtype

    with torch.no_grad():
        expected = mixer(x)
        with torch.autocast("cpu", dtype):
            handle = mixer.register_forward_hook(record, with_kwargs=True)
            y = mixer(x)
            handle.remove()
            assert mixer._decay().dtype == mixer._step_sizes(torch.zeros(1, 4, dtype=dtype)).dtype == torch.float32
    assert seen["dtype"] == dtype
    assert max_error(y.float(), expected) < 3e-2


def test_initial_decay_is_mamba2s():
    mixer = Mamba2Mixer(512, head_dim=8)
    a, dt = mixer.A_log.exp(), torch.nn.functional.softplus(mixer.dt_bias)
    assert 1 <= a.min() and a.max() <= 16 and 8 < a.mean() < 9.5
    assert 1e-3 * 0.99 < dt.min() and dt.max() < 0.1 * 1.01
    assert torch.equal(mixer.D, torch.ones(128))


def test_initial_decay_keeps_what_it_is_told_to():
    mixer = Mamba2Mixer(64, d_state=16, head_dim=32)
    with torch.no_grad():
        for parameter in (mixer.A_log, mixer.dt_bias, mixer.D):
            parameter.fill_(7)
    mixer.reset_decay(keep=lambda parameter: parameter is mixer.dt_bias)
    assert mixer.dt_bias.eq(7).all() and mixer.D.eq(1).all() and not mixer.A_log.eq(7).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.randn(2, 3, 63)), r"expects \(B, L, 64\) with L > 0, got \(2, 3, 63\)"),
        (lambda m: m(torch.randn(2, 0, 64)), r"got \(2, 0, 64\)"),
        (lambda m: m(torch.randn(2, 3, 64), torch.ones(2, 4, dtype=torch.bool)), r"mask must be bool \(B, L\)"),
        (lambda m: m.step(torch.randn(3, 64), m.empty_state(2)), r"step expects \(2, 64\).*got \(3, 64\)"),
        (
            lambda m: m(torch.randn(1, 3, 64), torch.tensor([[True, True, False]]), return_state=True),
            "end in real steps",
        ),
        (
            lambda m: m(torch.randn(1, 3, 64), torch.ones(1, 3, dtype=torch.bool), state=m.empty_state(1)),
            "mask with state",
        ),
        (lambda m: Mamba2Mixer(0), "dim must be an integer of at least 1, got 0"),
        (lambda m: Mamba2Mixer(64, backend="gpu"), "backend must be one of"),
        (lambda m: Mamba2Mixer(64, expand=-1), "expand must be"),
    ],
)
def test_bad_input(pair, call, message):
    with pytest.raises(ValueError, match=message):
        call(pair[1])
