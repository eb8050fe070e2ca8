"""Miss-ratio curves against the manager itself: equal at every size, whatever was called."""

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import ConfigError
from workbench.kvcache.manager import KVCacheManager
from workbench.replay.calls import LoggedCache, logged_calls, run_calls
from workbench.replay.cost import MeteredCost
from workbench.replay.miss_ratio import miss_ratio
from workbench.replay.optimum import optimal_hits
from workbench.replay.simulator import Costs, events, replay

FREE = Costs(MeteredCost(), MeteredCost())
SIZES = (*range(1, 33), 40, 64)


class Order:
    """Random calls on one cache; those that succeed are kept with their tokens."""

    def __init__(self, data, size: int) -> None:
        self.data, self.size = data, size
        self.cache = LoggedCache(data.draw(st.integers(4, 40)), size)
        self.calls: list[tuple] = []
        self.tokens: dict[int, list[int]] = {}
        self.room: dict[int, int] = {}
        self.old: list[list[int]] = []
        self.next_id = 0

    def play(self) -> None:
        draw = self.data.draw
        for _ in range(draw(st.integers(1, 40))):
            kind = draw(st.sampled_from(["allocate", "allocate", "extend", "extend", "free"]))
            if kind == "allocate" or not self.tokens:
                self.allocate()
            elif kind == "extend":
                self.extend(draw(st.sampled_from(sorted(self.tokens))))
            else:
                self.free(draw(st.sampled_from(sorted(self.tokens))))

    def allocate(self) -> None:
        draw = self.data.draw
        start = draw(st.sampled_from(self.old)) if self.old else []
        start = start[: draw(st.integers(0, len(start)))]
        tokens = start + draw(st.lists(st.integers(0, 1), min_size=0 if start else 1, max_size=9))
        room = draw(st.integers(1, len(tokens)))
        options = {
            "max_hit": draw(st.none() | st.integers(0, len(tokens))),
            "readmission": draw(st.booleans()),
        }
        self.next_id += 1
        if self.cache.allocate(self.next_id, tokens, room, **options) is not None:
            self.calls.append(("allocate", (self.next_id, tokens, room), options))
            self.tokens[self.next_id], self.room[self.next_id] = tokens, room
            self.old.append(tokens)

    def extend(self, seq_id: int) -> None:
        draw, tokens, room = self.data.draw, self.tokens[seq_id], self.room[seq_id]
        grown = tokens + draw(st.lists(st.integers(0, 1), max_size=5))
        grown = grown[: draw(st.integers(room, len(grown)))]
        if self.cache.extend(seq_id, grown) is not None:
            self.calls.append(("extend", (seq_id, grown), {}))
            self.room[seq_id] = len(grown)
            if len(grown) > len(tokens):
                self.tokens[seq_id] = grown
                self.old.append(grown)

    def free(self, seq_id: int) -> None:
        computed = self.data.draw(st.none() | st.integers(0, self.room[seq_id]))
        self.cache.free(seq_id, computed)
        self.calls.append(("free", (seq_id, computed), {}))
        del self.tokens[seq_id], self.room[seq_id]

    def stats_at(self, num_blocks: int) -> dict[str, int] | None:
        """By the manager, from tokens; None when a call finds no room."""
        cache = KVCacheManager(num_blocks, self.size)
        for name, arguments, options in self.calls:
            if getattr(cache, name)(*arguments, **options) is None and name != "free":
                return None
        return asdict(cache.stats)


def row_of(curve, place: int) -> dict[str, int] | None:
    row = curve.iloc[place].to_dict()
    kept = ("num_blocks", "fits", "peak_active", "hit_ratio")
    return {k: v for k, v in row.items() if k not in kept} if row["fits"] else None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_size_equals_the_manager(data) -> None:
    """Any order of calls, duplicates, withdrawn and shared blocks too: all counts are equal."""
    order = Order(data, data.draw(st.sampled_from([1, 2, 3])))
    order.play()
    curve = miss_ratio(order.cache.calls, SIZES)
    for place, size in enumerate(SIZES):
        assert row_of(curve, place) == order.stats_at(size), f"{size} blocks"


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=4)  # blocks of a prompt


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(PROMPTS, st.integers(0, 3)), min_size=1, max_size=25))
def test_the_optimum_is_never_below_lru(order) -> None:
    """Prompts that share beginnings, up to four at once: at every size it hits as much or more."""
    cache = LoggedCache(100, 2)
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
    replayed = replay(measured.answers, FREE, log_calls=True, **changes)
    return [logged_calls(engine.cache) for engine in (replayed.llm, replayed.prm)]


def test_a_real_search_equals_brute_force(measured) -> None:
    """Both models' calls of the recorded run, at ten sizes from their peak up: exactly equal."""
    for calls in calls_of(measured):
        peak = int(miss_ratio(calls, [calls.num_contents + 1000])["peak_active"].iloc[0])
        sizes = [peak - 1, *np.linspace(peak, calls.num_contents, 9).astype(int).tolist()]
        curve = miss_ratio(calls, sizes)
        for place, size in enumerate(sizes):
            stats = run_calls(calls, size)
            assert row_of(curve, place) == (None if stats is None else asdict(stats))
        assert not curve["fits"].iloc[0]
        assert curve["fits"].iloc[1:].all()
        assert curve["hit_ratio"].iloc[-1] > curve["hit_ratio"].iloc[1]


def test_the_optimum_by_hand() -> None:
    """Three prompts in turn where one stays beside the one that runs: LRU never hits."""
    cache = LoggedCache(3, 1)
    for number, token in enumerate([1, 2, 3] * 3):
        cache.allocate(number, [token, 9])
        cache.free(number, 1)
    calls = cache.calls
    lru, best = miss_ratio(calls, [3]).iloc[0], optimal_hits(calls, [3]).iloc[0]
    assert (lru["hit_tokens"], best["hit_tokens"]) == (0, 3)


def test_the_recorded_size_gives_the_recorded_counts(measured) -> None:
    """At the size the run had, the curve's point is the run: its hits, evictions and thrashes."""
    steps = measured.trace.steps
    for name, calls in zip(("llm", "prm"), calls_of(measured), strict=True):
        size = int(steps.loc[steps["engine"] == name, "blocks_total"].iloc[0])
        found = miss_ratio(calls, [size]).iloc[0]
        own = steps[steps["engine"] == name]
        for count in ("hit_tokens", "query_tokens", "evicted", "thrashed", "allocated"):
            assert found[count] == own[count].sum(), f"{name} {count}"


def test_logging_changes_nothing(measured) -> None:
    """A cache that keeps its calls answers as one that does not."""
    steps = replay(measured.answers, FREE, log_calls=True).trace.steps
    assert events(steps).equals(events(measured.trace.steps))


def test_sizes_that_are_none_are_refused(measured) -> None:
    """No size, or a cache without a block: a named error."""
    calls, _ = calls_of(measured)
    for sizes in ([], [0, 5], [-3]):
        with pytest.raises(ConfigError, match="give one or more, each >= 1"):
            miss_ratio(calls, sizes)
    with pytest.raises(ConfigError, match="log_calls=True"):
        logged_calls(replay(measured.answers, FREE).llm.cache)
