"""What nobody will ask for again is given up at once, and nothing else is."""

import pytest

from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.kvcache.arena import KVArena
from workbench.kvcache.manager import KVCacheManager
from workbench.kvcache.pages import BlockShape

PROMPT = list(range(100, 108))  # two blocks of four
ONE, OTHER = [*PROMPT, 1, 2, 3, 4, 5, 6], [*PROMPT, 7, 8, 9, 10, 11, 12]


def caches() -> list[KVCacheManager]:
    """A cache of its own, and one in an arena."""
    shape = BlockShape("llm", layers=2, cell_bytes=64, element_bytes=4, floor_blocks=4)
    arena = KVArena(4096, [shape])
    own = KVCacheManager(32, 4, reuse_partial_blocks=True)
    return [own, arena.cache("llm", block_size=4, reuse_partial_blocks=True)]


def left(cache: KVCacheManager) -> None:
    """Two sequences with a common prompt that were computed and are gone."""
    for number, tokens in enumerate((ONE, OTHER)):
        assert cache.allocate(number, tokens) is not None
        cache.free(number, token_ids=tokens)


@pytest.mark.parametrize("cache", caches())
def test_what_is_kept_can_be_hit_and_the_rest_cannot(cache) -> None:
    """A dropped beam goes, its last, partly filled block too; what a kept one shares stays."""
    left(cache)
    assert cache.num_cached == 6, "the prompt's two blocks, and a full one and a tail of each"
    assert cache.forget([ONE], kept=[OTHER]) == 2
    cache.check()
    assert cache.num_cached == 4
    assert cache.match([*ONE, 0]) == len(PROMPT)
    assert cache.match([*OTHER, 0]) == len(OTHER)
    assert cache.forget([ONE, OTHER], kept=[PROMPT]) == 2
    assert cache.match([*OTHER, 0]) == len(PROMPT)
    cache.check()


@pytest.mark.parametrize("cache", caches())
def test_blocks_in_use_stay(cache) -> None:
    """Whoever runs keeps what it reads, whatever others say about it."""
    left(cache)
    assert cache.allocate(9, [*ONE, 0]) is not None
    cache.take_moves()
    forgotten = cache.forget([ONE])
    assert forgotten == 1, "the tail, of which the one that runs has its own copy"
    assert cache.match([*ONE[:12], 0]) == 12
    cache.check()


def test_what_is_forgotten_is_no_eviction_and_a_wrong_guess_is_a_thrash() -> None:
    """A cache that made room by itself is told from one that was told; asking again is counted."""
    cache = caches()[0]
    left(cache)
    cache.forget([ONE])
    assert cache.stats.evicted == 0
    assert cache.allocate(9, [*ONE, 0]) is not None
    assert cache.stats.thrashed == 3


def test_an_engine_forgets_and_its_tokens_stay() -> None:
    """The prompt is computed again, to the same tokens."""
    engine = Engine("tiny-solver", num_blocks=64, max_model_len=256)
    prompt = list(range(10, 60))
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    first = engine.generate([prompt], greedy)[0]
    assert engine.forget([[*prompt, *first.token_ids]]) == 3
    again = engine.generate([prompt], greedy)[0]
    assert again.num_cached_tokens == 0
    assert again.token_ids == first.token_ids
