"""Calls of JumboPatchTST in Transformers: argument names, masks, scale, hidden states, what is refused."""

import inspect

import pytest
import torch
from transformers import PatchTSTConfig, PatchTSTForClassification, PatchTSTForPrediction, PatchTSTForPretraining

from tests.conftest import max_error
from tests.hosts.hf_series_models import SHAPE, VARIANTS, make, windows
from ts_ext.transformers import (
    JumboPatchTSTConfig,
    JumboPatchTSTForClassification,
    JumboPatchTSTForPrediction,
    JumboPatchTSTForPretraining,
)


def test_argument_names_are_those_of_patchtst():
    for ours, theirs in (
        (JumboPatchTSTForPrediction, PatchTSTForPrediction),
        (JumboPatchTSTForClassification, PatchTSTForClassification),
        (JumboPatchTSTForPretraining, PatchTSTForPretraining),
    ):
        wanted = list(inspect.signature(theirs.forward).parameters)
        own = inspect.signature(ours.forward).parameters
        missing = [n for n in wanted if n not in own and n not in ("return_dict", "kwargs")]
        assert not missing
        assert list(own)[:3] == wanted[:3] or ours is not JumboPatchTSTForPrediction
    x = windows()
    output = make()(past_values=x, future_values=x[:, :6])
    reference = PatchTSTForPrediction(
        PatchTSTConfig(num_input_channels=3, context_length=48, prediction_length=6, patch_length=8, patch_stride=4)
    )(past_values=x, future_values=x[:, :6])
    assert type(output) is type(reference)
    for name in ("prediction_outputs", "loc", "scale"):
        assert getattr(output, name).shape == getattr(reference, name).shape
    assert max_error(output.loc, reference.loc) < 1e-4
    loss = (output.prediction_outputs - x[:, :6]).square().mean()
    assert output.loss.item() == pytest.approx(loss.item())
    as_tuple = make()(past_values=x, future_values=x[:, :6], return_dict=False)
    assert torch.equal(as_tuple[0], output.loss) and torch.equal(as_tuple[1], output.prediction_outputs)


def test_masks_of_past_and_future():
    model, x = make(), windows()
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[:, :11], mask[1, 20:30, 2] = False, False
    expected = model(x, past_observed_mask=mask).prediction_outputs
    rubbish = torch.where(mask, x, torch.nan)
    assert torch.equal(model(rubbish, past_observed_mask=mask.long()).prediction_outputs, expected)
    assert torch.equal(make(missing="mask")(rubbish).prediction_outputs, expected)
    assert not torch.equal(model(x).prediction_outputs, expected)
    target = torch.randn(4, 6, 3)
    seen = torch.rand(4, 6, 3, generator=torch.Generator().manual_seed(0)) > 0.3
    output = model(x, future_values=target, future_observed_mask=seen)
    assert output.loss.item() == pytest.approx((output.prediction_outputs - target)[seen].square().mean().item())
    with pytest.raises(ValueError, match="of 72 targets are NaN"):
        model(x, future_values=target.masked_fill(~seen, torch.nan))
    with pytest.raises(ValueError, match="1 of 72 future_values are NaN and marked as observed"):
        broken = target.clone()
        broken[1, 2, 0] = torch.nan
        model(x, future_values=broken, future_observed_mask=torch.ones_like(seen))


def test_numpy_arrays_are_taken():
    model, x = make(), windows().double()
    assert torch.equal(model(past_values=x.numpy()).prediction_outputs, model(past_values=x).prediction_outputs)


def test_scale_equivariance_in_double_precision():
    model, x = make().double(), windows().double()
    assert max_error(model(10 * x + 5).prediction_outputs, 10 * model(x).prediction_outputs + 5) < 1e-10


