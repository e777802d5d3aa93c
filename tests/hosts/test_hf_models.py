"""Jumbo models inside Transformers: outputs, attention implementations, initialisation, checkpointing, backbone."""

from copy import deepcopy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import max_error

pytest.importorskip("transformers")
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
)

from hf_ext import JumboBackbone, JumboConfig, JumboForImageClassification, JumboModel
from jumbo_core.models import JumboViT

TINY = dict(
    image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, multiplier=2, num_labels=5
)
VARIANTS = {
    "jumbo": {},
    "registers baseline": dict(multiplier=0, registers=4),
    "jumbo and registers": dict(registers=3),
    "unshared, layer scale": dict(share_jumbo_ffn=False, layer_scale=1e-4),
    "short": dict(init="short"),
}


def config(**changes) -> JumboConfig:
    return JumboConfig(**{**TINY, **changes})


def randomised(model):
    """Weights away from their start, where zero heads and FFNs would hide errors."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


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


@pytest.mark.parametrize("stages", [["stem"], ["stage1"], ["stage3"], ["stem", "stage2"]])
@pytest.mark.parametrize("layernorm", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_case_20_backbone_freezes_exactly_what_gets_no_gradient(stages, layernorm, shared, images):
    options = config(out_features=stages, apply_layernorm=layernorm, share_jumbo_ffn=shared)
    model = randomised(JumboBackbone(options))
    chosen = {name for name, p in model.named_parameters() if p.requires_grad}
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    sum(f.square().sum() for f in model(images).feature_maps).backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert chosen == reached


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


# --- initialisation and loading ---


def test_starting_weights_follow_the_core():
    torch.manual_seed(0)
    model = JumboForImageClassification(config(hidden_size=64, layer_scale=0.3))
    vit, block = model.jumbo.vit, model.jumbo.vit.blocks[0]
    for weight in (vit.pos_embed, vit.encoder.jumbo_mlp.fc2.weight, block.attn.qkv.weight, block.mlp.fc1.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.15)
    assert block.attn.qkv.bias.abs().sum() == 0 and (block.norm1.weight == 1).all()
    assert (block.ls1.gamma == 0.3).all() and vit.patch_embed.proj.weight.std() > 0.03
    assert (model.classifier.weight == 0).all()
    assert model.classifier.bias[0].item() == pytest.approx(-torch.tensor(5.0).log().item())
    short = JumboForImageClassification(config(hidden_size=64, init="short"))
    assert (short.jumbo.vit.encoder.jumbo_mlp.fc2.weight == 0).all() and (short.classifier.bias == 0).all()
    assert short.classifier.weight.std().item() == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize("init", ["released", "short"])
def test_missing_and_mismatched_weights_start_properly(tmp_path, init):
    trained = randomised(JumboForImageClassification(config(init=init)))
    trained.save_pretrained(tmp_path / "five")
    other, info = JumboForImageClassification.from_pretrained(
        tmp_path / "five", num_labels=7, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert {entry[0] for entry in info["mismatched_keys"]} == {"classifier.weight", "classifier.bias"}
    if init == "released":
        assert (other.classifier.weight == 0).all()
        assert torch.allclose(other.classifier.bias, -torch.tensor(7.0).log().expand(7))
    else:
        assert 0.015 < other.classifier.weight.std() < 0.025 and (other.classifier.bias == 0).all()
    for name, value in trained.jumbo.state_dict().items():
        assert torch.equal(other.jumbo.state_dict()[name], value), name

    # A model without a classifier feeds one with, and the other way round; nothing of the encoder is touched.
    trained.jumbo.save_pretrained(tmp_path / "encoder")
    from_encoder = AutoModelForImageClassification.from_pretrained(tmp_path / "encoder")
    assert torch.equal(from_encoder.jumbo.vit.pos_embed, trained.jumbo.vit.pos_embed)
    for cls in (AutoModel, JumboBackbone):
        back = cls.from_pretrained(tmp_path / "five").state_dict()
        assert all(
            torch.equal(v, back[k if k in back else f"jumbo.{k}"]) for k, v in trained.jumbo.state_dict().items()
        )


def test_a_file_with_holes_is_filled_by_the_rule(tmp_path):
    from safetensors.torch import load_file, save_file

    trained = randomised(JumboForImageClassification(config(init="short")))
    trained.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    lost = ["jumbo.vit.pos_embed", "jumbo.vit.encoder.jumbo_mlp.fc2.weight", "jumbo.vit.blocks.0.attn.qkv.weight"]
    lost[2] = next(k for k in state if k.endswith("blocks.0.attn.qkv.weight"))
    save_file({k: v for k, v in state.items() if k not in lost}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = JumboForImageClassification.from_pretrained(tmp_path).state_dict()
    assert 0.01 < loaded[lost[0]].std() < 0.03 and 0.01 < loaded[lost[2]].std() < 0.03
    assert (loaded[lost[1]] == 0).all()
    assert all(torch.equal(loaded[k], v) for k, v in state.items() if k not in lost)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loading(tmp_path, dtype, images):
    model = randomised(JumboForImageClassification(config())).eval()
    model.save_pretrained(tmp_path)
    half = AutoModelForImageClassification.from_pretrained(tmp_path, dtype=dtype)
    assert {p.dtype for p in half.parameters()} == {dtype}
    with torch.no_grad():
        logits, expected = half(images).logits, model(images).logits
    assert logits.dtype == dtype and max_error(logits.float(), expected) < 3e-2 * expected.abs().max().clamp(min=1)


def test_auto_classes():
    small = config()
    assert isinstance(AutoConfig.for_model("jumbo_vit", **TINY), JumboConfig)
    assert type(AutoModel.from_config(small)) is JumboModel
    assert type(AutoModelForImageClassification.from_config(small)) is JumboForImageClassification
    assert type(AutoBackbone.from_config(small)) is JumboBackbone


def test_default_is_the_released_small_model():
    with torch.device("meta"):
        model = JumboForImageClassification(JumboConfig(num_labels=1000))
    dead_cls_token = 384  # published files carry it, and published counts include it
    assert round((model.num_parameters() + dead_cls_token) / 1e6, 3) == 66.891


# --- backbone ---


def test_backbone_maps(images):
    options = config(registers=3, out_features=["stem", "stage1", "stage3"])
    model = randomised(JumboBackbone(options)).eval()
    core = model.jumbo.vit
    with torch.no_grad():
        out = model(images, output_hidden_states=True)
        maps = core.forward_intermediates(images, [0, 2], norm=True, intermediates_only=True)
    assert model.channels == [16, 16, 16] and [f.shape for f in out.feature_maps] == [(2, 16, 4, 4)] * 3
    assert torch.equal(out.feature_maps[1], maps[0]) and torch.equal(out.feature_maps[2], maps[1])
    stem = core.norm(out.hidden_states[0])[:, core.num_prefix_tokens :]
    assert torch.equal(out.feature_maps[0].flatten(2).transpose(1, 2), stem)
    assert len(out.hidden_states) == 4 and model(images).hidden_states is None
    assert [f.shape for f in model(torch.randn(1, 3, 16, 40)).feature_maps] == [(1, 16, 2, 5)] * 3


def test_backbone_is_frozen_alike_after_loading_and_copying(tmp_path):
    def frozen(net):
        return {name for name, p in net.named_parameters() if not p.requires_grad}

    model = JumboBackbone(config(out_indices=[1]))
    model.save_pretrained(tmp_path)
    loaded, _ = JumboBackbone.from_pretrained(tmp_path, output_loading_info=True)
    again, copied = JumboBackbone.from_pretrained(tmp_path), deepcopy(model)
    assert frozen(model) and frozen(loaded) == frozen(again) == frozen(copied) == frozen(model)
    for net in (loaded, copied):
        net.out_indices = [3]
        assert frozen(net) == frozen(JumboBackbone(config(out_indices=[3])))


def test_backbone_runs_no_block_in_vain_and_can_be_repointed(images):
    model = JumboBackbone(config(out_indices=[1]))
    ran = []
    for i, block in enumerate(model.jumbo.vit.blocks):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    model(images)
    assert ran == [0]
    model.out_features = ["stage2", "stage3"]
    assert len(model(images).feature_maps) == 2 and ran == [0, 0, 1, 2]
    assert all(p.requires_grad for p in model.jumbo.vit.blocks[1].parameters())
    model.train()
    model.jumbo.vit.patch_drop_rate = 0.5
    with pytest.raises(ValueError, match=r"holes while patch_drop_rate is 0\.5"):
        model(images)


# --- offloading: the host's hooks sit on calls of modules ---


@pytest.mark.parametrize("cls", [JumboForImageClassification, JumboModel, JumboBackbone])
def test_offloaded_to_cpu_or_disk(cls, tmp_path, images):
    accelerate = pytest.importorskip("accelerate")
    model = randomised(cls(config(out_features=["stem", "stage2"], registers=1))).eval()
    model.save_pretrained(tmp_path / "saved")
    on_disk = cls.from_pretrained(
        tmp_path / "saved", device_map={"": "disk"}, offload_folder=tmp_path / "offloaded"
    ).eval()
    assert {p.device.type for p in on_disk.parameters()} == {"meta"}
    with torch.no_grad():
        expected = [t for out in model(images).to_tuple() for t in (out if isinstance(out, tuple) else [out])]
        on_cpu = accelerate.cpu_offload(deepcopy(model))
        assert {p.device.type for p in on_cpu.parameters()} == {"meta"}
        for net in (on_disk, on_cpu):
            got = [t for out in net(images).to_tuple() for t in (out if isinstance(out, tuple) else [out])]
            assert all(max_error(a, b) < 1e-6 for a, b in zip(got, expected, strict=True))


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
