"""Jumbo models inside Transformers: starting weights, what loading fills in, half precision, offloading."""

from copy import deepcopy

import pytest
import torch

from tests.conftest import max_error

pytest.importorskip("transformers")
from transformers import AutoBackbone, AutoConfig, AutoModel, AutoModelForImageClassification

from hf_ext import JumboBackbone, JumboConfig, JumboForImageClassification, JumboModel
from tests.hosts.hf_models import TINY, config, randomised


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32)


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
