"""How well a replay foretells a measured run, and what it costs to ask.

Cells are searches of the embedded pair at different splits, policies, limits and n. Some calibrate
this machine, the others are held out: their throughput is replayed and held against the measured
one, their events are compared step by step. Cells are searched in turn, and one whose repeats lie
more than 5 % apart again; all repeats take the same steps, so of each step the fastest stands
(@whole: the fastest repeat as a whole). What a replay costs is CPU time of this process. Rows
without a suffix are of a search at the thesis's scale on an A100 (40 GB) that was never replayed
before, @again of the same once more, its blocks' hashes known, @tiny of a held-out cell here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from workbench.bench.ceilings import measure_ceiling
from workbench.bench.record import Row, median_row
from workbench.engine.engine import Engine
from workbench.engine.memory import block_shape
from workbench.experiments.provenance import cpu_model, memory_bytes
from workbench.kvcache.arena import BlockShape, KVArena
from workbench.replay.answers import Answers
from workbench.replay.devices import PRESETS, Device
from workbench.replay.miss_ratio import CacheCalls, curve_sizes, logged_calls, miss_ratio, run_calls
from workbench.replay.simulator import (
    POLICIES,
    MeasuredRun,
    Replayed,
    SharedMemory,
    calibrated,
    events,
    replay,
    search_calls,
)
from workbench.replay.workload import thesis_search
from workbench.search.prm import PRM
from workbench.search.problems import Problem, load_problems
from workbench.search.recording import read_recording
from workbench.search.result import SearchResult
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch
from workbench.trace import Trace

PROFILES = {"quick": (2, 1, 4), "default": (8, 3, 12), "full": (16, 5, 18)}
"""Problems, repeats, held-out cells."""
THESIS_PROBLEMS = {"quick": 4, "default": 128, "full": 128}
WIDTHS = (16, 4)  # n
SPLITS = ((96, 480), (200, 120), (400, 80), (140, 240), (260, 96))  # blocks of LLM and PRM
LIMITS = ((64, 2048), (16, 256), (8, 512), (32, 1024))  # max_num_seqs, max_num_batched_tokens
SHARED = ("MarginalValue", "FirstCome", "PhaseAware", "StaticSplit")  # policies of one memory
ARENA = (110, 170)  # blocks that its bytes would be for LLM and PRM
SPREAD, MORE = 0.05, 2  # repeats further apart than this are searched again, so often at most
CURVE_SIZES, EXACT_SIZES = 32, 10
REPEATS = 3  # of what is timed at scale
MODELS = ("tiny-solver", "tiny-prm")
MODE: dict[str, Any] = {
    "batch_invariant": True,
    "beam_width": 4,
    "max_depth": 40,
    "max_model_len": 1024,
    "block_operation": "a block allocated, hit at admission, given back after either, or evicted",
}


def run(profile: str = "default", seed: int = 0, repeats: int | None = None) -> Iterator[Row]:
    """The rows of `workbench bench replay`. repeats: searches a cell, not the profile's."""
    num_problems, own_repeats, held_out = PROFILES[profile]
    problems = load_problems("tiny", num_problems)
    fitted, others = make_cells(held_out)
    answers = recorded(fitted, problems, seed)
    measure([*fitted, *others], problems, seed, repeats or own_repeats)
    device = fitted_device(fitted, answers)
    found = [cell.replayed(answers[cell.n], device) for cell in others]
    yield from _accuracy_rows(others, found)
    plain = next(cell for cell in others if cell.policy is None)
    yield from _tiny_rows(plain, answers[plain.n], device)
    yield from scale_rows(THESIS_PROBLEMS[profile], seed)


def calibrate(num_problems: int, repeats: int, seed: int = 0) -> Device:
    """This machine's preset for the embedded pair, measured now."""
    problems = load_problems("tiny", num_problems)
    fitted, _ = make_cells(0)
    answers = recorded(fitted, problems, seed)
    measure(fitted, problems, seed, repeats)
    return fitted_device(fitted, answers)


