"""UNets by name in the speed command: options, what they share, the gate, its honesty about random draws."""

import gc
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jumbo_core.measure import __main__ as command
from jumbo_core.measure import diffusion, speed, steps
from jumbo_core.measure.contenders import contender

pytest.importorskip("diffusers", reason="needs jumbo-vit[diffusion]")
tomesd = pytest.importorskip("tomesd", reason="needs jumbo-vit[dev]")
RESULTS = Path(__file__).parents[2] / "docs" / "results"
UNET, THEIRS, OURS = "test_unet", "test_unet@tomesd", "test_unet@tofu"
SIZE = 128


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def checked(name: str, batch: int = 2) -> steps.Checked:
    one = contender(name, SIZE)
    return steps.check_inference(one, steps.inference(one, batch), batch, "float32", "cpu")


# --- names ---


def test_keys_are_those_of_the_functions():
    from hf_ext.diffusers import apply_tofu_to_unet

    for option, function in (("tomesd", tomesd.apply_patch), ("tofu", apply_tofu_to_unet)):
        assert set(diffusion.FUSIONS[option]) == set(list(inspect.signature(function).parameters)[1:])


def test_names_are_read():
    one = contender("sd15_unet@tofu+op=mlerp+ratio=0.25+region=(2,4)", (512, 768))
    assert (one.name, one.options) == ("sd15_unet", ("tofu",))
    assert one.arguments == {"op": "mlerp", "ratio": 0.25, "region": (2, 4)}
    assert one.output_shape(None, 2) == (2, 4, 64, 96) and one.timm_name is None


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        (
            "test_unet@int8",
            64,
            r"unknown option 'int8' of 'test_unet@int8': use tomesd, tofu, or key=value for its arg",
        ),
        ("test_unet@compile+tofu", 64, "unknown option 'compile'"),
        ("test_unet@", 64, "ends in @ without an option: use tomesd, tofu"),
        ("test_unet@tomesd+tofu", 64, "two fusions of the same tokens; use one"),
        ("test_unet@ratio=0.5", 64, "key=value is for a fusion's arguments; name tomesd or tofu as well"),
        ("test_unet@tomesd+op=prune", 64, "unknown key 'op' of .*: tomesd takes ratio, max_downsample"),
        ("test_unet", (500, 512), "both sides must be multiples of 8, got 500x512; use 496x512"),
        ("test_unet", 4, "got 4x4; use 8x8"),
        ("sd14_unet", 64, "no model 'sd14_unet': .*sd15_unet, test_unet; near: sd15_unet"),
    ],
)
def test_what_cannot_be_is_refused_by_name(name, size, message):
    with pytest.raises(ValueError, match=message):
        contender(name, size)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{THEIRS}+ratio=0.8", r"ratio must lie in \[0, 0.75\].*asked for 0.8"),
        (f"{OURS}+ratio=0.8", r"ratio must lie in \[0, 0.75\].*asked for 0.8"),
        (f"{OURS}+op=sum", "op must be one of .* got 'sum'"),
    ],
)
def test_values_are_refused_when_it_is_built(name, message):
    with pytest.raises(ValueError, match=message):
        speed.measure([name], image_size=SIZE, threads=1, device="cpu")


def test_training_is_refused():
    with pytest.raises(ValueError, match="test_unet@tofu: training steps of UNets are not measured; drop --train"):
        speed.measure([OURS], image_size=SIZE, train=True, device="cpu")


# --- without the libraries ---


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)


def test_nothing_is_imported_before_it_is_used():
    done = run(
        "import sys; from jumbo_core.measure.contenders import contender; contender('sd15_unet@tofu'); "
        "found = [m for m in ('diffusers', 'tomesd', 'transformers', 'hf_ext') if m in sys.modules]; "
        "sys.exit(str(found) if found else 0)"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("missing", "name", "message"),
    [
        ("diffusers", "test_unet", "sd15_unet and test_unet need diffusers: pip install 'jumbo-vit[diffusion]'"),
        ("tomesd", THEIRS, "test_unet@tomesd needs tomesd: pip install tomesd, or 'jumbo-vit[dev]', which has it"),
    ],
)
def test_missing_libraries_are_named_with_their_extra(missing, name, message):
    done = run(
        f"import sys; sys.modules[{missing!r}] = None; from jumbo_core.measure import __main__ as command; "
        f"command.main(['speed', {name!r}, '--image-size', '64', '--no-memory'])"
    )
    assert done.returncode == 2 and message in done.stderr


# --- models and gate ---


def test_forms_share_weights_while_they_are_in_use():
    models = [contender(name, SIZE).build() for name in (UNET, THEIRS, OURS)]
    first, *others = ([p.data_ptr() for p in model.parameters()] for model in models)
    assert all(other == first for other in others) and len(diffusion._in_use) == 1
    assert type(models[0].unet.mid_block.attentions[0].transformer_blocks[0]).__name__ == "BasicTransformerBlock"
    assert type(models[1].unet.mid_block.attentions[0].transformer_blocks[0]).__name__ == "ToMeBlock"
    assert all(parameter.any() or name.endswith("bias") for name, parameter in models[0].named_parameters())
    models.clear()
    gc.collect()
    assert not diffusion._in_use


def test_weights_and_inputs_are_the_same_every_time():
    one, outputs = contender(UNET, (64, 128)), []
    for _ in range(2):
        with torch.inference_mode():
            outputs.append(one.build()(*one.inputs(2)))
        gc.collect()
    assert outputs[0].shape == (2, 4, 8, 16) and torch.equal(*outputs)
    latents, timestep, prompt = one.inputs(2)
    assert timestep == 501 and prompt.shape == (2, 77, 32) and torch.equal(latents[0], latents[1])
    assert not torch.equal(prompt[0], prompt[1])


