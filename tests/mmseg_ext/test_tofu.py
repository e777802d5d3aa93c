"""Fused backbones in MMSegmentation, timm's and ours: maps, options, copies, whole segmentors."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

pytest.importorskip("mmseg", reason="needs the extra mmseg-lite")

import mmseg_ext  # noqa: F401 (before mmseg.models)

# isort: split
from mmengine.config import ConfigDict
from mmengine.registry import init_default_scope
from mmseg.models.backbones import BEiT
from mmseg.registry import MODELS

from jumbo_core.tofu import FusionPlan, apply_tofu, is_fused, linearity_profile, remove_tofu, unmerge
from mmseg_ext import JumboViT, ToFuVisionTransformer
from tests.conftest import max_error
from tests.mmseg_ext.fused import (
    DEPTH,
    MMSEG,
    OPTIONS,
    PLAN,
    SIZES,
    as_timm,
    assert_positions_hold_their_groups,
    mmseg_vit,
    randomised,
    tofu_vit,
)
from tests.mmseg_ext.helpers import TINY as JUMBO
from tests.mmseg_ext.helpers import trainable_without_gradient

# --- ToFuViT ---


FAMILIES = ["test_vit", "test_vit2", "test_vit4", "deit_tiny_distilled_patch16_224", "vit_base_patch16_clip_224"]
FAMILIES += ["vit_base_patch16_siglip_224", "vit_small_patch14_reg4_dinov2"]


@pytest.mark.parametrize("name", FAMILIES)
def test_without_tofu_it_is_the_plain_timm_model(name, images):
    backbone = tofu_vit(name)
    model = timm.create_model(name, img_size=32, num_classes=0, dynamic_img_size=True, **SIZES).eval()
    model.load_state_dict(backbone.vit.state_dict(), strict=False)
    expected = model.forward_intermediates(images, [0, 1, 2], intermediates_only=True)
    assert all(torch.equal(y, z) for y, z in zip(backbone(images), expected, strict=True))
    assert backbone.fusion is None
    # The same model, fused: every position of the last map holds the vector of its group.
    handle = apply_tofu(backbone.vit, FusionPlan(("prune", "average", "mlerp"), (3, 2, 4)))
    fused = backbone(images)
    vit = backbone.vit
    compact = vit.forward_features(images)  # without its norm, which is left out
    assert compact.shape[1] == vit.num_prefix_tokens + 16 - 9
    unmerged = unmerge(compact, handle.place())[:, vit.num_prefix_tokens :]
    assert max_error(fused[2].flatten(2).transpose(1, 2), unmerged) < 1e-6
    assert_positions_hold_their_groups(fused[2], handle, prefix=vit.num_prefix_tokens)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [(32, 32), (48, 24), (45, 70)])
def test_maps_of_any_size(options, size):
    """Earlier maps are those of the shallower backbone; padded and non-square inputs give the whole grid."""
    images = torch.randn(2, 3, *size)
    backbone = tofu_vit(tofu=dict(plan=PLAN, **options))
    maps = backbone(images)
    grid = (-(-size[0] // 8), -(-size[1] // 8))
    assert all(y.shape == (2, 32, *grid) and y.is_contiguous() for y in maps)
    for last in range(DEPTH):
        shallow = tofu_vit(tofu=dict(plan=PLAN, **options), out_indices=last)
        shallow.vit.load_state_dict(backbone.vit.state_dict(), strict=False)
        assert len(shallow.vit.blocks) == last + 1 and shallow.fusion.plan.counts == tuple(PLAN["counts"][: last + 1])
        assert torch.equal(shallow(images)[0], maps[last])
        assert_positions_hold_their_groups(maps[last], shallow.fusion, prefix=1)


def test_r_0_is_the_plain_backbone(images):
    plain, fused = tofu_vit(), tofu_vit(tofu=dict(plan=dict(preset="paper", r=0), proportional=True))
    assert all(torch.equal(y, z) for y, z in zip(fused(images), plain(images), strict=True))
    assert fused.state_dict().keys() == plain.state_dict().keys()


def test_positions_follow_the_grid_not_the_count():
    backbone = tofu_vit(img_size=(16, 64), tofu=dict(plan=PLAN))  # grid (2, 8)
    wide, square = backbone(torch.zeros(1, 3, 16, 64))[0], backbone(torch.zeros(1, 3, 32, 32))[0]
    assert square.shape == (1, 32, 4, 4) and not torch.allclose(wide.flatten(2), square.flatten(2))


@pytest.mark.parametrize("name, norm", [("test_vit", "norm"), ("test_vit4", "fc_norm")])
@pytest.mark.parametrize("tofu", [None, dict(plan=PLAN)])
def test_final_norm(name, norm, tofu, images):
    """The norm in front of timm's head, also where timm averages first."""
    plain, normed = (tofu_vit(name, final_norm=final_norm, tofu=tofu, out_indices=(0, -1)) for final_norm in (0, 1))
    plain.vit.load_state_dict(normed.vit.state_dict(), strict=False)
    (first, last), (same, changed) = plain(images), normed(images)
    assert torch.equal(first, same)
    expected = getattr(normed.vit, norm)(last.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    assert max_error(changed, expected) < 1e-6 and not torch.allclose(changed, last)
    last_norm = [n for n in normed.state_dict() if "norm." in n and "blocks" not in n]
    assert last_norm and all(n.startswith(f"vit.{norm}.") for n in last_norm)
    assert not [n for n in plain.state_dict() if "norm." in n and "blocks" not in n]


@pytest.mark.parametrize("name", ["test_vit", "test_vit3", "deit_tiny_distilled_patch16_224"])
@pytest.mark.parametrize("options", [{}, dict(final_norm=True), dict(out_indices=1), dict(frozen_stages=1)])
def test_every_trainable_parameter_gets_a_gradient(name, options, images):
    backbone = tofu_vit(name, tofu=dict(plan=PLAN, proportional=True), **options).train()
    sum(y.square().sum() for y in backbone(images)).backward()
    assert trainable_without_gradient(backbone) == []


@pytest.mark.parametrize("frozen_stages", [-1, 1])
@pytest.mark.parametrize("make", ["timm", "jumbo"])
def test_checkpointing_gives_the_same_gradients(make, frozen_stages, images):
    gradients = []
    for with_cp in (False, True):
        options = dict(with_cp=with_cp, frozen_stages=frozen_stages, tofu=dict(plan=PLAN, proportional=True))
        options |= dict(drop_path_rate=0.2, out_indices=(0, 2))
        backbone = tofu_vit(**options) if make == "timm" else randomised(JumboViT(**{**JUMBO, **options}))
        backbone.train()
        torch.manual_seed(1)
        sum(y.square().mean() for y in backbone(images)).backward()
        gradients.append({n: p.grad for n, p in backbone.named_parameters() if p.requires_grad})
    plain, saving = gradients
    assert plain.keys() == saving.keys()
    for name, expected in plain.items():
        assert max_error(expected, saving[name]) < 1e-5 * max(1, expected.abs().max().item()), name


def test_frozen_stages(images):
    stem = {"patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed", "cls_token"}
    backbone = tofu_vit(frozen_stages=2, drop_path_rate=0.5, drop_rate=0.5, tofu=dict(plan=PLAN)).train()
    frozen = {n.removeprefix("vit.") for n, p in backbone.named_parameters() if not p.requires_grad}
    assert stem < frozen and all(n.startswith(("blocks.0.", "blocks.1.")) for n in frozen - stem)
    assert len(frozen - stem) == 2 * 12
    assert not any(m.training for m in [backbone.vit.patch_embed, backbone.vit.pos_drop, *backbone.vit.blocks[:2]])
    assert backbone.vit.blocks[2].training
    tokens = {n for n, p in tofu_vit("test_vit2", frozen_stages=0).named_parameters() if not p.requires_grad}
    assert "vit.reg_token" in tokens and not any("blocks" in n for n in tokens)
    still = tofu_vit(frozen_stages=3, drop_path_rate=0.5, drop_rate=0.5, tofu=dict(plan=PLAN)).train()
    assert torch.equal(still(images)[2], still(images)[2]) and not any(p.requires_grad for p in still.parameters())
    norms = [m for m in tofu_vit("test_vit4", norm_eval=True).train().modules() if "Norm" in type(m).__name__]
    assert len(norms) == 2 * DEPTH and not any(m.training for m in norms)


@pytest.mark.parametrize("make", ["timm", "jumbo", "mmseg"])
def test_copies_and_pickles_stay_fused(make, images):
    tofu = dict(plan=PLAN)
    backbone = {
        "timm": lambda: tofu_vit(tofu=tofu),
        "jumbo": lambda: randomised(JumboViT(**JUMBO, tofu=tofu)).eval(),
        "mmseg": lambda: mmseg_vit(ToFuVisionTransformer, tofu=tofu),
    }[make]()
    expected = backbone(images)
    for twin in (copy.deepcopy(backbone), pickle.loads(pickle.dumps(backbone))):
        for parameter in backbone.parameters():
            parameter.data.mul_(1)
        assert torch.equal(twin(images)[-1], expected[-1])
        inner = getattr(twin, "vit", twin)
        assert twin.fusion.model is inner and twin.fusion.sizes().shape[1] < 16 + 3
        twin.fusion.remove()
        assert not is_fused(twin) and is_fused(backbone) and not torch.equal(twin(images)[-1], expected[-1])


def test_jumbo_with_tofu(images):
    plain, fused = (randomised(JumboViT(**JUMBO, tofu=tofu)).eval() for tofu in (None, dict(plan=PLAN)))
    core = plain.vit
    handle = apply_tofu(core, FusionPlan(tuple(PLAN["ops"]), tuple(PLAN["counts"])))
    expected = core.forward_intermediates(images, [2], intermediates_only=True)[0]
    assert torch.equal(fused(images)[0], expected)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(fused.fusion.place(), handle.place()) and fused.fusion.report().tokens == [13, 11, 7]
    assert_positions_hold_their_groups(fused(images)[0], fused.fusion, prefix=2)
    assert fused.fusion.sizes()[:, :2].eq(1).all()  # the Jumbo slices stand for themselves


# --- whole segmentors ---


def segmentor(backbone: dict) -> nn.Module:
    init_default_scope("mmseg")
    head = dict(
        type="FCNHead", in_channels=32, channels=8, num_convs=1, in_index=-1, num_classes=4, norm_cfg=dict(type="BN")
    )
    config = ConfigDict(type="EncoderDecoder", backbone=backbone, decode_head=head, test_cfg=dict(mode="whole"))
    return randomised(MODELS.build(config)).eval()


BACKBONES = {
    "timm": dict(type="ToFuViT", model_name="test_vit", img_size=32, model_options=SIZES, out_indices=(0, 1, 2)),
    "jumbo": dict(type="JumboViT", **{**JUMBO, "embed_dims": 32}),
    "mmseg": dict(type="VisionTransformer", **MMSEG),
}


@pytest.mark.parametrize("make", BACKBONES)
def test_segmentors_are_fused_and_profiled_as_a_whole(make, images):
    model = segmentor(dict(BACKBONES[make]))
    plain = model(images)
    labels = torch.randint(0, 4, (2, 4, 4))
    labels[:, 0] = -100  # as torch's cross-entropy ignores them
    profile = linearity_profile(model, [(images, labels), (images.flip(0), labels)])
    assert profile.num_patches == 16 and len(profile.linearity) == DEPTH
    assert min(profile.importance) > 0  # the last block's too: maps hang on its patches
    plan = FusionPlan.from_profile(profile, 0.3)
    handle = apply_tofu(model, plan, proportional=True)
    fused = model(images)
    assert fused.shape == plain.shape and not torch.equal(fused, plain)
    report = handle.report()
    assert sum(report.tokens) <= 0.7 * 16 * DEPTH and 0.1 < report.saved < 0.5
    prediction = model(images, mode="predict")
    assert len(prediction) == 2 and prediction[0].pred_sem_seg.data.shape == (1, 32, 32)
    inside = getattr(model.backbone, "vit", model.backbone)
    other = segmentor(dict(BACKBONES[make]))
    apply_tofu(getattr(other.backbone, "vit", other.backbone), plan, proportional=True)
    assert torch.equal(other(images), fused) and is_fused(inside)
    handle.remove()
    assert torch.equal(model(images), plain)


def test_profile_of_the_hosts_vit_is_timms(images):
    """The host's feed-forward module adds its input: the profile is of what lies inside."""
    theirs, ours = segmentor(dict(BACKBONES["mmseg"])), segmentor(dict(BACKBONES["timm"]))
    ours.backbone.vit.load_state_dict(as_timm(theirs.backbone.state_dict()), strict=False)
    ours.decode_head.load_state_dict(theirs.decode_head.state_dict())
    one, two = (linearity_profile(model, [images], seed=1) for model in (theirs, ours))
    assert one.linearity == pytest.approx(two.linearity, abs=1e-5)
    assert one.importance == pytest.approx(two.importance, rel=1e-4)


def test_other_segmentors_are_refused():
    model = segmentor(dict(BACKBONES["timm"]))
    model.backbone = BEiT(img_size=(32, 32), patch_size=8, embed_dims=32, num_layers=2, num_heads=2)
    with pytest.raises(TypeError, match=r"know EncoderDecoder; .*MMSegmentation segmentors around one of the others"):
        apply_tofu(model, FusionPlan.paper(2, 1))


def test_fused_segmentors_can_be_copied_and_pickled(images):
    model = segmentor(dict(BACKBONES["mmseg"]))
    apply_tofu(model, FusionPlan(tuple(PLAN["ops"]), tuple(PLAN["counts"])))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(images), model(images))
        remove_tofu(twin)
        assert not is_fused(twin) and is_fused(model)
