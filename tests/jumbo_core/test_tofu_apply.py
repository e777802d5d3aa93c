"""apply_tofu: what fuses where, protected tokens, weights, importance, reports, timm's families."""

import copy

import pytest
import timm
import torch

from jumbo_core.jumbo import JumboEncoder
from jumbo_core.measure import encoder_multiply_adds
from jumbo_core.models import JumboViT
from jumbo_core.tofu import FusionPlan, apply_tofu, fuse, match, unmerge
from tests.conftest import max_error
from tests.jumbo_core.fused_models import PLAN, SIZES, jumbo_vit, timm_vit

MODELS = [
    (timm_vit, {}),
    (timm_vit, {"init_values": 0.1, "qk_norm": True, "reg_tokens": 4}),
    (timm_vit, {"class_token": False, "global_pool": "avg"}),
    (jumbo_vit, {}),
    (jumbo_vit, {"registers": 2, "layer_scale": 0.1}),
    (jumbo_vit, {"multiplier": 0, "registers": 3}),
    (jumbo_vit, {"share_jumbo_ffn": False}),
]


def plain_fused(model, image, plan, *, proportional: bool, norm: str, attention: bool = False) -> torch.Tensor:
    """Tokens before the final norm, the block written out from its parts."""
    jumbo = isinstance(model, JumboViT)
    if jumbo:
        x = model.encoder.add_prefix(model.embed(image)[0])
    else:
        x = model._pos_embed(model.patch_embed(image))
    prefix, j, sizes = model.num_prefix_tokens, model.encoder.multiplier if jumbo else 0, None
    for i, block in enumerate(model.blocks):
        attn = block.attn
        q, k, v = attn.qkv(block.norm1(x)).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = attn.q_norm(q), attn.k_norm(k)
        scores = q @ k.transpose(-2, -1) * attn.scale
        if proportional and sizes is not None:
            scores = scores + sizes.log().transpose(1, 2)[:, None]
        weights = scores.softmax(-1)
        x = x + block.ls1(attn.proj((weights @ v).transpose(1, 2).flatten(2)))
        importance = None
        if attention:  # a query counts as often as its size, where sizes count at all
            count = torch.ones_like(x[..., :1]) if sizes is None or not proportional else sizes
            importance = (weights.mean(1) * count / count.sum(1, keepdim=True)).sum(1)
        matching = match(k, plan.counts[i], protected=prefix, importance=importance)
        x, sizes = fuse(x, matching, plan.ops[i], sizes=sizes, norm=norm)
        slices, rest = x[:, :j], x[:, j:]
        if j:
            wide = slices.flatten(1)
            slices = (wide + block.ls3(model.encoder.ffn_of(i)(block.norm3(wide)))).unflatten(1, (j, -1))
        x = torch.cat([slices, rest + block.ls2(block.mlp(block.norm2(rest)))], dim=1)
    return x


@pytest.mark.parametrize("make, options", MODELS, ids=lambda v: getattr(v, "__name__", str(v)))
@pytest.mark.parametrize("proportional", [False, True])
@pytest.mark.parametrize("fused_attention", [False, True])
def test_against_blocks_written_out(make, options, proportional, fused_attention, image):
    model = make(**options)
    for block in model.blocks:
        block.attn.fused_attn = fused_attention
    with torch.no_grad():
        expected = model.norm(plain_fused(model, image, PLAN, proportional=proportional, norm="mean"))
        handle = apply_tofu(model, PLAN, proportional=proportional, norm="mean")
        out = model.forward_features(image)
    prefix = model.num_prefix_tokens
    assert out.shape == (2, prefix + 16 - 9, 32)
    assert max_error(out, expected) < 1e-5
    assert handle.sizes().shape == (2, prefix + 7, 1)
    assert handle.sizes()[:, :prefix].eq(1).all()
    sources = handle.sources()
    assert sources.sum(1).eq(1).all()
    # Prefix tokens stand for themselves alone, and nothing else stands for them.
    assert torch.equal(sources[:, :prefix, :prefix], torch.eye(prefix, dtype=torch.bool).expand(2, -1, -1))
    assert not sources[:, :prefix, prefix:].any() and not sources[:, prefix:, :prefix].any()


