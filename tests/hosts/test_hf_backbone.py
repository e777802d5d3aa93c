"""Jumbo as a backbone of Transformers: maps, stages, what is frozen."""

from copy import deepcopy

import pytest
import torch

pytest.importorskip("transformers")
from hf_ext import JumboBackbone
from tests.hosts.hf_models import config, randomised


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32)


@pytest.mark.parametrize("stages", [["stem"], ["stage1"], ["stage3"], ["stem", "stage2"]])
@pytest.mark.parametrize("layernorm", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_case_20_backbone_freezes_exactly_what_gets_no_gradient(stages, layernorm, shared, images):
    options = config(out_features=stages, apply_layernorm=layernorm, share_jumbo_ffn=shared)
    model = randomised(JumboBackbone(options))
    chosen = {name for name, p in model.named_parameters() if p.requires_grad}
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    sum(f.square().sum() for f in model(images).feature_maps).backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert chosen == reached


def test_backbone_maps(images):
    options = config(registers=3, out_features=["stem", "stage1", "stage3"])
    model = randomised(JumboBackbone(options)).eval()
    core = model.jumbo.vit
    with torch.no_grad():
        out = model(images, output_hidden_states=True)
        maps = core.forward_intermediates(images, [0, 2], norm=True, intermediates_only=True)
    assert model.channels == [16, 16, 16] and [f.shape for f in out.feature_maps] == [(2, 16, 4, 4)] * 3
    assert torch.equal(out.feature_maps[1], maps[0]) and torch.equal(out.feature_maps[2], maps[1])
    stem = core.norm(out.hidden_states[0])[:, core.num_prefix_tokens :]
    assert torch.equal(out.feature_maps[0].flatten(2).transpose(1, 2), stem)
    assert len(out.hidden_states) == 4 and model(images).hidden_states is None
    assert [f.shape for f in model(torch.randn(1, 3, 16, 40)).feature_maps] == [(1, 16, 2, 5)] * 3


def test_backbone_is_frozen_alike_after_loading_and_copying(tmp_path):
    def frozen(net):
        return {name for name, p in net.named_parameters() if not p.requires_grad}

    model = JumboBackbone(config(out_indices=[1]))
    model.save_pretrained(tmp_path)
    loaded, _ = JumboBackbone.from_pretrained(tmp_path, output_loading_info=True)
    again, copied = JumboBackbone.from_pretrained(tmp_path), deepcopy(model)
    assert frozen(model) and frozen(loaded) == frozen(again) == frozen(copied) == frozen(model)
    for net in (loaded, copied):
        net.out_indices = [3]
        assert frozen(net) == frozen(JumboBackbone(config(out_indices=[3])))


def test_backbone_runs_no_block_in_vain_and_can_be_repointed(images):
    model = JumboBackbone(config(out_indices=[1]))
    ran = []
    for i, block in enumerate(model.jumbo.vit.blocks):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    model(images)
    assert ran == [0]
    model.out_features = ["stage2", "stage3"]
    assert len(model(images).feature_maps) == 2 and ran == [0, 0, 1, 2]
    assert all(p.requires_grad for p in model.jumbo.vit.blocks[1].parameters())
    model.train()
    model.jumbo.vit.patch_drop_rate = 0.5
    with pytest.raises(ValueError, match=r"holes while patch_drop_rate is 0\.5"):
        model(images)
