"""Conversion of published Adventurer files: golden numbers, shapes read off the tensors, flip rule, card, errors."""

import numpy as np
import pytest
import torch

from tests.conftest import Golden, max_error

pytest.importorskip("transformers")
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    pipeline,
)

from hf_ext import AdventurerForImageClassification, adventurer_image_processor
from hf_ext.convert import WRITTEN, convert, main
from jumbo_core.models import AdventurerViT, JumboViT


def adventurer_file(path, wrap=lambda state: state, **options):
    """A file as the Adventurer authors publish them, under their names, and the core model it holds."""
    options = {
        **dict(img_size=32, patch_size=8, num_classes=6, embed_dim=16, depth=4, d_state=4, head_dim=8, expand=3),
        **dict(conv_kernel=3, mlp_ratio=3, flip=(2, 3)),
        **options,
    }
    torch.manual_seed(1)
    core = AdventurerViT(**options).eval()
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    names = {"blocks.": "layers.", "norm.": "norm_f.", ".fc1_g.": ".w1.", ".fc1_x.": ".w2.", ".fc2.": ".w3."}
    state = {}
    for key, value in core.state_dict().items():
        key = key.removeprefix("encoder.")
        for ours, theirs in names.items():
            inside = key.startswith(ours) if ours[0] != "." else ours in key
            key = key.replace(ours, theirs, 1) if inside else key
        state[key] = value
    # Their table has an entry for the class token, the last one; the token is learned beside it.
    entry = torch.randn(1, 1, options["embed_dim"])
    state["pos_embed"] = torch.cat([state["pos_embed"], entry], dim=1)
    state["cls_token"] = state["cls_token"] - entry
    torch.save(wrap(state), path)
    return core


@pytest.fixture(scope="session")
def golden_adventurer(shared) -> Golden:
    return Golden(shared / "golden" / "adventurer_d5.safetensors")


def test_golden_adventurer_through_a_converted_folder(golden_adventurer, tmp_path):
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 48, 3), dtype=np.uint8))
    golden = golden_adventurer
    report = convert(golden.path, tmp_path / "out")
    assert report.missing == report.unexpected == report.ignored == []
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert model.config.flip == [2, 3] and type(model) is AdventurerForImageClassification
    with torch.no_grad():
        out = model(golden["input"], output_hidden_states=True)
        encoder = AutoModel.from_pretrained(tmp_path / "out")
        features = encoder(golden["input"], output_hidden_states=True)
    assert max_error(out.logits, golden["logits"]) < 1e-5
    assert max_error(features.last_hidden_state, golden["features"]) < 1e-5
    for states in (out.hidden_states, features.hidden_states):
        assert len(states) == len(golden.blocks) + 1 == 6
        for ours, theirs in zip(states[1:], golden.blocks, strict=True):
            assert max_error(ours, theirs) < 1e-5
    answers = pipeline("image-classification", model=str(tmp_path / "out"))(photo)
    pixels = AutoImageProcessor.from_pretrained(tmp_path / "out")(photo, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        scores = model(pixels).logits[0].softmax(0).sort(descending=True)
    assert [a["label"] for a in answers] == [f"LABEL_{i}" for i in scores.indices[:5]]
    assert [a["score"] for a in answers] == pytest.approx(scores.values[:5].tolist(), abs=1e-6)


def test_adventurer_shape_is_read_off_the_tensors(tmp_path, capsys):
    core = adventurer_file(tmp_path / "a.pth", lambda s: {"model": {f"module.{k}": v for k, v in s.items()}})
    main([str(tmp_path / "a.pth"), str(tmp_path / "a")])
    out = capsys.readouterr().out
    assert "AdventurerForImageClassification, D=16, 4 blocks, J=0" in out
    assumed = [
        "patches run reversed in blocks 2, 3 (from 0): as in the released code",
        "positions for images of 32x32 px (a square position table)",
        "the classifier or pooled vector reads the class token",
    ]
    card = (tmp_path / "a" / "README.md").read_text()
    assert all(f"assumed: {line}\n" in out and f"- {line}\n" in card for line in assumed)
    assert "# Adventurer\n" in card and "| mixer | state 4, heads of 8, 3 times as wide |" in card
    assert "arxiv.org/abs/2410.07599" in card and "github.com/wangf3014/Adventurer" in card
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {*WRITTEN} - {"modeling_jumbo.py"} | {"modeling_adventurer.py"}
    config = AutoConfig.from_pretrained(tmp_path / "a")
    shape = (config.state_size, config.head_dim, config.expand, config.conv_kernel, config.mlp_ratio)
    assert shape == (4, 8, 3, 3, 3) and config.image_size == 32 and config.num_labels == 6
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        model = AutoModelForImageClassification.from_pretrained(tmp_path / "a")
        assert max_error(model(images).logits, core(images)) < 1e-5


def test_adventurer_state_dicts_of_this_library_and_other_flips(tmp_path, capsys):
    images = torch.randn(1, 3, 16, 64)
    options = dict(img_size=(16, 64), patch_size=8, embed_dim=16, depth=3, d_state=4, head_dim=8)
    wide = AdventurerViT(**options, num_classes=4, multiplier=2, share_jumbo_ffn=False, flip="alternate").eval()
    torch.save(wide.state_dict(), tmp_path / "wide.pth")
    convert(tmp_path / "wide.pth", tmp_path / "wide", image_size=(16, 64))
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "wide")
    assert model.config.flip == "alternate" and model.config.multiplier == 2 and not model.config.share_jumbo_ffn
    with torch.no_grad():
        assert max_error(model(images).logits, wide(images)) < 1e-5
    card = (tmp_path / "wide" / "README.md").read_text()
    assert "reversed in every second block: the paper's rule" in card and "2 slices of a Jumbo token" in card

    for flip, wanted in (((0,), ["--flip", "0"]), ("alternate", ["--flip", "alternate"]), ((), ["--flip"])):
        core = adventurer_file(tmp_path / "flip.pth", flip=flip)
        main([str(tmp_path / "flip.pth"), str(tmp_path / "flip"), "--force", *wanted])
        blocks = {(): "no block", (0,): "blocks 0 (from 0)", "alternate": "every second block"}[flip]
        assert f"assumed: patches run reversed in {blocks}: as given" in capsys.readouterr().out
        model = AutoModelForImageClassification.from_pretrained(tmp_path / "flip")
        square = torch.randn(1, 3, 32, 32)
        with torch.no_grad():
            assert max_error(model(square).logits, core(square)) < 1e-5


