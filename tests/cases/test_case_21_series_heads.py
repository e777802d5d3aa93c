"""torch-harmonics 221 for series: dropout acts in training alone, with every head, and two evaluations are equal."""

import pytest
import torch

from ts_ext import JumboPatchTST

SERIES = dict(patch_len=8, stride=4, d_model=16, n_layers=2, n_heads=2, d_ff=24, multiplier=2, dropout=0.0)
RATES = ("dropout", "attn_dropout", "head_dropout", "drop_path")
TASKS = {
    "forecast": dict(c_out=3, pred_dim=6),
    "mixing": dict(c_out=3, pred_dim=6, channels="mixing"),
    "classify": dict(c_out=4, head="classify"),
    "regress": dict(c_out=1, head="regress"),
}


@pytest.mark.parametrize("task", TASKS)
def test_each_rate_acts_in_training_alone(task):
    x = torch.randn(4, 3, 40)
    for rate in RATES:
        model = JumboPatchTST(**{**dict(c_in=3, seq_len=40), **SERIES, **TASKS[task], rate: 0.5})
        assert not torch.equal(model.train()(x), model(x)), rate
        assert torch.equal(model.eval()(x), model(x)), rate


@pytest.mark.parametrize("options", [{}, dict(norm="BatchNorm"), dict(encoder="linear")])
def test_pretraining(options):
    """In training the hidden patches change as well; in eval neither they nor anything else does."""
    x, rates = torch.randn(4, 3, 40), dict(dropout=0.5, head_dropout=0.5, drop_path=0.5)
    model = JumboPatchTST(3, 1, 40, head="pretrain", **{**SERIES, **rates, **options})
    same = [model.train()(x, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    assert torch.equal(same[0].masked, same[1].masked)
    assert not torch.equal(same[0].reconstruction, same[1].reconstruction)
    first, second = model.eval()(x), model(x)
    assert torch.equal(first.loss, second.loss) and torch.equal(first.reconstruction, second.reconstruction)


def test_batch_norm_in_eval_depends_on_no_neighbour():
    model = JumboPatchTST(3, 3, 40, 6, norm="BatchNorm", **SERIES)
    x = torch.randn(4, 3, 40)
    model.train()(x)
    model.eval()
    torch.testing.assert_close(model(x)[2:3], model(x[2:3]), atol=1e-5, rtol=0)
