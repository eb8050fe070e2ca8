"""How well a replay foretells a measured run, and what it costs to ask.

Cells differ in split, batch limits and n; each is searched on the real engines, interleaved, and
its fastest repeat stands; a cell whose repeats lie more than 5 % apart is searched again. Two
cells of each n calibrate the device, the others are held out: their throughput is replayed and held
against the measured one, their events are compared step by step. Costs are CPU time of this
process. What it does not do: vary what no recording holds (models, beam width).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from workbench.bench.machine_ceiling import measure_ceiling
from workbench.bench.record import Row
from workbench.bench.rows import plain_row
from workbench.engine.engine import Engine
from workbench.experiments.machine import memory_bytes
from workbench.replay.answers import Answers
from workbench.replay.calibration import MeasuredRun, calibrated
from workbench.replay.calls import CacheCalls, logged_calls, run_calls
from workbench.replay.curves import curve_sizes
from workbench.replay.devices import Device
from workbench.replay.miss_ratio import miss_ratio
from workbench.replay.simulator import Replayed, events, replay
from workbench.search.beam import BeamSearch
from workbench.search.prm import PRM
from workbench.search.problems import Problem, load_problems
from workbench.search.record_file import read_recording
from workbench.search.result import SearchResult
from workbench.search.runner import run_search

PROFILES = {"quick": (2, 1, 4), "default": (8, 3, 12), "full": (16, 5, 18)}
"""Problems, repeats, held-out cells."""
WIDTHS = (16, 4)  # n
SPLITS = ((96, 480), (200, 120), (400, 80), (140, 240), (260, 96))  # blocks of LLM and PRM
LIMITS = ((64, 2048), (16, 256), (8, 512), (32, 1024))  # max_num_seqs, max_num_batched_tokens
SPREAD, MORE = 0.05, 2  # repeats further apart than this are searched again, so often at most
CURVE_SIZES = 10
MAX_MODEL_LEN = 1024
MODE = {"batch_invariant": True, "beam_width": 4, "max_depth": 40, "max_model_len": MAX_MODEL_LEN}


@dataclass(slots=True, eq=False)
class Cell:
    """One configuration, and the searches that were measured with it."""

    n: int
    blocks: tuple[int, int]
    limits: tuple[int, int]
    results: list[SearchResult] = field(default_factory=list)

    @property
    def llm(self) -> dict[str, Any]:
        """What a replay changes of the recorded LLM."""
        return self._settings(self.blocks[0])

    @property
    def prm(self) -> dict[str, Any]:
        """What a replay changes of the recorded PRM."""
        return self._settings(self.blocks[1])

    @property
    def best(self) -> SearchResult:
        """The fastest repeat."""
        return max(self.results, key=lambda result: result.throughput.tokens_per_s)

    @property
    def spread(self) -> float:
        """Distance of the two fastest repeats, as a share of the fastest."""
        rates = sorted((r.throughput.tokens_per_s for r in self.results), reverse=True)
        return 1 - rates[1] / rates[0] if len(rates) > 1 else 0.0

    def _settings(self, blocks: int) -> dict[str, Any]:
        seqs, tokens = self.limits
        sizes = {"num_blocks": blocks, "max_num_seqs": seqs}
        return sizes | {"max_num_batched_tokens": tokens}

    def search(self, problems: list[Problem], seed: int, record: Path | None = None) -> None:
        """Search once more on engines of this cell."""
        limit: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN}
        llm: dict[str, Any] = self.llm | limit
        prm: dict[str, Any] = self.prm | limit
        result = run_search(
            problems,
            llm=Engine("tiny-solver", **llm),
            prm=PRM(Engine("tiny-prm", **prm)),
            strategy=BeamSearch(n=self.n, beam_width=4, max_depth=40),
            seed=seed,
            record=record,
        )
        self.results.append(result)


def run(profile: str = "default", seed: int = 0, repeats: int | None = None) -> Iterator[Row]:
    """The rows of `workbench bench replay`. repeats: searches a cell, not the profile's."""
    num_problems, own_repeats, held_out = PROFILES[profile]
    problems = load_problems("tiny", num_problems)
    fitted, others = cells(held_out)
    with TemporaryDirectory() as folder:
        answers = _recorded(fitted, problems, seed, Path(folder))
    _measure([*fitted, *others], problems, seed, repeats or own_repeats)
    runs = [MeasuredRun(answers[c.n], c.best.trace, c.llm, c.prm) for c in fitted]
    device = calibrated(this_machine(), runs)
    found = [_replayed(cell, answers[cell.n], device) for cell in others]
    yield from _accuracy(others, found)
    yield from _speed(others[0], answers[others[0].n], device)


def cells(held_out: int) -> tuple[list[Cell], list[Cell]]:
    """Those to fit, two of each n, and those held out from the fit; all differ."""
    grid = [
        Cell(n, SPLITS[(place + shift) % len(SPLITS)], LIMITS[place % len(LIMITS)])
        for shift in range(len(SPLITS))
        for place in range(len(LIMITS))
        for n in WIDTHS
    ]
    fitted = 2 * len(WIDTHS)
    return grid[:fitted], grid[fitted : fitted + held_out]


def this_machine() -> Device:
    """This machine's roofline, measured now."""
    ceiling = measure_ceiling()
    return Device(
        "this machine",
        ceiling.flops_per_s,
        ceiling.bytes_per_s,
        memory_bytes() or 1 << 30,
        "measured: a matrix product, a sum over memory",
    )


def _recorded(
    fitted: list[Cell], problems: list[Problem], seed: int, folder: Path
) -> dict[int, Answers]:
    """A recording of each n; the searches that made them warm the machine up and are dropped."""
    answers = {}
    for n in WIDTHS:
        cell = next(cell for cell in fitted if cell.n == n)
        path = folder / f"{n}.parquet"
        cell.search(problems, seed, path)
        cell.results.clear()
        answers[n] = Answers(read_recording(path))
    return answers


def _measure(measured: list[Cell], problems: list[Problem], seed: int, repeats: int) -> None:
    for _ in range(repeats):
        for cell in measured:
            cell.search(problems, seed)
    for _ in range(MORE if repeats > 1 else 0):
        for cell in [cell for cell in measured if cell.spread > SPREAD]:
            cell.search(problems, seed)


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
