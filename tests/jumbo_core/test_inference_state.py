"""Weights of models optimised for inference: saving, loading, copies, casts and moves."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from jumbo_core.jumbo.lowlatency import Int8Linear, int8_kernel
from tests.conftest import max_error
from tests.jumbo_core.inference_models import TOLERANCE, images, optimised, relative, trained


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_stay_in_float32_whatever_the_model_becomes(dtype):
    linear = nn.Linear(32, 8)
    with torch.no_grad():
        linear.weight.mul_(1e-4)  # scales below what float16 has digits for
        own, x = Int8Linear.of(linear), torch.randn(3, 32)
        expected, scale = own(x) - linear.bias, own.scale.clone()
        own.to(dtype)
        assert own.scale.dtype == torch.float32 and torch.equal(own.scale, scale) and own.bias.dtype == dtype
        own.float()
        assert max_error(own(x) - own.bias, expected) < 1e-3 * expected.abs().max()


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
