"""Token fusion in the VisionTransformer of MMSegmentation itself: the same as in timm's, its own options, refusals."""

import pytest
import timm
import torch
from torch import nn

pytest.importorskip("mmseg", reason="needs the extra mmseg-lite")

import mmseg_ext  # noqa: F401 (before mmseg.models)

# isort: split
from mmseg.models.backbones import BEiT

from jumbo_core.tofu import FusionPlan, apply_tofu, is_fused, remove_tofu
from mmseg_ext import ToFuVisionTransformer
from tests.conftest import max_error
from tests.mmseg_ext.fused import (
    DEPTH,
    OPTIONS,
    PLAN,
    SIZES,
    as_timm,
    assert_positions_hold_their_groups,
    mmseg_vit,
    tofu_vit,
)


def assert_same(maps, expected, tolerance: float = 1e-5) -> None:
    assert len(maps) == len(expected)
    for y, z in zip(maps, expected, strict=True):
        assert max_error(y, z) < tolerance


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [(32, 32), (24, 64)])
def test_hosts_vit_against_timms(options, size):
    """Same weights, same plan: what torch's attention module gives must be what timm's does."""
    theirs, ours = mmseg_vit(final_norm=True), tofu_vit(final_norm=True, img_size=32)
    ours.vit.load_state_dict(as_timm(theirs.state_dict()))
    images = torch.randn(2, 3, *size)
    if size == (32, 32):  # the two resample positions each in its way
        assert_same(theirs(images), ours(images))
    else:
        for model in (theirs, ours.vit):
            model.pos_embed.data.zero_()
    plan = FusionPlan(tuple(PLAN["ops"]), tuple(PLAN["counts"]))
    one, two = apply_tofu(theirs, plan, **options), apply_tofu(ours.vit, plan, **options)
    assert_same(theirs(images), ours(images))
    assert torch.equal(one.place(), two.place()) and one.report().tokens == two.report().tokens
    assert theirs(images)[2].shape == (2, 32, size[0] // 8, size[1] // 8)


def test_hosts_vit_without_class_token(images):
    """Without a prefix, even patches leave; each map still has every position."""
    model = mmseg_vit(with_cls_token=False)
    plain = model(images)
    handle = apply_tofu(model, FusionPlan(("prune",) * 3, (0, 6, 0)))
    fused = model(images)
    assert torch.equal(fused[0], plain[0]) and not torch.equal(fused[1], plain[1])
    assert handle.place().shape == (2, 16) and handle.sizes().shape == (2, 10, 1)
    for y in fused[1:]:
        assert_positions_hold_their_groups(y, handle)


@pytest.mark.parametrize("with_cls_token", [True, False])
def test_r_0_is_the_identical_computation(with_cls_token, images):
    model = mmseg_vit(with_cls_token=with_cls_token)
    plain = model(images)
    handle = apply_tofu(model, FusionPlan.paper(DEPTH, 0), proportional=True, importance="attention")
    assert all(torch.equal(y, z) for y, z in zip(model(images), plain, strict=True))
    handle.remove()
    assert not is_fused(model) and "forward" not in model.__dict__
    apply_tofu(model, FusionPlan.paper(DEPTH, 3))
    assert not torch.equal(model(images)[-1], plain[-1])
    remove_tofu(model)
    assert all(torch.equal(y, z) for y, z in zip(model(images), plain, strict=True))


def test_hosts_own_options_keep_working(images):
    model = mmseg_vit(out_origin=True, output_cls_token=True, final_norm=True, pre_norm=True)
    plain = model(images)
    handle = apply_tofu(model, FusionPlan(tuple(PLAN["ops"]), (0, 2, 4)))
    fused = model(images)
    assert len(fused) == 4 and all(y.shape == (2, 32, 4, 4) and token.shape == (2, 32) for y, token in fused)
    for (y, token), (z, other) in zip(fused[:2], plain[:2], strict=True):  # the embedding and a block without fusion
        assert torch.equal(y, z) and torch.equal(token, other)
    tokens = fused[3][0].flatten(2).transpose(1, 2)
    assert tokens.mean(-1).std() > 0 and not torch.equal(fused[3][1], plain[3][1])
    assert_positions_hold_their_groups(fused[3][0], handle, prefix=1)
    unnormed = mmseg_vit(out_origin=True, output_cls_token=True, pre_norm=True)
    unnormed.load_state_dict(model.state_dict(), strict=False)
    apply_tofu(unnormed, FusionPlan(tuple(PLAN["ops"]), (0, 2, 4)))
    last = unnormed(images)[3][0].permute(0, 2, 3, 1)
    assert max_error(model.norm1(last).permute(0, 3, 1, 2), fused[3][0]) < 1e-6


@pytest.mark.parametrize("frozen", [["all"], ["layers.2"]])
@pytest.mark.parametrize("options", OPTIONS[:2])
def test_hosts_checkpointing_gives_the_same_gradients(options, frozen, images):
    gradients = []
    for with_cp in (False, True):
        model = mmseg_vit(with_cp=with_cp, drop_rate=0.1, drop_path_rate=0.2, frozen_exclude=frozen)
        model.train()
        apply_tofu(model, FusionPlan(tuple(PLAN["ops"]), tuple(PLAN["counts"])), **options)
        torch.manual_seed(1)
        sum(y.square().mean() for y in model(images)).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
        # What hooks caught is used up: running a block again for its gradients catches nothing.
        assert all(layer.forward.keys.value is None for layer in model.layers)
    plain, saving = gradients
    assert plain.keys() == saving.keys() and len(plain) == (len(list(model.parameters())) if frozen == ["all"] else 12)
    for name, expected in plain.items():
        if "ffn" in name and "weight" in name:
            assert expected.abs().sum() > 0, name
        assert expected is None or max_error(expected, saving[name]) < 1e-6, name


def test_hosts_attention_is_the_one_that_runs(images):
    """Fusion calls the host's modules: what a user hangs on them still runs, with the sizes as a mask of the keys."""
    model, seen = mmseg_vit(), []
    model.layers[2].attn.register_forward_pre_hook(lambda _, args, kw: seen.append(kw), with_kwargs=True)
    apply_tofu(model, FusionPlan(tuple(PLAN["ops"]), tuple(PLAN["counts"])), proportional=True)
    model(images)
    (options,) = seen
    assert options["key_padding_mask"].shape == (2, 17 - 5) and options["key_padding_mask"].max() > 0


def test_hosts_vit_in_half_precision(images):
    model = mmseg_vit()
    apply_tofu(model, FusionPlan(tuple(PLAN["ops"]), tuple(PLAN["counts"])), **OPTIONS[2])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(y.isfinite().all() for y in model(images))
    with torch.no_grad():
        assert all(y.isfinite().all() and y.dtype == torch.bfloat16 for y in model.bfloat16()(images.bfloat16()))


def test_hosts_vit_counts_its_multiply_adds():
    plan = FusionPlan(tuple(PLAN["ops"]), tuple(PLAN["counts"]))
    report = apply_tofu(mmseg_vit(), plan).report()
    linear = timm.create_model("test_vit", img_size=32, **SIZES)
    expected = apply_tofu(linear, plan).report()
    assert report.unfused == expected.unfused == plan.multiply_adds(16, 32) + _saved(plan)
    keys_again = sum((tokens + 1) * 32 * 32 for tokens in (16, 13, 11))  # recomputed where tokens leave
    assert report.multiply_adds == expected.multiply_adds + keys_again


def _saved(plan: FusionPlan) -> int:
    return FusionPlan.paper(DEPTH, 0).multiply_adds(16, 32) - plan.multiply_adds(16, 32)


class OtherLayer(nn.Module):
    def forward(self, x):
        return x


def test_unknown_relatives_are_refused():
    model = mmseg_vit()
    model.layers[1] = OtherLayer()
    with pytest.raises(TypeError, match=r"does not know VisionTransformer; supported: .*MMSegmentation's VisionTransf"):
        apply_tofu(model, FusionPlan.paper(DEPTH, 1))
    beit = BEiT(img_size=(32, 32), patch_size=8, embed_dims=32, num_layers=1, num_heads=2)
    with pytest.raises(TypeError, match="does not know BEiT"):
        apply_tofu(beit, FusionPlan.paper(1, 1))


def test_the_hosts_vit_with_an_option(images):
    plain = mmseg_vit()
    fused = mmseg_vit(ToFuVisionTransformer, tofu=dict(plan=PLAN, proportional=True))
    assert fused.state_dict().keys() == plain.state_dict().keys()
    fused.load_state_dict(plain.state_dict())
    apply_tofu(plain, FusionPlan(tuple(PLAN["ops"]), tuple(PLAN["counts"])), proportional=True)
    assert all(torch.equal(y, z) for y, z in zip(fused(images), plain(images), strict=True))
    assert mmseg_vit(ToFuVisionTransformer).fusion is None and not is_fused(mmseg_vit(ToFuVisionTransformer))
