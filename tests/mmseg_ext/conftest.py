"""What several files of this folder share: two small images. A file that needs others has its own `images`."""

import pytest
import torch


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32)
