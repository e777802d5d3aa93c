"""Prune, average and MLERP against a plain loop; sizes, weights, dtypes, unmerge, refusals."""

import pytest
import torch

from jumbo_core.tofu import Matching, compose, fuse, match, unmerge
from tests.conftest import max_error

OPS = ["prune", "average", "mlerp"]


def reference(tokens, matching, op, sizes, norm, weights):
    """The docstring of ``fuse``, one group after the other."""
    tokens = tokens.double()
    batch, count, width = tokens.shape
    kept = matching.kept.shape[1]
    out, out_sizes = torch.zeros(batch, kept, width).double(), torch.zeros(batch, kept, 1).double()
    for b in range(batch):
        for k in range(kept):
            head = matching.kept[b, k].item()
            members = [n for n in range(count) if matching.place[b, n] == k]
            if op == "prune":
                members = [head]
            default = sizes[b, :, 0].double() if op == "average" else torch.ones(count).double()
            w = (default if weights is None else weights[b].double())[members]
            x = tokens[b, members]
            mean = (x * w[:, None]).sum(0) / w.sum()
            if op == "mlerp":
                lengths = x.norm(dim=1)
                if norm == "spherical":
                    mean = (x / lengths[:, None] * w[:, None]).sum(0)
                target = lengths.max() if norm == "max" else (lengths * w).sum() / w.sum()
                mean = mean / mean.norm() * target
            out[b, k] = mean
            out_sizes[b, k] = sizes[b, members].sum()
    return out, out_sizes


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("norm", ["max", "mean", "spherical"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("order", ["position", "released"])
def test_against_a_plain_loop(op, norm, weighted, order):
    tokens = torch.randn(3, 17, 6)
    sizes = torch.randint(1, 5, (3, 17, 1)).float()
    weights = torch.rand(3, 17) if weighted and op != "prune" else None
    matching = match(torch.randn(3, 17, 2), 6, protected=2, order=order)
    out, out_sizes = fuse(tokens, matching, op, sizes=sizes, norm=norm, weights=weights)
    expected, expected_sizes = reference(tokens, matching, op, sizes, norm, weights)
    assert max_error(out.double(), expected) < 1e-5
    assert torch.equal(out_sizes.double(), expected_sizes)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float16, 2e-3), (torch.bfloat16, 3e-2)])
def test_dtypes(op, dtype, tolerance):
    tokens = torch.randn(2, 12, 8).to(dtype)
    matching = match(tokens, 5, protected=1)
    out, sizes = fuse(tokens, matching, op)
    expected, _ = reference(tokens, matching, op, torch.ones(2, 12, 1), "max", None)
    assert out.dtype == dtype and sizes.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert max_error(out.double(), expected) < tolerance


