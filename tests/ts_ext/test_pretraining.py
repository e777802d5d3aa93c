"""Masked patches: nothing hidden leaks, the count is right, repeats are equal, and the encoder goes over."""

import numpy as np
import pytest
import torch

from jumbo_core.models.series import to_patches
from tests.conftest import max_error
from ts_ext import JumboPatchTST
from ts_ext.pretraining import hide_patches

SMALL = dict(patch_len=8, stride=8, d_model=16, n_layers=2, n_heads=4, d_ff=24, multiplier=2, dropout=0.0)


def make(c_in=2, **options):
    model = JumboPatchTST(c_in, 1, 40, head="pretrain", **{**SMALL, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("stride", "patches", "drawn"), [(8, 6, 2), (4, 10, 4)])
def test_how_much_is_hidden(stride, patches, drawn):
    observed = torch.ones(64, 3, 40, dtype=torch.bool)
    visible, masked = hide_patches(observed, 8, stride, 0.4, generator=seeded())
    assert masked.shape == (64, 3, patches)
    if stride == 8:  # the sixth patch is padding alone and is never drawn: 0.4 of 5
        assert (masked[..., :5].sum(-1) == drawn).all() and not masked[..., 5].any()
        assert (visible.sum(-1) == 40 - 8 * drawn).all()
        assert torch.equal(to_patches(visible, 8, 8)[..., :5, :].any(-1), ~masked[..., :5])
    else:  # neighbours share steps: those between two drawn patches are hidden as well
        assert (masked.sum(-1) >= drawn).all() and (masked.sum(-1) > drawn).any()
        own = torch.nn.functional.pad(visible, (0, 4)).unfold(-1, 8, 4).any(-1)
        assert torch.equal(own, ~masked)
    assert visible.any(-1).all()
    assert not torch.equal(masked[:, 0], masked[:, 1])
    together = hide_patches(observed, 8, stride, 0.4, together=True, generator=seeded())
    assert torch.equal(together.masked[:, 0], together.masked[:, 1])


def test_short_series_keep_something_visible():
    observed = torch.zeros(200, 1, 40, dtype=torch.bool)
    observed[:, :, 28:] = True  # the patches at 24 and 32, and with stride 4 those at 28 and 36 as well
    for stride in (8, 4):
        visible, masked = hide_patches(observed, 8, stride, 0.6, generator=seeded())
        assert visible.any(-1).all() and masked.any(-1).all()
        assert not masked[..., : 24 // stride - 1].any()  # nothing observed there, nothing to rebuild
    observed[:, :, :39] = False  # one step: nothing can be hidden
    visible, masked = hide_patches(observed, 8, 8, 0.6, generator=seeded())
    assert torch.equal(visible, observed) and not masked.any()


@pytest.mark.parametrize("stride", [8, 4])
@pytest.mark.parametrize("options", [{}, dict(channels="mixing"), dict(encoder="linear"), dict(revin=False)])
def test_hidden_values_reach_neither_statistics_nor_reconstruction(options, stride):
    model = make(stride=stride, **options).eval()
    x = torch.randn(3, 2, 40)
    out = model(x, generator=seeded(3))
    everything = torch.ones_like(x, dtype=torch.bool)
    together = options.get("channels") == "mixing"
    hidden = hide_patches(everything, 8, stride, 0.4, together=together, generator=seeded(3))
    assert torch.equal(hidden.masked, out.masked)
    changed = torch.where(hidden.visible, x, torch.randn_like(x) * 1e3)
    again = model(changed, generator=seeded(3))
    assert torch.equal(again.reconstruction, out.reconstruction)
    assert not torch.equal(again.loss, out.loss)
    seen = torch.where(hidden.visible, x + torch.randn_like(x), x)
    assert not torch.equal(model(seen, generator=seeded(3)).reconstruction, out.reconstruction)


def test_an_outlier_in_a_flat_window_does_not_drown_the_others():
    model = make(1).eval()
    x = torch.randn(8, 1, 40, generator=seeded(5))
    usual = model(x, generator=seeded())
    step = int(usual.masked[0, 0].nonzero()[0]) * 8  # hidden, in a window that is nearly flat elsewhere
    x[0] *= 1e-3
    x[0, 0, step] = 1e6
    out = model(x, generator=seeded())
    assert out.target.abs().max() > 1e8 and torch.equal(out.masked, usual.masked)
    assert out.loss < usual.loss + 9
    hidden = (out.reconstruction - out.target)[1:].square()[out.masked[1:]]
    rest = hidden.sum() / usual.masked.sum() / 8
    assert 0 < out.loss - rest < 9.1 / 8  # the window counts as three deviations large, no more


def test_loss_and_target_by_hand():
    model = make(1).eval()
    x = torch.randn(2, 1, 40, dtype=torch.float64) * 3 + 100
    model = model.double()
    out = model(x, generator=seeded())
    visible = hide_patches(torch.ones_like(x, dtype=torch.bool), 8, 8, 0.4, generator=seeded()).visible
    total, count = 0.0, 0
    for i in range(2):
        seen = x[i, 0][visible[i, 0]]
        standard = (x[i, 0] - seen.mean()) / seen.std(unbiased=False)
        for n in range(5):
            patch = standard[8 * n : 8 * n + 8]
            assert max_error(out.target[i, 0, n], patch) < 1e-10
            if out.masked[i, 0, n]:
                total, count = total + (out.reconstruction[i, 0, n] - patch).square().sum().item(), count + 8
    assert abs(out.loss.item() - total / count) < 1e-10
    assert out.loss.dtype == torch.float64


def test_missing_values_are_neither_seen_nor_rebuilt():
    model = make(missing="mask").eval()
    x = torch.randn(4, 2, 40)
    x[:, 0, :16] = torch.nan  # two patches
    x[:, 1, 20] = torch.nan
    out = model(x, generator=seeded())
    assert not out.masked[:, 0, :2].any() and out.masked.any(-1).all()
    assert torch.isfinite(out.loss) and torch.isfinite(out.target).all()
    out.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
    filled = torch.where(x.isnan(), 1e4, x)
    assert torch.equal(model(filled, ~x.isnan(), generator=seeded()).loss, out.loss)


def test_validation_repeats_and_training_does_not():
    model, x = make(), torch.randn(4, 2, 40)
    before = torch.get_rng_state()
    assert torch.equal(model.eval()(x).loss, model(x).loss)
    assert torch.equal(torch.get_rng_state(), before)  # the global generator is left alone
    model.train()
    assert not torch.equal(model(x).masked, model(x).masked)
    assert torch.equal(model(x, generator=seeded(1)).masked, model(x, generator=seeded(1)).masked)


@pytest.mark.parametrize("options", [{}, dict(share_jumbo_ffn=False), dict(n_layers=1), dict(channels="mixing")])
def test_no_dead_parameter(options):
    model = make(**options).train()
    model(torch.randn(4, 2, 40)).loss.backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())] == []


