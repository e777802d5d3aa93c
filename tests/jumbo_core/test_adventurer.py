"""Adventurer and Jumbo-linear: order of tokens, reversal, heading average, timm's surface, compute, errors."""

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from jumbo_core.jumbo import param_groups
from jumbo_core.linear import AdventurerEncoder, Mamba2Mixer
from jumbo_core.measure import count_parameters, multiply_adds
from jumbo_core.measure.flops import encoder_multiply_adds
from jumbo_core.models import AdventurerViT
from tests.cases.test_case_20_dead_parameters import randomised, without_gradient
from tests.conftest import max_error

SMALL = dict(d_state=8, head_dim=8)
NAMES = ["test_adventurer", "test_jumbo_adventurer"]


def encoder(**options) -> AdventurerEncoder:
    return randomised(AdventurerEncoder(16, options.pop("depth", 3), **{**SMALL, **options})).eval()


def by_hand(net: AdventurerEncoder, patches: torch.Tensor) -> list[torch.Tensor]:
    """Every block as METHODS.md words it, tokens always in their natural order."""
    h, outputs = torch.cat([patches, net.global_token(patches)], dim=1), []
    n, j = patches.shape[1], net.multiplier
    for i, block in enumerate(net.blocks):
        u = block.norm(h)
        p, g = u[:, :n], u[:, n:]
        p = p.flip(1) if i in net.flipped else p
        y = block.mixer(torch.cat([u.mean(1, keepdim=True), p, g], dim=1))[:, 1:]
        p, g = y[:, :n], y[:, n:]
        h = h + torch.cat([p.flip(1) if i in net.flipped else p, g], dim=1)
        p, g = h[:, :n], h[:, n:]
        if j:
            wide = g.flatten(1)
            g = (wide + net.ffn_of(i)(block.norm3(wide))).unflatten(1, (j, -1))
        else:
            g = g + block.mlp(block.norm_mlp(g))
        h = torch.cat([p + block.mlp(block.norm_mlp(p)), g], dim=1)
        outputs.append(h)
    return outputs


@pytest.mark.parametrize("flip", ["alternate", (2, 3), (0,), (), (0, 1, 2, 3)])
@pytest.mark.parametrize("multiplier", [0, 2])
@pytest.mark.parametrize("share", [True, False])
def test_equals_the_words(flip, multiplier, share):
    net = encoder(depth=4, flip=flip, multiplier=multiplier, share_jumbo_ffn=share)
    patches = torch.randn(2, 7, 16)
    with torch.no_grad():
        expected = by_hand(net, patches)
        _, collected = net(patches, collect=range(4))
    for i in range(4):
        scale = expected[i].abs().max()
        assert max_error(collected[i] / scale, expected[i] / scale) < 1e-5
    with torch.enable_grad():
        again = net(patches)
    assert max_error(again.patches, net.norm(expected[-1])[:, :7]) < 1e-4
    assert again.jumbo.shape == (2, multiplier or 1, 16)
    with torch.no_grad():
        early = net.intermediates(patches, [2, 0])
    assert torch.equal(early[0].patches, collected[2][:, :7]) and torch.equal(early[1].patches, collected[0][:, :7])


def test_patches_see_the_whole_image():
    """The mixer is causal; flips and the heading average are what lets the first patch know of the last."""
    net = encoder(depth=2)
    patches = torch.randn(1, 6, 16, requires_grad=True)
    net(patches).patches[0, 0].sum().backward()
    assert patches.grad[0].abs().amax(dim=-1).gt(0).all()


def test_collecting_does_not_change_the_result():
    net, patches = encoder(depth=4), torch.randn(2, 5, 16)
    with torch.no_grad():
        tokens, collected = net(patches, collect=[1])
        kept = collected[1].clone()
        assert torch.equal(net.forward_tokens(patches), net.norm(tokens))
        assert torch.equal(collected[1], kept)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pool", ["token", "avg", "jumbo", ""])
