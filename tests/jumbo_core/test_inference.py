"""optimize_for_inference: answers, report, what it refuses, compilers, exporters, token fusion."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch.autograd import forward_ad

import jumbo_core
from jumbo_core import inference_report, optimize_for_inference
from jumbo_core.jumbo import JumboEncoder
from jumbo_core.jumbo.lowlatency import LowLatencyFFN, int8_kernel
from jumbo_core.models import JumboViT
from jumbo_core.models.series import JumboSeries
from jumbo_core.tofu import FusionPlan, apply_tofu
from tests.conftest import max_error
from tests.jumbo_core.inference_models import TOLERANCE, images, optimised, relative, trained


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


# --- compilers, exporters, fusion, counting ---


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_compiles_without_graph_breaks(dtype):
    fast, x = optimised(trained(), dtype), images()
    with torch.inference_mode():
        compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
        assert relative(compiled(x), fast(x)) < (1e-4 if dtype == "int8" else 2e-2)


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
