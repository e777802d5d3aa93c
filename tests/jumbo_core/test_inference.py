"""optimize_for_inference: answers, saving and loading, what it refuses, compilers and exporters."""

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import timm
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import jumbo_core
from jumbo_core import inference_report, optimize_for_inference
from jumbo_core.jumbo import JumboEncoder, lowlatency
from jumbo_core.jumbo.lowlatency import Int8Linear, LowLatencyFFN, int8_kernel, quantize_rows
from jumbo_core.models import JumboViT
from jumbo_core.models.series import JumboSeries
from jumbo_core.tofu import FusionPlan, apply_tofu
from tests.conftest import max_error

# Relative error of logits, the Jumbo FFN's weights and inputs being rounded to 8 bits each, or to bfloat16.
TOLERANCE = {"int8": 0.06, "bfloat16": 0.03}
needs_int8 = pytest.mark.skipif(not int8_kernel(), reason="this processor has no exact int8 products")


def trained(name: str = "test_jumbo", **options) -> nn.Module:
    """A model with weights away from their start, so that the Jumbo FFN matters."""
    model = timm.create_model(name, **{"num_classes": 5, "init": "short", **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def images(batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def optimised(model: nn.Module, dtype: str = "int8") -> nn.Module:
    return optimize_for_inference(copy.deepcopy(model), dtype=dtype)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("options", [{}, dict(share_jumbo_ffn=False), dict(registers=2)])
def test_answers_are_almost_the_same(dtype, options):
    model, x = trained(**options), images(16)
    fast = optimised(model, dtype)
    with torch.inference_mode():
        found, expected = fast(x), model(x)
        without = copy.deepcopy(model)
        without.encoder.zero_jumbo_output()
        effect = relative(without(x), expected)  # what the Jumbo FFN is worth: a test that it matters
        assert relative(found, expected) < TOLERANCE[dtype] < effect
        assert max_error(found, expected) > 0
        assert torch.equal(found.argmax(1), expected.argmax(1)) or dtype == "int8"


def test_adventurers_with_slices():
    model, x = trained("test_jumbo_adventurer"), images()
    with torch.inference_mode():
        assert relative(optimised(model)(x), model(x)) < TOLERANCE["int8"]


def test_a_bare_encoder_and_a_series_model():
    for model, x in (
        (JumboEncoder(16, 2, 2, multiplier=2, drop_path=0.0), torch.randn(2, 5, 16)),
        (JumboSeries(64, dim=16, depth=2, num_heads=2, multiplier=2, init="released"), torch.randn(2, 64)),
    ):
        fast = optimised(model)
        assert not fast.training and [entry.dtype for entry in inference_report(fast)] == ["int8"]
        with torch.inference_mode():
            assert relative(fast(x).jumbo, model.eval()(x).jumbo) < 0.05


def test_report_says_where_and_how_much():
    model = trained(share_jumbo_ffn=False)
    assert inference_report(model) == []
    report = inference_report(optimised(model))
    assert [entry.name for entry in report] == [f"encoder.jumbo_mlp.{i}" for i in range(len(model.blocks))]
    ffn = model.encoder.jumbo_mlp[0]
    weights, biases = (sum(getattr(f, n).numel() for f in (ffn.fc1, ffn.fc2)) for n in ("weight", "bias"))
    assert report[0].float32_megabytes == pytest.approx(4 * (weights + biases) / 1e6)
    if int8_kernel():
        assert report[0].computes == "int8"
        assert report[0].megabytes == pytest.approx((weights + 4 * 2 * biases) / 1e6)
    half = inference_report(optimised(model, "bfloat16"))[0]
    assert half.computes == "bfloat16" and half.megabytes == pytest.approx(2 * (weights + biases) / 1e6)


def test_everything_is_frozen_and_in_eval_mode():
    model = optimize_for_inference(trained().train())
    assert not any(p.requires_grad for p in model.parameters()) and not any(m.training for m in model.modules())


def test_again_changes_nothing_and_another_dtype_is_refused():
    model = optimised(trained())
    ffn, state = model.encoder.jumbo_mlp, {k: v.clone() for k, v in model.state_dict().items()}
    assert optimize_for_inference(model) is model and model.encoder.jumbo_mlp is ffn
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    with pytest.raises(ValueError, match="optimised to int8 already"):
        optimize_for_inference(model, dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["int4", "float16", None, torch.int8])
def test_other_dtypes_are_named(dtype):
    with pytest.raises(ValueError, match="'int8', 'bfloat16'"):
        optimize_for_inference(trained(), dtype=dtype)


def test_nothing_to_optimise_is_an_error():
    plain = JumboViT(32, 8, 3, 5, 16, 2, 2, multiplier=0, registers=4)
    for model in (plain, nn.Linear(3, 3), timm.create_model("test_vit")):
        with pytest.raises(TypeError, match="no Jumbo FFN"):
            optimize_for_inference(model)
    with pytest.raises(TypeError, match="takes a model"):
        optimize_for_inference("model")


def test_replaced_layers_and_float64_are_refused_before_anything_changes():
    model = trained(share_jumbo_ffn=False)
    model.encoder.jumbo_mlp[-1].fc2 = nn.Sequential(model.encoder.jumbo_mlp[-1].fc2)
    with pytest.raises(TypeError, match="no plain JumboFFN"):
        optimize_for_inference(model)
    assert inference_report(model) == []
    with pytest.raises(TypeError, match="float64"):
        optimize_for_inference(trained().double())


@pytest.mark.parametrize("part", ["", "fc1", "act", "fc2"])
@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook", "forward"])
def test_hooks_are_refused_before_anything_changes(part, hook):
    model = trained(share_jumbo_ffn=False)
    module = model.encoder.jumbo_mlp[-1].get_submodule(part)
    if hook == "forward":
        module.forward = module.forward  # what offloading does
    else:
        handle = getattr(module, hook)(lambda *_: None)
    with pytest.raises(ValueError, match=r"carries hooks.*without offloading"):
        optimize_for_inference(model)
    assert inference_report(model) == []
    if hook == "forward":
        del module.forward
    else:
        handle.remove()
    assert inference_report(optimize_for_inference(model))


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_training_and_gradients_are_refused(dtype):
    model, x = optimised(trained(), dtype), images()
    with pytest.raises(RuntimeError, match="training mode"):
        model.train()(x)
    with pytest.raises(RuntimeError, match="asked for gradients"):
        model.eval()(x.requires_grad_())
    assert torch.isfinite(model(x.detach())).all()  # eval mode alone is enough


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_forward_mode_is_refused(dtype):
    ffn = LowLatencyFFN(trained().encoder.jumbo_mlp, dtype)
    x = torch.randn(2, ffn.fc1.in_features)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="asked for gradients"):
            torch.func.jvp(ffn, (x,), (x,))
        with forward_ad.dual_level():
            assert torch.isfinite(ffn(x)).all()  # nothing is followed
            with pytest.raises(RuntimeError, match="asked for gradients"):
                ffn(forward_ad.make_dual(x, x))


# --- state ---


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_state_dict_loads_into_an_optimised_model(dtype, tmp_path):
    from safetensors.torch import load_file, save_file

    model, x = trained(), images()
    fast = optimised(model, dtype)
    save_file(fast.state_dict(), tmp_path / "model.safetensors")
    fresh = optimised(trained(), dtype)
    with torch.inference_mode():
        fresh(x)  # what was made ready of the old weights must not stay
        fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
        assert torch.equal(fresh(x), fast(x))
        from_float = optimised(trained(), dtype)
        from_float.load_state_dict(model.state_dict())
        assert torch.equal(from_float(x), fast(x))


def test_state_has_int8_weights():
    state = optimised(trained()).state_dict()
    assert state["encoder.jumbo_mlp.fc1.weight"].dtype == torch.int8
    assert state["encoder.jumbo_mlp.fc1.scale"].shape == state["encoder.jumbo_mlp.fc1.bias"].shape


def test_int8_state_is_refused_by_a_model_as_trained():
    with pytest.raises(ValueError, match="optimize_for_inference"):
        trained().load_state_dict(optimised(trained()).state_dict())


@pytest.mark.parametrize("strict", [True, False])
def test_int8_state_is_refused_by_a_model_in_bfloat16(strict):
    model, state = optimised(trained(), "bfloat16"), optimised(trained()).state_dict()
    with pytest.raises(ValueError, match=r"encoder.jumbo_mlp.fc1.weight is int8.*optimize_for_inference"):
        model.load_state_dict(state, strict=strict)


def test_a_state_of_another_shape_or_without_scale_is_refused():
    model = optimised(trained())
    state = model.state_dict()
    del state["encoder.jumbo_mlp.fc1.scale"]
    with pytest.raises(RuntimeError, match=r"Missing key.*fc1.scale"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**model.state_dict(), "encoder.jumbo_mlp.fc1.weight": torch.zeros(3, 3)})


def test_load_released_reports_a_float_file_as_complete(tmp_path):
    from jumbo_core.models.released import load_released

    model = trained()
    report = load_released(fast := optimised(trained()), model.state_dict())
    assert report.missing == report.unexpected == []
    with torch.inference_mode():
        assert torch.equal(fast(x := images()), optimised(model)(x))


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_copies_pickles_and_written_buffers(dtype):
    fast, x = optimised(trained(), dtype), images()
    with torch.inference_mode():
        expected = fast(x)
        assert torch.equal(copy.deepcopy(fast)(x), expected)
        assert torch.equal(pickle.loads(pickle.dumps(fast))(x), expected)
        file = io.BytesIO()
        torch.save(fast, file)
        assert torch.equal(torch.load(io.BytesIO(file.getvalue()), weights_only=False)(x), expected)
    with torch.no_grad():
        fast.encoder.jumbo_mlp.fc2.weight.zero_()  # in place, after it was made ready
        assert max_error(fast(x), expected) > 1e-3


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_optimised_inside_inference_mode(dtype):
    model, x = trained(), images()
    with torch.inference_mode():
        fast = optimised(model, dtype)
        first = fast(x)
        fast.load_state_dict(optimised(trained(), dtype).state_dict())
        assert max_error(fast(x), first) > 1e-3
    assert torch.isfinite(fast(x)).all()


@pytest.mark.parametrize("kind", [torch.int8, torch.float32])
def test_weights_made_in_inference_mode_change_unseen_and_are_followed(kind, monkeypatch):
    if kind != torch.int8 or not int8_kernel():
        monkeypatch.setattr(Int8Linear, "kind", lambda self: torch.float32)
    layer, x = Int8Linear.of(nn.Linear(96, 40)), torch.randn(3, 96)
    with torch.inference_mode():
        layer.weight = layer.weight.clone()
        assert layer.weight.is_inference() and max_error(layer(x), layer.bias.expand(3, -1)) > 0.1
        layer.weight.zero_()
        assert max_error(layer(x), layer.bias.expand(3, -1)) == 0


def test_half_precision_models_and_moves():
    model, x = trained(), images()
    with torch.inference_mode():
        expected = model(x)
        half = optimised(model).bfloat16()
        assert half(x.bfloat16()).dtype == torch.bfloat16 and relative(half(x.bfloat16()).float(), expected) < 0.1
        assert half.encoder.jumbo_mlp.fc1.weight.dtype == torch.int8
        assert relative(optimised(model).to("cpu", torch.float64)(x.double()).float(), expected) < TOLERANCE["int8"]
        with torch.autocast("cpu", torch.bfloat16):
            assert relative(optimised(model)(x).float(), expected) < 0.1
    meta = optimised(model).to("meta")
    assert meta(images().to("meta")).shape == (3, 5)


# --- how it is computed ---


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


def test_nan_stays_visible():
    fast, x = optimised(trained()), images()
    x[0, 0, 0, 0] = float("nan")
    with torch.inference_mode():
        y = fast(x)
    assert y[0].isnan().all() and y[1:].isfinite().all()


# --- compilers, exporters, fusion, counting ---


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_compiles_without_graph_breaks(dtype):
    fast, x = optimised(trained(), dtype), images()
    with torch.inference_mode():
        compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
        assert relative(compiled(x), fast(x)) < 1e-4 if dtype == "int8" else 2e-2


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_exports(dtype):
    fast, x = optimised(trained(), dtype), images()
    program = torch.export.export(fast, (x,)).module()
    traced = torch.jit.trace(fast, x)
    with torch.inference_mode():
        expected = fast(x)
        assert relative(program(x), expected) < TOLERANCE[dtype] and relative(traced(x), expected) < TOLERANCE[dtype]


def test_fused_and_optimised():
    model, x = trained(), images()
    plan = FusionPlan.uniform(len(model.blocks), 2, "mlerp")
    before = apply_tofu(copy.deepcopy(model), plan)
    after = apply_tofu(optimised(model), plan)
    assert after.report().multiply_adds == before.report().multiply_adds
    with torch.inference_mode():
        assert relative(after.model(x), before.model(x)) < 0.2
        assert relative(optimize_for_inference(before.model)(x), after.model(x)) < 1e-5


def test_multiply_adds_do_not_change():
    from jumbo_core.measure import multiply_adds

    model = trained()
    assert multiply_adds(optimised(model)) == multiply_adds(model)


def test_a_gradient_free_call_of_a_low_latency_ffn_is_public():
    ffn = LowLatencyFFN(trained().encoder.jumbo_mlp, "int8")
    width = ffn.fc1.in_features
    assert ffn(torch.randn(2, width)).shape == (2, width) and jumbo_core.optimize_for_inference
