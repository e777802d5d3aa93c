"""Heads of JumboPatchTST: classes, values, quantiles; channels that mix; BatchNorm; what each refuses."""

import copy
from functools import partial

import numpy as np
import pytest
import torch

from jumbo_core.jumbo import param_groups
from jumbo_core.models.series import JumboSeries
from tests.conftest import max_error
from ts_ext import JumboPatchTST, PinballLoss

SMALL = dict(patch_len=8, stride=4, d_model=16, n_layers=2, n_heads=4, d_ff=24, multiplier=2)
BASELINE = dict(multiplier=0, registers=4)
Q = (0.1, 0.5, 0.9)


def lin_nd_head():
    """Has the name of tsai's head: only that and ``d`` are read."""


def make(c_in=3, c_out=5, pred_dim=None, **options):
    model = JumboPatchTST(c_in, c_out, 40, pred_dim, **{**SMALL, **options})
    with torch.no_grad():  # weights far from the tidy initial ones, so that no part is silent
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


ENCODERS = [{}, BASELINE, dict(encoder="linear"), dict(encoder="linear", multiplier=0)]


@pytest.mark.parametrize("channels", ["independent", "mixing"])
@pytest.mark.parametrize("variant", ENCODERS)
@pytest.mark.parametrize(
    ("head", "c_out", "pred_dim", "shape"),
    [
        ("classify", 5, None, (5,)),
        ("classify", 1, None, (1,)),
        ("regress", 1, None, ()),
        ("regress", 2, None, (2,)),
        ("regress", 1, [2, 3], (2, 3)),
        ("forecast", 3, 6, (3, 6)),
    ],
)
def test_shapes_and_no_dead_parameter(head, c_out, pred_dim, shape, variant, channels):
    options = {**variant, "dropout": 0.0, "channels": channels}
    model = make(3, c_out, pred_dim, head=head, **options).train()
    out = model(torch.randn(4, 3, 40))
    assert out.shape == (4, *shape)
    out.square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())] == []
    assert len([p for g in param_groups(model, 1e-3, 0.05) for p in g["params"]]) == len(list(model.parameters()))


def test_classifier_reads_the_slices_and_the_mean_of_the_patches():
    """With weights that read one place alone, the logits are that place."""
    model = make(2, 3, head="classify").eval()
    x = torch.randn(4, 2, 40)
    assert model.head.in_features == 2 * (2 + 1) * 16
    tokens, real = model.encode(x)[:2]
    assert real is None
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    with torch.no_grad():
        model.head.weight[0, 5] = 1  # channel 0, slice 0, feature 5
        model.head.weight[1, 16 + 7] = 1  # channel 0, slice 1, feature 7
        model.head.weight[2, 3 * 16 + 2 * 16 + 9] = 1  # channel 1, mean of patches, feature 9
    jumbo, patches = tokens.jumbo.unflatten(0, (4, 2)), tokens.patches.unflatten(0, (4, 2))
    expected = torch.stack([jumbo[:, 0, 0, 5], jumbo[:, 0, 1, 7], patches[:, 1, :, 9].mean(1)], dim=1)
    assert max_error(model(x), expected) < 1e-6


@pytest.mark.parametrize("head", ["classify", "regress"])
def test_level_and_scale_count_without_revin_only(head):
    x = torch.randn(4, 3, 40)
    blind, seeing = make(head=head).eval(), make(head=head, revin=False).eval()
    assert max_error(blind(x), blind(x * 7 + 100)) < 1e-4
    assert max_error(seeing(x), seeing(x * 7 + 100)) > 1e-2


def test_a_classifier_learns_a_class_that_needs_both_channels():
    torch.manual_seed(0)
    phase = torch.randint(0, 2, (96, 2))
    label = phase[:, 0] ^ phase[:, 1]
    t = torch.arange(40) / 3
    x = torch.sin(t + phase[..., None] * torch.pi) + torch.randn(96, 2, 40) * 0.05
    model = JumboPatchTST(2, 2, 40, **{**SMALL, "dropout": 0.0, "n_layers": 1}, head="classify", channels="mixing")
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (model.eval()(x).argmax(1) == label).float().mean() > 0.95


# --- channels ---


def test_mixing_channels_inform_each_other_and_independent_ones_do_not():
    x = torch.randn(3, 4, 40)
    other = x.clone()
    other[:, 2] = torch.randn(3, 40)
    for channels, expected in (("independent", [False, False, True, False]), ("mixing", [True] * 4)):
        model = make(4, 4, 6, channels=channels).eval()
        assert (model(x) != model(other)).any(dim=-1).all(dim=0).tolist() == expected


@pytest.mark.parametrize("channels", ["independent", "mixing"])
@pytest.mark.parametrize("options", [{}, dict(affine=True), dict(quantiles=Q), dict(target_channels=[2, 0, 0])])
def test_scale_equivariance(options, channels):
    """f(10x + 5) = 10 f(x) + 5, each channel in a unit of its own."""
    model = make(3, 3, 6, channels=channels, **options).eval().double()
    x = torch.randn(4, 3, 40, dtype=torch.float64) * torch.tensor([1, 5, 0.1])[:, None]
    assert max_error(model(10 * x + 5), 10 * model(x) + 5) < 1e-10