def test_sums_run_in_fp32():
    """2,049 members of 1 sum to 2,048 in fp16: one by one, the mean of many would stand still."""
    count = 5000
    tokens = torch.ones(1, count, 1, dtype=torch.float16)
    matching = match(tokens, count // 2, protected=0)
    out, sizes = fuse(tokens, matching, "average")
    assert out[0, 0].item() == 1.0
    assert sizes.max().item() == count // 2 + 1


def test_sizes_add_up_but_not_what_was_pruned():
    tokens = torch.randn(2, 13, 4)
    first = match(tokens, 4, protected=1)
    merged, sizes = fuse(tokens, first, "average")
    assert sizes.shape == (2, 9, 1) and sizes.sum(1).flatten().tolist() == [13, 13]
    second = match(merged, 3, protected=1)
    pruned, left = fuse(merged, second, "prune", sizes=sizes)
    assert torch.equal(left, sizes.gather(1, second.kept[..., None]))
    assert torch.equal(pruned, merged.gather(1, second.kept[..., None].expand(-1, -1, 4)))


def test_averages_of_averages_are_averages_of_originals():
    tokens = torch.randn(2, 13, 4)
    first = match(tokens, 4, protected=1)
    once, sizes = fuse(tokens, first, "average")
    second = match(once, 3, protected=1)
    twice, sizes = fuse(once, second, "average", sizes=sizes)
    place = compose(compose(None, first), second)
    sums = torch.zeros(2, 6, 4).scatter_add(1, place[..., None].expand(-1, -1, 4), tokens)
    assert max_error(twice, sums / sizes) < 1e-6


def test_a_group_without_weight_counts_its_members_alike():
    tokens = torch.randn(1, 9, 4)
    matching = match(tokens, 3, protected=1)
    for op in ("average", "mlerp"):
        out, _ = fuse(tokens, matching, op, weights=torch.zeros(1, 9))
        assert torch.equal(out, fuse(tokens, matching, op, weights=torch.ones(1, 9))[0])


@pytest.mark.parametrize("op", OPS)
def test_nothing_to_do(op):
    tokens, sizes = torch.randn(2, 5, 3), torch.rand(2, 5, 1)
    matching = match(tokens, 0, protected=1)
    out, same = fuse(tokens, matching, op, sizes=sizes)
    assert torch.equal(out, tokens) and torch.equal(same, sizes)
    assert torch.equal(unmerge(tokens, matching), tokens)
    assert fuse(tokens, matching, op)[1].tolist() == torch.ones(2, 5, 1).tolist()


@pytest.mark.parametrize("op", OPS)
def test_protected_tokens_are_exact(op):
    tokens = torch.randn(2, 23, 4)
    out, sizes = fuse(tokens, match(tokens, 9, protected=5), op)
    assert torch.equal(out[:, :5], tokens[:, :5]) and sizes[:, :5].eq(1).all()


def test_unmerge():
    tokens = torch.arange(8.0).reshape(1, 8, 1).expand(2, 8, 3)
    matching = match(torch.randn(2, 8, 4), 3, protected=1)
    pruned, _ = fuse(tokens, matching, "prune")
    full = unmerge(pruned, matching)
    head = torch.arange(8).repeat(2, 1).scatter(1, matching.sources, matching.destinations)
    assert torch.equal(full[..., 0], head.float())


def test_gradients_reach_every_member():
    tokens = torch.randn(1, 9, 4, requires_grad=True)
    matching = match(tokens, 3, protected=1)
    for op in OPS:
        (gradient,) = torch.autograd.grad(fuse(tokens, matching, op)[0].square().sum(), tokens)
        reached = gradient.abs().sum(-1) > 0
        gone = torch.zeros(1, 9, dtype=torch.bool).scatter(1, matching.sources, True)
        assert torch.equal(reached, ~gone if op == "prune" else torch.ones_like(gone))


@pytest.mark.parametrize("op", OPS)
def test_compiles_and_exports(op):
    class Step(torch.nn.Module):
        def forward(self, tokens):
            matching = match(tokens, 3, protected=1)
            fused, sizes = fuse(tokens, matching, op)
            return unmerge(fused, matching), sizes

    tokens = torch.randn(2, 13, 4)
    expected = Step()(tokens)
    exported = torch.export.export(Step(), (tokens,)).module()
    compiled = torch.compile(Step(), backend="aot_eager", fullgraph=True)
    for run in (exported, compiled):
        assert all(max_error(a, b) < 1e-6 for a, b in zip(run(tokens), expected, strict=True))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"op": "merge"}, "op must be one of 'prune', 'average', 'mlerp', got 'merge'"),
        ({"norm": "min"}, "norm must be one of 'max', 'mean', 'spherical', got 'min'"),
        ({"tokens": torch.zeros(1, 8, 4)}, r"\(B, N\) = \(1, 9\) as matched, got \(1, 8, 4\)"),
        ({"sizes": torch.zeros(1, 9)}, r"sizes must be \(B, N, 1\) = \(1, 9, 1\), got \(1, 9\)"),
        ({"weights": torch.zeros(1, 9, 1)}, r"weights must be \(B, N\) = \(1, 9\), got \(1, 9, 1\)"),
        ({"weights": torch.full((1, 9), -1.0)}, "weights must be finite and not negative"),
        ({"weights": torch.full((1, 9), float("nan"))}, "weights must be finite and not negative"),
        ({"op": "prune", "weights": torch.zeros(1, 9)}, "op 'prune' has no use for weights"),
    ],
)
def test_refusals(change, message):
    matching = match(torch.randn(1, 9, 4), 2, protected=1)
    with pytest.raises(ValueError, match=message):
        fuse(**{"tokens": torch.zeros(1, 9, 4), "matching": matching, "op": "average", **change})


