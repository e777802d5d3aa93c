"""JumboPatchTST without a host: shapes, equivariance, precision, gradients, errors."""

import copy
import io
import subprocess
import sys
import warnings
from functools import partial

import numpy as np
import pytest
import torch

from jumbo_core.jumbo import param_groups
from ts_ext import JumboPatchTST

pytestmark = pytest.mark.filterwarnings("ignore:.*no target_channels:UserWarning")

SMALL = dict(patch_len=8, stride=4, d_model=16, n_layers=2, n_heads=4, d_ff=24, multiplier=2)
BASELINE = dict(multiplier=0, registers=16)


def lin_nd_head():
    """Has the name of tsai's head: only that and ``d`` are read."""


def make(c_in=4, c_out=4, seq_len=40, pred_dim=12, **options):
    model = JumboPatchTST(c_in, c_out, seq_len, pred_dim, **{**SMALL, **options})
    with torch.no_grad():  # weights far from the tidy initial ones, so that no part is silent
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize(
    ("c_out", "pred_dim", "shape"),
    [
        (4, 12, (8, 4, 12)),
        (4, 1, (8, 4, 1)),
        (3, 12, (8, 3, 12)),
        (1, [4, 12], (8, 4, 12)),
        (1, (3, 1), (8, 3, 1)),
        (6, 12, (8, 6, 12)),
        (1, [12], (8, 12)),
        (1, None, (8,)),
    ],
)
@pytest.mark.parametrize("variant", [{}, BASELINE])
def test_output_shape(c_out, pred_dim, shape, variant):
    assert make(4, c_out, 40, pred_dim, **variant)(torch.randn(8, 4, 40)).shape == shape


def test_documented_patch_count_and_widths():
    model = JumboPatchTST(1, 1, 100, 5)
    assert model.patch_num == 12
    assert model.head.in_features == (6 + 12) * 128
    assert model.series.encoder.blocks[0].mlp.fc1.out_features == 256
    odd = JumboPatchTST(1, 1, 100, 5, d_model=48, n_heads=4, d_ff=100)
    assert odd.series.encoder.blocks[0].mlp.fc1.out_features == 100


@pytest.mark.parametrize("options", [{}, BASELINE, dict(affine=True), dict(c_out=3)])
@pytest.mark.parametrize(("scale", "shift"), [(10, 5), (0.01, -3), (1000, 0)])
def test_scale_equivariance(options, scale, shift):
    model = make(**options).eval().double()
    x = torch.randn(8, 4, 40, dtype=torch.float64) * torch.tensor([1, 5, 0.1, 30])[:, None]
    torch.testing.assert_close(model(x * scale + shift), model(x) * scale + shift, atol=1e-10 * scale, rtol=1e-10)
    single = model.float()
    torch.testing.assert_close(
        single(x.float() * scale + shift), single(x.float()) * scale + shift, atol=1e-4 * scale, rtol=1e-5
    )


@pytest.mark.filterwarnings("ignore:3 input channels")
def test_a_mixture_of_channels_keeps_the_digits_of_an_offset():
    """Its weights sum to one, which single precision says only to seven digits."""
    model = JumboPatchTST(3, 1, 40, 6, **SMALL).eval()
    torch.nn.init.normal_(model.head.mix)
    x = torch.randn(4, 3, 40, dtype=torch.float64)
    torch.testing.assert_close(model(x + 1e9) - 1e9, model(x), atol=1e-6, rtol=0)
    constant = torch.full((1, 3, 40), 1e9 + 1, dtype=torch.float64)
    assert (model(constant) == 1e9 + 1).all()


def test_channels_are_independent_and_in_order():
    model = make().eval()
    x = torch.randn(3, 4, 40)
    other = x.clone()
    other[:, 2] = torch.randn(3, 40)
    a, b = model(x), model(other)
    changed = (a != b).any(dim=-1).all(dim=0)
    assert changed.tolist() == [False, False, True, False]
    order = torch.tensor([3, 1, 0, 2])
    torch.testing.assert_close(model(x[:, order]), a[:, order], atol=1e-6, rtol=0)


def test_target_channels_choose_inputs():
    whole, part = make(), JumboPatchTST(4, 2, 40, 12, target_channels=[3, 1], **SMALL)
    part.load_state_dict(whole.state_dict())
    x = torch.randn(5, 4, 40)
    assert torch.equal(part.eval()(x), whole.eval()(x)[:, [3, 1]])


