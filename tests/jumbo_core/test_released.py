"""Published files: wrappers, prefixes, reports, refusals; timm's pretrained path through local files."""

import logging

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models._hub import save_config_for_hf

from jumbo_core.models import JumboViT, load_released
from tests.conftest import max_error

SIZES = dict(img_size=32, patch_size=8, num_classes=5, embed_dim=16, depth=2, num_heads=2, multiplier=2)


def published(**options) -> dict[str, torch.Tensor]:
    """A state dict under the names of the released code, dead class token included."""
    model = JumboViT(**{**SIZES, "init": "short", **options})
    state = {name.removeprefix("encoder."): value for name, value in model.state_dict().items()}
    return {**state, "cls_token": torch.zeros(1, 1, 16)}


def same_weights(model: JumboViT, state: dict[str, torch.Tensor]) -> bool:
    own = {name.removeprefix("encoder."): value for name, value in model.state_dict().items()}
    return all(torch.equal(own[name], value) for name, value in state.items() if name in own)


WRAPS = {
    "raw": lambda s: s,
    "model": lambda s: {"model": s, "epoch": 3},
    "state_dict": lambda s: {"state_dict": s},
    "ema": lambda s: {"state_dict": {}, "state_dict_ema": s},
    "module and model": lambda s: {"module": {"model": s}},
    "module.": lambda s: {f"module.{k}": v for k, v in s.items()},
    "model and module.": lambda s: {"model": {f"module.{k}": v for k, v in s.items()}},
}


FLAT = ("raw", "module.")  # a safetensors file holds no nested mapping


@pytest.mark.parametrize(
    ("wrap", "suffix"),
    [
        (wrap, suffix)
        for wrap in WRAPS
        for suffix in (".pth", ".safetensors", None)
        if suffix != ".safetensors" or wrap in FLAT
    ],
)
def test_sources(wrap, suffix, tmp_path):
    state = published()
    source = WRAPS[wrap](state)
    if suffix == ".pth":
        torch.save(source, tmp_path / "weights.pth")
        source = tmp_path / "weights.pth"
    elif suffix == ".safetensors":
        save_file(source, tmp_path / "weights.safetensors")
        source = str(tmp_path / "weights.safetensors")
    model = JumboViT(**SIZES)
    report = load_released(model, source)
    assert (report.missing, report.unexpected, report.ignored) == ([], [], ["cls_token"])
    assert same_weights(model, state)


def test_registers_baseline_keeps_its_class_token():
    model = JumboViT(**{**SIZES, "multiplier": 0, "registers": 4})
    state = {name.removeprefix("encoder."): torch.randn_like(value) for name, value in model.state_dict().items()}
    report = load_released(model, state)
    assert report.missing == report.unexpected == report.ignored == []
    assert same_weights(model, state)


def test_report_names_what_is_missing_and_unexpected(caplog):
    state = published()
    del state["norm.weight"]
    state["mystery"] = torch.zeros(1)
    with caplog.at_level(logging.WARNING):
        report = load_released(JumboViT(**SIZES), state)
    assert report.missing == ["encoder.norm.weight"]
    assert report.unexpected == ["mystery"]
    assert "mystery" in caplog.text


def test_headless_model_ignores_the_head():
    report = load_released(JumboViT(**{**SIZES, "num_classes": 0}), published())
    assert report.ignored == ["cls_token", "head.bias", "head.weight"]


def test_size_mismatch_names_both_shapes():
    with pytest.raises(ValueError, match=r"head.weight: file \(5, 48\), model \(9, 48\)"):
        load_released(JumboViT(**{**SIZES, "num_classes": 9}), published())
    with pytest.raises(ValueError, match=r"encoder.jumbo_token: file \(1, 2, 16\), model \(1, 3, 16\)"):
        load_released(JumboViT(**{**SIZES, "multiplier": 3, "num_classes": 0}), published())


def test_a_refused_file_leaves_the_model_untouched():
    model = JumboViT(**{**SIZES, "num_classes": 9})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="another shape"):
        load_released(model, published())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_positions_are_resampled_only_on_request():
    state = published()
    bigger = JumboViT(**{**SIZES, "img_size": (64, 32)})
    with pytest.raises(ValueError, match=r"pos_embed: file \(1, 16, 16\), model \(1, 32, 16\).*resample=True"):
        load_released(bigger, state)
    load_released(bigger, state, resample=True)
    reference = JumboViT(**SIZES)
    load_released(reference, state)
    reference.set_input_size((64, 32))
    assert max_error(bigger.pos_embed, reference.pos_embed) < 1e-6


def test_resampling_a_table_of_unknown_grid_is_refused():
    state = published(img_size=(16, 24))
    model = JumboViT(**SIZES)
    with pytest.raises(ValueError, match="position table of 6 entries: its grid is not square"):
        load_released(model, state, resample=True)
    load_released(model, state, resample=True, grid=(2, 3))
    reference = JumboViT(**{**SIZES, "img_size": (16, 24)})
    load_released(reference, state)
    reference.set_input_size(32)
    assert max_error(model.pos_embed, reference.pos_embed) < 1e-6


