"""Bytes of an arena: every address is one block's own, moves carry bytes, no number is misread."""

import pytest
import torch

from workbench.errors import ConfigError
from workbench.kvcache.arena import BlockShape, KVArena
from workbench.kvcache.manager import KVCacheManager
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


def test_bytes_of_another_type_are_zeroed_before_anybody_reads_them() -> None:
    """Every bit of a page set is no number in either type; the next model finds zeros."""
    arena, storage, llm, _ = two_models(4, FirstCome())
    prm_cache, llm_cache = arena.cache("prm", SIZE), arena.cache("llm", SIZE)
    written = prm_cache.allocate(1, list(range(prm_cache.num_free * SIZE))).block_ids
    prm_pages = {block // arena.packing("prm").blocks for block in written}
    storage.settle()
    storage.bytes[:] = 255
    prm_cache.free(1)
    table = llm_cache.allocate(1, list(range(llm_cache.num_free * SIZE))).block_ids
    llm.settle(llm_cache)
    given = [block for block in table if block // arena.packing("llm").blocks in prm_pages]
    assert len(given) == 2 * arena.packing("llm").blocks, "all but the page that is its floor"
    assert storage.bytes_zeroed == 2 * arena.page.page_bytes
    for block in given:
        assert all(bool((cell(llm, k, block) == 0).all()) for k in range(llm.layers))
    assert torch.isnan(storage.bytes.view(torch.bfloat16)).any(), "the rest is as it was"
    with pytest.raises(ConfigError, match="'llm' has 512 bytes"):
        storage.model("llm", SIZE, kv_heads=2, head_dim=8, dtype=torch.float32)


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
    assert cache.stats.copied > 0
    cache.free_all()
    for seq_id in range(5):
        assert cache.allocate(seq_id, [seq_id] * 9) is not None
        llm.settle(cache)
        cache.free(seq_id)
    assert storage.bytes_zeroed == 0, "a model that gets its own pages back"
    arena.check()


def copy_to_come(arena, llm):
    """Both caches, and blocks of the LLM: a partial one of 3.0, its copy in the PRM's former page.

    Neither the copying nor the zeroing of that page is done.
    """
    prm_cache = arena.cache("prm", SIZE)
    llm_cache = arena.cache("llm", SIZE, reuse_partial_blocks=True)
    assert prm_cache.allocate(1, list(range(prm_cache.num_free * SIZE))) is not None
    prm_cache.free(1)
    tokens = [7] * (arena.packing("llm").blocks * SIZE - 1)
    partial = llm_cache.allocate(1, tokens).block_ids[-1]
    llm.settle(llm_cache)
    fill(llm, partial, 3.0)
    llm_cache.free(1, token_ids=tokens)
    return prm_cache, llm_cache, partial, llm_cache.allocate(2, [*tokens, 8]).block_ids[-1]


def test_a_copy_goes_into_a_page_that_was_another_models() -> None:
    """It is read before the page is zeroed and written after it."""
    arena, _, llm, _ = two_models(4, FirstCome())
    _, llm_cache, partial, own = copy_to_come(arena, llm)
    per_page = arena.packing("llm").blocks
    llm.settle(llm_cache)
    assert own // per_page != partial // per_page
    assert holds(llm, own, 3.0)


def test_what_is_to_be_copied_outlives_a_call_of_another_model_that_was_cut_short() -> None:
    """So does what is to be zeroed: the copy goes into a page that was the other's."""
    arena, storage, llm, _ = two_models(4, FirstCome())
    prm_cache, llm_cache, _, own = copy_to_come(arena, llm)
    zeroed = storage.bytes_zeroed
    prm_cache.recover()
    llm.settle(llm_cache)
    assert holds(llm, own, 3.0)
    assert storage.bytes_zeroed > zeroed


def test_a_cache_of_its_own_copies_a_partial_block() -> None:
    storage = KVStorage(6, SIZE, layers=2, kv_heads=1, head_dim=4)
    cache = KVCacheManager(6, SIZE, reuse_partial_blocks=True)
    partial = cache.allocate(1, list(range(6))).block_ids[1]
    fill(storage, partial, 2.0)
    cache.free(1, token_ids=list(range(6)))
    own = cache.allocate(2, list(range(7))).block_ids[1]
    storage.settle(cache)
    assert own != partial
    assert holds(storage, own, 2.0)
