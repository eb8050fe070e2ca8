"""Who is served when: the order of a round's requests, and when problems are taken in."""

from itertools import groupby, pairwise

import pytest

from workbench.search.prm import PRM
from workbench.search.problems import load_problems
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch

STRATEGY = BeamSearch(n=6, beam_width=3, max_depth=4)


@pytest.fixture
def search(fake_engine):
    """A search over fresh fake engines; the result, and what each was asked in its order."""

    def run(limit=3, **settings):
        llm = fake_engine(lambda text, seed: f"step {seed % 97}\n\n")
        prm = fake_engine()
        problems = load_problems("tiny", limit=limit)
        result = run_search(problems, llm=llm, prm=PRM(prm), strategy=STRATEGY, **settings)
        return result, *([tag for *_, tag in engine.asked] for engine in (llm, prm))

    return run


def tree(result):
    columns = ["problem_id", "node_id", "token_ids", "score", "kept", "finished"]
    return result.tree[columns].sort_values(["problem_id", "node_id"]).to_dict("records")


def rounds_of(tags):
    """The problems' turns, depth by depth: all problems are equally deep in these searches."""
    by_depth = groupby(tags, lambda tag: tag.node_id.count("/"))
    return [[k for k, _ in groupby(tag.problem_id for tag in group)] for _, group in by_depth]


def parents(tags, depth):
    """The parents of one problem's nodes at a depth, in order of their requests, runs as one."""
    nodes = [t.node_id for t in tags if t.problem_id == tags[0].problem_id]
    above = [n.rpartition("/")[0] for n in nodes if n.count("/") == depth - 1]
    return [parent for parent, _ in groupby(above)]


def test_orders_differ_and_searches_do_not(search):
    """Three orders of the same requests, one tree."""
    found = {order: search(request_order=order) for order in ("slot", "path", "prefix")}
    trees = [tree(result) for result, *_ in found.values()]
    assert trees[0] == trees[1] == trees[2]
    asked = [[(t.problem_id, t.node_id) for t in llm] for _, llm, _ in found.values()]
    assert sorted(asked[0]) == sorted(asked[1]) == sorted(asked[2])
    assert len({tuple(each) for each in asked}) == 3


def test_slot_order_alternates_between_survivors_and_path_order_does_not(search):
    """Refilled from two survivors: one after the other again and again, or one and then the other.

    Siblings side by side find their parent's blocks together.
    """
    _, slots, _ = search(request_order="slot")
    _, paths, _ = search(request_order="path")
    assert len(parents(slots, 2)) == 6
    assert len(parents(paths, 2)) == 2


def test_prefix_order_serves_those_first_who_were_served_last(search):
    """From round to round the problems' order turns round, on each engine; path order is cyclic."""
    for side in (1, 2):
        turns = rounds_of(search(request_order="prefix")[side])
        assert len(turns) == 4
        assert all(later == earlier[::-1] for earlier, later in pairwise(turns))
        cyclic = rounds_of(search(request_order="path")[side])
        assert all(later == earlier for earlier, later in pairwise(cyclic))


def test_static_batches_wait_for_their_last_problem(search):
    """Nobody joins a batch; the tree is that of continuous batching."""
    seen = {}
    for kind in ("static", "continuous"):
        seen[kind] = []
        result, *_ = search(
            7, problem_batching=kind, min_problem_batch=3, on_round=seen[kind].append
        )
        seen[kind, "tree"] = tree(result)
    assert seen["static", "tree"] == seen["continuous", "tree"]
    assert max(progress.in_flight for progress in seen["static"]) == 3
    for earlier, later in pairwise(seen["static"]):
        if later.answered + later.in_flight > earlier.answered + earlier.in_flight:
            assert later.answered % 3 == 0  # the whole batch is answered: the next one comes
