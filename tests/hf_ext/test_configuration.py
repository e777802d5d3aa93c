"""JumboConfig: defaults, round trip, clear errors; the package without its host."""

import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModel

from hf_ext import JumboBackbone, JumboConfig, JumboForImageClassification, JumboModel, jumbo_image_processor


def test_round_trip(tmp_path):
    config = JumboConfig(
        image_size=(32, 64),
        patch_size=8,
        num_hidden_layers=3,
        drop_path_rate=[0.0, 0.1, 0.2],
        layer_scale=1e-4,
        id2label={0: "a", 1: "b", 2: "c"},
        out_features=["stage1", "stage3"],
    )
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is JumboConfig and loaded.num_labels == 3 and loaded.out_indices == [1, 3]
    assert loaded.image_sides == (32, 64) and list(loaded.drop_path_rate) == [0.0, 0.1, 0.2]
    own, read = config.to_dict(), loaded.to_dict()
    assert {k: v for k, v in own.items() if k != "_name_or_path"} == {k: read[k] for k in own if k != "_name_or_path"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(hidden_size=10, num_attention_heads=3), "hidden_size 10 is not divisible by num_attention_heads 3"),
        (dict(image_size=225), r"image_size height 225 is not a multiple of patch_size 16; use 224"),
        (dict(image_size=(224, 230)), "image_size width 230"),
        (dict(image_size=(1, 2, 3)), "image_size"),
        (dict(multiplier=-1), "multiplier must be an integer of at least 0, got -1"),
        (dict(multiplier=2.5), "multiplier"),
        (dict(num_hidden_layers=0), "num_hidden_layers must be an integer of at least 1, got 0"),
        (dict(registers=True), "registers"),
        (dict(drop_path_rate=1.0), r"drop_path_rate must lie in \[0, 1\), got 1.0"),
        (dict(drop_path_rate=[0.1, 0.2]), r"12 of them .*got \[0.1, 0.2\]"),
        (dict(hidden_dropout_prob=-0.1), r"hidden_dropout_prob must lie in \[0, 1\), got -0.1"),
        (dict(patch_drop_rate=1.0), "patch_drop_rate"),
        (dict(mlp_ratio=0.0), "mlp_ratio must be a finite number above 0, got 0.0"),
        (dict(layer_scale="big"), "layer_scale"),
        (dict(layer_scale=-1.0), "layer_scale must be a finite number above 0, got -1.0"),
        (dict(share_jumbo_ffn=1), "share_jumbo_ffn"),
        (dict(image_size="224"), "image_size"),
        (dict(init="zero"), "init must be 'released' or 'short', got 'zero'"),
        (dict(out_features=["stage13"]), "stage13"),
    ],
)
def test_bad_values_are_named(options, message):
    with pytest.raises(Exception, match=message):
        JumboConfig(**options)


def test_dynamic_padding_allows_any_image_size():
    assert JumboConfig(image_size=225, dynamic_img_pad=True).image_size == 225


def test_without_transformers_the_error_names_the_extra():
    code = "import sys; sys.modules['transformers'] = None; import hf_ext"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "pip install 'jumbo-vit[hf]'" in done.stderr


def test_a_host_too_old_is_named_with_the_version_wanted(tmp_path):
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text('__version__ = "4.57.1"\n')
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import hf_ext"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    error = done.stderr.strip().splitlines()[-1]
    assert "transformers>=5.24,<6" in error and "jumbo-vit[hf]" in error and "found transformers 4.57.1" in error


# --- changes of a saved configuration ---


@pytest.fixture
def saved(tmp_path):
    """A model of three blocks and a 4x4 grid, saved."""
    shape = dict(image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, multiplier=2)
    JumboForImageClassification(JumboConfig(**shape)).save_pretrained(tmp_path)
    return tmp_path


def test_changed_while_loading_is_checked_again(saved):
    two = JumboBackbone.from_pretrained(saved, num_hidden_layers=2)
    assert two.config.stage_names == ["stem", "stage1", "stage2"] and two.out_features == ["stage2"]
    assert two(torch.randn(1, 3, 32, 32)).feature_maps[0].shape == (1, 16, 4, 4)
    assert AutoConfig.from_pretrained(saved, out_indices=[1]).out_features == ["stage1"]
    for changes, message in (
        (dict(patch_drop_rate=1.5), r"patch_drop_rate must lie in \[0, 1\), got 1.5"),
        (dict(num_attention_heads=3), "hidden_size 16 is not divisible by num_attention_heads 3"),
        (dict(out_features=["stage4"]), "stage4"),
    ):
        with pytest.raises(ValueError, match=message):
            AutoConfig.from_pretrained(saved, **changes)
        with pytest.raises(ValueError, match=message):
            JumboModel.from_pretrained(saved, **changes)
    config = AutoConfig.from_pretrained(saved)
    config.patch_drop_rate = 1.5
    with pytest.raises(ValueError, match="patch_drop_rate"):
        JumboModel(config)
    config.patch_drop_rate, config.num_hidden_layers = 0.0, 1
    assert JumboBackbone(config).stage_names == ["stem", "stage1"] and config.out_indices == [1]


def test_positions_of_another_grid_are_never_shared_silently(saved):
    message = r"a 4x4 grid \(image_size 32\), image_size \[16, 64\] makes 2x8"
    with pytest.raises(ValueError, match=message):
        AutoModel.from_pretrained(saved, image_size=[16, 64])
    with pytest.raises(ValueError, match=message):
        JumboModel.from_pretrained(saved, config=AutoConfig.from_pretrained(saved, image_size=[16, 64]))
    model = JumboModel.from_pretrained(saved)
    model.vit.set_input_size((16, 64))
    model.save_pretrained(saved / "wide")
    wide = AutoModel.from_pretrained(saved / "wide")
    assert wide.config.image_sides == (16, 64) and wide.vit.patch_embed.grid_size == (2, 8)
    assert torch.equal(wide.vit.pos_embed, model.vit.pos_embed)


def test_numpy_numbers_are_numbers(tmp_path):
    options = dict(image_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, multiplier=2)
    config = JumboConfig(**{k: np.int64(v) for k, v in options.items()}, drop_path_rate=np.float32(0.5))
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_dict()["image_size"] == 32 and type(config.multiplier) is int
    assert JumboConfig(image_size=(np.int64(32), np.int32(64))).image_sides == (32, 64)
    for size in (np.int64(32), (np.int64(32), 32)):
        assert jumbo_image_processor(size).crop_size["height"] == 32
