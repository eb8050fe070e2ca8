"""Forks share what is full and copy what is not; copies asked for one after the other add up."""

import pytest

from workbench.errors import ConfigError
from workbench.kvcache.manager import KVCacheManager
from workbench.kvcache.resizing import Copies

PROMPT = list(range(100, 110))  # two blocks of four, and two tokens


def forked(num_blocks: int = 8, num_tokens: int | None = None) -> KVCacheManager:
    cache = KVCacheManager(num_blocks, 4)
    assert cache.allocate(1, PROMPT) is not None
    assert cache.fork(1, 2, num_tokens) is not None
    cache.check()
    return cache


def test_a_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    cache = forked()
    assert cache.block_table(1) == [0, 1, 2]
    assert cache.block_table(2) == [0, 1, 3]
    assert cache.take_moves() == [(2, 3)]
    assert cache.take_moves() == [], "each is asked for once"
    assert (cache.num_active, cache.stats.copied, cache.stats.query_tokens) == (4, 1, 10)


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    cache = forked(num_tokens=8)
    assert cache.block_table(2) == [0, 1]
    assert cache.take_moves() == []


def test_parent_and_child_go_on_apart_and_siblings_recompute_nothing() -> None:
    """Four beams of one parent: each extends its own copy, only new tokens are computed."""
    cache = forked(num_blocks=12)
    for child in (3, 4, 5):
        assert cache.fork(1, child) is not None
    for child in (2, 3, 4, 5):
        assert cache.extend(child, [*PROMPT, child, child, child]) is not None
    tables = [cache.block_table(child) for child in (2, 3, 4, 5)]
    assert len({table[2] for table in tables}) == 4
    assert cache.match([*PROMPT, 3, 3, 9]) == 12, "a filled copy can be hit"
    cache.free(1)
    cache.check()
    assert cache.num_active == 2 + 4 * 2


def test_a_fork_without_a_block_for_the_copy_changes_nothing() -> None:
    cache = KVCacheManager(3, 4)
    cache.allocate(1, PROMPT)
    assert cache.fork(1, 2) is None
    assert cache.fork(1, 2, 8) is not None
    cache.check()


def test_freeing_a_fork_that_was_never_computed_withdraws_only_what_it_filled() -> None:
    cache = forked()
    cache.extend(2, [*PROMPT, 1, 2, 3])
    cache.free(2, 10)
    cache.check()
    assert cache.match([*PROMPT, 1, 2, 3]) == 8
    assert cache.block_table(1) == [0, 1, 2]


@pytest.mark.parametrize(("parent", "child", "tokens"), [(1, 2, 3), (1, 3, 0), (1, 3, 11)])
def test_a_fork_of_too_much_or_onto_somebody_is_refused(parent, child, tokens) -> None:
    with pytest.raises(ConfigError, match="allowed: 1 to 10 tokens"):
        forked().fork(parent, child, tokens)


def test_copies_of_copies_come_from_where_the_content_is() -> None:
    """All sources are read before anything is written, so a chain starts at its first block."""
    copies = Copies()
    copies.add(1, 2)
    copies.add(2, 3)
    copies.move(3, 4)
    assert sorted(copies.take()) == [(1, 2), (1, 4)]


def test_a_block_moved_there_and_back_is_copied_nowhere() -> None:
    copies = Copies()
    copies.move(1, 2)
    copies.move(2, 1)
    assert copies.take() == []
    copies.add(5, 1)
    copies.add(6, 1)
    assert copies.take() == [(6, 1)], "a block has one content, the one asked for last"