def test_unmerge_refuses_what_does_not_fit():
    matching = match(torch.randn(1, 9, 4), 2, protected=1)
    with pytest.raises(ValueError, match="unmerge expects 7 tokens, as many as were kept, got 9"):
        unmerge(torch.zeros(1, 9, 4), matching)
    with pytest.raises(ValueError, match="with B=1, got"):
        unmerge(torch.zeros(2, 7, 4), matching)
    with pytest.raises(RuntimeError, match="out of bounds"):
        unmerge(torch.zeros(1, 3, 4), matching.place)


def join(*vectors, dtype=torch.float32, weights=None):
    """The seed's MLERP of tokens that all join the first."""
    count = len(vectors)
    index = torch.arange(1, count).unsqueeze(0)
    matching = Matching(index, index * 0, torch.tensor([[0]]), torch.zeros(1, count, dtype=torch.long), count)
    tokens = torch.tensor([vectors], dtype=dtype, requires_grad=True)
    weights = None if weights is None else torch.tensor([weights])
    out, _ = fuse(tokens, matching, "mlerp", norm="spherical", weights=weights)
    (gradient,) = torch.autograd.grad(out.float().sum(), tokens)
    assert out.dtype == dtype and gradient.isfinite().all()
    return out[0, 0].detach()


def test_spherical_averages_directions_apart_from_lengths():
    half = 0.5**0.5
    assert join([1.0, 0.0], [0.0, 3.0]).tolist() == pytest.approx([2 * half, 2 * half])  # 45 degrees, whoever is longer
    # Weights 1 : 3: direction (1, 3) / sqrt(10), length (1 * 1 + 3 * 3) / 4.
    out = join([1.0, 0.0], [0.0, 3.0], weights=[1.0, 3.0])
    assert out.tolist() == pytest.approx([2.5 * 0.1**0.5, 2.5 * 0.9**0.5])
    assert join([2.0, 0.0], [5.0, 0.0], [5.0, 0.0]).tolist() == pytest.approx([4.0, 0.0])


def test_spherical_edges():
    v = [1.0, -2.0, 2.0]
    assert join([0.0] * 3, [0.0] * 3).tolist() == [0.0] * 3
    assert join([0.0] * 3, v).tolist() == pytest.approx([x / 2 for x in v])  # a zero has no direction, but a length
    assert join(v, [0.0] * 3).tolist() == pytest.approx([x / 2 for x in v])
    # Antipodal, of equal and of unequal length: the unit vectors cancel, the destination's direction remains.
    assert join(v, [-x for x in v]).tolist() == pytest.approx(v)
    assert join(v, [-3 * x for x in v]).tolist() == pytest.approx([2 * x for x in v])
    assert join([0.3, -0.1], [-0.9, 0.3], dtype=torch.float64).tolist() == pytest.approx([0.6, -0.2])
    assert join(v, [2.0, 0.0, 0.0], weights=[0.0, 1.0]).tolist() == pytest.approx([2.0, 0.0, 0.0])


def test_spherical_of_huge_fp16():
    """Norms of 6e4 and beyond: eight entries of 6e4 are 169,706 long."""
    assert join([6e4, 0.0], [0.0, 6e4], dtype=torch.float16).tolist() == pytest.approx([6e4 * 0.5**0.5] * 2, rel=1e-3)
    assert join([6e4] * 8, [6e4] * 8, dtype=torch.float16).tolist() == [6e4] * 8
    assert join([6e4] * 8, [-6e4] * 8, dtype=torch.float16).tolist() == [6e4] * 8


@pytest.mark.parametrize("weighted", [False, True])
def test_spherical_gradcheck(weighted):
    tokens = torch.randn(1, 9, 3, dtype=torch.float64, requires_grad=True)
    matching = match(tokens, 4, protected=1)
    weights = torch.rand(1, 9, dtype=torch.float64) if weighted else None
    assert torch.autograd.gradcheck(lambda x: fuse(x, matching, "mlerp", norm="spherical", weights=weights)[0], tokens)
