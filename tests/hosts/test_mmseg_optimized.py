"""The real Runner: a segmentor trained, then tested with its backbone in int8, from either form of checkpoint."""

import pytest
import torch

pytest.importorskip("mmseg", reason="needs the extra mmseg-lite")

from mmengine.runner import Runner

from jumbo_core import inference_report
from tests.hosts.mmseg_run import tiny_config, write_ade20k


def test_trained_then_tested_in_int8(tmp_path):
    data = write_ade20k(tmp_path / "ade")
    config = tiny_config(data, tmp_path / "work", iterations=2)
    Runner.from_cfg(config).train()
    trained = tmp_path / "work" / "iter_2.pth"

    def test(checkpoint, optimize):
        config = tiny_config(data, tmp_path / "test", iterations=2)
        config.model.backbone.optimize = optimize
        config.load_from = str(checkpoint)
        runner = Runner.from_cfg(config)
        metrics = runner.test()
        return runner.model, metrics

    plain, expected = test(trained, None)
    fast, metrics = test(trained, "int8")
    assert [entry.dtype for entry in inference_report(fast)] == ["int8"] and not inference_report(plain)
    assert metrics.keys() == expected.keys() and abs(metrics["aAcc"] - expected["aAcc"]) < 2

    torch.save({"state_dict": fast.state_dict(), "meta": {}}, tmp_path / "int8.pth")
    again, same = test(tmp_path / "int8.pth", "int8")
    assert same == metrics
    for name, value in fast.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_training_is_refused_by_the_runner(tmp_path):
    config = tiny_config(write_ade20k(tmp_path / "ade"), tmp_path / "work", iterations=2)
    config.model.backbone.optimize = "int8"
    with pytest.raises(RuntimeError, match="optimize_for_inference makes models that predict only"):
        Runner.from_cfg(config).train()
