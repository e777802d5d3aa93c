"""Linear-time models inside Transformers: outputs, their order, starting weights, loading, freezing, compilers."""

import os
import subprocess
import sys
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.conftest import max_error

pytest.importorskip("transformers")
from transformers import AutoBackbone, AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification

from hf_ext import AdventurerBackbone, AdventurerConfig, AdventurerForImageClassification, AdventurerModel
from jumbo_core.models import AdventurerViT
from tests.hosts.hf_models import LINEAR_TINY, LINEAR_VARIANTS, linear_config, randomised

ROOT = Path(__file__).parents[2]
DECAY = ("mixer.A_log", "mixer.dt_bias", "mixer.D")
variants = pytest.mark.parametrize("variant", LINEAR_VARIANTS)


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32)


def core_of(model: AdventurerForImageClassification) -> AdventurerViT:
    core = AdventurerViT(num_classes=model.config.num_labels, **model.config.core_arguments()).eval()
    core.load_state_dict(model.adventurer.vit.state_dict(), strict=False)
    core.head.load_state_dict(model.classifier.state_dict())
    return core


# --- the same numbers as the core, in the documented order ---


@variants
def test_equals_the_core(variant, images):
    model = randomised(AdventurerForImageClassification(linear_config(**LINEAR_VARIANTS[variant]))).eval()
    core = core_of(model)
    with torch.no_grad():
        assert torch.equal(model(images).logits, core(images))
        assert torch.equal(model.adventurer(images).last_hidden_state, core.forward_features(images))
        for size in ((40, 64), (8, 8)):
            other = torch.randn(1, 3, *size)
            assert torch.equal(model(other).logits, core(other))
    with pytest.raises(ValueError, match=r"height 30.*patch size 8"):
        model(torch.randn(1, 3, 30, 32))


def test_global_tokens_stand_last(images):
    plain = randomised(AdventurerModel(linear_config())).eval()
    with torch.no_grad():
        out = plain(images)
        assert out.last_hidden_state.shape == (2, 17, 16) and plain.pooled_size == 16
        assert torch.equal(out.pooler_output, out.last_hidden_state[:, -1])
        wide = randomised(AdventurerModel(linear_config(multiplier=2))).eval()
        out = wide(images)
    assert out.last_hidden_state.shape == (2, 18, 16) and wide.pooled_size == 48
    patches, slices = out.last_hidden_state.split([16, 2], dim=1)
    assert max_error(out.pooler_output, torch.cat([slices.flatten(1), patches.mean(1)], dim=1)) < 1e-6


@variants
def test_hidden_states_are_in_order_whatever_the_blocks_reverse(variant, images):
    model = randomised(AdventurerForImageClassification(linear_config(**LINEAR_VARIANTS[variant]))).eval()
    vit, j = model.adventurer.vit, model.config.multiplier or 1
    with torch.no_grad():
        out = model(images, output_hidden_states=True)
        tokens = model.adventurer(images).last_hidden_state
        patches, _ = vit.embed(images)
    states = out.hidden_states
    assert [state.shape for state in states] == [(2, 16 + j, 16)] * 4
    assert torch.equal(states[0][:, :16], patches)
    assert torch.equal(states[0][:, 16:], vit.encoder.global_token(patches))
    assert torch.equal(vit.norm(states[-1]), tokens)
    # Each state follows from the one before by its block, run on the sequence reversed by hand where it should be.
    for i, (before, after) in enumerate(pairwise(states)):

        def turn(x, reverse=i in vit.encoder.flipped):
            return torch.cat([x[:, :16].flip(1), x[:, 16:]], dim=1) if reverse else x

        with torch.no_grad():
            expected = turn(vit.blocks[i](turn(before), vit.encoder.ffn_of(i)))
        assert max_error(after, expected) < 1e-6, i
    assert vit.encoder.flipped and model(images).hidden_states is None


def test_hidden_states_on_request_in_every_way(images):
    model = randomised(AdventurerModel(linear_config())).eval()
    with torch.no_grad():
        all_states = model(images, output_hidden_states=True).hidden_states
        some = model(images, output_hidden_states=[-1, 0]).hidden_states
        as_tuple = model(images, output_hidden_states=True, return_dict=False)
        model.config.output_hidden_states = True
        by_config = model(images).hidden_states
    assert some[1] is None and some[2] is None
    assert torch.equal(some[0], all_states[0]) and torch.equal(some[3], all_states[3])
    assert isinstance(as_tuple, tuple) and len(as_tuple) == 3 and len(as_tuple[2]) == len(by_config) == 4


def test_attentions_are_refused(images):
    for model in (AdventurerForImageClassification(linear_config()), AdventurerBackbone(linear_config())):
        with pytest.raises(ValueError, match="this model has no attention"):
            model(images, output_attentions=True)
        assert model(images, output_attentions=False) is not None


