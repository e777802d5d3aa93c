"""Bipartite matching: who leaves, whom they join, where everyone stands afterwards, refusals."""

import pytest
import torch
from torch.nn import functional as F

from jumbo_core.tofu import compose, match, source_map, unmerge


def directions(*degrees: float) -> torch.Tensor:
    """Unit vectors (1, N, 2) at these angles."""
    angle = torch.tensor([degrees]).deg2rad()
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def test_by_hand():
    # position   0 (class)  1    2   3    4    5   6
    keys = directions(0, 10, 13, 90, 180, 81, 100)
    # sources 2, 4, 6; destinations 1, 3, 5. Nearest: 2 -> 1 (3°), 4 -> 3 (90°), 6 -> 3 (10°).
    matching = match(keys, 2, protected=1)
    assert matching.sources.tolist() == [[2, 6]]
    assert matching.destinations.tolist() == [[1, 3]]
    assert matching.kept.tolist() == [[0, 1, 3, 4, 5]]
    assert matching.place.tolist() == [[0, 1, 1, 2, 3, 4, 2]]
    assert matching.num_tokens == 7


def test_released_order():
    matching = match(directions(0, 10, 13, 90, 180, 81, 100), 2, protected=1, order="released")
    assert matching.kept.tolist() == [[0, 4, 1, 3, 5]]  # class token, sources that stay, destinations
    assert matching.place.tolist() == [[0, 2, 2, 3, 1, 4, 3]]


def test_several_sources_join_one():
    matching = match(directions(0, 50, 51, 200, 49, 250, 50), 3, protected=1)
    assert matching.sources.tolist() == [[6, 2, 4]] and matching.destinations.tolist() == [[1, 1, 1]]
    assert matching.place.tolist() == [[0, 1, 1, 2, 1, 3, 1]]


def test_importance_decides_who_leaves_and_similarity_whom_they_join():
    keys = directions(0, 10, 13, 90, 180, 81, 100)
    importance = torch.tensor([[0.0, 0.0, 9.0, 0.0, 1.0, 0.0, 5.0]])
    matching = match(keys, 2, protected=1, importance=importance)
    assert matching.sources.tolist() == [[4, 6]] and matching.destinations.tolist() == [[3, 3]]


def check_consistent(matching, batch: int, tokens: int, r: int, protected: int) -> None:
    kept = matching.kept.shape[1]
    assert kept == tokens - r
    for b in range(batch):
        sources, destinations = matching.sources[b].tolist(), matching.destinations[b].tolist()
        assert len(set(sources)) == r and not set(sources) & set(destinations)
        assert all(p >= protected and p % 2 == 0 for p in sources)
        assert all(p >= protected and p % 2 == 1 for p in destinations)
        assert sorted(matching.kept[b].tolist()) == sorted(set(range(tokens)) - set(sources))
        assert matching.kept[b, :protected].tolist() == list(range(protected))
        place = matching.place[b].tolist()
        for position in range(tokens):
            head = destinations[sources.index(position)] if position in sources else position
            assert matching.kept[b, place[position]].item() == head


