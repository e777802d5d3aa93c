"""Fusion in AdventurerViT and Jumbo-linear: scan order, flips, global tokens that stand last, dense maps, compute."""

import copy
import pickle

import pytest
import torch

from jumbo_core.linear import AdventurerEncoder
from jumbo_core.measure import encoder_multiply_adds
from jumbo_core.measure.flops import mixer_multiply_adds
from jumbo_core.models import AdventurerViT
from jumbo_core.tofu import FusionPlan, apply_tofu, fuse, linearity_profile, match, unmerge
from tests.conftest import max_error

PLAN = FusionPlan(("prune", "average", "mlerp", "mlerp"), (3, 2, 0, 4))
KINDS = [
    {},
    {"flip": (2, 3)},
    {"flip": ()},
    {"multiplier": 3},
    {"multiplier": 3, "share_jumbo_ffn": False, "flip": (0, 3)},
    {"global_pool": "avg"},
]


def make(**options):
    size = {"num_classes": 5, "embed_dim": 32, "depth": 4, "d_state": 8, "head_dim": 8, "init": "short"}
    model = AdventurerViT(32, 8, **{**size, **options}).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "conv1d" not in name:
                parameter.normal_(std=0.2)
    return model


@pytest.fixture
def image():
    return torch.randn(2, 3, 32, 32)


def by_hand(model, image, plan):
    """Tokens before the final norm and where the originals are, with patches in reading order throughout."""
    encoder, patches = model.encoder, model.embed(image)[0]
    slices = encoder.global_token(patches)
    count, sizes, place = slices.shape[1], None, None
    for i, block in enumerate(encoder.blocks):

        def turn(x, i=i):
            return x.flip(1) if i in encoder.flipped else x

        u = block.norm(torch.cat([turn(patches), slices], dim=1))
        mixed = block.mixer(torch.cat([u.mean(1, keepdim=True), u], dim=1))[:, 1:]
        n = patches.shape[1]
        keys = block.mixer.in_proj(torch.cat([u[:, n:], turn(u[:, :n])], dim=1))
        keys = keys[..., 2 * block.mixer.inner : 2 * block.mixer.inner + block.mixer.d_state]
        x = torch.cat([slices + mixed[:, n:], patches + turn(mixed[:, :n])], dim=1)
        matching = match(keys, plan.counts[i], protected=count)
        x, sizes = fuse(x, matching, plan.ops[i], sizes=sizes)
        place = matching.place if place is None else matching.place.gather(1, place)
        slices, patches = x[:, :count], x[:, count:]
        patches = patches + block.mlp(block.norm_mlp(patches))
        if encoder.multiplier:
            wide = slices.flatten(1)
            slices = slices + encoder.ffn_of(i)(block.norm3(wide)).unflatten(1, (count, -1))
        else:
            slices = slices + block.mlp(block.norm_mlp(slices))
    return slices, patches, place


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_against_blocks_written_out(options, grad, image):
    model = make(**options)
    with torch.set_grad_enabled(grad):
        slices, patches, place = by_hand(model, image, PLAN)
        handle = apply_tofu(model, PLAN)
        tokens = model.forward_features(image)
    count = slices.shape[1]
    expected = model.norm(torch.cat([patches, slices], dim=1))
    assert tokens.shape == (2, 7 + count, 32) and max_error(tokens, expected) < 1e-5
    assert model(image).shape == (2, 5)
    # The handle speaks of the model's own order: patches, then global tokens.
    expected = torch.cat([place[:, count:] - count, 7 + torch.arange(count).expand(2, -1)], dim=1)
    assert torch.equal(handle.place(), expected)
    sources = handle.sources()
    assert torch.equal(sources[:, 7:, 16:], torch.eye(count, dtype=torch.bool).expand(2, -1, -1))
    assert not sources[:, :7, 16:].any() and not sources[:, 7:, :16].any()
    assert handle.sizes()[:, 7:].eq(1).all() and handle.sizes()[:, :7].max() > 1


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_nothing_to_do_and_removal_are_exact(options, image):
    model = make(**options)
    with torch.no_grad():
        plain, maps = model(image), model.forward_intermediates(image, intermediates_only=True)
        handle = apply_tofu(model, FusionPlan.paper(4, 0))
        assert torch.equal(model(image), plain)
        assert handle.place().tolist() == [list(range(16 + model.encoder.num_global_tokens))] * 2
        handle.remove()
        handle = apply_tofu(model, PLAN)
        fused = model(image)
        assert not torch.equal(fused, plain) and torch.equal(model(image), fused)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(image), fused)
        handle.remove()
        assert torch.equal(model(image), plain)
        again = model.forward_intermediates(image, intermediates_only=True)
        assert all(torch.equal(*pair) for pair in zip(again, maps, strict=True))


def test_patches_that_stay_keep_their_order(image):
    """With pruning alone, each kept patch of the output is one of the image, and positions rise."""
    model = make()
    handle = apply_tofu(model, FusionPlan.uniform(4, 2, "prune"))
    model(image)
    origin = handle._run.last.origin  # of each kept token one original, class token first as fusion has it
    assert (origin[:, 1:].diff(dim=1) > 0).all() and origin.shape == (2, 1 + 8)
    with pytest.raises(ValueError, match=r"order='released' would change the order in which this model scans patches"):
        apply_tofu(make(), FusionPlan.uniform(4, 2, "prune"), order="released")
    kept = []
    for block in model.blocks:  # each block sees its patches in scan order: B of the same patch, forwards or reversed
        block.mixer.in_proj.register_forward_hook(lambda _, args, __: kept.append(args[0].shape[1]))
    model(image)
    assert kept == [1 + 16 + 1, 1 + 14 + 1, 1 + 12 + 1, 1 + 10 + 1]


