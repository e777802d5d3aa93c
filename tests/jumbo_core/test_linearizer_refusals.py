"""ViTLinearizer: options, networks, batches and values that are refused."""

import pytest
import torch
from torch import nn

from jumbo_core.distill import ViTLinearizer
from tests.jumbo_core.linearizer_models import adventurer, jumbo, mask_of, teacher_vit


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_located(poison):
    images = torch.randn(2, 3, 32, 32)
    bad = images.clone()
    bad[1, 0, 0, 0] = poison
    with pytest.raises(ValueError, match=r"NaN or infinite values in images$"):
        ViTLinearizer(teacher_vit(), adventurer())(bad)

    teacher, student = teacher_vit(), adventurer()
    linearizer = ViTLinearizer(teacher, student)
    with torch.no_grad():
        teacher.blocks[3].mlp.fc2.bias[0] = poison
    names = r"teacher stage 3 \(block 3\), teacher stage 4 \(block 5\)"
    with pytest.raises(ValueError, match=f"NaN or infinite values in {names}$"):
        linearizer(images)

    linearizer = ViTLinearizer(teacher_vit(), student)
    with torch.no_grad():
        student.blocks[3].mlp.fc2.bias[0] = poison
    with pytest.raises(ValueError, match=r"NaN or infinite values in student stage 4 \(block 3\)$"):
        linearizer(images)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 5}, r"stages=5 is more than the blocks there are \(teacher 6, student 4\); use at most 4"),
        ({"stages": 0}, "stages must be an integer of at least 1, got 0"),
        ({"mask_ratio": 0}, "mask_ratio must lie strictly between 0 and 1 .* got 0"),
        ({"mask_ratio": 1.0}, "mask_ratio must lie strictly between 0 and 1 .* got 1.0"),
        ({"mask_weight": -1}, "mask_weight must be a finite number of at least 0, got -1"),
        ({"activation_weight": float("nan")}, "activation_weight must be a finite number of at least 0, got nan"),
        ({"beta": 0}, "beta must be a finite number above 0, got 0"),
        ({"normalize_target": "yes"}, "normalize_target must be True or False, got 'yes'"),
        ({"resample_teacher": 1}, "resample_teacher must be True or False, got 1"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        ViTLinearizer(teacher_vit(), adventurer(), **options)


def test_networks_that_do_not_fit():
    with pytest.raises(TypeError, match=r"student must be a JumboViT or AdventurerViT, .* got VisionTransformer"):
        ViTLinearizer(teacher_vit(), teacher_vit())
    with pytest.raises(TypeError, match="got str"):
        ViTLinearizer(teacher_vit(), "adventurer")
    with pytest.raises(TypeError, match="Sequential has no patch tokens"):
        ViTLinearizer(nn.Sequential(nn.Linear(2, 2)), adventurer())
    student = jumbo()
    with pytest.raises(ValueError, match=r"teacher and student share parameters.* copy.deepcopy\(student\)"):
        ViTLinearizer(student, student)
    assert all(p.requires_grad for p in student.encoder.blocks.parameters())  # refused before anything was frozen


def test_batches_that_do_not_fit():
    linearizer, images = ViTLinearizer(teacher_vit(), adventurer()), torch.randn(2, 3, 32, 32)
    with pytest.raises(ValueError, match=r"images must be floating point \(B, C, H, W\), got torch.uint8 \(2, 3"):
        linearizer(images.to(torch.uint8))
    with pytest.raises(ValueError, match=r"got torch.float32 \(3, 32, 32\)"):
        linearizer(images[0])
    with pytest.raises(ValueError, match=r"mask must be bool of shape \(B, N\) = \(2, 16\) .* got torch.bool \(2, 9\)"):
        linearizer(images, mask_of(2, 9, 4))
    uneven = mask_of()
    uneven[0] = False
    uneven[0, :3] = True
    with pytest.raises(ValueError, match=r"as many of the 16 patches in every sample, .* got \[3, 12\]"):
        linearizer(images, uneven)
    with pytest.raises(ValueError, match=r"at least 1 and not all, got \[16\]"):
        linearizer(images, torch.ones(2, 16, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask_ratio 0.75 masks 1 of 1 patches"):
        linearizer(images[..., :8, :8])
    linearizer.student.patch_drop_rate = 0.5
    with pytest.raises(ValueError, match="student gives 8 tokens for the 16 patches of its 4x4 grid: set its patch_d"):
        linearizer(images)


def test_a_map_of_one_token_is_refused():
    linearizer = ViTLinearizer(teacher_vit(), adventurer())
    with pytest.raises(ValueError, match="3 of 4 patches are masked: a map of 1 visible tokens says nothing"):
        linearizer(torch.randn(1, 3, 16, 16))
