"""What a config gives a fused backbone: weight files, plans, and what it may not ask for."""

import copy

import pytest
import timm
import torch
from torch import nn

pytest.importorskip("mmseg", reason="needs the extra mmseg-lite")

from safetensors.torch import save_file
from timm.models._hub import save_for_hf

from jumbo_core.models.positions import resample_positions
from jumbo_core.tofu import FusionPlan, apply_tofu
from mmseg_ext import JumboViT, ToFuVisionTransformer, ToFuViT, load_pretrained
from tests.mmseg_ext.fused import DEPTH, PLAN, SIZES, mmseg_vit, randomised, tofu_vit
from tests.mmseg_ext.helpers import TINY as JUMBO

# --- weights ---


def timm_model(name: str = "test_vit", **options) -> nn.Module:
    return randomised(timm.create_model(name, **{**SIZES, "img_size": 32, "num_classes": 5, **options}))


KINDS = {
    "folder": lambda d, m: save_for_hf(m, d / "timm", safe_serialization=True),
    "safetensors": lambda d, m: save_file(m.state_dict(), d / "w.safetensors"),
    "state_dict": lambda d, m: torch.save(m.state_dict(), d / "w.pth"),
    "checkpoint": lambda d, m: torch.save({"epoch": 1, "state_dict": m.state_dict()}, d / "w.pth.tar"),
    "segmentor": lambda d, m: torch.save(
        {"state_dict": {f"backbone.vit.{k}": v for k, v in m.state_dict().items()} | {"decode_head.x": torch.ones(1)}},
        d / "w.pth",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file(kind, tmp_path, images):
    model = timm_model().eval()
    KINDS[kind](tmp_path, model)
    (path,) = tmp_path.iterdir()
    backbone = ToFuViT(
        "test_vit", img_size=32, model_options=SIZES, final_norm=True, tofu=dict(plan=PLAN),
        init_cfg=dict(type="Pretrained", checkpoint=str(path)),
    ).eval()  # fmt: skip
    backbone.init_weights()
    for name, value in backbone.vit.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    apply_tofu(model, FusionPlan(tuple(PLAN["ops"]), tuple(PLAN["counts"])))
    expected = model.forward_intermediates(images, [2], norm=True, intermediates_only=True)[0]
    assert torch.equal(backbone(images)[0], expected)


def test_what_was_not_used_is_told(tmp_path):
    state = timm_model().state_dict()
    state["stray"] = state.pop("blocks.0.norm1.weight")
    torch.save(state, tmp_path / "w.pth")
    report = load_pretrained(tofu_vit(out_indices=1), tmp_path / "w.pth")
    assert report.missing == ["blocks.0.norm1.weight"] and report.unexpected == ["stray"]
    later = [name for name in state if name.startswith("blocks.2.")]
    assert report.ignored == sorted(["head.weight", "head.bias", "norm.weight", "norm.bias", *later])
    averaging = timm_model("test_vit4")
    torch.save(averaging.state_dict(), tmp_path / "a.pth")
    report = load_pretrained(tofu_vit("test_vit4"), tmp_path / "a.pth")
    assert report.ignored == ["fc_norm.weight", "head.bias", "head.weight"]
    backbone = tofu_vit("test_vit4", final_norm=True)
    report = load_pretrained(backbone, tmp_path / "a.pth")
    assert report.missing == report.unexpected == []
    assert torch.equal(backbone.vit.fc_norm.weight, averaging.fc_norm.weight)


@pytest.mark.parametrize("name", ["test_vit", "deit_tiny_distilled_patch16_224", "vit_small_patch14_reg4_dinov2"])
def test_positions_are_resampled_by_grid(name, tmp_path):
    """(2, 8) is not (4, 4); entries of class tokens are no part of the grid, and not every table has them."""
    state = timm_model(name).state_dict()
    torch.save(state, tmp_path / "w.pth")
    wide = tofu_vit(name, img_size=(16, 64))
    load_pretrained(wide, tmp_path / "w.pth")
    prefix = state["pos_embed"].shape[1] - 16
    assert prefix == {"test_vit": 1, "deit_tiny_distilled_patch16_224": 2}.get(name, 0)
    expected = resample_positions(state["pos_embed"][:, prefix:], (4, 4), (2, 8))
    assert torch.equal(wide.vit.pos_embed[:, prefix:], expected)
    assert torch.equal(wide.vit.pos_embed[:, :prefix], state["pos_embed"][:, :prefix])
    load_pretrained(wide, tmp_path / "w.pth", grid=(2, 8))
    assert torch.equal(wide.vit.pos_embed, state["pos_embed"])
    odd = timm_model(name, img_size=(16, 24)).state_dict()
    torch.save(odd, tmp_path / "odd.pth")
    with pytest.raises(ValueError, match=r"of unknown grid \(not square\); the backbone's grid is \(2, 8\)"):
        load_pretrained(wide, tmp_path / "odd.pth")


def test_files_that_do_not_fit(tmp_path):
    torch.save(timm_model(embed_dim=16).state_dict(), tmp_path / "narrow.pth")
    with pytest.raises(ValueError, match=r"cls_token: file \(1, 1, 16\), model \(1, 1, 32\)"):
        load_pretrained(tofu_vit(), tmp_path / "narrow.pth")
    torch.save({"layers.0.mixer.A_log": torch.zeros(2)}, tmp_path / "adventurer.pth")
    with pytest.raises(ValueError, match="holds an Adventurer, which a ToFuViT cannot take"):
        load_pretrained(tofu_vit(), tmp_path / "adventurer.pth")
    with pytest.raises(FileNotFoundError, match="no weight file or folder at"):
        load_pretrained(tofu_vit(), tmp_path / "nothing")


def test_the_hosts_initialisation_is_kept():
    """timm's model has a method of the host's name, which would start anew after init_cfg."""
    backbone = tofu_vit(init_cfg=dict(type="Constant", layer="Linear", val=7))
    backbone.init_weights()
    assert backbone.vit.blocks[0].mlp.fc1.weight.eq(7).all()
    untouched = tofu_vit()
    before = copy.deepcopy(untouched.state_dict())
    untouched.init_weights()
    assert all(torch.equal(value, before[name]) for name, value in untouched.state_dict().items())


# --- plans in a config ---


def test_plans(tmp_path):
    by = {
        "preset": tofu_vit(tofu=dict(plan=dict(preset="paper", r=2))).fusion.plan,
        "uniform": tofu_vit(tofu=dict(plan=dict(preset="uniform", r=3, op="average"))).fusion.plan,
        "lists": tofu_vit(tofu=dict(plan=PLAN)).fusion.plan,
        "object": tofu_vit(tofu=dict(plan=FusionPlan.paper(DEPTH, 1))).fusion.plan,
    }
    assert by["preset"] == FusionPlan.paper(3, 2) and by["uniform"] == FusionPlan.uniform(3, 3, "average")
    assert by["lists"] == FusionPlan(("prune", "average", "mlerp"), (3, 2, 4))
    assert by["object"] == FusionPlan.paper(3, 1)
    by["lists"].to_json(tmp_path / "plan.json")
    for path in (tmp_path / "plan.json", str(tmp_path / "plan.json")):
        assert tofu_vit(tofu=dict(plan=path)).fusion.plan == by["lists"]


ERRORS = [
    (dict(plan=dict(preset="half", r=2)), ValueError, "preset must be one of 'paper', 'uniform', got 'half'"),
    (dict(plan=dict(preset="paper", r=2, op="prune")), ValueError, "preset 'paper' takes r, got the keys"),
    (dict(plan=dict(preset="uniform", r=2)), ValueError, "preset 'uniform' takes r, op, got the keys"),
    (dict(plan=dict(ops=["prune"] * 4, counts=[1] * 4)), ValueError, "plan is for 4 blocks, the backbone has 3"),
    (dict(plan=dict(ops=["prune"] * 3)), ValueError, r"a plan is dict\(ops=.* got the keys \['ops'\]"),
    (dict(plan=dict(ops=["cut"] * 3, counts=[1] * 3)), ValueError, "'cut'"),
    (dict(plan="nowhere.json"), FileNotFoundError, "no plan file at nowhere.json"),
    (dict(plan=8), TypeError, "plan must be a dict, the path of a plan file or a FusionPlan, got 8"),
    (dict(plan=dict(preset="paper", r=9)), ValueError, "block 0 is to remove 9 tokens, but of 16 patches at most 8"),
    (dict(plan=PLAN, norm="min"), ValueError, "norm must be one of"),
    (dict(plan=PLAN, ratio=2), ValueError, r"knows proportional, .*got \['plan', 'ratio'\]"),
    (dict(proportional=True), ValueError, "tofu needs 'plan'"),
    (8, TypeError, "tofu must be a dict"),
]


@pytest.mark.parametrize("tofu, error, message", ERRORS, ids=[message[:30] for _, _, message in ERRORS])
@pytest.mark.parametrize("make", ["timm", "jumbo", "mmseg"])
def test_wrong_plans(make, tofu, error, message):
    with pytest.raises(error, match=message):
        {
            "timm": lambda: tofu_vit(tofu=tofu),
            "jumbo": lambda: JumboViT(**JUMBO, tofu=tofu),
            "mmseg": lambda: mmseg_vit(ToFuVisionTransformer, tofu=tofu),
        }[make]()


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("test_vit9", {}, ValueError, "timm has no model 'test_vit9'; did you mean test_vit"),
        (3, {}, ValueError, "timm has no model 3"),
        ("resnet18", dict(model_options={}), TypeError, "must name a timm VisionTransformer .* resnet18 is a ResNet"),
        ("jumbo_pico_patch16_224", dict(model_options={}), TypeError, "is a JumboViT with .*type='JumboViT'"),
        ("vit_small_r26_s32_224", dict(model_options={}), TypeError, "is a VisionTransformer with HybridEmbed"),
        ("test_vit", dict(model_options=dict(img_size=8)), ValueError, "model_options must not name img_size"),
        ("test_vit", dict(model_options=dict(width=8)), TypeError, "width"),
        ("test_vit", dict(out_indices=6, model_options={}), IndexError, "6 blocks"),
        ("test_vit", dict(frozen_stages=4), ValueError, "-1..3"),
        ("test_vit", dict(drop_path_rate=1.5), ValueError, "drop_path_rate must lie in"),
        ("test_vit", dict(img_size=33, dynamic_img_pad=False), ValueError, "33 is not a multiple of the patch size 8"),
        ("test_vit", dict(final_norm=True, out_indices=0), ValueError, "normalises the map of the last block"),
        ("test_vit", dict(final_norm=True, model_options={**SIZES, "final_norm": False}), ValueError, "has no norm"),
    ],
)  # fmt: skip
def test_wrong_options(name, options, error, message):
    with pytest.raises(error, match=message):
        tofu_vit(name, **options)


def test_wrong_input():
    with pytest.raises(ValueError, match=r"ToFuViT expects images \(B, 3, H, W\), got \(1, 4, 32, 32\)"):
        tofu_vit()(torch.randn(1, 4, 32, 32))
    with pytest.raises(ValueError, match="image width 33 is not a multiple of the patch size 8"):
        tofu_vit(dynamic_img_pad=False)(torch.randn(1, 3, 32, 33))
    assert tofu_vit(in_channels=1)(torch.randn(1, 1, 32, 32))[0].shape == (1, 32, 4, 4)
