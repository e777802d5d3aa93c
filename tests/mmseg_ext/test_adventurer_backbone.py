"""The linear-time backbone: what it shares with JumboViT, its token order, its groups, its flip rule."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

pytest.importorskip("mmseg", reason="needs the extra mmseg-lite")

import torch.distributed as dist
from mmengine.optim import build_optim_wrapper
from mmengine.runner.checkpoint import get_state_dict, load_state_dict
from mmseg.registry import MODELS

from jumbo_core.linear.mamba2 import GatedRMSNorm
from mmseg_ext import AdventurerViT, JumboViT
from tests.conftest import max_error
from tests.mmseg_ext.adventurers import JUMBO, TINY, core, randomised, tiny
from tests.mmseg_ext.helpers import trainable_without_gradient

# --- shapes and options ---


@pytest.mark.parametrize("options", [{}, JUMBO])
def test_maps_come_in_the_order_asked_with_negatives(options):
    images = torch.randn(2, 3, 32, 48)
    forward = tiny(out_indices=(0, 1, 2), **options).eval()
    backward = tiny(out_indices=[-1, 0, 0], **options).eval()
    backward.load_state_dict(forward.state_dict())
    first, second, third = forward(images)
    assert all(y.shape == (2, 16, 4, 6) and y.is_contiguous() for y in (first, second, third))
    last, again, twice = backward(images)
    assert torch.equal(last, third) and torch.equal(again, first) and torch.equal(twice, first)


@pytest.mark.parametrize("arch", ["tiny", "small", "base", "large", "jumbo_tiny", "jumbo_small", "jumbo_base"])
def test_arch_has_the_sizes_of_the_timm_model(arch):
    name = f"{'jumbo_' if 'jumbo' in arch else ''}adventurer_{arch.removeprefix('jumbo_')}_patch16_224"
    with torch.device("meta"):
        ours = MODELS.build(dict(type="mmseg.AdventurerViT", arch=arch, final_norm=True))
        theirs = timm.create_model(name, num_classes=0)
    shapes = {name: p.shape for name, p in theirs.named_parameters()}
    assert {name.removeprefix("vit."): p.shape for name, p in ours.named_parameters()} == shapes


def test_single_sizes_override_arch():
    encoder = AdventurerViT(arch="jumbo_tiny", num_layers=2, multiplier=1, img_size=32).vit.encoder
    assert (encoder.dim, encoder.depth, encoder.multiplier) == (256, 2, 1)
    assert AdventurerViT(num_layers=1, img_size=32, embed_dims=128).embed_dims == 128


@pytest.mark.parametrize("options", [{}, JUMBO])
def test_global_tokens_stand_last_and_are_never_in_a_map(options):
    backbone = tiny(**options).eval()
    images = torch.randn(1, 3, 32, 32)
    before = backbone(images)[0]

    def spoil(module, inputs, output):
        output[:, 16:] = 1e3  # behind the 16 patches
        return output

    backbone.vit.blocks[-1].register_forward_hook(spoil)
    assert torch.equal(backbone(images)[0], before)


def test_maps_are_the_cores():
    backbone, model = tiny(out_indices=(1, 2)).eval(), core(num_classes=0).eval()
    model.load_state_dict(backbone.vit.state_dict(), strict=False)
    images = torch.randn(2, 3, 32, 24)
    for ours, theirs in zip(
        backbone(images), model.forward_intermediates(images, [1, 2], intermediates_only=True), strict=True
    ):
        assert max_error(ours, theirs) < 1e-6


def test_blocks_after_the_last_wanted_one_are_left_out_and_change_nothing_before_them():
    full = tiny(out_indices=(0, 2), drop_path_rate=0.4, flip=(1, 2))
    cut = tiny(out_indices=(0, 1), drop_path_rate=0.4, flip=(1, 2))
    assert len(cut.vit.blocks) == 2
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for block in full.vit.blocks]
    assert rates == pytest.approx([0.0, 0.0, 0.2])  # [0] + linspace(0, 0.4, 3), the last entry unused
    assert [getattr(block.drop_path, "drop_prob", 0.0) for block in cut.vit.blocks] == rates[:2]
    cut.load_state_dict(full.state_dict(), strict=False)
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(cut.eval()(images)[0], full.eval()(images)[0])
    unshared = tiny(out_indices=-2, share_jumbo_ffn=False, **JUMBO)
    assert len(unshared.vit.encoder.jumbo_mlp) == 2


def test_final_norm_touches_the_last_map_only():
    images = torch.randn(1, 3, 32, 32)
    plain, normed = tiny(out_indices=(0, 2)).eval(), tiny(out_indices=(0, 2), final_norm=True).eval()
    nn.init.normal_(normed.vit.norm.weight)
    normed.load_state_dict(plain.state_dict(), strict=False)
    (first, last), (same, changed) = plain(images), normed(images)
    assert torch.equal(first, same)
    assert max_error(changed, normed.vit.norm(last.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)) < 1e-6


@pytest.mark.parametrize("final_norm", [True, False])
@pytest.mark.parametrize("options", [{}, JUMBO, dict(JUMBO, share_jumbo_ffn=False), dict(JUMBO, out_indices=0)])
def test_every_trainable_parameter_gets_a_gradient(options, final_norm):
    backbone = tiny(final_norm=final_norm and "out_indices" not in options, **options).train()
    sum(y.square().sum() for y in randomised(backbone)(torch.randn(2, 3, 32, 32))).backward()
    assert trainable_without_gradient(backbone) == []
    assert [n for n, p in backbone.named_parameters() if p.requires_grad and not p.grad.any()] == []


@pytest.mark.parametrize("options", [{}, JUMBO])
def test_checkpointing_gives_the_same_gradients(options):
    plain = tiny(out_indices=(0, 2), **options).train()
    saving = tiny(out_indices=(0, 2), with_cp=True, **options).train()
    saving.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 32, 32)
    for backbone in (plain, saving):
        sum(y.square().mean() for y in backbone(images)).backward()
    assert saving.vit.encoder.gradient_checkpointing and not plain.vit.encoder.gradient_checkpointing
    for (name, a), (_, b) in zip(plain.named_parameters(), saving.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or max_error(a.grad, b.grad) < 1e-5, name


def _trainable(backbone) -> set[str]:
    return {n.removeprefix("vit.") for n, p in backbone.named_parameters() if p.requires_grad}


def test_frozen_stages():
    stem = {"patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed", "encoder.cls_token"}
    everything = _trainable(tiny())
    assert stem <= everything
    assert _trainable(tiny(frozen_stages=0)) == everything - stem
    rest = _trainable(tiny(frozen_stages=2))
    assert rest and all(name.startswith("encoder.blocks.2.") for name in rest)
    assert _trainable(tiny(frozen_stages=3)) == set()
    assert any("jumbo_mlp" in name for name in _trainable(tiny(frozen_stages=2, **JUMBO)))
    assert _trainable(tiny(frozen_stages=3, **JUMBO)) == set()  # the shared FFN goes with the last block
    assert "encoder.jumbo_token" not in _trainable(tiny(frozen_stages=0, **JUMBO))
    still = tiny(frozen_stages=3, drop_path_rate=0.5, drop_rate=0.5).train()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(still(images)[0], still(images)[0])


def test_norm_eval():
    norms = [m for m in tiny(norm_eval=True).train().modules() if isinstance(m, (nn.RMSNorm, GatedRMSNorm))]
    assert len(norms) == 9 and not any(m.training for m in norms)  # three in each block
    assert all(m.training for m in tiny().train().modules())


def test_dropout_only_in_training():
    backbone = tiny(drop_rate=0.5, drop_path_rate=0.5).eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(backbone(images)[0], backbone(images)[0])
    backbone.train()
    assert not torch.equal(backbone(images)[0], backbone(images)[0])


def test_odd_sizes_are_padded_or_refused():
    images = torch.randn(1, 3, 33, 40)
    padded = nn.functional.pad(images, (0, 0, 0, 7))
    backbone = tiny().eval()
    assert backbone(images)[0].shape == (1, 16, 5, 5)
    assert torch.equal(backbone(images)[0], backbone(padded)[0])
    with pytest.raises(ValueError, match=r"33.*8"):
        tiny(dynamic_img_pad=False)(images)


def test_copies_and_pickles():
    backbone = tiny(flip=(0, 2)).eval()
    images = torch.randn(1, 3, 32, 32)
    for twin in (copy.deepcopy(backbone), pickle.loads(pickle.dumps(backbone))):
        assert torch.equal(twin(images)[0], backbone(images)[0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(arch="huge"), ValueError, r"\['base', 'jumbo_base'.*'tiny'\], got 'huge'"),
        (dict(arch="jumbo_large"), ValueError, "jumbo_large"),
        (dict(out_indices=3), IndexError, "3.*3 blocks"),
        (dict(out_indices=()), ValueError, "empty"),
        (dict(frozen_stages=4), ValueError, r"-1\.\.3, got 4"),
        (dict(final_norm=True, out_indices=0), ValueError, "final_norm"),
        (dict(drop_path_rate=[0.1]), ValueError, "1 rates for 3"),
        (dict(head_dim=5), ValueError, r"head_dim 5 does not divide the inner width 32"),
        (dict(flip="never"), ValueError, "'alternate' or a sequence of block indices, got 'never'"),
        (dict(flip=(1, 3)), IndexError, r"flip \(1, 3\) names a block outside of 0..2"),
        (dict(img_size=(32, 32, 3)), ValueError, "img_size"),
        (dict(num_heads=2), TypeError, "num_heads"),
        (dict(registers=2), TypeError, "registers"),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        tiny(**options)


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, dict(JUMBO, share_jumbo_ffn=False), dict(JUMBO, out_indices=(0, 1))])
def test_distributed_training_needs_no_search_for_unused_parameters(options, process_group):
    model = nn.parallel.DistributedDataParallel(tiny(**options))
    for _ in range(2):
        sum(y.square().mean() for y in model(torch.randn(2, 3, 32, 32))).backward()


# --- optimizer groups ---


def test_layer_decay_groups():
    class Segmentor(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.decode_head = tiny(final_norm=True, **JUMBO), nn.Conv2d(16, 3, 1)

    config = dict(
        type="OptimWrapper",
        optimizer=dict(type="AdamW", lr=0.1, weight_decay=0.2),
        constructor="JumboLayerDecayOptimWrapperConstructor",
        paramwise_cfg=dict(layer_decay_rate=0.5, jumbo_lr_scale=0.3),
    )
    model = Segmentor()
    groups = build_optim_wrapper(model, config).optimizer.param_groups
    found = {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    names = {name: found[id(p)] for name, p in model.named_parameters() if p.requires_grad}
    assert len(found) == len(names) == sum(len(g["params"]) for g in groups)
    mixer = "backbone.vit.encoder.blocks.1.mixer."
    expected = {
        "backbone.vit.pos_embed": (0.1 * 0.5**4, 0.0),
        "backbone.vit.encoder.jumbo_token": (0.1 * 0.5**4, 0.0),
        mixer + "in_proj.weight": (0.1 * 0.5**2, 0.2),
        mixer + "conv1d.weight": (0.1 * 0.5**2, 0.2),
        **{mixer + name: (0.1 * 0.5**2, 0.0) for name in ("A_log", "dt_bias", "D", "norm.weight", "conv1d.bias")},
        "backbone.vit.encoder.jumbo_mlp.fc1.weight": (0.1 * 0.3, 0.2),
        "backbone.vit.encoder.norm.weight": (0.1, 0.0),
        "decode_head.weight": (0.1, 0.2),
    }
    for name, rates in expected.items():
        assert names[name] == pytest.approx(rates), name


# --- the flip rule ---


def test_flip_changes_maps_and_travels_in_checkpoints():
    """A test or a resumed run builds the model from its config, where the rule may be another."""
    trained, built = tiny(flip=(0, 2)).eval(), tiny().eval()
    images = torch.randn(1, 3, 32, 32)
    built.vit.load_state_dict(trained.vit.state_dict())
    assert not torch.allclose(built(images)[0], trained(images)[0], atol=1e-4)
    for load in (lambda m, s: m.load_state_dict(s), load_state_dict):  # torch's and the host's
        built = tiny().eval()
        load(built, get_state_dict(trained))
        assert built.vit.encoder.flipped == {0, 2} and built.flipped.tolist() == [True, False, True]
        assert torch.equal(built(images)[0], trained(images)[0])


def test_flip_of_blocks_that_are_left_out_is_kept():
    cut = tiny(flip=(1, 2), out_indices=(0, 1))
    assert cut.flipped.tolist() == [False, True, True] and cut.vit.encoder.flipped <= {1, 2}
    cut.set_flip("alternate")
    assert cut.flipped.tolist() == [False, True, False]
    with pytest.raises(IndexError, match="3"):
        cut.set_flip([3])
    with pytest.raises(ValueError, match="'never'"):
        cut.set_flip("never")


def test_registered_under_its_name():
    assert isinstance(MODELS.build(dict(type="mmseg.AdventurerViT", **TINY)), AdventurerViT)
    assert not issubclass(AdventurerViT, JumboViT)
