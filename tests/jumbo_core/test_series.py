"""The series front end: patching with end padding, masks, dropping, both kinds of global token."""

import pytest
import torch

from jumbo_core.jumbo import random_keep
from jumbo_core.models.series import JumboSeries, num_patches, to_patches


def make(**options):
    return JumboSeries(40, **{**dict(dim=16, depth=2, num_heads=2, patch_len=8, stride=4, multiplier=3), **options})


@pytest.mark.parametrize(
    ("length", "patch_len", "stride", "count"), [(100, 16, 8, 12), (336, 16, 8, 42), (16, 16, 8, 2), (40, 8, 4, 10)]
)
def test_patch_count(length, patch_len, stride, count):
    assert num_patches(length, patch_len, stride) == count
    assert to_patches(torch.zeros(2, length), patch_len, stride).shape == (2, count, patch_len)


def test_padding_repeats_the_last_value_at_the_end():
    patches = to_patches(torch.arange(100.0)[None], 16, 8)
    assert patches[0, 0].tolist() == list(range(16))  # nothing in front
    # 100 + 8 steps hold 12 patches that start at 0, 8, … 88: the last one reads 88..99 and four repeats of 99
    assert patches[0, -1].tolist() == [*range(88, 100), 99, 99, 99, 99]


@pytest.mark.parametrize("options", [dict(multiplier=3), dict(multiplier=0, registers=16)])
def test_output_shapes(options):
    out = make(**options)(torch.randn(5, 40))
    assert out.jumbo.shape == (5, options["multiplier"] or 1, 16)
    assert out.patches.shape == (5, 10, 16)


def test_masked_steps_have_no_influence():
    model = make().eval()
    x, mask = torch.randn(3, 40), torch.ones(3, 40, dtype=torch.bool)
    mask[0, :13] = False
    mask[1, 30:] = False
    other = torch.where(mask, x, torch.full_like(x, 1e4))
    a, b = model(x, mask), model(other, mask)
    assert torch.equal(a.jumbo, b.jumbo) and torch.equal(a.patches, b.patches)
    # a series without any masked step gives what it gives without a mask
    torch.testing.assert_close(a.jumbo[2], model(x).jumbo[2], atol=1e-6, rtol=0)
    # steps 0..7 are patch 0, all masked in the first series: nobody attends to it
    assert not torch.equal(a.jumbo[0], model(x.masked_fill(~mask, 0)).jumbo[0])


def test_dropping_is_indexing():
    model = make().eval()
    x = torch.randn(4, 40)
    keep = random_keep(4, model.num_patches, 0.5)
    out = model(x, keep=keep)
    assert out.patches.shape == (4, 5, 16)
    every = torch.arange(model.num_patches).expand(4, -1)
    torch.testing.assert_close(model(x, keep=every).jumbo, model(x).jumbo, atol=1e-6, rtol=0)


def test_short_initialisation_silences_the_jumbo_ffn():
    assert not make(init="short").encoder.jumbo_mlp.fc2.weight.any()
    assert make(init="released").encoder.jumbo_mlp.fc2.weight.any()


def test_errors_name_the_numbers():
    with pytest.raises(ValueError, match=r"7 steps is shorter than one patch of 8"):
        JumboSeries(7, patch_len=8, stride=4)
    with pytest.raises(ValueError, match=r"stride must be an integer of at least 1, got 0"):
        JumboSeries(40, stride=0)
    with pytest.raises(ValueError, match=r"'released' or 'short', got 'long'"):
        make(init="long")
    with pytest.raises(ValueError, match=r"\(B, 40\), got \(2, 41\)"):
        make()(torch.zeros(2, 41))
    with pytest.raises(ValueError, match=r"mask must be bool of the series' shape \(2, 40\)"):
        make()(torch.zeros(2, 40), torch.ones(2, 10, dtype=torch.bool))
