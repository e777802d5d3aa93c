"""The fused model as a file: ONNX, torch.export, int8, torch.compile, and the walk-through of docs/deployment.md."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from jumbo_core.tofu import FusionPlan, apply_tofu, is_fused, match
from jumbo_core.tofu.__main__ import main
from jumbo_core.tofu.deploy import export_model, load_exported
from jumbo_core.tofu.folder import load_model
from tests.conftest import max_error
from tests.jumbo_core.fused_models import jumbo_vit, timm_vit
from tests.jumbo_core.test_tofu_folder import make_images, make_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "deployment.md"
PLAN = FusionPlan(("prune", "mlerp"), (3, 4))


def vit():
    return timm_vit(depth=2)


def jumbo():
    return jumbo_vit(depth=2, registers=2)


@pytest.fixture
def onnx():
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)


@pytest.mark.slow
def test_walk_through(onnx, tmp_path, monkeypatch, capsys):
    """Every command and the Python of the document, in its order, on a small model."""
    make_images(tmp_path / "photos")
    make_model(tmp_path / "model", depth=2)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(\w+)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert [kind for kind, _ in blocks] == ["bash", "bash", "python", "bash", "bash"]
    printed = []
    for kind, text in blocks:
        if kind == "python":
            exec(text, {})
        else:
            start, module, name, *arguments = shlex.split(text)
            assert (start, module, name) == ("python", "-m", "jumbo_core.tofu")
            main(arguments)
        printed.append(capsys.readouterr().out)
    profile, trial, snippet, export, int8 = printed
    assert {p.name for p in (tmp_path / "tofu").iterdir()} == {
        "plan.json",
        "profile.json",
        "profile.png",
        "report.json",
        "report.txt",
        "model.onnx",
        "model-int8.onnx",
    }
    plan = FusionPlan.from_json("tofu/plan.json")
    assert 0.35 <= plan.saved(16) < 0.45
    report = str(apply_tofu(load_model("model"), plan).report())
    assert all(report in text for text in (profile, trial, snippet, export, int8))
    assert re.search(r"7 images: same prediction for [\d.]+ %, mean cosine of the outputs 0\.\d+", trial)
    assert re.search(r"[\d.]+ ms per image without fusion, [\d.]+ ms with it", trial)
    small, large = (Path("tofu", name).stat().st_size for name in ("model-int8.onnx", "model.onnx"))
    assert f"wrote tofu/model.onnx: {large / 1e6:.2f} MB" in export and small < 0.7 * large
    assert float(re.search(r"largest difference ([\d.e-]+), same prediction for 100.0 %", export)[1]) < 1e-4
    assert float(re.search(r"largest difference ([\d.e-]+), same prediction", int8)[1]) < 0.1
    assert re.search(r"eager, unfused [\d.]+, eager, fused [\d.]+, model\.onnx [\d.]+", export)


@pytest.mark.slow
@pytest.mark.parametrize("make", [vit, jumbo])
def test_onnx_of_any_batch(make, onnx, tmp_path):
    model, images = make(), torch.randn(3, 3, 32, 32)
    handle = apply_tofu(model, PLAN, proportional=True)
    done = export_model(model, tmp_path / "deep/model.onnx", images)
    assert done.path == tmp_path / "deep/model.onnx" and done.size == done.path.stat().st_size
    assert done.error < 1e-4 and done.agreement == 1
    assert [p.name for p in done.path.parent.iterdir()] == ["model.onnx"]
    run = load_exported(done.path)
    # An image without content: its tokens differ by their positions alone.
    more = torch.cat([torch.randn(4, 3, 32, 32), torch.zeros(1, 3, 32, 32)])
    with torch.no_grad():
        for batch in (more, more[:1], more[:2]):
            assert max_error(run(batch), model(batch)) < 1e-4
    # The model works on, and tells what its latest real call did.
    assert handle.sizes().shape[0] == 2 and handle.sizes().sum() > 0
    assert is_fused(model) and not is_fused(handle.remove())


@pytest.mark.slow
def test_int8_of_jumbo(onnx, tmp_path):
    import onnx as onnx_package

    model, images = jumbo_vit(depth=2, embed_dim=64), torch.randn(4, 3, 32, 32)
    apply_tofu(model, PLAN)
    done = export_model(model, tmp_path / "model.onnx", images, int8=True)
    assert 1e-5 < done.error < 0.5 and [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    nodes = [node.op_type for node in onnx_package.load(done.path).graph.node]
    # Per block: qkv, proj, two layers of the MLP and two of the Jumbo FFN; and the head.
    assert nodes.count("MatMulInteger") == 2 * 6 + 1 and "Gemm" not in nodes
    # Scores, weighted sums and the cosines of both blocks stay.
    assert nodes.count("MatMul") == 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("make, dynamic_batch", [(vit, False), (jumbo, True)])
def test_torch_export(make, dynamic_batch, tmp_path):
    model, images = make(), torch.randn(3, 3, 32, 32)
    handle = apply_tofu(model, PLAN)
    done = export_model(model, tmp_path / "model.pt2", images, dynamic_batch=dynamic_batch)
    assert done.error < 1e-5 and done.agreement == 1
    run = load_exported(done.path)
    with torch.no_grad():
        assert max_error(run(images[:1]), model(images[:1])) < 1e-5
    if not dynamic_batch:
        with pytest.raises(AssertionError):
            run(images)
    assert handle.place().shape[0] == 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_export_leaves_no_stand_ins_behind(strict):
    model, images = vit(), torch.randn(2, 3, 32, 32)
    handle = apply_tofu(model, PLAN)
    torch.export.export(model, (images,), strict=strict)
    with pytest.raises(ValueError, match="nothing to tell: the latest call, if any, did not go through"):
        handle.sizes()
    model(images)
    assert handle.sizes().sum(1).max() <= 17


def test_compiled_model_tells_its_sources():
    model, images = vit(), torch.randn(2, 3, 32, 32)
    handle = apply_tofu(model, PLAN)
    with torch.no_grad():
        model(images)
        place = handle.place()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(torch.randn(2, 3, 32, 32))
        assert not torch.equal(handle.place(), place)
        compiled(images)
    assert torch.equal(handle.place(), place)


@pytest.mark.slow
def test_ties_are_broken_alike(onnx, tmp_path):
    """Keys along few axes: cosines are exactly 0 or 1, so positions alone decide."""

    class Matched(nn.Module):
        def __init__(self, by_importance):
            super().__init__()
            self.by_importance = by_importance

        def forward(self, keys):
            importance = keys.sum(-1) if self.by_importance else None
            matching = match(keys, 7, protected=1, importance=importance)
            return torch.cat([matching.sources, matching.destinations, matching.kept, matching.place], dim=1).float()

    axes = torch.randint(3, (6, 25))
    keys = nn.functional.one_hot(axes, 4).float()
    keys[-1] = 1
    for by_importance in (False, True):
        path, module = tmp_path / f"{by_importance}.onnx", Matched(by_importance).eval()
        torch.onnx.export(module, (keys,), path, dynamo=True, verbose=False)
        assert torch.equal(load_exported(path)(keys), module(keys))


def test_refusals(tmp_path):
    model, images = vit(), torch.randn(2, 3, 32, 32)
    with pytest.raises(ValueError, match=r"the file must end in \.onnx or \.pt2, as its format says, got 'model\.pt'"):
        export_model(model, tmp_path / "model.pt", images)
    with pytest.raises(ValueError, match=r"got 'model\.pt2' and 'onnx'"):
        export_model(model, tmp_path / "model.pt2", images, format="onnx")
    with pytest.raises(ValueError, match="int8 is made by onnxruntime"):
        export_model(model, tmp_path / "model.pt2", images, int8=True)
    with pytest.raises(ValueError, match=r"images must be \(B, C, H, W\) with B of at least 2, got \(1, 3, 32, 32\)"):
        export_model(model, tmp_path / "model.pt2", images[:1])
    assert not list(tmp_path.iterdir())


def test_a_file_that_differs_is_not_left_there(tmp_path):
    class Restless(nn.Module):
        def forward(self, x):
            return x.mean((2, 3)) + torch.rand(1)

    with pytest.raises(ValueError, match=r"the exported file differs from the model by 0\.\d+, more than 0\.0001"):
        export_model(Restless(), tmp_path / "model.pt2", torch.randn(2, 3, 4, 4))
    assert not list(tmp_path.iterdir())


def test_command_refuses_a_plan_of_another_depth(tmp_path, capsys):
    make_model(tmp_path / "model")
    FusionPlan.paper(12, 1).to_json(tmp_path / "plan.json")
    common = [str(tmp_path / "model"), "--plan", str(tmp_path / "plan.json")]
    for arguments in (["apply", "--images", str(make_images(tmp_path / "i"))], ["export", "--out", "x.onnx"]):
        with pytest.raises(SystemExit):
            main([arguments[0], *common, *arguments[1:]])
        assert "error: the plan is for 12 blocks, the model has 6" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["export", *common[:2], str(tmp_path / "no.json"), "--out", "x.onnx"])
    assert "error: [Errno 2] No such file or directory: " in capsys.readouterr().err
