"""The training-speed benchmark of the series models: what each is, what a row says, its table; at a small size."""

import pytest
import torch
from torch import nn

from benchmarks import series_speed
from jumbo_core.dropout import Dropout
from jumbo_core.measure import count_parameters
from jumbo_core.measure.memory import peak_memory

pytest.importorskip("tsai", reason="needs jumbo-vit[ts]")
SMALL = dict(d_model=16, n_layers=1, n_heads=2, d_ff=32, dropout=0.2)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_models_are_what_their_names_say():
    built = {name: make() for name, make in series_speed.makers(SMALL).items()}
    both = (Dropout, nn.Dropout)
    kinds = {name: {type(m) for m in model.modules() if isinstance(m, both)} for name, model in built.items()}
    theirs = [name for name, kind in kinds.items() if kind == {nn.Dropout}]
    assert theirs == [series_speed.TSAI, "JumboPatchTST J=6, torch's dropout"]
    assert all(kind == {Dropout} for name, kind in kinds.items() if name not in theirs)
    x, y = series_speed.windows(2)
    assert {tuple(model(x).shape) for model in built.values()} == {tuple(y.shape)}
    encoder = built[series_speed.VIT].series.encoder
    assert encoder.multiplier == 0 and encoder.registers == 16


def test_rows_are_against_both_peers_and_have_peak_memory(tmp_path):
    names = (series_speed.TSAI, series_speed.VIT, "JumboPatchTST J=2")
    settings = dict(sizes={"small": SMALL}, repeats=2, threads=1, processes=1)
    file = series_speed.run(tmp_path / "r.json", settings, names)
    timing, peaks = file.runs["timing|small"], {name: file.runs[f"memory|small|{name}"] for name in names}
    tsai, vit, jumbo = timing.values()
    assert tuple(timing) == names and tsai["times_tsai"]["median"] == vit["times_vit"]["median"] == 1
    assert vit["times_tsai"]["median"] > 0 and jumbo["times_vit"]["median"] > 0
    # At least the output and its gradient, and three times the weights.
    least = (2 * 4 * series_speed.BATCH * 7 * 96 + 12 * jumbo["parameters"]) / 2**20
    assert all(least < peak["peak_MiB"] < 500 and len(peak["processes_MiB"]) == 1 for peak in peaks.values())
    lines = file.content["table"].splitlines()
    assert len(lines) == 5 and lines[0].endswith("| times the ViT's throughput | peak memory of a step (MiB) |")
    assert lines[4].startswith("| D=16, FFN 32 | JumboPatchTST J=2 |")
    assert lines[4].endswith(f"| {jumbo['times_vit']['median']:.2f} | {peaks[names[2]]['peak_MiB']:.0f} |")
    assert series_speed.run(tmp_path / "r.json", settings, names).runs == file.runs  # nothing is measured again


def test_peak_memory_is_of_the_first_step():
    """Where weights take the most, their gradients and AdamW's two moments are in it."""
    wide, name = dict(d_model=256, n_layers=1, n_heads=2, d_ff=16, dropout=0.0), "JumboPatchTST J=6"
    weights = 4 * count_parameters(series_speed.makers(wide)[name]()) / 2**20
    assert weights > 60 and peak_memory(series_speed.first_step, wide, name, threads=1) > 3 * weights


def test_losses_that_do_not_fall_are_not_timed():
    losses = iter([1.0] * 6)
    with pytest.raises(RuntimeError, match=r"losses of some model are \[1.0, .*must be finite and fall; nothing was"):
        series_speed.check("some model", lambda: next(losses))
