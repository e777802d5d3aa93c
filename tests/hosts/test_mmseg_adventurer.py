"""The linear-time backbone in MMSegmentation: configs build, a student saved by Transformers trains and is tested."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("mmseg", reason="needs the extra mmseg-lite")

import mmengine
from mmengine.config import Config
from mmengine.config.utils import _get_cfg_metainfo
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from mmseg.registry import MODELS

import mmseg_ext
from tests.conftest import max_error
from tests.hosts.mmseg_run import overrides, tiny_config, write_ade20k
from tests.mmseg_ext.helpers import trainable_without_gradient

PLUGIN = Path(__file__).resolve().parents[2] / "plugins" / "mmseg"
CONFIGS = sorted((PLUGIN / "configs" / "adventurer").glob("*.py"))
BASE = "adventurer/adventurer-tiny_upernet_8xb2-160k_ade20k-512x512.py"
DATA = {"ade20k-512x512": (150, (512, 512), 160_000), "cityscapes-512x1024": (19, (512, 1024), 80_000)}
SIZES = {"tiny": 256, "small": 512, "base": 768}
FLIP = [0, 3]  # of four blocks: neither the paper's rule nor the released one
ITERATIONS = 4


# --- the configs that ship ---


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_builds_on_meta(path):
    init_default_scope("mmseg")
    config = Config.fromfile(str(path))
    backbone = config.model.backbone
    name, _, _, _ = path.stem.split("_")
    assert backbone.init_cfg == dict(type="Pretrained", checkpoint=f"distilled/{name}")
    with torch.device("meta"):
        model = MODELS.build(config.model)
    size = name.rpartition("-")[2]
    assert model.backbone.embed_dims == SIZES[size] and backbone.type == "AdventurerViT"
    assert model.backbone.vit.encoder.multiplier == (3 if name == "jumbo-adventurer-base" else 0)
    classes, crop, iterations = next(value for data, value in DATA.items() if path.stem.endswith(data))
    assert config.model.decode_head.num_classes == config.model.auxiliary_head.num_classes == classes
    assert config.crop_size == backbone.img_size == config.data_preprocessor.size == crop
    assert config.train_cfg.max_iters == config.param_scheduler[-1].end == iterations
    assert config.optim_wrapper.constructor == "JumboLayerDecayOptimWrapperConstructor"
    assert config.custom_imports["imports"] == ["mmseg_ext"]


@pytest.mark.parametrize("path", [p for p in CONFIGS if "-tiny_" in p.name], ids=lambda path: path.stem)
def test_small_ones_run(path):
    init_default_scope("mmseg")
    config = Config.fromfile(str(path))
    config.model.backbone.init_cfg = None
    model = MODELS.build(config.model).eval()
    with torch.no_grad():
        logits = model(torch.randn(1, 3, 64, 64), mode="tensor")
    assert logits.shape == (1, config.model.decode_head.num_classes, 16, 16)  # patches of 16, the pyramid enlarges by 4


def test_metafile_lists_every_config():
    _, name, *_ = mmengine.load(str(PLUGIN / "model-index.yml"))["Import"]
    metafile = mmengine.load(str(PLUGIN / name))
    listed = {model["Config"]: model["Name"] for model in metafile["Models"]}
    assert listed == {f"configs/adventurer/{path.name}": path.stem for path in CONFIGS} and len(listed) == 8
    families = {collection["Name"] for collection in metafile["Collections"]}
    assert families == {model["In Collection"] for model in metafile["Models"]} == {"Adventurer", "Jumbo-linear"}


def test_the_host_finds_their_metadata():
    path = Path(mmseg_ext.__file__).parent
    name = "adventurer/adventurer-tiny_upernet_8xb2-160k_ade20k-512x512.py"
    assert _get_cfg_metainfo(path, name)["Name"] == Path(name).stem


def test_configs_stand_on_our_own_files():
    for path in CONFIGS:
        line = next(line for line in path.read_text().splitlines() if line.startswith("_base_"))
        assert line.startswith(('_base_ = "../jumbo/jumbo-tiny_upernet_', '_base_ = "./adventurer-')), path


def test_config_path_finds_them():
    assert Path(mmseg_ext.config_path(BASE)).resolve() == PLUGIN / "configs" / BASE


# --- a student saved by Transformers ---


@pytest.fixture(scope="module")
def hf():
    pytest.importorskip("transformers", reason="needs the extra hf")
    import hf_ext.modeling_adventurer as modeling
    from hf_ext.backbone_adventurer import AdventurerBackbone
    from hf_ext.configuration_adventurer import AdventurerConfig

    def build(kind, **options):
        sizes = dict(image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=4, state_size=8, head_dim=8)
        config = AdventurerConfig(**{**sizes, **options})
        kinds = dict(model=modeling.AdventurerModel, classifier=modeling.AdventurerForImageClassification)
        return {**kinds, "backbone": AdventurerBackbone}[kind](config)

    return build


BACKBONE = dict(embed_dims=16, num_layers=4, d_state=8, head_dim=8, img_size=32, patch_size=8, out_indices=(0, 1, 2, 3))


@pytest.mark.parametrize("kind", ["model", "classifier", "backbone"])
@pytest.mark.parametrize("options", [dict(flip=FLIP), dict(flip="alternate", multiplier=2)])
def test_maps_of_a_transformers_folder(hf, kind, options, tmp_path):
    model = hf(kind, **options).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    init_cfg = dict(type="Pretrained", checkpoint=str(tmp_path))
    backbone = mmseg_ext.AdventurerViT(
        **BACKBONE, flip=[1], multiplier=options.get("multiplier"), arch="tiny", init_cfg=init_cfg
    ).eval()
    backbone.init_weights()
    images = torch.randn(2, 3, 32, 32)
    vit = next(module for name, module in model.named_modules() if name.split(".")[-1] == "vit")
    expected = vit.encoder.intermediates(vit.embed(images)[0], [0, 1, 2, 3])
    for y, block in zip(backbone(images), expected, strict=True):
        assert max_error(y.flatten(2).transpose(1, 2), block.patches) < 1e-6
    assert sorted(backbone.vit.encoder.flipped) == ([1, 3] if options["flip"] == "alternate" else FLIP)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_ade20k(tmp_path_factory.mktemp("ade"))


def config_for(data: Path, work: Path, init_cfg: dict | None, **options) -> Config:
    """The tiny Jumbo task with the Adventurer config's model, cut down to toy size."""
    config, shipped = tiny_config(data, work, iterations=ITERATIONS), Config.fromfile(mmseg_ext.config_path(BASE))
    changes = overrides(data, work, iterations=ITERATIONS, drop=0.0)
    shipped.merge_from_dict({key: value for key, value in changes.items() if not key.startswith("model.backbone.")})
    config.model = shipped.model
    config.model.backbone.update(**BACKBONE, drop_path_rate=0.3, init_cfg=init_cfg, **options)
    config.optim_wrapper = shipped.optim_wrapper
    return config


