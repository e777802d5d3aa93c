"""JumboPatchTST in Transformers: Auto classes, Trainer, folders, and the same forecasts as tsai and plain torch."""

import inspect

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForPreTraining,
    AutoModelForTimeSeriesPrediction,
    PatchTSTConfig,
    PatchTSTForClassification,
    PatchTSTForPrediction,
    PatchTSTForPretraining,
    Trainer,
    TrainingArguments,
    set_seed,
)

from tests.conftest import max_error
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
SHAPE = dict(
    patch_length=8, patch_stride=4, d_model=16, num_hidden_layers=2, num_attention_heads=4, ffn_dim=24, multiplier=2,
    context_length=48, num_input_channels=3, prediction_length=6,
)  # fmt: skip
VARIANTS = {
    "attention": {},
    "registers, batch norm": dict(multiplier=0, num_register_tokens=4, norm_type="batchnorm"),
    "linear": dict(encoder_type="linear", state_size=8),
    "mixing": dict(channels="mixing", scaling_affine=True),
    "layer scale, own FFNs": dict(layer_scale=0.1, share_jumbo_ffn=False),
    "quantiles": dict(quantiles=[0.1, 0.5, 0.9], target_channels=[2, 0]),
}


def make(cls=JumboPatchTSTForPrediction, seed=0, **options):
    torch.manual_seed(seed)
    model = cls(JumboPatchTSTConfig(**{**SHAPE, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def windows(count=4, seed=1):
    return torch.randn(count, 48, 3, generator=torch.Generator().manual_seed(seed)) * 3 + 20


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


class Windows(torch.utils.data.Dataset):
    def __init__(self, count, classes=None):
        t = torch.arange(48 + 6).float()
        phase = torch.rand(count, 1, generator=torch.Generator().manual_seed(0)) * 6
        self.kind = torch.arange(count) % 2
        wave = torch.sin(t / 4 * (1 + self.kind[:, None]) + phase)
        self.values = torch.stack([wave, -wave, wave * 2], dim=-1) + 5
        self.classes = classes

    def __len__(self):
        return len(self.values)

    def __getitem__(self, i):
        past = {"past_values": self.values[i, :48]}
        if self.classes:
            return {**past, "target_values": self.kind[i]}
        return {**past, "future_values": self.values[i, 48:]}


def arguments(folder, label, **options):
    return TrainingArguments(
        str(folder), per_device_train_batch_size=16, learning_rate=3e-3, label_names=[label], seed=0, report_to="none",
        use_cpu=True, disable_tqdm=True, logging_strategy="no", **{"num_train_epochs": 6, **options},
    )  # fmt: skip


def test_trainer_forecasts(tmp_path):
    set_seed(0)
    model = JumboPatchTSTForPrediction(JumboPatchTSTConfig(**SHAPE))
    data, held_out = Windows(64), Windows(37)
    trainer = Trainer(
        model, arguments(tmp_path, "future_values", save_strategy="epoch"), train_dataset=data, eval_dataset=held_out
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < 0.5 * before
    predicted = trainer.predict(held_out)
    assert predicted.predictions[0].shape == (37, 6, 3)  # the last partial batch is there
    truth = held_out.values[:, 48:].numpy()
    assert np.square(predicted.predictions[0] - truth).mean() == pytest.approx(after, rel=1e-4)
    # interrupted after the third epoch and resumed: the same weights
    set_seed(0)
    resumed = Trainer(
        JumboPatchTSTForPrediction(JumboPatchTSTConfig(**SHAPE)),
        arguments(tmp_path, "future_values", save_strategy="epoch"),
        train_dataset=data,
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    for (name, a), b in zip(model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_trainer_pretrains_then_classifies(tmp_path):
    set_seed(0)
    data = Windows(64)
    pretraining = Trainer(
        JumboPatchTSTForPretraining(JumboPatchTSTConfig(**{**SHAPE, "patch_stride": 8})),
        arguments(tmp_path, "past_values", num_train_epochs=30),
        train_dataset=[{"past_values": item["past_values"]} for item in data],
        eval_dataset=[{"past_values": item["past_values"]} for item in Windows(20)],
    )
    before = pretraining.evaluate()["eval_loss"]
    pretraining.train()
    assert pretraining.evaluate()["eval_loss"] < 0.8 * before
    pretraining.save_model(str(tmp_path / "pretrained"))
    model = JumboPatchTSTForClassification.from_pretrained(tmp_path / "pretrained", num_targets=2)
    trainer = Trainer(
        model,
        arguments(tmp_path / "classes", "target_values", num_train_epochs=15),
        train_dataset=Windows(64, classes=True),
        eval_dataset=Windows(30, classes=True),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] == 1.0


def test_gradient_checkpointing_changes_no_gradient():
    model, x, y = make(ff_dropout=0.0, positional_dropout=0.0), windows(), torch.randn(4, 6, 3)
    model.train()(x, future_values=y).loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    assert model.model.trunk.series.encoder.gradient_checkpointing
    model(x, future_values=y).loss.backward()
    for expected, parameter in zip(gradients, model.parameters(), strict=True):
        assert max_error(parameter.grad, expected) < 1e-5
    with pytest.raises(ValueError, match="every batch twice in BatchNorm"):
        make(norm_type="batchnorm").gradient_checkpointing_enable()


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
