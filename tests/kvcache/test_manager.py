"""The laws of the KV cache manager, one example each."""

import subprocess
import sys

import pytest

from workbench.errors import ConfigError
from workbench.kvcache.manager import Allocation, KVCacheManager

PROMPT = list(range(100, 112))  # three blocks of four


def cache_of(num_blocks: int = 8, block_size: int = 4, **options) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, **options)


def run(cache: KVCacheManager, seq_id: int, tokens: list[int], **options) -> Allocation:
    """Admit, compute everything, free."""
    allocation = cache.allocate(seq_id, tokens, **options)
    assert allocation is not None
    cache.free(seq_id)
    cache.check()
    return allocation


def test_a_hit_is_the_longest_run_of_full_blocks_but_never_the_last_token() -> None:
    cache = cache_of()
    run(cache, 1, PROMPT)
    assert cache.match(PROMPT) == 8  # 12 tokens: the last one's logits are wanted
    assert cache.match([*PROMPT, 1]) == 12
    assert cache.match(PROMPT[:9]) == 8
    assert cache.match([*PROMPT[:4], 7, *PROMPT[5:]]) == 4
    assert cache.match([7, *PROMPT[1:]]) == 0
    assert cache.match(PROMPT[:1]) == cache.match([]) == 0


@pytest.mark.parametrize(("max_hit", "found"), [(None, 8), (0, 0), (3, 0), (4, 4), (7, 4), (99, 8)])
def test_max_hit_is_rounded_down_to_blocks(max_hit: int | None, found: int) -> None:
    """The first position whose logits are wanted is computed again."""
    cache = cache_of()
    run(cache, 1, PROMPT)
    assert cache.match(PROMPT, max_hit=max_hit) == found
    allocation = cache.allocate(2, PROMPT, max_hit=max_hit)
    assert allocation is not None
    assert allocation.num_cached_tokens == found


def test_the_salt_and_the_namespace_keep_prefixes_apart() -> None:
    cache = cache_of()
    run(cache, 1, PROMPT, salt=b"one")
    assert cache.match(PROMPT, salt=b"one") == 8
    assert cache.match(PROMPT) == cache.match(PROMPT, salt=b"two") == 0
    one, two = cache_of(namespace=b"ab"), cache_of(namespace=b"a")
    run(one, 1, PROMPT, salt=b"c")
    run(two, 1, PROMPT, salt=b"bc")
    assert not one._pool.index.holders.keys() & two._pool.index.holders.keys()


def test_a_later_block_of_a_prefix_is_worth_nothing_without_the_earlier_ones() -> None:
    """Equal tokens at another place, or after another prefix, are another content."""
    cache = cache_of()
    run(cache, 1, [1, 1, 1, 1, 2, 2, 2, 2])
    assert cache.match([2, 2, 2, 2, 1, 1, 1, 1, 0]) == 0
    assert cache.match([3, 3, 3, 3, 2, 2, 2, 2, 0]) == 0


def test_requests_of_one_step_share_blocks_that_are_not_computed_yet() -> None:
    cache = cache_of()
    first = cache.allocate(1, PROMPT)
    second = cache.allocate(2, [*PROMPT, 5])
    assert first is not None
    assert second is not None
    assert second.num_cached_tokens == 12
    assert second.block_ids[:3] == first.block_ids
    assert cache.num_active == 4
    cache.check()


def test_what_was_never_computed_cannot_be_hit() -> None:
    """free(num_computed) withdraws every block that reaches past it, shared ones too."""
    cache = cache_of()
    cache.allocate(1, PROMPT)
    cache.allocate(2, [*PROMPT, 5])
    cache.free(1, 7)
    cache.check()
    assert cache.match([*PROMPT, 6]) == 4
    cache.free(2, 0)
    assert cache.match([*PROMPT, 6]) == 0
    assert (cache.num_active, cache.num_cached, cache.num_free) == (0, 0, 8)
    assert cache.stats.evicted == 0
    assert cache.allocate(3, PROMPT) is not None
    assert cache.stats.thrashed == 0, "withdrawn is not evicted"


def test_room_for_some_tokens_but_only_if_all_would_fit() -> None:
    cache = cache_of(4)
    allocation = cache.allocate(1, list(range(16)), 5)
    assert allocation is not None
    assert len(allocation.block_ids) == 2
    assert cache.match([*range(16), 9]) == 4, "blocks without room for all their tokens are no hit"
    assert cache.extend(1, list(range(8))) == []
    assert cache.match([*range(16), 9]) == 8
    before = (cache.num_active, cache.num_cached, cache.num_free, cache.stats.query_tokens)
    assert cache.allocate(2, list(range(50, 62)), 1) is None
    assert cache.allocate(2, list(range(50, 58)), 1, keep_free=1) is None
    assert before == (cache.num_active, cache.num_cached, cache.num_free, cache.stats.query_tokens)
    assert cache.allocate(2, list(range(50, 58)), 1) is not None


