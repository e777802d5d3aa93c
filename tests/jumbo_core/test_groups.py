"""param_groups: who decays, who learns slower, what is refused."""

import pytest
import timm
import torch

from jumbo_core.jumbo import param_groups


def model(**options):
    return timm.create_model("test_jumbo", num_classes=5, registers=2, depth=3, **options)


def placed(net, **options) -> dict[str, dict]:
    """Parameter name -> its group."""
    groups = param_groups(net, 1e-3, 0.05, **options)
    by_id = {id(p): group for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(by_id)
    return {name: by_id[id(p)] for name, p in net.named_parameters() if id(p) in by_id}


def test_every_parameter_once():
    net = model()
    assert set(placed(net)) == {name for name, _ in net.named_parameters()}


def test_no_decay_for_norms_biases_positions_and_tokens():
    for name, group in placed(model()).items():
        expected = 0.0 if name.endswith(("bias", "norm.weight", "_token", "pos_embed")) or ".norm" in name else 0.05
        assert group["weight_decay"] == expected, name


def test_shared_ffn_is_slower():
    for name, group in placed(model()).items():
        assert group["lr"] == pytest.approx(3e-4 if "jumbo_mlp" in name else 1e-3), name
    assert placed(model(), jumbo_lr_scale=1.0)["encoder.jumbo_mlp.fc1.weight"]["lr"] == 1e-3


def test_layer_decay():
    groups = placed(model(), layer_decay=0.5)
    scale = {name: group["lr_scale"] for name, group in groups.items()}
    assert scale["head.weight"] == scale["encoder.norm.weight"] == 1.0
    assert [scale[f"encoder.blocks.{i}.mlp.fc1.weight"] for i in range(3)] == [0.125, 0.25, 0.5]
    assert scale["pos_embed"] == scale["patch_embed.proj.weight"] == scale["encoder.jumbo_token"] == 0.0625
    assert scale["encoder.jumbo_mlp.fc1.weight"] == 0.3
    unshared = placed(model(share_jumbo_ffn=False), layer_decay=0.5)
    assert unshared["encoder.jumbo_mlp.0.fc1.weight"]["lr_scale"] == pytest.approx(0.3 * 0.125)


def test_frozen_parameters_are_left_out_and_wrapping_does_not_matter():
    net = model()
    net.encoder.jumbo_mlp.requires_grad_(False)
    wrapped = torch.nn.ModuleDict({"backbone": net})
    assert not any("jumbo_mlp" in name for name in placed(wrapped))
    assert placed(wrapped)["backbone.pos_embed"]["weight_decay"] == 0.0


def test_works_with_optimizer_and_scheduler():
    optimizer = torch.optim.AdamW(param_groups(model(), 1e-3, 0.05))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert all(group["lr"] == pytest.approx(0.5e-3 * group["lr_scale"]) for group in optimizer.param_groups)
    optimizer.step()
    scheduler.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(lr=0.0), "lr must be finite and > 0, got 0.0"),
        (dict(lr=float("nan")), "lr must be finite and > 0, got nan"),
        (dict(weight_decay=-1.0), "weight_decay must be finite and >= 0, got -1.0"),
        (dict(jumbo_lr_scale=0.0), "jumbo_lr_scale must be finite and > 0"),
        (dict(layer_decay=1.5), r"layer_decay must lie in \(0, 1\], got 1.5"),
    ],
)
def test_bad_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        param_groups(model(), **{"lr": 1e-3, "weight_decay": 0.05, **options})


def test_nothing_to_train():
    with pytest.raises(ValueError, match="JumboViT has no trainable parameter"):
        param_groups(model().requires_grad_(False), 1e-3, 0.05)
