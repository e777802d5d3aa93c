"""Weight files of the linear-time backbone: every kind, their flip rule, resampled positions, golden maps."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

pytest.importorskip("mmseg", reason="needs the extra mmseg-lite")

from mmengine.runner.checkpoint import get_state_dict

from jumbo_core.models.positions import resample_positions
from mmseg_ext import AdventurerViT, load_pretrained
from tests.conftest import Golden, max_error
from tests.mmseg_ext.adventurers import JUMBO, core, randomised, tiny
from tests.mmseg_ext.helpers import tiny as tiny_jumbo


@pytest.fixture
def source():
    return randomised(core()).state_dict()


def published(state):
    """Names of a released file; its class token has an entry of its own in the position table."""
    parts = {".fc1_g.": ".w1.", ".fc1_x.": ".w2.", ".mlp.fc2.": ".mlp.w3."}
    out = {}
    for key, value in state.items():
        name = key.removeprefix("encoder.")
        name = f"layers.{name.removeprefix('blocks.')}" if name.startswith("blocks.") else name
        name = name.replace("norm.", "norm_f.", 1) if name.startswith("norm.") else name
        for own, theirs in parts.items():
            name = name.replace(own, theirs)
        out[name] = value
    position = torch.full((1, 1, 16), 0.25)
    out["cls_token"] = out["cls_token"] - position
    out["pos_embed"] = torch.cat([out["pos_embed"], position], dim=1)
    return out


def prefixed(state, prefix):
    return {prefix + key: value.clone() for key, value in state.items()}


def write_folder(folder, tensors, **config):
    folder.mkdir()
    described = dict(model_type="adventurer", image_size=32, patch_size=8, flip="alternate")
    (folder / "config.json").write_text(json.dumps({**described, **config}))
    save_file(tensors, folder / "model.safetensors")
    return folder


KINDS = {
    "released": lambda d, s: torch.save(published(s), d / "w.pth"),
    "released_wrapped": lambda d, s: torch.save({"model": prefixed(published(s), "module.")}, d / "w.pth"),
    "released_safetensors": lambda d, s: save_file(published(s), d / "w.safetensors"),
    "timm_checkpoint": lambda d, s: torch.save({"epoch": 3, "state_dict": s}, d / "w.pth.tar"),
    "transformers_model": lambda d, s: write_folder(d / "hf", prefixed(s, "vit."), flip=[2]),
    "transformers_classifier": lambda d, s: write_folder(
        d / "hf", prefixed(s, "adventurer.vit.") | {"classifier.weight": torch.zeros(5, 16)}, flip=[2]
    ),
    "mmseg": lambda d, s: torch.save(
        {"state_dict": prefixed(s, "backbone.vit.") | {"backbone.flipped": torch.tensor([False, False, True])}},
        d / "w.pth",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file(kind, source, tmp_path):
    """Every file but timm's says that block 2 alone is flipped; there the backbone has to know."""
    KINDS[kind](tmp_path, source)
    (path,) = tmp_path.iterdir()
    flip = (2,) if kind == "timm_checkpoint" else "alternate"
    backbone = tiny(final_norm=True, flip=flip, init_cfg=dict(type="Pretrained", checkpoint=str(path)))
    backbone.init_weights()
    for name, value in backbone.vit.state_dict().items():
        assert max_error(value, source[name]) < 1e-6, name
    assert backbone.vit.encoder.flipped == {2} and backbone.flipped.tolist() == [False, False, True]


def test_the_log_names_what_was_not_used(source, tmp_path, log):
    state = published(source)
    state["stray"] = state.pop("layers.0.mixer.D")
    torch.save(state, tmp_path / "w.pth")
    backbone = tiny(out_indices=(0, 1))
    report = load_pretrained(backbone, tmp_path / "w.pth")
    assert report.missing == ["encoder.blocks.0.mixer.D"] and report.unexpected == ["stray"]
    assert {"head.weight", "head.bias", "encoder.norm.weight", "encoder.blocks.2.mixer.A_log"} <= set(report.ignored)
    (line,) = [m for m in log if "loaded" in m]
    assert f"loaded {len(backbone.vit.state_dict()) - 1} tensors" in line and "'stray'" in line
    (line,) = [m for m in log if "flip" in m]
    assert line.endswith("flip set to blocks [2], as its weights were trained, not [1] as the backbone was built")


def test_a_folders_flip_wins_and_is_logged(source, tmp_path, log):
    folder = write_folder(tmp_path / "hf", prefixed(source, "vit."), flip="alternate")
    backbone = tiny(flip=(0, 2))
    load_pretrained(backbone, folder)
    assert backbone.vit.encoder.flipped == {1}
    assert any("flip set to blocks [1], as its weights were trained, not [0, 2]" in message for message in log)
    with pytest.raises(ValueError, match=r"hf2: flip must be 'alternate' .* got 'never'"):
        load_pretrained(tiny(), write_folder(tmp_path / "hf2", prefixed(source, "vit."), flip="never"))
    # of a deeper model: its further blocks are unexpected, their flips have nothing to act on
    load_pretrained(backbone, write_folder(tmp_path / "hf3", prefixed(source, "vit."), flip=[0, 4]))
    assert backbone.flipped.tolist() == [True, False, False]


