"""The scan at inference: equal to the reference for any decay, batch, dtype and continuation; which form runs when."""

from functools import partial

import pytest
import torch

from jumbo_core.linear import AdventurerBlock, Mamba2Mixer, pairs, running, ssd_scan, ssd_scan_reference
from jumbo_core.linear.feed import feed_in_parts, feeds_in_parts, with_heading
from jumbo_core.linear.running import RunningScan
from tests.conftest import max_error
from tests.jumbo_core.scan_inputs import scan_inputs
from tests.jumbo_core.test_scan_forms import inputs_with_decay


@pytest.fixture
def forms(monkeypatch):
    """What ran, in order: steps per chunk of the running form, "pairs" for the other."""
    seen = []
    init, forward = RunningScan.__init__, pairs.forward

    def remember(self, dt, *rest):
        seen.append(dt.shape[2])
        init(self, dt, *rest)

    def steep(*arguments):
        seen.append("pairs")
        return forward(*arguments)

    monkeypatch.setattr(RunningScan, "__init__", remember)
    monkeypatch.setattr(pairs, "forward", steep)
    return seen


@pytest.mark.parametrize(
    ("total", "expected"), [(0.5, {32}), (59, {32}), (61, {32}), (119, {32}), (150, {16}), (1000, {"pairs"})]
)
def test_equals_the_reference_however_steep(total, expected, forms):
    """Around 60 the state takes two steps to the next chunk instead of one; from 120 on chunks get shorter."""
    inputs = {name: tensor.float() for name, tensor in inputs_with_decay(total, length=96).items()}
    y, state = (t.double() for t in ssd_scan_reference(**{name: t.double() for name, t in inputs.items()}))
    with torch.no_grad():
        got, last = ssd_scan(**inputs, chunk_size=32)
    assert set(forms) == expected
    assert max_error(got.double(), y) < 1e-5 * max(1.0, y.abs().max().item())
    assert max_error(last.double(), state) < 1e-5 * max(1.0, state.abs().max().item())


@pytest.mark.parametrize("batch", [1, 3])
def test_forms_and_chunk_sizes_change_inside_of_a_sequence(batch, forms, monkeypatch):
    monkeypatch.setattr(running, "CHUNKS_AT_ONCE", 1)
    inputs = {name: t.float() for name, t in scan_inputs(batch, 150, 3, 8, 4, initial_state=True).items()}
    inputs["dt"] = torch.full_like(inputs["dt"], 0.1)
    inputs["A"] = torch.full_like(inputs["A"], -1.0)
    inputs["dt"][:, 32:64] = 5.0  # 160 in a chunk: two halves
    inputs["dt"][:, 96:128] = 50.0  # beyond any factor
    start = inputs["initial_state"].clone()
    with torch.no_grad():
        y, state = ssd_scan(**inputs, chunk_size=32)
    assert forms == [32, 16, 32, "pairs", 22]
    assert torch.equal(inputs["initial_state"], start)
    expected, last = ssd_scan_reference(**{name: t.double() for name, t in inputs.items()})
    assert max_error(y.double(), expected) < 1e-5 * expected.abs().max().item()
    assert max_error(state.double(), last) < 1e-5 * last.abs().max().item()


def test_samples_in_parts_equal_all_at_once(monkeypatch):
    inputs = {name: t.float() for name, t in scan_inputs(5, 40, 2, 4, 4, initial_state=True).items()}
    with torch.no_grad():
        whole = ssd_scan(**inputs, chunk_size=16)
        monkeypatch.setattr(running, "NUMBERS_AT_ONCE", 2 * 16 * 2 * 4)  # two samples
        parts = ssd_scan(**inputs, chunk_size=16)
    assert [s.indices(5)[:2] for s in running.few_samples(5, 16 * 2 * 4)] == [(0, 2), (2, 4), (4, 5)]
    for a, b in zip(whole, parts, strict=True):
        assert max_error(a, b) < 1e-6


