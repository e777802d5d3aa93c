"""Models by name, the gate they pass, and the speed and scaling commands, on small models."""

import csv
import json
import statistics
from pathlib import Path

import pytest
import timm
import torch

from jumbo_core.measure import __main__ as command
from jumbo_core.measure import count_parameters, multiply_adds, scaling, speed, steps
from jumbo_core.measure.artefacts import flat
from jumbo_core.measure.contenders import PRESETS, TimmContender, contender, widened
from jumbo_core.measure.forms import OPTIONS

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TINY = "test_vit@img_size=32"
JUMBO = "test_jumbo@patch_size=16"


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# --- names ---


def test_every_preset_and_option_is_a_contender():
    for name in PRESETS:
        one = contender(name)
        assert one.parameters > 1e5, name
    assert contender("transformers:mamba2").multiply_adds is None
    assert contender("vit_b@" + "+".join(OPTIONS)).options == tuple(OPTIONS)
    assert contender("transformers:mamba2@compile").options == ("transformers", "compile")
    assert contender("test_vit@global_pool=avg+num_classes=7").arguments == {"global_pool": "avg", "num_classes": 7}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "jumbo_tinny_patch16_224",
            r"no model 'jumbo_tinny_patch16_224'.*vit_registers_tiny.*near: jumbo_tiny_patch16",
        ),
        ("test_vit@fp4", r"unknown option 'fp4' of 'test_vit@fp4': use materialised, channels-last, .*key=value"),
        ("test_vit@", r"ends in @ without an option: use materialised"),
    ],
)
def test_unknown_names_are_refused_with_what_is_known(name, message):
    with pytest.raises(ValueError, match=message):
        contender(name)


def test_registers_baseline_is_timms_own_class():
    model = contender("vit_registers_tiny", 32).build()
    assert type(model) is timm.models.VisionTransformer and model.num_prefix_tokens == 17
    assert model.embed_dim == timm.create_model("jumbo_tiny_patch16_224").embed_dim


@pytest.mark.parametrize(("size", "least"), [("tiny", 0.96), ("small", 0.98)])
def test_widened_vits_have_the_parameters_of_jumbo_models(size, least):
    jumbo, wide = contender(f"jumbo_{size}_patch16_224"), contender(f"vit_wide_{size}")
    assert least < wide.parameters / jumbo.parameters < 1.02
    assert contender(f"vit_{size}").parameters < wide.parameters / 2  # it is the width that grew
    head = wide.arguments["embed_dim"] / wide.arguments["num_heads"]
    assert head % 8 == 0 and 48 <= head <= 80


def test_closed_form_of_the_width_is_exact():
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", embed_dim=320, num_heads=5, reg_tokens=4)
    d = 320
    closed = 12 * (12 * d * d + 13 * d) + 769 * d + (196 + 2 * (1 + 4)) * d + 2 * d + 1000 * (d + 1)
    assert count_parameters(model) == closed
    assert widened(count_parameters(model), registers=4) == dict(embed_dim=320, num_heads=5, reg_tokens=4)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("efficientvit", "jumbo_tiny_patch16_224"),
        ("efficientvit_l", "jumbo_small_patch16_224"),
        ("shvit", "jumbo_tiny_patch16_224"),
        ("mobilenetv4", "jumbo_tiny_patch16_224"),
        ("mobilenetv4_l", "jumbo_small_patch16_224"),
    ],
)
def test_peers_are_the_nearest_of_their_family(name, target):
    wanted = contender(target).parameters
    family = timm.list_models(f"{name.removesuffix('_l')}_*")
    apart = {peer: abs(torch.tensor(contender(peer).parameters / wanted).log()) for peer in family}
    assert PRESETS[name][0] == min(apart, key=apart.get)


def test_counted_multiply_adds_are_those_of_the_closed_form():
    """The counter used for peers, on a model that has a closed form, and the closed form used for ours."""
    one = contender("jumbo_pico_patch16_224", (64, 96))
    with torch.device("meta"):
        model = timm.create_model("jumbo_pico_patch16_224", img_size=(64, 96))
    assert one.multiply_adds == multiply_adds(model)
    plain = contender("vit_tiny_patch16_224", (64, 96))
    t, d = 25, 192
    blocks = 12 * (12 * t * d * d + 2 * t * t * d)
    assert plain.multiply_adds == blocks + 24 * 768 * d + 1000 * d


def test_cifar_models_are_those_that_were_trained():
    rows = json.loads((RESULTS / "cifar.json").read_text())["summary"]
    trained = {(row["contender"], row["width"]): row["parameters"] for row in rows}
    for width in (32, 64):
        assert contender(f"cifar_jumbo_{width}", 32).parameters == trained["Jumbo J=6", width]
    # timm's class has positions for its 17 prefix tokens as well.
    assert contender("cifar_registers_64", 32).parameters == trained["ViT + 16 registers", 64] + 17 * 64


