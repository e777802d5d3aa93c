"""Token fusion in Transformers models: what fuses where, prefix tokens, dense outputs, training, removal, refusals."""

import copy
import inspect
import pickle

import pytest
import torch

pytest.importorskip("transformers")
from timm.models.vision_transformer import VisionTransformer
from transformers import (
    AttentionInterface,
    CLIPForImageClassification,
    CLIPModel,
    CLIPVisionModelWithProjection,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    DeiTForMaskedImageModeling,
    Dinov2Backbone,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2WithRegistersBackbone,
    Dinov2WithRegistersForImageClassification,
    DINOv3ViTBackbone,
    SwinConfig,
    SwinModel,
    Trainer,
    TrainingArguments,
    UperNetConfig,
    UperNetForSemanticSegmentation,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
    ViTMAEForPreTraining,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_ext
import jumbo_core.tofu
from hf_ext import JumboBackbone, JumboForImageClassification, apply_tofu, remove_tofu
from jumbo_core.models import JumboViT
from jumbo_core.tofu import FusionPlan, is_fused, linearity_profile, unmerge
from tests.conftest import max_error
from tests.hf_ext.fusion import ATTENTION, FAMILIES, JUMBO, PLAN, SIZES, clip, inputs, randomised, written_out

TOWERS = {name: family for name, family in {**FAMILIES, **JUMBO}.items() if name != "dinov2 swiglu"}
BACKBONES = {  # with the families whose encoder they have
    "dinov2": Dinov2Backbone,
    "dinov2 registers": Dinov2WithRegistersBackbone,
    "dinov3": DINOv3ViTBackbone,
    "jumbo": JumboBackbone,
}
HEADS = {
    "vit": ViTForImageClassification,
    "deit": DeiTForImageClassification,
    "deit teacher": DeiTForImageClassificationWithTeacher,
    "dinov2": Dinov2ForImageClassification,
    "dinov2 registers": Dinov2WithRegistersForImageClassification,
    "jumbo": JumboForImageClassification,
}


def classifier(name: str, attention: str = "sdpa", **options):
    return TOWERS[name.removesuffix(" teacher")].make(HEADS[name], attention, num_labels=5, **options)


def last(model, given) -> torch.Tensor:
    with torch.no_grad():
        return model(**given).last_hidden_state


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


@pytest.mark.parametrize("name", TOWERS)
def test_attentions_are_those_that_were_computed(name):
    family = TOWERS[name]
    model = family.make(attention="eager")
    apply_tofu(model, PLAN, proportional=True)
    total = family.prefix + 16
    attentions = model(**inputs(model), output_attentions=True).attentions
    assert [a.shape for a in attentions] == [(2, 2, n, n) for n in (total, total - 3, total - 5)]
    assert all(max_error(a.sum(-1), torch.ones_like(a[..., 0])) < 1e-5 for a in attentions)


@pytest.mark.parametrize("name", ["vit", "deit", "dinov2", "dinov2 registers", "mae"])
@pytest.mark.parametrize("attention", ATTENTION)
def test_masks_are_refused(name, attention):
    family = FAMILIES[name]
    model = family.make(attention=attention)
    given = inputs(model)
    mask = torch.ones(2, family.prefix + 16, dtype=torch.long)
    mask[0, -1] = 0
    plain = model(**given, attention_mask=mask).last_hidden_state
    apply_tofu(model, PLAN)
    with pytest.raises(ValueError, match="a fused model takes no attention mask, for its tokens leave their places"):
        model(**given, attention_mask=mask)
    with pytest.raises(ValueError, match="takes no attention mask"):
        model(**given, head_mask=torch.ones(3, 2))
    remove_tofu(model)
    assert torch.equal(model(**given, attention_mask=mask).last_hidden_state, plain)


def test_jumbo_masks_are_refused():
    model = JUMBO["jumbo"].make()
    apply_tofu(model, PLAN)
    with pytest.raises(ValueError, match="takes no padding mask"):
        model(torch.randn(2, 3, 32, 32), pixel_mask=torch.ones(2, 32, 32))


@pytest.mark.parametrize("name", ["vit", "jumbo"])
def test_other_implementations(name):
    model = TOWERS[name].make()
    given = inputs(model)
    handle = apply_tofu(model, PLAN)
    plain = last(model, given)
    AttentionInterface.register("of_the_user", sdpa_attention_forward)
    model.set_attn_implementation("of_the_user")
    assert torch.equal(last(model, given), plain)
    handle.remove()
    message = "log sizes to the attention scores, which 'of_the_user' does not take: use 'eager' or 'sdpa'"
    with pytest.raises(ValueError, match=message):
        apply_tofu(model, PLAN, proportional=True)
    assert not is_fused(model)
    model.set_attn_implementation("eager")
    apply_tofu(model, PLAN, proportional=True)
    eager = last(model, given)
    model.set_attn_implementation("sdpa")
    assert max_error(last(model, given), eager) < 1e-5
    model.set_attn_implementation("of_the_user")
    with pytest.raises(ValueError, match=message):
        model(**given)


def test_flex_attention():
    model = FAMILIES["dinov3"].make()
    apply_tofu(model, PLAN)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="'flex_attention' wants a mask of the first layer's size: use 'sdpa' or 'ea"):
        last(model, inputs(model))


def test_rotary_keys_are_not_attention():
    model = FAMILIES["dinov3"].make()
    for options in ({"importance": "attention"}, {"weights": "importance"}):
        with pytest.raises(ValueError, match="importance by attention is not available for DINOv3"):
            apply_tofu(model, PLAN, **options)
    assert not is_fused(model)


