"""Missing values and windows of unequal length: statistics, attention, heads, and what is an error."""

import pytest
import torch

from tests.conftest import max_error
from ts_ext import JumboPatchTST, ObservedMSELoss, RevIN, pad_windows

SMALL = dict(patch_len=8, stride=4, d_model=16, n_layers=2, n_heads=4, d_ff=24, multiplier=2)
TASKS = [dict(head="forecast", c_out=2, pred_dim=6), dict(head="classify", c_out=3), dict(head="regress", c_out=1)]


def make(**options):
    model = JumboPatchTST(**{**dict(c_in=2, seq_len=40), **SMALL, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def gaps():
    mask = torch.ones(3, 2, 40, dtype=torch.bool)
    mask[0, 0, :13] = False  # whole patches
    mask[1, 1, 5::3] = False  # steps here and there
    return mask


# --- RevIN ---


def test_revin_statistics_are_those_of_the_observed_values():
    x, mask = torch.randn(3, 2, 40, dtype=torch.float64) * 7 + 1e6, gaps()
    normal, stats = RevIN(2).normalize(torch.where(mask, x, torch.nan), mask)
    for i in range(3):
        for c in range(2):
            seen = x[i, c][mask[i, c]]
            assert abs(stats.mean[i, c, 0] - seen.mean()) < 1e-8
            assert abs(stats.std[i, c, 0] - seen.std(unbiased=False)) < 1e-8
    assert not normal[~mask].any() and torch.isfinite(normal).all()
    back = RevIN(2).inverse(normal, stats)
    assert max_error(back[mask], x[mask]) < 1e-9
    assert max_error(RevIN(2).normalize(x, torch.ones_like(mask))[0], RevIN(2).normalize(x)[0]) < 1e-10


@pytest.mark.parametrize("value", [0.0, 0.1, 3e8 + 0.7, -1e30])
def test_a_constant_with_gaps_comes_back_bit_by_bit(value):
    x, mask = torch.full((3, 2, 40), value, dtype=torch.float64), gaps()
    normal, stats = RevIN(2).normalize(torch.where(mask, x, torch.nan), mask)
    assert not normal.any()
    assert (RevIN(2).inverse(torch.randn(3, 2, 5), stats) == value).all()


def test_revin_affine_leaves_missing_at_zero_and_gradients_are_finite():
    revin, mask = RevIN(2, affine=True), gaps()
    torch.nn.init.constant_(revin.bias, 0.5)
    x = torch.where(mask, torch.randn(3, 2, 40), torch.nan).requires_grad_()
    normal, stats = revin.normalize(x, mask)
    assert not normal[~mask].any()
    (normal.square().sum() + stats.std.sum()).backward()
    assert torch.isfinite(x.grad).all() and not x.grad[~mask].any() and x.grad[mask].any()


def test_revin_inverse_of_chosen_channels():
    revin = RevIN(3, affine=True)
    torch.nn.init.normal_(revin.weight)
    torch.nn.init.normal_(revin.bias)
    x = torch.randn(2, 3, 10) * torch.tensor([1, 10, 100])[:, None]
    normal, stats = revin.normalize(x)
    assert max_error(revin.inverse(normal[:, [2, 0, 2]], stats, [2, 0, 2]).float(), x[:, [2, 0, 2]]) < 1e-4
    with pytest.raises(ValueError, match=r"2 chosen channels, steps\), got \(2, 3, 10\)"):
        revin.inverse(normal, stats, [2, 0])


# --- the model ---


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("options", [{}, dict(channels="mixing"), dict(encoder="linear"), dict(revin=False)])
def test_missing_values_have_no_influence(task, options):
    model = make(**task, **options)
    x, mask = torch.randn(3, 2, 40) + 5, gaps()
    expected = model(x, mask)
    for other in (torch.full_like(x, 1e4), torch.full_like(x, torch.nan), torch.full_like(x, torch.inf)):
        assert torch.equal(model(torch.where(mask, x, other), mask), expected)
    assert max_error(model(x)[:2], expected[:2]) > 1e-3  # the values behind the mask would matter
    assert max_error(model(x)[2], expected[2]) < 1e-5  # a full window does not mind its neighbours' gaps
    assert torch.equal(model(x, torch.ones_like(mask)), model(x))


@pytest.mark.parametrize("task", TASKS)
def test_nan_as_missing_is_the_same_as_the_mask(task):
    model, x, mask = make(**task), torch.randn(3, 2, 40), gaps()
    asking = make(missing="mask", **task)
    asking.load_state_dict(model.state_dict())
    holed = torch.where(mask, x, torch.nan)
    assert torch.equal(asking(holed), model(x, mask))
    assert torch.equal(asking(x), model(x))
    one_more = mask.clone()
    one_more[2, 0, 7] = False
    assert torch.equal(asking(holed, one_more), model(x, one_more))  # both say what is missing


def test_scale_equivariance_and_constant_with_gaps():
    model, mask = make(**TASKS[0]).double(), gaps()
    x = torch.randn(3, 2, 40, dtype=torch.float64)
    assert max_error(model(10 * x + 5, mask), 10 * model(x, mask) + 5) < 1e-10
    x[:, 1] = 12345.678
    assert (model(x, mask)[:, 1] == 12345.678).all()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_series_gives_the_same_alone_and_in_a_batch(task, side):
    model = make(**task)
    series = [torch.randn(2, length) + 3 for length in (40, 23, 9)]
    values, mask = pad_windows(series, 40, side=side)
    together = model(values.masked_fill(~mask, 1e4), mask)
    for i, one in enumerate(series):
        assert max_error(model(*pad_windows([one], 40, side=side))[0], together[i]) < 1e-5


def test_pad_windows():
    values, mask = pad_windows([torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, torch.nan, 5.0]])], 4)
    assert values[0].tolist() == [[0, 0, 1, 2]] and mask[0].tolist() == [[False, False, True, True]]
    assert mask[1].tolist() == [[False, True, False, True]]
    values, mask = pad_windows([torch.tensor([[1, 2, 3]]), torch.tensor([[0.7, torch.nan]], dtype=torch.float64)], 4)
    assert values.dtype == torch.float64 and values[1, 0, 2] == 0.7 and values[1, 0, 3].isnan()
    assert mask[1, 0].tolist() == [False, False, True, False]
    assert pad_windows([torch.tensor([[1, 2]])], 4)[0].dtype == torch.float32
    assert pad_windows([torch.ones(1, 2)], 4, side="right")[1][0].tolist() == [[True, True, False, False]]
    for series, message in (
        ([], "no series to pad"),
        ([torch.ones(2, 5)], r"series 0 is \(2, 5\): expected \(2 channels, 1 to 4 steps\)"),
        ([torch.ones(2, 3), torch.ones(1, 3)], r"series 1 is \(1, 3\)"),
        ([torch.ones(2, 0)], r"series 0 is \(2, 0\)"),
        ([torch.ones(3)], r"expected \(C channels"),
    ):
        with pytest.raises(ValueError, match=message):
            pad_windows(series, 4)
    with pytest.raises(ValueError, match="'left' or 'right', got 'top'"):
        pad_windows([torch.ones(1, 2)], 4, side="top")


