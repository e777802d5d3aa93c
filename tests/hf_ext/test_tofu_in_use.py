"""Fused Transformers models in use: masks, attention implementations, training, precision, export, refusals."""

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AttentionInterface, CLIPModel, SwinConfig, SwinModel, Trainer, TrainingArguments
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_ext import apply_tofu, remove_tofu
from jumbo_core.tofu import FusionPlan, is_fused, linearity_profile
from tests.conftest import max_error
from tests.hf_ext.fusion import ATTENTION, FAMILIES, HEADS, JUMBO, PLAN, TOWERS, classifier, clip, inputs, last


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
