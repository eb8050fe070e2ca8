"""The switches of a search: the same tokens with each and all, and what each does beside."""

from itertools import groupby, pairwise

import pytest

from tests.search.conftest import tree, wander
from workbench.engine.engine import Engine
from workbench.engine.memory import block_shape
from workbench.errors import ConfigError
from workbench.kvcache.arena import KVArena
from workbench.kvcache.policies import FirstCome, MarginalValue, PhaseAware, StaticSplit
from workbench.search.prm import PRM
from workbench.search.problems import load_problems
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch
from workbench.search.variants import DVTS, Lookahead

LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 384}
ALL = {"problem_batching": "adaptive", "forget_pruned": True, "request_order": "prefix"}
CASES = [(200, {"request_order": "slot"}), (200, ALL)]
CASES += [(26, {name: value}) for name, value in ALL.items()] + [(26, ALL)]


# -- by the embedded pair --


@pytest.fixture(scope="module")
def plain():
    """Everything off, memory ample."""
    return search(*engines(200))


def engines(num_blocks):
    """The pair with so many blocks each."""
    return [Engine(f"tiny-{n}", num_blocks=num_blocks, **LIMITS) for n in ("solver", "prm")]


def search(llm, prm, problems=2, strategy=BeamSearch, **switches):
    """A few problems, four beams, a few steps."""
    strategy = strategy(n=4, beam_width=2, max_depth=5)
    given = {"llm": llm, "prm": PRM(prm), "strategy": strategy, "min_problem_batch": 2}
    return run_search(load_problems("tiny", problems, levels=[3]), **given | switches)


@pytest.mark.parametrize(("num_blocks", "switches"), CASES)
def test_a_switch_changes_no_token_score_or_answer(plain, num_blocks, switches):
    """With ample memory, and with little more than one request needs."""
    llm, prm = engines(num_blocks)
    found = search(llm, prm, **switches)
    assert tree(found) == tree(plain)
    for engine in (llm, prm):
        assert not engine.has_work
        engine.cache.check()
        assert engine.cache.num_active == 0


def test_nor_does_it_over_one_memory(plain):
    """All switches in a shared arena that evicts."""
    names = ("tiny-solver", "tiny-prm")
    shapes = [block_shape(name, max_model_len=LIMITS["max_model_len"]) for name in names]
    arena = KVArena("1152KiB", shapes)
    reuse = {"reuse_partial_blocks": True}
    pair = [Engine(name, arena=arena, **LIMITS, **reuse) for name in names]
    found = search(*pair, **ALL)
    assert tree(found) == tree(plain)
    assert found.trace.steps["evicted"].sum() > 0, "the memory is too large"
    assert sum(engine.cache.stats.copied for engine in pair) > 0, "nothing was reused in part"
    assert all(engine.cache.num_active == 0 for engine in pair)
    arena.check()


def test_a_tight_cache_loses_less_when_some_problems_wait():
    """The same tree, and fewer blocks computed again."""
    found, again = [], []
    for batching in ("continuous", "adaptive"):
        pair = engines(40)
        switches = {"problem_batching": batching, "min_problem_batch": 6}
        found.append(tree(search(*pair, problems=6, **switches)))
        again.append(sum(engine.cache.stats.thrashed for engine in pair))
    assert found[0] == found[1]
    assert again[1] < again[0] / 2


@pytest.mark.parametrize("strategy", [BeamSearch, DVTS])
def test_dropped_beams_leave_the_caches_and_nothing_is_asked_for_again(strategy):
    """With ample memory, what was forgotten is never missed, and little is left at the end."""
    left = {}
    for forgets in (False, True):
        pair = engines(900)
        steps = search(*pair, strategy=strategy, forget_pruned=forgets).trace.steps
        assert steps["recomputed_tokens_evicted"].sum() == 0
        assert steps["thrashed"].sum() == 0
        left[forgets] = [engine.cache.num_cached for engine in pair]
    assert all(2 * after < before for before, after in zip(left[False], left[True]))
    with pytest.raises(ConfigError, match="a lookahead goes back to what it sampled before"):
        search(*pair, strategy=Lookahead, forget_pruned=True)


