"""JumboPatchTST on the linear encoder: shapes, gradients, precision, long windows, tsai, what it refuses."""

import copy
import warnings

import numpy as np
import pytest
import torch

from jumbo_core.jumbo import param_groups, random_keep
from jumbo_core.linear import AdventurerEncoder
from jumbo_core.models.series import JumboSeries
from tests.conftest import max_error
from ts_ext import JumboPatchTST

pytestmark = pytest.mark.filterwarnings("ignore:.*no target_channels:UserWarning")

SMALL = dict(patch_len=8, stride=4, d_model=16, n_layers=2, d_ff=24, multiplier=2, encoder="linear", d_state=8)
VARIANTS = [{}, dict(multiplier=0), dict(share_jumbo_ffn=False)]


def make(c_in=4, c_out=4, seq_len=40, pred_dim=12, **options):
    model = JumboPatchTST(c_in, c_out, seq_len, pred_dim, **{**SMALL, **options})
    with torch.no_grad():  # weights far from the tidy initial ones, so that no part is silent
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("shape", [(4, 12), (3, 12), (12,), (), (4, 1), (3, 1), (1,), (1, 12)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_output_shape_forward_and_backward(shape, variant):
    model = make(4, 1, 40, list(shape) or None, **variant).train()
    out = model(torch.randn(8, 4, 40))
    assert out.shape == (8, *shape)
    out.square().mean().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()] == []


def test_sizes():
    model = JumboPatchTST(1, 1, 100, 5, encoder="linear")
    encoder = model.series.encoder
    assert isinstance(encoder, AdventurerEncoder) and model.patch_num == 12
    mixer = encoder.blocks[0].mixer
    assert (mixer.d_state, mixer.head_dim, mixer.num_heads) == (16, 64, 4)  # 2 * 128 = 4 * 64
    assert encoder.blocks[0].mlp.fc1_x.out_features == 256 and len(encoder.blocks) == 3
    assert model.head.in_features == (6 + 12) * 128
    assert JumboPatchTST(1, 1, 100, 5, encoder="linear", multiplier=0).head.in_features == (1 + 12) * 128
    for width, expected in ((48, 32), (16, 32), (17, 2)):
        odd = JumboPatchTST(1, 1, 100, 5, encoder="linear", d_model=width, d_ff=100)
        assert odd.series.encoder.blocks[0].mixer.head_dim == expected  # of 2 * width channels
        assert odd.series.encoder.blocks[0].mlp.fc1_x.out_features == 100
    chosen = JumboPatchTST(1, 1, 100, 5, encoder="linear", d_state=np.int64(4), head_dim=np.int64(16), n_heads=7)
    assert (
        chosen.series.encoder.blocks[0].mixer.num_heads == 16
    )  # and n_heads, which does not divide 128, plays no part


@pytest.mark.parametrize("c_out", [3, 1])  # one forecast per channel; a learned mixture of them
@pytest.mark.parametrize("options", [*VARIANTS, dict(affine=True, init="released"), dict(n_layers=1)])
def test_no_dead_parameter(c_out, options):
    model = JumboPatchTST(3, c_out, 40, 6, **{**SMALL, "dropout": 0.0, **options})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model(torch.randn(4, 3, 40)).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())] == []
    grouped = [p for group in param_groups(model, 1e-3, 0.05) for p in group["params"]]
    assert len(grouped) == len(list(model.parameters()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_scale_equivariance(variant):
    model = make(**variant).eval().double()
    x = torch.randn(8, 4, 40, dtype=torch.float64) * torch.tensor([1, 5, 0.1, 30])[:, None]
    torch.testing.assert_close(model(x * 100 + 7), model(x) * 100 + 7, atol=1e-8, rtol=1e-10)


def test_channels_are_independent():
    model = make().eval()
    x = torch.randn(3, 4, 40)
    other = x.clone()
    other[:, 2] = torch.randn(3, 40)
    assert (model(x) != model(other)).any(dim=-1).all(dim=0).tolist() == [False, False, True, False]


@pytest.mark.parametrize("encoder", ["linear", "attention"])
def test_the_linear_encoder_sees_the_order_of_patches_without_positions(encoder):
    model = JumboSeries(40, dim=16, depth=2, num_heads=2, patch_len=8, stride=4, multiplier=2, encoder=encoder,
                        **(dict(head_dim=8) if encoder == "linear" else {})).eval()  # fmt: skip
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    torch.nn.init.zeros_(model.pos_embed)
    x, order = torch.randn(1, 40), torch.arange(10)[None]
    forward, backward = model(x, keep=order).jumbo, model(x, keep=order.flip(1)).jumbo
    assert (max_error(forward, backward) > 1e-2) == (encoder == "linear")


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
    model = make(dropout=0.5, head_dropout=0.5, drop_path=0.5).eval()
    x = torch.randn(8, 4, 40)
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


def test_float64_series_are_accepted_and_keep_their_digits():
    model = make().eval()
    x = torch.randn(2, 4, 40, dtype=torch.float64)
    out = model(x)
    assert out.dtype == torch.float64
    assert max_error(out, model(x.float()).double()) < 1e-5
    assert max_error(model(x + 1e9) - 1e9, out) < 1e-4  # float32 steps are 64 wide there


def test_autocast():
    model = make().eval()
    x = torch.randn(4, 4, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    expected = model(x)
    # As on all whole models the root mean square: rounding a value of 3.6 deviations alone costs 1.4e-2 of one.
    assert out.dtype == torch.float32 and (out - expected).square().mean().sqrt() < 1.5e-2 * expected.std()


def test_export_with_a_dynamic_batch():
    model, x = make().eval(), torch.randn(3, 4, 40)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    x = torch.randn(7, 4, 40)
    torch.testing.assert_close(exported.module()(x), model(x), atol=1e-5, rtol=1e-5)


def test_copies():
    model = make().eval()
    x = torch.randn(2, 4, 40)
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_short_initialisation_silences_the_jumbo_ffn():
    model = JumboPatchTST(1, 1, 40, 4, **SMALL)
    assert not model.series.encoder.jumbo_mlp.fc2.weight.any()
    assert JumboPatchTST(1, 1, 40, 4, **SMALL, init="released").series.encoder.jumbo_mlp.fc2.weight.any()


# --- the series front end ---


def series(**options):
    return JumboSeries(40, **{**dict(dim=16, depth=2, patch_len=8, stride=4, head_dim=8, d_state=4), **options},
                       encoder="linear")  # fmt: skip


@pytest.mark.parametrize("multiplier", [0, 3])
def test_masked_steps_have_no_influence(multiplier):
    model = series(multiplier=multiplier).eval()
    x, mask = torch.randn(3, 40), torch.ones(3, 40, dtype=torch.bool)
    mask[0, :13] = False
    mask[1, 30:] = False
    a, b = model(x, mask), model(torch.where(mask, x, torch.full_like(x, 1e4)), mask)
    assert a.jumbo.shape == (3, multiplier or 1, 16) and a.patches.shape == (3, 10, 16)
    assert torch.equal(a.jumbo, b.jumbo) and torch.equal(a.patches, b.patches)
    assert max_error(a.jumbo[2], model(x).jumbo[2]) < 1e-6
    assert not torch.equal(a.jumbo[0], model(x.masked_fill(~mask, 0)).jumbo[0])


def test_dropping_is_indexing():
    model = series().eval()
    x = torch.randn(4, 40)
    assert model(x, keep=random_keep(4, 10, 0.5)).patches.shape == (4, 5, 16)
    assert max_error(model(x, keep=torch.arange(10).expand(4, -1)).jumbo, model(x).jumbo) < 1e-6


def test_options_of_the_other_encoder_are_refused_by_the_series():
    with pytest.raises(TypeError, match="registers"):
        series(registers=2)
    with pytest.raises(ValueError, match=r"encoder must be one of \('attention', 'linear'\), got 'conv'"):
        JumboSeries(40, encoder="conv")


# --- long windows ---


def test_a_window_of_16384_steps():
    model = JumboPatchTST(2, 2, 16_384, 4, **{**SMALL, "patch_len": 16, "stride": 8}).eval()
    assert model.patch_num == 2048
    with torch.no_grad():
        out = model(torch.randn(1, 2, 16_384).cumsum(-1))
    assert out.shape == (1, 2, 4) and torch.isfinite(out).all()


def test_training_memory_grows_linearly_with_the_window():
    """What autograd keeps: four times the window, four times the bytes (a full map of attention would be 16 times)."""

    def kept(steps: int) -> int:
        model = make(1, 1, steps, 1, dropout=0.0).train()
        total = {}

        def pack(tensor):
            if not isinstance(tensor, torch.nn.Parameter):
                total[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(torch.randn(1, 1, steps))
        del out
        return sum(total.values())

    assert 3 < kept(8192) / kept(2048) < 5


# --- tsai ---


def test_forecaster_trains_exports_and_loads(tmp_path):
    pytest.importorskip("tsai", reason="needs jumbo-vit[ts]")
    import tsai.inference  # noqa: F401 (gives learners get_X_preds)
    from fastai.learner import load_learner
    from tsai.tslearner import TSForecaster

    from ts_ext.tsai import jumbo_lr, jumbo_splitter

    steps = np.arange(148)
    values = np.stack([np.sin(steps / 3) * 2 + 7, np.cos(steps / 5) * 30 - 100]).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(values, 48, axis=1).swapaxes(0, 1)
    x, y = windows[..., :40].copy(), windows[..., 40:].copy()
    splits = list(range(64)), list(range(64, len(x)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learner = TSForecaster(
            x, y, splits=splits, arch=JumboPatchTST, arch_config=dict(SMALL, n_layers=1, dropout=0.0), bs=32,
            path=tmp_path, seed=0, device=torch.device("cpu"), splitter=jumbo_splitter,
        )  # fmt: skip
        with learner.no_bar(), learner.no_logging():
            learner.fit_one_cycle(4, jumbo_lr(1e-2))
    losses = [row[1] for row in learner.recorder.values]
    assert losses[-1] < 0.7 * losses[0]
    assert isinstance(learner.model.series.encoder, AdventurerEncoder) and len(learner.opt.param_lists) == 2
    expected = learner.get_X_preds(x)[0]
    assert expected.shape == y.shape and torch.equal(expected, learner.get_X_preds(x)[0])
    learner.export(tmp_path / "model.pkl")
    assert torch.equal(load_learner(tmp_path / "model.pkl").get_X_preds(x)[0], expected)


# --- errors ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(encoder="conv"), r"encoder must be one of \('attention', 'linear'\), got 'conv'"),
        (dict(registers=2), "encoder='linear' has no registers, got 2: leave it at 0 or use 'attention'"),
        (dict(attn_dropout=0.1), "encoder='linear' has no attn_dropout, got 0.1: leave it at 0"),
        (dict(layer_scale=1e-4), "encoder='linear' has no layer_scale, got 0.0001: leave it at None"),
        (dict(head_dim=7), r"head_dim 7 does not divide the inner width 32 \(expand 2 x dim 16\)"),
        (dict(head_dim=0), "head_dim must be an integer of at least 1, got 0"),
        (dict(d_state=0), "d_state must be an integer of at least 1, got 0"),
        (dict(d_state=2.5), "d_state must be an integer of at least 1, got 2.5"),
        (dict(encoder="attention", n_heads=4, head_dim=8), "head_dim 8 is an option of encoder='linear'.*d_model 16"),
        (dict(multiplier=-1), "multiplier must be an integer of at least 0, got -1"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        JumboPatchTST(4, 4, 40, 12, **{**SMALL, **options})
