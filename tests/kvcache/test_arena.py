"""The arena's laws, one example each."""

from itertools import combinations

import numpy as np
import pytest

from workbench.errors import ConfigError, OutOfMemory
from workbench.kvcache.arena import BlockShape, KVArena, PageShape, choose_page, pack
from workbench.kvcache.manager import KVCacheManager
from workbench.kvcache.policies import FirstCome, Grant, MarginalValue, PhaseAware, StaticSplit
from workbench.kvcache.pool import ResizeAnswer

SIZE = 4  # tokens a block
PAGE = PageShape(slabs=2, stripe=256)
LLM = BlockShape("llm", 2, 64, floor_blocks=6)  # 4 blocks a page, floor of 2 pages
PRM = BlockShape("prm", 2, 256, floor_blocks=2)  # 1 block a page, floor of 2 pages


def arena_of(num_pages: int = 20, policy=None, models=(LLM, PRM), kv_share=None) -> KVArena:
    memory = num_pages * PAGE.page_bytes
    return KVArena(memory, models, policy or StaticSplit(), kv_share, page=PAGE)


def tokens_of(blocks: int, which: int) -> list[int]:
    return [which] * (blocks * SIZE)


def visit(cache: KVCacheManager, which: int, blocks: int) -> None:
    """Come, compute everything, go: cached blocks remain."""
    assert cache.allocate(-1, tokens_of(blocks, which)) is not None
    cache.free(-1)


def test_the_pages_are_split_as_asked_and_counts_add_up() -> None:
    arena = arena_of(kv_share=0.3)
    llm, prm = arena.cache("llm", SIZE), arena.cache("prm", SIZE)
    assert arena.target == arena.actual == {"llm": 6, "prm": 14}
    assert (llm.num_blocks, prm.num_blocks) == (24, 14)
    assert llm.target == 24
    visit(llm, 1, 3)
    assert (llm.num_active, llm.num_cached, llm.num_free) == (0, 3, 21)
    assert arena.waste() == {"llm": 0, "prm": 0}
    assert arena.waste([BlockShape("odd", 2, 96)]) == {"odd": 512 - 2 * 2 * 96}


def test_a_reset_forgets_what_was_evicted() -> None:
    """Nor is it watched for what more pages would have saved."""
    arena = arena_of(kv_share=0.5)
    cache = arena.cache("llm", SIZE)
    ghosts, watched = arena.pools[0].ghosts, [bytes(4)]
    ghosts.evicted(watched)
    ghosts.missed(watched)
    assert ghosts.hits == 1
    ghosts.evicted(watched)
    for which in range(20):
        visit(cache, which, 3)
    assert cache.stats.evicted > 0
    cache.reset()
    ghosts.missed(watched)
    visit(cache, 0, 3)
    assert (ghosts.hits, cache.stats.thrashed) == (1, 0)
    arena.check()


def test_a_resplit_gives_free_pages_then_the_least_valuable_cached_ones() -> None:
    arena = arena_of(kv_share=0.5)
    llm, prm = arena.cache("llm", SIZE), arena.cache("prm", SIZE)
    for which in range(5):
        visit(llm, which, 8)  # two pages each: all ten
    assert arena.resplit(0.4).outcome == "reached"
    assert prm.num_blocks == 10, "nothing changes before the next step"
    assert not prm.apply(), "a model that does not run has nothing to be moved"
    assert prm.num_blocks == 12
    assert llm.match(tokens_of(8, 0)) == 0
    assert [llm.match(tokens_of(8, which)) for which in (1, 2, 3, 4)] == [28] * 4
    assert llm.stats.evicted == 8
    arena.check()


def test_a_target_below_what_is_in_use_is_reached_later() -> None:
    arena = arena_of(kv_share=0.5)
    llm, prm = arena.cache("llm", SIZE), arena.cache("prm", SIZE)
    for which in range(4):
        assert llm.allocate(which, tokens_of(8, which)) is not None
    answer = arena.resplit(0.2)
    assert (answer.outcome, answer.target) == ("later", 4)
    assert "'llm' has 8 pages" in answer.reason
    llm.apply()
    assert (arena.target["llm"], arena.actual["llm"], prm.num_blocks) == (4, 8, 12)
    assert llm.extend(0, tokens_of(9, 0)) is None, "no page beyond the target"
    for which in range(3):
        llm.free(which)
    llm.apply()
    assert arena.actual == arena.target == {"llm": 4, "prm": 16}
    assert prm.num_blocks == 16


