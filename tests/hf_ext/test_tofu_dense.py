"""Dense outputs of fused Transformers models: hidden states, attentions, feature maps and decoders."""

import inspect

import pytest
import torch

pytest.importorskip("transformers")
from transformers import (
    DeiTForMaskedImageModeling,
    Dinov2Backbone,
    Dinov2Config,
    Dinov2WithRegistersBackbone,
    DINOv3ViTBackbone,
    UperNetConfig,
    UperNetForSemanticSegmentation,
    ViTForMaskedImageModeling,
    ViTMAEForPreTraining,
)

from hf_ext import JumboBackbone, apply_tofu, remove_tofu
from jumbo_core.tofu import FusionPlan, unmerge
from tests.conftest import max_error
from tests.hf_ext.fusion import ATTENTION, FAMILIES, PLAN, SIZES, TOWERS, inputs, last, randomised

BACKBONES = {  # with the families whose encoder they have
    "dinov2": Dinov2Backbone,
    "dinov2 registers": Dinov2WithRegistersBackbone,
    "dinov3": DINOv3ViTBackbone,
    "jumbo": JumboBackbone,
}


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("attention", ATTENTION)
def test_hidden_states_hold_every_position(name, attention):
    family = TOWERS[name]
    model = family.make(attention=attention)
    given, total = inputs(model), family.prefix + 16
    with torch.no_grad():
        plain = model(**given, output_hidden_states=True)
        handle = apply_tofu(model, PLAN)
        short = last(model, given)
        everywhere = unmerge(short, handle.place())
        fused = model(**given, output_hidden_states=True)
        assert short.shape == (2, total - 9, 32)
        assert [state.shape for state in fused.hidden_states] == [(2, total, 32)] * 4
        assert torch.equal(fused.hidden_states[0], plain.hidden_states[0])
        assert max_error(fused.last_hidden_state, everywhere) < 1e-6
        kept = [state[0].unique(dim=0).shape[0] for state in fused.hidden_states]
        assert kept == [total, total - 3, total - 5, total - 9]
        model.config.output_hidden_states = True
        assert model(**given).last_hidden_state.shape == (2, total, 32)
        model.config.output_hidden_states = False
        assert torch.equal(last(model, given), short)
        if name in FAMILIES:  # the host can be asked for one of them
            chosen = model(**given, output_hidden_states=[-2]).hidden_states
            assert torch.equal(chosen[2], fused.hidden_states[2]) and chosen[1] is None


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("attention", ATTENTION)
def test_feature_maps_are_the_full_grid(name, attention):
    family = TOWERS[name]
    stages = ["stem", "stage1", "stage2", "stage3"]
    model = family.make(BACKBONES[name], attention, out_features=stages)
    tower = family.make(attention=attention, out_features=stages)
    encoder = model.base_model if name == "jumbo" else model
    tower.load_state_dict(encoder.state_dict())
    image = torch.randn(2, 3, 32, 64)  # not square; the encoders take other sizes than they are made for
    plain = model(image).feature_maps
    with torch.no_grad():
        apply_tofu(model, FusionPlan(("prune",) * 3, (0, 0, 5)))
        maps = model(image).feature_maps
        assert all(torch.equal(maps[i], plain[i]) for i in range(3)) and not torch.equal(maps[3], plain[3])
        remove_tofu(model)
        apply_tofu(model, PLAN)
        maps = model(image).feature_maps
        assert [m.shape for m in maps] == [(2, 32, 4, 8)] * 4
        handle = apply_tofu(tower, PLAN)
        tokens = last(tower, {"pixel_values": image})
        assert tokens.shape[1] == family.prefix + 32 - 9
        expected = unmerge(tokens, handle.place())[:, family.prefix :].transpose(1, 2).unflatten(2, (4, 8))
        assert max_error(maps[3], expected) < 1e-5
        remove_tofu(model)
        assert all(torch.equal(a, b) for a, b in zip(model(image).feature_maps, plain, strict=True))


def test_segmentation_head_on_a_fused_backbone():
    backbone = Dinov2Config(
        **SIZES, mlp_ratio=2, reshape_hidden_states=True, out_features=["stage1", "stage2", "stage3"]
    )
    config = UperNetConfig(
        backbone_config=backbone, hidden_size=16, num_labels=3, use_auxiliary_head=False, pool_scales=[1, 2]
    )
    model = randomised(UperNetForSemanticSegmentation(config)).eval()
    image = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        plain = model(image).logits
        handle = apply_tofu(model, PLAN)
        fused = model(image).logits
    assert fused.shape == plain.shape == (2, 3, 32, 32) and not torch.equal(fused, plain)
    assert handle.sizes().shape == (2, 8, 1)


def test_mae_decoder_gets_every_visible_position():
    family = FAMILIES["mae"]
    model = family.make(ViTMAEForPreTraining)
    given, signature = inputs(model), inspect.signature(model.forward)
    with torch.no_grad():
        plain = model(**given)
        handle = apply_tofu(model, PLAN, proportional=True)
        assert inspect.signature(model.forward) == signature  # Trainer reads from it which columns to keep
        assert handle.report().num_patches == 16  # of 64, three quarters are masked
        fused = model(**given)
        latent = model.vit(**given)
        assert latent.last_hidden_state.shape == (2, 8, 32)
        everywhere = unmerge(latent.last_hidden_state, handle.place())
        expected = model.decoder(everywhere, latent.ids_restore).logits
    assert fused.logits.shape == plain.logits.shape == (2, 64, 192)
    assert max_error(fused.logits, expected) < 1e-5 and max_error(fused.logits, plain.logits) > 1e-3
    assert torch.equal(fused.mask, plain.mask) and fused.loss.isfinite()


@pytest.mark.parametrize(
    "name, cls", [("vit", ViTForMaskedImageModeling), ("deit", DeiTForMaskedImageModeling)], ids=["vit", "deit"]
)
def test_masked_image_modeling_reads_a_grid(name, cls):
    family = FAMILIES[name]
    model = family.make(cls)
    image = torch.randn(2, 3, 32, 32)
    hidden = torch.rand(2, 16) < 0.5
    with torch.no_grad():
        handle = apply_tofu(model, PLAN)
        out = model(image, bool_masked_pos=hidden)
        tokens = model.base_model(image, bool_masked_pos=hidden).last_hidden_state
        grid = unmerge(tokens, handle.place())[:, family.prefix :].transpose(1, 2).unflatten(2, (4, 4))
        assert out.reconstruction.shape == (2, 3, 32, 32) and out.loss.isfinite()
        assert max_error(out.reconstruction, model.decoder(grid)) < 1e-5


@pytest.mark.parametrize("name", TOWERS)
def test_attentions_are_those_that_were_computed(name):
    family = TOWERS[name]
    model = family.make(attention="eager")
    apply_tofu(model, PLAN, proportional=True)
    total = family.prefix + 16
    attentions = model(**inputs(model), output_attentions=True).attentions
    assert [a.shape for a in attentions] == [(2, 2, n, n) for n in (total, total - 3, total - 5)]
    assert all(max_error(a.sum(-1), torch.ones_like(a[..., 0])) < 1e-5 for a in attentions)
