"""Token fusion in Stable Diffusion's UNet: what is fused where, exactness, sizes, repeats, layouts, removal."""

import math

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("diffusers", reason="needs the extra diffusion")

import diffusers
from diffusers.models import attention_processor

from hf_ext.diffusers import BlockFusion, apply_tofu_to_unet, remove_tofu_from_unet
from jumbo_core.tofu import fuse, unmerge
from jumbo_core.tofu.regions import match_to, region_destinations
from tests.conftest import max_error
from tests.hf_ext.diffusion import FINE, call, inputs, make_unet, watch_attention


def test_tokens_of_each_block():
    unet, given = make_unet(), inputs(6, 10)
    handle = apply_tofu_to_unet(unet, {1: 0.5, 2: 0.25}, op="average")
    seen = watch_attention(unet)
    out = call(unet, given)
    assert out.shape == (2, 4, 6, 10) and out.dtype == torch.float32
    assert {name: (s[0].shape[1], s[2].shape[1]) for name, s in seen.items()} == {
        **dict.fromkeys(FINE, (30, 60)), "mid_block.attentions.0": (12, 15),
    }  # fmt: skip
    report = handle.report()
    assert report.blocks[1] == BlockFusion(
        "mid_block.attentions.0.transformer_blocks.0", 2, "average", height=3, width=5, tokens=15, kept=12
    )
    assert [(b.tokens, b.kept) for b in report.blocks] == [(60, 30), (15, 12), (60, 30), (60, 30)]
    assert str(report).splitlines()[1] == (
        "mid_block.attentions.0.transformer_blocks.0: 3x5 (1/2), 15 -> 12 tokens (average)"
    )


