"""Fused UNets in use: precision, training, copies, files, compiling, a whole pipeline, refusals."""

import copy
import math
import pickle
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("diffusers", reason="needs the extra diffusion")

import diffusers

from hf_ext.diffusers import apply_tofu_to_unet, remove_tofu_from_unet
from tests.conftest import max_error
from tests.hf_ext.diffusion import FINE, call, inputs, make_unet, watch_attention


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
