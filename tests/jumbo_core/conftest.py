"""What several files of this folder share: two small images. A file that needs others has its own `image`."""

import pytest
import torch


@pytest.fixture
def image() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32)
