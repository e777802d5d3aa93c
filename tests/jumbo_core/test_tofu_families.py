"""timm's families: what stands in front is protected, r = 0 and remove() are exact, rotary positions follow tokens."""

import copy
import pickle

import pytest
import timm
import torch
from timm.layers import PatchDropoutWithIndices
from timm.models.eva import Eva
from timm.models.vision_transformer import (
    DiffParallelScalingBlock,
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)

from jumbo_core.tofu import FusionPlan, apply_tofu, fuse, linearity_profile, match
from tests.conftest import max_error

SMALL = {"img_size": 64, "patch_size": 16, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
PLAN = FusionPlan(("prune", "average", "mlerp"), (3, 2, 4))

PLAIN = [  # with what stands in front of the patches
    ("vit_base_patch16_clip_224", 1, {}),  # a norm in front of the blocks
    ("vit_base_patch14_reg4_dinov2", 5, {}),  # registers, LayerScale
    ("deit3_base_patch16_224", 1, {}),  # LayerScale
    ("deit_base_distilled_patch16_224", 2, {}),
    ("vit_base_patch16_siglip_224", 0, {}),  # attention pooling
    ("vit_medium_patch16_gap_256", 0, {}),
    ("vit_base_patch16_224", 1, {"qk_norm": True, "init_values": 0.1}),
    ("vit_base_patch16_224", 4, {"reg_tokens": 3, "scale_attn_norm": True, "scale_mlp_norm": True}),
]
ROTARY = [
    ("vit_small_patch16_dinov3", 5, {}),
    ("vit_small_plus_patch16_dinov3", 5, {}),  # SwiGLU
    ("eva02_tiny_patch14_224", 1, {}),
    ("vit_base_patch16_rope_reg1_gap_256", 1, {}),
    ("vit_small_patch16_rope_224", 1, {}),
    ("vit_small_patch16_rope_mixed_224", 1, {}),  # frequencies of each block and head
    ("vit_small_patch16_rope_mixed_ape_224", 1, {}),
    ("vit_pe_core_tiny_patch16_384", 1, {}),  # a norm in front, attention pooling
    ("vit_small_patch16_dinov3", 5, {"num_kv_heads": 1, "qkv_fused": False, "attn_type": "rope"}),  # fewer keys
    ("eva02_base_patch16_clip_224", 1, {"qk_norm": True, "init_values": 0.1}),
]
EVA = [
    ("eva_large_patch14_196", 1, {}),
    ("eva02_enormous_patch14_clip_224", 1, {}),  # norms behind attention and MLP
]
FAMILIES = PLAIN + ROTARY + EVA


def make(name, options):
    model = timm.create_model(name, **{**SMALL, **options}).eval()
    with torch.no_grad():  # weights as timm starts them tell tokens hardly apart
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.1)
            elif "gamma" in name:  # LayerScale starts at next to nothing
                parameter.fill_(0.5)
    return model


def names(value):
    return value if isinstance(value, str) else "-".join(map(str, value)) if isinstance(value, dict) else None


@pytest.fixture
def image():
    return torch.randn(2, 3, 64, 64)


@pytest.mark.parametrize("name, prefix, options", FAMILIES, ids=names)
def test_family(name, prefix, options, image):
    model = make(name, options)
    with torch.no_grad():
        plain, maps = model(image), model.forward_intermediates(image, intermediates_only=True)
        handle = apply_tofu(model, FusionPlan.paper(3, 0))
        assert torch.equal(model(image), plain)
        handle.remove()

        handle = apply_tofu(model, PLAN, proportional=True)
        fused = model(image)
        assert fused.shape == plain.shape and max_error(fused, plain) > 1e-4 and torch.equal(model(image), fused)
        assert model.forward_features(image).shape == (2, prefix + 16 - 9, 32)
        sources = handle.sources()
        assert torch.equal(sources[:, :prefix, :prefix], torch.eye(prefix, dtype=torch.bool).expand(2, -1, -1))
        assert not sources[:, :prefix, prefix:].any() and not sources[:, prefix:, :prefix].any()
        dense = model.forward_intermediates(image, intermediates_only=True)
        assert [m.shape for m in dense] == [(2, 32, 4, 4)] * 3 and max_error(dense[2], maps[2]) > 1e-4
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(image), fused)
        assert handle.report().saved > 0.1

        assert handle.remove() is model
        assert torch.equal(model(image), plain)
        assert all(torch.equal(*pair) for pair in zip(model.forward_intermediates(image)[1], maps, strict=True))


def fused_by_hand(model, image, plan):
    """One sample after the other, each with the rows of the rotary table that its tokens stood at."""
    x, table = model._pos_embed(model.patch_embed(image))
    prefix, result = model.num_prefix_tokens, []
    for sample in model.norm_pre(x).split(1):
        origin, sizes = torch.arange(sample.shape[1] - prefix), None
        for i, block in enumerate(model.blocks):
            rope = (table[i] if model.rope_mixed else table)[..., origin, :]
            keys = []
            hook = block.attn.k_norm.register_forward_hook(lambda _, __, out, keys=keys: keys.append(out))
            update = block.attn(block.norm1(sample), rope=rope)
            hook.remove()
            sample = sample + (update if block.gamma_1 is None else block.gamma_1 * update)
            matching = match(keys[0], plan.counts[i], protected=prefix)
            sample, sizes = fuse(sample, matching, plan.ops[i], sizes=sizes)
            origin = origin[matching.kept[0, prefix:] - prefix]
            update = block.mlp(block.norm2(sample))
            sample = sample + (update if block.gamma_2 is None else block.gamma_2 * update)
        result.append(sample)
    return model.norm(torch.cat(result))