def test_a_hit_on_cached_blocks_needs_them_too() -> None:
    """Need = new blocks + hit blocks that nothing references, which are then taken."""
    cache = cache_of(4)
    run(cache, 1, PROMPT)
    assert cache.num_cached == 3
    assert cache.allocate(2, list(range(8)), 8) is not None  # one free block, one eviction
    assert cache.allocate(3, [*PROMPT[:8], 1, 2]) is None
    cache.check()


def test_extend_answers_none_and_changes_nothing_when_blocks_lack() -> None:
    cache = cache_of(3)
    cache.allocate(1, list(range(8)))
    assert cache.extend(1, list(range(12))) == [2]
    table = cache.block_table(1)
    assert cache.extend(1, list(range(13))) is None
    assert cache.block_table(1) == table
    cache.check()


def test_generated_tokens_are_hit_too() -> None:
    cache = cache_of()
    tokens = list(range(3))
    cache.allocate(1, tokens)
    for token in range(3, 9):
        tokens.append(token)
        assert cache.extend(1, tokens) is not None
    assert cache.match(list(range(9))) == 8


def test_the_first_keeps_the_hash_and_a_duplicate_stays_private() -> None:
    cache = cache_of()
    cache.allocate(1, PROMPT)
    cache.allocate(2, PROMPT)  # hits two blocks, computes the third again
    assert cache.stats.duplicates == 1
    cache.free(1)
    cache.free(2)
    assert (cache.num_cached, cache.num_free) == (3, 5), "the duplicate is free, not cached"
    assert cache.allocate(3, [*PROMPT, 1]).block_ids[:3] == [0, 1, 2]


def test_blocks_without_content_go_first_then_the_least_recently_freed_tail_first() -> None:
    cache = cache_of(6)
    run(cache, 1, list(range(8)))  # blocks 0, 1
    run(cache, 2, list(range(50, 58)))  # blocks 2, 3
    assert cache.allocate(3, [7]).block_ids == [4]
    assert cache.stats.evicted == 0
    taken = [cache.allocate(i, [i]).block_ids[0] for i in range(4, 9)]
    assert taken == [5, 1, 0, 3, 2]
    assert cache.stats.evicted == 4


def test_a_hit_takes_a_block_out_of_the_eviction_order() -> None:
    cache = cache_of(2)
    run(cache, 1, [1, 1, 1, 1])
    run(cache, 2, [2, 2, 2, 2])
    cache.allocate(4, [1, 1, 1, 1, 5])
    assert cache.stats.hit_tokens == 4
    assert cache.match([1, 1, 1, 1, 5]) == 4, "the hit block was not evicted by its own call"
    assert cache.match([2, 2, 2, 2, 5]) == 0


def test_eviction_waits_until_the_block_is_reused() -> None:
    cache = cache_of(2)
    run(cache, 1, [1, 1, 1, 1, 2, 2, 2, 2])
    assert cache.stats.evicted == 0
    cache.allocate(2, [3])
    assert cache.stats.evicted == 1
    assert cache.match([1, 1, 1, 1, 2, 2, 2, 2, 5]) == 4, "the tail went first"


def evict_everything(cache: KVCacheManager) -> None:
    run(cache, 99, [9] * (cache.num_blocks * cache.block_size))


def test_thrash_counts_every_missed_block_that_was_evicted_and_the_request_once() -> None:
    cache = cache_of(4)
    run(cache, 1, PROMPT)
    evict_everything(cache)
    assert (cache.stats.thrashed, cache.stats.thrash_events) == (0, 0), "never asked for before"
    cache.allocate(2, PROMPT)
    assert (cache.stats.thrashed, cache.stats.thrash_events) == (2, 1), (
        "the third was not coverable"
    )


def test_thrash_is_bounded_by_max_hit_and_needs_a_successful_admission() -> None:
    cache = cache_of(4)
    run(cache, 1, PROMPT)
    evict_everything(cache)
    assert cache.allocate(2, PROMPT, keep_free=2) is None
    assert cache.stats.thrashed == 0
    run(cache, 3, PROMPT, max_hit=7, readmission=True)
    assert cache.stats.thrashed == cache.stats.thrashed_readmit == 1
    assert cache.stats.thrash_events == 1


