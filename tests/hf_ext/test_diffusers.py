"""Token fusion in Stable Diffusion's UNet: what is fused where, exactness, repeats, training, precision, refusals."""

import copy
import math
import pickle
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("transformers", reason="needs the extra hf")
diffusers = pytest.importorskip("diffusers", reason="needs the extra diffusion")

from diffusers.models import attention_processor  # noqa: E402

from hf_ext.diffusers import BlockFusion, apply_tofu_to_unet, remove_tofu_from_unet  # noqa: E402
from jumbo_core.tofu import fuse, unmerge  # noqa: E402
from jumbo_core.tofu.regions import match_to, region_destinations  # noqa: E402
from tests.conftest import max_error  # noqa: E402

CONFIG = dict(
    sample_size=8, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=12, attention_head_dim=2,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    norm_num_groups=4,
)  # fmt: skip
FINE = ["down_blocks.0.attentions.0", "up_blocks.1.attentions.0", "up_blocks.1.attentions.1"]


def make_unet(**options):
    return diffusers.UNet2DConditionModel(**{**CONFIG, **options}).eval().requires_grad_(False)


def inputs(height: int = 8, width: int = 8, batch: int = 2, width_of_prompt: int = 12):
    return torch.randn(batch, 4, height, width), torch.tensor(481), torch.randn(batch, 5, width_of_prompt)


def call(unet, given, **options):
    return unet(*given, **options).sample


def watch_attention(unet) -> dict[str, list]:
    """Self-attention by block name: [what it was given, its bias, what the residual gets], of the latest call."""
    seen = {}

    def watch(name, attention):
        def start(module, args, kwargs):
            seen[name] = [args[0].detach(), kwargs["attention_mask"], None]

        def end(module, args, output):
            seen[name][2] = output.detach()

        attention.register_forward_pre_hook(start, with_kwargs=True)
        attention.register_forward_hook(end)

    for name, module in unet.named_modules():
        if name.endswith("attn1"):
            watch(name.removesuffix(".transformer_blocks.0.attn1"), module)
    return seen


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("op", ["prune", "average", "mlerp"])
def test_dtypes(dtype, op):
    unet, (sample, time, prompt) = make_unet(), inputs()
    apply_tofu_to_unet(unet, 0.5, op=op)
    exact = call(unet, (sample, time, prompt))
    half = call(unet.to(dtype), (sample.to(dtype), time, prompt.to(dtype)))
    assert half.dtype == dtype and half.shape == exact.shape
    distance = (half.float() - exact).norm() / exact.norm()
    assert distance < {torch.float16: 0.02, torch.bfloat16: 0.08, torch.float64: 1e-5}[dtype]


