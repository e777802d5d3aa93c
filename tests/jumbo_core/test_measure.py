"""The timing commands on small inputs: correctness gate, numbers that hang together, tables."""

import pytest
import torch

from jumbo_core.measure import scan
from jumbo_core.measure.memory import peak_memory
from jumbo_core.measure.turns import paired, spread, take_turns


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_scan(monkeypatch):
    monkeypatch.setattr(scan, "PEER_CHUNKS", (16, 32))
    result = scan.measure(length=128, repeats=3, threads=1, lengths=(128, 256))
    assert result["peer_best_chunk"] in (16, 32) and set(result["growth_ms"]) == {"128", "256"}
    assert result["ratio"] > 0 and min(result["peak_MiB"].values()) >= 0
    low, high = result["ours_ms"]["quartiles"]
    assert low <= result["ours_ms"]["median"] <= high
    assert scan.table(result).count("\n") == 2


def test_nothing_is_timed_when_the_two_differ(monkeypatch):
    monkeypatch.setattr(scan, "ours", lambda tensors: torch.zeros_like(tensors["x"]))
    with pytest.raises(RuntimeError, match=r"differ by .*nothing was timed"):
        scan.measure(length=64, repeats=1, threads=1, lengths=(64,))


def test_calls_take_turns():
    order = []
    times = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == ["a", "b"] * 5 and len(times["a"]) == len(times["b"]) == 3


def test_warm_up_is_not_counted_and_ratios_are_paired():
    count = iter(range(9))
    times = take_turns({"a": lambda: next(count)}, 2, warmup=7)
    assert len(times["a"]) == 2 and next(count, None) is None
    # Round by round 2, 4, 3 times as fast; the ratio of the medians would be 4.
    assert spread([1.0, 9.0]) == {"median": 5, "quartiles": [3, 7]}
    assert paired([2.0, 8.0, 9.0], [1.0, 2.0, 3.0])["median"] == 3


def megabytes(count: int):
    return lambda: torch.ones(count << 18)  # fp32


def test_peak_memory_sees_what_a_call_takes():
    assert 60 < peak_memory(megabytes, 64, threads=1) < 80
    assert peak_memory(megabytes, 1, threads=1) < 10


def pieces_after_as_many_freed():
    def make():
        return [torch.ones(1 << 14) for _ in range(1024)]  # 64 KiB each, from the heap

    make.last = make()[-1]  # what lies in front of it in the heap stays with the process
    return make


def test_peak_memory_is_not_hidden_by_what_was_freed_before():
    assert peak_memory(pieces_after_as_many_freed, threads=1) > 60
