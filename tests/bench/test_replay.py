"""The replay benchmark: its cells are held out from the fit, and its rows say what they should."""

from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from workbench.bench import replay
from workbench.bench.record import Ceiling
from workbench.bench.replay import LIMITS, MODE, SPLITS, Cell, make_cells
from workbench.bench.search import TINY, make_workload
from workbench.config import SweepConfig
from workbench.replay.devices import load_device
from workbench.trace import Trace


def test_cells_differ_and_none_is_fitted_and_held_out() -> None:
    """Every profile's cells are distinct; each n calibrates under each limit, policies do not."""
    for _, _, held_out in replay.PROFILES.values():
        fitted, others = make_cells(held_out)
        named = [str(cell) for cell in (*fitted, *others)]
        assert len(named) == len(set(named)) == held_out + 8
        assert sorted(c.n for c in fitted) == [4] * 4 + [16] * 4
        assert not any(cell.policy for cell in fitted)
        assert {c.n for c in others} == {4, 16}
        assert len({cell.policy for cell in others}) == (5 if held_out >= 12 else 2)
    blocks = [size for pair in SPLITS for size in pair]
    assert min(blocks) * 16 >= MODE["max_model_len"], "no cell is refused by an engine"
    assert all(seqs <= tokens for seqs, tokens in LIMITS)


def test_the_rows_of_a_small_run(monkeypatch) -> None:
    """One problem, n = 4, an arena too: events identical, names as agreed."""
    monkeypatch.setitem(replay.PROFILES, "quick", (1, 1, 3))
    monkeypatch.setitem(replay.THESIS_PROBLEMS, "quick", 1)
    monkeypatch.setattr(replay, "WIDTHS", (4,))
    rows = {row.name: row for row in replay.run("quick")}
    names = {"replay_s", "replay_over_simulated", "miss_ratio_s"}
    names |= {"throughput_mean_error", "throughput_worst_error", "events_identical"}
    assert names <= rows.keys()
    assert rows["events_identical"].value == 1.0
    assert all(row.value >= 0 for name, row in rows.items() if "_error@" not in name)


def test_cells_take_turns_round_by_round(monkeypatch) -> None:
    """A slow minute is every cell's: none plays its next round before the others played theirs."""
    played: list[str] = []

    def search(cell: Cell, workload: SweepConfig, seed: int) -> SimpleNamespace:
        rounds = iter(range(cell.n))
        left = {"a": 3, "b": 2}[name := "a" if cell is first else "b"]

        def round() -> bool:
            played.append(name)
            return next(rounds) < left - 1

        return SimpleNamespace(round=round, result=lambda: name)

    first, second = make_cells(0)[0][:2]
    monkeypatch.setattr(Cell, "search", search)
    replay.measure([first, second], make_workload(TINY), 0, 2)
    assert "".join(played) == "ababa" * 2
    assert (first.results, second.results) == (["a"] * 2, ["b"] * 2)


def test_of_repeats_the_mean_is_taken() -> None:
    """Guards the rate that a replay is held against: steps and the rest are each the mean."""

    def repeat(steps: list[float], span: float) -> SimpleNamespace:
        speed = SimpleNamespace(tokens=30, wall_s=sum(steps) + span + 1.0)
        frames = [pd.DataFrame({"duration_s": seconds}) for seconds in (steps, [span])]
        return SimpleNamespace(throughput=speed, trace=Trace(frames[0], *frames[:1] * 2, frames[1]))

    cell = make_cells(0)[0][0]
    cell.results = [repeat([2.0, 5.0], 0.5), repeat([4.0, 3.0], 2.0), repeat([9.0, 4.0], 0.5)]
    assert cell.trace.steps["duration_s"].tolist() == [5.0, 4.0]
    assert cell.trace.spans["duration_s"].tolist() == [1.0]
    assert cell.tokens_per_s == pytest.approx(30 / (5.0 + 4.0 + 2.0))


def test_errors_are_told_against_whole_repeats_first(monkeypatch) -> None:
    """Guards the headline: the median over searches that ran comes before the flattering one."""

    def result(rate: float) -> SimpleNamespace:
        return SimpleNamespace(throughput=SimpleNamespace(tokens_per_s=rate), trace=step)

    step = SimpleNamespace(steps=None)
    cell = make_cells(0)[0][0]
    cell.results = [result(rate) for rate in (100.0, 80.0, 50.0)]
    monkeypatch.setattr(Cell, "tokens_per_s", 110.0)
    monkeypatch.setattr(Cell, "trace", step)
    monkeypatch.setattr(replay.simulator, "events", lambda _: pd.Series([1]))
    found = SimpleNamespace(throughput=SimpleNamespace(tokens_per_s=110.0), trace=step)
    monkeypatch.setattr(replay.simulator, "replay", lambda *_, **__: found)
    rows = {row.name: row for row in replay.accuracy_rows([cell], {cell.n: None}, None)}
    names = list(rows)
    assert names.index("throughput_mean_error@repeats") < names.index("throughput_mean_error")
    assert rows["throughput_mean_error"].value == 0, "the composite"
    for name in ("throughput_mean_error@repeats", "throughput_worst_error@repeats"):
        assert rows[name].value == pytest.approx((0.1 + 0.375 + 1.2) / 3), "of all repeats"


def test_calibrate_writes_a_device(monkeypatch, tmp_path, says) -> None:
    """The command measures this machine and writes a preset that a replay can load."""
    monkeypatch.setattr(replay, "WIDTHS", (4,))
    path = tmp_path / "new" / "here.json"
    told = says("calibrate", "--out", str(path), "--num-problems", "1", "--repeats", "1")
    assert set(load_device(path).terms) == {"tiny-solver", "tiny-prm", "request"}
    assert str(path.name) in told.replace("\n", "")
    told = says("calibrate", "--out", str(tmp_path), status=2)  # before it measures
    assert "give the path of a file" in told


def test_a_gpu_is_measured(monkeypatch) -> None:
    """By its own ceilings and memory, not this CPU's."""
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda _: "NVIDIA B999",
        "mem_get_info": lambda _: (60 << 30, 64 << 30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    rates = {"cuda:1": Ceiling(3e14, 1e12, 3e14)}
    monkeypatch.setattr(replay, "gpu_ceiling", lambda place: rates[str(place)])
    found = replay.this_machine("cuda:1")
    assert (found.name, found.flops_per_s, found.bytes_per_s) == ("NVIDIA B999", 3e14, 1e12)
    assert (found.memory_bytes, found.source[:9]) == (64 << 30, "measured:")
