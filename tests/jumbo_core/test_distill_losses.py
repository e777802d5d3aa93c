"""Map loss: three forms, one number and one gradient; masked loss: only masked tokens count."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jumbo_core.distill import (
    activation_map,
    activation_matching_loss,
    activation_matching_reference,
    masked_prediction_loss,
    random_mask,
)
from jumbo_core.distill.activation import cosines_by_gram, cosines_by_rows


class LargestTensor(TorchDispatchMode):
    """Most elements of any tensor that an operation inside made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


def loss_and_gradient(function, teacher, student):
    student = student.detach().clone().requires_grad_()
    loss = function(teacher, student)
    return loss.detach(), torch.autograd.grad(loss, student)[0]


# Rows in one block, rows in blocks (the last one short), Gram matrices.
FORMS = {"map": (11, 8, 12, 256), "blocks": (11, 8, 12, 4), "gram": (40, 3, 4, 256)}


@pytest.mark.parametrize("form", FORMS)
def test_forward_and_gradient_equal_the_loops(form):
    n, dt, ds, row_block = FORMS[form]
    teacher, student = torch.randn(2, n, dt, dtype=torch.float64), torch.randn(2, n, ds, dtype=torch.float64)

    loss, gradient = loss_and_gradient(
        lambda t, s: activation_matching_loss(t, s, row_block=row_block), teacher, student
    )
    expected, expected_gradient = loss_and_gradient(activation_matching_reference, teacher, student)

    assert loss.dtype == torch.float64 and 0.1 < expected < 0.99
    assert (loss - expected).abs() < 1e-10
    assert (gradient - expected_gradient).abs().max() < 1e-10

    single, single_gradient = loss_and_gradient(
        lambda t, s: activation_matching_loss(t, s, row_block=row_block), teacher.float(), student.float()
    )
    assert single.dtype == torch.float32
    assert (single - expected).abs() < 1e-5 and (single_gradient - expected_gradient).abs().max() < 1e-5


def test_the_forms_agree_on_the_same_vectors():
    t, s = (torch.nn.functional.normalize(torch.randn(2, 30, d, dtype=torch.float64), dim=-1) for d in (7, 9))
    gram, whole, blocks = cosines_by_gram(t, s), cosines_by_rows(t, s, 30), cosines_by_rows(t, s, 7)
    assert gram.shape == (2, 30)
    assert (gram - whole).abs().max() < 1e-12 and (gram - blocks).abs().max() < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form):
    n, dt, ds, row_block = FORMS[form]
    teacher = torch.randn(1, n, dt, dtype=torch.float64)
    student = torch.randn(1, n, ds, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: activation_matching_loss(teacher, s, row_block=row_block), student)


def test_numbers_by_hand():
    teacher = torch.tensor([[[2.0, 0.0], [0.0, 3.0]]])  # map: the identity
    student = torch.tensor([[[1.0], [5.0]]])  # map: all ones
    assert torch.equal(activation_map(teacher), torch.eye(2)[None])
    assert torch.equal(activation_map(student), torch.ones(1, 2, 2))
    one = 1 - 1 / math.sqrt(2)
    assert activation_matching_loss(teacher, student).item() == pytest.approx(one, abs=1e-6)
    # Mean over stages, and over the batch: the second stage and sample are perfect.
    assert activation_matching_loss([teacher, teacher], [student, teacher]).item() == pytest.approx(one / 2, abs=1e-6)
    batch = [torch.cat([side, torch.ones_like(side)]) for side in (teacher, student)]
    assert activation_matching_loss(*batch).item() == pytest.approx(one / 2, abs=1e-6)