@pytest.mark.parametrize("order", ["position", "released"])
@pytest.mark.parametrize("tokens", [2, 7, 12, 13])
@pytest.mark.parametrize("protected", [0, 1, 2, 3])
def test_indices_are_consistent(tokens, protected, order):
    keys = torch.randn(3, max(tokens, protected), 8)
    tokens = keys.shape[1]
    for r in range((tokens - protected) // 2 + 1):
        matching = match(keys, r, protected=protected, order=order)
        check_consistent(matching, 3, tokens, r, protected)
        if order == "position":
            assert (matching.kept.diff(dim=1) > 0).all()


def test_the_best_edges_against_a_plain_loop():
    keys, protected, r = torch.randn(2, 3, 21, 8), 4, 5
    matching = match(keys, r, protected=protected)
    mean = keys.mean(1)
    for b in range(2):
        edges = []
        for s in range(4, 21, 2):
            scores = {d: F.cosine_similarity(mean[b, s], mean[b, d], dim=0).item() for d in range(5, 21, 2)}
            d = max(scores, key=scores.get)
            edges.append((scores[d], s, d))
        edges.sort(reverse=True)
        assert list(zip(matching.sources[b].tolist(), matching.destinations[b].tolist(), strict=True)) == [
            (s, d) for _, s, d in edges[:r]
        ]


def test_lengths_of_keys_do_not_matter():
    keys = torch.randn(2, 20, 8)
    scaled = keys * torch.rand(2, 20, 1).add(0.1)
    assert torch.equal(match(keys, 6, protected=1).sources, match(scaled, 6, protected=1).sources)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_ranked_in_fp32(dtype):
    keys = torch.randn(2, 33, 16).to(dtype)
    full, half = match(keys.float(), 8, protected=1), match(keys, 8, protected=1)
    assert all(torch.equal(a, b) for a, b in zip(full[:4], half[:4], strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = match(keys.float(), 8, protected=1)
    assert torch.equal(cast.sources, full.sources) and torch.equal(cast.destinations, full.destinations)
    huge = match(torch.full((1, 9, 8), 6e4, dtype=dtype), 2, protected=1)  # squares overflow fp16
    assert huge.sources.tolist() == [[2, 4]]


def test_keys_get_no_gradient_and_are_not_changed():
    keys = torch.randn(1, 9, 4, requires_grad=True)
    before = keys.detach().clone()
    matching = match(keys, 2, protected=1)
    assert not any(t.requires_grad for t in matching[:4]) and torch.equal(keys, before)


@pytest.mark.parametrize("protected, tokens, possible", [(1, 26, 12), (4, 26, 11), (0, 3, 1), (5, 5, 0), (5, 6, 0)])
def test_more_than_half_is_refused(protected, tokens, possible):
    keys = torch.randn(2, tokens, 4)
    assert match(keys, possible, protected=protected).sources.shape == (2, possible)
    with pytest.raises(ValueError, match=rf"remove r={possible + 1} tokens, but at most {possible} of"):
        match(keys, possible + 1, protected=protected)


@pytest.mark.parametrize("r", [-1, float("nan"), 1.0, True, "2", None])
def test_bad_r(r):
    with pytest.raises(ValueError, match="r must be an integer of at least 0, got"):
        match(torch.randn(1, 9, 4), r, protected=1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("position", [3, 4])  # a destination, a source
def test_keys_that_are_not_finite(bad, position):
    keys = torch.randn(1, 9, 4)
    keys[0, position, 1] = bad
    with pytest.raises(ValueError, match="keys must be finite, got NaN or infinite values"):
        match(keys, 2, protected=1)


def test_importance_is_checked_where_it_is_read():
    importance = torch.zeros(1, 9)
    importance[0, [0, 1, 3]] = float("nan")  # prefix and destinations
    match(torch.randn(1, 9, 4), 2, protected=1, importance=importance)
    importance[0, 4] = float("nan")
    with pytest.raises(ValueError, match="importance must be finite"):
        match(torch.randn(1, 9, 4), 2, protected=1, importance=importance)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"keys": torch.zeros(9, 4)}, r"keys must be \(B, N, D\) or \(B, H, N, D\), got \(9, 4\)"),
        ({"protected": 10}, "protected is 10 but there are only 9 tokens"),
        ({"protected": -1}, "protected must be an integer of at least 0"),
        ({"importance": torch.zeros(9)}, r"importance must be \(B, N\) = \(1, 9\), got \(9,\)"),
        ({"order": "random"}, "order must be one of 'position', 'released', got 'random'"),
    ],
)
def test_other_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        match(**{"keys": torch.zeros(1, 9, 4), "r": 2, "protected": 1, **change})


def test_compose_and_source_map_follow_the_originals():
    first = match(torch.randn(2, 11, 4), 3, protected=1)
    second = match(torch.randn(2, 8, 4), 2, protected=1)
    place = compose(compose(None, first), second)
    tokens = torch.randn(2, 6, 5)
    assert torch.equal(unmerge(tokens, place), unmerge(unmerge(tokens, second), first))
    sources = source_map(place, 6)
    assert sources.dtype == torch.bool and sources.shape == (2, 6, 11)
    assert sources.sum(1).eq(1).all() and sources[:, 0, 0].all()
    for b in range(2):
        for original in range(11):
            assert sources[b, place[b, original], original]


def test_compiles_and_exports():
    class Step(torch.nn.Module):
        def forward(self, keys):
            return match(keys, 3, protected=1)[:4]

    keys = torch.randn(2, 2, 13, 4)
    expected = Step()(keys)
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(Step(), (keys,), dynamic_shapes=({0: batch},)).module()
    compiled = torch.compile(Step(), backend="eager", fullgraph=True)
    for run in (exported, compiled):
        assert all(torch.equal(a, b) for a, b in zip(run(keys), expected, strict=True))
    larger = torch.randn(5, 2, 13, 4)
    assert all(torch.equal(a, b) for a, b in zip(exported(larger), Step()(larger), strict=True))