def test_nobody_who_records_gets_it(forms):
    inputs = {name: t.float().requires_grad_() for name, t in scan_inputs(1, 40, 2, 4, 4).items()}
    ssd_scan(**inputs, chunk_size=16)
    torch.compile(ssd_scan, backend="eager")(**inputs, chunk_size=16)
    with torch.no_grad():
        torch.export.export(Scan(), (), inputs)
    assert not [form for form in forms if form != "pairs"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mask", [False, True])
def test_a_compiler_takes_it_for_one_operator_whatever_the_length(forms, dtype, mask):
    """Two lengths of other numbers of chunks: the second makes lengths symbols, and no other graph follows."""
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=False):
        counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
        scan = torch.compile(ssd_scan, backend=counter, fullgraph=True)
        for length in (40, 200, 333, 70):
            inputs = {name: t.to(dtype) for name, t in scan_inputs(2, length, 2, 4, 4).items()}
            real = dict(mask=torch.rand(2, length) > 0.2) if mask else {}
            forms.clear()
            y, state = scan(**inputs, **real, chunk_size=16)
            assert forms and "pairs" not in forms
            expected, last = ssd_scan_reference(**{k: v.double() for k, v in inputs.items()}, **real)
            assert y.dtype == dtype and state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            limit = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
            assert max_error(y.double(), expected) < limit * expected.abs().max().item()
            assert max_error(state.double(), last) < limit * last.abs().max().item()
    assert counter.frame_count <= 2


def test_a_compiled_mixer_equals_its_own_operators():
    mixer, x = Mamba2Mixer(32, d_state=8, head_dim=16).eval(), torch.randn(2, 150, 32)
    expected = mixer(x).detach()
    torch._dynamo.reset()
    with torch.inference_mode():
        assert max_error(torch.compile(mixer, fullgraph=True)(x), expected) < 1e-6
        operator = torch.ops.jumbo_vit.scan.default
    inputs = scan_inputs(1, 40, 2, 4, 4)
    arguments = [inputs[name].float() for name in ("x", "dt", "A", "B", "C")]
    torch.library.opcheck(operator, (*arguments, None, torch.zeros(1, 2, 4, 4), 16))


class Scan(torch.nn.Module):
    def forward(self, **inputs):
        return ssd_scan(**inputs, chunk_size=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "length"), [(1, 5), (3, 200), (2, 300)])
def test_a_mixer_at_inference_equals_its_own_operators(dtype, batch, length):
    mixer, x = Mamba2Mixer(32, d_state=8, head_dim=16).to(dtype), torch.randn(batch, length, 32, dtype=dtype)
    mask = torch.rand(batch, length) > 0.2
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for m in (None, mask):
        expected = mixer(x, m).detach()
        assert expected.abs().max() > 0
        with torch.inference_mode():
            got = mixer(x, m)
        assert got.dtype == dtype and max_error(got, expected) < tolerance * expected.abs().max().item()


@pytest.mark.parametrize("batch", [1, 3])
def test_a_mixer_in_parts_equals_the_whole(batch, monkeypatch):
    """Part by part, with the state handed on, padding at any place; whoever hooks a projection sees the sequence."""
    mixer, x = Mamba2Mixer(32, d_state=8, head_dim=16), torch.randn(batch, 70, 32)
    mask = torch.rand(batch, 70) > 0.3
    mask[:, -1] = True
    seen = []
    with torch.no_grad():
        whole, masked = mixer(x, return_state=True), mixer(x, mask, return_state=True)
        monkeypatch.setattr("jumbo_core.linear.mamba2.SPAN", 32)
        run = Mamba2Mixer._run
        monkeypatch.setattr(Mamba2Mixer, "_run", lambda self, x, *rest: seen.append(x.shape[1]) or run(self, x, *rest))
        for expected, arguments in ((whole, ()), (masked, (mask,))):
            y, state = mixer(x, *arguments, return_state=True)
            assert max_error(y, expected[0]) < 1e-6
            assert all(max_error(a, b) < 1e-6 for a, b in zip(state, expected[1], strict=True))
        assert seen[:3] == ([32, 32, 6] if batch == 1 else [10, 10, 10])
        seen.clear()
        mixer.in_proj.register_forward_hook(lambda *_: None)
        assert max_error(mixer(x), whole[0]) < 1e-6 and seen == [70]


