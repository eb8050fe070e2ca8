"""What an arena costs: re-splitting it while blocks are in use, and serving one model from it.

resplit_p95_ms: at 10,000 blocks of the tiny pair, all pages held and a quarter of the blocks live,
scattered; timed is all that a re-split does until both models have their pages and bytes lie where
blocks are: grants, victims, moves, copies. Not the zeroing of pages that change hands, which is
done when their new holder first takes them. Only re-splits that move at least a tenth of the pages
count. arena_vs_dedicated: the same requests by an engine in an arena and by one with a pool
of its own of as many blocks, step by step in turns, the order alternated. What it does not do:
search.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from statistics import fmean, median, quantiles
from time import perf_counter
from typing import Any

from workbench.bench.record import Row
from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.engine.memory import block_shape
from workbench.experiments.statistics import median_interval
from workbench.kvcache.arena import KVArena
from workbench.kvcache.manager import KVCacheManager
from workbench.kvcache.policies import StaticSplit

LLM, PRM = "tiny-solver", "tiny-prm"
PAGES = 4000  # half of them 8,000 blocks of the LLM, the other half 2,000 of the PRM
LEAST_MOVED = 0.1  # of the pages
SEQUENCE = 1  # blocks of each: live ones lie in every page
LIVE_EVERY = 4  # one sequence in so many stays in use
RESPLITS = {"quick": 8, "default": 40, "full": 200}
PAIRS = {"quick": 9, "default": 101, "full": 201}
PROMPTS = {"quick": 8, "default": 32, "full": 64}
BLOCKS = 2048  # of the model alone


def rows(profile: str, seed: int = 0) -> Iterator[Row]:
    """Re-splits and overhead."""
    yield from resplit_rows(RESPLITS[profile], seed)
    yield from overhead_rows(PAIRS[profile], PROMPTS[profile], seed)


# -- re-splits --


class FullArena:
    """Two engines' caches over one memory, all pages held."""

    def __init__(self, num_pages: int = PAGES, seed: int = 0) -> None:
        shapes = [block_shape(model, max_model_len=256) for model in (LLM, PRM)]
        pages = KVArena("16MiB", shapes, StaticSplit()).page.page_bytes
        self.arena = KVArena(num_pages * pages, shapes, StaticSplit(), 0.5)
        limits: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8}
        self.engines = [Engine(model, arena=self.arena, **limits) for model in (LLM, PRM)]
        self.arena.storage.bytes.zero_()  # the system has handed out every page of a full memory
        self.random = random.Random(seed)
        self._next = 0
        self._live: list[tuple[KVCacheManager, int]] = []

    @property
    def num_blocks(self) -> int:
        """Of both models, at the split of now."""
        return sum(pool.grant.target * pool.per_page for pool in self.arena.pools)

    def fill(self) -> None:
        """New content everywhere; of every few sequences one stays in use."""
        for cache, number in self._live:
            cache.free(number)
        self._live = []
        for engine in self.engines:
            self._fill(engine.cache)
        self.settle()

    def _fill(self, cache: KVCacheManager) -> None:
        cache.apply()
        count = (cache.num_free + cache.num_cached) // SEQUENCE
        vocab, size = self.engines[0].spec.vocab, cache.block_size * SEQUENCE
        numbers = range(self._next, self._next + count)
        self._next += count
        for number in numbers:
            tokens = [self.random.randrange(vocab) for _ in range(size)]
            assert cache.allocate(number, tokens) is not None
        kept = set(numbers[::LIVE_EVERY])
        for number in self.random.sample(numbers, count):  # blocks come free in no order
            if number not in kept:
                cache.free(number)
        self._live += [(cache, number) for number in kept]

    def settle(self) -> None:
        """What engines do between steps: both caches, then the bytes."""
        for engine in self.engines:
            engine.cache.apply()
        self.arena.storage.settle()

    def resplit(self, kv_share: float) -> tuple[float, int]:
        """Seconds until every page and byte is where the split wants it; bytes copied."""
        copied = self.arena.storage.bytes_copied
        start = perf_counter()
        asked = self.arena.resplit(kv_share).target
        self.settle()
        spent = perf_counter() - start
        for pool, most in zip(self.arena.pools, (asked, self.arena.num_pages - asked)):
            assert pool.held <= most, f"{pool.shape.name} holds more than its split"
        return spent, self.arena.storage.bytes_copied - copied


