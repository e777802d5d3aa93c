"""JumboEncoder: shapes, masks, options, the in-place path, errors."""

import numpy as np
import pytest
import torch

from jumbo_core.jumbo import JumboBlock, JumboEncoder, JumboFFN, join_slices, split_slices
from tests.conftest import max_error

OPTIONS = [
    {},
    {"registers": 3},
    {"multiplier": 0, "registers": 16},
    {"share_jumbo_ffn": False},
    {"layer_scale": 1e-4},
    {"drop_path": [0.0, 0.3, 0.1]},
    {"mlp_ratio": 2.0, "jumbo_mlp_ratio": 1.5},
]


def encoder(**options) -> JumboEncoder:
    return JumboEncoder(16, 3, 2, **{"multiplier": 2, **options})


@pytest.mark.parametrize("options", OPTIONS)
def test_shapes(options):
    model = encoder(**options)
    jumbo, patches = model(torch.randn(2, 5, 16))
    assert jumbo.shape == (2, options.get("multiplier", 2) or 1, 16)
    assert patches.shape == (2, 5, 16)


@pytest.mark.parametrize("options", OPTIONS)
def test_in_place_path_equals_concatenating_path(options):
    model = encoder(**options).double().eval()
    patches = torch.randn(2, 5, 16, dtype=torch.double)
    with_grad = model(patches)
    with torch.no_grad():
        without = model(patches)
    assert max_error(with_grad.jumbo, without.jumbo) < 1e-10
    assert max_error(with_grad.patches, without.patches) < 1e-10


def test_no_concatenation_per_layer_when_gradients_are_off():
    """The prefix is put in front once; no block joins or splits the sequence again."""
    model = encoder().eval()
    patches = torch.randn(2, 5, 16)

    def concatenations() -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(patches)
        return sum(event.count for event in profile.key_averages() if event.key == "aten::cat")

    with torch.no_grad():
        assert concatenations() == 1
    assert concatenations() == 1 + model.depth


def test_in_place_updates_never_reach_a_tensor_somebody_holds():
    model = encoder().eval()
    patches = torch.randn(2, 5, 16)
    before = patches.clone()
    held = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: held.append((output, output.clone())))
    with torch.no_grad():
        model(patches)
    assert torch.equal(patches, before)
    assert all(torch.equal(output, copy) for output, copy in held)


@pytest.mark.parametrize("name", ["norm2", "norm3", "mlp"])
@pytest.mark.parametrize("halves", [False, True])
def test_what_a_hook_was_given_is_never_overwritten(name, halves):
    model = encoder().eval()
    block, ffn, x, held = model.blocks[0], model.jumbo_mlp, torch.randn(2, 7, 16), []
    if name == "mlp":
        block.norm2 = torch.nn.Identity()  # else its input is the norm's own result
    with torch.no_grad():
        expected = block(x, ffn)
        getattr(block, name).register_forward_pre_hook(lambda module, inputs: held.append((*inputs, inputs[0].clone())))
        y = block.feed(block.attend(x), ffn) if halves else block(x, ffn)
    assert max_error(y, expected) < 1e-6 and len(held) == 1
    assert torch.equal(*held[0])


@pytest.mark.parametrize("name", ["attend", "feed"])
@pytest.mark.parametrize("subclass", [True, False])
def test_a_replaced_half_is_called_with_and_without_gradients(name, subclass):
    half = getattr(JumboBlock, name)
    own = type("Own", (JumboBlock,), {name: lambda self, *inputs: half(self, *inputs) * 2})
    block = (own if subclass else JumboBlock)(16, 2, multiplier=2).eval()
    if not subclass:
        setattr(block, name, lambda *inputs: half(block, *inputs) * 2)
    ffn, x = JumboFFN(16, 2).eval(), torch.randn(2, 7, 16)
    expected = block(x, ffn)
    with torch.no_grad():
        assert max_error(block(x, ffn), expected) < 1e-5


def test_mask_hides_padding():
    model = encoder(registers=2).eval()
    short, padding = torch.randn(1, 4, 16), torch.full((1, 3, 16), 1e4)
    alone = model(short)
    mask = torch.tensor([[True] * 4 + [False] * 3])
    padded = model(torch.cat([short, padding], dim=1), mask)
    assert max_error(alone.jumbo, padded.jumbo) < 1e-6
    assert max_error(alone.patches, padded.patches[:, :4]) < 1e-6


def test_token_dropping_is_indexing_patches():
    """Without positions the encoder is permutation-equivariant, so any subset may be encoded alone."""
    model = encoder().eval()
    patches = torch.randn(2, 6, 16)
    order = torch.tensor([4, 1, 5])
    kept = model(patches[:, order])
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[:, order] = True
    assert max_error(kept.jumbo, model(patches, mask).jumbo) < 1e-5


def test_intermediates():
    model = encoder().eval()
    patches = torch.randn(2, 5, 16)
    last, first = model.intermediates(patches, [-1, 0], norm=True)
    final = model(patches)
    assert torch.equal(last.patches, final.patches) and torch.equal(last.jumbo, final.jumbo)
    assert max_error(first.patches, final.patches) > 1e-3
    with pytest.raises(IndexError, match=r"block index 3 is outside of a model with 3 blocks"):
        model.intermediates(patches, [3])
    with pytest.raises(ValueError, match="indices must name at least one block"):
        model.intermediates(patches, [])