@pytest.mark.parametrize("norm", [partial(torch.nn.RMSNorm, eps=1e-5), torch.nn.RMSNorm, torch.nn.LayerNorm])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_the_heading_in_parts(batch, norm, monkeypatch):
    norm, h = norm(16), torch.randn(batch, 21, 16)
    torch.nn.init.normal_(norm.weight)
    expected = with_heading(h, norm).detach()
    monkeypatch.setattr("jumbo_core.linear.feed.TOKENS_AT_ONCE", 8)
    with torch.no_grad():
        found = with_heading(h, norm)
    assert found.shape == expected.shape == (batch, 22, 16)
    assert not batch or max_error(found, expected) < 1e-6


def test_hooks_on_the_inner_modules_are_called_at_inference():
    mixer, called = Mamba2Mixer(32, d_state=8, head_dim=16), []
    x = torch.randn(1, 9, 32)
    with torch.no_grad():
        expected = mixer(x)
        for name in ("conv1d", "norm"):
            getattr(mixer, name).register_forward_hook(lambda *_, name=name: called.append(name))
        assert max_error(mixer(x), expected) < 1e-6
    assert called == ["conv1d", "norm"]


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"norm_layer": torch.nn.LayerNorm}])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_feed_forward_network_in_parts(batch, options, monkeypatch):
    from timm.layers import SwiGLU

    norm, mlp, h = torch.nn.RMSNorm(16, eps=1e-5), SwiGLU(16, 24, **options).eval(), torch.randn(batch, 21, 16)
    torch.nn.init.normal_(norm.weight)
    expected = (h + mlp(norm(h))).detach()
    assert not feeds_in_parts(h, norm, mlp)  # gradients are on
    monkeypatch.setattr("jumbo_core.linear.feed.TOKENS_AT_ONCE", 8)
    with torch.no_grad():
        assert feeds_in_parts(h, norm, mlp)
        handle = mlp.fc2.register_forward_hook(lambda *_: None)
        assert not feeds_in_parts(h, norm, mlp)
        handle.remove()
        assert not feeds_in_parts(h, norm, SwiGLU(16, 24, act_layer=torch.nn.GELU).eval())
        assert not feeds_in_parts(h, norm, SwiGLU(16, 24, drop=0.5).train())
        feed_in_parts(h[:, :-2], norm, mlp)
    assert max_error(h[:, :-2], expected[:, :-2]) < 1e-6 and not torch.equal(h[:, -2:], expected[:, -2:])


def test_a_scan_with_a_parameter_keeps_no_states(forms):
    x, dt, B, C = torch.randn(1, 70, 2, 4), torch.rand(1, 70, 2), torch.randn(1, 70, 3), torch.randn(1, 70, 3)
    skip = torch.nn.Parameter(torch.ones(2))
    with torch.no_grad():
        y, _ = ssd_scan(x, dt, -torch.ones(2), B, C, skip)
    assert forms and "pairs" not in forms and not y.requires_grad


def test_buffers_are_where_the_inputs_are():
    mixer, x = Mamba2Mixer(64, d_state=16, head_dim=32).eval(), torch.randn(2, 40, 64)
    with torch.no_grad():
        expected = mixer(x)
        with torch.device("meta"):
            assert torch.equal(mixer(x), expected)


@pytest.mark.parametrize("multiplier", [0, 2])
def test_inputs_that_a_hook_keeps_stay(multiplier):
    block, kept = AdventurerBlock(32, multiplier=multiplier).eval(), []
    block.norm_mlp.register_forward_hook(lambda module, inputs, output: kept.append(inputs[0]))
    ffn = (lambda g: torch.ones_like(g)) if multiplier else None
    x = torch.randn(2, 20, 32)
    with torch.no_grad():
        h = block.mix(x)
        before = h.clone()
        block.feed(h, ffn)
    (patches,) = kept
    assert torch.equal(patches, before[:, : patches.shape[1]])


def test_dropout_that_is_on_by_itself_drops_at_inference():
    block = AdventurerBlock(32, proj_drop=0.5).eval()
    for module in block.modules():
        module.train(isinstance(module, torch.nn.Dropout))
    x = torch.randn(2, 20, 32)
    with torch.no_grad():
        assert not torch.equal(block(x), block(x))
