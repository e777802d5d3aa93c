"""Fused models in use: training, checkpointing, empty batches, precision, export, compilers, ONNX."""

import pytest
import torch
from timm.layers import set_reentrant_ckpt

from jumbo_core.tofu import FusionPlan, apply_tofu
from tests.conftest import max_error
from tests.jumbo_core.fused_models import PLAN, jumbo_vit, timm_vit


@pytest.mark.parametrize("make", [timm_vit, jumbo_vit])
@pytest.mark.parametrize("dense", [False, True])
def test_training_and_gradient_checkpointing(make, dense, image):
    model = make()
    apply_tofu(model, PLAN, proportional=True)
    model.train()
    model.requires_grad_(True)

    def loss_of(model):
        if dense:
            return model.forward_intermediates(image, intermediates_only=True)[-1].square().sum()
        # Two views, then another size and batch without gradients: backward must recompute each call as it was.
        loss = model(image).square().sum() + model(image.flip(0) * 0.7).square().sum()
        with torch.no_grad():
            model(image[:1] * 3)
        return loss

    torch.manual_seed(1)  # the Jumbo block has drop path
    names = [n for n, _ in model.named_parameters()]
    plain = torch.autograd.grad(loss_of(model), list(model.parameters()), allow_unused=dense)
    if not dense:
        weights = [g for n, g in zip(names, plain, strict=True) if "blocks" in n and not n.endswith("bias")]
        assert all(gradient.abs().sum() > 0 for gradient in weights)
    model.set_grad_checkpointing(True)
    torch.manual_seed(1)
    loss = loss_of(model)
    loss.backward()
    for name, parameter, expected in zip(names, model.parameters(), plain, strict=True):
        if expected is not None:
            assert max_error(parameter.grad, expected) < 1e-5 * max(1, expected.abs().max().item()), name
    set_reentrant_ckpt(True)  # hands detached tensors to the second run
    try:
        torch.manual_seed(1)
        model.zero_grad()
        loss_of(model).backward()
    finally:
        set_reentrant_ckpt(False)
    for name, parameter, expected in zip(names, model.parameters(), plain, strict=True):
        if expected is not None:
            assert max_error(parameter.grad, expected) < 1e-5 * max(1, expected.abs().max().item()), name
    # The run after a backward starts afresh.
    model.eval()
    assert torch.equal(model(image), model(image))


@pytest.mark.parametrize("op", ["prune", "average", "mlerp"])
def test_an_empty_batch(op):
    model = timm_vit()
    apply_tofu(model, FusionPlan.uniform(len(model.blocks), 2, op), proportional=True)
    assert model(torch.zeros(0, 3, 32, 32)).shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [timm_vit, jumbo_vit])
def test_half_precision(make, dtype, image):
    model = make()
    with torch.no_grad():
        apply_tofu(model, PLAN, proportional=True)
        reference = model(image)
        with torch.autocast("cpu", dtype=dtype):
            cast = model(image)
        assert cast.isfinite().all() and max_error(cast.float(), reference) < 0.3  # other tokens may be chosen
        half = model.to(dtype)(image.to(dtype))
        assert half.dtype == dtype and half.isfinite().all()


@pytest.mark.parametrize("make", [timm_vit, jumbo_vit])
@pytest.mark.parametrize("proportional", [False, True])
def test_export_and_compile(make, proportional, image):
    model = make()
    apply_tofu(model, PLAN, proportional=proportional)
    with torch.no_grad():
        expected = model(image)
        exported = torch.export.export(model, (image,)).module()
        assert max_error(exported(image), expected) < 1e-5
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert max_error(compiled(image), expected) < 1e-5
        assert max_error(compiled(image.flip(0)), expected.flip(0)) < 1e-5
        assert max_error(model(image), expected) == 0


def test_onnx(image, tmp_path):
    """Through onnxruntime, with a batch that may change; equal tokens in it, so that ties decide."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, path = timm_vit(), tmp_path / "fused.onnx"
    apply_tofu(model, PLAN, proportional=True)
    batch = torch.export.Dim("batch", min=2, max=64)
    torch.onnx.export(model, (image,), path, dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    image = torch.cat([image, torch.zeros(1, 3, 32, 32)])
    with torch.no_grad():
        expected = model(image)
    (out,) = session.run(None, {session.get_inputs()[0].name: image.numpy()})
    assert max_error(torch.from_numpy(out), expected) < 1e-4