@pytest.mark.parametrize("multiplier", [0, 2])
def test_padding_of_a_picture_changes_nothing(multiplier):
    model = randomised(
        AdventurerForImageClassification(linear_config(image_size=[24, 32], multiplier=multiplier))
    ).eval()
    torch.nn.init.zeros_(model.adventurer.vit.pos_embed)  # positions are resampled by grid: compare without them
    picture = torch.randn(1, 3, 24, 24)
    padded = torch.full((1, 3, 24, 32), 1e3)
    padded[..., :24] = picture
    mask = torch.zeros(1, 24, 32, dtype=torch.long)
    mask[..., :24] = 1
    with torch.no_grad():
        out = model(padded, pixel_mask=mask, output_hidden_states=True)
        assert max_error(out.logits, model(picture).logits) < 1e-5
        assert max_error(model(padded).logits, model(picture).logits) > 1e-2
    is_padding = torch.arange(12) % 4 == 3
    assert all((state[:, :12][:, is_padding] == 0).all() for state in out.hidden_states)
    assert all((state[:, :12][:, ~is_padding] != 0).all() for state in out.hidden_states)
    with pytest.raises(ValueError, match=r"pixel_mask must be \(B, H, W\) = \(1, 24, 32\)"):
        model(padded, pixel_mask=mask[..., :24])


def test_problem_types(images):
    one = AdventurerForImageClassification(linear_config())
    assert one(images, labels=torch.tensor([0, 4])).loss.item() == pytest.approx(torch.tensor(5.0).log().item())
    number = AdventurerForImageClassification(linear_config(num_labels=1))
    number(images, labels=torch.rand(2)).loss.backward()
    assert number.config.problem_type == "regression"
    bare = AdventurerForImageClassification(linear_config(num_labels=0, multiplier=2))
    assert bare(images).logits.shape == (2, 3 * 16)


# --- starting weights, saving, loading ---


def test_starting_weights_follow_the_core(tmp_path):
    shape = dict(hidden_size=64, expand=4, head_dim=4, multiplier=2)  # 64 heads: enough to see a distribution
    model = AdventurerForImageClassification(linear_config(**shape))
    loaded_config = model.config
    model.adventurer.config.save_pretrained(tmp_path)
    from_auto = AutoModelForImageClassification.from_config(AutoConfig.from_pretrained(tmp_path))
    for net in (model, from_auto):
        vit = net.adventurer.vit
        mixer = vit.blocks[1].mixer
        for weight in (vit.pos_embed, vit.encoder.jumbo_token, mixer.in_proj.weight, vit.blocks[0].mlp.fc1_g.weight):
            assert weight.std().item() == pytest.approx(0.02, rel=0.2)
        assert (vit.blocks[0].mlp.fc1_g.bias == 0).all() and (mixer.norm.weight == 1).all()
        assert (mixer.D == 1).all() and (vit.norm.weight == 1).all() and vit.patch_embed.proj.weight.std() > 0.03
        A, dt = mixer.A_log.exp(), F.softplus(mixer.dt_bias)
        assert 1 <= A.min() < 3 and 13 < A.max() <= 16
        assert 0.00099 <= dt.min() < 0.003 and 0.03 < dt.max() <= 0.1001
        assert mixer.conv1d.weight.abs().max() <= 0.5 and mixer.conv1d.weight.std() > 0.2  # uniform in 1/sqrt(4 taps)
        assert mixer.conv1d.bias.abs().max() > 0.1 and (net.classifier.weight == 0).all()
    short = AdventurerForImageClassification(linear_config(**{**shape, "init": "short"}))
    assert (short.adventurer.vit.encoder.jumbo_mlp.fc2.weight == 0).all() and loaded_config.init == "released"


@variants
def test_save_and_load_are_bit_equal(variant, tmp_path, images):
    model = randomised(AdventurerForImageClassification(linear_config(**LINEAR_VARIANTS[variant]))).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert type(loaded) is AdventurerForImageClassification
    state = loaded.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert loaded.adventurer.vit.encoder.flipped == model.adventurer.vit.encoder.flipped
    with torch.no_grad():
        assert torch.equal(loaded(images).logits, model(images).logits)
    encoder = AutoModel.from_pretrained(tmp_path)
    assert type(encoder) is AdventurerModel and torch.equal(encoder.vit.pos_embed, model.adventurer.vit.pos_embed)


