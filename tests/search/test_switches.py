"""Every switch of a search alone and all together, by the embedded pair: the same tokens."""

import pytest

from workbench.engine.engine import Engine
from workbench.engine.shared import block_shape
from workbench.kvcache.arena import KVArena
from workbench.search.prm import PRM
from workbench.search.problems import load_problems
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch

LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 384}
HOLDING = {"problem_batching": "adaptive", "forget_pruned": True}
ALL = HOLDING | {"request_order": "prefix"}
CASES = [
    (200, {"request_order": "slot"}),
    (26, {"request_order": "prefix"}),
    (200, {"problem_batching": "static"}),
    (26, {"problem_batching": "adaptive"}),
    (26, {"forget_pruned": True}),
    (200, ALL),
    (26, ALL),
]


@pytest.fixture(scope="module")
def plain():
    """Everything off, memory ample."""
    return search(*engines(200))


def engines(num_blocks):
    """The pair with so many blocks each."""
    return [Engine(f"tiny-{n}", num_blocks=num_blocks, **LIMITS) for n in ("solver", "prm")]


def search(llm, prm, **switches):
    """Two problems, four beams, a few steps."""
    strategy = BeamSearch(n=4, beam_width=2, max_depth=5)
    given = {"llm": llm, "prm": PRM(prm), "strategy": strategy, "min_problem_batch": 2}
    return run_search(load_problems("tiny", 2, levels=[3]), **given, **switches)


def content(result):
    columns = ["problem_id", "node_id", "token_ids", "score", "kept", "finished", "text"]
    nodes = result.tree[columns].sort_values(["problem_id", "node_id"]).to_dict("records")
    return nodes, result.answers, result.candidates["score"].tolist()


@pytest.mark.parametrize(("num_blocks", "switches"), CASES)
def test_a_switch_changes_no_token_score_or_answer(plain, num_blocks, switches):
    """With ample memory, and with little more than one request needs."""
    llm, prm = engines(num_blocks)
    found = search(llm, prm, **switches)
    assert content(found) == content(plain)
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
    assert content(found) == content(plain)
    assert found.trace.steps["evicted"].sum() > 0, "the memory is too large"
    assert sum(engine.cache.stats.copied for engine in pair) > 0, "nothing was reused in part"
    assert all(engine.cache.num_active == 0 for engine in pair)
    arena.check()


def test_little_memory_is_little(plain):
    """The small caches above do evict and preempt: the sameness there is not for nothing."""
    steps = search(*engines(26)).trace.steps
    assert steps["evicted"].sum() > 0
    assert steps["preempted"].sum() > 0
