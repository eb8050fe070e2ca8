"""How many problems are sampled at a time follows what the caches lose."""

from collections import deque
from types import SimpleNamespace

from workbench.kvcache.pool import CacheStats
from workbench.search.beam import BeamSearch
from workbench.search.groups import Groups
from workbench.search.pace import Pace
from workbench.search.prm import PRM
from workbench.search.problems import load_problems
from workbench.search.runner import run_search


def engine():
    """All that a pace reads of an engine."""
    return SimpleNamespace(cache=SimpleNamespace(stats=CacheStats(), block_size=16))


def turn(pace, *engines, taken=100, lost=0):
    """A round in which each engine takes so many blocks and finds so many lost; the places then."""
    for each in engines:
        each.cache.stats.allocated += taken
        each.cache.stats.thrashed += lost
    pace.open_round()
    return pace.places


def test_losses_make_it_slow_down_and_their_end_makes_it_hasten():
    """A quarter fewer at a time down to one problem, one more at a time up to all."""
    llm, prm = engine(), engine()
    pace = Pace(12, (llm, prm))
    assert [turn(pace, llm, prm, lost=50) for _ in range(9)] == [9, 6, 4, 3, 2, 1, 1, 1, 1]
    assert [turn(pace, llm, prm) for _ in range(12)] == [*range(2, 13), 12]
    assert turn(pace, llm, prm, lost=10) == 12, "a few losses are no reason to change anything"


def test_it_waits_until_both_engines_had_a_turn():
    """The LLM's part of a round says nothing of the PRM's cache."""
    llm, prm = engine(), engine()
    pace = Pace(4, (llm, prm))
    assert turn(pace, llm, lost=90) == 4
    assert turn(pace, prm) == 3


def test_preempted_tokens_count_as_lost():
    """What a preempted request has to compute again is lost like what was evicted."""
    llm = engine()
    pace = Pace(4, (llm,))
    llm.cache.stats.allocated += 10
    llm.cache.stats.readmit_query_tokens += 64
    pace.open_round()
    assert pace.places == 3


def test_what_a_preempted_request_lost_is_counted_once():
    """Its evicted blocks are part of what it computes again, not something more."""
    llm = engine()
    pace = Pace(4, (llm,))
    stats = llm.cache.stats
    stats.allocated += 100
    stats.readmit_query_tokens += 160
    stats.thrashed += 10
    stats.thrashed_readmit += 10
    pace.open_round()
    assert pace.places == 4, "10 of 100 blocks, not 20"


def test_the_latest_problems_wait():
    """Those that were taken in first are sampled; the others stay in flight."""
    pace = Pace(3, ())
    groups = Groups(3, swap=False, whole_batches=False, pace=pace)
    queue = deque(SimpleNamespace(admitted_s=0.0, outcome=None, name=i) for i in range(5))
    groups.admit(queue, 0.0)
    pace.places = 2
    assert [search.name for search in groups.sampling] == [0, 1]
    assert len(groups) == 3


def test_two_groups_share_the_places():
    """Three places are two and one; a single place is one each, or a group would wait for ever."""
    for places, expected in ((4, [2, 2]), (3, [2, 1]), (1, [1, 1])):
        pace = Pace(8, ())
        groups = Groups(8, swap=True, whole_batches=False, pace=pace)
        queue = deque(SimpleNamespace(admitted_s=0.0, outcome=None) for _ in range(8))
        for _ in range(2):
            groups.admit(queue, 0.0)
            groups.swap()
        pace.places = places
        found = []
        for _ in range(2):
            found.append(len(groups.sampling))
            groups.swap()
        assert found == expected


def test_an_engine_without_a_cache_is_never_too_small(fake_engine):
    """Adaptive batching over engines that tell nothing is continuous batching."""
    found = []
    for batching in ("continuous", "adaptive"):
        result = run_search(
            load_problems("tiny", 3),
            llm=fake_engine(),
            prm=PRM(fake_engine()),
            strategy=BeamSearch(n=4, beam_width=2, max_depth=3),
            problem_batching=batching,
        )
        found.append(result.tree[["node_id", "score"]].to_dict("records"))
    assert found[0] == found[1]
