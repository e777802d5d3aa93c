"""torch.export with a dynamic batch, torch.compile in one graph, bf16 autocast, ONNX through onnxruntime."""

import numpy as np
import onnxruntime
import pytest
import timm
import torch

from tests.conftest import max_error

VARIANTS = [
    {},
    {"registers": 3, "layer_scale": 0.1},
    {"multiplier": 0, "registers": 4},
    {"share_jumbo_ffn": False},
    {"name": "test_adventurer", "chunk_size": 5},
    {"name": "test_jumbo_adventurer"},
]


def model(name="test_jumbo", **options):
    return timm.create_model(name, num_classes=5, init="short", **options).eval()


@pytest.mark.parametrize("options", VARIANTS)
def test_export_with_dynamic_batch(options):
    net = model(**options)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(net, (torch.randn(2, 3, 32, 32),), dynamic_shapes=({0: batch},))
    for size in (1, 2, 7):
        image = torch.randn(size, 3, 32, 32)
        assert max_error(program.module()(image), net(image)) < 1e-5


@pytest.mark.parametrize("name", ["test_jumbo", "test_adventurer", "test_jumbo_adventurer"])
@pytest.mark.parametrize("train", [False, True])
def test_compile_full_graph(train, name):
    torch.compiler.reset()  # all models share one forward, whose compilations are counted together
    net = model(name, drop_path_rate=0.0).train(train)
    compiled = torch.compile(net, fullgraph=True, backend="inductor" if not train else "aot_eager")
    image = torch.randn(2, 3, 32, 32)
    with torch.set_grad_enabled(train):
        assert max_error(compiled(image), net(image)) < 1e-5
        other = torch.randn(2, 3, 16, 48)
        assert max_error(compiled(other), net(other)) < 1e-5
    if train:
        compiled(image).sum().backward()
        assert net.patch_embed.proj.weight.grad is not None


@pytest.mark.parametrize("options", VARIANTS)
def test_bf16_autocast(options):
    net, image = model(**options), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        reference = net.forward_features(image)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = net.forward_features(image)
            assert net(image).dtype == torch.bfloat16
    assert max_error(mixed.float(), reference) < 3e-2
    with torch.autocast("cpu", torch.bfloat16):
        net.train()(image).float().sum().backward()
    trained = [p for p in net.parameters() if p.requires_grad]
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in trained)


@pytest.mark.parametrize("options", VARIANTS)
def test_onnx_equals_eager(options, tmp_path):
    net = model(**options)
    path = tmp_path / "jumbo.onnx"
    batch = torch.export.Dim("batch", min=1, max=64)
    torch.onnx.export(net, (torch.randn(2, 3, 32, 32),), path, dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for size in (1, 5):
        image = torch.randn(size, 3, 32, 32)
        (logits,) = session.run(None, {session.get_inputs()[0].name: image.numpy()})
        assert np.abs(logits - net(image).detach().numpy()).max() < 1e-4
