"""Public ToFu ports: MLERP is finite for zero, antipodal and huge vectors, and its norm follows the declared rule."""

import pytest
import torch

from jumbo_core.tofu import Matching, fuse

GRADCHECKS = [("prune", False), ("average", False), ("average", True), ("mlerp", False), ("mlerp", True)]


def pair(first: list[float], second: list[float], dtype=torch.float32) -> tuple[torch.Tensor, Matching]:
    """Two tokens; the second joins the first."""
    matching = Matching(
        torch.tensor([[1]]), torch.tensor([[0]]), torch.tensor([[0]]), torch.tensor([[0, 0]]), num_tokens=2
    )
    return torch.tensor([[first, second]], dtype=dtype), matching


def merged(first, second, dtype=torch.float32, **options) -> torch.Tensor:
    out, sizes = fuse(*pair(first, second, dtype), "mlerp", **options)
    assert out.dtype == dtype and out.shape == (1, 1, len(first))
    assert sizes.tolist() == [[[2.0]]]
    return out[0, 0]


@pytest.mark.parametrize("norm, expected", [("max", 3.0), ("mean", 2.0)])
@pytest.mark.parametrize("swap", [False, True])
def test_norm_rule(norm, expected, swap):
    vectors = ([1.0, 0.0], [0.0, 3.0])
    out = merged(*(vectors[::-1] if swap else vectors), norm=norm)
    assert out.norm().item() == pytest.approx(expected, abs=1e-6)
    assert (out / out.norm()).tolist() == pytest.approx([0.1**0.5, 0.9**0.5], abs=1e-6)  # of the mean (1, 3)


@pytest.mark.parametrize("norm", ["max", "mean"])
def test_antipodal_keeps_the_destination_direction(norm):
    v = [1.0, -2.0, 2.0]
    assert merged(v, [-x for x in v], norm=norm).tolist() == pytest.approx(v, abs=1e-6)
    assert merged([0.3, -0.1], [-0.3, 0.1], norm=norm).norm().item() == pytest.approx(0.1**0.5, abs=1e-6)


def test_nearly_antipodal_is_not_rounding_noise():
    """0.1 v + 0.2 v - 0.3 v is rounding noise in fp32, no direction: the destination's is taken."""
    count = 64
    index = torch.tensor([[1, 2]]).expand(count, -1)
    matching = Matching(index, torch.zeros_like(index), index[:, :1] * 0, torch.zeros(count, 3).long(), num_tokens=3)
    tokens = torch.randn(count, 1, 8) * torch.tensor([0.1, 0.2, -0.3]).view(1, 3, 1)
    assert tokens.sum(1).abs().max() > 0
    out, _ = fuse(tokens, matching, "mlerp")
    torch.testing.assert_close(out[:, 0], tokens[:, 0] * 3, atol=1e-5, rtol=0)  # the norm of the longest


@pytest.mark.parametrize("norm", ["max", "mean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_zero(norm, dtype):
    assert merged([0.0, 0.0], [0.0, 0.0], dtype, norm=norm).tolist() == [0.0, 0.0]
    scale = {"max": 1.0, "mean": 0.5}[norm]
    assert merged([0.0, 0.0], [0.0, 4.0], dtype, norm=norm).tolist() == [0.0, 4.0 * scale]


@pytest.mark.parametrize("norm", ["max", "mean"])
@pytest.mark.parametrize("op", ["average", "mlerp"])
def test_huge_fp16(norm, op):
    out, _ = fuse(*pair([6e4] * 8, [6e4] * 8, torch.float16), op, norm=norm)
    assert out.tolist() == [[[6e4] * 8]]
    # The mean points along one axis, the norm is 169,706: more than fp16 can hold, so its largest number stands there.
    out, _ = fuse(*pair([6e4] * 8, [6e4] + [-6e4] * 7, torch.float16), op, norm=norm)
    assert out.tolist() == [[[{"average": 6e4, "mlerp": 65504.0}[op]] + [0.0] * 7]]


@pytest.mark.parametrize("op", ["prune", "average", "mlerp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_group_of_one_is_exact(op, dtype):
    tokens = torch.randn(1, 4, 7).to(dtype)
    matching = Matching(
        torch.tensor([[2]]),
        torch.tensor([[3]]),
        torch.tensor([[0, 1, 3]]),
        torch.tensor([[0, 1, 2, 2]]),
        num_tokens=4,
    )
    sizes = torch.tensor([[[3.0], [7.0], [1.0], [2.0]]])
    out, _ = fuse(tokens, matching, op, sizes=sizes)
    assert torch.equal(out[:, :2], tokens[:, :2])
    assert torch.equal(out[:, 2], tokens[:, 3]) == (op == "prune")


@pytest.mark.parametrize("op, weighted", GRADCHECKS)
@pytest.mark.parametrize("norm", ["max", "mean"])
def test_gradcheck(op, norm, weighted):
    matching = Matching(
        torch.tensor([[2, 4]]),
        torch.tensor([[1, 1]]),
        torch.tensor([[0, 1, 3]]),
        torch.tensor([[0, 1, 1, 2, 1]]),
        num_tokens=5,
    )
    tokens = torch.randn(1, 5, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(1, 5, dtype=torch.float64) if weighted else None
    assert torch.autograd.gradcheck(lambda x: fuse(x, matching, op, norm=norm, weights=weights)[0], tokens)


@pytest.mark.parametrize(
    "first, second", [([0.0, 0.0], [0.0, 0.0]), ([1.0, 2.0], [-1.0, -2.0]), ([0.0, 0.0], [1.0, 0.0])]
)
@pytest.mark.parametrize("norm", ["max", "mean"])
def test_gradients_are_finite_at_the_edges(first, second, norm):
    tokens, matching = pair(first, second)
    tokens.requires_grad_()
    fuse(tokens, matching, "mlerp", norm=norm)[0].sum().backward()
    assert tokens.grad.isfinite().all()