def test_a_missed_block_that_is_held_again_is_no_thrash() -> None:
    """It cannot be hit without the block before it, but its content is there."""
    cache = cache_of(4)
    run(cache, 1, PROMPT)
    evict_everything(cache)
    cache.allocate(2, PROMPT[:4])  # holds the first block's hash
    cache.allocate(3, PROMPT[:4])  # a duplicate of it
    assert cache.extend(3, PROMPT[:8]) is not None  # holds the second block's hash
    cache.free(2)
    before = cache.stats.thrashed
    cache.allocate(4, [9] * 8)  # one free block; the first block's hash is evicted
    cache.free(4, 0)
    assert cache.allocate(5, PROMPT[:9]) is None
    cache.free(3)
    assert cache.allocate(5, PROMPT[:9]).num_cached_tokens == 0
    assert cache.stats.thrashed - before == 1


def test_extend_never_counts_a_thrash() -> None:
    cache = cache_of(4)
    run(cache, 1, PROMPT)
    evict_everything(cache)
    cache.allocate(2, PROMPT[:1])
    assert cache.extend(2, PROMPT) is not None
    assert cache.stats.thrashed == 0


def test_a_block_that_nobody_could_hit_is_reused_without_an_eviction() -> None:
    cache = cache_of(1)
    run(cache, 1, [1, 2, 3])
    run(cache, 2, [4, 5])
    assert cache.stats.evicted == 0
    assert cache.stats.allocated == 2


def test_queries_and_hits_are_counted_once_and_readmissions_apart() -> None:
    cache = cache_of()
    run(cache, 1, PROMPT)
    run(cache, 2, [*PROMPT, 1])
    run(cache, 2, [*PROMPT, 1, 2], readmission=True)
    stats = cache.stats
    assert (stats.query_tokens, stats.hit_tokens) == (25, 12)
    assert (stats.readmit_query_tokens, stats.readmit_hit_tokens) == (14, 12)


def test_without_prefix_caching_nothing_is_ever_hit_or_cached() -> None:
    cache = cache_of(enable_prefix_caching=False)
    run(cache, 1, PROMPT)
    assert run(cache, 2, PROMPT).num_cached_tokens == 0
    assert (cache.num_cached, cache.num_free) == (0, 8)
    assert cache.stats.query_tokens == 24
    assert cache.stats.duplicates == cache.stats.evicted == 0


def test_why_tokens_are_computed_again() -> None:
    """Evicted blocks, and tails of blocks that never filled; the trace counts them per step."""
    cache = cache_of(4)
    cache.allocate(1, PROMPT[:10])
    cache.free(1, 9, token_ids=PROMPT[:10])  # the tenth was sampled, not computed
    lost = cache.allocate(2, [*PROMPT[:10], 5]).lost
    assert (lost.evicted, lost.partial) == ((), (range(8, 9),))
    assert cache.match([*PROMPT[:10], 5]) == 8
    cache.free(2)
    evict_everything(cache)
    lost = cache.allocate(3, [*PROMPT[:10], 5]).lost
    assert (lost.evicted, lost.partial) == ((range(4), range(4, 8)), (range(8, 9),))
    again = lost.count(2, 11)
    assert (again.evicted, again.preempted, again.partial) == (6, 0, 1)


def test_reset_forgets_content_but_not_statistics() -> None:
    cache = cache_of()
    cache.allocate(1, PROMPT)
    with pytest.raises(ConfigError, match="1 sequences hold blocks"):
        cache.reset()
    cache.free(1)
    cache.reset()
    cache.check()
    assert (cache.num_cached, cache.num_free, cache.stats.query_tokens) == (0, 8, 12)
    assert cache.match(PROMPT) == 0


def test_misuse_is_named() -> None:
    with pytest.raises(ConfigError, match="num_blocks=0"):
        KVCacheManager(0)
    cache = cache_of()
    cache.allocate(1, PROMPT)
    with pytest.raises(ConfigError, match="1 is allocated already"):
        cache.allocate(1, PROMPT)
    for call in (cache.free, cache.block_table, lambda i: cache.extend(i, PROMPT)):
        with pytest.raises(ConfigError, match="2 holds no blocks"):
            call(2)


def test_check_notices_a_broken_law() -> None:
    """Each kind of damage is found, so the stateful tests that call it can fail."""

    def leak(cache):
        cache._pool._free.popleft()

    def forget_reference(cache):
        cache._pool.blocks[0].ref_count = 0

    def wrong_hash(cache):
        cache._pool.blocks[0].digest = b"other"

    def hit_a_partial_block(cache):
        cache._pool.publish(cache._pool.blocks[3], b"partial")

    for damage in (leak, forget_reference, wrong_hash, hit_a_partial_block):
        cache = cache_of()
        cache.allocate(1, [*PROMPT, 1])
        cache.check()
        damage(cache)
        with pytest.raises(AssertionError):
            cache.check()


def test_bookkeeping_loads_no_torch() -> None:
    """Cache, scheduler and trace run in a replay without torch."""
    code = "import sys, workbench.kvcache.manager, workbench.engine.scheduler, workbench.trace;"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
