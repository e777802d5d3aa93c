"""mamba 66, transformers 31540: a padded sample gives the same result alone or in a batch, in both directions."""

import pytest
import torch

from jumbo_core.linear import AdventurerEncoder, Mamba2Mixer, ssd_scan
from tests.conftest import max_error
from tests.jumbo_core.scan_inputs import scan_inputs

LENGTHS = (5, 9)


def batch(tensor: torch.Tensor, reverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Two samples of 5 and 9 steps padded to 9 with 1e4, and their mask; reversed, the padding comes first."""
    mask = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    padded = tensor.masked_fill(~mask.view(2, 9, *[1] * (tensor.ndim - 2)), 1e4)
    return (padded.flip(1), mask.flip(1)) if reverse else (padded, mask)


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(reverse):
    inputs = {k: v.float() for k, v in scan_inputs(2, 9, 2, 3, 4).items()}
    padded = {k: batch(v, reverse)[0] if k in ("x", "dt", "B", "C") else v for k, v in inputs.items()}
    mask = batch(inputs["dt"], reverse)[1]
    y, state = ssd_scan(**padded, mask=mask)
    for i in range(2):
        alone = {
            k: v[i : i + 1, mask[i]] if k in ("x", "dt", "B", "C") else v for k, v in padded.items()
        }  # the real steps of one sample
        y_alone, state_alone = ssd_scan(**alone)
        assert max_error(y[i : i + 1, mask[i]], y_alone) < 1e-6
        assert max_error(state[i : i + 1], state_alone) < 1e-6


@pytest.mark.parametrize("reverse", [False, True])
def test_mixer(reverse):
    mixer = Mamba2Mixer(16, d_state=8, head_dim=8).eval()
    padded, mask = batch(torch.randn(2, 9, 16), reverse)
    with torch.no_grad():
        y = mixer(padded, mask)
        for i in range(2):
            assert max_error(y[i : i + 1, mask[i]], mixer(padded[i : i + 1, mask[i]])) < 1e-6


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("multiplier", [0, 3])
@pytest.mark.parametrize("flip", ["alternate", (0, 1, 2)])
def test_encoder(flip, multiplier, reverse):
    """Flipped blocks reverse the real patches only, and the token that stands last still follows a real patch."""
    encoder = AdventurerEncoder(16, 3, d_state=8, head_dim=8, flip=flip, multiplier=multiplier).eval()
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    padded, mask = batch(torch.randn(2, 9, 16), reverse)
    with torch.no_grad():
        out = encoder(padded, mask)
        for i in range(2):
            alone = encoder(padded[i : i + 1, mask[i]])
            assert max_error(out.patches[i : i + 1, mask[i]], alone.patches) < 1e-6
            assert max_error(out.jumbo[i : i + 1], alone.jumbo) < 1e-6
        assert not out.patches[~mask].any()
