"""Partly filled blocks that stay hittable: found, copied, taken over, given up; one law each."""

import pytest

from workbench.config import EngineConfig
from workbench.errors import ConfigError
from workbench.kvcache.arena import KVArena
from workbench.kvcache.manager import Allocation, KVCacheManager
from workbench.kvcache.pages import BlockShape, PageShape
from workbench.kvcache.parked import ParkedBlocks
from workbench.kvcache.policies import FirstCome
from workbench.kvcache.tails import TailIndex

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


def test_each_sibling_goes_on_with_a_copy_of_its_parents_tail() -> None:
    """Four beams of one parent compute new tokens only; the tail stays for a fifth."""
    cache = cache_of()
    leave(cache, 1, PROMPT)
    assert counts(cache) == (0, 3, 13), "two full blocks and the tail can be hit"
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


def test_without_the_switch_a_tail_is_lost() -> None:
    cache = cache_of(reuse=False)
    leave(cache, 1, PROMPT)
    assert cache.match([*PROMPT, 1]) == 8
    assert counts(cache) == (0, 2, 14)


@pytest.mark.parametrize(
    ("tokens", "max_hit", "found"),
    [
        ([*PROMPT, 7], None, 10),
        (PROMPT, None, 9),  # the last token's logits are wanted
        ([*PROMPT[:9], 7, 7], None, 9),  # the beginning of a tail
        ([*PROMPT[:8], 7, 7], None, 8),
        ([*PROMPT, 7], 9, 9),
        ([*PROMPT, 7], 8, 8),
        ([*PROMPT, 7], 5, 4),  # the first block alone: the second is full, and no tail
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


def test_the_tail_with_the_longest_beginning_is_copied() -> None:
    cache = cache_of()
    for seq_id, last in ((1, [1]), (2, [5, 6, 7]), (3, [5, 7])):
        leave(cache, seq_id, [*PROMPT[:8], *last])
    assert cache.match([*PROMPT[:8], 5, 6, 9, 9]) == 10
    assert cache.match([*PROMPT[:8], 5, 7, 9, 9]) == 10
    assert cache.match([*PROMPT[:8], 5, 9, 9, 9]) == 9
    assert cache.num_cached == 2 + 3


def test_of_two_tails_that_begin_alike_the_longer_stays() -> None:
    """A sequence that went on within the block makes its parent's tail worth nothing."""
    cache = cache_of()
    leave(cache, 1, PROMPT[:9])
    leave(cache, 2, PROMPT)
    assert counts(cache) == (0, 3, 13)
    leave(cache, 3, PROMPT[:9])
    assert counts(cache) == (0, 3, 13)
    assert cache.match([*PROMPT, 7]) == 10
    assert cache.stats.evicted == 0


def test_the_salt_keeps_tails_apart_and_prompts_shorter_than_a_block_have_them() -> None:
    cache = cache_of()
    leave(cache, 1, PROMPT[:3], salt=b"one")
    assert cache.match(PROMPT, salt=b"one") == 3
    assert cache.match(PROMPT) == cache.match(PROMPT, salt=b"two") == 0


def test_only_what_was_computed_can_be_hit() -> None:
    """Of a sequence that was preempted or failed: up to the last token whose KV exists."""
    cache = cache_of()
    for computed, found in ((0, 0), (3, 3), (9, 9)):
        cache.allocate(1, PROMPT)
        cache.free(1, computed, token_ids=PROMPT)
        assert cache.match([*PROMPT, 7]) == found
        cache.check()


def test_a_block_that_somebody_else_still_uses_is_no_tail() -> None:
    """Its user hit it before it was computed, and writes all of it."""
    cache = cache_of()
    cache.allocate(1, PROMPT)
    cache.allocate(2, [*PROMPT, 7])
    cache.free(1, 6, token_ids=PROMPT)
    assert cache.match(PROMPT) == 4
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


def test_a_tail_whose_place_is_needed_is_read_before_it_is_written() -> None:
    """The same admission copies it and then takes its block: all sources are read first."""
    cache = cache_of(num_blocks=4)
    leave(cache, 1, PROMPT)
    admitted = cache.allocate(2, [*PROMPT, 7, 7, 8])
    assert admitted is not None
    table = admitted.block_ids
    assert cache.take_moves() == [(table[3], table[2])]
    assert cache.match([*PROMPT, 9]) == 8, "an evicted tail is no hit"
    cache.check()


def test_a_copy_that_was_never_carried_out_is_copied_from_where_its_content_is() -> None:
    """Admitted and gone between two stores: what it got can be handed on."""
    cache = cache_of()
    leave(cache, 1, PROMPT)
    cache.allocate(2, [*PROMPT[:9], 7, 7])
    own = cache.block_table(2)[2]
    cache.free(2, 9, token_ids=[*PROMPT[:9], 7, 7])
    assert cache.allocate(3, [*PROMPT, 8]) is not None
    copies = {to: at for at, to in cache.take_moves()}
    assert copies[cache.block_table(3)[2]] == 2
    assert own not in cache.block_table(3)[2:]
    cache.check()


def test_a_tail_that_was_hit_is_evicted_after_those_that_were_not() -> None:
    cache = cache_of(num_blocks=4)
    leave(cache, 1, [1, 1])
    leave(cache, 2, [2, 2])
    leave(cache, 3, [3, 3])
    leave(cache, 4, [1, 1, 4, 4, 4, 4])  # hits the first tail; its blocks evict the second
    assert cache.match([1, 1, 9]) == 2
    assert cache.match([2, 2, 9]) == 0
    cache.check()


def test_a_tail_gives_way_to_full_blocks_up_to_four_times_as_old() -> None:
    """It is worth less than a full block, and soon after its last use more than an old one."""
    parked = ParkedBlocks()
    for block, is_tail in ((0, False), (1, True), (2, False)):
        parked.add(block, b"%d" % block, is_tail)
    assert parked.next == 1, "used once after the full block, but a tail"
    parked.touch(1)
    assert parked.next == 0
    parked.add(3, b"3", is_tail=False)
    assert parked.next == 1, "the full block is four uses old, the tail one"
    assert [parked.pop()[0] for _ in range(4)] == [1, 0, 2, 3]
    assert parked.next is None


def test_reset_forgets_tails() -> None:
    cache = cache_of()
    leave(cache, 1, PROMPT)
    cache.reset()
    assert cache.match([*PROMPT, 7]) == 0
    assert counts(cache) == (0, 0, 16)
    cache.check()


def test_a_tail_goes_with_its_page_and_is_read_before_the_page_is_cleared() -> None:
    """In an arena a hit keeps the tail's page; a page that another model takes ends its tails."""
    page = PageShape(slabs=1, stripe=64)  # one block a page
    shapes = [BlockShape("llm", 1, 64), BlockShape("prm", 1, 64)]
    arena = KVArena(8 * page.page_bytes, shapes, FirstCome(), page=page)
    llm, prm = (arena.cache(name, 4, reuse_partial_blocks=True) for name in arena.models)
    leave(llm, 1, PROMPT[:6])
    assert llm.allocate(2, [*PROMPT[:6], 7]) is not None
    own = llm.block_table(2)[1]
    assert prm.allocate(1, [*range(24)]) is not None, "six pages: the tail's is one of them"
    assert llm.match([*PROMPT[:6], 9]) == 4
    moves = arena.take_moves()["llm"]
    assert [to for _, to in moves] == [own]
    assert moves[0][0] in arena.take_retyped(), "read first, cleared then"
    arena.check()


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


def test_the_index_answers_the_tail_of_the_longest_common_beginning() -> None:
    """Against a scan of all tails, for every query over three letters."""
    index, tails = TailIndex(), [(0, 1), (0, 2, 2), (1,), (2, 0, 0), (2, 0, 1)]
    for tail in tails:
        index.add(b"parent", tail)
    index.check()
    for code in range(27):
        query = (code // 9, code // 3 % 3, code % 3)
        best = max(_common(tail, query) for tail in tails)
        found = index.longest(b"parent", query)
        assert (0 if found is None else found.num_tokens) == best
    assert index.longest(b"another", (0, 1)) is None


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), len(one))