def test_no_dead_parameters(name, pool):
    if pool == "jumbo" and name == "test_adventurer":
        with pytest.raises(ValueError, match="'jumbo' needs multiplier > 0"):
            timm.create_model(name, global_pool=pool)
        return
    model = randomised(timm.create_model(name, num_classes=5 if pool else 0, global_pool=pool))
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert without_gradient(model) == []


@pytest.mark.parametrize("options", [{}, {"multiplier": 2, "share_jumbo_ffn": False}, {"multiplier": 2}])
@pytest.mark.parametrize("out_indices", [[0], [-1], [0, 1, 2]])
def test_no_dead_parameters_in_feature_maps(options, out_indices):
    net = timm.create_model("test_adventurer", features_only=True, out_indices=out_indices, depth=3, **options)
    sum(feature.square().sum() for feature in randomised(net)(torch.randn(2, 3, 32, 32))).backward()
    assert without_gradient(net) == []


@pytest.mark.parametrize("name", NAMES)
def test_gradient_checkpointing_gives_the_same_gradients(name):
    model = timm.create_model(name, num_classes=5, init="short").train()
    image, grads = torch.randn(2, 3, 32, 32), []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(image).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    assert all(max_error(a, b) < 1e-5 for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_surface(name):
    model = timm.create_model(name, num_classes=5).eval()
    model.set_input_size((16, 48))
    assert model.patch_embed.grid_size == (2, 6) and model(torch.randn(1, 3, 16, 48)).shape == (1, 5)
    assert model(torch.randn(1, 3, 40, 24)).shape == (1, 5)  # any size, positions by grid
    with pytest.raises(ValueError, match="image width 33 is not a multiple of the patch size 8"):
        model(torch.randn(1, 3, 32, 33))
    tokens = model.forward_features(torch.randn(1, 3, 16, 48))
    assert model.num_prefix_tokens == 0 and tokens.shape[1] == 12 + model.encoder.num_global_tokens
    model.reset_classifier(7)
    assert model(torch.randn(1, 3, 16, 48)).shape == (1, 7)
    assert "encoder.cls_token" in model.no_weight_decay() or "encoder.jumbo_token" in model.no_weight_decay()
    with torch.no_grad():
        keep = torch.tensor([[0, 3, 5]])
        assert model(torch.randn(1, 3, 16, 48), keep=keep).shape == (1, 7)


def test_prefix_tokens_are_in_no_map_and_no_mean():
    model = timm.create_model("test_jumbo_adventurer", num_classes=0, global_pool="avg").eval()
    image = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        before = model(image)
        model.encoder.norm = torch.nn.Identity()
        tokens = model.forward_features(image)
        spoiled = tokens.clone()
        spoiled[:, -2:] = 1e3
        assert torch.equal(model.pool(spoiled), model.pool(tokens))
        assert before.shape == (1, 16)


def test_decay_parameters_are_not_decayed():
    model = timm.create_model("test_jumbo_adventurer", num_classes=5)
    decayed = {id(p) for group in param_groups(model, 1e-3, 0.1) if group["weight_decay"] for p in group["params"]}
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in ("A_log", "dt_bias", "D", "cls_token", "jumbo_token", "pos_embed", "bias"):
            assert id(parameter) not in decayed, name
    assert id(model.blocks[0].mixer.in_proj.weight) in decayed


def test_convolutions_start_as_mamba2_has_them():
    block = AdventurerEncoder(16, 1, **SMALL).blocks[0]
    weight, bias = block.mixer.conv1d.weight, block.mixer.conv1d.bias  # torch's default: uniform up to 1 / sqrt(kernel)
    assert 0.4 < weight.abs().max() <= 0.5 and 0.4 < bias.abs().max() <= 0.5
    assert not block.mlp.fc1_g.bias.any() and block.mixer.in_proj.weight.std() < 0.03


def test_an_empty_batch():
    for name in ("test_adventurer", "test_jumbo_adventurer"):
        model, image = timm.create_model(name, num_classes=5).eval(), torch.zeros(0, 3, 32, 32)
        assert model(image).shape == (0, 5)
        with torch.inference_mode():
            assert model(image).shape == (0, 5)


def test_drop_path_list_is_the_released_one():
    rates = [getattr(b.drop_path, "drop_prob", 0.0) for b in AdventurerEncoder(16, 5, drop_path=0.4, **SMALL).blocks]
    assert rates == pytest.approx([0, 0, 0.1, 0.2, 0.3])


@pytest.mark.parametrize("name", ["tiny", "small", "base", "large"])
def test_parameters(name):
    with torch.device("meta"):
        model = timm.create_model(f"adventurer_{name}_patch16_224")
    expected = {"tiny": "11.61", "small": "44.49", "base": "98.66", "large": "346.20"}
    assert f"{count_parameters(model) / 1e6:.2f}" == expected[name]


@pytest.mark.parametrize("options", [{}, {"multiplier": 2}, {"global_pool": ""}, {"chunk_size": 5}])
@pytest.mark.parametrize("size", [(32, 32), (16, 40)])
def test_multiply_adds_equal_the_counter(options, size):
    options = {"num_classes": 5, **options}
    model = AdventurerViT(32, 8, embed_dim=16, depth=2, d_state=8, head_dim=8, **options).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, *size))
    assert multiply_adds(model, size) == counter.get_total_flops() // 2


