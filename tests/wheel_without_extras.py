"""Run where the wheel is installed without extras: the core imports, adapters name their extra, configs came along.

`make wheel-check` runs it in a real fresh environment; tests/test_packaging.py runs it with the hosts' imports blocked.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

import torch

import jumbo_core

assert "site-packages" in jumbo_core.__file__ or "--target" in sys.argv, jumbo_core.__file__
assert jumbo_core.models.JumboViT(32, 8, num_classes=3, embed_dim=16, depth=1, num_heads=2)(
    torch.zeros(1, 3, 32, 32)
).shape == (1, 3)

for adapter, extra in (
    ("mmseg_ext", "jumbo-vit[mmseg"),
    ("hf_ext", "jumbo-vit[hf]"),
    ("ts_ext.tsai", "jumbo-vit[ts]"),
    ("ts_ext.transformers", "jumbo-vit[hf]"),
    ("ts_ext.neuralforecast", "jumbo-vit[nixtla]"),
):
    try:
        importlib.import_module(adapter)
    except ImportError as error:
        assert extra in str(error), (adapter, str(error))
    else:
        raise AssertionError(f"{adapter} imported without its host")

ts_ext = importlib.import_module("ts_ext")  # needs torch alone
assert ts_ext.JumboPatchTST(2, 2, 64, pred_dim=8, d_model=16, n_heads=2, n_layers=1)(torch.zeros(1, 2, 64)).shape == (
    1,
    2,
    8,
)

root = Path(jumbo_core.__file__).parent.parent
for name in ("model-index.yml", "configs"):
    assert (root / "mmseg_ext" / ".mim" / name).exists(), f"the wheel lacks mmseg_ext/.mim/{name}"
assert all((root / package / "py.typed").exists() for package in ("jumbo_core", "mmseg_ext", "hf_ext", "ts_ext"))
hosts = [h for h in ("transformers", "mmseg", "mmengine", "tsai", "fastai") if h in sys.modules]
assert not hosts, hosts
print("wheel without extras: ok")
