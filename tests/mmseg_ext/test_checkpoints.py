"""Every kind of weight file ends in the same backbone, wrong ones in an error; nothing is executed."""

import argparse
import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("mmseg", reason="needs the extra mmseg-lite")


from jumbo_core.models import JumboViT as CoreJumboViT
from jumbo_core.models.positions import resample_positions
from mmseg_ext import load_pretrained
from tests.mmseg_ext.helpers import tiny


def core(**options) -> CoreJumboViT:
    sizes = dict(img_size=32, patch_size=8, num_classes=5, embed_dim=16, depth=3, num_heads=2, multiplier=2)
    return CoreJumboViT(**{**sizes, **options})


@pytest.fixture
def source():
    model = core()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.state_dict()


def published(state):
    """Names of a released file, with its dead class token."""
    return {k.removeprefix("encoder."): v for k, v in state.items()} | {"cls_token": torch.zeros(1, 1, 16)}


def prefixed(state, prefix):
    return {prefix + k: v.clone() for k, v in state.items()}


def write_folder(folder, tensors, image_size=32, shards=1):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(image_size=image_size, patch_size=8)))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        names = sorted(tensors)
        where = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(names)}
        for file in set(where.values()):
            save_file({n: tensors[n] for n in names if where[n] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=where)))
    return folder


KINDS = {
    "released": lambda d, s: torch.save(published(s), d / "w.pth"),
    "released_wrapped": lambda d, s: torch.save({"model": prefixed(published(s), "module.")}, d / "w.pth"),
    "released_safetensors": lambda d, s: save_file(published(s), d / "w.safetensors"),
    "timm_state_dict": lambda d, s: torch.save(s, d / "w.pth"),
    "timm_checkpoint": lambda d, s: torch.save(
        {"epoch": 3, "arch": "jumbo", "state_dict": s, "args": argparse.Namespace(lr=0.1, model="jumbo")}, d /
        "w.pth.tar"
    ),
    "transformers_model": lambda d, s: write_folder(d / "hf", prefixed(s, "vit.")),
    "transformers_classifier": lambda d, s: write_folder(
        d / "hf", prefixed(s, "jumbo.vit.") | {"classifier.weight": torch.zeros(5, 48)}, shards=2
    ),
    "mmseg": lambda d, s: torch.save(
        {"meta": {"iter": 1}, "state_dict": prefixed(s, "backbone.vit.") | {"decode_head.bias": torch.zeros(3)}},
        d / "w.pth",
    ),
}  # fmt: skip


def only_file(folder):
    (path,) = folder.iterdir()
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file(kind, source, tmp_path):
    KINDS[kind](tmp_path, source)
    backbone = tiny(final_norm=True, init_cfg=dict(type="Pretrained", checkpoint=only_file(tmp_path)))
    backbone.init_weights()
    for name, value in backbone.vit.state_dict().items():
        assert torch.equal(value, source[name]), name


def test_the_log_names_what_was_not_used(source, tmp_path, log):
    state = published(source)
    state["stray"] = state.pop("blocks.0.norm1.weight")
    torch.save(state, tmp_path / "w.pth")
    backbone = tiny(out_indices=(0, 1))
    report = load_pretrained(backbone, tmp_path / "w.pth")
    assert report.missing == ["encoder.blocks.0.norm1.weight"] and report.unexpected == ["stray"]
    assert {"cls_token", "head.weight", "norm.weight", "blocks.2.norm1.weight"} <= set(report.ignored)
    loaded = len(backbone.vit.state_dict()) - 1
    (line,) = [m for m in log if "loaded" in m]
    for text in (f"loaded {loaded} tensors", "'encoder.blocks.0.norm1.weight'", "'stray'", "'head.bias'"):
        assert text in line


def test_other_initialisations_come_before_pretrained(source, tmp_path):
    torch.save(source, tmp_path / "w.pth")
    pretrained = dict(type="Pretrained", checkpoint=str(tmp_path / "w.pth"))
    configs = [pretrained, dict(type="Constant", layer="Linear", val=7)]
    backbone = tiny(init_cfg=configs)
    backbone.init_weights()
    assert torch.equal(backbone.vit.pos_embed, source["pos_embed"])
    assert torch.equal(backbone.vit.blocks[0].mlp.fc1.weight, source["encoder.blocks.0.mlp.fc1.weight"])
    assert backbone.init_cfg == configs
    constant = tiny(init_cfg=configs[1])
    constant.init_weights()
    assert constant.vit.blocks[0].mlp.fc1.weight.eq(7).all()


def test_prefix(source, tmp_path):
    tensors = prefixed(source, "student.net.") | {"teacher.pos_embed": torch.zeros(1)}
    torch.save(tensors, tmp_path / "w.pth")
    backbone = tiny()
    report = load_pretrained(backbone, tmp_path / "w.pth", prefix="student.net.")
    assert torch.equal(backbone.vit.pos_embed, source["pos_embed"]) and "teacher.pos_embed" in report.ignored
    with pytest.raises(ValueError, match="no tensor below 'nobody"):
        load_pretrained(tiny(), tmp_path / "w.pth", prefix="nobody.")


