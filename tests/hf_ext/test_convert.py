"""Conversion of published weights: golden numbers, labels, errors, folders that open without an import of ours."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.conftest import max_error

pytest.importorskip("transformers")
from huggingface_hub import HfApi, ModelCard
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    pipeline,
)

from hf_ext import JumboForImageClassification, JumboModel, jumbo_image_processor
from hf_ext.convert import WRITTEN, convert, main
from hf_ext.labels import imagenet_labels, read_labels
from jumbo_core.models import JumboViT


def released_file(path, wrap=lambda state: state, **options):
    """A file as the authors publish them: their names, the dead class token, raw tensors."""
    options = {
        **dict(img_size=32, patch_size=8, num_classes=6, embed_dim=16, depth=2, num_heads=2, multiplier=2),
        **options,
    }
    torch.manual_seed(1)
    core = JumboViT(**options).eval()
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    state = {key.removeprefix("encoder."): value for key, value in core.state_dict().items()}
    state["cls_token"] = torch.zeros(1, 1, options["embed_dim"])
    torch.save(wrap(state), path)
    return core


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A converted folder and the core model it came from."""
    root = tmp_path_factory.mktemp("convert")
    core = released_file(root / "jumbo.pth")
    report = convert(root / "jumbo.pth", root / "jumbo", num_attention_heads=2)
    assert report.ignored == ["cls_token"]
    return root / "jumbo", core


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 48, 3), dtype=np.uint8))


def test_golden_through_a_converted_folder(golden, tmp_path):
    height, width = golden["input"].shape[-2:]
    convert(
        golden.path, tmp_path / "out", num_attention_heads=golden.arguments["num_heads"], image_size=(height, width)
    )
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        out = model(golden["input"], output_hidden_states=True)
        tokens = AutoModel.from_pretrained(tmp_path / "out")(golden["input"]).last_hidden_state
    assert max_error(out.logits, golden["logits"]) < 1e-5
    assert max_error(tokens, golden["features"]) < 1e-5
    assert len(out.hidden_states) == len(golden.blocks) + 1
    for ours, theirs in zip(out.hidden_states[1:], golden.blocks, strict=True):
        assert max_error(ours, theirs) < 1e-5


def test_pipeline_gives_what_manual_preprocessing_gives(folder, photo):
    path, core = folder
    answers = pipeline("image-classification", model=str(path))(photo)
    pixels = AutoImageProcessor.from_pretrained(path)(photo, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        scores = core(pixels)[0].softmax(0)
    assert [a["label"] for a in answers] == [f"LABEL_{i}" for i in scores.argsort(descending=True)[:5]]
    assert [a["score"] for a in answers] == pytest.approx(scores.sort(descending=True).values[:5].tolist(), abs=1e-6)


@pytest.mark.parametrize("backend", ["torchvision", "pil"])
def test_processor_is_the_released_transform(folder, photo, backend):
    from torchvision.transforms.v2 import functional as F

    processor = AutoImageProcessor.from_pretrained(folder[0], backend=backend)
    pixels = processor(photo, return_tensors="pt")["pixel_values"]
    resized = F.resize(F.pil_to_tensor(photo), [32], interpolation=F.InterpolationMode.BILINEAR, antialias=True)
    image = F.center_crop(resized, [32, 32]).float() / 255
    expected = F.normalize(image, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])[None]
    assert max_error(pixels, expected) < 0.02  # one grey level of 255 is 0.0175 here
    wide = jumbo_image_processor((24, 48), backend=backend)(photo, return_tensors="pt")["pixel_values"]
    assert wide.shape == (1, 3, 24, 48)
    with pytest.raises(ValueError, match=r"crop_pct must lie in \(0, 1\], got 0"):
        jumbo_image_processor(crop_pct=0)


REMOTE = """
import sys
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline
assert "hf_ext" not in sys.modules
folder, again = sys.argv[1:]
model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
assert type(model).__module__ == "hf_ext.modeling_jumbo", type(model)
model.save_pretrained(again)
AutoImageProcessor.from_pretrained(folder).save_pretrained(again)
import os
print(sorted(os.listdir(again)))
print(pipeline("image-classification", model=again, trust_remote_code=True)(os.path.join(folder, "photo.png"))[0])
"""


