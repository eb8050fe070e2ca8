"""How well a replay foretells a measured run, and what it costs to ask.

Two cells of each n calibrate this machine (cells.py), the others are held out: their throughput is
replayed and held against the measured one, their events are compared step by step. Costs are CPU
time of this process. What it does not do: vary what no recording holds (models, beam width).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import fmean

from workbench.bench.cells import MAX_MODEL_LEN, Cell, cells, fitted_device, measure, recorded
from workbench.bench.record import Row
from workbench.bench.rows import plain_row
from workbench.replay.answers import Answers
from workbench.replay.calls import CacheCalls, logged_calls, run_calls
from workbench.replay.curves import curve_sizes
from workbench.replay.devices import Device
from workbench.replay.miss_ratio import miss_ratio
from workbench.replay.simulator import Replayed, events, replay
from workbench.search.problems import load_problems

PROFILES = {"quick": (2, 1, 4), "default": (8, 3, 12), "full": (16, 5, 18)}
"""Problems, repeats, held-out cells."""
CURVE_SIZES = 10
MODE = {"batch_invariant": True, "beam_width": 4, "max_depth": 40, "max_model_len": MAX_MODEL_LEN}


def run(profile: str = "default", seed: int = 0, repeats: int | None = None) -> Iterator[Row]:
    """The rows of `workbench bench replay`. repeats: searches a cell, not the profile's."""
    num_problems, own_repeats, held_out = PROFILES[profile]
    problems = load_problems("tiny", num_problems)
    fitted, others = cells(held_out)
    answers = recorded(fitted, problems, seed)
    measure([*fitted, *others], problems, seed, repeats or own_repeats)
    device = fitted_device(fitted, answers)
    found = [_replayed(cell, answers[cell.n], device) for cell in others]
    yield from _accuracy(others, found)
    yield from _speed(others[0], answers[others[0].n], device)


def _replayed(cell: Cell, answers: Answers, device: Device, log_calls: bool = False) -> Replayed:
    return replay(answers, device, llm=cell.llm, prm=cell.prm, log_calls=log_calls)


def _accuracy(others: list[Cell], found: list[Replayed]) -> Iterator[Row]:
    pairs = list(zip(others, found, strict=True))
    errors = [
        abs(replayed.throughput.tokens_per_s / cell.best.throughput.tokens_per_s - 1)
        for cell, replayed in pairs
    ]
    same = [
        events(replayed.trace.steps).equals(events(cell.best.trace.steps))
        for cell, replayed in pairs
    ]
    count = len(pairs)
    yield Row("throughput_mean_error", fmean(errors), "fraction", repeats=count)
    yield Row("throughput_worst_error", max(errors), "fraction", repeats=count)
    yield Row("events_identical", fmean(same), "fraction", repeats=count)
    yield Row("measured_spread_worst", max(c.spread for c in others), "fraction", repeats=count)


def _speed(cell: Cell, answers: Answers, device: Device) -> Iterator[Row]:
    shares, each = [], []
    for _ in range(3):
        start = time.process_time()
        replayed = _replayed(cell, answers, device)
        spent = time.process_time() - start
        shares.append(spent / replayed.throughput.wall_s)
        each.append(1e6 * spent / block_operations(replayed))
    yield plain_row("replay_over_simulated", shares, "fraction")
    yield plain_row("block_op_us", each, "us")
    logged = _replayed(cell, answers, device, log_calls=True)
    both = [logged_calls(engine.cache) for engine in (logged.llm, logged.prm)]
    start = time.process_time()
    exact = [share for calls in both for share in _exact(calls)]
    spent = time.process_time() - start
    yield Row("miss_ratio_s", sum(_curve_seconds(calls) for calls in both), "s", repeats=1)
    yield Row("miss_ratio_exact", fmean(exact), "fraction", repeats=len(exact))
    yield Row("miss_ratio_brute_force_s", spent, "s", repeats=1)


def block_operations(replayed: Replayed) -> int:
    """Blocks taken, shared, evicted and given back."""
    steps = replayed.trace.steps
    shared = 0
    for name, engine in (("llm", replayed.llm), ("prm", replayed.prm)):
        own = steps[steps["engine"] == name]
        hits = int(own["hit_tokens"].sum() + own["readmit_hit_tokens"].sum())
        shared += hits // engine.settings.block_size
    taken = int(steps["allocated"].sum())
    return 2 * (taken + shared) + int(steps["evicted"].sum())


def _sizes(calls: CacheCalls) -> list[int]:
    """Those at which every call succeeds."""
    curve = miss_ratio(calls, curve_sizes(calls, 2 * CURVE_SIZES))
    return [int(size) for size in curve.loc[curve["fits"], "num_blocks"].head(CURVE_SIZES)]


def _curve_seconds(calls: CacheCalls) -> float:
    sizes = _sizes(calls)
    start = time.process_time()
    miss_ratio(calls, sizes)
    return time.process_time() - start


def _exact(calls: CacheCalls) -> Iterator[bool]:
    """At each size: whether the curve is what the manager itself counts."""
    curve = miss_ratio(calls, _sizes(calls)).set_index("num_blocks")
    for size, row in curve.iterrows():
        stats = run_calls(calls, int(size))  # type: ignore[call-overload]
        counts = ("hit_tokens", "thrashed", "thrash_events", "evicted", "allocated")
        yield stats is not None and all(row[c] == getattr(stats, c) for c in counts)