# -- cells --


@dataclass(slots=True, eq=False)
class Cell:
    """One configuration, and the searches that were measured with it.

    policy: None gives each model its blocks, else both share an arena of as many bytes.
    """

    n: int
    blocks: tuple[int, int]
    limits: tuple[int, int]
    policy: str | None = None
    results: list[SearchResult] = field(default_factory=list)

    def __str__(self) -> str:
        memory = "{}+{} blocks".format(*self.blocks) + (f" {self.policy}" if self.policy else "")
        return f"n={self.n}, {memory}, {self.limits[0]} rows, {self.limits[1]} tokens"

    @property
    def settings(self) -> list[dict[str, Any]]:
        """Of LLM and PRM: what differs from cell to cell."""
        seqs, tokens = self.limits
        limits = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
        return [limits | ({} if self.policy else {"num_blocks": n}) for n in self.blocks]

    @property
    def shared(self) -> SharedMemory | None:
        """The memory that both models share, if they do."""
        if self.policy is None:
            return None
        llm, prm = (n * shape.block_bytes for n, shape in zip(self.blocks, _shapes(), strict=True))
        return SharedMemory(llm + prm, self.policy, llm / (llm + prm))

    def search(self, problems: list[Problem], seed: int, record: Path | None = None) -> None:
        """Search once more on fresh engines."""
        given: dict[str, Any] = {"max_model_len": MODE["max_model_len"]}
        if (shared := self.shared) is not None:
            policy = POLICIES[shared.policy]()
            share = shared.kv_share if policy.keeps_split else None
            given["arena"] = KVArena(shared.memory, _shapes(), policy, share)
        each = zip(MODELS, self.settings, strict=True)
        llm, prm = (Engine(name, **own, **given) for name, own in each)
        strategy = BeamSearch(n=self.n, beam_width=4, max_depth=40)
        self.results.append(
            run_search(problems, llm=llm, prm=PRM(prm), strategy=strategy, seed=seed, record=record)
        )

    def replayed(self, answers: Answers, device: Device, log_calls: bool = False) -> Replayed:
        """A recorded search under this configuration, on a device."""
        llm, prm = self.settings
        return replay(answers, device, llm=llm, prm=prm, shared=self.shared, log_calls=log_calls)

    @property
    def best(self) -> SearchResult:
        """The fastest repeat as a whole."""
        return max(self.results, key=lambda result: result.throughput.tokens_per_s)

    @property
    def trace(self) -> Trace:
        """Each step as long as in the repeat in which it was fastest; spans of the one with the
        fewest seconds of them.
        """
        traces = [result.trace for result in self.results]
        fastest = np.min([trace.steps["duration_s"] for trace in traces], axis=0)
        spans = min((trace.spans for trace in traces), key=lambda spans: spans["duration_s"].sum())
        return replace(traces[0], steps=traces[0].steps.assign(duration_s=fastest), spans=spans)

    @property
    def tokens_per_s(self) -> float:
        """Over the seconds of `trace`, and the fewest that a repeat spent outside of steps."""
        outside = min(
            result.throughput.wall_s - result.trace.steps["duration_s"].sum()
            for result in self.results
        )
        seconds = outside + self.trace.steps["duration_s"].sum()
        return float(self.results[0].throughput.tokens / seconds)

    @property
    def spread(self) -> float:
        """Distance of the slowest repeat from the fastest, as a share of the fastest."""
        rates = [result.throughput.tokens_per_s for result in self.results]
        return 1 - min(rates) / max(rates) if rates else 0.0


def _shapes() -> list[BlockShape]:
    return [block_shape(name, max_model_len=MODE["max_model_len"]) for name in MODELS]