def test_mixture_is_announced():
    with pytest.warns(UserWarning, match=r"4 input channels, 2 output channel.*target_channels=\[0, 1\]"):
        JumboPatchTST(4, 2, 40, 12, **SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for c_in, c_out, channels in ((4, 4, None), (4, 2, [3, 1]), (1, 1, None), (2, 3, [0, 1, 1])):
            JumboPatchTST(c_in, c_out, 40, 12, target_channels=channels, **SMALL)


def test_mixture_of_channels_learns_which_one():
    torch.manual_seed(0)
    model = JumboPatchTST(3, 1, 40, 6, **{**SMALL, "dropout": 0.0, "n_layers": 1})
    x = torch.randn(32, 3, 1) * 5 + torch.randn(32, 3, 40) * 0.1
    y = x[:, 1:2, :1].expand(-1, -1, 6)  # the second channel's level
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(30):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5  # 25 * 2/3 for the plain mean of the three channels
    weights = model.head.mix + (1 - model.head.mix.sum(1, keepdim=True)) / 3
    assert weights.argmax() == 1 and abs(weights.sum().item() - 1) < 1e-6


@pytest.mark.parametrize("variant", [{}, BASELINE, dict(affine=True, c_out=3), dict(share_jumbo_ffn=False)])
def test_no_dead_parameter(variant):
    model = make(**variant).train()
    model(torch.randn(8, 4, 40)).square().mean().backward()
    dead = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not dead
    grouped = [p for group in param_groups(model, 1e-3, 0.05) for p in group["params"]]
    assert len(grouped) == len(list(model.parameters()))


def test_gradient_checkpointing_changes_nothing():
    model = make(dropout=0.0).train()
    x = torch.randn(8, 4, 40)
    model(x).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.set_grad_checkpointing()
    model(x).square().mean().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-5)


def test_all_dropouts_are_off_in_eval():
    model = make(dropout=0.5, attn_dropout=0.5, head_dropout=0.5, drop_path=0.5)
    x = torch.randn(8, 4, 40)
    model.eval()
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


