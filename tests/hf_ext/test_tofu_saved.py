"""Token fusion in saved folders: the plan in config.json, restored by from_pretrained, left out, refused."""

import copy
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    BitsAndBytesConfig,
    CLIPModel,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    Dinov2Backbone,
    DINOv3ViTModel,
    PreTrainedModel,
    ViTForImageClassification,
    ViTImageProcessor,
    ViTMAEForPreTraining,
    ViTModel,
    pipeline,
)
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from hf_ext import JumboBackbone, JumboForImageClassification, JumboModel, apply_tofu, remove_tofu
from hf_ext.tofu import register
from jumbo_core.tofu import FusionPlan, is_fused
from tests.hf_ext.fusion import FAMILIES, JUMBO, PLAN, clip, inputs

OPTIONS = {"proportional": True, "importance": "attention", "norm": "mean", "weights": "size", "order": "released"}
RECORD = {"ops": ["prune", "average", "mlerp"], "counts": [3, 2, 4], **OPTIONS}
MARK = {"quant_method": "tofu"}


def saved(model: PreTrainedModel, folder: Path) -> dict:
    """Save and read what the folder says."""
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def change(folder: Path, **entries) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))


@pytest.fixture
def vit(tmp_path):
    """A fused classifier and its folder."""
    model = FAMILIES["vit"].make(ViTForImageClassification, num_labels=5)
    apply_tofu(model, PLAN, **OPTIONS)
    config = saved(model, tmp_path)
    assert config["tofu"] == RECORD and config["quantization_config"] == MARK and config["model_type"] == "vit"
    return model, tmp_path


@pytest.mark.parametrize("cls", [ViTForImageClassification, AutoModelForImageClassification])
def test_stock_classes_restore_the_plan(cls, vit):
    model, folder = vit
    loaded, report = cls.from_pretrained(folder, output_loading_info=True)
    assert type(loaded) is ViTForImageClassification and is_fused(loaded)
    assert not any(report.values()), report
    given = inputs(model)
    assert torch.equal(loaded(**given).logits, model(**given).logits)
    assert not {"tofu", "quantization_config"} & loaded.config.to_dict().keys()
    # Nothing of a quantized model: it is cast, trained and saved like any other.
    assert not hasattr(loaded, "hf_quantizer") and not hasattr(loaded, "quantization_method")
    assert not getattr(loaded, "is_quantized", False) and not hasattr(loaded.config, "_is_quantized")
    assert saved(loaded, folder / "again") == json.loads((folder / "config.json").read_text())
    assert loaded.to(torch.float64).dtype == torch.float64
    restored = cls.from_pretrained(folder / "again")
    assert torch.equal(restored(**given).logits, model(**given).logits)


@pytest.mark.parametrize("cls", [ViTForImageClassification, AutoModelForImageClassification])
def test_loading_without_fusion(cls, vit):
    model, folder = vit
    given = inputs(model)
    plain = cls.from_pretrained(folder, tofu=None)
    assert not is_fused(plain) and not {"tofu", "quantization_config"} & plain.config.to_dict().keys()
    remove_tofu(model)
    assert torch.equal(plain(**given).logits, model(**given).logits)
    for other in (plain, model):  # and what was removed is not saved
        assert not {"tofu", "quantization_config"} & saved(other, folder / "plain").keys()
        assert not is_fused(cls.from_pretrained(folder / "plain"))


def test_another_plan_while_loading(vit):
    _, folder = vit
    loaded = ViTForImageClassification.from_pretrained(folder, tofu={"ops": ["prune"] * 3, "counts": [1, 0, 0]})
    assert loaded(**inputs(loaded), output_attentions=False).logits.shape == (2, 5)
    record = saved(loaded, folder / "again")["tofu"]
    assert record["counts"] == [1, 0, 0] and record["proportional"] is False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loading_options(dtype, vit):
    model, folder = vit
    loaded = AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    assert type(loaded) is ViTModel and is_fused(loaded)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert loaded.config._attn_implementation == "eager"
    given = inputs(model)
    config = AutoConfig.from_pretrained(folder)
    for _ in range(2):  # loading does not change it
        from_file = ViTForImageClassification.from_pretrained(folder, config=config)
        assert torch.equal(from_file(**given).logits, model(**given).logits)
    assert not is_fused(ViTForImageClassification.from_pretrained(folder, config=model.config))


def test_pipeline(vit):
    model, folder = vit
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    classify = pipeline("image-classification", model=str(folder), top_k=5)
    assert is_fused(classify.model)
    picture = Image.effect_mandelbrot((40, 40), (-2, -1.5, 1, 1.5), 50).convert("RGB")
    found = {entry["label"]: entry["score"] for entry in classify(picture)}
    pixels = ViTImageProcessor.from_pretrained(folder)(picture, return_tensors="pt")["pixel_values"]
    expected = model(pixels).logits.softmax(-1)[0]
    assert [found[f"LABEL_{i}"] for i in range(5)] == pytest.approx(expected.tolist(), abs=1e-6)


FOLDERS = {"dinov2": Dinov2Backbone, "dinov3": DINOv3ViTModel, "mae": ViTMAEForPreTraining, "clip": CLIPVisionModel}