def test_mixing_forecasts_the_chosen_channels_in_their_own_units():
    x = torch.randn(4, 3, 40) * torch.tensor([1.0, 100, 0.01])[:, None] + torch.tensor([0.0, 5000, -3])[:, None]
    model = JumboPatchTST(3, 2, 40, 6, channels="mixing", target_channels=[2, 1], affine=True, **SMALL).eval()
    out = model(x)
    assert model.head.out_features == 2 * 6 and out.shape == (4, 2, 6)
    assert (out[:, 0] + 3).abs().max() < 1 and 4000 < out[:, 1].min() and out[:, 1].max() < 6000
    whole = JumboPatchTST(3, 3, 40, 6, channels="mixing", affine=True, **SMALL).eval()
    state = model.state_dict()
    for key in ("head.weight", "head.bias"):
        rows = state[key].unflatten(0, (2, 6))
        state[key] = torch.stack([torch.zeros_like(rows[0]), rows[1], rows[0]]).flatten(0, 1)
    whole.load_state_dict(state)
    assert max_error(whole(x)[:, [2, 1]], out) < 1e-3
    assert max_error(whole(x)[:, 0], x[:, 0].mean(-1, keepdim=True).expand(-1, 6)) < 1e-5


def test_mixing_tokens_hold_the_patches_of_all_channels():
    series = JumboSeries(40, dim=16, depth=1, num_heads=2, patch_len=8, stride=4, in_channels=3, multiplier=2)
    assert series.patch_embed.in_features == 24 and series.num_patches == 10
    with pytest.raises(ValueError, match=r"expects series \(B, 3, 40\), got \(2, 40\)"):
        series(torch.zeros(2, 40))


# --- quantiles ---


@pytest.mark.parametrize(
    ("c_out", "pred_dim", "shape"), [(3, 6, (3, 6)), (1, [6], (6,)), (1, None, ()), (2, 6, (2, 6))]
)
@pytest.mark.parametrize("channels", ["independent", "mixing"])
@pytest.mark.filterwarnings("ignore:.*no target_channels:UserWarning")
def test_quantiles_are_one_more_dimension_and_never_cross(c_out, pred_dim, shape, channels):
    model = make(3, c_out, pred_dim, quantiles=Q, channels=channels).train()
    out = model(torch.randn(8, 3, 40))
    assert out.shape == (8, *shape, 3)
    assert (out.diff(dim=-1) >= 0).all()