def resplit_rows(count: int, seed: int = 0, num_pages: int = PAGES) -> Iterator[Row]:
    """resplit_p95_ms, and the bytes that a re-split copies on average."""
    full = FullArena(num_pages, seed)
    blocks, share = full.num_blocks, 0.5
    seconds, copied = [], []
    for number in range(-2, count):
        full.fill()
        share = (0.7, 0.3)[number] if number < 0 else _another(full.random, share)
        spent, moved = full.resplit(share)
        full.arena.check()
        if number >= 0:  # the first two are a warm-up, the second of them copies
            seconds.append(1000 * spent)
            copied.append(float(moved))
    p95 = quantiles(seconds, n=20, method="inclusive")[-1]
    yield Row("resplit_p95_ms", p95, "ms", repeats=count, spread=(min(seconds), max(seconds)))
    yield Row("resplit_median_ms", median(seconds), "ms", repeats=count)
    spread = (min(copied), max(copied))
    yield Row("resplit_copied_bytes", fmean(copied), "B", repeats=count, spread=spread)
    yield Row("resplit_blocks", blocks, "blocks", repeats=1)


def _another(draw: random.Random, share: float) -> float:
    """A share that is at least LEAST_MOVED away, in the middle of the axis."""
    found = share
    while abs(found - share) < LEAST_MOVED:
        found = draw.uniform(0.3, 0.7)
    return found


# -- one model --


def overhead_rows(pairs: int, prompts: int, seed: int = 0) -> Iterator[Row]:
    """arena_vs_dedicated: median of the paired ratios; _low: lower end of its 95 % interval."""
    shape = block_shape(LLM)
    arena = KVArena(BLOCKS * shape.block_bytes, [shape], StaticSplit())
    engines = {
        "arena": Engine(LLM, arena=arena),
        "dedicated": Engine(LLM, num_blocks=BLOCKS),
    }
    draw = random.Random(seed)
    asked = [[draw.randrange(3, 300) for _ in range(128)] for _ in range(prompts)]
    seconds: dict[str, list[float]] = {"arena": [], "dedicated": []}
    for number in range(pairs + 1):
        for name, spent in _seconds(engines, asked, first=number % 2).items():
            if number:
                seconds[name].append(spent)
    ratios = [theirs / ours for ours, theirs in zip(seconds["arena"], seconds["dedicated"])]
    found = median_interval(ratios)
    tokens = 64 * prompts
    ours, theirs = (tokens / median(seconds[name]) for name in ("arena", "dedicated"))
    peer = "a pool of its own"
    yield Row(
        "arena_vs_dedicated",
        ours,
        "tokens/s",
        peer,
        theirs,
        ratio=found.estimate,
        repeats=len(ratios),
        spread=(found.low, found.high),
    )
    yield Row("arena_vs_dedicated_low", found.low, "x", repeats=len(ratios))


def _seconds(
    engines: dict[str, Engine], prompts: list[list[int]], first: int = 0
) -> dict[str, float]:
    """Of each engine for all prompts. They take turns, step by step: the machine's pace varies."""
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    for engine in engines.values():
        engine.cache.reset()
        for prompt in prompts:
            engine.add(prompt, params)
    seconds, names = dict.fromkeys(engines, 0.0), list(engines)
    while engines[names[0]].has_work:
        for name in names[first:] + names[:first]:
            start = perf_counter()
            engines[name].step()
            seconds[name] += perf_counter() - start
        first = 1 - first
    return seconds