def test_released_adventurer_size_is_named_on_the_card(tmp_path):
    options = dict(embed_dim=256, depth=12, d_state=64, head_dim=64, expand=2, conv_kernel=4, mlp_ratio=2.5)
    options |= dict(img_size=224, patch_size=16, num_classes=1000)
    adventurer_file(tmp_path / "adventurer_tiny.pth", **options)
    convert(tmp_path / "adventurer_tiny.pth", tmp_path / "tiny", size="tiny")
    card = (tmp_path / "tiny" / "README.md").read_text()
    assert "# Adventurer tiny\n" in card and "78.2 % top-1" in card and "| parameters | 11.6" in card
    assert AutoConfig.from_pretrained(tmp_path / "tiny").id2label[0] == "tench, Tinca tinca"
    processor = AutoImageProcessor.from_pretrained(tmp_path / "tiny")
    assert processor.size["shortest_edge"] == 256 and processor.crop_size["height"] == 224 and processor.resample == 3
    with pytest.raises(ValueError, match=r"size small has D=512.*the file has D=256"):
        convert(tmp_path / "adventurer_tiny.pth", tmp_path / "none", size="small")
    with pytest.raises(ValueError, match=r"size must be one of tiny, small, base, large, .*got 'pico'"):
        convert(tmp_path / "adventurer_tiny.pth", tmp_path / "none", size="pico")


def test_processor_of_fine_or_large_adventurers_crops_nothing_off():
    assert adventurer_image_processor(224, 8).size["shortest_edge"] == 224
    assert adventurer_image_processor(384).size["shortest_edge"] == 384
    assert adventurer_image_processor(128).size["shortest_edge"] == 146
    assert adventurer_image_processor(384, crop_pct=0.75, resample=2).size["shortest_edge"] == 512


def test_bad_adventurer_files_are_named(tmp_path):
    core = adventurer_file(tmp_path / "a.pth")
    for options, message in (
        (dict(num_attention_heads=2), "num_attention_heads was given, but the file holds an Adventurer"),
        (dict(flip=[4]), r"flip must be 'alternate' or block indices in 0\.\.3 .*got \[4\]"),
        (dict(image_size=(16, 32)), "means 2x4 patches of 8x8, the position table has 16"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(tmp_path / "a.pth", tmp_path / "out", **options)
    torch.save(JumboViT(32, 8, 3, 6, 16, 2, 2, 2).state_dict(), tmp_path / "jumbo.pth")
    with pytest.raises(ValueError, match="flip was given, but the file holds a Jumbo ViT"):
        convert(tmp_path / "jumbo.pth", tmp_path / "out", num_attention_heads=2, flip=[1])
    state = torch.load(tmp_path / "a.pth", weights_only=True)
    for lost, message in (
        ("layers.0.mixer.A_log", "not an Adventurer: the file has no blocks.0.mixer.A_log"),
        ("layers.1.mixer.D", r"missing \['encoder.blocks.1.mixer.D'\]"),
        ("norm_f.weight", r"missing \['encoder.norm.weight'\]"),
    ):
        torch.save({k: v for k, v in state.items() if k != lost}, tmp_path / "hole.pth")
        with pytest.raises(ValueError, match=message):
            convert(tmp_path / "hole.pth", tmp_path / "out")
    torch.save({**state, "head.weight": torch.zeros(6, 32)}, tmp_path / "head.pth")
    with pytest.raises(ValueError, match=r"the head reads 32 features.*reads 16.*the class token"):
        convert(tmp_path / "head.pth", tmp_path / "out")
    assert not (tmp_path / "out").exists() and core.encoder.flipped == {2, 3}
