"""The configs of configs/tofu, and the real Runner: training fused, and testing fused what was trained without."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("mmseg", reason="needs the extra mmseg-lite")

import mmseg_ext

# isort: split
import mmengine
from mmengine.config import Config
from mmengine.config.utils import _get_cfg_metainfo
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from mmseg.apis import inference_model, init_model
from mmseg.registry import MODELS

from jumbo_core.tofu import FusionPlan, is_fused
from tests.hosts.mmseg_run import tiny_config, write_ade20k
from tests.mmseg_ext.helpers import trainable_without_gradient

PLUGIN = Path(__file__).resolve().parents[2] / "plugins" / "mmseg"
CONFIGS = sorted((PLUGIN / "configs" / "tofu").glob("*.py"))
PAPER = FusionPlan.paper(12, 56)
ITERATIONS = 3
# Sizes that a laptop builds at once; what is left of a config is what it says itself.
SMALL = {
    "ToFuViT": dict(model_options=dict(embed_dim=24, num_heads=2)),
    "JumboViT": dict(embed_dims=24, num_heads=2, multiplier=2),
    "ToFuVisionTransformer": dict(embed_dims=24, num_heads=2),
}


def read(path: Path) -> Config:
    init_default_scope("mmseg")
    config = Config.fromfile(str(path))
    config.model.pretrained = None  # the host's Segmenter names its weights there
    return config


def shrunk(path: Path) -> Config:
    config = read(path)
    config.model.backbone.update(init_cfg=None, **SMALL[config.model.backbone.type])
    if "neck" in config.model:
        config.model.neck.update(embed_dim=24, norm_cfg=dict(type="BN"))
        config.model.decode_head.update(in_channels=[24] * 4, channels=8, norm_cfg=dict(type="BN"))
        config.model.auxiliary_head.update(in_channels=24, channels=8, norm_cfg=dict(type="BN"))
    else:
        config.model.decode_head.update(in_channels=24, channels=24, embed_dims=24, num_heads=2)
    return config


# --- the configs that ship ---


def test_there_are_four():
    names = " ".join(path.stem.split("_8xb")[0] for path in CONFIGS)
    assert names == "jumbo-tiny-tofu_upernet segmenter_vit-base-tofu_mask vit-base-tofu_upernet vit-base_upernet"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_builds(path):
    config = read(path)
    backbone = config.model.backbone
    if backbone.type == "ToFuVisionTransformer":  # the host's own cannot be built on meta
        backbone.update(SMALL[backbone.type])
        model = MODELS.build(backbone)
        assert model.patch_embed.projection.weight.shape == (24, 3, 16, 16)
    else:
        with torch.device("meta"):
            model = MODELS.build(config.model).backbone
        assert model.embed_dims == (192 if backbone.type == "JumboViT" else 768)
        assert config.data_preprocessor.size == config.crop_size == (512, 512)
    fused = "tofu" in path.stem.split("_8xb")[0]
    assert (model.fusion is not None) is fused is is_fused(model)
    if fused:
        assert model.fusion.plan == PAPER and not model.fusion.report().clamps
        assert model.fusion.report().tokens == [1024 - 56 * i for i in range(1, 13)]
        assert backbone.type == "ToFuVisionTransformer" or 0.35 < model.fusion.report().saved < 0.40
    assert config.custom_imports["imports"] == ["mmseg_ext"]
    assert {"PlainMessageHubHook", "RandomStateHook"} == {hook.type for hook in config.custom_hooks}
    assert config.train_cfg.max_iters == 160_000 and config.model.decode_head.num_classes == 150


def test_fusion_is_a_line_or_two():
    def lines(name: str) -> list[str]:
        text = next(path for path in CONFIGS if path.stem.startswith(name)).read_text()
        return [line for line in text.splitlines() if not line.startswith(("#", "_base_", "custom_"))]

    plan = 'tofu=dict(plan=dict(preset="paper", r=56))'
    assert lines("vit-base-tofu") == lines("jumbo-tiny-tofu") == [f"model = dict(backbone=dict({plan}))"]
    assert lines("segmenter") == [f'model = dict(backbone=dict(type="ToFuVisionTransformer", {plan}))']


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_segmentors_predict_on_other_sizes_than_their_crops(path):
    """304 patches instead of 1024: slide inference, and a plan that later blocks cannot meet any more."""
    model = MODELS.build(shrunk(path).model).eval()
    (sample,) = model.predict(torch.randn(1, 3, 256, 300))
    assert sample.seg_logits.data.shape == (150, 256, 300) and sample.seg_logits.data.isfinite().all()
    assert sample.pred_sem_seg.data.shape == (1, 256, 300)
    if model.backbone.fusion:
        assert model.backbone.fusion.report().tokens == [248, 192, 136, 80, 40, 20, 10, 5, 3, 2, 1, 1]


def test_metafile_lists_every_config():
    *_, name = mmengine.load(str(PLUGIN / "model-index.yml"))["Import"]
    metafile = mmengine.load(str(PLUGIN / name))
    listed = {model["Config"]: model["Name"] for model in metafile["Models"]}
    assert listed == {f"configs/tofu/{path.name}": path.stem for path in CONFIGS}
    assert {c["Name"] for c in metafile["Collections"]} == {m["In Collection"] for m in metafile["Models"]} == {"ToFu"}
    found = _get_cfg_metainfo(Path(mmseg_ext.__file__).parent, f"tofu/{CONFIGS[2].name}")
    assert found["Name"] == CONFIGS[2].stem


# --- the real Runner ---

TIMM = dict(type="ToFuViT", model_name="test_vit", model_options=dict(embed_dim=16, depth=4, num_heads=2, patch_size=8))
HOST = dict(type="ToFuVisionTransformer", patch_size=8, embed_dims=16, num_layers=4, num_heads=2)
OURS = dict(type="JumboViT", arch="pico", embed_dims=16, num_layers=4, num_heads=2, multiplier=2, patch_size=8)
TOFU = dict(plan=dict(ops=["prune", "prune", "mlerp", "mlerp"], counts=[2, 3, 0, 4]), proportional=True)
BACKBONES = {"timm": TIMM, "host": HOST, "jumbo": OURS}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_ade20k(tmp_path_factory.mktemp("ade"))


def config_for(make: str, data: Path, work: Path, *, iterations: int = ITERATIONS, **options) -> Config:
    """The tiny ADE20K task on one of our backbones."""
    config = tiny_config(data, work, iterations=iterations)
    backbone = dict(BACKBONES[make], img_size=(32, 32), out_indices=(0, 1, 2, 3), drop_path_rate=0.1, **options)
    config.model.backbone = backbone
    config.train_cfg.val_interval = config.default_hooks.checkpoint.interval = iterations
    config.test_pipeline = config.test_dataloader.dataset.pipeline  # what mmseg.apis reads
    if make != "jumbo":
        plain = Config.fromfile(mmseg_ext.config_path("tofu/vit-base-tofu_upernet_8xb2-160k_ade20k-512x512.py"))
        config.optim_wrapper = plain.optim_wrapper
    return config


@pytest.mark.parametrize("make, with_cp", [("timm", True), ("host", False), ("jumbo", False)])
def test_training_fused(make, with_cp, data, tmp_path):
    runner = Runner.from_cfg(config_for(make, data, tmp_path, tofu=TOFU, with_cp=with_cp))
    runner.train()
    losses = torch.tensor(runner.message_hub.log_scalars["train/loss"].data[0])
    assert losses.shape == (ITERATIONS,) and losses.isfinite().all()
    model = runner.model
    assert is_fused(model.backbone) and model.backbone.fusion.report().tokens == [14, 11, 11, 7]
    model.train()
    model.zero_grad(set_to_none=True)
    batch = model.data_preprocessor(next(iter(runner.train_dataloader)), True)
    model.parse_losses(model(**batch, mode="loss"))[0].backward()
    assert trainable_without_gradient(model) == []
    saved = torch.load(tmp_path / f"iter_{ITERATIONS}.pth", weights_only=True)["state_dict"]
    plain = MODELS.build(config_for(make, data, tmp_path).model.backbone)
    assert {n.removeprefix("backbone.") for n in saved if n.startswith("backbone.")} == plain.state_dict().keys()


def test_fusing_what_was_trained_without(data, tmp_path):
    """A checkpoint without fusion, tested with it by a line of config: same weights, other maps; same with r = 0."""
    trainer = Runner.from_cfg(config_for("timm", data, tmp_path / "train"))
    trainer.train()
    path = str(tmp_path / "train" / f"iter_{ITERATIONS}.pth")
    images = torch.randn(1, 3, 32, 32)
    trainer.model.eval()
    plain = trainer.model.backbone(images)
    config = config_for("timm", data, tmp_path / "test", tofu=dict(plan=dict(preset="paper", r=0)))
    config.load_from = path
    tester = Runner.from_cfg(config)
    assert tester.test()["aAcc"] == trainer.message_hub.get_scalar("val/aAcc").current() and is_fused(tester.model)
    for r, tokens in ((0, [16] * 4), (3, [13, 10, 7, 4])):
        config.merge_from_dict({"model.backbone.tofu.plan.r": r})  # as --cfg-options of the stock tools
        model = init_model(config, path, device="cpu")  # as users do
        maps = model.backbone(images)
        assert all(torch.equal(y, z) for y, z in zip(maps, plain, strict=True)) is (r == 0)
        assert all(y.shape == (1, 16, 4, 4) for y in maps) and model.backbone.fusion.report().tokens == tokens
        image = next((data / "images" / "validation").iterdir())
        assert inference_model(model, str(image)).pred_sem_seg.data.shape == (1, 48, 48)