@pytest.mark.parametrize(
    "make, options",
    [(timm_vit, {"qk_norm": True}), (jumbo_vit, {"registers": 2})],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
@pytest.mark.parametrize("proportional", [False, True])
def test_by_attention_against_blocks_written_out(make, options, proportional):
    model, image = make(**options), torch.randn(8, 3, 32, 32)
    with torch.no_grad():
        for block in model.blocks:  # sharper attention, so that sizes decide who leaves
            block.attn.qkv.weight.mul_(3)
        plan = FusionPlan.uniform(3, 4, "average")
        expected = plain_fused(model, image, plan, proportional=proportional, norm="max", attention=True)
        apply_tofu(model, plan, proportional=proportional, importance="attention")
        assert max_error(model.forward_features(image), model.norm(expected)) < 1e-5


@pytest.mark.parametrize("op", ["average", "mlerp"])
def test_sizes_count_the_originals(op, image):
    handle = apply_tofu(model := timm_vit(), FusionPlan.uniform(3, 4, op))
    model(image)
    assert torch.equal(handle.sizes(), handle.sources().sum(2, keepdim=True).float())


def test_proportional_attention_is_not_inert(image):
    one = timm_vit()
    two = copy.deepcopy(one)
    apply_tofu(one, FusionPlan.uniform(3, 4, "average"))
    apply_tofu(two, FusionPlan.uniform(3, 4, "average"), proportional=True)
    assert max_error(one(image), two(image)) > 1e-4


@pytest.mark.parametrize("weights", ["size", "importance"])
@pytest.mark.parametrize("make", [timm_vit, jumbo_vit])
def test_weights_of_merged_groups(make, weights, image):
    """Against the blocks' own steps: what members count by, in an average and in the seed's MLERP."""
    plan, model = FusionPlan(("average", "mlerp", "prune"), (4, 4, 2)), make()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(3)
        caught = []
        for block in model.blocks:
            block.attn.q_norm.register_forward_hook(lambda _, __, out: caught.append([out]))
            block.attn.k_norm.register_forward_hook(lambda _, __, out: caught[-1].append(out))
            block.norm2.register_forward_pre_hook(lambda _, args: caught[-1].append(args[0].clone()))
        before = copy.deepcopy(model)
        handle = apply_tofu(model, plan, weights=weights, norm="spherical")
        model(image)
        (_, _, one), (queries, keys, two), _ = caught
        skip = one.shape[1] - 12  # tokens of the MLP's input that are no patches
        prefix = model.num_prefix_tokens
        # Block 1 alone, from what it was given: its input is what block 0 left.
        sizes = apply_tofu(before, FusionPlan(plan.ops, (4, 0, 0)), weights=weights, norm="spherical")
        before(image)
        counted = sizes.sizes()
        tokens = caught[4][2]  # after attention of block 1, nothing left there yet
        matching = match(keys, 4, protected=prefix)
        if weights == "size":
            by = counted.squeeze(-1)
        else:
            by = (queries @ keys.transpose(-2, -1) * model.blocks[0].attn.scale).softmax(-1).mean((1, 2))
        tokens = torch.cat([torch.zeros(2, prefix - skip, 32), tokens], dim=1)
        expected, _ = fuse(tokens, matching, "mlerp", sizes=counted, norm="spherical", weights=by)
        assert max_error(two[:, skip:], expected[:, prefix:]) < 1e-5
        plain, _ = fuse(tokens, matching, "mlerp", sizes=counted, norm="spherical")
        assert max_error(plain, expected) > 1e-4
    handle.remove()


def test_attention_importance_keeps_what_is_attended_to(image):
    model = timm_vit()
    with torch.no_grad():
        x = model._pos_embed(model.patch_embed(image))
        block = model.blocks[0]
        q, k, _ = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        received = (q @ k.transpose(-2, -1) / 4).softmax(-1).mean((1, 2))
    handle = apply_tofu(model, FusionPlan(("prune",) * 3, (4, 0, 0)), importance="attention")
    model(image)
    gone = torch.ones(2, 17, dtype=torch.bool)
    kept = match(k, 4, protected=1, importance=received).kept
    expected = torch.zeros(2, 13, 17, dtype=torch.bool).scatter(2, kept[..., None], True)
    assert (handle.sources() & expected).sum(2).eq(1).all()  # every kept token stands for itself, at least
    assert gone.scatter(1, kept, False).sum(1).tolist() == [4, 4]
    model = timm_vit()
    other = apply_tofu(model, FusionPlan(("prune",) * 3, (4, 0, 0)))
    model(image)
    assert not torch.equal(other.sources(), handle.sources())


def test_report_tells_clamps(image):
    handle = apply_tofu(model := timm_vit(), FusionPlan.uniform(3, 7, "prune"))
    report = handle.report()
    assert report.num_patches == 16 and report.tokens == [9, 5, 3] and report.clamps == [(1, 7, 4), (2, 7, 2)]
    assert str(report) == (
        "16 patches, after each block: 9, 5, 3\n"
        "block 1: asked to remove 7, only 4 could leave\n"
        "block 2: asked to remove 7, only 2 could leave\n"
        "multiply-adds of the blocks for one image: 327,648 of 682,176, 52.0 % saved"
    )
    assert model.forward_features(image).shape == (2, 4, 32)
    assert handle.report(100).tokens == [93, 86, 79]
    jumbo = apply_tofu(model := jumbo_vit(), FusionPlan.uniform(3, 7, "prune"))
    model(torch.randn(1, 3, 32, 64))
    assert jumbo.report().num_patches == 32  # of the latest call


def test_report_counts_multiply_adds():
    plan = FusionPlan(("prune", "average", "mlerp"), (3, 0, 4))
    report = apply_tofu(timm_vit(reg_tokens=2), plan).report()
    assert report.multiply_adds == plan.multiply_adds(16, 32, prefix=3, key_dim=16)
    assert report.unfused == FusionPlan.paper(3, 0).multiply_adds(16, 32, prefix=3)
    assert report.saved == 1 - report.multiply_adds / report.unfused
    model = jumbo_vit(registers=2)
    handle = apply_tofu(model, plan)
    assert handle.report(16).unfused == encoder_multiply_adds(model.encoder, 16)
    assert handle.report(100).unfused == encoder_multiply_adds(model.encoder, 100)
    # What fusion takes away: 5 prefix tokens, 16 patches, then 13, 13 and 9; the Jumbo FFN never sees a patch.
    attention = 4 * 32 * 32 * 2 * 3 + 2 * 32 * 2 * (21**2 - 18**2)
    mlps = 2 * 32 * 128 * (3 + 3 + 7)
    matching = 16 * (8 * 8 + 6 * 7)
    report = handle.report(16)
    assert report.unfused - report.multiply_adds == attention + mlps - matching


def test_capped_to_nothing(image):
    handle = apply_tofu(model := timm_vit(depth=6), FusionPlan.uniform(6, 8, "mlerp"))
    assert handle.report().tokens == [8, 4, 2, 1, 1, 1]
    assert torch.equal(model(image), model(image))


def test_encoder_alone():
    encoder = JumboEncoder(16, 3, 2, multiplier=2, registers=1).eval()
    patches = torch.randn(2, 9, 16)
    plain = encoder(patches)
    handle = apply_tofu(encoder, PLAN_SMALL)
    out = encoder(patches)
    assert out.jumbo.shape == (2, 2, 16) and out.patches.shape == (2, 4, 16)
    maps = encoder.intermediates(patches, [0, 2], norm=True)
    assert [m.patches.shape for m in maps] == [(2, 9, 16)] * 2
    tokens = torch.cat([out.jumbo.new_zeros(2, 3, 16), out.patches], dim=1)
    assert torch.equal(maps[1].patches, unmerge(tokens, handle.place())[:, 3:])
    with pytest.raises(ValueError, match="takes no padding mask"):
        encoder(patches, torch.ones(2, 9, dtype=torch.bool))
    assert handle.report().num_patches == 9
    handle.remove()
    assert torch.equal(encoder(patches).patches, plain.patches)
    assert encoder(patches, torch.ones(2, 9, dtype=torch.bool)).patches.shape == (2, 9, 16)
    with pytest.raises(ValueError, match="give num_patches"):
        apply_tofu(encoder, PLAN_SMALL).report()


PLAN_SMALL = FusionPlan(("prune", "average", "mlerp"), (2, 1, 2))
FAMILIES = [  # with what stands in front of the patches
    ("vit_base_patch16_clip_224", 1),
    ("vit_base_patch14_reg4_dinov2", 5),
    ("deit3_base_patch16_224", 1),
    ("deit_base_distilled_patch16_224", 2),
    ("vit_base_patch16_siglip_224", 0),
    ("vit_medium_patch16_gap_256", 0),
]


@pytest.mark.parametrize("name, prefix", FAMILIES)
def test_timm_families(name, prefix):
    """Class, distillation and register tokens, LayerScale, norm before the blocks, attention pooling."""
    model = timm.create_model(name, img_size=56, patch_size=14, **{**SIZES, "num_heads": 4}).eval()
    image = torch.randn(2, 3, 56, 56)
    plain = model(image)
    handle = apply_tofu(model, FusionPlan.paper(3, 0))
    assert max_error(model(image), plain) < 1e-6
    handle.remove()
    handle = apply_tofu(model, FusionPlan.paper(3, 3))
    assert model(image).shape == plain.shape and not torch.equal(model(image), plain)
    assert model.forward_features(image).shape[1] == prefix + 16 - 9
    assert handle.sizes()[:, :prefix].eq(1).all()
    assert model.forward_intermediates(image, intermediates_only=True)[2].shape == (2, 32, 4, 4)
    handle.remove()
    assert torch.equal(model(image), plain)


def test_timm_features_only(image):
    net = timm.create_model(
        "vit_tiny_patch16_224", features_only=True, img_size=64, depth=3, embed_dim=32, num_heads=2, patch_size=16
    ).eval()
    apply_tofu(net.model, FusionPlan.paper(3, 2))
    maps = net(torch.randn(1, 3, 64, 64))
    assert [m.shape for m in maps] == [(1, 32, 4, 4)] * 3


def test_feature_maps_need_no_fused_block(image):
    """Up to the first block that fuses, maps are those of the plain model, bit by bit."""
    model = timm_vit()
    plain = model.forward_intermediates(image, intermediates_only=True)
    apply_tofu(model, FusionPlan(("prune",) * 3, (0, 3, 0)))
    fused = model.forward_intermediates(image, intermediates_only=True)
    assert torch.equal(fused[0], plain[0]) and not torch.equal(fused[1], plain[1])
