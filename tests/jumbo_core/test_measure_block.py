"""The block's timing on a small block: correctness gate, numbers that hang together, table."""

import pytest
import torch

from jumbo_core.linear import AdventurerBlock
from jumbo_core.measure import block
from jumbo_core.measure.flops import mixer_multiply_adds


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_rows():
    result = block.measure(repeats=3, threads=1, tokens=100, widths={"mini": 64}, compile=False)
    (row,) = result["rows"]
    assert row["ratio"] > 0 and row["ratio_with_scan"] > 0 and row["compiled"] == "not asked for"
    low, high = row["block_ms"]["quartiles"]
    assert low <= row["block_ms"]["median"] <= high
    assert block.table(result).count("\n") == 2 and "mini (64)" in block.table(result)


def test_a_compiler_that_is_missing_is_named(monkeypatch):
    def refuse(module):
        def call(h):
            raise RuntimeError("no compiler\nand many lines")

        return call

    monkeypatch.setattr(torch, "compile", refuse)
    result = block.measure(repeats=2, threads=1, tokens=20, widths={"mini": 64})
    assert result["rows"][0]["compiled"] == "RuntimeError: no compiler"
    assert "RuntimeError: no compiler" in block.table(result)


def test_products_are_those_of_the_closed_form():
    """All products, less the convolution; one chunk, for the closed form knows those of training."""
    net, tokens = AdventurerBlock(64), 95

    def multiply_adds(calls):
        return sum(call().numel() * call.args[0].shape[-1] for call in calls)

    layers = multiply_adds(block.layer_products(net, tokens))
    scan = multiply_adds(block.scan_products(net, tokens))
    mixer = net.mixer
    convolution = (tokens + mixer.conv_kernel) * mixer.conv_kernel * mixer.conv1d.in_channels
    swiglu = 3 * tokens * 64 * net.mlp.fc2.in_features
    assert layers + scan == mixer_multiply_adds(mixer, tokens + 1) - convolution + swiglu


def test_nothing_is_timed_when_inference_differs(monkeypatch):
    def wrong(self, h):
        return h if not torch.is_grad_enabled() else h + 1

    monkeypatch.setattr(AdventurerBlock, "forward", wrong)
    with pytest.raises(RuntimeError, match=r"block differs .*nothing was timed"):
        block.measure(repeats=1, threads=1, tokens=20, widths={"mini": 64}, compile=False)