def plain_attention(attention, tokens, counts=None):
    """Self-attention from its weights; ``counts`` (B, N): how many tokens each key stands for."""
    q, k, v = (
        f(tokens).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
        for f in (attention.to_q, attention.to_k, attention.to_v)
    )
    weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).exp()
    if counts is not None:
        weights = weights * counts[:, None, None, :]
    return attention.to_out[0]((weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("processor", ["AttnProcessor2_0", "AttnProcessor"])
@pytest.mark.parametrize("proportional", [True, False])
@pytest.mark.parametrize("op, norm", [("prune", "max"), ("average", "max"), ("mlerp", "max"), ("mlerp", "mean")])
def test_against_attention_written_out(op, norm, proportional, processor):
    unet, given, norm1 = make_unet(), inputs(5, 7), {}
    unet.set_attn_processor(getattr(attention_processor, processor)())
    block = unet.down_blocks[0].attentions[0].transformer_blocks[0]
    block.norm1.register_forward_hook(lambda m, a, out: norm1.update(out=out))
    apply_tofu_to_unet(unet, 0.4, op=op, norm=norm, proportional=proportional, seed=3)
    seen = watch_attention(unet)
    call(unet, given)
    fused_there, bias, output = seen[FINE[0]]
    # The seed draws one number per block, which seeds the block's own draw.
    own = torch.randint(2**31, (4,), generator=torch.Generator().manual_seed(3))[0].item()
    destinations = region_destinations(5, 7, region=(2, 2), generator=torch.Generator().manual_seed(own))
    matching = match_to(norm1["out"], destinations, 14)
    fused, _ = fuse(norm1["out"], matching, op, norm=norm)
    assert max_error(fused_there, fused) < 1e-6
    assert (bias is None) == (not proportional)
    counts = torch.stack([torch.bincount(place, minlength=21) for place in matching.place]) if proportional else None
    expected = plain_attention(block.attn1, fused, counts)
    assert max_error(output, unmerge(expected, matching)) < 1e-5


@pytest.mark.parametrize("op", ["average", "mlerp", "prune"])
def test_attention_over_equal_tokens_does_not_notice_their_merging(op):
    unet, given = make_unet(), inputs(batch=1)
    kinds = 3 * torch.randn(1, 3, 16)[:, torch.arange(64) // 22]  # three kinds of token, 22, 22 and 20 times
    unet.down_blocks[0].attentions[0].transformer_blocks[0].norm1.register_forward_hook(lambda m, a, out: kinds)

    def attended(**options) -> torch.Tensor:
        handle = apply_tofu_to_unet(unet, op=op, **options)
        seen = watch_attention(unet)
        call(unet, given)
        handle.remove()
        return seen[FINE[0]][2]

    exact = attended(ratio=0)
    assert max_error(attended(ratio=0.7, proportional=True), exact) < 1e-5
    assert max_error(attended(ratio=0.7, proportional=False), exact) > 1e-3


def test_by_default_all_but_mlerp_is_weighed():
    unet, given = make_unet(), inputs()
    handle = apply_tofu_to_unet(unet, 0.5, op="paper")
    seen = watch_attention(unet)
    call(unet, given)
    weighed = {name.rpartition(".attentions")[0] for name, (_, bias, _) in seen.items() if bias is not None}
    assert weighed == {"down_blocks.0"} and handle.report().blocks[2].op == "mlerp"


@pytest.mark.parametrize("options", [{}, {"op": "paper"}, {"max_downsample": 2}, {"seed": 5, "region": (4, 2)}])
def test_ratio_nought_is_bit_exact(options):
    unet, given = make_unet(), inputs(5, 6)
    before = call(unet, given)
    handle = apply_tofu_to_unet(unet, 0, **options)
    assert torch.equal(call(unet, given), before)
    assert all(b.op is None and b.kept == b.tokens for b in handle.report().blocks)


def test_removed_is_bit_exact():
    unet, given = make_unet(), inputs()
    before, weights = call(unet, given), {k: v.clone() for k, v in unet.state_dict().items()}
    handle = apply_tofu_to_unet(unet, 0.5)
    assert unet.state_dict().keys() == weights.keys()
    assert not torch.equal(call(unet, given), before)
    assert handle.remove() is unet and handle.unet is unet
    assert torch.equal(call(unet, given), before)
    assert all(torch.equal(v, weights[k]) for k, v in unet.state_dict().items())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in unet.modules())
    with pytest.raises(ValueError, match="there is no token fusion in this UNet"):
        handle.remove()
    apply_tofu_to_unet(unet, 0.5)  # and once more


@pytest.mark.parametrize("height, width", [(8, 8), (5, 7), (12, 4), (9, 3), (16, 6)])
@pytest.mark.parametrize("op", ["prune", "average", "mlerp", "paper"])
def test_any_latent_size(height, width, op):
    unet = make_unet(sample_size=None)
    handle = apply_tofu_to_unet(unet, 0.25, op=op, max_downsample=2)
    report = handle.report((height, width))
    out = call(unet, inputs(height, width))
    assert (report.blocks[0].height, report.blocks[0].width) == (height, width)
    assert report.blocks[1].tokens == math.ceil(height / 2) * math.ceil(width / 2)
    assert out.shape == (2, 4, height, width) and out.isfinite().all()
    assert handle.report() == report  # what the call saw is what was foretold


def test_sizes_may_change_between_calls():
    unet = make_unet()
    small, large = inputs(6, 6), inputs(8, 12)
    handle = apply_tofu_to_unet(unet, 0.5)
    first, second = call(unet, small), call(unet, large)
    assert torch.equal(call(unet, small), first) and torch.equal(call(unet, large), second)
    assert handle.report().blocks[0].tokens == 96


def test_report_before_any_call():
    handle = apply_tofu_to_unet(make_unet(sample_size=(6, 8)), 0.5)
    assert [(b.height, b.width, b.kept) for b in handle.report().blocks] == [
        (6, 8, 24), (3, 4, 12), (6, 8, 24), (6, 8, 24),
    ]  # fmt: skip
    assert handle.report(16).blocks[0].tokens == 256
    handle = apply_tofu_to_unet(make_unet(sample_size=None), 0.5)
    with pytest.raises(ValueError, match="give latents="):
        handle.report()


def test_odd_grids_where_downsampling_does_not_pad():
    unet = make_unet(downsample_padding=0)
    handle = apply_tofu_to_unet(unet, 0.25, max_downsample=2)
    call(unet, inputs(9, 7))
    assert handle.report().blocks[1].tokens == 12 and handle.report((9, 7)) == handle.report()


def test_repeatable_and_the_global_generator_is_left_alone():
    unet, given = make_unet(), inputs()
    state = torch.get_rng_state()
    handle = apply_tofu_to_unet(unet, 0.5, seed=1)
    first = call(unet, given)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1234)
    assert torch.equal(call(unet, given), first)
    handle.remove()
    apply_tofu_to_unet(unet, 0.5, seed=1)
    assert torch.equal(call(unet, given), first)
    remove_tofu_from_unet(unet)
    apply_tofu_to_unet(unet, 0.5, seed=2)
    assert not torch.equal(call(unet, given), first)


def test_blocks_draw_differently():
    """Pruned to their destinations, blocks of one resolution keep different tokens."""
    unet, given, before = make_unet(), inputs(batch=1), {}
    for name in FINE:
        unet.get_submodule(f"{name}.transformer_blocks.0.norm1").register_forward_hook(
            lambda m, a, out, name=name: before.update({name: out})
        )
    apply_tofu_to_unet(unet, 0.75, op="prune")
    seen = watch_attention(unet)
    call(unet, given)
    kept = [(before[name][0, :, None] == seen[name][0][0]).all(-1).any(1) for name in FINE]
    assert all(k.sum() == 16 for k in kept) and len({tuple(k.tolist()) for k in kept}) == 3


def test_both_halves_of_guidance_keep_the_same_destinations():
    unet = make_unet()
    sample, time, prompt = inputs(batch=1)
    apply_tofu_to_unet(unet, 0.75, op="prune")  # all but the destinations leave
    together = call(unet, (torch.cat([sample] * 2), time, torch.cat([prompt, prompt * 0])))
    assert max_error(together[:1], call(unet, (sample, time, prompt))) < 1e-5
    assert max_error(together[1:], call(unet, (sample, time, prompt * 0))) < 1e-5


@pytest.mark.parametrize("op, expected", [
    ("prune", ["prune"] * 4), ("mlerp", ["mlerp"] * 4), ("paper", ["prune", "prune", "mlerp", "mlerp"]),
])  # fmt: skip
def test_operators_of_the_plan(op, expected):
    handle = apply_tofu_to_unet(make_unet(), 0.5, op=op, max_downsample=2)
    assert [b.op for b in handle.report(8).blocks] == expected


def test_stable_diffusion_15_by_its_names():
    """SD 1.5's layout, narrow: at the finest resolution five blocks, the first two of them in the first half."""
    unet = diffusers.UNet2DConditionModel(
        sample_size=64, block_out_channels=(8, 8, 8, 8), cross_attention_dim=8, norm_num_groups=4, attention_head_dim=2
    )
    handle = apply_tofu_to_unet(unet, {1: 0.5, 2: 0.25, 4: 0.0}, op="paper")
    assert [(b.downsample, b.tokens, b.kept, b.op) for b in handle.report().blocks] == [
        (1, 4096, 2048, "prune"), (1, 4096, 2048, "prune"), (2, 1024, 768, "prune"), (2, 1024, 768, "prune"),
        (4, 256, 256, None), (4, 256, 256, None), (8, 64, 64, None),
        (4, 256, 256, None), (4, 256, 256, None), (4, 256, 256, None),
        (2, 1024, 768, "mlerp"), (2, 1024, 768, "mlerp"), (2, 1024, 768, "mlerp"),
        (1, 4096, 2048, "mlerp"), (1, 4096, 2048, "mlerp"), (1, 4096, 2048, "mlerp"),
    ]  # fmt: skip


def test_cross_attention_in_the_place_of_self_attention_is_left_alone():
    down = ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
    mixed = make_unet(down_block_types=down, only_cross_attention=(True, False))
    handle = apply_tofu_to_unet(mixed, 0.5, max_downsample=2)
    assert [b.name.rpartition(".transformer")[0] for b in handle.report().blocks] == [
        "down_blocks.1.attentions.0", "mid_block.attentions.0",
    ]  # fmt: skip
    seen = watch_attention(mixed)
    call(mixed, inputs())
    assert seen["down_blocks.0.attentions.0"][0].shape[1] == 64 and seen["mid_block.attentions.0"][0].shape[1] == 8
    with pytest.raises(ValueError, match="no self-attention"):
        apply_tofu_to_unet(make_unet(only_cross_attention=True, mid_block_type=None), 0.5)


@pytest.mark.parametrize("options", [
    {"use_linear_projection": True, "transformer_layers_per_block": 2},
    {"attention_type": "gated"},
    {"mid_block_type": None},
    {"upcast_attention": True},
], ids=lambda o: next(reversed(o)))  # fmt: skip
def test_other_layouts(options):
    unet, given = make_unet(**options), inputs(6, 6)
    before = call(unet, given)
    handle = apply_tofu_to_unet(unet, 0.5, max_downsample=2)
    out = call(unet, given)
    assert out.shape == before.shape and not torch.equal(out, before)
    blocks = handle.report().blocks
    assert all(b.kept == b.tokens // 2 + b.tokens % 2 for b in blocks)
    assert len(blocks) == {"transformer_layers_per_block": 8, "mid_block_type": 3}.get(next(reversed(options)), 4)
    handle.remove()
    assert torch.equal(call(unet, given), before)


def test_gligen_boxes_reach_the_unmerged_grid():
    unet, given = make_unet(attention_type="gated"), inputs()
    for module in unet.modules():
        if hasattr(module, "alpha_attn"):
            torch.nn.init.ones_(module.alpha_attn)
    boxes = {"boxes": torch.rand(2, 3, 4), "positive_embeddings": torch.randn(2, 3, 12), "masks": torch.ones(2, 3)}
    apply_tofu_to_unet(unet, 0.5)
    plain, out = call(unet, given), call(unet, given, cross_attention_kwargs={"gligen": boxes})
    assert out.shape == plain.shape and max_error(out, plain) > 1e-4
