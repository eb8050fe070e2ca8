"""Models that come to an arena while others use it, and policies that would starve one."""

from collections.abc import Sequence

import pytest

from tests.kvcache.test_arena import LLM, SIZE, THIRD, arena_of, tokens_of, visit
from workbench.errors import ConfigError, OutOfMemory
from workbench.kvcache.pages import BlockShape
from workbench.kvcache.policies import FirstCome, Grant, MarginalValue, ModelState, StaticSplit


def test_a_model_can_be_added_if_a_page_fits_its_block_and_its_floor_is_free() -> None:
    arena = arena_of(kv_share=0.7)
    arena.add(BlockShape("third", 2, 100, floor_blocks=5))
    assert arena.target == {"llm": 11, "prm": 6, "third": 3}
    assert arena.cache("third", SIZE).num_blocks == 6
    with pytest.raises(ConfigError, match="'wide' has blocks of 2 layers of 300 bytes"):
        arena.add(BlockShape("wide", 2, 300))
    with pytest.raises(ConfigError, match="a name of its own"):
        arena.add(LLM)
    with pytest.raises(OutOfMemory, match="needs 21"):
        arena.add(BlockShape("greedy", 2, 256, floor_blocks=14))
    with pytest.raises(ConfigError, match="'third' has a cache already"):
        arena.cache("third", SIZE, namespace=b"another model")
    with pytest.raises(ConfigError, match="no model 'nobody'"):
        arena.cache("nobody")
    arena.check()


def test_a_model_can_be_added_to_a_warm_arena_unless_running_requests_hold_its_floor() -> None:
    """What lies idle makes room, the least recently used first; what is in use stays."""
    arena = arena_of(policy=FirstCome())
    llm, prm = arena.cache("llm", SIZE), arena.cache("prm", SIZE)
    for which in range(5):
        visit(llm, which, 8)
    for which in range(10):
        visit(prm, 100 + which, 1)
    assert arena.num_free == 0
    arena.add(THIRD)
    assert arena.actual["third"] >= THIRD.floor_blocks
    assert (llm.match(tokens_of(8, 0)), llm.match(tokens_of(8, 4))) == (0, 28), "the oldest went"
    assert prm.match([*tokens_of(1, 109), 0]) == SIZE
    arena.check()
    assert prm.allocate(1, tokens_of(9, 200)) is not None
    with pytest.raises(OutOfMemory, match="when fewer requests run"):
        arena.add(BlockShape("fourth", 2, 256, floor_blocks=8))
    arena.check()


def test_a_model_more_drops_no_split_asked_for() -> None:
    """The floor of the new one comes off the split that was promised, not off the one before."""
    arena = arena_of(kv_share=0.5)
    assert arena.resplit(0.8).outcome == "reached"
    arena.add(THIRD)
    assert arena.target == {"llm": 14, "prm": 4, "third": 2}
    arena.check()


def test_a_model_more_or_a_resize_keeps_what_a_policy_has_learned() -> None:
    """Marginal value's pages are the split of now, whatever it was given at the start."""
    arena = arena_of(policy=MarginalValue(), kv_share=0.5)
    arena.policy._move(1, 0, 5)
    arena.cache("llm", SIZE).allocate(0, [1])
    arena.cache("llm", SIZE).apply()
    assert arena.target == {"llm": 15, "prm": 5}
    arena.add(THIRD)
    assert arena.target == {"llm": 13, "prm": 5, "third": 2}
    arena.cache("third", SIZE).resize(3)
    arena.cache("llm", SIZE).apply()
    assert arena.target == {"llm": 12, "prm": 5, "third": 3}
    arena.check()


def test_a_policy_that_would_starve_a_model_is_refused() -> None:
    class Greedy(StaticSplit):
        def grants(self, models: Sequence[ModelState], num_pages: int) -> list[Grant]:
            return [Grant(0, 0, 0), Grant(num_pages, num_pages, num_pages)]

    with pytest.raises(ConfigError, match="Greedy grants 'llm' Grant"):
        arena_of(policy=Greedy())
