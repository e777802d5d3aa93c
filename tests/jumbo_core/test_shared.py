"""The shared Jumbo FFN's gradient in one product: what autograd gives pass by pass, on every way through it."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from jumbo_core.jumbo import JumboEncoder
from jumbo_core.jumbo.shared import SharedPasses
from jumbo_core.linear import AdventurerEncoder


def encoder(kind: str, **options) -> nn.Module:
    torch.manual_seed(0)
    if kind == "jumbo":
        net = JumboEncoder(8, 4, 2, multiplier=2, drop_path=0.0, **options)
    else:
        net = AdventurerEncoder(8, 4, multiplier=2, head_dim=4, d_state=4, drop_path=0.0, **options)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return net.double()


def pass_by_pass(net: nn.Module) -> nn.Module:
    """The same net, each pass with a gradient of its own: a hook is reason enough."""
    net = copy.deepcopy(net)
    net.jumbo_mlp.act.register_forward_hook(lambda *_: None)
    assert not SharedPasses.serve(net.jumbo_mlp, 4)
    return net


def gradients(net: nn.Module, x: torch.Tensor, loss=lambda out: out.jumbo.square().sum() + out.patches.sin().sum()):
    x = x.clone().requires_grad_()
    loss(net(x)).backward()
    return {"x": x.grad, **{name: p.grad for name, p in net.named_parameters()}}


def assert_same(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradient is None) == (got[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(got[name], gradient, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


X = torch.randn(3, 5, 8, dtype=torch.double, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["jumbo", "linear"])
@pytest.mark.parametrize("mode", ["train", "eval", "checkpointed"])
def test_gradients_are_those_of_every_pass_for_itself(kind, mode, monkeypatch):
    net = encoder(kind).train(mode != "eval")
    net.gradient_checkpointing = mode == "checkpointed"
    expected = gradients(pass_by_pass(net), X)
    sums = []
    original = SharedPasses.linear
    monkeypatch.setattr(SharedPasses, "linear", lambda self, *a: (sums.append(a[1:]), original(self, *a))[1])
    assert_same(gradients(net, X), expected)
    assert {(layer, i) for layer in (0, 1) for i in range(4)} == set(sums)  # it did go this way


@pytest.mark.parametrize("kind", ["jumbo", "linear"])
def test_what_a_loss_does_not_reach_does_not_count(kind):
    for loss in (lambda out: out.patches.sum(), lambda out: out.jumbo[:, 0].sum()):
        net = encoder(kind)
        assert_same(gradients(net, X, loss), gradients(pass_by_pass(net), X, loss))


def test_backward_twice_and_gradients_of_inputs_alone():
    net, x = encoder("jumbo"), X.clone().requires_grad_()
    expected = gradients(pass_by_pass(net), X)
    out = net(x)
    loss = out.jumbo.square().sum() + out.patches.sin().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    torch.testing.assert_close(first, expected["x"])
    loss.backward(retain_graph=True)  # what the last line left behind is not counted again
    torch.testing.assert_close(net.jumbo_mlp.fc1.weight.grad, expected["jumbo_mlp.fc1.weight"])
    loss.backward()
    torch.testing.assert_close(net.jumbo_mlp.fc2.bias.grad, 2 * expected["jumbo_mlp.fc2.bias"])


def test_losses_that_pass_through_different_blocks():
    net = encoder("jumbo")
    reference = pass_by_pass(net)
    for one in (net, reference):
        _, collected = one(X, collect=(0, 1, 3))
        total = torch.stack([tokens.square().sum() for tokens in collected.values()])
        total[0].backward(retain_graph=True)
        total[2].backward(retain_graph=True)
        total[1].backward()
    assert_same(*({n: p.grad for n, p in one.named_parameters()} for one in (net, reference)))


def test_reentrant_checkpointing():
    net = encoder("jumbo").train()
    expected = gradients(pass_by_pass(net), X)
    net.gradient_checkpointing = True
    net._gradient_checkpointing_func = lambda *a: checkpoint(*a, use_reentrant=True)
    assert_same(gradients(net, X), expected)


def test_second_derivatives():
    net = encoder("jumbo")
    results = []
    for one in (net, pass_by_pass(net)):
        x = X.clone().requires_grad_()
        weights = [one.jumbo_mlp.fc1.weight, one.jumbo_mlp.fc2.weight]
        with sdpa_kernel(SDPBackend.MATH):  # torch's fused attention has no second derivatives
            first = torch.autograd.grad(one(x).patches.sin().sum(), [x, *weights], create_graph=True)
            penalty = sum(g.square().sum() for g in first)
            results.append(torch.autograd.grad(penalty, [x, *weights, one.jumbo_mlp.fc1.bias]))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_gradients_of_several_outputs_at_once():
    net = encoder("jumbo")
    results = []
    for one in (net, pass_by_pass(net)):
        out = one(X[:1]).jumbo.flatten()
        eye = torch.eye(len(out), dtype=out.dtype)
        results.append(torch.autograd.grad(out, [one.jumbo_mlp.fc1.weight], eye, is_grads_batched=True)[0])
    torch.testing.assert_close(*results)


def test_accumulation_over_batches_and_gradcheck():
    net = encoder("jumbo")
    whole = gradients(copy.deepcopy(net), X)
    for sample in X:
        gradients(net, sample[None])
    torch.testing.assert_close(net.jumbo_mlp.fc1.weight.grad, whole["jumbo_mlp.fc1.weight"])
    weight = net.jumbo_mlp.fc2.weight

    def of_a_row(row):
        with torch.no_grad():
            weight[0].copy_(row.detach())
        return net(X).patches.sum()

    loss = of_a_row(weight[0].detach().clone())
    analytic = torch.autograd.grad(loss, weight)[0][0]
    base, step = weight[0].detach().clone(), 1e-6
    for i in range(3):
        shift = torch.zeros_like(base).index_fill(0, torch.tensor([i]), step)
        slope = (of_a_row(base + shift) - of_a_row(base - shift)) / (2 * step)
        assert slope.item() == pytest.approx(analytic[i].item(), rel=1e-6, abs=1e-8)
        of_a_row(base)


def test_left_to_autograd_where_somebody_looks_or_changes_things():
    net = encoder("jumbo")
    assert SharedPasses.serve(net.jumbo_mlp, 4) and not SharedPasses.serve(net.jumbo_mlp, 1)
    assert net.shared_passes(4) is not None and encoder("jumbo", share_jumbo_ffn=False).shared_passes(4) is None
    with torch.no_grad():
        assert not SharedPasses.serve(net.jumbo_mlp, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert not SharedPasses.serve(net.jumbo_mlp, 4)
    hook = net.jumbo_mlp.fc1.register_full_backward_hook(lambda *_: None)
    assert not SharedPasses.serve(net.jumbo_mlp, 4)
    hook.remove()
    net.jumbo_mlp.fc2.bias.requires_grad_(False)
    assert not SharedPasses.serve(net.jumbo_mlp, 4)
    net.jumbo_mlp.fc2.bias.requires_grad_(True)
    nn.utils.parametrizations.weight_norm(net.jumbo_mlp.fc2)
    assert not SharedPasses.serve(net.jumbo_mlp, 4)


def test_functional_calls_take_the_tensors_they_are_given():
    net = encoder("jumbo")
    names = dict(net.named_parameters())
    other = {name: (2 * p.detach()).requires_grad_() for name, p in names.items()}
    torch.func.functional_call(net, other, (X,)).patches.sum().backward()
    assert other["jumbo_mlp.fc1.weight"].grad.any() and net.jumbo_mlp.fc1.weight.grad is None
    per_sample = torch.func.vmap(
        torch.func.grad(lambda p, x: torch.func.functional_call(net, p, (x[None],)).patches.sum()), in_dims=(None, 0)
    )({name: p.detach() for name, p in names.items()}, X)
    net(X).patches.sum().backward()
    torch.testing.assert_close(per_sample["jumbo_mlp.fc1.weight"].sum(0), net.jumbo_mlp.fc1.weight.grad)


def test_a_block_that_runs_the_ffn_twice_is_an_error_not_a_wrong_gradient():
    net = encoder("jumbo")
    forward = net.blocks[1].feed
    net.blocks[1].feed = lambda x, ffn: forward(forward(x, ffn), ffn)
    with pytest.raises(RuntimeError, match="more than once"):
        net(X).patches.sum().backward()


@pytest.mark.parametrize("wanted", ["inputs", "all", "none"])
def test_nothing_stays_behind(wanted):
    net, x = encoder("jumbo"), X.clone().requires_grad_()
    passes = []
    make = net.shared_passes
    net.shared_passes = lambda count: passes.append(make(count)) or passes[-1]
    loss = net(x).patches.sum()
    rows = passes[0].rows
    if wanted == "inputs":
        torch.autograd.grad(loss, x)
        assert len(rows) == 8
        kept = weakref.ref(next(iter(rows.values()))[0])
    elif wanted == "all":
        loss.backward()
        assert not rows
        kept = weakref.ref(passes[0].flags)
    else:
        kept = weakref.ref(passes[0].flags)
    del loss, rows
    passes.clear()
    assert kept() is None


def test_whatever_the_default_device():
    net = encoder("jumbo")
    expected = gradients(net, X)["jumbo_mlp.fc1.weight"].clone()
    net.zero_grad()
    with torch.device("meta"):
        out = net(X)
    (out.jumbo.square().sum() + out.patches.sin().sum()).backward()
    torch.testing.assert_close(net.jumbo_mlp.fc1.weight.grad, expected)


def _distributed(rank: int, folder: str) -> None:
    """Gradients of two processes, half of the batch each, with and without checkpointing."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        model = nn.parallel.DistributedDataParallel(PatchMean())
        for checkpointed in (False, True):
            model.module.net.gradient_checkpointing = checkpointed
            model.zero_grad()
            with model.no_sync():
                model(X[rank : rank + 1]).backward()
            model(X[rank : rank + 1]).backward()
            if rank == 0:
                torch.save({n: p.grad for n, p in model.module.named_parameters()}, f"{folder}/{checkpointed}.pt")
    finally:
        torch.distributed.destroy_process_group()


class PatchMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = encoder("jumbo").train()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        jumbo, patches = self.net(x)
        return jumbo.square().sum() + patches.square().sum()


def test_two_processes(tmp_path):
    torch.multiprocessing.spawn(_distributed, (str(tmp_path),), nprocs=2)
    model = PatchMean()
    model.net = pass_by_pass(model.net)
    model(X[:2]).backward()  # DDP takes the mean of two processes, each of which saw its sample twice
    expected = {name: p.grad for name, p in model.named_parameters()}
    for checkpointed in (False, True):
        assert_same(torch.load(tmp_path / f"{checkpointed}.pt", weights_only=True), expected)


def test_bfloat16_models_train():
    net = encoder("jumbo").bfloat16()
    expected = gradients(pass_by_pass(net).double(), X)
    got = gradients(net, X.bfloat16())["jumbo_mlp.fc1.weight"]
    assert (got.double() - expected["jumbo_mlp.fc1.weight"]).norm() < 0.05 * expected["jumbo_mlp.fc1.weight"].norm()
