"""mamba 138, 351, 360; transformers 32599: the scan on CPU, for any length, chunk and head count, is the recurrence."""

import pytest
import torch

from jumbo_core.linear import Mamba2Mixer, ssd_scan
from tests.conftest import max_error
from tests.jumbo_core.scan_inputs import loop, scan_inputs


@pytest.mark.parametrize("chunk", [7, 16, 64, "auto"])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 196, 197])
def test_equals_the_plain_recurrence(length, chunk):
    inputs = scan_inputs(2, length, 2, 8, 4, initial_state=True)
    expected, state = loop(**inputs)
    y, last = ssd_scan(**inputs, chunk_size=chunk)
    assert max_error(y, expected) < 1e-10 and max_error(last, state) < 1e-10
    single = {name: tensor.float() for name, tensor in inputs.items()}
    y, last = ssd_scan(**single, chunk_size=chunk)
    assert y.dtype == last.dtype == torch.float32
    assert max_error(y.double(), expected) < 1e-5 and max_error(last.double(), state) < 1e-5


def test_head_size_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"head_dim 24 does not divide the inner width 128 \(expand 2 x dim 64\)"):
        Mamba2Mixer(64, head_dim=24)
