"""Bytes of an arena: every address is one block's own, moves carry bytes, no number is misread."""

import pytest
import torch

from workbench.errors import ConfigError
from workbench.kvcache.arena import BlockShape, KVArena
from workbench.kvcache.policies import FirstCome
from workbench.kvcache.storage import ArenaStorage, BlockStorage

SIZE = 4  # tokens a block
LLM = BlockShape("llm", layers=3, cell_bytes=2 * SIZE * 2 * 4 * 4)
PRM = BlockShape("prm", layers=5, cell_bytes=2 * SIZE * 3 * 8 * 2, element_bytes=2)


def two_models() -> tuple[KVArena, ArenaStorage, BlockStorage]:
    """Four pages that whichever asks first takes; the LLM's blocks."""
    page = KVArena(1 << 20, [LLM, PRM]).page
    arena = KVArena(4 * page.page_bytes, [LLM, PRM], FirstCome())
    storage = ArenaStorage(arena)
    llm = storage.model("llm", SIZE, kv_heads=2, head_dim=4, dtype=torch.float32)
    storage.model("prm", SIZE, kv_heads=3, head_dim=8, dtype=torch.bfloat16)
    return arena, storage, llm


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
    """No number of either type; a model that gets its own pages back has nothing zeroed."""
    arena, storage, llm = two_models()
    prm_cache, llm_cache = arena.cache("prm", SIZE), arena.cache("llm", SIZE)
    written = prm_cache.allocate(1, list(range(prm_cache.num_free * SIZE))).block_ids
    prm_pages = {block // arena.packing("prm").blocks for block in written}
    storage.settle()
    storage.bytes[:] = 255
    prm_cache.free(1)
    tokens = list(range(llm_cache.num_free * SIZE))
    table = llm_cache.allocate(1, tokens).block_ids
    llm.settle(llm_cache)
    given = [block for block in table if block // arena.packing("llm").blocks in prm_pages]
    assert len(given) == 2 * arena.packing("llm").blocks, "all but the page that is its floor"
    assert storage.bytes_zeroed == 2 * arena.page.page_bytes
    for block in given:
        assert all(bool((cell(llm, k, block) == 0).all()) for k in range(llm.layers))
    assert torch.isnan(storage.bytes.view(torch.bfloat16)).any(), "the rest is as it was"
    llm_cache.free(1, 0)
    assert llm_cache.allocate(2, tokens) is not None
    llm.settle(llm_cache)
    assert storage.bytes_zeroed == 2 * arena.page.page_bytes
    with pytest.raises(ConfigError, match="'llm' has 512 bytes"):
        storage.model("llm", SIZE, kv_heads=2, head_dim=8, dtype=torch.float32)


@pytest.mark.parametrize("cut_short", [False, True])
def test_a_copy_is_read_before_its_page_is_zeroed_and_written_after_it(cut_short: bool) -> None:
    """Of a partial block into another model's page, whose call may have been cut short."""
    arena, storage, llm = two_models()
    prm_cache = arena.cache("prm", SIZE)
    llm_cache = arena.cache("llm", SIZE, reuse_partial_blocks=True)
    assert prm_cache.allocate(1, list(range(prm_cache.num_free * SIZE))) is not None
    prm_cache.free(1)
    per_page = arena.packing("llm").blocks
    tokens = [7] * (per_page * SIZE - 1)
    partial = llm_cache.allocate(1, tokens).block_ids[-1]
    llm.settle(llm_cache)
    fill(llm, partial, 3.0)
    llm_cache.free(1, token_ids=tokens)
    own, zeroed = llm_cache.allocate(2, [*tokens, 8]).block_ids[-1], storage.bytes_zeroed
    if cut_short:
        prm_cache.recover()
    llm.settle(llm_cache)
    assert own // per_page != partial // per_page
    assert holds(llm, own, 3.0)
    assert storage.bytes_zeroed > zeroed
