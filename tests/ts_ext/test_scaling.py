"""RevIN: exact both ways, whatever the offset and the unit."""

import pytest
import torch

from ts_ext import RevIN


def test_normalised_windows_have_mean_zero_and_deviation_one():
    normal, stats = RevIN(3).normalize(torch.randn(4, 3, 50) * 7 + 100)
    torch.testing.assert_close(normal.mean(-1), torch.zeros(4, 3, dtype=torch.float64), atol=1e-10, rtol=0)
    torch.testing.assert_close(normal.std(-1, unbiased=False), torch.ones(4, 3, dtype=torch.float64))
    assert stats.mean.shape == stats.std.shape == (4, 3, 1)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e-20, 3e8 + 0.7, -1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_series_come_back_bit_by_bit(value, dtype):
    x = torch.full((2, 1, 37), value, dtype=dtype)
    revin = RevIN(1)
    normal, stats = revin.normalize(x)
    assert not normal.any()
    assert torch.equal(revin.inverse(normal, stats).to(dtype), x)
    anything = torch.randn(2, 1, 5)
    assert (revin.inverse(anything, stats).to(dtype) == x[..., :1]).all()  # the forecast of a constant is the constant


@pytest.mark.parametrize(("offset", "tolerance"), [(0, 1e-14), (1e6, 1e-9), (1e9, 1e-6)])
def test_huge_offsets_cancel_nothing(offset, tolerance):
    x = torch.randn(2, 3, 64, dtype=torch.float64)
    shifted = x + offset
    revin = RevIN(3)
    a, _ = revin.normalize(x)
    b, stats = revin.normalize(shifted)
    torch.testing.assert_close(a, b, atol=tolerance, rtol=0)
    torch.testing.assert_close(revin.inverse(b, stats), shifted, atol=1e-16 * max(offset, 10), rtol=1e-15)


def test_float32_at_a_huge_offset_keeps_what_float32_holds():
    x = (torch.arange(64) % 7).float()[None, None] * 8 + 1e8  # multiples of 8 are exact there
    revin = RevIN(1)
    normal, stats = revin.normalize(x)
    assert torch.equal(revin.inverse(normal, stats).float(), x)
    torch.testing.assert_close(normal, revin.normalize(x.double() - 1e8)[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e-20, 1.0, 1e20, 1e160, 1e300])
@pytest.mark.parametrize("affine", [False, True])
def test_any_scale_is_normalised_alike(scale, affine):
    revin = RevIN(2, affine=affine)
    x = torch.randn(3, 2, 20, dtype=torch.float64)
    expected, _ = revin.normalize(x)
    normal, stats = revin.normalize(x * scale)
    torch.testing.assert_close(normal, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(revin.inverse(normal, stats) / scale, x, atol=1e-12, rtol=0)
    huge = RevIN(2, eps=1e-5).normalize(x * scale)
    assert torch.isfinite(huge[0]).all() and torch.isfinite(huge[1].std).all()


def test_gradient_is_that_of_the_plain_formula():
    x = torch.randn(2, 1, 9, dtype=torch.float64, requires_grad=True)
    target = torch.randn(2, 1, 9, dtype=torch.float64)

    def plain(x):
        mean, std = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True).sqrt()
        return ((x - mean) / std * target).sum() + (std * 3 + mean).square().sum()

    def ours(x):
        normal, stats = RevIN(1).normalize(x)
        return (normal * target).sum() + (stats.std * 3 + stats.mean).square().sum()

    gradients = [torch.autograd.grad(f(x), x)[0] for f in (plain, ours)]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=0)


def test_affine_constant_window_is_the_bias_and_comes_back():
    revin = RevIN(1, affine=True)
    torch.nn.init.constant_(revin.bias, 0.3)
    normal, stats = revin.normalize(torch.full((1, 1, 8), 7.7, dtype=torch.float64))
    torch.testing.assert_close(normal, torch.full_like(normal, 0.3), check_dtype=False, rtol=1e-6, atol=0)
    assert (revin.inverse(torch.randn(1, 1, 5), stats) == 7.7).all()


def test_affine_is_undone():
    revin = RevIN(2, affine=True)
    with torch.no_grad():
        revin.weight.copy_(torch.tensor([2.0, -0.5]))
        revin.bias.copy_(torch.tensor([0.3, 4.0]))
    x = torch.randn(3, 2, 20, dtype=torch.float64)
    normal, stats = revin.normalize(x)
    torch.testing.assert_close(normal[:, 1].mean(-1), torch.full((3,), 4.0, dtype=torch.float64))
    torch.testing.assert_close(revin.inverse(normal, stats), x, atol=1e-12, rtol=0)


def test_eps_is_the_one_of_the_paper():
    x = torch.randn(2, 1, 30, dtype=torch.float64) * 1e-3
    normal, _ = RevIN(1, eps=1e-5).normalize(x)
    expected = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(normal, expected, atol=1e-12, rtol=0)


def test_gradient_of_a_constant_window_is_finite():
    x = torch.ones(1, 1, 10, requires_grad=True)
    normal, stats = RevIN(1).normalize(x)
    (normal.sum() + stats.std.sum() + stats.mean.sum()).backward()
    assert torch.isfinite(x.grad).all()


def test_errors():
    with pytest.raises(ValueError, match="num_channels >= 1"):
        RevIN(0)
    revin = RevIN(3, affine=True)
    _, stats = revin.normalize(torch.randn(2, 3, 8))
    for call in (revin.normalize, lambda x: revin.inverse(x, stats)):
        for shape in ((2, 1, 8), (2, 8, 3), (8,)):
            with pytest.raises(ValueError, match=r"built for \(B, 3 channels, steps\), got"):
                call(torch.zeros(shape))
    with pytest.raises(ValueError, match="eps >= 0"):
        RevIN(1, eps=float("nan"))
