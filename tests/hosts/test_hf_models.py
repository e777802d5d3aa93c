"""Jumbo models inside Transformers: outputs, attention implementations, losses, checkpointing, compilers."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import max_error

pytest.importorskip("transformers")
from hf_ext import JumboBackbone, JumboForImageClassification, JumboModel
from jumbo_core.models import JumboViT
from tests.hosts.hf_models import VARIANTS, config, randomised


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32)


# --- the same numbers as the core ---


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_equals_the_core_in_either_attention(variant, attention, images):
    model = randomised(JumboForImageClassification(config(**VARIANTS[variant]))).eval()
    model.set_attn_implementation(attention)
    options = {k: v for k, v in VARIANTS[variant].items() if k != "multiplier"}
    core = JumboViT(32, 8, 3, 5, 16, 3, 2, VARIANTS[variant].get("multiplier", 2), **options).eval()
    core.load_state_dict(model.jumbo.vit.state_dict(), strict=False)
    core.head.load_state_dict(model.classifier.state_dict())
    with torch.no_grad():
        assert max_error(model(images).logits, core(images)) < 1e-5
        assert max_error(model.jumbo(images).last_hidden_state, core.forward_features(images)) < 1e-5


def test_any_size_runs_and_wrong_input_is_named(images):
    model = JumboModel(config()).eval()
    assert model(torch.randn(1, 3, 40, 64)).last_hidden_state.shape == (1, 2 + 5 * 8, 16)
    with pytest.raises(ValueError, match=r"height 30.*patch size 8"):
        model(torch.randn(1, 3, 30, 32))
    with pytest.raises(ValueError, match=r"\(B, 3, H, W\)"):
        model(torch.randn(1, 1, 32, 32))
    padded = JumboModel(config(dynamic_img_pad=True)).eval()
    assert padded(torch.randn(1, 3, 30, 33)).last_hidden_state.shape == (1, 2 + 4 * 5, 16)


def test_hidden_states_and_attentions(images):
    model = randomised(JumboForImageClassification._from_config(config(), attn_implementation="eager")).eval()
    with torch.no_grad():
        out = model(images, output_hidden_states=True, output_attentions=True)
        tokens = model.jumbo(images).last_hidden_state
    assert [h.shape for h in out.hidden_states] == [(2, 18, 16)] * 4
    assert max_error(model.jumbo.vit.norm(out.hidden_states[-1]), tokens) < 1e-6
    assert [a.shape for a in out.attentions] == [(2, 2, 18, 18)] * 3
    assert torch.allclose(out.attentions[0].sum(-1), torch.ones(2, 2, 18))
    first, second = out.hidden_states[:2]
    assert max_error(model.jumbo.vit.blocks[0](first, model.jumbo.vit.encoder.ffn_of(0)), second) < 1e-6
    assert model(images).hidden_states is None
    assert isinstance(model(images, return_dict=False), tuple)


def test_attentions_without_eager_say_what_to_do(images):
    model = JumboForImageClassification(config())
    with pytest.raises(ValueError, match=r"set_attn_implementation\('eager'\)"):
        model(images, output_attentions=True)
    with pytest.raises(ValueError, match=r"set_attn_implementation\('eager'\)"):
        JumboBackbone(config())(images, output_attentions=True)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_of_a_picture_changes_nothing(attention):
    model = randomised(JumboForImageClassification(config(image_size=[24, 32]))).eval()
    model.set_attn_implementation(attention)
    # Four columns of patches, the last of them padding. Positions are resampled by grid, so the table is switched off
    # to compare with the narrow picture alone.
    torch.nn.init.zeros_(model.jumbo.vit.pos_embed)
    picture = torch.randn(1, 3, 24, 24)
    padded = torch.full((1, 3, 24, 32), 1e3)
    padded[..., :24] = picture
    mask = torch.zeros(1, 24, 32, dtype=torch.long)
    mask[..., :24] = 1
    with torch.no_grad():
        assert max_error(model(padded, pixel_mask=mask).logits, model(picture).logits) < 1e-5
        assert max_error(model(padded).logits, model(picture).logits) > 1e-2
    with pytest.raises(ValueError, match=r"pixel_mask must be \(B, H, W\) = \(1, 24, 32\)"):
        model(padded, pixel_mask=mask[..., :24])


def test_patch_dropping_keeps_mask_and_tokens_aligned():
    model = randomised(JumboModel(config(patch_drop_rate=0.5, drop_path_rate=0.0))).train()
    images, mask = torch.randn(2, 3, 32, 32), torch.zeros(2, 32, 32)
    mask[0, :, :24], mask[1, :8, :8] = 1, 1  # 12 real patches of 16, and 1
    out = model(images, pixel_mask=mask)
    assert out.last_hidden_state.shape == (2, 2 + 8, 16)
    noise = images.clone()
    noise[:, :, 8:, 24:] += 1e3
    states = []
    for pixels in (images, noise):  # of what is padding in the first picture nothing arrives, whatever was drawn
        torch.manual_seed(0)
        states.append(model(pixels, pixel_mask=mask).pooler_output[0])
    assert max_error(*states) < 1e-5


# --- losses ---


def test_problem_types(images):
    one = JumboForImageClassification(config())
    assert one(images, labels=torch.tensor([0, 4])).loss.item() == pytest.approx(torch.tensor(5.0).log().item())
    assert one.config.problem_type == "single_label_classification"
    many = JumboForImageClassification(config())
    many(images, labels=torch.rand(2, 5)).loss.backward()
    assert many.config.problem_type == "multi_label_classification"
    number = JumboForImageClassification(config(num_labels=1))
    number(images, labels=torch.rand(2)).loss.backward()
    assert number.config.problem_type == "regression"
    bare = JumboForImageClassification(config(num_labels=0))
    assert bare(images).logits.shape == (2, 3 * 16)


# --- cases 20 and 21 for this host ---


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head", ["model", "classifier", "backbone"])
def test_case_20_no_dead_parameter(variant, head, images):
    if head == "classifier":
        model = randomised(JumboForImageClassification(config(**VARIANTS[variant])))
        loss = model(images, labels=torch.tensor([0, 1])).loss
    elif head == "model":
        model = randomised(JumboModel(config(**VARIANTS[variant])))
        loss = model(images).pooler_output.square().sum()
    else:
        model = randomised(JumboBackbone(config(**VARIANTS[variant], out_indices=[1, 2])))
        loss = sum(f.square().sum() for f in model(images).feature_maps)
    loss.backward()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert [name for name, p in trainable.items() if p.grad is None] == []
    assert head == "backbone" or len(trainable) == len(list(model.parameters()))


def test_case_20_checkpointing_gives_the_same_gradients(images):
    model = randomised(JumboForImageClassification(config(drop_path_rate=0.0)))
    labels = torch.tensor([1, 2])
    model(images, labels=labels).loss.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    calls = []
    model.jumbo.vit.blocks[1].register_forward_pre_hook(lambda *_: calls.append(1))
    for kwargs in (None, {"use_reentrant": True}):
        model.zero_grad()
        calls.clear()
        model.gradient_checkpointing_enable(kwargs)
        assert model.is_activation_checkpointing
        out = model(images, labels=labels, output_hidden_states=True)
        out.loss.backward()
        assert len(calls) == 2 and len(out.hidden_states) == 4  # run again in backward, recorded once
        assert max(max_error(p.grad, plain[name]) for name, p in model.named_parameters()) < 1e-5
    model.gradient_checkpointing_disable()
    assert not model.is_activation_checkpointing
    with pytest.raises(ValueError, match="every_n_layers must be 1"):
        model.activation_checkpointing_enable(every_n_layers=2)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_case_21_dropout_only_in_training(attention, images):
    options = config(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5, drop_path_rate=0.5, patch_drop_rate=0.5)
    for model in (
        randomised(JumboForImageClassification(options)),
        randomised(JumboForImageClassification(config(attention_probs_dropout_prob=0.5, drop_path_rate=0.0))),
    ):
        model.set_attn_implementation(attention)
        model.eval()
        assert torch.equal(model(images).logits, model(images).logits)
        model.train()
        assert not torch.equal(model(images).logits, model(images).logits)


# --- compilers ---


def test_export_with_a_dynamic_batch(images):
    model = randomised(JumboForImageClassification(config())).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(
        model, (), {"pixel_values": images}, dynamic_shapes={"pixel_values": {0: batch}}, strict=False
    )
    more = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        assert max_error(exported.module()(pixel_values=more).logits, model(more).logits) < 1e-5


def test_compile_whole_graph(images):
    model = randomised(JumboForImageClassification(config())).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert max_error(compiled(images).logits, model(images).logits) < 1e-5


def test_nothing_is_computed_twice(images):
    model = JumboForImageClassification(config()).eval()
    core = JumboViT(32, 8, 3, 5, 16, 3, 2, 2).eval()
    counts = []
    for module in (model, core):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(images)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]
