"""Groups of the optimizer: the backbone's from the core, heads at the common rate, nothing twice or forgotten."""

import pytest
import torch

pytest.importorskip("mmseg", reason="needs the extra mmseg-lite")

from mmengine.optim import build_optim_wrapper
from torch import nn

from jumbo_core.jumbo import param_groups
from tests.mmseg_ext.helpers import tiny


class Segmentor(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.backbone = tiny(**options)
        self.neck = nn.Sequential(nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8))
        self.decode_head = nn.Conv2d(8, 3, 1)
        self.temperature = nn.Parameter(torch.ones(1, 1))


def build(model, *, optimizer=None, **paramwise):
    config = dict(
        type="OptimWrapper",
        optimizer=optimizer or dict(type="AdamW", lr=0.1, weight_decay=0.2),
        constructor="JumboLayerDecayOptimWrapperConstructor",
        paramwise_cfg=paramwise,
    )
    return build_optim_wrapper(model, config)


def rates(model, wrapper) -> dict[str, tuple[float, float]]:
    groups = wrapper.optimizer.param_groups
    found = {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert len(found) == sum(len(g["params"]) for g in groups)
    names = {name: found.pop(id(p)) for name, p in model.named_parameters() if p.requires_grad}
    assert not found
    return names


def test_rates_and_decay():
    model = Segmentor(final_norm=True, out_indices=(0, 1, 2))
    got = rates(model, build(model, layer_decay_rate=0.5, jumbo_lr_scale=0.3))
    depth = 3
    expected = {
        "backbone.vit.pos_embed": (0.1 * 0.5 ** (depth + 1), 0.0),
        "backbone.vit.encoder.jumbo_token": (0.1 * 0.5 ** (depth + 1), 0.0),
        "backbone.vit.patch_embed.proj.weight": (0.1 * 0.5 ** (depth + 1), 0.2),
        "backbone.vit.encoder.blocks.0.mlp.fc1.weight": (0.1 * 0.5**3, 0.2),
        "backbone.vit.encoder.blocks.2.norm1.weight": (0.1 * 0.5, 0.0),
        "backbone.vit.encoder.jumbo_mlp.fc1.weight": (0.1 * 0.3, 0.2),
        "backbone.vit.encoder.norm.weight": (0.1, 0.0),
        "neck.0.weight": (0.1, 0.2),
        "neck.1.weight": (0.1, 0.0),
        "decode_head.weight": (0.1, 0.2),
        "decode_head.bias": (0.1, 0.0),
        "temperature": (0.1, 0.2),
    }
    for name, (lr, decay) in expected.items():
        assert got[name] == pytest.approx((lr, decay)), name


def test_backbone_groups_are_the_cores():
    model = Segmentor()
    wrapper = build(model, layer_decay_rate=0.7, jumbo_lr_scale=0.2)
    theirs = param_groups(model.backbone, 0.1, 0.2, jumbo_lr_scale=0.2, layer_decay=0.7)
    for group, expected in zip(wrapper.optimizer.param_groups, theirs, strict=False):
        assert group["lr"] == expected["lr"] and group["weight_decay"] == expected["weight_decay"]
        assert [id(p) for p in group["params"]] == [id(p) for p in expected["params"]]


@pytest.mark.parametrize("paramwise", [{}, dict(layer_decay_rate=1.0)])
def test_without_layer_decay(paramwise):
    model = Segmentor(final_norm=True)
    got = rates(model, build(model, **paramwise))
    assert {lr for name, (lr, _) in got.items() if "jumbo_mlp" not in name} == {0.1}
    assert all(lr == pytest.approx(0.03) for name, (lr, _) in got.items() if "jumbo_mlp" in name)


def test_frozen_parameters_are_left_out():
    model = Segmentor(frozen_stages=3)
    assert not any(name.startswith("backbone.") for name in rates(model, build(model)))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to optimise"):
        build(model)


def test_a_step_moves_every_group():
    model = Segmentor(final_norm=True)
    wrapper = build(model, optimizer=dict(type="SGD", lr=0.1, weight_decay=0.0, momentum=0.9))
    before = [p.clone() for p in model.parameters() if p.requires_grad]
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    wrapper.step()
    after = [p for p in model.parameters() if p.requires_grad]
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("optimizer", "paramwise", "message"),
    [
        (None, dict(num_layers=12), "num_layers"),
        (None, dict(layer_decay_rate=0.0), "0.0"),
        (None, dict(layer_decay_rate=1.5), "1.5"),
        (None, dict(jumbo_lr_scale=0), "jumbo_lr_scale"),
        (dict(type="AdamW", lr=0.1), {}, "weight_decay"),
        (dict(type="AdamW", weight_decay=0.1), {}, "lr"),
    ],
)
def test_wrong_options(optimizer, paramwise, message):
    with pytest.raises(ValueError, match=message):
        build(Segmentor(), optimizer=optimizer, **paramwise)


def test_other_backbones_are_refused():
    with pytest.raises(ValueError, match="Linear"):
        build(nn.Linear(2, 2))
    model = Segmentor()
    model.backbone = nn.Conv2d(3, 16, 1)
    with pytest.raises(ValueError, match="Conv2d"):
        build(model)