def test_shared_ffn_is_one_module_with_one_name():
    shared, unshared = encoder(), encoder(share_jumbo_ffn=False)
    names = [name for name, _ in shared.named_parameters() if "jumbo_mlp" in name]
    assert names == [f"jumbo_mlp.{layer}.{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias")]
    assert len([name for name, _ in unshared.named_parameters() if "jumbo_mlp" in name]) == 3 * 4


def test_drop_path_is_constant_or_per_block():
    rates = [block.drop_path.drop_prob for block in encoder(drop_path=0.1).blocks]
    assert rates == [0.1, 0.1, 0.1]
    ramp = encoder(drop_path=[0.0, 0.1, 0.2]).blocks
    assert isinstance(ramp[0].drop_path, torch.nn.Identity)
    assert [block.drop_path.drop_prob for block in ramp[1:]] == [0.1, 0.2]


def test_released_initialisation():
    model = JumboEncoder(64, 2, 2, multiplier=4)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            assert 0.005 < parameter.std().item() < 0.03, name
        elif name.endswith("bias"):
            assert not parameter.any(), name


def test_split_and_join():
    wide = torch.randn(2, 12)
    assert split_slices(wide, 3).shape == (2, 3, 4)
    assert torch.equal(join_slices(split_slices(wide, 3)), wide)
    with pytest.raises(ValueError, match=r"J=5, got \(2, 12\)"):
        split_slices(wide, 5)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((16, 3, 3), {}, "dim 16 is not divisible by num_heads 3"),
        ((16, 0, 2), {}, "depth must be an integer of at least 1, got 0"),
        ((16, 3, 2), {"multiplier": -1}, "multiplier must be an integer of at least 0, got -1"),
        ((16, 3, 2), {"multiplier": 1.5}, "multiplier must be an integer of at least 0, got 1.5"),
        ((16, 3, 2), {"drop_path": [0.1]}, "drop_path has 1 rates for 3 blocks"),
        ((16, 3, 2), {"drop_path": 1.0}, r"drop_path must lie in \[0, 1\), got 1.0"),
        ((16, 3, 2), {"layer_scale": float("nan")}, "layer_scale must be a finite number above 0, got nan"),
        ((16, 3, 2), {"norm_eps": -1}, "norm_eps must be a finite number above 0, got -1"),
        ((16, 3, 2), {"mlp_ratio": 0}, "mlp_ratio must be a finite number above 0, got 0"),
        ((16, 3, 2), {"jumbo_mlp_ratio": 0}, "jumbo_mlp_ratio must be a finite number above 0, got 0"),
        ((16, 3, 2), {"share_jumbo_ffn": "no"}, "share_jumbo_ffn must be True or False, got 'no'"),
        ((16, 3, 2), {"attn_drop": 1.5}, r"attn_drop must lie in \[0, 1\), got 1.5"),
        ((True, 3, 2), {}, "dim must be an integer of at least 1, got True"),
        ((16, 3, 2), {"drop_path": float("nan")}, r"drop_path must lie in \[0, 1\), got nan"),
    ],
)
def test_bad_options(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        JumboEncoder(*arguments, **options)


def test_bad_inputs():
    model = encoder()
    with pytest.raises(ValueError, match=r"patches \(B, N, 16\), got \(2, 5, 15\)"):
        model(torch.randn(2, 5, 15))
    with pytest.raises(ValueError, match=r"mask must be bool of shape \(B, N\) = \(2, 5\).*got torch.float32 \(2, 5\)"):
        model(torch.randn(2, 5, 16), torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"got torch.bool \(2, 4\)"):
        model(torch.randn(2, 5, 16), torch.ones(2, 4, dtype=torch.bool))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 1e-3)])
def test_half_precision_is_close(dtype, tolerance):
    """Root mean square error: storing a 3.0 in fp16 alone costs up to 1e-3."""
    model = encoder().eval()
    patches = torch.randn(2, 5, 16)
    with torch.no_grad():
        reference = torch.cat(model(patches), dim=1)
        half = torch.cat(model.to(dtype)(patches.to(dtype)), dim=1)
    assert half.dtype == dtype
    assert (half.float() - reference).square().mean().sqrt() < tolerance


def test_gradcheck():
    model = JumboEncoder(4, 2, 1, multiplier=2, drop_path=0.0).double()
    patches = torch.randn(1, 3, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: tuple(model(x)), patches)


def test_numpy_numbers_are_numbers():
    model = JumboEncoder(np.int64(16), np.int32(3), np.int64(2), multiplier=np.int64(2), drop_path=np.float32(0.1))
    assert model(torch.randn(1, 4, 16)).jumbo.shape == (1, 2, 16)


def test_freezing_what_a_head_cannot_reach_is_undone():
    for options in ({}, {"share_jumbo_ffn": False, "layer_scale": 0.1}):
        model = encoder(**options)
        model.blocks[0].norm1.weight.requires_grad_(False)  # the user's own choice
        before = {name: p.requires_grad for name, p in model.named_parameters()}
        for reads in ("patches", "global"):
            model.freeze_unreachable(reads)
            assert {name: p.requires_grad for name, p in model.named_parameters()} != before
        model.freeze_unreachable("all")
        assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    with pytest.raises(ValueError, match="reads must be"):
        encoder().freeze_unreachable("slices")


def test_collect_gives_raw_block_outputs():
    model = encoder(registers=1).eval()
    patches = torch.randn(2, 5, 16)
    tokens, collected = model(patches, collect={1}, stop=2)
    assert list(collected) == [1] and torch.equal(tokens, collected[1])
    embedded, none = model(patches, collect=(), stop=0)
    assert none == {} and torch.equal(embedded, model.add_prefix(patches))