@pytest.mark.parametrize("options", KINDS[:5], ids=str)
def test_maps_hold_every_position(options, image):
    model = make(**options)
    plain = model.forward_intermediates(image, intermediates_only=True)
    handle = apply_tofu(model, FusionPlan(PLAN.ops, (0, 3, 0, 4)))
    final, maps = model.forward_intermediates(image)
    count = model.encoder.num_global_tokens
    assert [m.shape for m in maps] == [(2, 32, 4, 4)] * 4 and final.shape == (2, 16 + count, 32)
    assert torch.equal(maps[0], plain[0])  # up to the first block that fuses, bit by bit
    tokens = model.forward_features(image)
    assert max_error(final, unmerge(tokens, handle.place())) < 1e-6
    assert max_error(model.norm(maps[3].flatten(2).transpose(1, 2)), final[:, :16]) < 1e-6
    some = model.forward_intermediates(image, indices=[1, 2], return_prefix_tokens=True, intermediates_only=True)
    assert [(m.shape, p.shape) for m, p in some] == [((2, 32, 4, 4), (2, count, 32))] * 2
    assert torch.equal(some[0][0], maps[1])


def test_encoder_alone():
    encoder = AdventurerEncoder(16, 3, d_state=8, head_dim=8, multiplier=2).eval()
    patches, mask = torch.randn(2, 9, 16), torch.ones(2, 9, dtype=torch.bool)
    plain = encoder(patches)
    handle = apply_tofu(encoder, FusionPlan(("prune", "average", "mlerp"), (2, 1, 2)))
    out = encoder(patches)
    assert out.jumbo.shape == (2, 2, 16) and out.patches.shape == (2, 4, 16)
    assert [m.patches.shape for m in encoder.intermediates(patches, [0, 2])] == [(2, 9, 16)] * 2
    with pytest.raises(ValueError, match="a fused model takes no padding mask"):
        encoder(patches, mask)
    handle.remove()
    assert torch.equal(encoder(patches).patches, plain.patches)
    assert encoder(patches, mask).patches.shape == (2, 9, 16)


@pytest.mark.parametrize("options", [{}, {"multiplier": 3}], ids=str)
def test_training_and_checkpointing(options, image):
    model = make(**options)
    handle = apply_tofu(model, PLAN)
    model.train()
    model(image).square().sum().backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert all(n in plain for n, p in model.named_parameters() if p.requires_grad)
    model.zero_grad()
    model.set_grad_checkpointing(True)
    model(image).square().sum().backward()
    for name, parameter in model.named_parameters():
        if name in plain:
            assert max_error(plain[name], parameter.grad) < 1e-5 * max(1, plain[name].abs().max().item()), name
    handle.remove()


@pytest.mark.parametrize("options", [{}, {"multiplier": 3}, {"flip": (0, 2)}], ids=str)
def test_profile_sees_patches_alone(options, image):
    model = make(**options)
    inputs = []
    hook = model.blocks[0].norm_mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    profile = linearity_profile(model, [torch.randn(3, 3, 32, 32)] * 2)
    hook.remove()
    assert profile.num_patches == 16 and len(profile.linearity) == 4
    assert inputs[0].shape[1] == (17 if "multiplier" not in options else 16)
    with torch.no_grad():
        plan = FusionPlan.from_profile(profile, 0.4)
        assert apply_tofu(model, plan).report().saved > 0.1
        assert model(image).isfinite().all()


@pytest.mark.parametrize("options", [{}, {"multiplier": 3}], ids=str)
def test_multiply_adds(options):
    model = make(**options)
    report = apply_tofu(model, PLAN).report()
    assert report.tokens == [13, 11, 11, 7]
    assert report.unfused == encoder_multiply_adds(model.encoder, 16)
    count, mixer = model.encoder.num_global_tokens, model.blocks[0].mixer
    mixers = sum(
        mixer_multiply_adds(mixer, 16 + count + 1) - mixer_multiply_adds(mixer, n + count + 1) for n in (13, 11, 11)
    )
    mlps = 3 * 32 * 80 * (3 + 5 + 5 + 9)
    matching = 8 * (8 * 8 + 6 * 7 + 5 * 6)
    assert report.unfused - report.multiply_adds == mixers + mlps - matching


def test_flips_may_change_afterwards(image):
    model = make()
    apply_tofu(model, PLAN)
    model.set_flip((1, 2))
    other = make(flip=(1, 2))
    other.load_state_dict(model.state_dict())
    apply_tofu(other, PLAN)
    assert torch.equal(model(image), other(image))


@pytest.mark.parametrize("options", [{"proportional": True}, {"importance": "attention"}, {"weights": "importance"}])
def test_there_is_no_attention(options):
    model = make()
    with pytest.raises(ValueError, match="are about attention, and a linear-time mixer"):
        apply_tofu(model, PLAN, **options)
    assert "forward" not in model.blocks[0].__dict__


def test_export_and_compile(image):
    model = make(depth=2)
    apply_tofu(model, FusionPlan(("prune", "mlerp"), (3, 4)))
    with torch.no_grad():
        expected = model(image)
        exported = torch.export.export(model, (image,)).module()
        assert max_error(exported(image), expected) < 1e-5
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert max_error(compiled(image), expected) < 1e-5