def test_half_the_squared_distance_of_the_rows():
    teacher, student = torch.randn(2, 12, 20, dtype=torch.float64), torch.randn(2, 12, 5, dtype=torch.float64)
    rows = [torch.nn.functional.normalize(activation_map(f), dim=-1) for f in (teacher, student)]
    distance = (rows[0] - rows[1]).square().sum(dim=-1).mean()
    assert activation_matching_loss(teacher, student).item() == pytest.approx(distance.item() / 2, abs=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_zero_vectors_count_one_and_get_no_gradient(form):
    n, dt, ds, row_block = FORMS[form]
    teacher, student = torch.randn(1, n, dt, dtype=torch.float64), torch.randn(1, n, ds, dtype=torch.float64)
    teacher[0, 0], student[0, 1], student[0, 2] = 0, 0, 0
    teacher[0, 2] = 0
    loss, gradient = loss_and_gradient(
        lambda t, s: activation_matching_loss(t, s, row_block=row_block), teacher, student
    )
    assert (loss - activation_matching_reference(teacher, student)).abs() < 1e-10
    assert gradient.isfinite().all() and not gradient[0, 1:3].any()
    everything = activation_matching_loss(torch.zeros_like(teacher), student, row_block=row_block)
    assert everything.item() == 1
    assert not activation_map(torch.zeros(1, 3, 2)).any()


def test_huge_and_tiny_vectors_keep_their_direction():
    f = torch.randn(1, 5, 4)
    scales = torch.tensor([1e30, 1e-30, 1.0, 1e-38, 3e37])[:, None]
    assert (activation_map(f * scales) - activation_map(f)).abs().max() < 1e-5
    half = (f * 1e4).half()
    assert activation_map(half).dtype == torch.float32
    assert (activation_map(half) - activation_map(half.double())).abs().max() < 1e-5


def test_full_precision_under_autocast():
    teacher, student = torch.randn(2, 20, 48).bfloat16(), torch.randn(2, 20, 32).bfloat16()
    expected = activation_matching_loss(teacher.double(), student.double())
    with torch.autocast("cpu", torch.bfloat16):
        loss = activation_matching_loss(teacher, student)
        maps = activation_map(teacher)
    assert loss.dtype == torch.float32 and maps.dtype == torch.float32
    assert (loss - expected).abs() < 1e-5
    assert (maps - activation_map(teacher.double())).abs().max() < 1e-5


def test_no_gradient_for_the_teacher():
    teacher, student = torch.randn(1, 6, 4, requires_grad=True), torch.randn(1, 6, 4, requires_grad=True)
    activation_matching_loss(teacher, student).backward()
    assert teacher.grad is None and student.grad.abs().max() > 0


def test_memory_of_2048_tokens():
    n = 2048
    teacher, student = torch.randn(1, n, 24), torch.randn(1, n, 16, requires_grad=True)
    with LargestTensor() as largest:
        activation_matching_loss(teacher, student).backward()
    assert n * 24 <= largest.elements < n * n / 16

    # Wide features: rows in blocks. Small widths here keep it short, so the form is called by name.
    t, s = torch.randn(1, n, 4), torch.randn(1, n, 4, requires_grad=True)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x)
    with LargestTensor() as largest:
        with hooks:
            cosines = cosines_by_rows(t, s, 128)
        cosines.sum().backward()
    assert largest.elements == n * 128
    assert sum(saved) < n * n / 8  # no block's maps wait for the backward pass

    with LargestTensor() as largest:  # what is avoided would have been seen
        cosines_by_rows(t, s, n).sum().backward()
    assert largest.elements == n * n


def test_compiles():
    teacher, student = torch.randn(2, 9, 8), torch.randn(2, 9, 8, requires_grad=True)
    compiled = torch.compile(activation_matching_loss, backend="eager", fullgraph=True)
    assert (compiled(teacher, student) - activation_matching_loss(teacher, student)).abs() < 1e-6


def test_map_loss_refusals():
    f = torch.randn(2, 5, 4)
    with pytest.raises(ValueError, match="teacher has 2 stages, student 1"):
        activation_matching_loss([f, f], [f])
    with pytest.raises(ValueError, match="teacher has 0 stages, student 0"):
        activation_matching_loss([], [])
    with pytest.raises(ValueError, match=r"stage 2: teacher has \(B, n\) = \(2, 5\) tokens, student \(2, 4\)"):
        activation_matching_loss([f, f], [f, f[:, :4]])
    with pytest.raises(ValueError, match=r"student stage 1 must be floating point .* got torch.int64 \(2, 5, 4\)"):
        activation_matching_loss(f, f.long())
    with pytest.raises(ValueError, match=r"teacher stage 1 must be .* no empty side, got torch.float32 \(2, 0, 4\)"):
        activation_matching_loss(f[:, :0], f[:, :0])
    with pytest.raises(ValueError, match=r"got torch.float32 \(5, 4\)"):
        activation_map(f[0])
    with pytest.raises(ValueError, match="row_block must be an integer of at least 1, got 0"):
        activation_matching_loss(f, f, row_block=0)


def test_random_mask_is_exact_and_seeded():
    for n, ratio, count in ((196, 0.75, 147), (49, 0.75, 37), (16, 0.5, 8), (2, 0.5, 1)):
        mask = random_mask(5, n, ratio)
        assert mask.shape == (5, n) and mask.dtype == torch.bool and mask.sum(dim=1).eq(count).all()
    draws = [random_mask(4, 32, 0.5, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0][0], draws[0][1])  # each sample has its own
    often = random_mask(4000, 8, 0.25).float().mean(dim=0)
    assert (often - 0.25).abs().max() < 0.03  # every position alike: 4 standard deviations
    torch.manual_seed(3)
    first = random_mask(2, 8, 0.5)
    torch.manual_seed(3)
    assert torch.equal(first, random_mask(2, 8, 0.5))


