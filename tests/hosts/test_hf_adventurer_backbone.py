"""The linear-time encoder as a backbone of Transformers: maps, stages, what is frozen."""

import pytest
import torch

from tests.conftest import max_error

pytest.importorskip("transformers")
from hf_ext import AdventurerBackbone
from tests.hosts.hf_models import linear_config, randomised


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32)


@pytest.mark.parametrize("stages", [["stem"], ["stage1"], ["stage3"], ["stem", "stage2"]])
@pytest.mark.parametrize("layernorm", [True, False])
@pytest.mark.parametrize("options", [{}, dict(multiplier=2), dict(multiplier=2, share_jumbo_ffn=False)])
def test_case_20_backbone_freezes_exactly_what_gets_no_gradient(stages, layernorm, options, images):
    model = randomised(AdventurerBackbone(linear_config(out_features=stages, apply_layernorm=layernorm, **options)))
    chosen = {name for name, p in model.named_parameters() if p.requires_grad}
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    sum(f.square().sum() for f in model(images).feature_maps).backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert chosen == reached


@pytest.mark.parametrize("multiplier", [0, 2])
def test_backbone_maps(multiplier, tmp_path, images):
    options = linear_config(multiplier=multiplier, out_features=["stem", "stage1", "stage2", "stage3"])
    model = randomised(AdventurerBackbone(options)).eval()
    core = model.adventurer.vit
    with torch.no_grad():
        out = model(images, output_hidden_states=True)
        maps = core.forward_intermediates(images, [0, 1, 2], norm=True, intermediates_only=True)
    assert model.channels == [16] * 4 and [f.shape for f in out.feature_maps] == [(2, 16, 4, 4)] * 4
    assert all(torch.equal(a, b) for a, b in zip(out.feature_maps[1:], maps, strict=True))
    for feature_map, state in zip(out.feature_maps, out.hidden_states, strict=True):
        assert max_error(feature_map.flatten(2).transpose(1, 2), core.norm(state)[:, :16]) < 1e-6
    model.save_pretrained(tmp_path)
    loaded = AdventurerBackbone.from_pretrained(tmp_path, out_indices=[1])
    assert max_error(loaded(images).feature_maps[0], out.feature_maps[1]) < 1e-6
    assert not any(p.requires_grad for p in loaded.adventurer.vit.blocks[1].parameters())
    assert [f.shape for f in model(torch.randn(1, 3, 16, 40)).feature_maps] == [(1, 16, 2, 5)] * 4


def test_backbone_runs_no_block_in_vain(images):
    model = AdventurerBackbone(linear_config(out_indices=[1]))
    ran = []
    for i, block in enumerate(model.adventurer.vit.blocks):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    model(images, output_hidden_states=True)
    assert ran == [0]
    model.train()
    model.adventurer.vit.patch_drop_rate = 0.5
    with pytest.raises(ValueError, match=r"holes while patch_drop_rate is 0\.5"):
        model(images)
