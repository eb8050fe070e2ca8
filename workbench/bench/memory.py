"""What an arena costs: arena_vs_dedicated, the same requests by engines in an arena and by others
with pools of their own, of as many blocks, step by step in turns.

How two models share one memory best is the study of notebook 08 (experiments/study.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from time import perf_counter

from workbench.bench.record import Row, median_row
from workbench.bench.search import TINY, TINY_PRM
from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.engine.memory import block_shape
from workbench.experiments.statistics import median_interval
from workbench.kvcache.arena import KVArena
from workbench.kvcache.policies import MarginalValue

MODE = {"batch_invariant": True, "block_size": 16}
PROFILES = {"quick": (9, 8), "default": (101, 32), "full": (201, 64)}  # pairs, prompts of each
BLOCKS = 2048  # of one model alone


def run(profile: str = "default", seed: int = 0) -> Iterator[Row]:
    """The rows of `workbench bench memory`: arena_vs_dedicated, the median of the paired ratios,
    and _low, the lower end of its 95 % interval.

    Both sides take turns, step by step: the machine's pace varies. The LLM of the embedded pair
    samples while the PRM scores, in one arena of the default policy or with a pool each. Prompts
    are new each time and nothing is emptied, as a search or a server goes on.
    """
    pairs, prompts = PROFILES[profile]
    models, draw = (TINY, TINY_PRM), random.Random(seed)
    shapes = [block_shape(each) for each in models]
    arena = KVArena(sum(BLOCKS * shape.block_bytes for shape in shapes), shapes, MarginalValue())
    sides = [Engine(m, arena=arena) for m in models], [Engine(m, num_blocks=BLOCKS) for m in models]
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    every = []  # [seconds of each side], the first a warm-up
    for number in range(pairs + 1):
        for _ in range(prompts):
            prompt = [draw.randrange(3, 300) for _ in range(128)]
            for llm, prm in sides:
                llm.add(prompt, params)
                prm.add_score(prompt, range(7, len(prompt), 8), (0, 1))
        seconds, first = [0.0, 0.0], number % 2
        while any(engine.has_work for engine in chain(*sides)):
            for which in (first, 1 - first):
                start = perf_counter()
                for engine in sides[which]:
                    if engine.has_work:
                        engine.step()
                seconds[which] += perf_counter() - start
            first = 1 - first
        every.append(seconds)
    ours, theirs = ([64 * prompts / spent for spent in each] for each in zip(*every[1:]))
    row = median_row("arena_vs_dedicated", ours, "tokens/s", peer="a pool of its own", peers=theirs)
    found = median_interval([mine / other for mine, other in zip(ours, theirs)])
    yield replace(row, spread=(found.low, found.high))
    yield Row("arena_vs_dedicated_low", found.low, "x", repeats=pairs)