def make_cells(held_out: int) -> tuple[list[Cell], list[Cell]]:
    """Those to fit, each n with each of the limits, and those held out; all differ.

    Every third of those held out is an arena, of one policy after the other.
    """
    grid = [
        Cell(n, SPLITS[(place + shift) % len(SPLITS)], LIMITS[place])
        for shift in range(len(SPLITS))
        for place in range(len(LIMITS))
        for n in WIDTHS
    ]
    count = len(LIMITS) * len(WIDTHS)
    arenas = [
        Cell(
            WIDTHS[k % len(WIDTHS)],
            ARENA,
            LIMITS[(k + k // len(LIMITS)) % len(LIMITS)],
            SHARED[k % len(SHARED)],
        )
        for k in range(held_out // 3)
    ]
    rest = iter(grid[count:])
    return grid[:count], [arenas[k // 3] if k % 3 == 2 else next(rest) for k in range(held_out)]


def recorded(fitted: list[Cell], problems: list[Problem], seed: int) -> dict[int, Answers]:
    """A recording of each n; the searches that made them warm the machine up and are dropped."""
    answers = {}
    with TemporaryDirectory() as folder:
        for n in WIDTHS:
            cell = next(cell for cell in fitted if cell.n == n)
            path = Path(folder) / f"{n}.parquet"
            cell.search(problems, seed, path)
            cell.results.clear()
            answers[n] = Answers(read_recording(path))
    return answers


def measure(measured: list[Cell], problems: list[Problem], seed: int, repeats: int) -> None:
    """Search every cell so often, in turn, and those whose repeats disagree once more."""
    for _ in range(repeats):
        for cell in measured:
            cell.search(problems, seed)
    for _ in range(MORE if repeats > 1 else 0):
        for cell in [cell for cell in measured if cell.spread > SPREAD]:
            cell.search(problems, seed)


def this_machine() -> Device:
    """This machine's roofline, measured now."""
    ceiling = measure_ceiling()
    return Device(
        cpu_model(),
        ceiling.gemm_flops_per_s,
        ceiling.bytes_per_s,
        memory_bytes() or 1 << 30,
        "measured: a matrix product, a sum over memory",
    )


def fitted_device(fitted: Iterable[Cell], answers: dict[int, Answers]) -> Device:
    """This machine with the terms that explain the cells' measured steps."""
    runs = [MeasuredRun(answers[cell.n], cell.trace, *cell.settings) for cell in fitted]
    return calibrated(this_machine(), runs)


# -- rows --


def _accuracy_rows(others: list[Cell], found: list[Replayed]) -> Iterator[Row]:
    pairs, count = list(zip(others, found, strict=True)), len(others)
    errors = [new.throughput.tokens_per_s / cell.tokens_per_s - 1 for cell, new in pairs]
    whole = [
        abs(new.throughput.tokens_per_s / cell.best.throughput.tokens_per_s - 1)
        for cell, new in pairs
    ]
    same = [events(new.trace.steps).equals(events(cell.best.trace.steps)) for cell, new in pairs]
    for name, value in (
        ("throughput_mean_error", fmean(map(abs, errors))),
        ("throughput_worst_error", max(map(abs, errors))),
        ("throughput_mean_error@whole", fmean(whole)),
        ("events_identical", fmean(same)),
        ("measured_spread_worst", max(cell.spread for cell in others)),
    ):
        yield Row(name, value, "fraction", repeats=count)
    for cell, error in zip(others, errors, strict=True):
        name, repeats = f"throughput_error@{cell}", len(cell.results)
        yield Row(name, error, "fraction", repeats=repeats, spread=cell.spread)


def _tiny_rows(cell: Cell, answers: Answers, device: Device) -> Iterator[Row]:
    """What a replay and its curves cost here, and how far the curves lie from the manager."""
    shares, each = [], []
    for _ in range(3):
        start = time.process_time()
        replayed = cell.replayed(answers, device)
        spent = time.process_time() - start
        shares.append(spent / replayed.throughput.wall_s)
        each.append(1e6 * spent / block_operations(replayed))
    yield median_row("replay_over_simulated@tiny", shares, "fraction")
    yield median_row("block_op_us@tiny", each, "us")
    logged = cell.replayed(answers, device, log_calls=True)
    both = [logged_calls(engine.cache) for engine in (logged.llm, logged.prm)]
    start = time.process_time()
    errors = [error for calls in both for error in _errors(calls)]
    spent = time.process_time() - start
    yield Row("miss_ratio_s@tiny", sum(map(curve_seconds, both)), "s", repeats=1)
    exact = fmean(error == 0 for error in errors)
    yield Row("miss_ratio_exact", exact, "fraction", repeats=len(errors))
    yield Row("miss_ratio_worst_error", max(errors), "fraction", repeats=len(errors))
    yield Row("miss_ratio_brute_force_s", spent, "s", repeats=1)


def scale_rows(num_problems: int, seed: int) -> Iterator[Row]:
    """The first replay hashes every block, as who asks once pays; the second finds the hashes.

    Of each the fastest of REPEATS: the same work, whatever the machine's pace.
    """
    search = thesis_search(num_problems, seed=seed)
    spent: dict[str, list[float]] = {"": [], "@again": []}
    for _ in range(REPEATS):
        answers = Answers(search)
        for seconds in spent.values():
            replayed, each = timed_replay(answers)
            seconds.append(each)
    for suffix, seconds in spent.items():
        over = min(seconds) / replayed.throughput.wall_s
        each = 1e6 * min(seconds) / block_operations(replayed)
        yield Row(f"replay_s{suffix}", min(seconds), "s", repeats=REPEATS)
        yield Row(f"replay_over_simulated{suffix}", over, "fraction", repeats=REPEATS)
        yield Row(f"block_op_us{suffix}", each, "us", repeats=REPEATS)
    both = search_calls(answers, PRESETS["a100-40"])
    curves = min(sum(map(curve_seconds, both)) for _ in range(REPEATS))
    yield Row("miss_ratio_s", curves, "s", repeats=REPEATS)


def timed_replay(answers: Answers) -> tuple[Replayed, float]:
    """A replay on an A100, and its CPU seconds."""
    start = time.process_time()
    replayed = replay(answers, PRESETS["a100-40"])
    return replayed, time.process_time() - start


def curve_seconds(calls: CacheCalls) -> float:
    """CPU seconds of a model's miss-ratio curve."""
    sizes = curve_sizes(calls, CURVE_SIZES)
    start = time.process_time()
    miss_ratio(calls, sizes)
    return time.process_time() - start


def block_operations(replayed: Replayed) -> int:
    """Blocks allocated, hit at an admission, given back after either, and evicted.

    Hit blocks are hit tokens over the block size; what is taken or hit is given back once by the
    end. An append of a token, a hash and a look-up are no operations of their own.
    """
    steps = replayed.trace.steps
    shared = 0
    for name, engine in (("llm", replayed.llm), ("prm", replayed.prm)):
        own = steps[steps["engine"] == name]
        hits = int(own["hit_tokens"].sum() + own["readmit_hit_tokens"].sum())
        shared += hits // engine.settings.block_size
    taken = int(steps["allocated"].sum())
    return 2 * (taken + shared) + int(steps["evicted"].sum())


def _errors(calls: CacheCalls) -> Iterator[float]:
    """How far the curve's hit ratio lies from what the manager itself counts, at the first sizes at
    which every call succeeds.
    """
    curve = miss_ratio(calls, curve_sizes(calls, 2 * EXACT_SIZES))
    sizes = [int(size) for size in curve.loc[curve["fits"], "num_blocks"].head(EXACT_SIZES)]
    for size, found in zip(sizes, miss_ratio(calls, sizes)["hit_ratio"], strict=True):
        stats = run_calls(calls, size)
        assert stats is not None, "the sizes are those that fit"
        yield abs(found - stats.hit_tokens / max(stats.query_tokens, 1))
