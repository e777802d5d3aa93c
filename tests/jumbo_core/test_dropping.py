"""Token dropping: index, schedule, refusals."""

import pytest
import torch

from jumbo_core.jumbo import linear_drop_rate, random_keep, take_patches


def test_index_is_sorted_distinct_and_seeded():
    first = random_keep(4, 10, 0.7, generator=torch.Generator().manual_seed(1))
    again = random_keep(4, 10, 0.7, generator=torch.Generator().manual_seed(1))
    assert first.shape == (4, 3) and torch.equal(first, again)
    assert (first.diff(dim=1) > 0).all() and first.min() >= 0 and first.max() < 10
    assert random_keep(1, 10, 0.99).shape == (1, 1)
    assert torch.equal(random_keep(2, 5, 0.0), torch.arange(5).expand(2, 5))


def test_the_share_is_exact():
    for patches, rate, kept in ((100, 0.9, 10), (20, 0.9, 2), (10, 0.3, 7), (196, 0.75, 49), (3, 0.99, 1)):
        assert random_keep(1, patches, rate).shape == (1, kept)


def test_padding_is_dropped_first():
    mask = torch.zeros(64, 16, dtype=torch.bool)
    mask[:, [3, 9]] = True
    keep = random_keep(64, 16, 0.75, mask=mask)
    assert mask.gather(1, keep).sum(dim=1).eq(2).all()


def test_take_patches():
    patches = torch.arange(12.0).reshape(2, 3, 2)
    taken = take_patches(patches, torch.tensor([[2, 0], [1, 1]]))
    assert torch.equal(taken, torch.stack([patches[0, [2, 0]], patches[1, [1, 1]]]))


def test_schedule_of_the_paper():
    assert linear_drop_rate(0, 100) == 0.9
    assert linear_drop_rate(50, 100) == pytest.approx(0.5)
    assert linear_drop_rate(100, 100) == pytest.approx(0.1)


def test_an_empty_or_foreign_index_is_refused():
    for keep in (torch.empty(2, 0, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long), torch.zeros(2, 2)):
        with pytest.raises(ValueError, match=r"keep must be a long index \(B, K\) with K > 0"):
            take_patches(torch.zeros(2, 3, 1), keep)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_bad_rate(rate):
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\)"):
        random_keep(1, 4, rate)


def test_bad_schedule():
    for step, total in [(11, 10), (-1, 10), (0, 0)]:
        with pytest.raises(ValueError, match=f"step {step} is outside 0..{total}"):
            linear_drop_rate(step, total)
    with pytest.raises(ValueError, match="got 2"):
        linear_drop_rate(0, 10, start=2)