def test_errors_say_how_many_and_where():
    model, x, mask = make(**TASKS[0]), torch.randn(3, 2, 40), gaps()
    x[1, 0, 7], x[2, 1, 9] = torch.nan, torch.nan
    with pytest.raises(
        ValueError, match=r"2 of 240 values are NaN or infinite, the first at sample 1, channel 0, step 7"
    ):
        model(x)
    x[2, 1, 9] = 0
    with pytest.raises(ValueError, match=r"1 of 240 values are NaN or infinite and not masked as missing"):
        model(x, mask)
    x[1, 0, 7] = torch.inf
    with pytest.raises(ValueError, match="sample 1, channel 0, step 7"):
        make(missing="mask", **TASKS[0])(x)
    for wrong in (mask.float(), mask[:, :1], mask[:1]):
        with pytest.raises(ValueError, match=r"must be bool of the values' shape \(3, 2, 40\)"):
            model(torch.randn(3, 2, 40), wrong)
    mask[1, 1] = False
    with pytest.raises(ValueError, match=r"1 of 6 channels of windows have no observed value.*channel\) \(1, 1\)"):
        model(torch.randn(3, 2, 40), mask)
    with pytest.raises(ValueError, match="no observed value"):
        make(missing="mask", revin=False, **TASKS[0])(torch.full((1, 2, 40), torch.nan))


def test_training_with_gaps_gives_finite_gradients():
    model = make(missing="mask", **TASKS[0]).train()
    x = torch.where(gaps(), torch.randn(3, 2, 40), torch.nan)
    model(x).square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_export_with_a_mask():
    model, x, mask = make(**TASKS[0]), torch.randn(3, 2, 40), gaps()
    exported = torch.export.export(model, (x, mask))
    assert max_error(exported.module()(x, mask), model(x, mask)) < 1e-5
    asking = make(missing="mask", **TASKS[0])
    holed = torch.where(mask, x, torch.nan)
    assert max_error(torch.export.export(asking, (holed,)).module()(holed), asking(holed)) < 1e-5


def test_observed_mse():
    forecast, target = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([0.0, torch.nan, 1.0])
    loss = ObservedMSELoss()(forecast, target)
    loss.backward()
    assert loss.item() == 2.5 and forecast.grad.tolist() == [1, 0, 2]
    assert ObservedMSELoss(reduction="none")(forecast, target).tolist() == [1, 0, 4]
    nothing = ObservedMSELoss()(forecast, torch.full((3,), torch.nan))
    assert nothing.item() == 0
    with pytest.raises(ValueError, match="1 of 3 targets are NaN"):
        ObservedMSELoss(missing="error")(forecast, target)
    with pytest.raises(ValueError, match="differ in shape"):
        ObservedMSELoss()(forecast, target[:2])
