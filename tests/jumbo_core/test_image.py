"""JumboViT: timm's surface, sizes, dropping, initialisations, errors."""

import copy
import pickle

import numpy as np
import pytest
import timm
import torch

import jumbo_core
from jumbo_core.jumbo import linear_drop_rate
from jumbo_core.models import JumboViT
from tests.conftest import max_error

NAMES = [*(f"jumbo_{s}_patch16_224" for s in ("pico", "nano", "tiny", "small", "base", "large")), "test_jumbo"]


def tiny(**options) -> JumboViT:
    """The registered test model with a head that is not zero."""
    model = timm.create_model("test_jumbo", **{"num_classes": 5, "init": "short", **options})
    return model.eval()


def test_registered_with_timm():
    assert set(NAMES) <= set(timm.list_models("*jumbo*"))
    assert isinstance(tiny(), JumboViT)
    assert jumbo_core.models.JumboViT is JumboViT


@pytest.mark.parametrize("name", NAMES[:-1])
def test_every_size_is_built_with_a_class_count(name):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=7)
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 7)


@pytest.mark.parametrize("size", [(32, 32), (16, 64), (40, 24), (8, 8)])
def test_any_size_that_divides(size):
    model = tiny(drop_path_rate=0.0)
    image = torch.randn(2, 3, *size)
    assert model(image).shape == (2, 5)
    (feature_map,) = model.forward_intermediates(image, indices=1, intermediates_only=True)
    assert feature_map.shape == (2, 16, size[0] // 8, size[1] // 8)


def test_rectangular_patches():
    model = tiny(img_size=(32, 64), patch_size=(8, 16))
    assert model.pos_embed.shape == (1, 16, 16)
    assert model(torch.randn(1, 3, 16, 32)).shape == (1, 5)


def test_size_that_does_not_divide():
    with pytest.raises(ValueError, match="image width 35 is not a multiple of the patch size 8"):
        tiny()(torch.randn(1, 3, 32, 35))
    with pytest.raises(ValueError, match="image height 30 is not a multiple of the patch size 8"):
        tiny(img_size=(30, 32))
    with pytest.raises(ValueError, match="image height 33 is not a multiple"):
        tiny().set_input_size(33)
    padding = tiny(dynamic_img_pad=True)
    image = torch.randn(1, 3, 32, 35)
    padded = torch.nn.functional.pad(image, (0, 5))
    assert torch.equal(padding(image), padding(padded))


def test_fixed_size_model_refuses_others():
    model = tiny(dynamic_img_size=False)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5)
    with pytest.raises(ValueError, match="image is 32x64, the model is for 32x32"):
        model(torch.randn(1, 3, 32, 64))


def test_wrong_input_shape():
    for shape in [(3, 32, 32), (1, 4, 32, 32)]:
        with pytest.raises(ValueError, match=r"images \(B, 3, H, W\)"):
            tiny()(torch.randn(*shape))


def test_forward_is_features_then_head():
    model, image = tiny(), torch.randn(2, 3, 32, 32)
    features = model.forward_features(image)
    assert features.shape == (2, model.num_prefix_tokens + 16, 16)
    assert torch.equal(model.forward_head(features), model(image))
    pooled = model.forward_head(features, pre_logits=True)
    assert pooled.shape == (2, model.head_hidden_size) == (2, 48)
    assert torch.equal(model.head(pooled), model(image))


@pytest.mark.parametrize(("pool", "width"), [("jumbo", 48), ("token", 32), ("avg", 16)])
def test_pools(pool, width):
    model = tiny(global_pool=pool)
    assert model.head_hidden_size == width == model.head.in_features
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5)


def test_registers_baseline_reads_the_class_token():
    model = tiny(multiplier=0, registers=16)
    assert (model.num_prefix_tokens, model.global_pool, model.head.in_features) == (17, "token", 16)
    names = {name for name, _ in model.named_parameters()}
    assert {"encoder.cls_token", "encoder.reg_token"} <= names
    assert not [name for name in names if "jumbo" in name or "norm3" in name]


def test_reset_classifier():
    model, image = tiny(), torch.randn(1, 3, 32, 32)
    assert model.get_classifier() is model.head
    model.reset_classifier(9)
    assert model(image).shape == (1, 9) and model.num_classes == 9
    model.reset_classifier(0)
    assert model(image).shape == (1, 48)
    model.reset_classifier(0, "")
    assert model(image).shape == (1, 18, 16)
    model.reset_classifier(3, "token")
    assert model(image).shape == (1, 3)
    with pytest.raises(ValueError, match=r"global_pool must be one of .*got 'map'"):
        model.reset_classifier(3, "map")
    with pytest.raises(ValueError, match="num_classes must be an integer of at least 0, got -1"):
        model.reset_classifier(-1)
    with pytest.raises(ValueError, match="'jumbo' needs multiplier > 0"):
        tiny(multiplier=0, global_pool="jumbo")