@pytest.mark.parametrize("options", [{}, dict(arch="jumbo_tiny", multiplier=2)])
def test_train_validate_and_test_from_a_student(hf, data, tmp_path, options):
    hf("model", flip=FLIP, multiplier=options.get("multiplier", 0)).save_pretrained(tmp_path / "student")
    student = dict(type="Pretrained", checkpoint=str(tmp_path / "student"))
    runner = Runner.from_cfg(config_for(data, tmp_path / "train", student, **options))
    runner.train()
    backbone = runner.model.backbone
    assert sorted(backbone.vit.encoder.flipped) == FLIP
    scalars = runner.message_hub.log_scalars
    losses = torch.tensor(scalars["train/loss"].data[0])
    assert losses.shape == (ITERATIONS,) and torch.isfinite(losses).all()
    runner.model.train().zero_grad(set_to_none=True)
    batch = runner.model.data_preprocessor(next(iter(runner.train_dataloader)), True)
    runner.model.parse_losses(runner.model(**batch, mode="loss"))[0].backward()
    assert trainable_without_gradient(runner.model) == []

    # Testing builds the model from its config, where flip is "alternate", and knows no student: the checkpoint tells.
    path = tmp_path / "train" / f"iter_{ITERATIONS}.pth"
    assert torch.load(path, weights_only=True)["state_dict"]["backbone.flipped"].tolist() == [True, False, False, True]
    tested = config_for(data, tmp_path / "test", None, **options)
    tested.load_from = str(path)
    tester = Runner.from_cfg(tested)
    metrics = tester.test()
    assert sorted(tester.model.backbone.vit.encoder.flipped) == FLIP
    for name in ("aAcc", "mIoU", "mAcc"):
        value = scalars[f"val/{name}"].current()
        assert metrics[name] == pytest.approx(value, nan_ok=True), name
    images = torch.randn(1, 3, 32, 32)
    backbone.eval()
    for ours, theirs in zip(tester.model.backbone.eval()(images), backbone(images), strict=True):
        assert torch.equal(ours, theirs)
