"""Miss-ratio curves against the manager itself: one pass gives what each size would count."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import ConfigError
from workbench.replay import miss_ratio as curves
from workbench.replay.miss_ratio import miss_ratio, optimal_hits, run_calls
from workbench.replay.simulator import Costs, SharedMemory, search_calls

FREE = Costs(lambda _: 0.001, lambda _: 0.001)
ROOMY = {"llm": {"num_blocks": 500}, "prm": {"num_blocks": 500}}
SIZES = (*range(1, 33), 40, 64)
COUNTS = ("query_tokens", "hit_tokens", "evicted", "thrashed")


def by_manager(calls, size: int) -> list[int] | None:
    """The counts of these calls at a size; None when one finds no room."""
    stats = run_calls(calls, size)
    return None if stats is None else [getattr(stats, name) for name in COUNTS]


def by_curve(row) -> list[int] | None:
    return [int(row[name]) for name in COUNTS] if row["fits"] else None


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_size_equals_the_manager(data) -> None:
    """Prompts that share beginnings, growing and leaving in any order, computed wholly."""
    draw, size = data.draw, data.draw(st.sampled_from([1, 2, 3]))
    cache = curves.LoggedCache(draw(st.integers(8, 40)), size)
    running: dict[int, list[int]] = {}
    known: list[list[int]] = []
    for number in range(draw(st.integers(1, 30))):
        kind = draw(st.sampled_from(["allocate", "allocate", "extend", "free"]))
        own = [1000 * (number + 1) + k for k in range(size + draw(st.integers(0, 2)))]
        if kind == "allocate" or not running:
            start = draw(st.sampled_from(known)) if known else []
            start = start[: size * draw(st.integers(0, len(start) // size))]
            again = draw(st.booleans())
            if cache.allocate(number, start + own, readmission=again) is not None:
                running[number] = start + own
                known.append(start + own)
        else:
            chosen = draw(st.sampled_from(sorted(running)))
            if kind == "free":
                cache.free(chosen)
                del running[chosen]
            elif cache.extend(chosen, running[chosen] + own) is not None:
                running[chosen] = running[chosen] + own
                known.append(running[chosen])
    curve = miss_ratio(cache.calls, SIZES)
    for row in curve.to_dict("records"):
        expected = by_manager(cache.calls, row["num_blocks"])
        assert by_curve(row) == expected, f"{row['num_blocks']} blocks"


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=4)  # blocks of a prompt


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(PROMPTS, st.integers(0, 3)), min_size=1, max_size=25))
def test_the_optimum_is_never_below_lru(order) -> None:
    """Prompts that share beginnings, up to four at once: at every size it hits as much or more."""
    cache = curves.LoggedCache(100, 2)
    running: list[int] = []
    for number, (blocks, most) in enumerate(order):
        assert cache.allocate(number, [b for block in blocks for b in (block, block)] + [9])
        running.append(number)
        while len(running) > most:
            cache.free(running.pop(0))
    calls = cache.calls
    curve = miss_ratio(calls, SIZES)
    best = optimal_hits(calls, SIZES)
    fitting = curve[curve["fits"]]
    assert fitting["num_blocks"].tolist() == best["num_blocks"].tolist()
    assert (best["hit_tokens"].to_numpy() >= fitting["hit_tokens"].to_numpy()).all()
    assert best["hit_tokens"].iloc[-1] == fitting["hit_tokens"].iloc[-1], "64 blocks hold all"


def calls_of(measured, **changes):
    """The cache calls of both models in a replay."""
    return search_calls(measured.answers, FREE, changes)


def test_a_real_search_is_near_the_manager_at_every_size(measured) -> None:
    """From the peak up: hit ratios within 0.001, other counts within 1 % or a few blocks."""
    for calls in calls_of(measured):
        peak = int(miss_ratio(calls, [1])["peak_active"].iloc[0])
        sizes = [peak - 1, *np.linspace(peak, calls.num_contents, 9).astype(int).tolist()]
        curve = miss_ratio(calls, sizes)
        assert by_manager(calls, peak - 1) is None
        for row in curve[1:].to_dict("records"):
            stats = run_calls(calls, row["num_blocks"])
            expected = stats.hit_tokens / stats.query_tokens
            assert row["hit_ratio"] == pytest.approx(expected, abs=1e-3)
            for name in ("evicted", "thrashed"):
                assert row[name] == pytest.approx(getattr(stats, name), rel=0.01, abs=4), name
        assert curve["fits"].tolist() == [False] + [True] * 9
        assert curve["hit_ratio"].iloc[-1] > curve["hit_ratio"].iloc[1]


def test_sizes_reach_from_what_does_not_fit_to_where_nothing_is_evicted(measured) -> None:
    for calls in calls_of(measured, **ROOMY):
        curve = miss_ratio(calls, curves.curve_sizes(calls, 8))
        assert not curve["fits"].iloc[0]
        assert curve["fits"].sum() >= 5
        assert curve["evicted"].iloc[-1] == 0
        best = optimal_hits(calls, curve["num_blocks"].tolist()[-1:])["hit_ratio"]
        assert curve["hit_ratio"].max() == curve["hit_ratio"].iloc[-1] == best.iloc[0]


def test_the_optimum_by_hand() -> None:
    """Three prompts in turn where one stays beside the one that runs: LRU never hits."""
    cache = curves.LoggedCache(3, 1)
    for number, token in enumerate([1, 2, 3] * 3):
        cache.allocate(number, [token, 9])
        cache.free(number, 1)
    calls = cache.calls
    lru, best = miss_ratio(calls, [3]).iloc[0], optimal_hits(calls, [3]).iloc[0]
    assert (lru["hit_tokens"], best["hit_tokens"]) == (0, 3)


def test_the_recorded_size_gives_the_recorded_counts(measured) -> None:
    """At the size the run had the calls are the run's: its hits, evictions and thrashes."""
    steps = measured.trace.steps
    for name, calls in zip(("llm", "prm"), calls_of(measured), strict=True):
        size = int(steps.loc[steps["engine"] == name, "blocks_total"].iloc[0])
        own, found = steps[steps["engine"] == name], run_calls(calls, size)
        for count in ("hit_tokens", "query_tokens", "evicted", "thrashed", "allocated"):
            assert getattr(found, count) == own[count].sum(), f"{name} {count}"


def test_sizes_that_are_none_are_refused(measured) -> None:
    """No size, or a cache without a block: a named error."""
    calls, _ = calls_of(measured)
    for sizes in ([], [0, 5], [-3]):
        with pytest.raises(ConfigError, match="give one or more, each >= 1"):
            miss_ratio(calls, sizes)
    with pytest.raises(ConfigError, match="log_calls needs a cache for each model"):
        calls_of(measured, shared=SharedMemory("4MiB"))
