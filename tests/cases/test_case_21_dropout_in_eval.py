"""torch-harmonics 221: dropout acts in training and only there."""

import timm
import torch

from ts_ext import JumboPatchTST

RATES = dict(drop_rate=0.5, pos_drop_rate=0.5, proj_drop_rate=0.5, attn_drop_rate=0.5, drop_path_rate=0.5)


def test_eval_repeats_and_training_differs():
    for extra in ({}, {"patch_drop_rate": 0.5}, {"multiplier": 0, "registers": 4}):
        model = timm.create_model("test_jumbo", num_classes=5, init="short", **RATES, **extra)
        image = torch.randn(4, 3, 32, 32)
        model.eval()
        assert torch.equal(model(image), model(image))
        with torch.no_grad():
            assert torch.equal(model(image), model(image))
        model.train()
        assert not torch.equal(model(image), model(image))


def test_each_rate_acts_in_training():
    image = torch.randn(4, 3, 32, 32)
    for name in RATES:
        options = {"drop_path_rate": 0.0, name: 0.5}
        model = timm.create_model("test_jumbo", num_classes=5, init="short", **options).train()
        assert not torch.equal(model(image), model(image)), name
    quiet = timm.create_model("test_jumbo", num_classes=5, init="short", drop_path_rate=0.0).train()
    assert torch.equal(quiet(image), quiet(image))


def test_linear_models():
    image = torch.randn(4, 3, 32, 32)
    rates = dict(drop_rate=0.5, pos_drop_rate=0.5, proj_drop_rate=0.5, drop_path_rate=[0.5, 0.5], patch_drop_rate=0.5)
    for name in ("test_adventurer", "test_jumbo_adventurer"):
        for rate, value in rates.items():
            model = timm.create_model(name, num_classes=5, init="short", **{rate: value}).train()
            assert not torch.equal(model(image), model(image)), rate
            assert torch.equal(model.eval()(image), model(image))
        quiet = timm.create_model(name, num_classes=5, init="short").train()
        assert torch.equal(quiet(image), quiet(image))


SERIES = dict(patch_len=8, stride=4, d_model=16, n_layers=2, n_heads=2, d_ff=24, dropout=0.0)
SERIES_RATES = ("dropout", "attn_dropout", "head_dropout", "drop_path")


def series_model(**options) -> JumboPatchTST:
    return JumboPatchTST(3, 3, 40, 6, **{**SERIES, **options})


def test_series_each_rate_acts_in_training_alone():
    x = torch.randn(4, 3, 40)
    for tokens in (dict(multiplier=2), dict(multiplier=0, registers=4)):
        for name in SERIES_RATES:
            model = series_model(**tokens, **{name: 0.5})
            assert not torch.equal(model.train()(x), model(x)), name
            assert torch.equal(model.eval()(x), model(x)), name
        quiet = series_model(**tokens)
        assert torch.equal(quiet.train()(x), quiet(x))
        assert torch.equal(quiet(x), quiet.eval()(x))