def test_positions_are_resampled_by_grid(source, tmp_path):
    torch.save(source, tmp_path / "square.pth")
    wide = tiny(img_size=(16, 64))  # grid (2, 8): 16 entries, as many as the file's (4, 4)
    load_pretrained(wide, tmp_path / "square.pth")
    expected = resample_positions(source["pos_embed"], (4, 4), (2, 8))
    assert torch.equal(wide.vit.pos_embed, expected) and not torch.equal(wide.vit.pos_embed, source["pos_embed"])
    # the same numbers of a backbone that says it was (2, 8): its own checkpoint, a config, or the user
    torch.save(dict(state_dict=prefixed(source, "backbone.vit.")), tmp_path / "own.pth")
    write_folder(tmp_path / "hf", prefixed(source, "vit."), image_size=[16, 64])
    for name, options in (("own.pth", {}), ("hf", {}), ("square.pth", dict(grid=[2, 8]))):
        wide = tiny(img_size=(16, 64))
        load_pretrained(wide, tmp_path / name, **options)
        assert torch.equal(wide.vit.pos_embed, source["pos_embed"])
    larger = tiny(img_size=64)
    load_pretrained(larger, tmp_path / "hf")
    assert torch.equal(larger.vit.pos_embed, resample_positions(source["pos_embed"], (2, 8), (8, 8)))


def test_unknown_grid_is_an_error_that_names_the_option(source, tmp_path):
    torch.save({**source, "pos_embed": torch.zeros(1, 18, 16)}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"grid=\(h, w\)"):
        load_pretrained(tiny(), tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"not the grid \(4, 4\)"):
        load_pretrained(tiny(), tmp_path / "w.pth", grid=(4, 4))
    load_pretrained(tiny(), tmp_path / "w.pth", grid=(3, 6))


def test_another_shape_names_both(source, tmp_path):
    torch.save(core(embed_dim=24).state_dict(), tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"24.*16"):
        load_pretrained(tiny(), tmp_path / "w.pth")


@pytest.mark.parametrize("name", ["absent.pth", "absent.safetensors", "absent_folder"])
def test_missing_file(name, tmp_path):
    backbone = tiny(init_cfg=dict(type="Pretrained", checkpoint=str(tmp_path / name)))
    with pytest.raises(FileNotFoundError, match=name):
        backbone.init_weights()


def test_folder_without_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_pretrained(tiny(), tmp_path)


def test_wrong_files(tmp_path):
    torch.save(torch.nn.Conv2d(3, 4, 1).state_dict(), tmp_path / "other.pth")
    (tmp_path / "text.pth").write_text("not a checkpoint")
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save({"weight": 3}, tmp_path / "number.pth")
    for name, message in (
        ("other.pth", "no key of the file fits"), ("text.pth", "cannot be read"), ("list.pth", "list"), ("number.pth",
        "weight"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            load_pretrained(tiny(), tmp_path / name)


def test_damaged_numbers(source, tmp_path):
    source["encoder.blocks.1.mlp.fc1.weight"][0, 0] = float("nan")
    torch.save(source, tmp_path / "w.pth")
    with pytest.raises(ValueError, match="NaN"):
        load_pretrained(tiny(), tmp_path / "w.pth")


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_code_in_a_file_never_runs(source, tmp_path):
    mark = tmp_path / "ran"
    torch.save({"state_dict": source, "extra": Trap(mark)}, tmp_path / "new.pth")
    (tmp_path / "old.pth").write_bytes(pickle.dumps({"state_dict": {}, "extra": Trap(mark)}))
    for name in ("new.pth", "old.pth"):
        with pytest.raises(ValueError, match="never executed"):
            load_pretrained(tiny(), tmp_path / name)
    assert not mark.exists()


def test_address_is_downloaded_once_into_the_cache(source, tmp_path, monkeypatch):
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
    from threading import Thread

    (tmp_path / "site").mkdir()
    torch.save(published(source), tmp_path / "site" / "jumbo.pth")
    (tmp_path / "site" / "other").mkdir()
    other = {**source, "pos_embed": source["pos_embed"] + 1}
    torch.save(published(other), tmp_path / "site" / "other" / "jumbo.pth")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "site"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        backbone = tiny()
        load_pretrained(backbone, f"{url}/jumbo.pth")
        namesake = tiny()
        load_pretrained(namesake, f"{url}/other/jumbo.pth")
        with pytest.raises(OSError, match="fetch it yourself"):
            load_pretrained(tiny(), f"{url}/absent.pth")
    finally:
        server.shutdown()
        server.server_close()
    assert torch.equal(backbone.vit.pos_embed, source["pos_embed"])
    assert torch.equal(namesake.vit.pos_embed, other["pos_embed"])
    load_pretrained(tiny(), f"{url}/jumbo.pth")  # from the cache: nobody answers any more
