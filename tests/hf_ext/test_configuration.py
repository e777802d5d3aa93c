"""JumboConfig: defaults, round trip, clear errors; the package without its host."""

import subprocess
import sys

import pytest

pytest.importorskip("transformers")
from transformers import AutoConfig

from hf_ext import JumboConfig


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
        (dict(drop_path_rate=1.0), r"drop_path_rate must be one rate in \[0, 1\)"),
        (dict(drop_path_rate=[0.1, 0.2]), r"12 of them .*got \[0.1, 0.2\]"),
        (dict(hidden_dropout_prob=-0.1), r"hidden_dropout_prob must lie in \[0, 1\), got -0.1"),
        (dict(patch_drop_rate=1.0), "patch_drop_rate"),
        (dict(mlp_ratio=0.0), "mlp_ratio must be greater than 0"),
        (dict(layer_scale="big"), "layer_scale"),
        (dict(layer_scale=-1.0), "layer_scale must be greater than 0, got -1.0"),
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "pip install 'jumbo-vit[hf]'" in done.stderr
