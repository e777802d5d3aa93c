"""optimize_for_inference on series models: forecasts, state dicts, and what a Transformers folder cannot hold."""

import copy

import pytest
import torch

from jumbo_core import inference_report, optimize_for_inference
from ts_ext import JumboPatchTST

SMALL = dict(d_model=16, n_layers=2, n_heads=2, d_ff=32, multiplier=2, init="released")


@pytest.mark.parametrize("encoder", ["attention", "linear"])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_forecasts_and_state_dicts(encoder, dtype):
    model = JumboPatchTST(3, 3, 64, 8, encoder=encoder, **SMALL).eval()
    x = torch.randn(4, 3, 64) * 5 + 20
    fast = optimize_for_inference(copy.deepcopy(model), dtype=dtype)
    fresh = optimize_for_inference(JumboPatchTST(3, 3, 64, 8, encoder=encoder, **SMALL), dtype=dtype)
    fresh.load_state_dict(fast.state_dict())
    with torch.inference_mode():
        found, expected = fast(x), model(x)
        assert 0 < (found - expected).norm() / (expected - 20).norm() < 0.02
        assert torch.equal(fresh(x), found)


def test_a_transformers_folder_is_refused(tmp_path):
    pytest.importorskip("transformers")
    from ts_ext.transformers import JumboPatchTSTConfig, JumboPatchTSTForPrediction

    config = JumboPatchTSTConfig(
        num_input_channels=2, context_length=32, prediction_length=4, d_model=16, num_hidden_layers=1,
        num_attention_heads=2, ffn_dim=32, multiplier=2,
    )  # fmt: skip
    model = optimize_for_inference(JumboPatchTSTForPrediction(config))
    assert len(inference_report(model)) == 1
    with pytest.raises(ValueError, match="after loading it"):
        model.save_pretrained(tmp_path)