def test_trust_remote_code_opens_the_folder_in_a_fresh_process(folder, photo, tmp_path):
    path, _ = folder
    photo.save(path / "photo.png")
    done = subprocess.run(
        [sys.executable, "-c", REMOTE, str(path), str(tmp_path / "again")],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    files, answer = done.stdout.strip().splitlines()[-2:]
    assert "modeling_jumbo.py" in files and "configuration_jumbo.py" not in files
    expected = pipeline("image-classification", model=str(path))(photo)[0]
    assert expected["label"] in answer
    carried = (tmp_path / "again" / "modeling_jumbo.py").read_text()
    assert carried == (path / "modeling_jumbo.py").read_text() and len(carried.splitlines()) < 12


def test_other_kinds_of_files(tmp_path):
    images = torch.randn(1, 3, 32, 32)
    wrapped = released_file(tmp_path / "a.pth", lambda s: {"model": {f"module.{k}": v for k, v in s.items()}})
    convert(tmp_path / "a.pth", tmp_path / "a", num_attention_heads=2)
    options = dict(registers=3, share_jumbo_ffn=False, layer_scale=1e-4)
    timm_saved = JumboViT(32, 8, 3, 4, 16, 2, 2, 3, **options).eval()
    torch.save(timm_saved.state_dict(), tmp_path / "b.pth")
    convert(tmp_path / "b.pth", tmp_path / "b", num_attention_heads=2)
    baseline = JumboViT(32, 8, 1, 4, 16, 2, 2, 0, registers=4).eval()
    torch.save(baseline.state_dict(), tmp_path / "c.pth")
    convert(tmp_path / "c.pth", tmp_path / "c", num_attention_heads=2)
    with torch.no_grad():
        for core, name in ((wrapped, "a"), (timm_saved, "b"), (baseline, "c")):
            model = AutoModelForImageClassification.from_pretrained(tmp_path / name)
            x = images[:, : model.config.num_channels]
            assert max_error(model(x).logits, core(x)) < 1e-5
        headless = JumboViT(32, 8, 3, 0, 16, 2, 2, 2).eval()
        torch.save(headless.state_dict(), tmp_path / "d.pth")
        convert(tmp_path / "d.pth", tmp_path / "d", num_attention_heads=2)
        model = AutoModel.from_pretrained(tmp_path / "d")
        assert type(model) is JumboModel and max_error(model(images).pooler_output, headless(images)) < 1e-5
    assert "image-feature-extraction" in (tmp_path / "d" / "README.md").read_text()


def test_released_size_is_recognised_and_named_on_the_card(tmp_path):
    options = dict(embed_dim=96, depth=12, num_heads=3, multiplier=6, num_classes=1000, patch_size=16)
    released_file(tmp_path / "jumbo_pico.pth", **options)
    convert(tmp_path / "jumbo_pico.pth", tmp_path / "pico")
    config = AutoConfig.from_pretrained(tmp_path / "pico")
    assert config.num_attention_heads == 3 and config.id2label[0] == "tench, Tinca tinca"
    assert len(config.label2id) == 1000
    card = (tmp_path / "pico" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: image-classification\n")
    assert "# Jumbo ViT pico" in card and "69.156" in card and "arxiv.org/abs/2502.15021" in card
    with pytest.raises(ValueError, match=r"size nano has D=128.*the file has D=96"):
        convert(tmp_path / "jumbo_pico.pth", tmp_path / "nano", size="nano")


def test_folder_is_never_overwritten_unasked(tmp_path):
    released_file(tmp_path / "jumbo.pth")
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty"):
        convert(tmp_path / "jumbo.pth", out, num_attention_heads=2)
    assert [p.name for p in out.iterdir()] == ["precious.txt"]
    with pytest.raises(ValueError, match="give --num-attention-heads"):
        convert(tmp_path / "jumbo.pth", out, force=True)
    assert (out / "precious.txt").exists()  # a failed conversion deletes nothing
    convert(tmp_path / "jumbo.pth", out, num_attention_heads=2, force=True)
    assert (out / "model.safetensors").exists() and (out / "precious.txt").read_text() == "mine"
    # Beside its source, as `convert jumbo.pth . --force` does; never over it.
    convert(tmp_path / "jumbo.pth", tmp_path, num_attention_heads=2, force=True)
    assert {*WRITTEN, "jumbo.pth", "out"} == {p.name for p in tmp_path.iterdir()}
    again = tmp_path / "model.safetensors"
    before = again.read_bytes()
    with pytest.raises(FileExistsError, match=r"model\.safetensors would be overwritten"):
        convert(again, tmp_path, num_attention_heads=2, force=True)
    assert again.read_bytes() == before
    with pytest.raises(FileExistsError, match="is a file"):
        convert(tmp_path / "jumbo.pth", tmp_path / "jumbo.pth", num_attention_heads=2)


def test_bad_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.pth"):
        convert(tmp_path / "nothing.pth", tmp_path / "out")
    core = released_file(tmp_path / "jumbo.pth", img_size=(16, 64))
    with pytest.raises(ValueError, match=r"--image-size 32 64 means 4x8 patches of 8x8, the position table has 16"):
        convert(tmp_path / "jumbo.pth", tmp_path / "out", num_attention_heads=2, image_size=(32, 64))
    state = core.state_dict()
    cases = {
        "no_blocks": ({k: v for k, v in state.items() if "mlp" not in k}, "not a Jumbo ViT"),
        "hole": ({k: v for k, v in state.items() if k != "encoder.norm.bias"}, r"missing \['encoder.norm.bias'\]"),
        "stranger": ({**state, "extra": torch.zeros(1)}, r"unexpected \['extra'\]"),
        "broken": ({**state, "pos_embed": state["pos_embed"] / 0}, "NaN or infinite"),
        "other_head": ({**state, "head.weight": torch.zeros(6, 16)}, "the head reads 16 features"),
    }
    for name, (content, message) in cases.items():
        torch.save(content, tmp_path / f"{name}.pth")
        with pytest.raises(ValueError, match=message):
            convert(tmp_path / f"{name}.pth", tmp_path / "out", num_attention_heads=2, image_size=(16, 64))
    assert not (tmp_path / "out").exists()


def test_labels(tmp_path):
    assert len(set(imagenet_labels())) == 1000
    (tmp_path / "list.json").write_text(json.dumps(["a", "b"]))
    (tmp_path / "map.json").write_text(json.dumps({"1": "b", "0": "a"}))
    (tmp_path / "lines.txt").write_text("a\nb\n")
    for name in ("list.json", "map.json", "lines.txt"):
        assert read_labels(tmp_path / name, 2) == ["a", "b"]
        with pytest.raises(ValueError, match="2"):
            read_labels(tmp_path / name, 3)
    (tmp_path / "twice.txt").write_text("a\na\n")
    with pytest.raises(ValueError, match=r"unique.*\['a'\]"):
        read_labels(tmp_path / "twice.txt", 2)


def test_command_line(tmp_path, capsys):
    released_file(tmp_path / "jumbo.pth", num_classes=2)
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    arguments = [str(tmp_path / "jumbo.pth"), str(tmp_path / "out"), "--num-attention-heads", "2"]
    main([*arguments, "--id2label", str(tmp_path / "names.txt")])
    out = capsys.readouterr().out
    assumed = [
        "2 attention heads (as given)",
        "positions for images of 32x32 px (a square position table)",
        "the classifier or pooled vector reads [Jumbo token ; mean of the patches]",
    ]
    card = (tmp_path / "out" / "README.md").read_text()
    assert all(f"assumed: {line}\n" in out and f"- {line}\n" in card for line in assumed)
    assert "ignored keys of the file: cls_token" in out and "D=16, 2 blocks, J=2" in out
    assert AutoConfig.from_pretrained(tmp_path / "out").id2label == {0: "cat", 1: "dog"}
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2 and "not empty" in capsys.readouterr().err
    (tmp_path / "damaged.pth").write_bytes((tmp_path / "jumbo.pth").read_bytes()[:500])
    torch.save({"model": Path("an object")}, tmp_path / "unsafe.pth")
    for name in ("damaged.pth", "unsafe.pth"):
        with pytest.raises(SystemExit) as stop:
            main([str(tmp_path / name), str(tmp_path / "none")])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and name in error and "Traceback" not in error
    assert not (tmp_path / "none").exists()


def test_push_to_hub_uploads_what_is_saved(folder, tmp_path, monkeypatch):
    """The host's own method up to the point where bytes would leave the machine."""
    sent = {}

    def create_commit(self, repo_id, operations, **kwargs):
        sent.update({o.path_in_repo: Path(o.path_or_fileobj).read_bytes() for o in operations})

    def create_repo(self, repo_id, **kwargs):
        return SimpleNamespace(repo_id=repo_id)

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    monkeypatch.setattr(
        "transformers.utils.hub.create_and_tag_model_card", lambda *_, **__: ModelCard.load(folder[0] / "README.md")
    )
    model = JumboForImageClassification.from_pretrained(folder[0])
    model.push_to_hub("someone/jumbo")
    model.save_pretrained(tmp_path)
    saved = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(saved) == {"config.json", "model.safetensors", "modeling_jumbo.py"}
    assert {name: content for name, content in sent.items() if name != "README.md"} == saved
    card = ModelCard(sent["README.md"].decode())
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "image-classification"
    assert "jumbo-vit" in card.data.tags
