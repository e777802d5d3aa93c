"""pytorch 195460, thop 98: parameters once, multiply-adds per call, attention included."""

import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from jumbo_core.measure import count_parameters, multiply_adds
from jumbo_core.models import JumboViT


def build(depth: int, **options) -> JumboViT:
    options = {"multiplier": 2, **options}
    return JumboViT(32, 8, num_classes=5, embed_dim=16, depth=depth, num_heads=2, **options).eval()


def counted(model: JumboViT, size: tuple[int, int]) -> int:
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, *size))
    flops = counter.get_total_flops()
    assert flops % 2 == 0
    return flops // 2


OPTIONS = [
    {},
    {"share_jumbo_ffn": False},
    {"multiplier": 0, "registers": 16},
    {"registers": 3},
    {"global_pool": ""},
    {"global_pool": "avg"},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [(32, 32), (16, 40)])
def test_closed_form_equals_counter(options, size):
    model = build(2, **options)
    assert multiply_adds(model, size) == counted(model, size)


def test_closed_form_by_hand():
    # 16 patches of 3*8*8 -> 16; T = 18 tokens of D = 16; J*D = 32; head reads 3*16.
    block = 4 * 18 * 16**2 + 2 * 18**2 * 16 + 8 * 16 * 16**2 + 8 * 32**2
    assert multiply_adds(build(2)) == 16 * 192 * 16 + 2 * block + 48 * 5


def test_depth_adds_no_shared_ffn_parameters_but_doubles_its_multiply_adds():
    shared_ffn = 8 * 32**2 + 5 * 32
    two, four = build(2), build(4)
    assert count_parameters(two.encoder.jumbo_mlp) == count_parameters(four.encoder.jumbo_mlp) == shared_ffn
    per_block = (count_parameters(four) - count_parameters(two)) // 2
    assert per_block == count_parameters(two.blocks[0])
    wider = build(2, jumbo_mlp_ratio=8.0)
    wider4 = build(4, jumbo_mlp_ratio=8.0)
    extra = 8 * 32**2  # ratio 8 instead of 4 adds this many multiply-adds per block
    assert multiply_adds(wider) - multiply_adds(two) == 2 * extra
    assert multiply_adds(wider4) - multiply_adds(four) == 4 * extra


# METHODS.md: parameters in M (of the released file, which carries a dead class token of width D), GMAC at 224.
RELEASED = {
    "pico": (96, "4.779", "0.404", "2.657"),
    "nano": (128, "8.142", "0.669", "4.722"),
    "tiny": (192, "17.521", "1.397", "10.623"),
    "small": (384, "66.891", "5.150", "42.479"),
    "base": (768, "131.407", "18.090", "42.479"),
}


@pytest.mark.parametrize("size", RELEASED)
def test_released_sizes(size):
    width, parameters, gmac, ffn = RELEASED[size]
    with torch.device("meta"):
        model = timm.create_model(f"jumbo_{size}_patch16_224")
    assert not any("cls_token" in name for name, _ in model.named_parameters())
    assert f"{(count_parameters(model) + width) / 1e6:.3f}" == parameters
    assert f"{multiply_adds(model) / 1e9:.3f}" == gmac
    assert f"{count_parameters(model.encoder.jumbo_mlp) / 1e6:.3f}" == ffn


def test_large_is_ours():
    with torch.device("meta"):
        assert f"{count_parameters(timm.create_model('jumbo_large_patch16_224')) / 1e6:.1f}" == "383.1"


def test_other_models_have_no_closed_form():
    with pytest.raises(TypeError, match="supported: JumboViT"):
        multiply_adds(torch.nn.Linear(2, 2))
