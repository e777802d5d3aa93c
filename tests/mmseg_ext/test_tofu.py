"""Fused backbones in MMSegmentation: the host's own ViT, timm's, ours; maps, options, plans, errors."""

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
from mmseg.models.backbones import BEiT, VisionTransformer
from mmseg.registry import MODELS
from safetensors.torch import save_file
from timm.models._hub import save_for_hf

from jumbo_core.models.positions import resample_positions
from jumbo_core.tofu import FusionPlan, apply_tofu, is_fused, linearity_profile, remove_tofu, unmerge
from mmseg_ext import JumboViT, ToFuVisionTransformer, ToFuViT, load_pretrained
from tests.conftest import max_error
from tests.mmseg_ext.helpers import TINY as JUMBO
from tests.mmseg_ext.helpers import trainable_without_gradient

DEPTH = 3
PLAN = dict(ops=["prune", "average", "mlerp"], counts=[3, 2, 4])
OPTIONS = [
    {},
    dict(proportional=True, norm="mean"),
    dict(proportional=True, importance="attention"),
    dict(weights="size"),
]
SIZES = dict(embed_dim=32, depth=DEPTH, num_heads=2, patch_size=8, mlp_ratio=4)
MMSEG = dict(
    img_size=(32, 32), patch_size=8, embed_dims=32, num_layers=DEPTH, num_heads=2, patch_bias=True,
    norm_cfg=dict(type="LN", eps=1e-6), out_indices=(0, 1, 2),
)  # fmt: skip


def tofu_vit(name: str = "test_vit", **options) -> ToFuViT:
    options = {"img_size": 32, "model_options": SIZES, "out_indices": (0, 1, 2), **options}
    return randomised(ToFuViT(name, **options)).eval()


def mmseg_vit(cls: type = VisionTransformer, **options) -> VisionTransformer:
    model = randomised(cls(**{**MMSEG, **options}))
    model.eval()  # which the host's backbone does not hand on
    return model


def randomised(model: nn.Module) -> nn.Module:
    """Weights at which no token is like another and nothing is silent; the same for equal shapes."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    return model


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32)


def assert_same(maps, expected, tolerance: float = 1e-5) -> None:
    assert len(maps) == len(expected)
    for y, z in zip(maps, expected, strict=True):
        assert max_error(y, z) < tolerance


# --- the host's own VisionTransformer ---


def as_timm(state: dict[str, torch.Tensor], depth: int = DEPTH) -> dict[str, torch.Tensor]:
    """Weights of the host's ViT under timm's names."""
    out = {"cls_token": state["cls_token"], "pos_embed": state["pos_embed"]}
    for kind in ("weight", "bias"):
        out[f"patch_embed.proj.{kind}"] = state[f"patch_embed.projection.{kind}"]
        if f"ln1.{kind}" in state:
            out[f"norm.{kind}"] = state[f"ln1.{kind}"]
        names = {"norm1": "ln1", "norm2": "ln2", "attn.proj": "attn.attn.out_proj", "mlp.fc1": "ffn.layers.0.0"}
        for i in range(depth):
            for ours, theirs in {**names, "mlp.fc2": "ffn.layers.1"}.items():
                out[f"blocks.{i}.{ours}.{kind}"] = state[f"layers.{i}.{theirs}.{kind}"]
            out[f"blocks.{i}.attn.qkv.{kind}"] = state[f"layers.{i}.attn.attn.in_proj_{kind}"]
    return out


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


def assert_positions_hold_their_groups(y: torch.Tensor, handle, prefix: int = 0) -> None:
    """Positions of one group are equal, positions of different groups are not."""
    vectors = y.flatten(2).transpose(1, 2)  # (B, D, h, w) -> (B, N, D)
    place = handle.place()[:, prefix:]
    same = place.unsqueeze(1) == place.unsqueeze(2)
    assert torch.equal((torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist") == 0), same)


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