@pytest.mark.parametrize("name", ["vit", "dinov2 registers", "dinov3", "clip", "jumbo"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(name, reentrant):
    family = TOWERS[name]
    still = {"jumbo": {"drop_path_rate": 0.0}, "dinov3": {"pos_embed_rescale": None}}  # no chance in training
    model = family.make(**still.get(name, {}))
    given, runs = inputs(model), []
    apply_tofu(model, PLAN, proportional=True)
    model.train()
    layer = model.vit.blocks[2] if name == "jumbo" else model.get_submodule(_layer(name, 2))
    layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    parameters = [p for p in model.parameters() if p.requires_grad]

    def gradients():
        runs.clear()
        return torch.autograd.grad(model(**given).last_hidden_state.square().sum(), parameters, allow_unused=True)

    plain = gradients()
    assert len(runs) == 1 and sum(g is not None and g.abs().sum() > 0 for g in plain) > 20
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:  # it wants an input that asks for gradients, and backward()
        model.enable_input_require_grads()
        runs.clear()
        model(**given).last_hidden_state.square().sum().backward()
        again = [p.grad for p in parameters]
    else:
        again = gradients()
    assert len(runs) == 2  # the MLP ran again in backward
    for a, b in zip(plain, again, strict=True):
        assert (a is None) == (b is None)
        assert a is None or max_error(a, b) < 1e-5 * max(1, a.abs().max().item())
    model.eval()
    assert torch.equal(last(model, given), last(model, given))


def _layer(name: str, i: int) -> str:
    return {"vit": "layers", "clip": "encoder.layers", "dinov3": "model.layer"}.get(name, "encoder.layer") + f".{i}"


@pytest.mark.parametrize("name", ["vit", "jumbo"])
def test_trainer(name, tmp_path):
    """Trainer finds the inputs, trains through fusion and checkpointing, and saves the plan with the weights."""
    model = classifier(name)
    apply_tofu(model, PLAN, proportional=True)
    # Four pictures to learn by heart; the column that no model takes must go, the others stay.
    rows = [{"pixel_values": torch.randn(3, 32, 32), "labels": i, "file": torch.tensor(i)} for i in range(4)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=12,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        gradient_checkpointing=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] / 2, losses
    trainer.save_model()
    loaded = HEADS[name].from_pretrained(tmp_path)
    images = torch.stack([row["pixel_values"] for row in rows])
    model.eval()
    assert is_fused(loaded) and torch.equal(loaded(images).logits, model(images).logits)
    assert loaded(images).logits.argmax(-1).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["vit", "dinov3", "jumbo"])
def test_half_precision(name):
    model = TOWERS[name].make()
    given = inputs(model)
    apply_tofu(model, PLAN, proportional=True)
    reference = last(model, given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert max_error(last(model, given).float(), reference) < 0.5  # other tokens may be chosen
    assert last(model.bfloat16(), {"pixel_values": given["pixel_values"].bfloat16()}).dtype == torch.bfloat16


def test_export():
    model = FAMILIES["vit"].make()
    given = inputs(model)
    apply_tofu(model, PLAN, proportional=True)
    expected = last(model, given)
    with torch.no_grad():
        exported = torch.export.export(model, (), given).module()
        assert max_error(exported(**given).last_hidden_state, expected) < 1e-5
        with pytest.raises(ValueError, match="takes no attention mask"):
            torch.export.export(model, (), {**given, "attention_mask": torch.ones(2, 17)})


@pytest.mark.parametrize("name", ["vit", "deit", "dinov2 registers", "jumbo"])
def test_linearity_profile(name):
    model = classifier(name)
    profile = linearity_profile(model, [torch.randn(2, 3, 32, 32)])
    assert profile.num_patches == 16 and len(profile.linearity) == 3
    assert all(0 < value <= 1 for value in profile.linearity)
    assert apply_tofu(model, FusionPlan.from_profile(profile, 0.3)).report().saved > 0.1


def test_accelerate_has_spread_the_model():
    from accelerate import dispatch_model

    model = FAMILIES["vit"].make()
    dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    with pytest.raises(ValueError, match="accelerate has spread this model over devices"):
        apply_tofu(model, PLAN)
    assert not is_fused(model)


@pytest.mark.parametrize("bad", ["swin", "text", "overridden"])
def test_unsupported(bad):
    if bad == "swin":
        model = SwinModel(
            SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[1], num_heads=[2], window_size=4)
        )
    elif bad == "text":
        model = clip(CLIPModel).text_model
    else:

        class Layer(type(FAMILIES["vit"].make().layers[0])):
            def forward(self, hidden_states, attention_mask=None, **kwargs):
                return hidden_states

        model = FAMILIES["vit"].make()
        model.layers[1].__class__ = Layer
    with pytest.raises(TypeError) as error:
        apply_tofu(model, PLAN)
    message = str(error.value)
    assert message.startswith(f"token fusion does not know {type(model).__name__}; supported: ")
    for name in ("ViT, DeiT, DINOv2, DINOv2 with registers, DINOv3 ViT, CLIP vision and ViTMAE", "JumboModel", "timm"):
        assert name in message


@pytest.mark.parametrize("name", TOWERS)
def test_errors_leave_the_model_alone(name):
    model = TOWERS[name].make()
    with pytest.raises(ValueError, match="the plan is for 4 blocks, the model has 3"):
        apply_tofu(model, FusionPlan.paper(4, 1))
    with pytest.raises(ValueError, match="block 0 is to remove 9 tokens, but of 16 patches at most 8"):
        apply_tofu(model, FusionPlan.paper(3, 9))
    assert not is_fused(model) and getattr(model.config, "tofu", None) is None
