"""Who records: transforms of torch.func and forward-mode differentiation, with gradients off, get right answers."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from jumbo_core.modes import recorded
from tests.conftest import max_error

NAMES = ["test_jumbo", "test_adventurer", "test_jumbo_adventurer"]


def trained(name: str) -> nn.Module:
    model = timm.create_model(name, num_classes=5, init="short").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def images(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32)


def test_who_records():
    assert recorded()  # autograd
    seen = []
    with torch.no_grad():
        assert not recorded()
        torch.func.vmap(lambda x: (seen.append(recorded()), x)[1])(torch.ones(2))
        torch.func.jvp(lambda x: (seen.append(recorded()), x)[1], (torch.ones(2),), (torch.ones(2),))
        with forward_ad.dual_level():
            assert recorded()
        assert seen == [True, True] and not recorded()
    with torch.inference_mode():
        assert not recorded()


@pytest.mark.parametrize("name", NAMES)
def test_vmap_over_images_and_ensembles(name):
    models, x = [trained(name) for _ in range(3)], images()
    with torch.no_grad():
        one_by_one = torch.stack([models[0](image[None]) for image in x])
        assert max_error(torch.func.vmap(models[0])(x[:, None]), one_by_one) < 1e-4
        parameters, buffers = torch.func.stack_module_state(models)
        skeleton = copy.deepcopy(models[0]).to("meta")

        def run(*state: dict) -> torch.Tensor:
            return torch.func.functional_call(skeleton, state, (x,))

        together = torch.func.vmap(run)(parameters, buffers)
        assert max_error(together, torch.stack([model(x) for model in models])) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_without_gradients(name):
    model, x, direction = trained(name).double(), images().double(), images().double()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # torch's other attention on CPUs has no forward mode
        expected = (model(x + 1e-5 * direction) - model(x - 1e-5 * direction)) / 2e-5
        y, tangent = torch.func.jvp(model, (x,), (direction,))
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(model(forward_ad.make_dual(x, direction)))
        assert max_error(y, model(x)) < 1e-9 and max_error(dual.primal, y) < 1e-9
    assert expected.abs().max() > 1e-3
    assert max_error(tangent, expected) < 1e-6 and max_error(dual.tangent, expected) < 1e-6
