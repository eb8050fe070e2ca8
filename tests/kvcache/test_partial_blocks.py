"""Partly filled blocks that stay hittable: found, copied, taken over, given up; one law each."""

import pytest

from workbench.config import EngineConfig
from workbench.errors import ConfigError
from workbench.kvcache.arena import BlockShape, KVArena
from workbench.kvcache.manager import Allocation, KVCacheManager
from workbench.kvcache.pool import Copies
from workbench.kvcache.prefix import PartialIndex, PrefixIndex

PROMPT = list(range(100, 110))  # two blocks of four, and two tokens


def cache_of(num_blocks: int = 16, reuse: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, 4, reuse_partial_blocks=reuse)


def leave(cache: KVCacheManager, seq_id: int, tokens: list[int], **options) -> Allocation:
    """Admit, compute everything, go."""
    admitted = cache.allocate(seq_id, tokens, **options)
    assert admitted is not None
    cache.free(seq_id, token_ids=tokens)
    cache.take_moves()
    cache.check()
    return admitted


def counts(cache: KVCacheManager) -> tuple[int, int, int]:
    return cache.num_active, cache.num_cached, cache.num_free


def test_each_sibling_goes_on_with_a_copy_of_its_parents_partial_block() -> None:
    """Four beams of one parent compute new tokens only; the partial block stays for a fifth."""
    cache = cache_of()
    leave(cache, 1, PROMPT)
    assert counts(cache) == (0, 3, 13), "all three can be hit"
    for child in (2, 3, 4, 5):
        admitted = cache.allocate(child, [*PROMPT, child])
        assert admitted is not None
        assert admitted.num_cached_tokens == 10
    parts = [cache.block_table(child)[2] for child in (2, 3, 4, 5)]
    assert sorted(cache.take_moves()) == [(2, own) for own in sorted(parts)]
    assert counts(cache) == (6, 1, 9)
    assert cache.match([*PROMPT, 6]) == 10
    assert (cache.stats.copied, cache.stats.hit_tokens, cache.stats.query_tokens) == (4, 40, 54)
    cache.check()


@pytest.mark.parametrize(
    ("tokens", "max_hit", "found"),
    [
        ([*PROMPT, 7], None, 10),
        (PROMPT, None, 9),  # the last token's logits are wanted
        ([*PROMPT[:9], 7, 7], None, 9),  # the beginning of a partial block
        ([*PROMPT[:8], 7, 7], None, 8),
        ([*PROMPT, 7], 9, 9),
        ([*PROMPT, 7], 8, 8),
        ([*PROMPT, 7], 5, 4),  # the first block alone: the second is full
        ([7, *PROMPT[1:]], None, 0),
    ],
)
def test_a_hit_ends_within_a_block_and_before_the_first_wanted_logits(
    tokens: list[int], max_hit: int | None, found: int
) -> None:
    cache = cache_of()
    leave(cache, 1, PROMPT)
    assert cache.match(tokens, max_hit=max_hit) == found
    admitted = cache.allocate(2, tokens, max_hit=max_hit)
    assert admitted is not None
    assert admitted.num_cached_tokens == found
    cache.check()


def test_the_last_available_block_is_taken_over_instead_of_copied() -> None:
    """A hit needs no block more than a miss: what fits without the switch fits with it."""
    cache = cache_of(num_blocks=3)
    leave(cache, 1, PROMPT)
    admitted = cache.allocate(2, [*PROMPT, 7, 7])
    assert admitted is not None
    assert admitted.num_cached_tokens == 10
    assert cache.take_moves() == []
    assert counts(cache) == (3, 0, 0)
    assert cache.stats.copied == 0
    cache.check()


def test_a_partial_block_gives_way_to_full_blocks_up_to_four_times_as_old() -> None:
    """It is worth less than a full block, and soon after its last use more than an old one."""
    index = PrefixIndex()

    def leave(block: int, partial: bool = False) -> None:
        digest = index.partials.add(b"parent", (block,)) if partial else b"%d" % block
        index.holders[digest] = block
        index.add_evictable(digest, block)

    for block in range(3):
        leave(block, partial=block == 1)
    assert index.next_evicted == 1, "used once after the full block, but partial"
    index.touch(1)
    assert index.next_evicted == 0
    leave(3)
    assert index.next_evicted == 1, "the full block is four uses old, the partial one"
    assert index.evict(4) == [1, 0, 2, 3]
    assert index.next_evicted is None
    index.check()


def test_settings_that_cannot_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="reuse_partial_blocks=True"):
        KVCacheManager(4, 4, enable_prefix_caching=False, reuse_partial_blocks=True)
    with pytest.raises(ConfigError, match="reuse_partial_blocks is True"):
        EngineConfig(enable_prefix_caching=False, reuse_partial_blocks=True)
    shapes = [BlockShape("llm", 1, 64)]
    arena = KVArena(4096, shapes)
    arena.cache("llm", 4)
    with pytest.raises(ConfigError, match="has a cache already"):
        arena.cache("llm", 4, reuse_partial_blocks=True)


def test_the_index_answers_the_partial_block_of_the_longest_common_beginning() -> None:
    """Against a scan of all partials, for every query over three letters."""
    index, partials = PartialIndex(), [(0, 1), (0, 2, 2), (1,), (2, 0, 0), (2, 0, 1)]
    for partial in partials:
        index.add(b"parent", partial)
    index.check()
    for code in range(27):
        query = (code // 9, code // 3 % 3, code % 3)
        best = max(_common(partial, query) for partial in partials)
        found = index.longest(b"parent", query)
        assert (0 if found is None else found.num_tokens) == best
    assert index.longest(b"another", (0, 1)) is None


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), len(one))


def test_copies_of_copies_come_from_where_the_content_is() -> None:
    """All sources are read before anything is written, so a chain starts at its first block."""
    copies = Copies()
    copies.add(1, 2)
    copies.add(2, 3)
    copies.move(3, 4)
    assert sorted(copies.take()) == [(1, 2), (1, 4)]
    copies.move(1, 2)
    copies.move(2, 1)
    assert copies.take() == [], "there and back again"
    copies.add(5, 1)
    copies.add(6, 1)
    assert copies.take() == [(6, 1)], "a block has one content, the one asked for last"
