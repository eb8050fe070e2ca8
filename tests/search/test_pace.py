"""How many problems are sampled at a time follows from what the caches can keep."""

from collections import deque
from types import SimpleNamespace

import pytest

from tests.search.stepping_engine import SteppingEngine
from workbench.kvcache.arena import BlockShape, KVArena
from workbench.kvcache.policies import FirstCome, MarginalValue, PhaseAware, StaticSplit
from workbench.search.beam import BeamSearch
from workbench.search.groups import Groups
from workbench.search.pace import Pace
from workbench.search.prm import PRM
from workbench.search.problems import load_problems
from workbench.search.requests import Beam, Generate, Score, Step
from workbench.search.runner import run_search
from workbench.search.tree import Tree

PROMPT, SIZE = 30, 4


def engine(room):
    """All that a pace reads of an engine."""
    return SimpleNamespace(cache=SimpleNamespace(room=room, block_size=SIZE))


def search(depth=0, children=4):
    """A search about to sample below `depth` levels of nodes, which have two siblings each.

    The LLM sees a prompt of 30 tokens and 10 a node; the PRM 40 tokens for the first step, then 10.
    """
    tree, paths = Tree(), [()]
    for _ in range(depth):
        paths = [(*path, k) for path in paths[:1] for k in range(2)]
        beams = [Beam(path, (0,) * 10 * (len(path) - 1), steps=steps(path[:-1])) for path in paths]
        tree.add(beams, [Step((0,) * 10, "s", "stop")] * len(beams))
    asked = [Beam((*path, k), steps=steps(path)) for path in paths for k in range(children)]
    return SimpleNamespace(
        prompt=[0] * PROMPT,
        tree=tree,
        request=Generate(tuple(asked)),
        scores=Scores(),
        outcome=None,
    )


def steps(path):
    return tuple(map(str, path))


class Scores:
    """Of a ProblemScores what a pace reads."""

    def spans(self, steps):
        ends = [0, *range(40, 40 + 10 * len(steps), 10)]
        for depth in range(1, len(steps) + 1):
            yield SimpleNamespace(steps=steps[:depth]), (ends[depth - 1], ends[depth])


def test_as_many_are_sampled_as_the_smaller_cache_keeps():
    """Two levels of two siblings: 30 + 10 + 10 + 10 tokens of the LLM, 40 + 10 + 10 of the PRM."""
    group = [search(2) for _ in range(6)]
    llm, prm = 40 // 4 + 2 * (50 // 4 - 40 // 4), 40 // 4 + 2 * (50 // 4 - 40 // 4)
    for llm_fits, prm_fits, expected in ((6, 6, 6), (3, 6, 3), (6, 2, 2), (0, 0, 1)):
        rooms = [-(-4 * fits * need // 3) for fits, need in ((llm_fits, llm), (prm_fits, prm))]
        assert Pace(*map(engine, rooms)).chosen(group) == group[:expected]


def test_what_is_shared_is_counted_once():
    """Children need no more than their parent; two parents share what is before them."""
    for depth, blocks in ((0, 7), (1, 2 * (40 // 4 - 30 // 4) + 7), (2, 14)):
        few, many = search(depth, children=1), search(depth, children=8)
        for room, expected in ((-(-4 * 2 * blocks // 3), 2), (4 * 2 * blocks // 3 - 2, 1)):
            pace = Pace(engine(room), engine(10_000))
            assert len(pace.chosen([few, few])) == len(pace.chosen([many, many])) == expected


def test_all_wait_for_one_that_waits_for_scores():
    """They are sampled together in the next round, in a batch of full size."""
    group = [search(1) for _ in range(3)]
    pace = Pace(engine(1000), engine(1000))
    asking = group[1].request
    group[1].request = Score(asking.beams)
    assert pace.chosen(group) == []
    group[1].request = asking
    assert pace.chosen(group) == group


def test_two_groups_share_the_room():
    """What keeps four problems keeps two of each group; one each at the least."""
    for fits, expected in ((4, [2, 2]), (1, [1, 1])):
        pace = Pace(engine(10_000), engine(-(-4 * fits * 14 // 3)))
        groups = Groups(8, swap=True, whole_batches=False, pace=pace)
        queue = deque(search(2) for _ in range(8))
        for _ in range(2):
            groups.admit(queue, 0.0)
            groups.swap()
        found = []
        for _ in range(2):
            found.append(len(groups.sampling))
            groups.swap()
        assert found == expected
        assert len(groups) == 8, "the others stay in flight"


@pytest.mark.parametrize("policy", [StaticSplit(), PhaseAware(), MarginalValue()])
def test_in_an_arena_the_room_is_the_part_of_the_split(policy):
    """A policy that lends does not promise what it lends."""
    arena = KVArena(1 << 20, [BlockShape(n, 2, 512, 4) for n in ("llm", "prm")], policy, 0.25)
    llm, prm = (arena.cache(name) for name in ("llm", "prm"))
    assert llm.room / (llm.room + prm.room) == pytest.approx(0.25, abs=0.01)
    assert llm.room + prm.room == arena.num_pages * arena.pools[0].per_page
    arena.resplit(0.5)
    assert llm.room == prm.room


def test_who_comes_first_may_count_on_a_fair_part():
    """First come keeps no split, yet both models cannot count on everything."""
    arena = KVArena(1 << 20, [BlockShape(n, 2, 512, 4) for n in ("llm", "prm")], FirstCome())
    llm, prm = (arena.cache(name) for name in ("llm", "prm"))
    assert llm.room == prm.room == arena.num_pages * arena.pools[0].per_page // 2


def test_a_tight_cache_loses_less_when_some_wait():
    """The same tree, and fewer tokens computed again."""
    found, again = [], []
    for batching in ("continuous", "adaptive"):
        llm, prm = SteppingEngine(num_blocks=160), SteppingEngine(num_blocks=160)
        result = run_search(
            load_problems("tiny", 8),
            llm=llm,
            prm=PRM(prm),
            strategy=BeamSearch(n=4, beam_width=2, max_depth=6),
            problem_batching=batching,
        )
        found.append(result.tree[["node_id", "score"]].to_dict("records"))
        again.append(sum(engine.cache.stats.thrashed for engine in (llm, prm)))
    assert found[0] == found[1]
    assert again[1] < again[0] / 2


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