def test_a_file_with_holes_is_filled_by_the_rule(tmp_path):
    from safetensors.torch import load_file, save_file

    trained = randomised(AdventurerForImageClassification(linear_config(hidden_size=64)))
    trained.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    block = "adventurer.vit.encoder.blocks.1."
    lost = [f"{block}mixer.A_log", f"{block}mixer.conv1d.weight", f"{block}mixer.norm.weight"]
    lost += [f"{block}norm.weight", "adventurer.vit.encoder.cls_token", f"{block}mixer.out_proj.weight"]
    save_file({k: v for k, v in state.items() if k not in lost}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = AdventurerForImageClassification.from_pretrained(tmp_path).state_dict()
    assert loaded[lost[0]].exp().min() >= 1 and loaded[lost[0]].exp().max() <= 16
    assert 0.2 < loaded[lost[1]].std() < 0.4
    assert (loaded[lost[2]] == 1).all() and (loaded[lost[3]] == 1).all()
    assert 0.01 < loaded[lost[4]].std() < 0.03 and 0.01 < loaded[lost[5]].std() < 0.03
    # dt_bias and D lie in the module whose A_log was lost, and stay what the file says.
    assert all(torch.equal(loaded[k], v) for k, v in state.items() if k not in lost)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("multiplier", [0, 2])
def test_half_precision_keeps_the_decay(tmp_path, dtype, multiplier, images):
    model = randomised(AdventurerForImageClassification(linear_config(multiplier=multiplier))).eval()
    model.save_pretrained(tmp_path)
    half = AutoModelForImageClassification.from_pretrained(tmp_path, dtype=dtype)
    kept = {name for name, p in half.named_parameters() if p.dtype == torch.float32}
    assert kept == {name for name, _ in half.named_parameters() if name.endswith(DECAY)} and len(kept) == 9
    assert {p.dtype for name, p in half.named_parameters() if name not in kept} == {dtype}
    assert all(torch.equal(model.state_dict()[name], half.state_dict()[name]) for name in kept)
    with torch.no_grad():
        logits, expected = half(images).logits, model(images).logits
        encoder = AutoModel.from_pretrained(tmp_path, dtype=dtype)
        tokens, wanted = encoder(images).last_hidden_state, model.adventurer(images).last_hidden_state
    assert logits.dtype == tokens.dtype == dtype
    assert max_error(logits.float(), expected) < 3e-2 * expected.abs().max().clamp(min=1)
    assert max_error(tokens.float(), wanted) < 3e-2 * wanted.abs().max()
    half.save_pretrained(tmp_path / "half")
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "half", dtype="auto").state_dict()
    assert all(v.dtype == again[k].dtype and torch.equal(v, again[k]) for k, v in half.state_dict().items())


def test_auto_classes_and_default_size():
    small = linear_config()
    assert isinstance(AutoConfig.for_model("adventurer", **LINEAR_TINY), AdventurerConfig)
    assert type(AutoModel.from_config(small)) is AdventurerModel
    assert type(AutoModelForImageClassification.from_config(small)) is AdventurerForImageClassification
    assert type(AutoBackbone.from_config(small)) is AdventurerBackbone
    with torch.device("meta"):
        model = AdventurerForImageClassification(AdventurerConfig(num_labels=1000))
    positions_of_the_class_token = 256  # published tables have an entry for it, and published counts include it
    assert round((model.num_parameters() + positions_of_the_class_token) / 1e6, 2) == 11.61


@pytest.mark.parametrize(
    "name",
    [f"adventurer_{size}" for size in ("tiny", "small", "base", "large")]
    + [f"jumbo_adventurer_{size}" for size in ("tiny", "small", "base")],
)
def test_plugin_configurations_are_the_registered_sizes(name):
    import timm

    import jumbo_core.models  # noqa: F401

    folder = ROOT / "plugins" / "transformers" / name
    config = AutoConfig.from_pretrained(folder, num_labels=1000)
    with torch.device("meta"):
        ours = AutoModelForImageClassification.from_config(config)
        theirs = timm.create_model(f"{name}_patch16_224")
    assert {k: v.shape for k, v in ours.adventurer.vit.state_dict().items()} == {
        k: v.shape for k, v in theirs.state_dict().items() if not k.startswith("head.")
    }


def test_positions_follow_set_input_size(tmp_path):
    model = AdventurerModel(linear_config())
    model.vit.set_input_size((16, 64))
    model.save_pretrained(tmp_path)
    wide = AutoModel.from_pretrained(tmp_path)
    assert wide.config.image_sides == (16, 64) and torch.equal(wide.vit.pos_embed, model.vit.pos_embed)
    with pytest.raises(ValueError, match=r"a 2x8 grid \(image_size \[16, 64\]\), image_size 32 makes 4x4"):
        AutoModel.from_pretrained(tmp_path, image_size=32)


REMOTE = """
import sys
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification
assert "hf_ext" not in sys.modules
model = AutoModelForImageClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__ == "hf_ext.modeling_adventurer", type(model)
print(type(model).__name__)
"""


