"""timm PR 2737: the same number of tokens on another grid is still another grid."""

import torch
from torch.nn import functional as F

from jumbo_core.models import JumboViT
from jumbo_core.models.positions import resample_positions
from tests.conftest import max_error


def bicubic(table: torch.Tensor, old: tuple[int, int], new: tuple[int, int]) -> torch.Tensor:
    image = table.reshape(1, *old, -1).permute(0, 3, 1, 2)
    image = F.interpolate(image, size=new, mode="bicubic", antialias=True)
    return image.permute(0, 2, 3, 1).reshape(1, new[0] * new[1], -1)


def test_equal_count_other_grid_is_resampled():
    table = torch.randn(1, 16, 8)
    resampled = resample_positions(table, (2, 8), (4, 4))
    assert max_error(resampled, bicubic(table, (2, 8), (4, 4))) < 1e-5
    assert max_error(resampled, table) > 0.1


def test_same_grid_is_the_same_tensor():
    table = torch.randn(1, 16, 8)
    assert resample_positions(table, (2, 8), (2, 8)) is table


def test_model_sees_the_grid_at_run_time_and_in_set_input_size():
    model = JumboViT(img_size=(32, 128), patch_size=16, num_classes=3, embed_dim=16, depth=1, num_heads=2, multiplier=2)
    model.head.weight.data.normal_()
    model.eval()
    square = torch.randn(1, 3, 64, 64)
    at_run_time = model(square)
    expected = bicubic(model.pos_embed.data, (2, 8), (4, 4))
    model.set_input_size((64, 64))
    assert max_error(model.pos_embed.data, expected) < 1e-5
    assert max_error(model(square), at_run_time) < 1e-5


def test_double_precision_stays_double():
    table = torch.randn(1, 16, 8, dtype=torch.double)
    assert max_error(resample_positions(table, (2, 8), (4, 4)), bicubic(table, (2, 8), (4, 4))) < 1e-10
