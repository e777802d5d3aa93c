"""AdventurerConfig: defaults, round trip, clear errors, changes of a saved one."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoConfig

from hf_ext import AdventurerBackbone, AdventurerConfig, AdventurerForImageClassification, AdventurerModel
from jumbo_core.models import AdventurerViT


def test_defaults_are_the_core_and_the_released_tiny():
    config = AdventurerConfig()
    with torch.device("meta"):
        core, ours = AdventurerViT(num_classes=0), AdventurerModel(config).vit
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in core.state_dict().items()}
    assert ours.encoder.flipped == core.encoder.flipped == {1, 3, 5, 7, 9, 11}
    assert config.out_features == ["stage12"] and config.drop_path_rate == 0 and config.layer_norm_eps == 1e-5


@pytest.mark.parametrize("flip", ["alternate", [2, 1], []])
def test_round_trip(tmp_path, flip):
    config = AdventurerConfig(
        image_size=(32, 64),
        patch_size=8,
        hidden_size=24,
        num_hidden_layers=3,
        state_size=4,
        head_dim=6,
        expand=1.5,
        conv_kernel=3,
        multiplier=2,
        flip=flip,
        drop_path_rate=[0.0, 0.1, 0.2],
        id2label={0: "a", 1: "b", 2: "c"},
        out_features=["stage1", "stage3"],
    )
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["flip"] == ([1, 2] if flip == [2, 1] else flip)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is AdventurerConfig and loaded.num_labels == 3 and loaded.out_indices == [1, 3]
    own, read = config.to_dict(), loaded.to_dict()
    assert {k: v for k, v in own.items() if k != "_name_or_path"} == {k: read[k] for k in own if k != "_name_or_path"}
    encoder = AdventurerModel(loaded).vit.encoder
    mixer = encoder.blocks[0].mixer
    assert encoder.flipped == ({1} if flip == "alternate" else set(flip))
    assert (mixer.inner, mixer.num_heads, mixer.d_state, mixer.conv_kernel) == (36, 6, 4, 3)
    assert [getattr(block.drop_path, "drop_prob", 0) for block in encoder.blocks] == [0.0, 0.1, 0.2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(hidden_size=100), r"head_dim 64 does not divide the mixer's width 200 \(expand 2 x hidden_size 100\)"),
        (dict(head_dim=96), r"head_dim 96 does not divide the mixer's width 512 \(expand 2 x hidden_size 256\)"),
        (dict(expand=0.001, hidden_size=16), r"does not divide the mixer's width 0 \(expand 0.001 x hidden_size 16\)"),
        (dict(expand=0), "expand must be a finite number above 0, got 0"),
        (dict(state_size=0), "state_size must be an integer of at least 1, got 0"),
        (dict(conv_kernel=True), "conv_kernel"),
        (dict(multiplier=-1), "multiplier must be an integer of at least 0, got -1"),
        (dict(flip="never"), r"flip must be 'alternate' or block indices in 0\.\.11 .*got 'never'"),
        (dict(flip=[12]), r"flip must be 'alternate' or block indices in 0\.\.11 .*got \[12\]"),
        (dict(flip=[-1]), "flip must be an integer of at least 0, got -1"),
        (dict(flip=[2, 2]), r"each once, got \[2, 2\]"),
        (dict(flip=2), "flip"),
        (dict(image_size=225), r"image_size height 225 is not a multiple of patch_size 16; use 224"),
        (dict(drop_path_rate=[0.1, 0.2]), r"12 of them .*got \[0.1, 0.2\]"),
        (dict(patch_drop_rate=1.0), r"patch_drop_rate must lie in \[0, 1\), got 1.0"),
        (dict(init="zero"), "init must be 'released' or 'short', got 'zero'"),
        (dict(out_features=["stage13"]), "stage13"),
    ],
)
def test_bad_values_are_named(options, message):
    with pytest.raises(Exception, match=message):
        AdventurerConfig(**options)


def test_numpy_numbers_are_numbers(tmp_path):
    options = dict(image_size=32, hidden_size=64, num_hidden_layers=2, state_size=8, head_dim=32)
    config = AdventurerConfig(**{k: np.int64(v) for k, v in options.items()}, flip=[np.int64(1)], expand=np.float32(2))
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).flip == [1] and type(config.state_size) is int


def test_changed_while_loading_is_checked_again(tmp_path):
    shape = dict(image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=3, state_size=4, head_dim=8)
    AdventurerForImageClassification(AdventurerConfig(**shape, flip=[1, 2])).save_pretrained(tmp_path)
    two = AdventurerBackbone.from_pretrained(tmp_path, num_hidden_layers=2, flip="alternate")
    assert two.config.stage_names == ["stem", "stage1", "stage2"] and two.out_features == ["stage2"]
    for changes, message in (
        (dict(num_hidden_layers=2), r"block indices in 0\.\.1 .*got \[1, 2\]"),
        (dict(head_dim=5), r"head_dim 5 does not divide the mixer's width 32 \(expand 2 x hidden_size 16\)"),
        (dict(out_features=["stage4"]), "stage4"),
    ):
        with pytest.raises(ValueError, match=message):
            AutoConfig.from_pretrained(tmp_path, **changes)
        with pytest.raises(ValueError, match=message):
            AdventurerModel.from_pretrained(tmp_path, **changes)
    config = AutoConfig.from_pretrained(tmp_path)
    config.head_dim = 5
    with pytest.raises(ValueError, match="head_dim 5"):
        AdventurerModel(config)
