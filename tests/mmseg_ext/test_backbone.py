"""The backbone's options, one by one, and the errors for what they refuse."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

pytest.importorskip("mmseg", reason="needs the extra mmseg-lite")

import torch.distributed as dist
from mmseg.registry import MODELS

from tests.conftest import max_error
from tests.mmseg_ext.helpers import TINY, tiny, trainable_without_gradient


def test_maps_come_in_the_order_asked_with_negatives():
    images = torch.randn(2, 3, 32, 48)
    forward = tiny(out_indices=(0, 1, 2)).eval()
    backward = tiny(out_indices=[-1, 0, 0]).eval()
    backward.load_state_dict(forward.state_dict())
    first, second, third = forward(images)
    assert all(y.shape == (2, 16, 4, 6) and y.is_contiguous() for y in (first, second, third))
    last, again, twice = backward(images)
    assert torch.equal(last, third) and torch.equal(again, first) and torch.equal(twice, first)
    assert len(tiny(out_indices=1)(images)) == 1


def test_registered_under_its_name():
    assert isinstance(MODELS.build(dict(type="mmseg.JumboViT", **TINY)), MODELS.get("mmseg.JumboViT"))


@pytest.mark.parametrize("arch", ["pico", "nano", "tiny", "small", "base", "large"])
def test_arch_has_the_sizes_of_the_timm_model(arch):
    with torch.device("meta"):
        ours = MODELS.build(dict(type="mmseg.JumboViT", arch=arch, final_norm=True))
        theirs = timm.create_model(f"jumbo_{arch}_patch16_224", num_classes=0)
    shapes = {name: p.shape for name, p in theirs.named_parameters()}
    assert {name.removeprefix("vit."): p.shape for name, p in ours.named_parameters()} == shapes


def test_single_sizes_override_arch():
    backbone = MODELS.build(dict(type="mmseg.JumboViT", arch="pico", num_layers=2, multiplier=1, img_size=32))
    encoder = backbone.vit.encoder
    assert (encoder.dim, encoder.depth, encoder.num_heads, encoder.multiplier) == (96, 2, 3, 1)


def test_blocks_after_the_last_wanted_one_are_not_built():
    assert len(tiny(out_indices=(0, 1)).vit.blocks) == 2
    assert len(tiny(out_indices=-3, drop_path_rate=[0.1, 0.2, 0.3]).vit.blocks) == 1
    unshared = tiny(out_indices=(0, -2), share_jumbo_ffn=False)
    assert len(unshared.vit.encoder.jumbo_mlp) == 2


def test_final_norm_touches_the_last_map_only():
    images = torch.randn(1, 3, 32, 32)
    plain, normed = tiny(out_indices=(0, 2)).eval(), tiny(out_indices=(0, 2), final_norm=True).eval()
    nn.init.normal_(normed.vit.norm.weight)
    normed.load_state_dict(plain.state_dict(), strict=False)
    first, last = plain(images)
    same, changed = normed(images)
    assert torch.equal(first, same)
    expected = normed.vit.norm(last.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    assert max_error(changed, expected) < 1e-6
    assert not any("norm.weight" in name for name in plain.vit.encoder.norm.state_dict())


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("options", [{}, dict(out_indices=0), dict(multiplier=0, registers=3), dict(layer_scale=0.1)])
@pytest.mark.parametrize("final_norm", [True, False])
def test_every_trainable_parameter_gets_a_gradient(share, options, final_norm):
    final_norm = final_norm and "out_indices" not in options
    backbone = tiny(share_jumbo_ffn=share, final_norm=final_norm, **options).train()
    sum(y.square().sum() for y in backbone(torch.randn(2, 3, 32, 32))).backward()
    assert trainable_without_gradient(backbone) == []
    # nor a gradient that is always zero, as the last block's Jumbo norm would get, which feeds no map
    assert [n for n, p in backbone.named_parameters() if p.requires_grad and not p.grad.any()] == []


def test_checkpointing_gives_the_same_gradients():
    plain = tiny(out_indices=(0, 2)).train()
    saving = tiny(out_indices=(0, 2), with_cp=True).train()
    saving.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 32, 32)
    for backbone in (plain, saving):
        sum(y.square().mean() for y in backbone(images)).backward()
    assert saving.vit.encoder.gradient_checkpointing and not plain.vit.encoder.gradient_checkpointing
    for (name, a), (_, b) in zip(plain.named_parameters(), saving.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or max_error(a.grad, b.grad) < 1e-5, name


def _names(backbone, trainable: bool) -> set[str]:
    return {n.removeprefix("vit.") for n, p in backbone.named_parameters() if p.requires_grad is trainable}


def test_frozen_stages():
    stem = {"patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed", "encoder.jumbo_token"}
    everything = _names(tiny(), True)
    assert stem <= everything
    assert _names(tiny(frozen_stages=0), True) == everything - stem
    for stage in (1, 2):
        frozen = _names(tiny(frozen_stages=stage), False) - _names(tiny(), False) - stem
        assert frozen and all(int(n.split(".")[2]) < stage for n in frozen), frozen  # encoder.blocks.i.…
    assert _names(tiny(frozen_stages=3), True) == set()  # the shared FFN goes with the last block
    assert {n for n in _names(tiny(frozen_stages=2), True) if "jumbo_mlp" in n}
    unshared = _names(tiny(frozen_stages=1, share_jumbo_ffn=False), True)
    assert not any(n.startswith("encoder.jumbo_mlp.0.") for n in unshared)
    assert any(n.startswith("encoder.jumbo_mlp.1.") for n in unshared)
    registers = _names(tiny(frozen_stages=0, multiplier=0, registers=2), False)
    assert {"encoder.cls_token", "encoder.reg_token"} <= registers


def test_frozen_parts_stay_in_eval_mode():
    backbone = tiny(frozen_stages=1, drop_path_rate=0.5, drop_rate=0.5).train()
    assert backbone.training and not backbone.vit.patch_embed.training and not backbone.vit.pos_drop.training
    assert not any(m.training for m in backbone.vit.blocks[0].modules())
    assert all(m.training for m in backbone.vit.blocks[1].modules())
    assert backbone.vit.encoder.jumbo_mlp.training
    still = tiny(frozen_stages=3, drop_path_rate=0.5, drop_rate=0.5).train()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(still(images)[0], still(images)[0])


def test_norm_eval():
    norms = [m for m in tiny(norm_eval=True).train().modules() if isinstance(m, nn.LayerNorm)]
    assert norms and not any(m.training for m in norms)
    assert all(m.training for m in tiny().train().modules())


def test_dropout_only_in_training():
    backbone = tiny(drop_rate=0.5, attn_drop_rate=0.5, drop_path_rate=0.5)
    images = torch.randn(2, 3, 32, 32)
    backbone.eval()
    assert torch.equal(backbone(images)[0], backbone(images)[0])
    backbone.train()
    assert not torch.equal(backbone(images)[0], backbone(images)[0])


def test_odd_sizes_are_padded_or_refused():
    images = torch.randn(1, 3, 33, 40)
    padded = torch.nn.functional.pad(images, (0, 0, 0, 7))
    backbone = tiny().eval()
    assert backbone(images)[0].shape == (1, 16, 5, 5)
    assert torch.equal(backbone(images)[0], backbone(padded)[0])
    with pytest.raises(ValueError, match=r"33.*8"):
        tiny(dynamic_img_pad=False)(images)


def test_positions_follow_the_grid_not_the_count():
    backbone = tiny(img_size=(16, 64)).eval()  # grid (2, 8)
    assert backbone(torch.randn(1, 3, 32, 32))[0].shape == (1, 16, 4, 4)
    nn.init.normal_(backbone.vit.pos_embed)
    wide, square = backbone(torch.zeros(1, 3, 16, 64))[0], backbone(torch.zeros(1, 3, 32, 32))[0]
    assert not torch.allclose(wide.flatten(2), square.flatten(2))


def test_prefix_tokens_are_never_in_a_map():
    backbone = tiny(registers=4, out_indices=-1).eval()
    images = torch.randn(1, 3, 32, 32)
    before = backbone(images)[0]

    def spoil(module, inputs, output):
        output[:, : backbone.vit.num_prefix_tokens] = 1e3
        return output

    backbone.vit.blocks[-1].register_forward_hook(spoil)
    assert torch.equal(backbone(images)[0], before)


def test_copies_and_pickles():
    backbone = tiny().eval()
    images = torch.randn(1, 3, 32, 32)
    for twin in (copy.deepcopy(backbone), pickle.loads(pickle.dumps(backbone))):
        assert torch.equal(twin(images)[0], backbone(images)[0])


def test_golden_maps(golden):
    args = golden.arguments
    sizes = dict(embed_dims=args["embed_dim"], num_layers=args["depth"])
    sizes.update({k: args[k] for k in ("num_heads", "multiplier", "img_size", "patch_size")})
    for final_norm, expected in ((False, golden.blocks[-1]), (True, golden["features"])):
        backbone = tiny(**sizes, final_norm=final_norm, init_cfg=dict(type="Pretrained", checkpoint=str(golden.path)))
        backbone.init_weights()
        (y,) = backbone.eval()(golden["input"])
        assert max_error(y.flatten(2).transpose(1, 2), expected[:, args["multiplier"] :]) < 1e-5
    backbone = tiny(**sizes, out_indices=tuple(range(args["depth"])))
    backbone.init_cfg = dict(type="Pretrained", checkpoint=str(golden.path))
    backbone.init_weights()
    for y, expected in zip(backbone.eval()(golden["input"]), golden.blocks, strict=True):
        assert max_error(y.flatten(2).transpose(1, 2), expected[:, args["multiplier"] :]) < 1e-5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(arch="huge"), ValueError, "huge"),
        (dict(out_indices=()), ValueError, "empty"),
        (dict(out_indices=3), IndexError, "3.*3 blocks"),
        (dict(out_indices=(0, -4)), IndexError, "-4"),
        (dict(out_indices=1.0), TypeError, "1.0"),
        (dict(out_indices="12"), TypeError, "12"),
        (dict(out_indices=[True]), TypeError, "True"),
        (dict(frozen_stages=4), ValueError, "4"),
        (dict(frozen_stages=-2), ValueError, "-2"),
        (dict(frozen_stages=1.5), ValueError, "1.5"),
        (dict(final_norm=True, out_indices=0), ValueError, "final_norm"),
        (dict(drop_path_rate=[0.1]), ValueError, "1 rates for 3"),
        (dict(drop_path_rate=1.5), ValueError, "1.5"),
        (dict(num_heads=3), ValueError, "16.*3"),
        (dict(init="jax"), ValueError, "jax"),
        (dict(img_size=(32, 32, 3)), ValueError, "img_size"),
        (dict(with_cls_token=True), TypeError, "with_cls_token"),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        tiny(**options)


def test_wrong_input():
    with pytest.raises(ValueError, match=r"\(B, 3, H, W\)"):
        tiny()(torch.randn(1, 4, 32, 32))


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [dict(share_jumbo_ffn=False), dict(out_indices=(0, 1)), dict(frozen_stages=1)])
def test_distributed_training_needs_no_search_for_unused_parameters(options, process_group):
    """DDP refuses the second step when the first left a parameter without gradient, on one process as on many."""
    model = nn.parallel.DistributedDataParallel(tiny(**options))
    for _ in range(2):
        sum(y.square().mean() for y in model(torch.randn(2, 3, 32, 32))).backward()
