"""Case 23 (tsai 400, 591, 713, 738, 907; PatchTST 40): a custom class builds for every shape of target tsai allows."""

import warnings

import numpy as np
import pytest
import torch

from ts_ext import JumboPatchTST

pytest.importorskip("tsai", reason="needs jumbo-vit[ts]")

from tsai.data.core import TSClassification, TSForecasting, TSRegression, get_ts_dls
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


@pytest.mark.parametrize(("length", "patch_len", "stride"), [(100, 16, 8), (336, 16, 8), (40, 8, 4), (41, 8, 4)])
@pytest.mark.parametrize("head", ["forecast", "classify", "regress", "pretrain"])
def test_patch_count_is_the_same_for_every_head(head, length, patch_len, stride):
    options = dict(patch_len=patch_len, stride=stride, head=head)
    model = JumboPatchTST(1, 1, length, 1 if head == "forecast" else None, **options)
    assert model.patch_num == (length - patch_len) // stride + 2 == model.series.pos_embed.shape[1]


@pytest.mark.parametrize(
    ("head", "y", "transform", "shape"),
    [
        ("classify", [0, 1, 2, 0, 1, 2, 0, 1], TSClassification, (3,)),
        ("classify", ["a", "b", "a", "b", "a", "b", "a", "b"], TSClassification, (2,)),
        ("regress", torch.randn(8).tolist(), TSRegression, ()),
        ("regress", torch.randn(8, 1).tolist(), TSRegression, (1,)),
        ("regress", torch.randn(8, 5).tolist(), TSRegression, (5,)),
    ],
)
@pytest.mark.parametrize("arch", [JumboPatchTST, Forecaster])
@pytest.mark.parametrize("channels", ["independent", "mixing"])
def test_classes_and_values(tmp_path, head, y, transform, shape, arch, channels):
    x = torch.randn(8, 4, 40).numpy()
    splits = (list(range(6)), [6, 7])
    dls = get_ts_dls(x, np.array(y), splits=splits, tfms=[None, transform()], bs=4, path=tmp_path)
    config = dict(SMALL, head=head, channels=channels)
    config = config if arch is JumboPatchTST else dict(config, seq_len=40)
    model = build_ts_model(arch, dls=dls, arch_config=config, device=torch.device("cpu"))
    assert model(torch.from_numpy(x)).shape == (8, *shape)


@pytest.mark.parametrize("shape", [(4, 12), (3, 12), (12,), (), (4, 1), (1,)])
def test_quantiles_have_the_shape_of_the_target_and_one_more(tmp_path, shape):
    x, y = torch.randn(8, 4, 40).numpy(), torch.randn(8, *shape).numpy()
    dls = get_ts_dls(x, y, splits=(list(range(6)), [6, 7]), bs=4, path=tmp_path)
    config = dict(SMALL, quantiles=(0.1, 0.5, 0.9), target_channels=list(range((1, 1, *shape)[-2])))
    model = build_ts_model(JumboPatchTST, dls=dls, arch_config=config, device=torch.device("cpu"))
    assert model(torch.from_numpy(x)).shape == (*y.shape, 3)