def test_a_target_below_a_floor_is_refused_and_nothing_changes() -> None:
    arena = arena_of(kv_share=0.5)
    for answer in (arena.resplit(0.05), arena.resplit({"llm": 0.95, "prm": 0.05})):
        assert answer.refused
        assert "one request needs 2" in answer.reason
    assert arena.cache("prm", SIZE).resize(1).refused
    arena.cache("llm", SIZE).apply()
    assert arena.target == {"llm": 10, "prm": 10}


def test_shares_and_shapes_that_cannot_be_are_refused() -> None:
    """Outside the unit interval, below a floor, under a policy that keeps no split."""
    arena, lends_all = arena_of(), FirstCome()
    assert "FirstCome keeps no split" in arena_of(policy=lends_all).resplit(0.5).reason
    with pytest.raises(ConfigError, match=r"kv_share=0\.3: the policy FirstCome keeps"):
        arena_of(policy=lends_all, kv_share=0.3)
    for sizes in ((0, 64), (2, 0), (2, 66, 4), (2, 64, 4, 0), (2, 64, 4, 1, 0.0)):
        with pytest.raises(ConfigError, match="must be positive"):
            BlockShape("bad", *sizes)
    for share in (0, 1, -0.1, 1.5, float("nan"), {"llm": 1.0}, {"nobody": 0.5}):
        with pytest.raises(ConfigError, match="in \\(0, 1\\)"):
            arena.resplit(share)
    with pytest.raises(OutOfMemory, match="'prm' would have 1 pages; one request needs 2"):
        arena_of(kv_share=0.95)
    for given in ("0.3", [0.3]):
        with pytest.raises(ConfigError, match="allowed: the first model's share"):
            arena_of(kv_share=given)


THIRD = BlockShape("third", 2, 256, floor_blocks=2)  # 1 block a page, floor of 2 pages


def test_a_second_resize_keeps_what_the_first_was_promised() -> None:
    """Two models ask between two steps; the later request takes nothing back of the earlier."""
    arena = arena_of(num_pages=30, models=(LLM, PRM, THIRD))
    caches = [arena.cache(name, SIZE) for name in arena.models]
    assert caches[0].resize(16 * 4) == ResizeAnswer("reached", 16 * 4)
    assert caches[1].resize(7) == ResizeAnswer("reached", 7)
    caches[0].apply()
    first, second, third = arena.target.values()
    assert (second, first + second + third) == (7, 30)
    assert first / third == pytest.approx(16 / 7, rel=0.1), "of the rest as it was asked for"


def test_few_pages_are_held_half_empty() -> None:
    """What is given up is whole pages: nine tenths of the cache go, a tenth of the pages stays.

    Evicting the least recently used blocks one by one, wherever they lie, would have left a block
    in nearly every page (kvcached held 4.6 times the packed floor; chosen by pages 1.4 times).
    """
    arena = arena_of(num_pages=104, kv_share=0.96)
    llm = arena.cache("llm", SIZE)
    waves = [[wave * 100 + i for i in range(40)] for wave in range(10)]
    for wave in waves:
        for which in wave:
            assert llm.allocate(which, tokens_of(1, which)) is not None
        for which in wave[::-1]:
            llm.free(which)
    live = [which for wave in waves for which in wave[::10]]
    for which in live:
        assert llm.allocate(which, [*tokens_of(1, which), 7]) is not None
    llm.resize(100)
    llm.apply()
    assert llm.pool.held <= 1.4 * llm.num_active / 4
    assert llm.num_active == 80
    arena.check()