# --- forms and gate ---


@pytest.mark.parametrize("name", [f"{TINY}+materialised", f"{TINY}+channels-last", "test_adventurer@transformers"])
def test_forms_change_the_way_and_not_the_logits(name):
    if "transformers" in name:
        pytest.importorskip("transformers", reason="needs the extra hf")
    one = contender(name, 32)
    call = steps.inference(one, 2)
    assert steps.check_inference(one, call, 2, "float32", "cpu").distance < 1e-5
    model = call.func
    if "materialised" in name:
        assert not any(block.attn.fused_attn for block in model.blocks)
    elif "transformers" in name:
        assert all("transformers" in type(block.mixer.mixer).__module__ for block in model.blocks)
    else:
        assert call.args[0].is_contiguous(memory_format=torch.channels_last)


def test_models_are_the_same_at_every_call_and_no_weight_is_zero():
    one = contender("test_jumbo", 32)
    for (name, a), b in zip(one.build().named_parameters(), one.build().parameters(), strict=True):
        assert torch.equal(a, b) and (a.any() or name.endswith("bias")), name
    assert one.build()(*one.inputs(2)).std() > 0.01


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: model.head.weight.data.fill_(torch.nan), "must be finite"),
        (lambda model: model.register_forward_hook(lambda m, i, o: o[:, :3]), r"output \(2, 3\) must be"),
        (lambda model: model.register_forward_hook(lambda m, i, o: o + torch.rand(())), "a second call gives another"),
        (lambda model: model.head.weight.data.mul_(1.001), "is off that of the plain fp32 model by 1.*nothing was"),
    ],
)
def test_nothing_is_timed_that_does_not_pass_the_gate(damage, message, monkeypatch):
    build = TimmContender.build

    def damaged(self, *args, plain=False, **options):
        model = build(self, *args, plain=plain, **options)
        if not plain:
            damage(model)
        return model

    monkeypatch.setattr(TimmContender, "build", damaged)
    monkeypatch.setattr(speed, "take_turns", None)  # calling it would be a TypeError
    with pytest.raises(RuntimeError, match=message):
        speed.measure([f"{TINY}+materialised"], batches=[2], image_size=32, threads=1)


def test_training_gate_wants_losses_that_fall():
    losses = iter([1.0, 0.9, 0.8, 1.0])
    with pytest.raises(RuntimeError, match=r"test_vit: losses \[1.0, .* must be finite and fall; nothing was timed"):
        steps.check_training(contender("test_vit"), lambda: torch.tensor(next(losses), dtype=torch.float64))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (dict(dtype="int4"), ValueError, "dtype must be one of float32, bfloat16, float16, got 'int4'"),
        (dict(device="tpu"), ValueError, "device must be cpu or cuda, got 'tpu'"),
        (dict(repeats=1), ValueError, "repeats must be an integer of at least 2, got 1"),
        (dict(batches=[0]), ValueError, "batch must be an integer of at least 1, got 0"),
        (dict(train=True, dtype="float16"), ValueError, "float16 needs loss scaling"),
        (dict(train=True, models=["test_jumbo@int8"]), ValueError, "forms for inference; drop them"),
        (dict(train=True, models=["test_jumbo@num_classes=0"]), ValueError, "training needs classes"),
        (dict(models=[TINY, TINY]), ValueError, "all different"),
        (dict(models=[]), ValueError, "at least one name"),
        (dict(batches=[2, 2]), ValueError, r"batches must be all different, got \[2, 2\]"),
    ],
)
def test_bad_settings_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        speed.measure(**(dict(models=[TINY], image_size=32, threads=1) | settings))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about a machine without CUDA")
def test_cuda_without_a_device_is_said():
    with pytest.raises(RuntimeError, match="torch sees no CUDA device here; use --device cpu"):
        speed.measure([TINY], device="cuda")


# --- commands ---