def test_same_count_on_another_grid_is_another_table(tmp_path):
    """196 published positions are 14x14, also for a model of 7x28."""
    state = published()  # 4x4
    wide = {**SIZES, "img_size": (16, 64)}  # 2x8
    with pytest.raises(ValueError, match="16 positions are a 4x4 grid, the model's are 2x8; resample=True"):
        load_released(JumboViT(**wide), state)
    reference = JumboViT(**SIZES)
    load_released(reference, state)
    reference.set_input_size((16, 64))
    model = JumboViT(**wide)
    load_released(model, state, resample=True)
    assert max_error(model.pos_embed, reference.pos_embed) < 1e-6
    torch.save(state, tmp_path / "jumbo.pth")
    overlay = dict(file=str(tmp_path / "jumbo.pth"), num_classes=5)
    via_timm = timm.create_model(
        "test_jumbo", pretrained=True, pretrained_cfg_overlay=overlay, num_classes=5, img_size=(16, 64)
    )
    assert max_error(via_timm.pos_embed, reference.pos_embed) < 1e-6
    load_released(model, state, grid=(2, 8))  # a caller who knows better
    assert torch.equal(model.pos_embed, state["pos_embed"])
    load_released(model, model.state_dict())  # our own layout: equal counts are equal grids


def test_wrong_files(tmp_path):
    model = JumboViT(**SIZES)
    with pytest.raises(FileNotFoundError, match=r"no weight file at .*absent\.pth"):
        load_released(model, tmp_path / "absent.pth")
    with pytest.raises(ValueError, match="no key of the file fits JumboViT"):
        load_released(model, {"conv1.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match="expected a state dict of named tensors"):
        load_released(model, {})
    with pytest.raises(ValueError, match=r"these are none: \['lr'\]"):
        load_released(model, {"lr": 0.1, "norm.weight": torch.zeros(16)})
    with pytest.raises(ValueError, match=r"these are none: \[0\]"):
        load_released(model, {0: torch.zeros(1)})
    for name in ("garbage.pth", "garbage.safetensors"):
        (tmp_path / name).write_bytes(b"not a weight file at all")
        with pytest.raises(ValueError, match=rf"{name} cannot be read as weights alone: it is damaged"):
            load_released(model, tmp_path / name)
    damaged = published()
    damaged["norm.weight"][3] = float("nan")
    with pytest.raises(ValueError, match=r"encoder\.norm\.weight in the file holds NaN"):
        load_released(model, damaged)


class Payload:
    def __reduce__(self):
        return (print, ("code ran",))


def test_loading_never_executes_code(tmp_path, capsys):
    torch.save({"model": published(), "extra": Payload()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match=r"evil\.pth cannot be read as weights alone"):
        load_released(JumboViT(**SIZES), tmp_path / "evil.pth")
    assert "code ran" not in capsys.readouterr().out


def test_timm_names_the_published_files():
    cfg = timm.models.get_pretrained_cfg("jumbo_tiny_patch16_224")
    assert (cfg.hf_hub_id, cfg.hf_hub_filename) == ("antofuller/jumbo", "jumbo_tiny.pth")
    assert timm.models.get_pretrained_cfg("jumbo_large_patch16_224").hf_hub_id is None
    listed = timm.list_models("jumbo_*", pretrained=True)
    assert listed == [f"jumbo_{size}_patch16_224.in1k" for size in ("base", "nano", "pico", "small", "tiny")]


def test_timm_pretrained_from_a_file(tmp_path):
    """A published 5-class file serves a model with another head, size and channel count, as timm users expect."""
    state = published()
    torch.save(state, tmp_path / "jumbo.pth")
    overlay = dict(file=str(tmp_path / "jumbo.pth"), num_classes=5)
    model = timm.create_model("test_jumbo", pretrained=True, pretrained_cfg_overlay=overlay, num_classes=5)
    assert same_weights(model, state)
    other = timm.create_model(
        "test_jumbo", pretrained=True, pretrained_cfg_overlay=overlay, num_classes=3, img_size=64, in_chans=1
    )
    assert other.head.out_features == 3
    assert torch.equal(other.blocks[1].attn.qkv.weight, state["blocks.1.attn.qkv.weight"])
    assert other.patch_embed.proj.weight.shape == (16, 1, 8, 8)


def test_timm_local_dir(tmp_path):
    """Saved by timm for the hub, opened again as local-dir: same answers."""
    model = timm.create_model("test_jumbo", num_classes=5, init="short").eval()
    timm.models.save_for_hf(model, tmp_path, model_config=dict(num_classes=5))
    opened = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    image = torch.randn(1, 3, 32, 32)
    assert torch.equal(opened(image), model(image))


def test_published_file_as_local_dir(tmp_path):
    """A folder with timm's config.json and the published .pth beside it opens as local-dir:."""
    state = published()
    model = timm.create_model("test_jumbo", num_classes=5)
    save_config_for_hf(model, tmp_path / "config.json", model_config=dict(num_classes=5))
    torch.save(state, tmp_path / "jumbo.pth")
    opened = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert same_weights(opened, state)
