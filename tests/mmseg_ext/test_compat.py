"""What importing mmseg_ext changes: operators, config names, and the error where the host is missing."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("mmseg", reason="needs the extra mmseg-lite")

CONFIG = "jumbo/jumbo-tiny_upernet_8xb2-160k_ade20k-512x512.py"


def python(code: str, *arguments, cwd) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=500)


@pytest.mark.parametrize("host", ["mmcv", "mmseg", "mmengine"])
def test_missing_hosts_name_the_extras(host, tmp_path):
    code = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == sys.argv[1] else find(name, package)
try:
    import mmseg_ext
except ImportError as error:
    print(error)
"""
    message = python(code, host, cwd=tmp_path).stdout
    for text in (f"{host} cannot be found", "jumbo-vit[mmseg-lite]", "jumbo-vit[mmseg]", "mmcv 2.1.0", "same module"):
        assert text in message, text


FRESH = """
import sys
from mmengine.config import Config
from mmengine.hub import get_config

# Stock tools import nothing first: mmengine does not know the prefix yet, but evaluates an expression.
try:
    Config.fromfile("prefix.py")
except AssertionError as error:
    print("refused:", error)
assert Config.fromfile("mmseg_only.py").dataset_type == "ADE20KDataset"
assert Config.fromfile("expression.py").model.backbone.type == "JumboViT"

import mmseg_ext, mmseg.apis, mmseg.models
mine = Config.fromfile("prefix.py")
assert mine.model.backbone.arch == "pico" and mine.model.decode_head.num_classes == 150
assert get_config("mmseg_ext::" + sys.argv[1]).model.backbone.arch == "tiny"

from mmengine.registry import init_default_scope
from mmseg.registry import MODELS
init_default_scope("mmseg")
again = MODELS.build({**mine.again.backbone, "init_cfg": None})  # mmengine marks a base's variable with its package
print("built:", type(again).__module__)

from mmcv.ops import nms, point_sample
from mmcv.utils.ext_loader import check_ops_exist
import mmcv._ext, torch
print("operators:", check_ops_exist(), hasattr(mmcv._ext, "__path__"))
try:
    mmcv._ext.nms(torch.zeros(1, 4), torch.zeros(1))
except RuntimeError as error:
    print("error:", error)
"""


def test_fresh_interpreter(tmp_path):
    (tmp_path / "prefix.py").write_text(
        f'_base_ = "mmseg_ext::{CONFIG}"\nmodel = dict(backbone=dict(arch="pico"))\n'
        "again = dict(backbone={{_base_.model.backbone}})\n"
    )
    (tmp_path / "expression.py").write_text(f'_base_ = __import__("mmseg_ext").config_path("{CONFIG}")\n')
    (tmp_path / "mmseg_only.py").write_text('_base_ = ["mmseg::_base_/datasets/ade20k.py"]\n')
    done = python(FRESH, CONFIG, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "refused: mmengine does not support to load mmseg_ext config" in done.stdout
    assert "built: mmseg_ext.backbones" in done.stdout
    if "operators: True" not in done.stdout:  # full mmcv
        assert "operators: False False" in done.stdout and "error: nms needs full mmcv" in done.stdout


def test_a_full_mmcv_is_not_touched(tmp_path, monkeypatch):
    import mmcv

    from mmseg_ext import prepare_host

    (tmp_path / "_ext.py").write_text("def nms(): return 'compiled'")
    monkeypatch.delitem(sys.modules, "mmcv._ext", raising=False)
    monkeypatch.setattr(mmcv, "__path__", [*mmcv.__path__, str(tmp_path)])  # as if the compiled module were there
    prepare_host()
    assert "mmcv._ext" not in sys.modules and find_spec("mmcv._ext").origin == str(tmp_path / "_ext.py")


def test_config_path():
    import mmseg_ext

    assert Path(mmseg_ext.config_path(CONFIG)).is_file()
    with pytest.raises(FileNotFoundError, match="jumbo-base_upernet_8xb2-80k_cityscapes"):
        mmseg_ext.config_path("jumbo/none.py")