def test_pinball_training_finds_the_quantiles():
    torch.manual_seed(0)
    x, noise = torch.randn(512, 1, 16), torch.rand(512, 1, 1)  # targets: uniform in units of the window
    y = x.mean(-1, keepdim=True) + noise * x.std(-1, unbiased=False, keepdim=True)
    model = JumboPatchTST(1, 1, 16, 1, patch_len=16, stride=16, d_model=8, n_layers=1, n_heads=2, d_ff=8, multiplier=1,
                          dropout=0.0, quantiles=Q)  # fmt: skip
    loss, optimizer = PinballLoss(Q), torch.optim.Adam(model.parameters(), 2e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.01, 200)
    for _ in range(200):
        value = loss(model(x), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
    below = (y[..., None] <= model.eval()(x)).float().mean(dim=(0, 1, 2))
    assert max_error(below, torch.tensor(Q)) < 0.06


def test_pinball_by_hand():
    forecast, target = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([3.0])
    expected = torch.tensor([0.1 * 2, 0.5 * 1, 0.1 * 1])  # the last one is above: (0.9 - 1) * (3 - 4)
    assert max_error(PinballLoss(Q, reduction="none")(forecast, target)[0], expected) < 1e-6
    assert abs(PinballLoss(Q)(forecast, target).item() - expected.mean().item()) < 1e-6
    assert abs(PinballLoss(Q, reduction="sum")(forecast, target).item() - expected.sum().item()) < 1e-6


# --- norms ---


@pytest.mark.parametrize("head", ["forecast", "classify", "pretrain"])
def test_batch_norm(head):
    model = JumboPatchTST(2, 2, 40, 6 if head == "forecast" else None, norm="BatchNorm", head=head, **SMALL)
    assert not any(isinstance(m, torch.nn.LayerNorm) for m in model.modules())
    assert model.series.encoder.blocks[0].norm3.num_features == 2 * 16
    model.train()
    before = model.series.encoder.norm.running_mean.clone()
    out = model(torch.randn(4, 2, 40))
    (out.loss if head == "pretrain" else out.square().mean()).backward()
    assert not torch.equal(model.series.encoder.norm.running_mean, before)
    model.eval()
    x = torch.randn(4, 2, 40)
    if head != "pretrain":  # a sample does not depend on its batch
        assert max_error(model(x)[:1], model(x[:1])) < 1e-5
    assert torch.equal(model(x)[0], copy.deepcopy(model)(x)[0])


def test_batch_norm_refusals():
    model = JumboPatchTST(1, 1, 40, 6, norm="BatchNorm", missing="mask", **SMALL).train()
    with pytest.raises(ValueError, match="one row of 10 patches: use larger batches"):
        model(torch.randn(1, 1, 40))
    x = torch.randn(2, 1, 40)
    x[0, 0, 3] = torch.nan
    model(x)  # a gap inside a patch is fine
    x[0, 0, :8] = torch.nan
    with pytest.raises(ValueError, match=r"1 of 20 have none: use norm='LayerNorm'"):
        model(x)
    assert model.eval()(x).shape == (2, 1, 6)
    with pytest.raises(ValueError, match="count every batch twice"):
        model.set_grad_checkpointing()
    with pytest.raises(ValueError, match=r"norm with encoder='linear' must be one of \('RMSNorm',\), got 'BatchNorm'"):
        JumboPatchTST(1, 1, 40, 6, norm="BatchNorm", encoder="linear", **SMALL)
    with pytest.raises(ValueError, match=r"must be one of \('LayerNorm', 'BatchNorm'\), got 'batchnorm'"):
        JumboPatchTST(1, 1, 40, 6, norm="batchnorm", **SMALL)


# --- errors ---


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3, 5, 40, 12), dict(head="classify"), r"one score per class, c_out 5, .* shape \(12,\)"),
        (
            (3, 5, 40),
            dict(head="classify", custom_head=partial(lin_nd_head, d=40)),
            "a class per step is not supported",
        ),
        ((3, 2, 40, 3), dict(head="regress"), r"c_out 2 and a target of shape \(3,\): they disagree"),
        ((3, 5, 40), dict(head="classify", quantiles=Q), "quantiles is an option of head='forecast'"),
        ((3, 5, 40), dict(head="pretrain", target_channels=[0]), "target_channels is an option of head='forecast'"),
        ((3, 0, 40), dict(head="classify"), "c_out must be an integer of at least 1, got 0"),
        ((3, 3, 40, 6), dict(channels="attention"), "unknown channels 'attention'; .* independent, mixing"),
        ((3, 3, 40, 6), dict(missing="drop"), "unknown missing 'drop'; .* error, mask"),
        ((3, 3, 40, 6), dict(quantiles=(0.5, 0.1)), r"quantiles must be rising .* got \(0.5, 0.1\)"),
        ((3, 3, 40, 6), dict(quantiles=(0.0, 0.5)), "strictly between 0 and 1"),
        ((3, 3, 40, 6), dict(quantiles=0.5), "quantiles must be rising"),
        ((3, 3, 40, 6), dict(quantiles=()), "quantiles must be rising"),
    ],
)
def test_bad_arguments(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        JumboPatchTST(*arguments, **{**SMALL, **options})


def test_exogenous_inputs_are_refused_with_what_is_supported():
    message = r"takes no 'futr_exog'. Supported as inputs: past values .*target_channels=.*Not supported: inputs known"
    with pytest.raises(TypeError, match=message):
        JumboPatchTST(3, 3, 40, 6, futr_exog=["price"], **SMALL)
    model = make(3, 3, 6)
    with pytest.raises(TypeError, match=message):
        model(torch.zeros(2, 3, 40), futr_exog=torch.zeros(2, 1, 46))
    with pytest.raises(TypeError, match=r"takes a tensor or numpy array \(B, C, L\) .* got tuple"):
        model((torch.zeros(2, 3, 40), torch.zeros(2, 1, 46)))
    with pytest.raises(TypeError, match="takes no 'd_modle': did you mean 'd_model'"):
        JumboPatchTST(3, 3, 40, 6, d_modle=8)


def test_numpy_arrays_are_taken():
    model = make(3, 3, 6).eval()
    x, mask = np.random.default_rng(0).normal(size=(2, 3, 40)), np.ones((2, 3, 40), dtype=bool)
    mask[0, 1, :9] = False
    out = model(x, mask)
    assert out.dtype == torch.float64 and torch.equal(out, model(torch.from_numpy(x), torch.from_numpy(mask)))
    with pytest.raises(ValueError, match=r"floating dtype, got torch\.int64"):
        model(np.ones((2, 3, 40), dtype=np.int64))


def test_a_generator_is_for_pretraining():
    with pytest.raises(ValueError, match="generator is for head='pretrain'; this model has head='classify'"):
        make(head="classify")(torch.zeros(2, 3, 40), generator=torch.Generator())


def test_losses_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match=r"expects a forecast of shape \(2, 6, 3\).*got \(2, 6\)"):
        PinballLoss(Q)(torch.zeros(2, 6), torch.zeros(2, 6))
    with pytest.raises(ValueError, match="reduction must be one of"):
        PinballLoss(Q, reduction="max")
    target = torch.tensor([1.0, torch.nan])
    with pytest.raises(ValueError, match=r"1 of 2 targets are NaN.*PinballLoss\(…, missing='mask'\)"):
        PinballLoss(Q)(torch.zeros(2, 3), target)
    masked = PinballLoss(Q, missing="mask")
    assert abs(masked(torch.zeros(2, 3), target) - PinballLoss(Q)(torch.zeros(1, 3), target[:1])) < 1e-7