def test_autocast():
    unet, given = make_unet(), inputs()
    apply_tofu_to_unet(unet, 0.5)
    exact = call(unet, given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (call(unet, given).float() - exact).norm() / exact.norm() < 0.08


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("op", ["average", "mlerp", "prune"])
def test_training(op, checkpointing):
    unet, given = make_unet(), inputs(5, 6)
    unet.train().requires_grad_(True)
    apply_tofu_to_unet(unet, 0.5, op=op, max_downsample=2)
    call(unet, given).square().mean().backward()
    plain = {name: p.grad.clone() for name, p in unet.named_parameters()}
    assert all(g.isfinite().all() for g in plain.values())
    assert all(g.abs().sum() > 0 for name, g in plain.items() if "attn1" in name and "to_k" not in name)
    if checkpointing:
        unet.zero_grad()
        unet.enable_gradient_checkpointing()
        call(unet, given).square().mean().backward()
        for name, p in unet.named_parameters():
            assert max_error(p.grad, plain[name]) < 1e-6, name


def test_fused_gradient_is_that_of_the_fused_function():
    unet, (sample, time, prompt) = make_unet().double(), inputs(4, 4, batch=1)
    apply_tofu_to_unet(unet, 0.5)
    sample, prompt = sample.double(), prompt.double()
    direction = torch.randn_like(sample)

    def along(step):
        return call(unet, (sample + step * direction, time, prompt)).square().sum()

    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(along(step), step)
    assert abs(slope - (along(1e-6) - along(-1e-6)) / 2e-6) < 1e-4 * abs(slope)


def test_copies_and_pickles_keep_the_fusion_and_lose_it_alone():
    unet, given = make_unet(), inputs()
    before = call(unet, given)
    apply_tofu_to_unet(unet, 0.5)
    fused = call(unet, given)
    for other in (copy.deepcopy(unet), pickle.loads(pickle.dumps(unet))):
        assert torch.equal(call(other, given), fused)
        remove_tofu_from_unet(other)
        assert torch.equal(call(other, given), before)
        assert torch.equal(call(unet, given), fused)


def test_unpickled_in_another_process(tmp_path):
    unet, given = make_unet(), inputs()
    apply_tofu_to_unet(unet, 0.5)
    torch.save((unet, given, call(unet, given)), tmp_path / "unet.pt")
    script = (
        "import sys, torch\n"
        "unet, given, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "unet.mid_block.attentions[0].register_forward_pre_hook(lambda m, a: None)\n"  # takes a number of its own
        "unet.down_blocks[0].attentions[0].register_forward_pre_hook(lambda m, a: None)\n"
        "assert torch.equal(unet(*given).sample, expected)\n"
        "from hf_ext.diffusers import remove_tofu_from_unet\n"
        "remove_tofu_from_unet(unet)\n"
        "assert not torch.equal(unet(*given).sample, expected)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "unet.pt")], check=True, timeout=300)


def test_saved_and_loaded_weights_are_plain(tmp_path):
    unet, given = make_unet(), inputs()
    before = call(unet, given)
    apply_tofu_to_unet(unet, 0.5)
    unet.save_pretrained(tmp_path)
    loaded = diffusers.UNet2DConditionModel.from_pretrained(tmp_path).eval()
    assert max_error(call(loaded, given), before) < 1e-6


@pytest.mark.slow
def test_compiles_whole_and_notices_removal():
    one = dict(down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",), mid_block_type=None)
    unet, given = make_unet(**one, block_out_channels=(16,)), inputs()
    with torch.no_grad():
        before = call(unet, given)
        handle = apply_tofu_to_unet(unet, 0.5)
        fused = call(unet, given)
        compiled = torch.compile(unet, fullgraph=True, backend="aot_eager")
        assert max_error(call(compiled, given), fused) < 1e-5
        handle.remove()
        assert max_error(call(compiled, given), before) < 1e-5
    with pytest.raises(TypeError, match="compiled already: fuse first, then compile"):
        apply_tofu_to_unet(compiled)
    unet.compile()
    with pytest.raises(ValueError, match="the UNet is compiled already and would not notice"):
        apply_tofu_to_unet(unet)


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


def test_a_mask_for_self_attention_is_refused():
    unet, given = make_unet(), inputs()
    apply_tofu_to_unet(unet, 0.5)
    with pytest.raises(ValueError, match="was given an attention_mask for its self-attention"):
        call(unet, given, attention_mask=torch.ones(2, 64))
    mask = torch.ones(2, 5, dtype=torch.bool)
    assert max_error(call(unet, given, encoder_attention_mask=mask), call(unet, given)) < 1e-6


def test_refusals():
    unet = make_unet()
    with pytest.raises(TypeError, match=r"supported are diffusers' UNet2DConditionModel and pipelines.*got a Linear"):
        apply_tofu_to_unet(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="got a UNet2DModel"):
        apply_tofu_to_unet(diffusers.UNet2DModel(block_out_channels=(16,) * 4, norm_num_groups=4))
    for ratio in (-0.1, 0.8, math.nan, "half", None):
        with pytest.raises(ValueError, match=r"ratio must lie in \[0, 0.75\].*asked for"):
            apply_tofu_to_unet(unet, ratio)
    with pytest.raises(ValueError, match=r"ratio at factor 2 must lie in \[0, 0.5\]"):
        apply_tofu_to_unet(unet, {1: 0.2, 2: 0.6}, region=(1, 2))
    with pytest.raises(ValueError, match=r"downsample factors \[4\]; self-attention is at \[1, 2\]"):
        apply_tofu_to_unet(unet, {4: 0.5})
    with pytest.raises(ValueError, match="at least one downsample factor"):
        apply_tofu_to_unet(unet, {})
    with pytest.raises(ValueError, match="max_downsample goes with a single ratio"):
        apply_tofu_to_unet(unet, {1: 0.5}, max_downsample=1)
    with pytest.raises(ValueError, match="op must be one of 'prune', 'average', 'mlerp', 'paper', got 'drop'"):
        apply_tofu_to_unet(unet, op="drop")
    with pytest.raises(ValueError, match=r"norm must be one of 'max', 'mean'.* got 'min'"):
        apply_tofu_to_unet(unet, norm="min")
    with pytest.raises(ValueError, match="seed must be an integer of at least 0, got -1"):
        apply_tofu_to_unet(unet, seed=-1)
    with pytest.raises(ValueError, match="proportional must be True or False"):
        apply_tofu_to_unet(unet, proportional=1)
    assert not any(m._forward_pre_hooks for m in unet.modules())  # nothing was half done
    handle = apply_tofu_to_unet(unet, 0.75)
    with pytest.raises(ValueError, match="fused already"):
        apply_tofu_to_unet(unet, 0.5)
    with pytest.raises(ValueError, match=r"asked to remove 18 of 25 tokens.*at most 16 can leave a grid of 5x5"):
        call(unet, inputs(5, 5))
    assert call(unet, inputs(6, 6)).shape == (2, 4, 6, 6)  # and it goes on
    handle.remove()
    coarse = make_unet(down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2)
    with pytest.raises(ValueError, match=r"no self-attention at downsample factors up to max_downsample=1.*\[2\]"):
        apply_tofu_to_unet(coarse)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """A Stable Diffusion pipeline of random weights, text encoder and tokenizer built here."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    tokens = ["<|startoftext|>", "<|endoftext|>", "a</w>", "c", "a", "t</w>", "at</w>", "cat</w>"]
    tokenizer = CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[("a", "t</w>"), ("c", "at</w>")],
        model_max_length=16,
    )  # fmt: skip
    text = CLIPTextConfig(
        vocab_size=len(tokens), hidden_size=12, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4,
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionPipeline(
        vae=vae, text_encoder=CLIPTextModel(text).eval(), tokenizer=tokenizer, unet=make_unet(),
        scheduler=diffusers.DDIMScheduler(num_train_timesteps=1000), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def paint(pipeline) -> torch.Tensor:
    picture = pipeline(
        "a cat", height=16, width=24, num_inference_steps=2, guidance_scale=5.0, output_type="pt",
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    return picture.images


def test_pipeline(pipeline):
    plain = paint(pipeline)
    assert plain.shape == (1, 3, 16, 24)
    handle = apply_tofu_to_unet(pipeline, 0.5, op="paper")
    seen = watch_attention(pipeline.unet)
    fused = paint(pipeline)
    assert fused.shape == plain.shape and fused.isfinite().all() and not torch.equal(fused, plain)
    assert torch.equal(paint(pipeline), fused)
    assert seen[FINE[0]][0].shape[:2] == (2, 48)  # guidance: two halves; 8 x 12 latents
    assert handle.report().blocks[0].kept == 48 and handle.report().blocks[0].op == "prune"
    assert remove_tofu_from_unet(pipeline) is pipeline.unet
    assert torch.equal(paint(pipeline), plain)
    assert F.mse_loss(fused, plain) < 0.1


def test_the_package_does_not_import_diffusers():
    script = "import sys, hf_ext; assert 'diffusers' not in sys.modules and 'hf_ext.diffusers' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