def test_trust_remote_code_opens_the_folder_in_a_fresh_process(tmp_path):
    AdventurerForImageClassification(linear_config()).save_pretrained(tmp_path / "saved")
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", REMOTE, str(tmp_path / "saved")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("AdventurerForImageClassification")
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names == {"config.json", "model.safetensors", "modeling_adventurer.py"}


def test_a_bare_folder_has_an_image_processor(tmp_path):
    AdventurerModel(linear_config()).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"height": 32, "width": 32}}')
    assert type(AutoImageProcessor.from_pretrained(tmp_path)).__name__ == "DeiTImageProcessor"


# --- cases 20 and 21 for this host ---


@variants
@pytest.mark.parametrize("head", ["model", "classifier", "backbone"])
def test_case_20_no_dead_parameter(variant, head, images):
    if head == "classifier":
        model = randomised(AdventurerForImageClassification(linear_config(**LINEAR_VARIANTS[variant])))
        loss = model(images, labels=torch.tensor([0, 1])).loss
    elif head == "model":
        model = randomised(AdventurerModel(linear_config(**LINEAR_VARIANTS[variant])))
        loss = model(images).pooler_output.square().sum()
    else:
        model = randomised(AdventurerBackbone(linear_config(**LINEAR_VARIANTS[variant], out_indices=[1, 2])))
        loss = sum(f.square().sum() for f in model(images).feature_maps)
    loss.backward()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert [name for name, p in trainable.items() if p.grad is None] == []
    assert head == "backbone" or len(trainable) == len(list(model.parameters()))


@pytest.mark.parametrize("multiplier", [0, 2])
def test_case_20_checkpointing_gives_the_same_gradients(multiplier, images):
    model = randomised(AdventurerForImageClassification(linear_config(multiplier=multiplier)))
    labels = torch.tensor([1, 2])
    model(images, labels=labels).loss.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    calls = []
    model.adventurer.vit.blocks[1].register_forward_pre_hook(lambda *_: calls.append(1))
    for kwargs in (None, {"use_reentrant": True}):
        model.zero_grad()
        calls.clear()
        model.activation_checkpointing_enable(kwargs)
        out = model(images, labels=labels, output_hidden_states=True)
        out.loss.backward()
        assert len(calls) == 2 and len(out.hidden_states) == 4  # run again in backward, recorded once
        assert max(max_error(p.grad, plain[name]) for name, p in model.named_parameters()) < 1e-5
    with pytest.raises(ValueError, match="Adventurer models checkpoint every block; every_n_layers must be 1, got 2"):
        model.activation_checkpointing_enable(every_n_layers=2)


def test_case_21_dropout_only_in_training(images):
    options = linear_config(hidden_dropout_prob=0.5, drop_path_rate=0.5, patch_drop_rate=0.5)
    model = randomised(AdventurerForImageClassification(options)).eval()
    assert torch.equal(model(images).logits, model(images).logits)
    model.train()
    assert not torch.equal(model(images).logits, model(images).logits)
    assert model.adventurer(images).last_hidden_state.shape == (2, 8 + 1, 16)


# --- compilers, offloading ---


def test_export_with_a_dynamic_batch(images):
    model = randomised(AdventurerForImageClassification(linear_config())).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(
        model, (), {"pixel_values": images}, dynamic_shapes={"pixel_values": {0: batch}}, strict=False
    )
    more = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        assert max_error(exported.module()(pixel_values=more).logits, model(more).logits) < 1e-5


@pytest.mark.parametrize("multiplier", [0, 2])
def test_compile_whole_graph(multiplier, images):
    model = randomised(AdventurerForImageClassification(linear_config(multiplier=multiplier))).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert max_error(compiled(images).logits, model(images).logits) < 1e-5


@pytest.mark.parametrize("cls", [AdventurerForImageClassification, AdventurerModel, AdventurerBackbone])
def test_offloaded_to_cpu_or_disk(cls, tmp_path, images):
    accelerate = pytest.importorskip("accelerate")
    model = randomised(cls(linear_config(multiplier=2, out_features=["stem", "stage2"]))).eval()
    model.save_pretrained(tmp_path / "saved")
    on_disk = cls.from_pretrained(
        tmp_path / "saved", device_map={"": "disk"}, offload_folder=tmp_path / "offloaded"
    ).eval()
    assert {p.device.type for p in on_disk.parameters()} == {"meta"}

    def flat(net):
        out = net(images, output_hidden_states=True).to_tuple()
        return [t for part in out for t in (part if isinstance(part, tuple) else [part])]

    with torch.no_grad():
        expected = flat(model)
        on_cpu = accelerate.cpu_offload(deepcopy(model))
        for net in (on_disk, on_cpu):
            assert all(max_error(a, b) < 1e-6 for a, b in zip(flat(net), expected, strict=True))
