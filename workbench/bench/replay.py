"""How well a replay foretells a measured run, and what it costs to ask.

Some cells calibrate this machine (cells.py), the others are held out: their throughput is replayed
and held against the measured one (cells.py; @whole: against the fastest repeat as a whole), their
events are compared step by step. What it costs is CPU time of this process. Rows without a suffix
are of a search at the thesis's scale on an A100 (40 GB) that was never replayed before, @again of
the same once more, its blocks' hashes known, @tiny of a held-out cell here. What it does not do:
vary what no recording holds (models, width).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import fmean

from workbench.bench.cells import MAX_MODEL_LEN, Cell, cells, fitted_device, measure, recorded
from workbench.bench.record import Row
from workbench.bench.rows import plain_row
from workbench.replay.answers import Answers
from workbench.replay.devices import PRESETS, Device
from workbench.replay.miss_ratio import CacheCalls, curve_sizes, logged_calls, miss_ratio, run_calls
from workbench.replay.simulator import Replayed, events, replay, search_calls
from workbench.replay.workload import thesis_search
from workbench.search.problems import load_problems

PROFILES = {"quick": (2, 1, 4), "default": (8, 3, 12), "full": (16, 5, 18)}
"""Problems, repeats, held-out cells."""
THESIS_PROBLEMS = {"quick": 4, "default": 128, "full": 128}
CURVE_SIZES, EXACT_SIZES = 32, 10
REPEATS = 3  # of what is timed at scale
MODE = {
    "batch_invariant": True,
    "beam_width": 4,
    "max_depth": 40,
    "max_model_len": MAX_MODEL_LEN,
    "block_operation": "a block allocated, hit at admission, given back after either, or evicted",
}


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
    plain = next(cell for cell in others if cell.policy is None)
    yield from _speed(plain, answers[plain.n], device)
    yield from _curves(plain, answers[plain.n], device)
    yield from _at_scale(THESIS_PROBLEMS[profile], seed)


def _replayed(cell: Cell, answers: Answers, device: Device, log_calls: bool = False) -> Replayed:
    return replay(
        answers, device, llm=cell.llm, prm=cell.prm, shared=cell.shared, log_calls=log_calls
    )


def _accuracy(others: list[Cell], found: list[Replayed]) -> Iterator[Row]:
    pairs = list(zip(others, found, strict=True))
    rates = [replayed.throughput.tokens_per_s for replayed in found]
    over = [rate / cell.tokens_per_s - 1 for rate, cell in zip(rates, others, strict=True)]
    whole = [
        rate / cell.best.throughput.tokens_per_s - 1
        for rate, cell in zip(rates, others, strict=True)
    ]
    errors = [abs(error) for error in over]
    same = [
        events(replayed.trace.steps).equals(events(cell.best.trace.steps))
        for cell, replayed in pairs
    ]
    count = len(pairs)
    yield Row("throughput_mean_error", fmean(errors), "fraction", repeats=count)
    yield Row("throughput_worst_error", max(errors), "fraction", repeats=count)
    yield Row("throughput_mean_error@whole", fmean(map(abs, whole)), "fraction", repeats=count)
    yield Row("events_identical", fmean(same), "fraction", repeats=count)
    yield Row("measured_spread_worst", max(c.spread for c in others), "fraction", repeats=count)
    for cell, error in zip(others, over, strict=True):
        repeats = len(cell.results)
        yield Row(
            f"throughput_error@{cell}", error, "fraction", repeats=repeats, spread=cell.spread
        )


def _at_scale(num_problems: int, seed: int) -> Iterator[Row]:
    """The first replay hashes every block, as who asks once pays; the second finds the hashes.

    Of each the fastest of REPEATS: the same work, whatever the machine's mood.
    """
    search = thesis_search(num_problems, seed=seed)
    spent: dict[str, list[float]] = {"": [], "@again": []}
    for _ in range(REPEATS):
        answers = Answers(search)
        for seconds in spent.values():
            replayed, each = _timed(answers)
            seconds.append(each)
    for suffix, seconds in spent.items():
        over = min(seconds) / replayed.throughput.wall_s
        each = 1e6 * min(seconds) / block_operations(replayed)
        yield Row(f"replay_s{suffix}", min(seconds), "s", repeats=REPEATS)
        yield Row(f"replay_over_simulated{suffix}", over, "fraction", repeats=REPEATS)
        yield Row(f"block_op_us{suffix}", each, "us", repeats=REPEATS)
    both = search_calls(answers, PRESETS["a100-40"])
    curves = min(sum(map(_curve_seconds, both)) for _ in range(REPEATS))
    yield Row("miss_ratio_s", curves, "s", repeats=REPEATS)


def _timed(answers: Answers) -> tuple[Replayed, float]:
    start = time.process_time()
    replayed = replay(answers, PRESETS["a100-40"])
    return replayed, time.process_time() - start


def _speed(cell: Cell, answers: Answers, device: Device) -> Iterator[Row]:
    shares, each = [], []
    for _ in range(3):
        start = time.process_time()
        replayed = _replayed(cell, answers, device)
        spent = time.process_time() - start
        shares.append(spent / replayed.throughput.wall_s)
        each.append(1e6 * spent / block_operations(replayed))
    yield plain_row("replay_over_simulated@tiny", shares, "fraction")
    yield plain_row("block_op_us@tiny", each, "us")


def _curves(cell: Cell, answers: Answers, device: Device) -> Iterator[Row]:
    logged = _replayed(cell, answers, device, log_calls=True)
    both = [logged_calls(engine.cache) for engine in (logged.llm, logged.prm)]
    start = time.process_time()
    errors = [error for calls in both for error in _errors(calls)]
    spent = time.process_time() - start
    yield Row("miss_ratio_s@tiny", sum(map(_curve_seconds, both)), "s", repeats=1)
    exact = fmean(error == 0 for error in errors)
    yield Row("miss_ratio_exact", exact, "fraction", repeats=len(errors))
    yield Row("miss_ratio_worst_error", max(errors), "fraction", repeats=len(errors))
    yield Row("miss_ratio_brute_force_s", spent, "s", repeats=1)


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


def _sizes(calls: CacheCalls) -> list[int]:
    """Those at which every call succeeds."""
    curve = miss_ratio(calls, curve_sizes(calls, 2 * EXACT_SIZES))
    return [int(size) for size in curve.loc[curve["fits"], "num_blocks"].head(EXACT_SIZES)]


def _curve_seconds(calls: CacheCalls) -> float:
    sizes = curve_sizes(calls, CURVE_SIZES)
    start = time.process_time()
    miss_ratio(calls, sizes)
    return time.process_time() - start


def _errors(calls: CacheCalls) -> Iterator[float]:
    """At each size: how far the curve's hit ratio lies from what the manager itself counts."""
    curve = miss_ratio(calls, _sizes(calls)).set_index("num_blocks")
    for size, row in curve.iterrows():
        stats = run_calls(calls, int(size))  # type: ignore[call-overload]
        assert stats is not None, "the sizes are those that fit"
        yield abs(row["hit_ratio"] - stats.hit_tokens / max(stats.query_tokens, 1))