@pytest.mark.parametrize("name, prefix, options", ROTARY, ids=names)
@pytest.mark.parametrize("fused_attention", [False, True])
def test_rotary_positions_follow_the_tokens(name, prefix, options, fused_attention, image):
    model = make(name, options)
    for block in model.blocks:
        block.attn.fused_attn = fused_attention
    with torch.no_grad():
        expected = fused_by_hand(model, image, PLAN)
        apply_tofu(model, PLAN)
        assert max_error(model.forward_features(image), expected) < 1e-5


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "vit_small_patch16_rope_mixed_224"])
def test_rotary_positions_after_patch_dropout(name, image):
    """In training each sample has patches of its own, and the table a batch axis."""
    model = make(name, {"patch_drop_rate": 0.25}).train()
    assert isinstance(model.patch_drop, PatchDropoutWithIndices)
    plain = copy.deepcopy(model)
    handle = apply_tofu(model, FusionPlan(("prune", "prune", "prune"), (0, 4, 0)))
    torch.manual_seed(3)
    model(image).sum().backward()
    assert handle.place().shape[1] == model.num_prefix_tokens + 12
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.blocks.parameters())
    # The same drop, the pruning done by hand: block 2 sees the kept rows of each sample's table.
    torch.manual_seed(3)
    x, table = plain._pos_embed(plain.patch_embed(image))
    rope = list(table) if plain.rope_mixed else [table] * 3
    x = plain.blocks[0](plain.norm_pre(x), rope=rope[0])
    prefix, block, keys = plain.num_prefix_tokens, plain.blocks[1], []
    block.attn.k_norm.register_forward_hook(lambda _, __, out: keys.append(out))
    update = block.attn(block.norm1(x), rope=rope[1])
    kept = match(keys[0], 4, protected=prefix).kept
    x = x + (update if block.gamma_1 is None else block.gamma_1 * update)
    x = x.gather(1, kept[..., None].expand(-1, -1, 32))
    update = block.mlp(block.norm2(x))
    x = x + (update if block.gamma_2 is None else block.gamma_2 * update)
    rows = kept[:, None, prefix:, None] - prefix
    x = plain.blocks[2](x, rope=rope[2].gather(2, rows.expand(-1, rope[2].shape[1], -1, rope[2].shape[3])))
    torch.manual_seed(3)
    assert max_error(model.forward_features(image), plain.norm(x)) < 1e-5


def test_importance_by_attention(image):
    model = make(*EVA[0][::2])  # no rotary positions: queries and keys are as attention multiplies them
    handle = apply_tofu(model, FusionPlan(("prune",) * 3, (4, 0, 0)), importance="attention")
    model(image)
    other = apply_tofu(twin := copy.deepcopy(handle.remove()), FusionPlan(("prune",) * 3, (4, 0, 0)))
    twin(image)
    assert not torch.equal(other.sources(), handle.sources())
    for options in ({"importance": "attention"}, {"weights": "importance"}):
        with pytest.raises(ValueError, match="importance by attention needs queries and keys as attention multiplies"):
            apply_tofu(make("vit_small_patch16_dinov3", {}), PLAN, **options)


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "eva02_enormous_patch14_clip_224"])
def test_profile_and_checkpointing(name):
    model, images = make(name, {}), torch.randn(4, 3, 64, 64)
    profile = linearity_profile(model, [images])
    assert profile.num_patches == 16 and max(profile.linearity) < 1
    apply_tofu(model.train(), FusionPlan.from_profile(profile))
    model(images).square().sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.set_grad_checkpointing(True)
    model(images).square().sum().backward()
    for gradient, parameter in zip(plain, model.parameters(), strict=True):
        assert max_error(gradient, parameter.grad) < 1e-5 * max(1, gradient.abs().max().item())


@pytest.mark.slow
def test_dinov3_exports(image, tmp_path):
    from jumbo_core.tofu.deploy import export_model

    model = make("vit_small_patch16_dinov3", {"depth": 2})
    apply_tofu(model, FusionPlan.paper(2, 3))
    assert export_model(model, tmp_path / "model.pt2", image).error < 1e-5


BLOCKS = [ResPostBlock, ParallelScalingBlock, ParallelThingsBlock, DiffParallelScalingBlock]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_other_blocks_are_refused(block):
    model = VisionTransformer(**SMALL, block_fn=block)
    with pytest.raises(TypeError, match=f"does not know VisionTransformer made of {block.__name__}.*; supported: "):
        apply_tofu(model, PLAN)


def test_other_attention_is_refused():
    with pytest.raises(TypeError, match="does not know VisionTransformer made of Block with DiffAttention"):
        apply_tofu(VisionTransformer(**SMALL, attn_layer="diff"), PLAN)
    model = Eva(**SMALL)
    model.blocks[1].attn = torch.nn.Identity()
    with pytest.raises(
        TypeError, match=r"does not know Eva made of EvaBlock.*timm Eva \(EVA, EVA-02, DINOv3, RoPE-ViT\)"
    ):
        apply_tofu(model, PLAN)


def test_masks_are_refused(image):
    apply_tofu(model := make("eva_large_patch14_196", {}), PLAN)
    with pytest.raises(ValueError, match="takes no attention mask"):
        model(image, attn_mask=torch.ones(17, 17, dtype=torch.bool))
