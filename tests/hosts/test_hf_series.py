"""Weights of JumboPatchTST in Transformers: the same forecasts as tsai and plain torch, folders, fresh models."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForPreTraining, AutoModelForTimeSeriesPrediction, set_seed

from tests.conftest import max_error
from tests.hosts.hf_series_models import SHAPE, VARIANTS, make, windows
from ts_ext import JumboPatchTST
from ts_ext.transformers import (
    JumboPatchTSTConfig,
    JumboPatchTSTForClassification,
    JumboPatchTSTForPrediction,
    JumboPatchTSTForPretraining,
    JumboPatchTSTModel,
    from_core,
    to_core,
)

CORE = dict(patch_len=8, stride=4, d_model=16, n_layers=2, n_heads=4, d_ff=24, multiplier=2)


def core_model(c_in, options, **head):
    names = dict(
        num_register_tokens="registers", norm_type="norm", encoder_type="encoder", state_size="d_state",
        scaling_affine="affine", multiplier="multiplier",
    )  # fmt: skip
    given = {names.get(k, k): "BatchNorm" if v == "batchnorm" else v for k, v in options.items()}
    return JumboPatchTST(c_in, seq_len=48, **{**CORE, **given, **head}).eval()


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_same_weights_same_forecast_as_plain_torch(options):
    model = make(**options)
    targets = len(options.get("target_channels", range(3)))
    core = core_model(3, options, c_out=targets, pred_dim=6)
    core.load_state_dict(to_core(model))
    x = windows()
    expected = core(x.transpose(1, 2))
    got = model(past_values=x).prediction_outputs
    assert got.shape == (4, 6, targets, *[3] * ("quantiles" in options))
    assert torch.equal(got, expected.transpose(1, 2))
    again = make(seed=5, **options)
    assert not torch.equal(again(past_values=x).prediction_outputs, got)
    again.load_state_dict(from_core(core))
    assert torch.equal(again(past_values=x).prediction_outputs, got)


def test_same_trained_weights_in_tsai_torch_and_transformers(tmp_path):
    import tsai.inference  # noqa: F401 (gives learners get_X_preds)
    from tsai.tslearner import TSForecaster

    from ts_ext.tsai import JumboPatchTST as TsaiJumboPatchTST

    t = np.arange(400, dtype=np.float32)
    series = np.stack([np.sin(t / 5), np.cos(t / 7) * 4 + 10, t / 100]).astype(np.float32)
    view = np.lib.stride_tricks.sliding_window_view(series, 54, axis=1).transpose(1, 0, 2)
    x, y = view[..., :48].copy(), view[..., 48:].copy()
    splits = list(range(280)), list(range(280, len(x)))
    learner = TSForecaster(x, y, splits=splits, arch=TsaiJumboPatchTST, arch_config=CORE, bs=64, path=tmp_path, seed=0)
    with learner.no_bar(), learner.no_logging():
        before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
        learner.fit_one_cycle(1, 3e-3)
        by_tsai = learner.get_X_preds(x[280:], with_decoded=False)[0]
    trained = learner.model.cpu().eval()
    assert any(not torch.equal(before[name], tensor) for name, tensor in trained.state_dict().items())
    plain = JumboPatchTST(3, 3, 48, 6, **CORE).eval()
    plain.load_state_dict(trained.state_dict())
    model = make()
    model.load_state_dict(from_core(trained))
    model.save_pretrained(tmp_path / "folder")
    opened = AutoModelForTimeSeriesPrediction.from_pretrained(tmp_path / "folder")
    values = torch.from_numpy(x[280:])
    with torch.no_grad():
        by_torch = plain(values)
        by_host = opened(past_values=values.transpose(1, 2)).prediction_outputs.transpose(1, 2)
    assert by_tsai.shape == by_torch.shape == (len(x) - 280, 3, 6)
    assert max_error(by_torch, by_tsai) < 1e-5 and max_error(by_host, by_tsai) < 1e-5


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_save_and_load_is_bit_equal(options, tmp_path):
    model = make(**options)
    model.save_pretrained(tmp_path)
    loaded, report = JumboPatchTSTForPrediction.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()) and not loaded.training
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    x = windows()
    assert torch.equal(loaded(x).prediction_outputs, model(x).prediction_outputs)
    reread = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert {**reread, "_name_or_path": ""} == model.config.to_dict()


@pytest.mark.parametrize("options", [VARIANTS["attention"], VARIANTS["linear"], VARIANTS["layer scale, own FFNs"]])
def test_folder_of_one_task_opens_as_another(options, tmp_path):
    pretrained = make(JumboPatchTSTForPretraining, **options)
    pretrained.save_pretrained(tmp_path)
    assert isinstance(AutoModelForPreTraining.from_pretrained(tmp_path), JumboPatchTSTForPretraining)
    assert isinstance(AutoModel.from_pretrained(tmp_path), JumboPatchTSTModel)
    heads = {JumboPatchTSTForPrediction: "prediction_head", JumboPatchTSTForClassification: "classification_head"}
    for cls, head in heads.items():
        set_seed(0)
        model, report = cls.from_pretrained(tmp_path, num_targets=5, output_loading_info=True)
        assert report["missing_keys"] == {f"{head}.weight", f"{head}.bias"}
        assert report["unexpected_keys"] == {"reconstruction_head.weight", "reconstruction_head.bias"}
        for name, tensor in pretrained.model.state_dict().items():
            assert torch.equal(tensor, model.model.state_dict()[name]), name
        new = getattr(model, head)
        assert 0.015 < new.weight.std() < 0.025 and not new.bias.any()  # the rule of a model made from nothing
        assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_fresh_model_follows_the_rule_of_the_core(options):
    """The host initialises anew, by its own walk over the modules: statistics must be those of the core's model."""
    targets = len(options.get("target_channels", range(3)))
    wide = dict(d_model=64, ffn_dim=128)
    model = JumboPatchTSTForPrediction(JumboPatchTSTConfig(**{**SHAPE, **wide, **options}))
    core = core_model(3, options, d_model=64, d_ff=128, c_out=targets, pred_dim=6)
    for name, ours in to_core(model).items():
        expected = core.state_dict()[name].float()
        assert ours.shape == expected.shape
        if expected.numel() < 500:
            assert (ours.float().std(unbiased=False) > 0) == (expected.std(unbiased=False) > 0), name
            if not expected.std(unbiased=False):
                assert torch.equal(ours.float(), expected), name
        else:
            assert ours.float().std().item() == pytest.approx(expected.std().item(), rel=0.15, abs=1e-8), name


def test_half_precision_keeps_decay_in_float32(tmp_path):
    model = make(**VARIANTS["linear"])
    model.save_pretrained(tmp_path)
    half = JumboPatchTSTForPrediction.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {n.rsplit(".", 1)[1] for n, p in half.named_parameters() if p.dtype == torch.float32}
    assert kept == {"A_log", "dt_bias", "D"}
    x = windows()
    expected = model(x).prediction_outputs
    error = (half(x).prediction_outputs - expected).square().mean().sqrt() / expected.std()
    assert 0 < error < 3e-2