def test_forward_intermediates():
    model, image = tiny(depth=4), torch.randn(2, 3, 32, 16)
    final, maps = model.forward_intermediates(image)
    assert torch.equal(final, model.forward_features(image))
    assert [tuple(m.shape) for m in maps] == [(2, 16, 4, 2)] * 4
    last_two = model.forward_intermediates(image, indices=2, intermediates_only=True)
    assert torch.equal(last_two[1], maps[3])
    picked = model.forward_intermediates(image, indices=[0, -1], intermediates_only=True, norm=True, output_fmt="NLC")
    assert torch.equal(picked[1], final[:, model.num_prefix_tokens :])
    (pair,) = model.forward_intermediates(image, indices=[3], return_prefix_tokens=True, intermediates_only=True)
    assert pair[1].shape == (2, 2, 16)
    early, _ = model.forward_intermediates(image, indices=[0], stop_early=True)
    assert max_error(early, final) > 1e-3
    with pytest.raises(ValueError, match="output_fmt must be 'NCHW' or 'NLC', got 'NHWC'"):
        model.forward_intermediates(image, output_fmt="NHWC")


def test_features_only():
    net = timm.create_model("test_jumbo", features_only=True, out_indices=[0, -1], depth=4).eval()
    assert net.feature_info.channels() == [16, 16]
    assert net.feature_info.reduction() == [8, 8]
    assert [tuple(f.shape) for f in net(torch.randn(1, 3, 64, 32))] == [(1, 16, 8, 4)] * 2


def test_features_only_cuts_unused_blocks():
    net = timm.create_model("test_jumbo", features_only=True, out_indices=[1], depth=4, share_jumbo_ffn=False)
    assert len(net.model.blocks) == len(net.model.encoder.jumbo_mlp) == 2


def test_set_input_size():
    model = tiny()
    model.set_input_size((64, 32))
    assert model.patch_embed.grid_size == (8, 4) and model.pos_embed.shape == (1, 32, 16)
    model.set_input_size(patch_size=16)
    assert model.patch_embed.grid_size == (4, 2)
    assert model.feature_info[0]["reduction"] == 16
    assert model(torch.randn(1, 3, 64, 32)).shape == (1, 5)


def test_parameter_names_for_optimizers():
    model = tiny(registers=2)
    names = {name for name, _ in model.named_parameters()}
    assert model.no_weight_decay() == {"pos_embed", "encoder.jumbo_token", "encoder.reg_token"}
    assert model.no_weight_decay() <= names
    from timm.optim import param_groups_layer_decay

    groups = param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.5)
    scale = {id(p): g["lr_scale"] for g in groups for p in g["params"]}
    assert set(scale) == {id(p) for p in model.parameters()}
    assert scale[id(model.head.weight)] == 1.0
    assert (
        scale[id(model.pos_embed)] < scale[id(model.blocks[0].norm1.weight)] < scale[id(model.blocks[1].norm1.weight)]
    )


def test_gradient_checkpointing_same_gradients():
    plain = tiny(drop_path_rate=0.0).train()
    saving = copy.deepcopy(plain)
    saving.set_grad_checkpointing()
    image = torch.randn(2, 3, 32, 32)
    for model in (plain, saving):
        model(image).square().sum().backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), saving.named_parameters(), strict=True):
        assert max_error(a.grad, b.grad) < 1e-5, name


def test_copy_pickle_and_state_dict():
    model, image = tiny(), torch.randn(1, 3, 32, 32)
    expected = model(image)
    assert torch.equal(copy.deepcopy(model)(image), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(image), expected)
    fresh = tiny()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(image), expected)


def test_mask_of_padded_patches():
    model = tiny()
    image = torch.randn(1, 3, 32, 32)
    mask = torch.ones(1, 16, dtype=torch.bool)
    mask[:, 12:] = False  # the last row of patches
    expected = model(image, mask=mask)
    image[:, :, 24:] = 1e3
    assert max_error(model(image, mask=mask), expected) < 1e-6
    assert max_error(model(image), expected) > 1e-2
    unmasked = model(image, mask=torch.ones(1, 16, dtype=torch.bool))
    assert max_error(model(image), unmasked) < 1e-5


def test_token_dropping_by_index():
    model, image = tiny(), torch.randn(2, 3, 32, 32)
    keep = torch.tensor([[0, 3, 5], [1, 2, 15]])
    assert model.forward_features(image, keep=keep).shape == (2, 2 + 3, 16)
    mask = torch.zeros(2, 16, dtype=torch.bool).scatter(1, keep, True)
    assert max_error(model(image, keep=keep), model(image, mask=mask)) < 1e-5
    with pytest.raises(ValueError, match=r"keep must be a long index \(B, K\)"):
        model(image, keep=torch.tensor([0, 1]))


