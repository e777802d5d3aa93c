"""The timing of token fusion on a small ViT: correctness gate, numbers that hang together, table."""

import json

import pytest
import timm
import torch

from jumbo_core.measure import __main__ as command
from jumbo_core.measure import tofu
from jumbo_core.tofu import FusionPlan, apply_tofu

SMALL = "test_vit"  # timm's: 160 px, patch 16, 100 patches, depth 6, width 64


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_measure():
    result = tofu.measure(model=SMALL, r=8, batches=(2, 1), repeats=2, threads=1)
    names = [tofu.PLAIN, tofu.AGAIN, tofu.BOUND, *tofu.plans(6, 8)]
    assert [(row["batch"], row["plan"]) for row in result["rows"]] == [(b, n) for b in (2, 1) for n in names]
    unfused, again, bound, nothing, *fused = result["rows"][:9]
    assert "time_saved" not in unfused
    for row in (again, nothing):
        assert row["GMAC"] == unfused["GMAC"] and "multiply_adds_saved" not in row and "time_saved" in row
    for row in fused:
        assert row["kept_of_the_saving"] == pytest.approx(
            row["time_saved"]["median"] / row["multiply_adds_saved"], abs=0.01
        )
        assert 0 < row["matching_and_fusing"] < 1
        assert row["kept_of_the_possible"] == pytest.approx(
            row["time_saved"]["median"] / bound["time_saved"]["median"], abs=0.01
        )
    assert "matching_and_fusing" not in bound
    assert {row["multiply_adds_saved"] for row in [bound, *fused]} == {fused[0]["multiply_adds_saved"]}
    assert tofu.table(result).count("\n") == 1 + 18


def test_tokens_cut_off_are_those_that_a_plan_without_choice_would_leave():
    """Every block hands on as many tokens as under the plan, and computes what it does on them alone."""
    model, images = timm.create_model(SMALL).eval(), torch.randn(2, 3, 160, 160)
    plan, seen = FusionPlan(("prune",) * 6, (5, 0, 7, 0, 0, 3)), []
    hooks = [block.mlp.register_forward_hook(lambda m, i, out: seen.append(out.shape[1])) for block in model.blocks]
    short = tofu.cut_off(model, images, plan)
    prefix = model.num_prefix_tokens
    assert [count - prefix for count in seen] == [95, 95, 88, 88, 88, 85]
    assert not torch.equal(short, tofu.cut_off(model, images, FusionPlan.uniform(6, 0, "prune")))
    for hook in hooks:
        hook.remove()
    with torch.inference_mode():
        torch.testing.assert_close(tofu.cut_off(model, images, FusionPlan.uniform(6, 0, "prune")), model(images))


def test_multiply_adds_of_the_whole_model():
    model = timm.create_model("vit_base_patch16_224", num_classes=1000)
    plan = FusionPlan.paper(12, 16)
    matching = FusionPlan.paper(12, 16).multiply_adds(196, 768, key_dim=64) - plan.multiply_adds(196, 768)
    assert tofu.multiply_adds(model, plan) / 1e9 == pytest.approx(8.78 + matching / 1e9, abs=0.02)  # the paper's 8.78


def test_gate_sees_a_wrong_operator(monkeypatch):
    """A fused model that follows another plan than it says is not timed."""
    right = tofu.fused

    def wrong(model, plan, options):
        return right(model, FusionPlan.uniform(6, 8, "average") if plan.ops[0] == "mlerp" else plan, options)

    monkeypatch.setattr(tofu, "fused", wrong)
    with pytest.raises(RuntimeError, match=r"'MLERP' is off its plain form by .* nothing was timed"):
        tofu.measure(model=SMALL, r=8, batches=(1,), repeats=1, threads=1)


def test_gate_sees_that_nothing_is_not_nothing(monkeypatch):
    cases = {tofu.NOTHING: (FusionPlan.uniform(6, 1, "prune"), {})}
    monkeypatch.setattr(tofu, "plans", lambda depth, r: cases)
    with pytest.raises(RuntimeError, match="r = 0 changes the logits: nothing was timed"):
        tofu.measure(model=SMALL, r=8, batches=(1,), repeats=1, threads=1)


def test_stopwatch_sees_the_time_between_attention_and_mlp():
    model = timm.create_model(SMALL).eval()
    watch = tofu.Stopwatch(apply_tofu(model, FusionPlan(("prune",) * 6, (0, 5, 0, 0, 5, 0))))
    laps = []

    def slow(module, inputs, output):  # in the MLP: not its business
        laps.append(watch.ms)
        torch.ones(1 << 22).sum()

    for block in model.blocks:
        block.mlp.register_forward_hook(slow)
    with torch.no_grad():
        model(torch.randn(1, 3, 160, 160))
    grew = [later > sooner for sooner, later in zip([0, *laps], laps, strict=False)]
    assert grew == [False, True, False, False, True, False]


def test_copies_share_their_parameters():
    model = timm.create_model(SMALL).eval()
    copy = tofu.fused(model, FusionPlan.uniform(6, 4, "prune"), {})
    assert all(a is b for a, b in zip(model.parameters(), copy.parameters(), strict=True))
    with torch.no_grad():
        image = torch.randn(1, 3, 160, 160)
        assert not torch.equal(model(image), copy(image))


def test_command(tmp_path, capsys, monkeypatch):
    asked = {}

    def measure(**options):
        asked.update(options)
        return {"r": 5, "rows": [{"batch": 3, "plan": "paper", "GMAC": 1.0, "ms": {"median": 2.0}}]}

    monkeypatch.setattr(tofu, "measure", measure)
    out = tmp_path / "new" / "tofu.json"
    command.main(["tofu", "--batch", "3", "-r", "5", "--threads", "1", "--repeats", "4", "--out", str(out)])
    assert asked == {"batches": [3], "r": 5, "threads": 1, "repeats": 4}
    table = "| 3 | paper | 1.00 | 2 | - | - | - | - | - |"
    assert table in capsys.readouterr().out and table in json.loads(out.read_text())["table"]