def test_a_checkpoint_without_a_rule_leaves_the_backbones(source, tmp_path, log):
    torch.save(dict(state_dict=source), tmp_path / "w.pth")
    backbone = tiny(flip=(0, 2))
    load_pretrained(backbone, tmp_path / "w.pth")
    assert backbone.vit.encoder.flipped == {0, 2} and not any("flip" in message for message in log)


def test_own_checkpoint_through_every_prefix(tmp_path):
    model = nn.Module()
    model.backbone = randomised(tiny(flip=(0,)))
    torch.save(dict(state_dict=get_state_dict(model)), tmp_path / "w.pth")
    torch.save(model.backbone.state_dict(), tmp_path / "alone.pth")
    for name, options in (("w.pth", {}), ("w.pth", dict(prefix="backbone.")), ("alone.pth", {})):
        backbone = tiny()
        report = load_pretrained(backbone, tmp_path / name, **options)
        assert report.missing == report.unexpected == report.ignored == []
        assert all(torch.equal(a, b) for a, b in zip(backbone.parameters(), model.backbone.parameters(), strict=True))
        assert backbone.vit.encoder.flipped == {0}


def test_positions_are_resampled_by_grid(source, tmp_path, log):
    torch.save(published(source), tmp_path / "square.pth")
    wide = tiny(img_size=(16, 64))  # grid (2, 8): 16 entries, as many as the file's (4, 4)
    load_pretrained(wide, tmp_path / "square.pth")
    assert torch.equal(wide.vit.pos_embed, resample_positions(source["pos_embed"], (4, 4), (2, 8)))
    assert any("positions resampled from grid (4, 4) to (2, 8)" in message for message in log)
    folder = write_folder(tmp_path / "hf", prefixed(source, "vit."), image_size=[16, 64])
    for checkpoint, options in ((folder, {}), (tmp_path / "square.pth", dict(grid=[2, 8]))):
        wide = tiny(img_size=(16, 64))
        load_pretrained(wide, checkpoint, **options)
        assert torch.equal(wide.vit.pos_embed, source["pos_embed"])
    unknown = {**published(source), "pos_embed": torch.zeros(1, 19, 16)}
    torch.save(unknown, tmp_path / "unknown.pth")
    with pytest.raises(ValueError, match=r"grid=\(h, w\)"):
        load_pretrained(tiny(), tmp_path / "unknown.pth")


def test_jumbo_linear_from_an_adventurer(source, tmp_path):
    """The slices and their FFN have to be learned; everything else starts where the Adventurer is."""
    torch.save(published(source), tmp_path / "w.pth")
    backbone = tiny(**JUMBO)
    report = load_pretrained(backbone, tmp_path / "w.pth")
    assert all(".norm3." in name or ".jumbo_" in name for name in report.missing) and len(report.missing) == 8
    assert "cls_token" in report.ignored and report.unexpected == []


def test_wrong_files(source, tmp_path):
    for name, state in dict(published=published(source), timm=source).items():
        torch.save(state, tmp_path / f"{name}.pth")
        with pytest.raises(ValueError, match=rf"{name}.pth holds an Adventurer, which a JumboViT cannot take"):
            load_pretrained(tiny_jumbo(), tmp_path / f"{name}.pth")
    torch.save(tiny_jumbo().vit.state_dict(), tmp_path / "jumbo.pth")
    with pytest.raises(ValueError, match=r"jumbo.pth: .*another shape"):
        load_pretrained(tiny(), tmp_path / "jumbo.pth")
    torch.save(published(randomised(core(embed_dim=24)).state_dict() | {"encoder.cls_token": torch.zeros(1, 1, 16)}
                         | {"pos_embed": torch.zeros(1, 16, 16)}), tmp_path / "wide.pth")  # fmt: skip
    with pytest.raises(ValueError, match=r"24.*16"):
        load_pretrained(tiny(), tmp_path / "wide.pth")
    source["encoder.blocks.1.mixer.A_log"][0] = float("nan")
    torch.save(published(source), tmp_path / "nan.pth")
    backbone = tiny()
    with pytest.raises(ValueError, match=r"nan.pth: .*A_log .*NaN"):
        load_pretrained(backbone, tmp_path / "nan.pth")
    assert backbone.vit.encoder.flipped == {1} and backbone.flipped.tolist() == [False, True, False]


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_golden_maps(shared, tmp_path, suffix, log):
    golden = Golden(shared / "golden" / "adventurer_d5.safetensors")
    path = golden.path
    if suffix == ".pth":
        path = tmp_path / "released.pth"
        torch.save(golden.weights, path)
    sizes = dict(
        embed_dims=64, num_layers=5, d_state=16, head_dim=64, img_size=64, patch_size=16, drop_path_rate=0.0,
        init_cfg=dict(type="Pretrained", checkpoint=str(path)),
    )  # fmt: skip
    backbone = AdventurerViT(**sizes, out_indices=(0, 1, 2, 3, 4))
    backbone.init_weights()
    assert any("flip set to blocks [2, 3], as its weights were trained, not [1, 3]" in message for message in log)
    for y, expected in zip(backbone.eval()(golden["input"]), golden.blocks, strict=True):
        assert max_error(y.flatten(2).transpose(1, 2), expected[:, :-1]) < 1e-5  # the class token stands last
    normed = AdventurerViT(**sizes, final_norm=True)
    normed.init_weights()
    (y,) = normed.eval()(golden["input"])
    assert max_error(y.flatten(2).transpose(1, 2), golden["features"][:, :-1]) < 1e-5