def test_speed(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    words = ["speed", TINY, JUMBO, "--image-size", "32", "--batch", "1", "3", "--repeats", "3", "--threads", "1"]
    command.main([*words, "--no-memory", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "speed.json").read_text())
    assert [(row["batch"], row["model"]) for row in result["rows"]] == [(b, m) for b in (1, 3) for m in (TINY, JUMBO)]
    for row in result["rows"]:
        assert len(row["rounds_ms"]) == 3 and "peak_MiB" not in row
        assert row["images_per_s"] == pytest.approx(1e3 * row["batch"] / row["ms"]["median"], rel=0.01)
        if row["model"] == TINY:
            assert row["times_first"] == {"median": 1, "quartiles": [1, 1]}
    assert result["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert "peak memory" not in result["table"] and "off fp32" not in result["table"]
    assert result["table"] in capsys.readouterr().out and result["table"].count("\n") == 5
    rows = list(csv.DictReader((tmp_path / "speed.csv").open()))
    assert [row["ms_low"] for row in rows] == [str(row["ms"]["quartiles"][0]) for row in result["rows"]]
    assert (tmp_path / "speed.png").stat().st_size > 5000


def test_rounds_of_several_processes_are_pooled():
    result = speed.measure([TINY, JUMBO], image_size=32, batches=(1, 2), repeats=2, processes=2, threads=1)
    assert result["processes"] == 2
    assert [(row["batch"], row["model"]) for row in result["rows"]] == [(b, m) for b in (1, 2) for m in (TINY, JUMBO)]
    for row in result["rows"]:
        assert len(row["rounds_ms"]) == 4 and row["peak_MiB"] > 0
        low, high = row["ms"]["quartiles"]
        assert min(row["rounds_ms"]) <= low <= high <= max(row["rounds_ms"])
    first, second = result["rows"][2:]
    ratios = [a / b for a, b in zip(first["rounds_ms"], second["rounds_ms"], strict=True)]
    assert second["times_first"]["median"] == pytest.approx(statistics.median(ratios), abs=2e-3)


def test_training_with_peak_memory():
    result = speed.measure([TINY], batches=[8], image_size=32, repeats=2, threads=1, train=True, device="cpu")
    (row,) = result["rows"]
    weights = 4 * row["parameters"] / 2**20
    assert row["peak_MiB"] > 3 * weights and "distance" not in row  # gradients and two moments at least
    assert "ms per step" in speed.table(result)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("train", [False, True])
def test_speed_on_cuda(train):
    result = speed.measure([TINY, JUMBO], batches=[4], image_size=32, repeats=3, train=train)
    assert result["device"] == "cuda"
    assert all(row["peak_MiB"] > 0 and row["ms"]["median"] > 0 for row in result["rows"])


def test_scaling(tmp_path):
    pytest.importorskip("matplotlib")
    command.main(["scaling", TINY.partition("@")[0], JUMBO, "--sizes", "32", "64x32", "64", "--repeats", "2",
                  "--threads", "1", "--no-memory", "--out", str(tmp_path)])  # fmt: skip
    result = json.loads((tmp_path / "scaling.json").read_text())
    assert [row["tokens"] for row in result["rows"]] == [4, 4, 8, 8, 16, 16]
    assert result["rows"][2]["size"] == [64, 32] and set(result["exponents"][JUMBO]) == {"ms", "GMAC"}
    assert result["table"].count("\n") == 7 and (tmp_path / "scaling.png").stat().st_size > 5000


def test_exponents():
    rows = [dict(model="a", tokens=n, ms=dict(median=3 * n**2), peak_MiB=0.5 * n, GMAC=None) for n in (4, 8, 32)]
    assert scaling.exponents([*rows, dict(model="b", tokens=4, ms=dict(median=1.0))], "a") == dict(ms=2, peak_MiB=1)
    assert scaling.exponents(rows[:1], "a") == {}


def test_scaling_says_what_it_leaves_out():
    result = scaling.measure([TINY.partition("@")[0], JUMBO], sizes=[(32, 32), (64, 32)], until={JUMBO: 4}, repeats=2,
                             threads=1, memory=False)  # fmt: skip
    assert [row["model"] for row in result["rows"]] == ["test_vit", JUMBO, "test_vit"]
    assert f"{JUMBO} was left out at 64x32." in scaling.table(result)
    with pytest.raises(SystemExit, match=r"names of models or --preset \(width256, vit_b\)"):
        command.main(["scaling"])


def test_flat_rows():
    row = dict(ms=dict(median=2, quartiles=[1, 3]), size=[1, 2], rounds_ms=[1, 2, 3], model="m")
    assert flat(row) == dict(ms=2, ms_low=1, ms_high=3, size="[1, 2]", model="m")


def test_flops(tmp_path, capsys):
    command.main(["flops", "test_jumbo", "test_adventurer", "--image-size", "64", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "flops.json").read_text())["rows"]
    assert [row["multiply_adds"] for row in rows] == [
        multiply_adds(timm.create_model(name), 64) for name in ("test_jumbo", "test_adventurer")
    ]
    assert "| test_jumbo | 16 | 2 |" in capsys.readouterr().out and len(list(tmp_path.iterdir())) == 2