def test_float64_series_are_accepted_and_keep_their_digits():
    model = make().eval()
    x = torch.randn(2, 4, 40, dtype=torch.float64)
    out = model(x)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, model(x.float()).double(), atol=1e-5, rtol=1e-5)
    far = model(x + 1e9)  # float32 steps are 64 wide there
    torch.testing.assert_close(far - 1e9, out, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model = make().eval()
    x = torch.randn(4, 4, 40)
    expected = model(x)
    with torch.autocast("cpu", dtype=dtype):
        out = model(x)
    assert out.dtype == torch.float32
    assert (out - expected).abs().max() < 3e-2 * expected.std()
    whole = copy.deepcopy(model).to(dtype)(x.to(dtype))
    assert whole.dtype == dtype
    error = (whole.float() - expected) / max(1, expected.std().item())  # on the scale of unit variance
    if dtype == torch.float16:
        assert error.square().mean().sqrt() < 1e-3
    else:
        assert error.abs().max() < 3e-2


def test_constant_channel_is_forecast_as_constant():
    x = torch.randn(2, 4, 40)
    x[:, 1] = 12345.678
    out = make().eval()(x)
    assert torch.isfinite(out).all()
    assert (out[:, 1] == x[:, 1, :1]).all()


def test_without_revin_the_values_go_in_as_they_are():
    model = make(revin=False).eval()
    x = torch.randn(2, 4, 40)
    assert not any("revin" in name for name in model.state_dict())
    assert not torch.allclose(model(x + 5), model(x) + 5, atol=1e-2)


def test_same_weights_after_saving():
    model, other = make().eval(), make().eval()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(2, 4, 40)
    assert torch.equal(model(x), other(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_export_with_a_dynamic_batch():
    model, x = make().eval(), torch.randn(3, 4, 40)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    x = torch.randn(7, 4, 40)
    torch.testing.assert_close(exported.module()(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((4, 4, 40, 0), {}, "horizon must be an integer of at least 1, got 0"),
        ((4, 4, 40, [4, 0]), {}, "horizon must be an integer of at least 1, got 0"),
        ((4, 4, 40, 2.5), {}, "horizon must be an integer"),
        ((4, 4, 40, [1, 4, 12]), {}, r"\[C_out, H\]; got \[1, 4, 12\]"),
        ((4, 4, 40, []), {}, r"\[C_out, H\]; got \[\]"),
        ((4, 4, 40, "12"), {}, "horizon must be an integer of at least 1, got '12'"),
        ((4, 4, 40, 12), dict(custom_head=partial(lin_nd_head, d=())), r"d of custom_head.*\[C_out, H\]; got \(\)"),
        ((4, 4, 40, 12), dict(custom_head=partial(lin_nd_head, d=None)), "horizon must be .* got None"),
        ((4, 4, 40, 8), dict(custom_head=partial(lin_nd_head, d=[4, 12])), "disagree"),
        ((4, 4, 40, 12), dict(d_model=0), "d_model must be an integer of at least 1, got 0"),
        ((4, 4, 40, 12), dict(d_model=16.0), "d_model must be an integer of at least 1, got 16.0"),
        ((4, 4, 40.0, 12), {}, "seq_len must be an integer of at least 1, got 40.0"),
        ((4, 4, 40, 12), dict(stride=9), "stride 9 is longer than patch_len 8"),
        ((4, 4, 40, 12), dict(multiplier=-1), "multiplier must be an integer of at least 0, got -1"),
        ((4, 4, 40, 12), dict(jumbo_mlp_ratio=0), "jumbo_mlp_ratio must be above 0 .* got 0"),
        ((4, 4, 40, 12), dict(jumbo_mlp_ratio=-1.0), "jumbo_mlp_ratio must be above 0 .* got -1.0"),
        ((4, 4, 40, 12), dict(jumbo_mlp_ratio=0.01), "leave the Jumbo FFN a hidden unit, got 0.01"),
        ((4, 1, 40, 12), dict(target_channels=[True]), r"list of 1 of the input channels 0..3, got \[True\]"),
        ((4, 1, 40, 12), dict(target_channels=1), "list of 1 of the input channels 0..3, got 1"),
        ((4, 1, 40, 12), dict(target_channels=[-1]), r"list of 1 of the input channels 0..3, got \[-1\]"),
        ((4, 4, 7, 12), {}, "window of 7 steps is shorter than one patch of 8"),
        ((0, 4, 40, 12), {}, "c_in must be an integer of at least 1, got 0"),
        ((4, 3, 40, None), {}, "c_out must be 1, got 3"),
        ((4, 4, 40, 12), dict(head="segment"), "unknown head 'segment'; .* has: forecast, classify, regress, pretrain"),
        ((4, 4, 40, 12), dict(custom_head=torch.nn.Identity()), "brings its own head"),
        ((4, 2, 40, 12), dict(target_channels=[0, 4]), r"2 of the input channels 0..3, got \[0, 4\]"),
        ((4, 4, 40, 12), dict(affine=True, revin=False), "needs revin=True"),
        ((4, 4, 40, 12), dict(n_heads=3), "dim 16 is not divisible by num_heads 3"),
    ],
)
def test_bad_arguments(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        JumboPatchTST(*arguments, **{**SMALL, **options})


def test_sizes_may_be_numpy_integers():
    n = np.int64
    sizes = {name: n(value) for name, value in SMALL.items()}
    for pred_dim in (n(12), [n(4), n(12)]):
        model = JumboPatchTST(n(4), n(4), n(40), pred_dim, target_channels=np.arange(4), **sizes)
        assert model(torch.randn(2, 4, 40)).shape == (2, 4, 12)
        assert {type(v) for v in (model.c_in, model.seq_len, model.patch_num, *model.target_shape)} == {int}
    assert JumboPatchTST(4, 4, 40, custom_head=partial(lin_nd_head, d=n(12)), target_channels=[0], **SMALL).head


def test_meta_tensors_carry_shapes():
    model = make().to("meta")
    assert model(torch.zeros(8, 4, 40, device="meta")).shape == (8, 4, 12)


def test_bad_input():
    model = make()
    for shape in ((2, 3, 40), (2, 4, 41), (4, 40)):
        with pytest.raises(ValueError, match=r"built for \(B, 4 channels, 40 steps\), got"):
            model(torch.zeros(shape))
    with pytest.raises(ValueError, match="no sample"):
        model(torch.zeros(0, 4, 40))
    with pytest.raises(ValueError, match=r"x\.float\(\)"):
        model(torch.zeros(2, 4, 40, dtype=torch.long))
    x = torch.zeros(2, 4, 40)
    x[1, 2, 3], x[1, 3, 0] = float("nan"), float("inf")
    with pytest.raises(ValueError, match=r"2 of 320 values .*first at sample 1, channel 2, step 3"):
        model(x)


def test_needs_torch_and_timm_only():
    """Importing the package loads none of its hosts."""
    code = "import sys, ts_ext; print([m for m in ('tsai', 'fastai', 'transformers', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_adapter_without_its_host_names_the_extra():
    code = "import sys; sys.modules['tsai'] = None; import ts_ext; import ts_ext.tsai"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "jumbo-vit[ts]" in done.stderr.splitlines()[-1]