def test_patch_drop_in_training_only():
    model, image = tiny(patch_drop_rate=0.75, drop_path_rate=0.0), torch.randn(2, 3, 32, 32)
    assert model.forward_features(image).shape == (2, 18, 16)
    model.train()
    assert model.forward_features(image).shape == (2, 6, 16)
    assert max_error(model(image), model(image)) > 1e-4
    model.patch_drop_rate = linear_drop_rate(0, 10, start=0.5, end=0.1)
    assert model.forward_features(image).shape == (2, 10, 16)
    with pytest.raises(ValueError, match=r"maps have holes while patch_drop_rate is 0\.5"):
        model.forward_intermediates(image)
    model.patch_drop_rate = 1.0
    with pytest.raises(ValueError, match=r"patch_drop_rate must lie in \[0, 1\), got 1.0"):
        model(image)


def test_initialisations():
    released, short = tiny(init="released"), tiny(init="short")
    image = torch.randn(2, 3, 32, 32)
    assert torch.allclose(released(image).softmax(-1), torch.full((2, 5), 0.2))
    assert torch.allclose(released.head.bias, -torch.tensor(5.0).log().expand(5))
    assert not short.encoder.jumbo_mlp.fc2.weight.any() and short.head.weight.std() > 0.01
    unshared = tiny(init="short", share_jumbo_ffn=False)
    assert not any(ffn.fc2.weight.any() for ffn in unshared.encoder.jumbo_mlp)
    with pytest.raises(ValueError, match="init must be 'released' or 'short', got 'long'"):
        tiny(init="long")


def test_unknown_option_is_refused():
    with pytest.raises(TypeError, match="multiplyer"):
        timm.create_model("test_jumbo", multiplyer=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(patch_drop_rate=1.5), r"patch_drop_rate must lie in \[0, 1\), got 1\.5"),
        (dict(patch_size=0), "patch_size must be an integer of at least 1, got 0"),
        (dict(img_size="32"), "img_size must be an integer of at least 1, got '32'"),
        (dict(img_size=(32, 32, 3)), r"img_size must be an integer or \(height, width\), got \(32, 32, 3\)"),
        (dict(num_classes=2.5), r"num_classes must be an integer of at least 0, got 2\.5"),
        (dict(dynamic_img_size=1), "dynamic_img_size must be True or False, got 1"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


def test_numpy_numbers_are_numbers():
    model = JumboViT(
        np.int64(32), np.int32(8), np.int64(3), np.int64(5), np.int64(16), np.int64(2), np.int64(2), np.int64(2),
        drop_path_rate=np.float32(0.1),
    )  # fmt: skip
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5)


def test_heads_give_back_what_they_froze():
    everything = sum(p.requires_grad for p in tiny().parameters())
    for options in (dict(global_pool="avg"), dict(global_pool="token"), dict(depth=1, global_pool="avg")):
        model = tiny(**options)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        assert frozen
        model.reset_classifier(5, "jumbo")
        assert all(p.requires_grad for p in model.parameters())
    pruned = tiny(depth=3)
    pruned.prune_intermediate_layers([1])
    assert not all(p.requires_grad for p in pruned.parameters())
    pruned.reset_classifier(5, "jumbo")
    assert sum(p.requires_grad for p in pruned.parameters()) == everything


def test_padding_model_has_the_grid_of_the_padded_image():
    model = tiny(img_size=30, dynamic_img_pad=True)
    assert model.patch_embed.grid_size == model.grid_of((30, 30)) == (4, 4)
    model.set_input_size((33, 20))
    assert model.pos_embed.shape[1] == 5 * 3
    fixed = tiny(img_size=30, dynamic_img_pad=True, dynamic_img_size=False)
    assert fixed(torch.randn(1, 3, 30, 30)).shape == (1, 5)


def test_empty_batch():
    model, image = tiny(), torch.randn(0, 3, 32, 32)
    assert model(image).shape == (0, 5)
    with torch.inference_mode():
        assert model.eval()(image).shape == (0, 5)
    assert model.forward_intermediates(image, indices=1, intermediates_only=True)[0].shape == (0, 16, 4, 4)


def test_mask_of_another_length_is_refused():
    image, keep = torch.randn(2, 3, 32, 32), torch.arange(4).repeat(2, 1)
    with pytest.raises(ValueError, match=r"mask must be bool \(B, N\) = \(2, 16\), got torch.bool \(2, 9\)"):
        tiny()(image, mask=torch.ones(2, 9, dtype=torch.bool), keep=keep)


def test_offloaded_model_gives_the_same_answer():
    """Hooks that bring weights in sit on module calls; no parameter may be used behind their back."""
    accelerate = pytest.importorskip("accelerate", reason="needs the extra hf")
    model, image = tiny(registers=1), torch.randn(2, 3, 32, 32)
    expected = model(image)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert torch.equal(model(image), expected)


def test_unusual_channels():
    assert tiny(in_chans=1)(torch.randn(1, 1, 32, 32)).shape == (1, 5)
