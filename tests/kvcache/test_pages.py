"""Pages that fit blocks of different sizes: waste, addresses and locality."""

from itertools import combinations

import numpy as np
import pytest

from workbench.errors import ConfigError
from workbench.kvcache.pages import BlockShape, choose_page, pack

KIB = 1024
LLAMA_1B = BlockShape("llama-1b", 16, 32 * KIB, element_bytes=2)  # 512 KiB a block of 16 tokens
LLAMA_8B = BlockShape("llama-8b", 32, 64 * KIB, element_bytes=2)  # 2 MiB
QWEN_7B = BlockShape("qwen-prm-7b", 28, 32 * KIB, element_bytes=2)  # 896 KiB: 56 KiB a token
TINY = (BlockShape("solver", 4, 2 * KIB), BlockShape("prm", 4, 8 * KIB))
REFERENCE = (LLAMA_1B, LLAMA_8B, QWEN_7B)
GROUPS = [*combinations(REFERENCE, 2), REFERENCE, TINY, (LLAMA_8B,)]


@pytest.mark.parametrize("models", GROUPS, ids=lambda models: "+".join(m.name for m in models))
def test_the_chosen_page_wastes_at_most_a_twentieth(models: tuple[BlockShape, ...]) -> None:
    """The pairs of the reference, all three, the embedded pair, and one model alone."""
    page = choose_page(models)
    for model in models:
        packing = pack(model, page)
        assert packing.blocks * model.block_bytes + packing.waste == page.page_bytes
        assert 0 <= packing.waste <= 0.05 * page.page_bytes


def test_one_model_alone_has_pages_of_one_block_and_the_layout_of_its_own_cache() -> None:
    page = choose_page([LLAMA_8B])
    packing = pack(LLAMA_8B, page)
    assert (packing.blocks, packing.waste, packing.layers_per_stripe) == (1, 0, 1)
    elements = LLAMA_8B.cell_bytes // 2
    assert np.array_equal(packing.offsets(5), np.arange(5) * elements)
    assert np.array_equal(packing.layer_base(5), np.arange(32) * 5 * elements)


def test_sizes_of_one_to_four_keep_every_layer_in_a_slab_of_its_own() -> None:
    """Per-layer locality: layers share a slab only where sizes do not divide."""
    page = choose_page([LLAMA_1B, LLAMA_8B])
    assert [pack(m, page).blocks for m in (LLAMA_1B, LLAMA_8B)] == [4, 1]
    assert all(pack(m, page).layers_per_stripe == 1 for m in (LLAMA_1B, LLAMA_8B))
    assert pack(LLAMA_1B, choose_page([LLAMA_1B, QWEN_7B])).layers_per_stripe == 4


@pytest.mark.parametrize("models", GROUPS, ids=lambda models: "+".join(m.name for m in models))
def test_no_two_cells_of_a_page_overlap(models: tuple[BlockShape, ...]) -> None:
    """Each (block, layer) of a page is its own stretch of the page's stripes."""
    page, num_pages = choose_page(models), 3
    slab = num_pages * page.stripe
    for model in models:
        packing = pack(model, page)
        base, offsets = packing.layer_base(num_pages), packing.offsets(num_pages)
        starts = np.add.outer(base, offsets) * model.element_bytes
        pages = np.array([packing.page_of(block) for block in range(len(offsets))])
        inside = starts % slab - pages * page.stripe
        assert ((inside >= 0) & (inside + model.cell_bytes <= page.stripe)).all()
        ordered = np.sort(starts.ravel())
        assert (np.diff(ordered) >= model.cell_bytes).all()
        assert ordered[-1] + model.cell_bytes <= page.slabs * slab


def test_addresses_pass_32_bits() -> None:
    """At 40 GiB offsets are larger than an int32; they are int64 throughout."""
    page = choose_page([LLAMA_1B, LLAMA_8B])
    packing = pack(LLAMA_8B, page)
    num_pages = (40 << 30) // page.page_bytes
    last = packing.layer_base(num_pages)[-1] + packing.offsets(num_pages)[-1]
    assert last.dtype == np.int64
    assert last == (40 << 30) // 2 - LLAMA_8B.cell_bytes // 2


@pytest.mark.parametrize("sizes", [(0, 64), (2, 0), (2, 66, 4), (2, 64, 4, 0), (2, 64, 4, 1, 0.0)])
def test_impossible_shapes_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        BlockShape("bad", *sizes)