@pytest.mark.parametrize("ratio", [0, 1, -0.1, 1.5, float("nan"), True, "0.5", None])
def test_a_mask_ratio_outside_is_refused(ratio):
    with pytest.raises(ValueError, match="mask_ratio must lie strictly between 0 and 1"):
        random_mask(1, 16, ratio)


def test_too_few_patches_to_mask():
    with pytest.raises(ValueError, match=r"mask_ratio 0\.1 masks 0 of 4 patches and leaves 4 visible"):
        random_mask(1, 4, 0.1)
    with pytest.raises(ValueError, match=r"mask_ratio 0\.9 masks 4 of 4 patches and leaves 0 visible"):
        random_mask(1, 4, 0.9)


def test_masked_loss_by_hand():
    teacher, prediction = torch.zeros(1, 3, 2), torch.tensor([[[0.5, 3.0], [9.0, 9.0], [0.0, -1.0]]])
    mask = torch.tensor([[True, False, True]])
    # SmoothL1 with beta 1: 0.125, 2.5, 0, 0.5.
    assert masked_prediction_loss(teacher, prediction, mask, normalize_target=False).item() == pytest.approx(3.125 / 4)
    # With beta 2: 0.0625, 2, 0, 0.25.
    loss = masked_prediction_loss(teacher, prediction, mask, beta=2, normalize_target=False)
    assert loss.item() == pytest.approx(2.3125 / 4)
    # Normalised, (1, 3) becomes (-1, 1) up to epsilon.
    target = torch.tensor([[[1.0, 3.0]]])
    loss = masked_prediction_loss(target, torch.zeros(1, 1, 2), torch.ones(1, 1, dtype=torch.bool))
    assert loss.item() == pytest.approx(0.5, abs=1e-4)


def test_visible_tokens_and_the_teachers_scale_play_no_part():
    teacher, prediction = torch.randn(2, 6, 8, requires_grad=True), torch.randn(2, 6, 8, requires_grad=True)
    mask = random_mask(2, 6, 0.5)
    loss = masked_prediction_loss(teacher, prediction, mask)
    loss.backward()
    assert teacher.grad is None
    assert prediction.grad[mask].abs().min() > 0 and not prediction.grad[~mask].any()

    poison = torch.full((), float("nan"))
    poisoned = [torch.where(mask[..., None], f, poison) for f in (teacher * 7 + 3, prediction)]
    assert masked_prediction_loss(*poisoned, mask).item() == pytest.approx(loss.item(), abs=1e-5)


def test_masked_loss_is_full_precision():
    teacher, prediction = torch.randn(2, 6, 8).bfloat16(), torch.randn(2, 6, 8).bfloat16()
    mask = random_mask(2, 6, 0.5)
    expected = masked_prediction_loss(teacher.double(), prediction.double(), mask)
    with torch.autocast("cpu", torch.bfloat16):
        loss = masked_prediction_loss(teacher, prediction, mask)
    assert loss.dtype == torch.float32 and expected.dtype == torch.float64
    assert (loss - expected).abs() < 1e-5


def test_masked_loss_refusals():
    f, mask = torch.randn(2, 6, 8), random_mask(2, 6, 0.5)
    with pytest.raises(ValueError, match=r"of one shape, got \(2, 6, 8\) and \(2, 6, 4\); project the student"):
        masked_prediction_loss(f, f[..., :4], mask)
    with pytest.raises(ValueError, match=r"mask must be bool of shape \(B, N\) = \(2, 6\) .* got torch.int64 \(2, 6\)"):
        masked_prediction_loss(f, f, mask.long())
    with pytest.raises(ValueError, match=r"got torch.bool \(2, 5\)"):
        masked_prediction_loss(f, f, mask[:, :5])
    with pytest.raises(ValueError, match=r"the mask \(2, 6\) masks no token"):
        masked_prediction_loss(f, f, torch.zeros_like(mask))
    with pytest.raises(ValueError, match="beta must be a finite number above 0, got 0"):
        masked_prediction_loss(f, f, mask, beta=0)
    with pytest.raises(ValueError, match="normalize_target must be True or False, got 1"):
        masked_prediction_loss(f, f, mask, normalize_target=1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_is_named_not_hidden(bad):
    features, other = torch.randn(1, 6, 8), torch.randn(1, 6, 8)
    features[0, 2, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinite values in features"):
        activation_map(features)
    with pytest.raises(ValueError, match="NaN or infinite values in teacher stage 1"):
        activation_matching_loss(features, other)
    with pytest.raises(ValueError, match="NaN or infinite values in student stage 1"):
        activation_matching_loss(other, features)
    with pytest.raises(ValueError, match="NaN or infinite values in the prediction"):
        masked_prediction_loss(other, features, torch.ones(1, 6, dtype=torch.bool))