@pytest.mark.parametrize("options", [VARIANTS["attention"], VARIANTS["linear"], VARIANTS["mixing"]])
def test_hidden_states(options):
    model, x = make(**options), windows()
    output = model(x, output_hidden_states=True)
    rows = 1 if options.get("channels") == "mixing" else 3
    tokens = 2 + model.model.trunk.patch_num
    assert [tuple(h.shape) for h in output.hidden_states] == [(4, rows, tokens, 16)] * 3
    assert torch.equal(output.prediction_outputs, model(x).prediction_outputs) and model(x).hidden_states is None
    encoder = model.model.trunk.series.encoder
    last = model.model(x, output_hidden_states=True)
    assert max_error(encoder.norm(last.hidden_states[-1]), last.last_hidden_state) < 1e-6
    assert last.patch_input.shape == (4, 3, 12, 8)
    pretraining = make(JumboPatchTSTForPretraining, **options)
    assert pretraining(x).hidden_states is None
    assert [h.shape for h in pretraining(x, output_hidden_states=True).hidden_states] == [(4, rows, tokens, 16)] * 3
    for one in (model, pretraining, model.model):
        with pytest.raises(ValueError, match="attention is fused here"):
            one(x, output_attentions=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(loss="nll"), "loss 'nll' with quantiles None: it is 'mse' then. .* give quantiles"),
        (dict(scaling="mean"), "scaling must be 'std'"),
        (dict(norm_type="rmsnorm"), "norm_type must be 'layernorm' or 'batchnorm'"),
        (dict(channel_attention=True), "JumboPatchTST has no channel_attention, got True: it is always False here"),
        (dict(use_cls_token=True), "JumboPatchTST has no use_cls_token"),
        (dict(mask_type="forecast"), "no mask_type, got 'forecast': it is always 'random'"),
        (dict(quantiles=[0.9, 0.1]), "rising probabilities"),
        (dict(prediction_length=0), "prediction_length must be .*at least 1"),
        (dict(num_targets=0), "num_targets must be .*at least 1"),
    ],
)
def test_configurations_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        JumboPatchTSTConfig(**options)


def test_what_patchtst_says_of_itself_is_accepted_where_it_is_true():
    config = JumboPatchTSTConfig(pre_norm=True, share_embedding=True, mask_type="random", label2id={"a": 0, "b": 1})
    assert "pre_norm" not in config.to_dict() and config.num_labels == 2
    with pytest.raises(Exception, match="context_length"):
        JumboPatchTSTConfig(context_length="long")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda m: m(torch.randn(4, 3, 48)),
            ValueError,
            r"\(B, 48 steps \(context_length\), 3 channels\), got \(4, 3, 48",
        ),
        (lambda m: m(windows(), past_observed_mask=torch.ones(4, 48)), ValueError, "the shape of past_values"),
        (lambda m: m(windows() * torch.nan), ValueError, "576 of 576 values are NaN"),
        (lambda m: m(windows(), future_values=torch.randn(4, 7, 3)), ValueError, r"= \(4, 6, 3\), got \(4, 7, 3\)"),
        (
            lambda m: m(windows(), future_time_features=torch.randn(4, 6, 1)),
            TypeError,
            "takes no 'future_time_features'",
        ),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call(make())


def test_bad_sizes_are_refused_when_the_model_is_made():
    with pytest.raises(ValueError, match="shorter than one patch of 8"):
        make(context_length=7)
    with pytest.raises(ValueError, match=r"target_channels must be a list of 1 of the input channels 0\.\.2"):
        make(target_channels=[3])
    config = JumboPatchTSTConfig(**SHAPE)
    config.loss = "nll"
    with pytest.raises(ValueError, match="loss 'nll'"):
        JumboPatchTSTForPrediction(config)
    with pytest.raises(ValueError, match="target_values must be"):
        make(JumboPatchTSTForClassification, num_targets=2)(windows(), target_values=torch.zeros(4, 2))
    for classes, wrong in ((1, 2), (3, 3), (3, -1), (3, 0.7)):
        model = make(JumboPatchTSTForClassification, num_targets=classes)
        with pytest.raises(ValueError, match=rf"whole numbers 0 to {max(classes, 2) - 1} with num_targets {classes}"):
            model(windows(), target_values=torch.tensor([0, 1, 0, wrong]))