def test_pretraining_learns_and_the_encoder_goes_over():
    torch.manual_seed(0)
    t = torch.arange(40) / 3
    x = torch.sin(t + torch.rand(128, 1, 1) * 6.28) * 5 + 20
    model = JumboPatchTST(1, 1, 40, head="pretrain", **SMALL)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    first = model.eval()(x).loss.item()
    model.train()
    for _ in range(80):
        loss = model(x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert model.eval()(x).loss.item() < 0.3 * first

    for options in (dict(pred_dim=6, head="forecast"), dict(c_out=4, head="classify"), dict(head="regress")):
        other = JumboPatchTST(**{**dict(c_in=1, c_out=1, seq_len=40), **SMALL, **options}).eval()
        assert max_error(other.encode(x).tokens.patches, model.encode(x).tokens.patches) > 1e-2
        report = other.load_pretrained(model.state_dict())
        assert (report.missing, report.unexpected) == ([], [])
        assert report.ignored == ["head.bias", "head.weight"]
        assert torch.equal(other.encode(x).tokens.patches, model.encode(x).tokens.patches)
        assert all(p.requires_grad for p in other.parameters())


def test_sources_and_reports_of_load_pretrained(tmp_path):
    from safetensors.torch import save_file

    model = make(affine=True)
    torch.save(model.state_dict(), tmp_path / "plain.pth")
    torch.save({"model": model.state_dict(), "opt": {}}, tmp_path / "fastai.pth")
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    sources = [model, model.state_dict(), tmp_path / "plain.pth", str(tmp_path / "fastai.pth"),
               tmp_path / "weights.safetensors"]  # fmt: skip
    for source in sources:
        other = JumboPatchTST(2, 2, 40, 6, affine=True, **SMALL)
        assert other.load_pretrained(source).missing == []
        assert torch.equal(other.revin.weight, model.revin.weight)
        assert torch.equal(other.series.pos_embed, model.series.pos_embed)

    other = JumboPatchTST(2, 2, 40, 6, **SMALL)  # without affine
    with pytest.raises(
        ValueError, match=r"0 of \d+ tensors .* 2 are unexpected \['revin.bias', 'revin.weight'\]; strict"
    ):
        other.load_pretrained(model)
    assert other.load_pretrained(model, strict=False).unexpected == ["revin.bias", "revin.weight"]
    assert torch.equal(other.series.pos_embed, model.series.pos_embed)
    partial = {name: tensor for name, tensor in other.state_dict().items() if "blocks.1" not in name}
    with pytest.raises(ValueError, match=r"tensors of the encoder are missing \['series.encoder.blocks.1"):
        other.load_pretrained(partial)
    assert all("blocks.1" in name for name in other.load_pretrained(partial, strict=False).missing)
    for strict in (True, False):
        with pytest.raises(ValueError, match="does not fit"):
            other.load_pretrained({"weight": torch.zeros(2)}, strict=strict)
        with pytest.raises(ValueError, match=r"series.pos_embed: \(1, 6, 16\) in the source, \(1, 10, 16\) here"):
            JumboPatchTST(2, 2, 40, 6, **{**SMALL, "stride": 4}).load_pretrained(other, strict=strict)
    with pytest.raises(TypeError, match="expected a state dict, a file of one, or a model, got int"):
        other.load_pretrained(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(mask_ratio=0), "strictly between 0 and 1"),
        (dict(mask_ratio=1.0), "strictly between 0 and 1"),
        (dict(mask_ratio=0.05), r"mask_ratio 0.05 hides 0 of 5 patches"),
        (dict(mask_ratio=0.95), r"hides 5 of 5 patches \(seq_len 40, patch_len 8, stride 8\).* less than the 5 that"),
        (dict(mask_ratio=0.5, stride=4), r"hides 5 of 10 patches .* less than the 5 that .*, or stride=8, where"),
    ],
)
def test_bad_ratios(options, message):
    with pytest.raises(ValueError, match=message):
        JumboPatchTST(1, 1, 40, head="pretrain", **{**SMALL, **options})


def test_a_batch_with_nothing_to_rebuild_is_an_error():
    x = torch.full((2, 1, 40), np.nan)
    x[..., -3:] = torch.randn(2, 1, 3)
    with pytest.raises(ValueError, match=r"no patch to rebuild in 2 sample\(s\)"):
        make(1, missing="mask")(x)
    with pytest.raises(ValueError, match="or a constant in what is visible"):
        make(1)(torch.ones(2, 1, 40))