def test_cost_per_token_is_that_of_the_paper():
    """METHODS.md: at width 768, 13.7 D^2 multiply-adds in the projections and about 0.3 M in the scan."""
    with torch.device("meta"):
        model = timm.create_model("adventurer_base_patch16_224")
    block, d = model.blocks[0], 768
    mixer = block.mixer
    projections = mixer.in_proj.weight.numel() + mixer.out_proj.weight.numel()
    projections += sum(p.numel() for p in block.mlp.parameters() if p.ndim > 1)
    assert projections / d**2 == pytest.approx(13.7, abs=0.05)
    per_token = (encoder_multiply_adds(model.encoder, 2048) - encoder_multiply_adds(model.encoder, 1024)) / 1024 / 12
    assert per_token - projections == pytest.approx(0.3e6, rel=0.05)


def test_a_large_image_takes_memory_linear_in_its_size():
    model = timm.create_model("test_adventurer", num_classes=3).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, 512, 1024)).isfinite().all()  # 8,192 patches


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: AdventurerEncoder(60, 2), ValueError, r"head_dim 64 does not divide the inner width 120"),
        (lambda: AdventurerEncoder(64, 2, flip=(2, 3)), IndexError, r"flip \(2, 3\) names a block outside of 0..1"),
        (lambda: AdventurerEncoder(64, 2, flip=1), ValueError, "flip must be 'alternate' or .*got 1"),
        (lambda: AdventurerEncoder(64, 2, flip=(1, 1)), ValueError, r"flip \(1, 1\) names a block twice"),
        (lambda: AdventurerEncoder(64, 2, flip="both"), ValueError, "flip must be 'alternate' or"),
        (lambda: AdventurerEncoder(64, 0), ValueError, "depth must be an integer of at least 1, got 0"),
        (lambda: AdventurerEncoder(64, 2, drop_path=[0.1]), ValueError, "drop_path has 1 rates for 2 blocks"),
        (lambda: AdventurerEncoder(64, 2, drop_path=1.0), ValueError, "drop_path must lie in"),
        (lambda: AdventurerEncoder(64, 2)(torch.randn(1, 3, 63)), ValueError, r"expects patches \(B, N, 64\)"),
        (
            lambda: AdventurerEncoder(64, 2)(torch.randn(1, 3, 64), torch.ones(1, 2, dtype=torch.bool)),
            ValueError,
            r"mask must be bool of shape \(B, N\) = \(1, 3\)",
        ),
        (lambda: AdventurerViT(init="long"), ValueError, "init must be 'released' or 'short', got 'long'"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_mixers_sequence_holds_one_more_token():
    lengths = []
    net = encoder(depth=1)
    net.blocks[0].mixer.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    assert isinstance(net.blocks[0].mixer, Mamba2Mixer)
    net(torch.randn(1, 5, 16))
    assert lengths == [7]  # heading, 5 patches, class token
