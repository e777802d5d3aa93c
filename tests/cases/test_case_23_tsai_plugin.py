"""Case 23 (tsai 400, 591, 713, 738, 907; PatchTST 40): a custom class builds for every shape of target tsai allows."""

import warnings

import pytest
import torch

from ts_ext import JumboPatchTST

pytest.importorskip("tsai", reason="needs jumbo-vit[ts]")

from tsai.data.core import TSForecasting, get_ts_dls
from tsai.models.utils import build_ts_model

SMALL = dict(patch_len=8, stride=4, d_model=16, n_layers=2, n_heads=2, d_ff=32, multiplier=2)


class Forecaster(JumboPatchTST):
    """tsai goes by the name of a class: without "patchtst" in it there is no seq_len and no pred_dim."""


@pytest.mark.parametrize("shape", [(4, 12), (3, 12), (12,), (), (4, 1), (3, 1), (1,), (1, 12)])
@pytest.mark.parametrize("arch", [JumboPatchTST, Forecaster])
@pytest.mark.parametrize("tfms", [None, [None, TSForecasting()]])
def test_output_has_the_shape_of_the_target(tmp_path, shape, arch, tfms):
    x, y = torch.randn(8, 4, 40).numpy(), torch.randn(8, *shape).numpy()
    dls = get_ts_dls(x, y, splits=(list(range(6)), [6, 7]), tfms=tfms, bs=4, path=tmp_path)
    config = dict(SMALL) if arch is JumboPatchTST else dict(SMALL, seq_len=40)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = build_ts_model(arch, dls=dls, arch_config=config, device=torch.device("cpu"))
    told = [str(w.message) for w in found if "target_channels" in str(w.message)]
    # told once, and only where the outputs are not the four inputs in order
    assert len(told) == (shape != (4, 12) and shape != (4, 1))
    assert model(torch.from_numpy(x)).shape == y.shape


def test_other_names_are_told_what_to_pass(tmp_path):
    x, y = torch.randn(8, 4, 40).numpy(), torch.randn(8, 12).numpy()
    dls = get_ts_dls(x, y, splits=(list(range(6)), [6, 7]), bs=4, path=tmp_path)
    with pytest.raises(TypeError, match=r"arch_config=dict\(seq_len=…\)"):
        build_ts_model(Forecaster, dls=dls, arch_config=SMALL)


def test_documented_patch_count_with_end_padding():
    assert JumboPatchTST(1, 1, 100, 4, patch_len=16, stride=8).patch_num == 12