# -- who is admitted --


def test_in_an_arena_the_room_is_the_part_of_the_split():
    """A policy that lends does not promise what it lends; first come counts on a fair part."""
    shapes = [block_shape("tiny-solver", name=name, max_model_len=32) for name in ("llm", "prm")]
    for policy in (StaticSplit(), PhaseAware(), MarginalValue(), FirstCome()):
        share = 0.25 if policy.keeps_split else None
        arena = KVArena("4MiB", shapes, policy, share)
        rooms = [arena.cache(shape.name, 16).room for shape in shapes]
        assert rooms[0] / sum(rooms) == pytest.approx(share or 0.5, abs=0.05)


# -- in which order --


@pytest.fixture
def ordered(fake_engine):
    """A search over fresh fake engines; the result, and what each was asked in its order."""

    def run(limit=3, says=lambda text, seed: f"step {seed % 97}\n\n", **settings):
        llm = fake_engine(says)
        prm = fake_engine()
        problems = load_problems("tiny", limit=limit)
        given = {"strategy": BeamSearch(n=6, beam_width=3, max_depth=4), **settings}
        result = run_search(problems, llm=llm, prm=PRM(prm), **given)
        return result, *([tag for *_, tag in engine.asked] for engine in (llm, prm))

    return run


def rounds_of(tags):
    """The problems' turns, depth by depth: all problems are equally deep in these searches."""
    by_depth = groupby(tags, lambda tag: tag.node_id.count("/"))
    return [[k for k, _ in groupby(tag.problem_id for tag in group)] for _, group in by_depth]


def parents(tags, depth):
    """The parents of one problem's nodes at a depth, in order of their requests, runs as one."""
    nodes = [t.node_id for t in tags if t.problem_id == tags[0].problem_id]
    above = [n.rpartition("/")[0] for n in nodes if n.count("/") == depth - 1]
    return [parent for parent, _ in groupby(above)]


def test_orders_differ_and_searches_do_not(ordered):
    """Three orders of the same requests; by path, not by slot, siblings come side by side."""
    found = {order: ordered(request_order=order) for order in ("slot", "path", "prefix")}
    trees = [tree(result) for result, *_ in found.values()]
    assert trees[0] == trees[1] == trees[2]
    asked = [[(t.problem_id, t.node_id) for t in llm] for _, llm, _ in found.values()]
    assert sorted(asked[0]) == sorted(asked[1]) == sorted(asked[2])
    assert len({tuple(each) for each in asked}) == 3
    assert [len(parents(found[order][1], 2)) for order in ("slot", "path")] == [6, 2]


def test_prefix_order_serves_those_first_who_were_served_last(ordered):
    """From round to round the problems' order turns round, on each engine; path order is cyclic."""
    for side in (1, 2):
        turns = rounds_of(ordered(request_order="prefix")[side])
        assert len(turns) == 4
        assert all(later == earlier[::-1] for earlier, later in pairwise(turns))
        cyclic = rounds_of(ordered(request_order="path")[side])
        assert all(later == earlier for earlier, later in pairwise(cyclic))


def test_static_batches_wait_for_their_last_problem(ordered):
    """Nobody joins a batch; the tree is that of continuous batching."""
    alone = BeamSearch(n=1, beam_width=1, max_depth=12)  # problems end at different rounds
    seen, settings = [], {"limit": 7, "min_problem_batch": 3, "says": wander, "strategy": alone}
    result, *_ = ordered(problem_batching="static", on_round=seen.append, **settings)
    assert tree(result) == tree(ordered(**settings)[0])
    assert max(progress.in_flight for progress in seen) == 3
    assert {progress.in_flight for progress in seen[:-1]} & {1, 2}, "none waits for another"
    for earlier, later in pairwise(seen):
        if later.answered + later.in_flight > earlier.answered + earlier.in_flight:
            assert later.answered % 3 == 0  # the whole batch is answered: the next one comes
