"""Token fusion in Transformers models: what fuses where, prefix tokens, classifiers, removal without a trace."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers")
from timm.models.vision_transformer import VisionTransformer
from transformers import CLIPForImageClassification, CLIPModel, CLIPVisionModelWithProjection, ViTForImageClassification

import hf_ext
import jumbo_core.tofu
from hf_ext import apply_tofu, remove_tofu
from jumbo_core.models import JumboViT
from jumbo_core.tofu import FusionPlan, is_fused
from tests.conftest import max_error
from tests.hf_ext.fusion import (
    ATTENTION,
    FAMILIES,
    HEADS,
    JUMBO,
    PLAN,
    TOWERS,
    classifier,
    clip,
    inputs,
    last,
    written_out,
)


def test_one_function():
    assert hf_ext.apply_tofu is jumbo_core.tofu.apply_tofu


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("proportional", [False, True])
def test_against_layers_written_out(name, attention, proportional):
    family = FAMILIES[name]
    model = family.make(attention=attention)
    given = inputs(model)
    with torch.no_grad():
        expected = written_out(model, given, PLAN, family.prefix, proportional=proportional)
    apply_tofu(model, PLAN, proportional=proportional)
    out = last(model, given)
    assert out.shape == (2, family.prefix + 16 - 9, 32)
    assert max_error(out, expected) < 1e-5


@pytest.mark.parametrize("name", JUMBO)
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("by", ["similarity", "attention"])
def test_jumbo_against_jumbo_core(name, attention, by):
    model = JUMBO[name].make(attention=attention)
    given = inputs(model)
    core = JumboViT(**model.config.core_arguments(), num_classes=0).eval()
    core.load_state_dict(model.vit.state_dict())
    for fused in (model, core):
        apply_tofu(fused, PLAN, proportional=True, importance=by)
    with torch.no_grad():
        out, expected = model(**given), core.forward_features(given["pixel_values"])
        assert max_error(out.last_hidden_state, expected) < 1e-5
        assert max_error(out.pooler_output, core(given["pixel_values"])) < 1e-5


def timm_twin(model: ViTForImageClassification) -> VisionTransformer:
    """timm's model with the weights of Transformers'."""
    twin = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2, mlp_ratio=2, num_classes=5
    ).eval()
    vit = model.vit
    twin.norm.load_state_dict(vit.layernorm.state_dict())
    with torch.no_grad():
        twin.cls_token.copy_(vit.embeddings.cls_token)
        twin.pos_embed.copy_(vit.embeddings.position_embeddings)
        twin.patch_embed.proj.load_state_dict(vit.embeddings.patch_embeddings.projection.state_dict())
    twin.head.load_state_dict(model.classifier.state_dict())
    for layer, block in zip(vit.layers, twin.blocks, strict=True):
        block.norm1.load_state_dict(layer.layernorm_before.state_dict())
        block.norm2.load_state_dict(layer.layernorm_after.state_dict())
        block.attn.proj.load_state_dict(layer.attention.o_proj.state_dict())
        block.mlp.fc1.load_state_dict(layer.mlp.fc1.state_dict())
        block.mlp.fc2.load_state_dict(layer.mlp.fc2.state_dict())
        projections = [getattr(layer.attention, f"{n}_proj").state_dict() for n in "qkv"]
        state = {key: torch.cat([p[key] for p in projections]) for key in ("weight", "bias")}
        block.attn.qkv.load_state_dict(state)
    return twin


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(
    "options",
    [
        {"proportional": True, "order": "released"},
        {"importance": "attention"},
        {"importance": "attention", "proportional": True},
    ],
    ids=str,
)
def test_against_timm(attention, options):
    model = classifier("vit", attention, layer_norm_eps=1e-6)
    twin, given = timm_twin(model), inputs(model, 4)
    plan = FusionPlan.uniform(3, 4, "average")
    with torch.no_grad():
        assert max_error(model(**given).logits, twin(given["pixel_values"])) < 1e-5
        ours, theirs = apply_tofu(model, plan, **options), apply_tofu(twin, plan, **options)
        assert max_error(model(**given).logits, twin(given["pixel_values"])) < 1e-5
    assert torch.equal(ours.sources(), theirs.sources()) and torch.equal(ours.sizes(), theirs.sizes())
    assert ours.report() == theirs.report() and ours.report().multiply_adds > 0


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("attention", ATTENTION)
def test_nothing_to_remove_changes_nothing(name, attention):
    model = TOWERS[name].make(attention=attention)
    given = inputs(model)
    plain = model(**given, output_hidden_states=True)
    apply_tofu(model, FusionPlan.paper(3, 0), proportional=True)
    fused = model(**given, output_hidden_states=True)
    assert plain.keys() == fused.keys()
    assert torch.equal(plain.last_hidden_state, fused.last_hidden_state)
    assert len(fused.hidden_states) == 4
    for a, b in zip(plain.hidden_states, fused.hidden_states, strict=True):
        assert torch.equal(a, b)
    if plain.get("pooler_output") is not None:
        assert torch.equal(plain.pooler_output, fused.pooler_output)


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("attention", ATTENTION)
def test_prefix_tokens_stay_alone(name, attention):
    family = TOWERS[name]
    model = family.make(attention=attention)
    handle = apply_tofu(model, FusionPlan.uniform(3, 5, "average"))
    model(**inputs(model))
    prefix, sources = family.prefix, handle.sources()
    assert sources.shape == (2, prefix + 3, prefix + 16)  # 16 - 5 - 5 - 3: the last block is down to 6 patches
    assert torch.equal(sources[:, :prefix, :prefix], torch.eye(prefix, dtype=torch.bool).expand(2, -1, -1))
    assert not sources[:, :prefix, prefix:].any() and not sources[:, prefix:, :prefix].any()


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("attention", ATTENTION)
def test_classifiers_and_what_leaves_no_trace(name, attention):
    model = classifier(name, attention)
    given, state = inputs(model), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        plain = model(**given).logits
        handle = apply_tofu(model, PLAN, proportional=True)
        fused = model(**given).logits
        assert fused.shape == (2, 5) and max_error(fused, plain) > 1e-3
        assert torch.equal(model(**given).logits, fused)
        assert model.state_dict().keys() == state.keys()
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert is_fused(other) and torch.equal(other(**given).logits, fused)
            remove_tofu(other)
            assert torch.equal(other(**given).logits, plain)
        assert is_fused(model)  # the copies took out their own
        assert handle.remove() is model and not is_fused(model)
        assert torch.equal(model(**given).logits, plain)
        assert "save_pretrained" not in vars(model) and not {"tofu", "quantization_config"} & vars(model.config).keys()


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("cls", [CLIPModel, CLIPVisionModelWithProjection, CLIPForImageClassification])
def test_clip(cls, attention):
    if cls is CLIPVisionModelWithProjection:
        model = FAMILIES["clip"].make(cls, attention)
    else:
        model = clip(cls, attention, num_labels=5)
    given = inputs(model)
    if cls is CLIPModel:
        given["input_ids"] = torch.randint(20, (2, 4))
    with torch.no_grad():
        plain = model(**given)
        handle = apply_tofu(model, PLAN, proportional=True)
        fused = model(**given)
        assert handle.sizes().shape == (2, 8, 1)
        assert max_error(fused[0], plain[0]) > 1e-4 and fused[0].shape == plain[0].shape
        if cls is CLIPModel:
            assert torch.equal(fused.text_embeds, plain.text_embeds)
        handle.remove()
        assert torch.equal(model(**given)[0], plain[0])
