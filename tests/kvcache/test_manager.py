"""The KV cache manager by example; its laws are held against a naive model in the stateful test."""

import pytest

from workbench.config import EngineConfig
from workbench.errors import ConfigError
from workbench.kvcache.manager import Allocation, KVCacheManager, TokenList, chain_root

PROMPT = list(range(100, 112))  # three blocks of four


def cache_of(num_blocks: int = 8, block_size: int = 4, **options) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, **options)


def run(cache: KVCacheManager, seq_id: int, tokens: list[int], **options) -> Allocation:
    """Admit, compute everything, free."""
    allocation = cache.allocate(seq_id, tokens, **options)
    assert allocation is not None
    cache.free(seq_id, token_ids=tokens)
    cache.take_moves()
    cache.check()
    return allocation


def test_a_sequence_that_carries_its_hashes_is_hashed_once_for_each_root_and_block_size() -> None:
    """That it is answered as one that does not: test_manager_stateful.py."""
    tokens, root = TokenList(PROMPT), chain_root(b"", b"tenant")
    assert tokens.block_hashes(root, 4) is tokens.block_hashes(root, 4)
    assert len(tokens.block_hashes(root, 4)) == 3
    assert tokens.block_hashes(chain_root(b"", b""), 4) != tokens.block_hashes(root, 4)
    assert len(tokens.block_hashes(root, 6)) == 2
    assert chain_root(b"ab", b"c") != chain_root(b"a", b"bc"), "a salt is no part of a namespace"


def test_a_plain_list_after_one_with_hashes_writes_into_no_other_s_chain() -> None:
    """Two sequences that began as one, and go on apart: neither is found under the other's text."""
    cache, start = cache_of(), TokenList(range(8))
    for seq_id in (1, 2):
        cache.allocate(seq_id, start)
    for seq_id in (1, 2):
        cache.extend(seq_id, [*range(8), *[seq_id] * 4])
    assert [cache.match([*range(8), *[n] * 4, 9]) for n in (1, 2, 3)] == [12, 12, 8]
    assert len(start.block_hashes(chain_root(b"", b""), 4)) == 2


def test_the_last_evicted_contents_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory has a bound; a forgotten one is a miss that is no thrash."""
    monkeypatch.setattr("workbench.kvcache.pool.MOST_EVICTED", 16)
    cache = cache_of(8)
    for number in range(200):
        run(cache, number, [number] * 4)
    assert (cache.stats.evicted, len(cache.pool.evicted)) == (192, 16)
    for number, thrashed in ((191, 1), (186, 2), (0, 2), (777, 2)):
        run(cache, 1000 + number, [*[number] * 4, 0])
        assert cache.stats.thrashed == thrashed, "0: 190 evictions ago; 777 never was there"


def test_a_refused_admission_asks_for_what_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a lending policy from moving pages for blocks that others use already."""

    def filled(num_blocks: int) -> KVCacheManager:
        cache = cache_of(num_blocks)
        for number in range(3):  # the last leaves: one prefix in use, one cached
            tokens = [*range(number // 2 * 100, number // 2 * 100 + 8), number]
            assert cache.allocate(number, tokens) is not None
        cache.free(2, token_ids=tokens)
        return cache

    asked: list[int] = []
    cache = filled(7)
    monkeypatch.setattr(cache.pool, "refused", asked.append)
    for beginning in (0, 100, 200):
        prompt = [*range(beginning, beginning + 8), *range(300, 312)]
        assert cache.allocate(3, prompt, keep_free=1) is None
        assert filled(asked[-1]).allocate(3, prompt, keep_free=1) is not None
        assert filled(asked[-1] - 1).allocate(3, prompt, keep_free=1) is None
    assert len(asked) == 3


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
    with pytest.raises(ConfigError, match="reuse_partial_blocks=True"):
        KVCacheManager(4, 4, enable_prefix_caching=False, reuse_partial_blocks=True)
    with pytest.raises(ConfigError, match="reuse_partial_blocks is True"):
        EngineConfig(enable_prefix_caching=False, reuse_partial_blocks=True)
    cache = cache_of()
    assert cache.resize(0).refused
    cache.require(5)
    assert "needs 5" in cache.resize(4).reason
    with pytest.raises(ConfigError, match="bytes for 8"):
        cache.resize(9)
    assert cache.target == 8
    cache.allocate(1, PROMPT)
    with pytest.raises(ConfigError, match="1 is allocated already"):
        cache.allocate(1, PROMPT)
    for call in (cache.free, cache.block_table, lambda i: cache.extend(i, PROMPT)):
        with pytest.raises(ConfigError, match="2 holds no blocks"):
            call(2)


def test_check_notices_a_broken_law() -> None:
    """Each kind of damage is found, so the stateful tests that call it can fail."""
    for damage in (
        lambda pool: pool.take(),
        lambda pool: setattr(pool.blocks[0], "ref_count", 0),
        lambda pool: setattr(pool.blocks[0], "digest", b"other"),
        lambda pool: pool.publish(pool.blocks[3], b"partial"),
    ):
        cache = cache_of()
        cache.allocate(1, [*PROMPT, 1])
        cache.check()
        damage(cache.pool)
        with pytest.raises(AssertionError):
            cache.check()