def test_a_model_that_holds_more_than_its_share_moves_its_blocks_for_one_that_is_refused() -> None:
    """Lent pages that a few live blocks hold come back as soon as they are wanted."""
    arena = arena_of(policy=MarginalValue(), kv_share=0.5)
    llm, prm = arena.cache("llm", SIZE), arena.cache("prm", SIZE)
    for which in range(64):
        assert llm.allocate(which, [which] * 3) is not None
    for which in range(64):
        if which % 4:
            llm.free(which)
    assert llm.pool.held == 16
    assert not llm.apply(), "nobody wants them"
    assert prm.allocate(0, tokens_of(10, 0)) is None
    assert llm.apply()
    assert llm.pool.held == 10, "as many as were wanted, and no fewer than its share"
    assert len(llm.take_moves()) == 6
    assert prm.allocate(0, tokens_of(10, 0)) is not None
    arena.check()


@pytest.mark.parametrize("policy", [PhaseAware, MarginalValue])
def test_what_a_model_is_refused_below_its_keep_is_left_to_it(policy) -> None:
    """Guards it from a lender that takes back at once what it was made to give up."""
    arena = arena_of(policy=policy(), kv_share=0.5)
    llm, prm = arena.cache("llm", SIZE), arena.cache("prm", SIZE)
    number = refused = moved = 0
    long, short = list[int](), list[int]()
    for step in range(400):
        for _ in range(len(long) // 8):
            llm.free(long.pop(0))
        llm.apply()
        moved += len(llm.take_moves())
        number += 1
        while llm.allocate(number, tokens_of(1 + number % 5, number)) is not None:
            long.append(number)
            number += 1
        if short and step % 2:
            prm.free(short.pop(0))
        prm.apply()
        while len(short) < 5:  # of two pages each: its keep
            number += 1
            if prm.allocate(number, tokens_of(2, number)) is None:
                refused += 1
                break
            short.append(number)
        arena.check()
    assert prm.pool.held == 10
    assert refused < 40 and moved < 40


def test_a_call_that_was_cut_short_takes_no_split_back() -> None:
    """What a policy has learned stays, and what is asked for before the next step."""
    arena = arena_of(policy=MarginalValue(), kv_share=0.5)
    llm, prm = arena.cache("llm", SIZE), arena.cache("prm", SIZE)
    arena.policy.split([16, 4])
    llm.apply()
    arena._seen = []
    llm.apply()
    assert arena.target == {"llm": 16, "prm": 4}
    prm.recover()
    assert llm.room == 64
    llm.apply()
    assert arena.target == {"llm": 16, "prm": 4}


def test_pages_that_are_had_anyway_are_not_emptied_in_vain() -> None:
    """Idle pages above the keep can be leased: what lacks beyond them is freed in one step."""
    arena = arena_of(policy=MarginalValue(), kv_share=0.5)
    llm, prm = arena.cache("llm", SIZE), arena.cache("prm", SIZE)
    for which in range(64):  # those of the first four pages stay cached
        assert llm.allocate(which, [which] * (SIZE if which < 16 else 3)) is not None
    for which in range(64):
        if which < 16 or which % 4:
            llm.free(which)
    assert llm.pool.held == 16 and len(llm.pool.idle) == 4
    assert prm.allocate(0, tokens_of(10, 0)) is None
    assert llm.apply()
    llm.take_moves()
    assert prm.allocate(0, tokens_of(10, 0)) is not None
    arena.check()


@pytest.mark.parametrize(("slabs", "stripe"), [(1, 68), (1, 0), (2, -64), (0, 64)])
def test_a_page_that_would_be_cut_askew_is_refused(slabs: int, stripe: int) -> None:
    """Guards other models' blocks, over which zeroing would reach."""
    with pytest.raises(ConfigError, match="stripe a positive multiple of 64"):
        PageShape(slabs, stripe)


@pytest.mark.parametrize(
    ("models", "error", "message"),
    [
        ((LLM, LLM), ConfigError, "two models 'llm'; give each a name of its own"),
        ((LLM, BlockShape("wide", 2, 300)), ConfigError, "'wide' has blocks of 2 layers of 300"),
        ((LLM, BlockShape("greedy", 2, 256, floor_blocks=19)), OutOfMemory, "each model needs 21"),
        ((), ConfigError, "no models"),
    ],
)
def test_models_that_cannot_share_an_arena_are_refused(models, error, message: str) -> None:
    with pytest.raises(error, match=message):
        arena_of(models=models)


def test_a_model_has_one_cache() -> None:
    arena = arena_of()
    assert arena.cache("llm", SIZE) is arena.cache("llm", SIZE)
    with pytest.raises(ConfigError, match="'llm' has a cache already"):
        arena.cache("llm", SIZE, namespace=b"another model")
    with pytest.raises(ConfigError, match="no model 'nobody'"):
        arena.cache("nobody")


def test_a_resize_keeps_what_a_policy_has_learned() -> None:
    """Marginal value's pages are the split of now, whatever it was given at the start."""
    arena = arena_of(policy=MarginalValue(), models=(LLM, PRM, THIRD))
    arena.policy.split([13, 5, 2])
    llm = arena.cache("llm", SIZE)
    llm.allocate(0, [1])
    llm.apply()
    assert arena.target == {"llm": 13, "prm": 5, "third": 2}
    arena.cache("third", SIZE).resize(3)
    llm.apply()
    assert arena.target == {"llm": 12, "prm": 5, "third": 3}
    arena.check()


def test_a_policy_that_would_starve_a_model_is_refused() -> None:
    class Greedy(StaticSplit):
        def grants(self, models, num_pages: int) -> list[Grant]:
            return [Grant(0, 0, 0), Grant(num_pages, num_pages, num_pages)]

    with pytest.raises(ConfigError, match="Greedy grants 'llm' Grant"):
        arena_of(policy=Greedy())


# -- where blocks lie --

KIB = 1024
LLAMA_1B = BlockShape("llama-1b", 16, 32 * KIB, element_bytes=2)  # 512 KiB a block of 16 tokens
LLAMA_8B = BlockShape("llama-8b", 32, 64 * KIB, element_bytes=2)  # 2 MiB
QWEN_7B = BlockShape("qwen-prm-7b", 28, 32 * KIB, element_bytes=2)  # 896 KiB: 56 KiB a token
TINY = (BlockShape("solver", 4, 2 * KIB), BlockShape("prm", 4, 8 * KIB))
REFERENCE = (LLAMA_1B, LLAMA_8B, QWEN_7B)
GROUPS = [*combinations(REFERENCE, 2), REFERENCE, TINY, (LLAMA_8B,)]


def test_one_model_alone_has_pages_of_one_block_and_the_layout_of_its_own_cache() -> None:
    page = choose_page([LLAMA_8B])
    packing = pack(LLAMA_8B, page)
    assert (packing.blocks, packing.waste, packing.layers_per_stripe) == (1, 0, 1)
    elements = LLAMA_8B.cell_bytes // 2
    assert np.array_equal(packing.offsets(5), np.arange(5) * elements)
    assert np.array_equal(packing.layer_base(5), np.arange(32) * 5 * elements)


@pytest.mark.parametrize("models", GROUPS, ids=lambda models: "+".join(m.name for m in models))
def test_no_two_cells_of_a_chosen_page_overlap(models: tuple[BlockShape, ...]) -> None:
    """Each (block, layer) is its own stretch of the page's stripes, and little is wasted."""
    page, num_pages = choose_page(models), 3
    slab = num_pages * page.stripe
    for model in models:
        packing = pack(model, page)
        assert packing.blocks * model.block_bytes + packing.waste == page.page_bytes
        assert 0 <= packing.waste <= 0.05 * page.page_bytes
        base, offsets = packing.layer_base(num_pages), packing.offsets(num_pages)
        starts = np.add.outer(base, offsets) * model.element_bytes
        pages = np.array([block // packing.blocks for block in range(len(offsets))])
        inside = starts % slab - pages * page.stripe
        assert ((inside >= 0) & (inside + model.cell_bytes <= page.stripe)).all()
        assert starts.dtype == np.int64, "offsets pass 32 bits at 40 GiB"
        ordered = np.sort(starts.ravel())
        assert (np.diff(ordered) >= model.cell_bytes).all()
        assert ordered[-1] + model.cell_bytes <= page.slabs * slab