def test_multiply_adds_are_counted_with_what_fusion_saves():
    plain, theirs, ours, nothing = (contender(n, SIZE).multiply_adds for n in (UNET, THEIRS, OURS, f"{OURS}+ratio=0"))
    assert nothing == plain and theirs == ours
    # 5 blocks of 256 tokens of width 32 fuse 128 of them: projections and both products of attention shrink, and the
    # similarities of 192 candidates to 64 destinations come on top.
    saved = 4 * 128 * 32**2 + 2 * (256**2 - 128**2) * 32 - 192 * 64 * 32
    assert plain - ours == 5 * saved


def test_gate_allows_random_draws_of_tomesd_alone():
    assert checked(UNET)[:2] == (0, 0)
    assert checked(f"{OURS}+ratio=0").distance == checked(f"{THEIRS}+ratio=0").distance == 0
    theirs, ours = checked(THEIRS), checked(OURS)
    assert 0 < theirs.repeat < diffusion.APART and 0 < theirs.distance < diffusion.APART
    assert ours.repeat == 0 and 0 < ours.distance < theirs.distance
    # No draws in odd batches, nor without use_rand: two calls must be the same.
    assert checked(THEIRS, 3).repeat == checked(f"{THEIRS}+use_rand=False").repeat == 0


@pytest.mark.parametrize(
    ("name", "hook", "message"),
    [
        (OURS, lambda m, i, o: o * torch.nan, "output .2, 4, 16, 16. must be finite and"),
        (OURS, lambda m, i, o: o[..., :8], r"output \(2, 4, 16, 8\) must be finite and \(2, 4, 16, 16\)"),
        (OURS, lambda m, i, o: o + torch.rand(()), "a second call gives another output"),
        (OURS, lambda m, i, o: 0.8 * o, "off that of the plain fp32 model by .*more than 1e-01; nothing was timed"),
        (THEIRS, lambda m, i, o: o * (1 + torch.rand(())), "draws at random, but two calls are apart by .*1e-01; noth"),
    ],
)
def test_nothing_is_timed_that_does_not_pass_the_gate(name, hook, message):
    one = contender(name, SIZE)
    call = steps.inference(one, 2)
    call.func.register_forward_hook(hook)
    with pytest.raises(RuntimeError, match=message):
        steps.check_inference(one, call, 2, "float32", "cpu")


def test_attention_left_out_does_not_pass():
    one = contender(OURS, SIZE)
    call = steps.inference(one, 2)
    for name, module in call.func.named_modules():
        if name.endswith("attn1") and ("down_blocks.0" in name or "up_blocks.3" in name):
            module.register_forward_hook(lambda m, i, o: o * 0)
    with pytest.raises(RuntimeError, match="off that of the plain fp32 model"):
        steps.check_inference(one, call, 2, "float32", "cpu")


# --- commands ---


def test_measure_with_peak_memory_and_two_batches():
    result = speed.measure([UNET, THEIRS], batches=[1, 2], image_size=SIZE, repeats=2, threads=1, device="cpu")
    assert [(row["batch"], row["model"]) for row in result["rows"]] == [(b, m) for b in (1, 2) for m in (UNET, THEIRS)]
    assert [("repeat" in row, row["distance"] > 0) for row in result["rows"]] == [
        (False, False), (False, True), (False, False), (True, True),
    ]  # fmt: skip
    assert all(row["peak_MiB"] > 0 and row["timm_name"] is None for row in result["rows"])


def test_command(tmp_path, capsys):
    words = f"speed {UNET} {THEIRS}+ratio=0.25 {OURS}+op=prune --batch 2 --image-size {SIZE} --repeats 2 --threads 1"
    command.main([*words.split(), "--device", "cpu", "--no-memory", "--out", str(tmp_path / "r.json")])
    result = json.loads((tmp_path / "r.json").read_text())
    assert [row["arguments"] for row in result["rows"]] == [{}, {"ratio": 0.25}, {"op": "prune"}]
    table, _, note = capsys.readouterr().out.partition("\n\n")
    assert table.count("\n") == 4 and "| output off fp32 by |" in table
    percent = f"{100 * result['rows'][1]['repeat']:.1g}"
    assert note.strip() == (
        f"{THEIRS}+ratio=0.25, batch 2, draws at random in every call: two calls were {percent} % of the output's norm "
        "apart."
    )


def test_command_says_what_is_wrong(capsys):
    with pytest.raises(SystemExit):
        command.main(["speed", UNET, "--image-size", "100"])
    assert "multiples of 8, got 100x100; use 96x96" in capsys.readouterr().err


def test_help_names_them(capsys):
    with pytest.raises(SystemExit):
        command.main(["speed", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "sd15_unet and test_unet, with tomesd or tofu" in said and "latents are an eighth" in said


def test_scaling(tmp_path):
    command.main(["scaling", UNET, OURS, "--sizes", "64", "128", "--repeats", "2", "--threads", "1", "--device", "cpu",
                  "--no-memory", "--out", str(tmp_path / "r.json")])  # fmt: skip
    result = json.loads((tmp_path / "r.json").read_text())
    assert [row["tokens"] for row in result["rows"]] == [16, 16, 64, 64]


def test_published_run_is_of_this_unet():
    """So that benchmarks.tofu_diffusion adds to it."""
    settings = json.loads((RESULTS / "tofu_diffusion.json").read_text())["settings"]
    assert settings["unet"] == json.loads(json.dumps(diffusion.SD15))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_command_on_cuda(dtype):
    result = speed.measure([UNET, THEIRS, OURS], batches=[2], image_size=SIZE, repeats=3, dtype=dtype, device="cuda")
    assert all(row["peak_MiB"] > 0 and row["ms"]["median"] > 0 for row in result["rows"])
