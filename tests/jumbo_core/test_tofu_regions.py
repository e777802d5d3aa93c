"""Region matching: one token of each region stays, odd grids, a plain-loop reference, unmerge, refusals."""

import math

import pytest
import torch
from torch.nn import functional as F

from jumbo_core.tofu import fuse, unmerge
from jumbo_core.tofu.regions import match_regions, match_to, region_destinations
from tests.conftest import max_error

GRIDS = [(4, 4), (5, 7), (1, 6), (6, 1), (3, 8), (1, 1)]
REGIONS = [(2, 2), (3, 2), (1, 4), (8, 8), (1, 1)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_by_hand():
    angle = torch.tensor([[0.0, 10, 90, 81, 180, 12, 93, 200]]).deg2rad()  # a 2 x 4 grid, destinations 1 and 6
    tokens = torch.stack([angle.cos(), angle.sin()], dim=-1)
    matching = match_to(tokens, torch.tensor([6, 1]), 4)
    # 2 -> 6 (3°), 5 -> 1 (2°), 0 -> 1 (10°), 3 -> 6 (12°); 4 and 7 stay.
    assert matching.sources.tolist() == [[5, 2, 0, 3]]
    assert matching.destinations.tolist() == [[1, 6, 1, 6]]
    assert matching.kept.tolist() == [[1, 4, 6, 7]]
    assert matching.place.tolist() == [[0, 0, 2, 2, 1, 0, 2, 3]]
    assert matching.num_tokens == 8
    pruned, _ = fuse(tokens, matching, "prune")
    assert torch.equal(unmerge(pruned, matching), tokens[:, [1, 1, 6, 6, 4, 1, 6, 7]])


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("height, width", GRIDS)
def test_each_region_keeps_exactly_one(height, width, region):
    (sy, sx), seen = region, {}
    for seed in range(60):
        chosen = region_destinations(height, width, region=region, generator=generator(seed)).tolist()
        cells = [(p // width // sy, p % width // sx) for p in chosen]
        assert cells == [(i, j) for i in range(math.ceil(height / sy)) for j in range(math.ceil(width / sx))]
        for p, cell in zip(chosen, cells, strict=True):
            seen.setdefault(cell, set()).add(p)
    members = {cell: 0 for cell in seen}
    for p in range(height * width):
        members[p // width // sy, p % width // sx] += 1
    # Each token of a small region has its turn, those of edge regions too (60 draws; 64 members cannot all).
    assert all(len(seen[cell]) == n if n <= 6 else len(seen[cell]) > n / 3 for cell, n in members.items())


def test_draws_are_even():
    counts = torch.zeros(15, dtype=torch.long)
    source = generator()
    for _ in range(4000):
        counts[region_destinations(3, 5, region=(2, 2), generator=source)] += 1
    shares = counts.view(3, 5) / 4000
    expected = torch.tensor([[1, 1, 1, 1, 2], [1, 1, 1, 1, 2], [2, 2, 2, 2, 4]]) / 4
    assert max_error(shares, expected) < 0.03


def plain_matching(tokens, destinations, r):
    """Edges of one sample, the best first: (source, destination)."""
    edges = []
    for s in sorted(set(range(len(tokens))) - set(destinations)):
        scores = {d: F.cosine_similarity(tokens[s], tokens[d], dim=0).item() for d in sorted(destinations)}
        d = max(scores, key=scores.get)
        edges.append((scores[d], s, d))
    edges.sort(key=lambda edge: -edge[0])
    return [(s, d) for _, s, d in edges[:r]]


@pytest.mark.parametrize("height, width, region, ratio", [
    (6, 8, (2, 2), 0.5), (6, 8, (2, 2), 0.75), (5, 7, (2, 2), 0.3), (7, 5, (3, 2), 0.6), (4, 6, (1, 2), 0.5),
])  # fmt: skip
def test_against_a_plain_loop(height, width, region, ratio):
    tokens = torch.randn(3, height * width, 8)
    destinations = region_destinations(height, width, region=region, generator=generator(5)).tolist()
    matching = match_regions(tokens, height, width, ratio, region=region, generator=generator(5))
    r = int(ratio * height * width)
    out, sizes = fuse(tokens, matching, "average")
    attended = torch.tanh(out.cumsum(1))  # anything that mixes tokens
    restored = unmerge(attended, matching)
    assert out.shape == (3, height * width - r, 8) and sizes.sum(1).eq(height * width).all()
    for b in range(3):
        edges = plain_matching(tokens[b], destinations, r)
        assert list(zip(matching.sources[b].tolist(), matching.destinations[b].tolist(), strict=True)) == edges
        joins = dict(edges)
        kept = [p for p in range(height * width) if p not in joins]
        assert matching.kept[b].tolist() == kept
        for i, p in enumerate(kept):
            group = [p, *(s for s, d in edges if d == p)]
            assert max_error(out[b, i], tokens[b, group].mean(0)) < 1e-6
            assert sizes[b, i].item() == len(group)
        for p in range(height * width):
            assert torch.equal(restored[b, p], attended[b, kept.index(joins.get(p, p))])


@pytest.mark.parametrize("height, width", GRIDS)
@pytest.mark.parametrize("region", REGIONS)
def test_all_that_can_leave(height, width, region):
    kept = math.ceil(height / region[0]) * math.ceil(width / region[1])
    matching = match_to(
        torch.randn(2, height * width, 4),
        region_destinations(height, width, region=region, generator=generator()),
        height * width - kept,
    )
    assert matching.kept.shape == (2, kept) and matching.place.max().item() == kept - 1
    assert torch.equal(matching.kept[0], matching.kept[1])  # what stays is the same in all samples


def test_ratio_nought_is_the_identity():
    tokens = torch.randn(2, 12, 4)
    matching = match_regions(tokens, 3, 4, 0, generator=generator())
    out, sizes = fuse(tokens, matching, "mlerp")
    assert torch.equal(out, tokens) and sizes.eq(1).all()
    assert torch.equal(unmerge(out, matching), tokens)


def test_repeatable_and_the_global_generator_is_left_alone():
    tokens = torch.randn(1, 64, 4)
    state = torch.get_rng_state()
    first = match_regions(tokens, 8, 8, 0.5, generator=generator(3))
    torch.manual_seed(99)
    changed = torch.get_rng_state()
    again = match_regions(tokens, 8, 8, 0.5, generator=generator(3))
    assert torch.equal(torch.get_rng_state(), changed) and not torch.equal(changed, state)
    assert all(torch.equal(a, b) for a, b in zip(first[:4], again[:4], strict=True))
    other = match_regions(tokens, 8, 8, 0.5, generator=generator(4))
    assert not torch.equal(first.destinations.unique(), other.destinations.unique())
    one = generator(3)  # a generator goes on: the next draw is another
    match_regions(tokens, 8, 8, 0.5, generator=one)
    assert not torch.equal(match_regions(tokens, 8, 8, 0.5, generator=one).kept, first.kept)


def test_ties_go_to_the_lower_position():
    matching = match_to(torch.ones(1, 16, 4), torch.tensor([2, 7, 8, 13]), 3)
    assert matching.sources.tolist() == [[0, 1, 3]] and matching.destinations.tolist() == [[2, 2, 2]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_ranked_in_fp32(dtype):
    tokens, chosen = torch.randn(2, 36, 16).to(dtype), torch.arange(0, 36, 4)
    full, half = match_to(tokens.float(), chosen, 18), match_to(tokens, chosen, 18)
    assert all(torch.equal(a, b) for a, b in zip(full[:4], half[:4], strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = match_to(tokens.float(), chosen, 18)
    assert torch.equal(cast.sources, full.sources) and torch.equal(cast.destinations, full.destinations)
    huge = match_to(torch.full((1, 16, 8), 6e4, dtype=dtype), torch.tensor([3]), 2)  # squares overflow fp16
    assert huge.sources.tolist() == [[0, 1]]


def test_gradient_through_fuse_and_unmerge():
    tokens = torch.randn(1, 12, 3, dtype=torch.float64, requires_grad=True)
    matching = match_regions(tokens, 3, 4, 0.5, generator=generator())
    assert not any(t.requires_grad for t in matching[:4])
    for op in ("prune", "average", "mlerp"):
        assert torch.autograd.gradcheck(lambda x, op=op: unmerge(fuse(x, matching, op)[0], matching), tokens)


def test_matching_compiles_whole():
    tokens, chosen = torch.randn(2, 30, 8), region_destinations(5, 6, generator=generator())

    def run(x):
        matching = match_to(x, chosen, 15)
        return unmerge(fuse(x, matching, "mlerp")[0], matching)

    assert max_error(torch.compile(run, fullgraph=True, backend="aot_eager")(tokens), run(tokens)) < 1e-6


@pytest.mark.parametrize("ratio", [-0.1, 0.76, 1.0, math.nan, math.inf, "0.5", None, True])
def test_ratios_out_of_range_are_refused(ratio):
    with pytest.raises(ValueError, match=r"ratio must lie in \[0, 0.75\]: each 2x2 region keeps a token"):
        match_regions(torch.randn(1, 16, 4), 4, 4, ratio, generator=generator())


def test_what_an_odd_grid_cannot_spare_is_refused():
    tokens = torch.randn(1, 25, 4)
    assert match_regions(tokens, 5, 5, 0.64, generator=generator()).kept.shape == (1, 9)
    with pytest.raises(ValueError, match=r"asked to remove 18 of 25 tokens \(ratio 0.75\), but at most 16 can leave a "
                       r"grid of 5x5.*keep 9 tokens.*choose a ratio of at most 0.64"):  # fmt: skip
        match_regions(tokens, 5, 5, 0.75, generator=generator())
    with pytest.raises(ValueError, match="asked to remove r=17 tokens, but 25 tokens with 9 destinations have at most"):
        match_to(tokens, torch.arange(9), 17)


def test_a_ratio_that_is_a_shade_low_counts_as_meant():
    assert 100 * 0.29 < 29
    matching = match_regions(torch.randn(1, 100, 4), 10, 10, 0.29, generator=generator())
    assert matching.sources.shape == (1, 29)


def test_refusals():
    tokens = torch.randn(1, 16, 4)
    with pytest.raises(ValueError, match=r"N = height \* width = 3 \* 5 = 15, got \(1, 16, 4\)"):
        match_regions(tokens, 3, 5, 0.5, generator=generator())
    with pytest.raises(TypeError, match=r"generator must be a torch\.Generator on the CPU, got None"):
        match_regions(tokens, 4, 4, 0.5, generator=None)
    with pytest.raises(ValueError, match="region must be an integer of at least 1, got 0"):
        match_regions(tokens, 4, 4, 0.5, region=(0, 2), generator=generator())
    with pytest.raises(ValueError, match="tokens must be finite, got NaN"):
        match_regions(tokens * math.nan, 4, 4, 0.5, generator=generator())