@pytest.mark.parametrize("name", FOLDERS)
def test_other_models(name, tmp_path):
    model = FAMILIES[name].make(FOLDERS[name])
    apply_tofu(model, PLAN, proportional=True)
    given = inputs(model)
    saved(model, tmp_path)
    loaded = FOLDERS[name].from_pretrained(tmp_path)
    out, expected = loaded(**given), model(**given)
    assert is_fused(loaded)
    for key in ("feature_maps", "last_hidden_state", "logits"):
        if key in expected:
            pairs = zip(out[key], expected[key], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


def test_clip_towers(tmp_path):
    model = clip(CLIPModel)
    apply_tofu(model, PLAN)
    config = saved(model, tmp_path)
    assert config["tofu"] == config["vision_config"]["tofu"] and "tofu" not in config["text_config"]
    images = torch.randn(2, 3, 32, 32)
    expected = model.get_image_features(images).pooler_output
    whole = CLIPModel.from_pretrained(tmp_path)
    assert torch.equal(whole.get_image_features(images).pooler_output, expected)
    assert torch.equal(CLIPVisionModelWithProjection.from_pretrained(tmp_path)(images).image_embeds, expected)
    plain = CLIPModel.from_pretrained(tmp_path, tofu=None)
    remove_tofu(whole)
    for other in (plain, whole):
        assert not is_fused(other) and '"tofu"' not in json.dumps(saved(other, tmp_path / "plain"))


@pytest.mark.parametrize("cls", [JumboForImageClassification, AutoModelForImageClassification])
def test_our_own_models(cls, tmp_path):
    model = JUMBO["jumbo registers"].make(JumboForImageClassification, num_labels=5)
    given = inputs(model)
    plain = model(**given).logits
    apply_tofu(model, PLAN, **OPTIONS)
    fused = model(**given).logits
    config = saved(model, tmp_path)
    assert config["tofu"] == RECORD and "quantization_config" not in config
    loaded, _ = cls.from_pretrained(tmp_path, output_loading_info=True)
    assert torch.equal(loaded(**given).logits, fused) and saved(loaded, tmp_path / "again")["tofu"] == RECORD
    assert is_fused(JumboModel.from_pretrained(tmp_path)) and is_fused(JumboBackbone.from_pretrained(tmp_path))
    unfused = cls.from_pretrained(tmp_path, tofu=None)
    assert torch.equal(unfused(**given).logits, plain)
    remove_tofu(loaded)
    for other in (unfused, loaded):
        assert saved(other, tmp_path / "plain").get("tofu") is None
        assert not is_fused(cls.from_pretrained(tmp_path / "plain"))


@pytest.mark.parametrize("own", [False, True], ids=["vit", "jumbo"])
@pytest.mark.parametrize(
    "entry, message",
    [
        ({"ops": ["prune"] * 4, "counts": [1] * 4}, "the plan is for 4 blocks, the model has 3"),
        ({"ops": ["prune"] * 3, "counts": [9] * 3}, "block 0 is to remove 9 tokens, but of 16 patches at most 8"),
        ({"ops": ["melt"] * 3, "counts": [1] * 3}, "ops must be among 'prune', 'average', 'mlerp', got 'melt'"),
        ({"counts": [1] * 3}, "tofu must be an object with ops, counts and possibly proportional, importance, norm,"),
        ({**RECORD, "speed": 2}, r"possibly .*: \['counts', .*'speed'"),
        ({**RECORD, "norm": "min"}, "norm must be one of .*, got 'min'"),
    ],
    ids=["depth", "r", "operator", "no operators", "unknown", "option"],
)
def test_plans_that_do_not_fit(own, entry, message, tmp_path):
    cls = JumboForImageClassification if own else ViTForImageClassification
    model = (JUMBO["jumbo"] if own else FAMILIES["vit"]).make(cls, num_labels=5)
    apply_tofu(model, PLAN)
    saved(model, tmp_path)
    change(tmp_path, tofu=entry)
    with pytest.raises(
        ValueError, match=f"token fusion in the configuration does not fit this {cls.__name__}: .*{message}"
    ):
        cls.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Load with tofu=None to leave it out"):
        AutoModelForImageClassification.from_pretrained(tmp_path)
    assert not is_fused(cls.from_pretrained(tmp_path, tofu=None))


def test_changed_depth(vit):
    _, folder = vit
    with pytest.raises(ValueError, match="the plan is for 3 blocks, the model has 2"):
        ViTForImageClassification.from_pretrained(folder, num_hidden_layers=2)


def test_real_quantization(vit, tmp_path):
    """One entry in config.json, one quantizer: whoever has both is told."""
    _, folder = vit
    with pytest.raises(ValueError, match="quantized with TokenFusionConfig but you are passing a BitsAndBytesConfig"):
        ViTForImageClassification.from_pretrained(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    model = FAMILIES["vit"].make(ViTForImageClassification)
    model.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.warns(UserWarning, match=r"ViTForImageClassification is fused, but .* quantization \(bitsandbytes\)"):
        handle = apply_tofu(model, PLAN)
    assert is_fused(model) and "tofu" not in saved(model, tmp_path)
    handle.remove()
    assert model.config.quantization_config.load_in_8bit  # not ours to remove
    own = JUMBO["jumbo"].make(JumboModel)
    own.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    apply_tofu(own, PLAN)
    config = saved(own, tmp_path)
    assert config["tofu"]["counts"] == [3, 2, 4] and config["quantization_config"]["load_in_8bit"]


def test_quantized_since(tmp_path):
    model = FAMILIES["vit"].make(ViTForImageClassification)
    apply_tofu(model, PLAN)
    model.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.warns(UserWarning, match=r"a saved copy will not be: its quantization \(bitsandbytes\)"):
        config = saved(model, tmp_path)
    assert "tofu" not in config and config["quantization_config"]["load_in_8bit"]


OWN = pytest.mark.parametrize("own", [False, True], ids=["vit", "jumbo"])


@OWN
def test_models_that_share_a_configuration(own, tmp_path):
    """The plan is the fused model's alone: who else has the configuration, before or after, saves none."""
    cls = JumboForImageClassification if own else ViTForImageClassification
    fused = (JUMBO["jumbo"] if own else FAMILIES["vit"]).make(cls, num_labels=5)
    before, as_it_was = cls(fused.config), fused.config.to_dict()
    handle = apply_tofu(fused, PLAN)
    after, other_plan = cls(fused.config), cls(fused.config)
    apply_tofu(other_plan, FusionPlan.paper(3, 1))
    assert fused.config is before.config is after.config and fused.config.to_dict() == as_it_was
    for i, plain in enumerate((before, after)):
        assert not is_fused(plain)
        assert saved(plain, tmp_path / str(i)).keys().isdisjoint({"tofu", "quantization_config"})
        assert not is_fused(cls.from_pretrained(tmp_path / str(i)))
    before.set_attn_implementation("eager")  # reaches all of them, as ever
    assert fused.config._attn_implementation == "eager"
    assert saved(fused, tmp_path / "fused")["tofu"]["counts"] == [3, 2, 4]
    handle.remove()
    assert saved(other_plan, tmp_path / "other")["tofu"]["counts"] == [1, 1, 1]
    assert is_fused(cls.from_pretrained(tmp_path / "other"))
    assert "tofu" not in saved(fused, tmp_path / "removed")


def test_copies_save_their_own_plan(vit):
    model, folder = vit
    other = copy.deepcopy(model)
    remove_tofu(model)
    assert "tofu" not in saved(model, folder / "removed") and saved(other, folder / "copy")["tofu"] == RECORD
    assert inspect.signature(other.save_pretrained) == inspect.signature(model.save_pretrained)


def test_fusion_taken_out_of_a_part(vit):
    model, folder = vit
    remove_tofu(model.vit)
    assert not is_fused(model) and "tofu" not in saved(model, folder / "plain")


@OWN
def test_models_made_from_the_configuration_of_a_folder(own, tmp_path):
    cls = JumboForImageClassification if own else ViTForImageClassification
    fused = (JUMBO["jumbo"] if own else FAMILIES["vit"]).make(cls, num_labels=5)
    apply_tofu(fused, PLAN)
    saved(fused, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    if not own:  # as documented
        del config.tofu, config.quantization_config
    model = AutoModelForImageClassification.from_config(config)
    assert not is_fused(model) and "tofu" not in saved(model, tmp_path / "new")
    assert not is_fused(cls.from_pretrained(tmp_path / "new"))
    assert not own or config.tofu["counts"] == [3, 2, 4]  # saving left it alone


def test_registering_again_changes_nothing():
    before = dict(AUTO_QUANTIZER_MAPPING)
    register()
    assert before == AUTO_QUANTIZER_MAPPING and "tofu" in before


def test_without_this_package(vit, tmp_path):
    """Plain Transformers warns, loads the plain model and keeps the plan when it saves."""
    model, folder = vit
    given = inputs(model)
    torch.save(given["pixel_values"], folder / "images.pt")
    code = (
        "import sys, torch\n"
        "from transformers import AutoModelForImageClassification\n"
        "model = AutoModelForImageClassification.from_pretrained('.')\n"
        "torch.save(model(torch.load('images.pt')).logits.detach(), 'logits.pt')\n"
        "model.save_pretrained('again')\n"
        "assert not {'hf_ext', 'jumbo_core'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Unknown quantization type, got tofu" in done.stderr
    assert torch.equal(
        ViTForImageClassification.from_pretrained(folder / "again")(**given).logits, model(**given).logits
    )
    remove_tofu(model)
    assert torch.allclose(torch.load(folder / "logits.pt"), model(**given).logits, atol=1e-6)


def test_a_plan_of_nothing(tmp_path):
    """r = 0 everywhere is a plan too: it is kept."""
    model = FAMILIES["vit"].make()
    apply_tofu(model, FusionPlan.paper(3, 0))
    assert saved(model, tmp_path)["tofu"]["counts"] == [0, 0, 0]
    assert is_fused(ViTModel.from_pretrained(tmp_path))
