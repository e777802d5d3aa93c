"""Every config that ships is readable, listed, and builds; the small ones run."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("mmseg", reason="needs the extra mmseg-lite")

import mmengine
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmseg.registry import MODELS

import mmseg_ext

PLUGIN = Path(__file__).resolve().parents[2] / "plugins" / "mmseg"
CONFIGS = sorted((PLUGIN / "configs" / "jumbo").glob("*.py"))
SCHEDULES = {"160k": 160_000, "80k": 80_000}


@pytest.fixture(params=CONFIGS, ids=lambda path: path.stem)
def config(request) -> Config:
    init_default_scope("mmseg")
    config = Config.fromfile(str(request.param))
    config.model.backbone.init_cfg = None
    return config


def test_builds_on_meta(config):
    with torch.device("meta"):
        model = MODELS.build(config.model)
    name = Path(config.filename).stem
    arch = name.split("_")[0].removeprefix("jumbo-")
    sizes = {"pico": 96, "nano": 128, "tiny": 192, "small": 384, "base": 768}
    assert model.backbone.embed_dims == sizes[arch]
    assert config.custom_imports["imports"] == ["mmseg_ext"]
    assert {"PlainMessageHubHook", "RandomStateHook"} == {hook.type for hook in config.custom_hooks}
    for mark, iterations in SCHEDULES.items():
        if f"-{mark}_" in name:
            assert config.train_cfg.max_iters == config.param_scheduler[-1].end == iterations
            assert config.data_preprocessor.size == config.model.backbone.img_size == config.crop_size
            assert (
                config.model.decode_head.num_classes
                == {"ADE20KDataset": 150, "CityscapesDataset": 19}[config.dataset_type]
            )


@pytest.mark.parametrize("path", [p for p in CONFIGS if "jumbo-tiny" in p.name or "jumbo-pico" in p.name], ids=str)
def test_small_ones_run(path):
    init_default_scope("mmseg")
    config = Config.fromfile(str(path))
    config.model.backbone.init_cfg = None
    model = MODELS.build(config.model).eval()
    with torch.no_grad():
        logits = model(torch.randn(1, 3, 64, 64), mode="tensor")
    # A head answers on its finest map: the patch grid, enlarged where a pyramid stands in front.
    neck = config.model.get("neck")
    enlarged = max(neck.rescales) if neck else 1
    stride = int(config.model.backbone.get("patch_size", 16) / enlarged)
    assert logits.shape == (1, config.model.decode_head.num_classes, 64 // stride, 64 // stride)


def test_metafile_lists_the_configs_for_public_datasets():
    metafile, *_ = mmengine.load(str(PLUGIN / "model-index.yml"))["Import"]
    listed = {model["Config"]: model["Name"] for model in mmengine.load(str(PLUGIN / metafile))["Models"]}
    shipped = {f"configs/jumbo/{p.name}": p.stem for p in CONFIGS if "ade20k" in p.name or "cityscapes" in p.name}
    assert listed == shipped and len(listed) == 9


def test_configs_stand_on_the_hosts_own_files():
    for path in CONFIGS:
        line = next(line for line in path.read_text().splitlines() if line.startswith("_base_"))
        assert "mmseg::" in path.read_text() or line.startswith('_base_ = "./jumbo-'), path


def test_the_package_carries_the_plugin():
    assert Path(mmseg_ext.__file__).with_name(".mim").resolve() == PLUGIN
