"""Bytes of an arena: every address is one block's own, moves carry bytes, no number is misread."""

import numpy as np
import pytest
import torch

from workbench.errors import ConfigError
from workbench.kvcache.arena import KVArena
from workbench.kvcache.manager import KVCacheManager
from workbench.kvcache.pages import BlockShape
from workbench.kvcache.policies import FirstCome, StaticSplit
from workbench.kvcache.storage import ArenaStorage, BlockStorage, KVStorage

SIZE = 4  # tokens a block
LLM = BlockShape("llm", layers=3, cell_bytes=2 * SIZE * 2 * 4 * 4)
PRM = BlockShape("prm", layers=5, cell_bytes=2 * SIZE * 3 * 8 * 2, element_bytes=2)


def two_models(num_pages: int, policy) -> tuple[KVArena, ArenaStorage, BlockStorage, BlockStorage]:
    page = KVArena(1 << 20, [LLM, PRM]).page
    arena = KVArena(num_pages * page.page_bytes, [LLM, PRM], policy)
    storage = ArenaStorage(arena)
    llm = storage.model("llm", SIZE, kv_heads=2, head_dim=4, dtype=torch.float32)
    prm = storage.model("prm", SIZE, kv_heads=3, head_dim=8, dtype=torch.bfloat16)
    return arena, storage, llm, prm


def cell(storage: BlockStorage, layer: int, block: int) -> torch.Tensor:
    """What a kernel finds at layer_base[layer] + offsets[block]."""
    start = int(storage.layer_base[layer] + storage.offsets[block])
    return storage.data[start : start + storage.block_elements]


def fill(storage: BlockStorage, block: int, value: float) -> None:
    for layer in range(storage.layers):
        cell(storage, layer, block)[:] = value + layer


def holds(storage: BlockStorage, block: int, value: float) -> bool:
    return all(bool((cell(storage, k, block) == value + k).all()) for k in range(storage.layers))


def test_every_cell_of_every_block_lies_apart_and_in_its_own_page() -> None:
    """Blocks of one model never overlap; two models meet only where a page is the same."""
    arena, storage, *views = two_models(7, StaticSplit())
    owner_of = np.full((2, storage.bytes.numel()), -1)
    for which, view in enumerate(views):
        width = view.block_elements * view.data.element_size()
        for block in range(view.num_blocks):
            page = arena.packing(arena.models[which]).page_of(block)
            for base in view.layer_base:
                start = int(base + view.offsets[block]) * view.data.element_size()
                assert (owner_of[which, start : start + width] == -1).all(), "cells overlap"
                owner_of[which, start : start + width] = page
    both = (owner_of >= 0).all(axis=0)
    assert both.any()
    assert (owner_of[0, both] == owner_of[1, both]).all(), "pages of two models overlap"


def test_bytes_of_another_type_are_zeroed_before_anybody_reads_them() -> None:
    """Every bit of a page set is no number in either type; the next model finds zeros."""
    arena, storage, llm, _ = two_models(4, FirstCome())
    prm_cache, llm_cache = arena.cache("prm", SIZE), arena.cache("llm", SIZE)
    written = prm_cache.allocate(1, list(range(prm_cache.num_free * SIZE))).block_ids
    prm_pages = {arena.packing("prm").page_of(block) for block in written}
    storage.settle()
    storage.bytes[:] = 255
    prm_cache.free(1)
    table = llm_cache.allocate(1, list(range(llm_cache.num_free * SIZE))).block_ids
    llm.settle(llm_cache)
    given = [block for block in table if arena.packing("llm").page_of(block) in prm_pages]
    assert len(given) == 2 * arena.packing("llm").blocks, "all but the page that is its floor"
    assert storage.bytes_zeroed == 2 * arena.page.page_bytes
    for block in given:
        assert all(bool((cell(llm, k, block) == 0).all()) for k in range(llm.layers))
    assert torch.isnan(storage.bytes.view(torch.bfloat16)).any(), "the rest is as it was"


def test_a_model_that_gets_its_own_page_back_has_nothing_zeroed() -> None:
    """One model alone pays nothing for the arena."""
    arena, storage, llm, _ = two_models(6, StaticSplit())
    cache = arena.cache("llm", SIZE)
    for seq_id in range(5):
        assert cache.allocate(seq_id, [seq_id] * 9) is not None
        llm.settle(cache)
        cache.free(seq_id)
    assert storage.bytes_zeroed == 0


def test_live_blocks_moved_out_of_a_page_keep_their_bytes() -> None:
    """After a re-split the tables name other blocks, with what the old ones held."""
    arena, storage, llm, _ = two_models(10, StaticSplit())
    cache = arena.cache("llm", SIZE)
    count = cache.num_free
    for seq_id in range(count):
        fill(llm, cache.allocate(seq_id, [seq_id] * 3).block_ids[0], 10.0 * seq_id)
    kept = range(0, count, 4)
    for seq_id in set(range(count)) - set(kept):
        cache.free(seq_id)
    before = {seq_id: cache.block_table(seq_id) for seq_id in kept}
    assert arena.resplit(0.2).outcome == "reached"
    assert cache.apply()
    llm.settle(cache)
    assert any(cache.block_table(seq_id) != before[seq_id] for seq_id in kept)
    assert all(holds(llm, cache.block_table(s)[0], 10.0 * s) for s in kept)
    assert arena.actual["llm"] == arena.target["llm"] == 2
    assert storage.bytes_copied == cache.stats.copied * LLM.block_bytes > 0
    arena.check()


def test_a_fork_copies_into_a_page_that_was_another_models() -> None:
    """The copy is read before the page is zeroed and written after it."""
    arena, _, llm, _ = two_models(4, FirstCome())
    prm_cache, llm_cache = arena.cache("prm", SIZE), arena.cache("llm", SIZE)
    assert prm_cache.allocate(1, list(range(prm_cache.num_free * SIZE))) is not None
    prm_cache.free(1)
    per_page = arena.packing("llm").blocks
    table = llm_cache.allocate(1, [7] * (per_page * SIZE - 1)).block_ids
    llm.settle(llm_cache)
    fill(llm, table[-1], 3.0)
    child = llm_cache.fork(1, 2).block_ids
    assert llm_cache._pool.per_page == per_page
    llm.settle(llm_cache)
    assert child[-1] // per_page != table[-1] // per_page
    assert holds(llm, child[-1], 3.0)


def test_a_fork_in_a_cache_of_its_own_copies_the_partial_block() -> None:
    storage = KVStorage(6, SIZE, layers=2, kv_heads=1, head_dim=4)
    cache = KVCacheManager(6, SIZE)
    table = cache.allocate(1, list(range(6))).block_ids
    fill(storage, table[0], 1.0)
    fill(storage, table[1], 2.0)
    child = cache.fork(1, 2).block_ids
    storage.settle(cache)
    assert child[0] == table[0]
    assert child[1] != table[1]
    assert holds(storage, child[1], 2.0)
    assert storage.bytes_copied == 2 * storage.block_elements * 4


def test_a_model_of_another_size_than_the_arena_was_made_for_is_refused() -> None:
    storage = two_models(4, StaticSplit())[1]
    with pytest.raises(ConfigError, match="'llm' has 512 bytes"):
        storage.model("llm", SIZE, kv_heads=2, head_dim=8, dtype=torch.float32)
