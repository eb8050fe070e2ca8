"""A search is the same however memory, batch and streams are cut; memory moves between engines.

On a GPU the same laws hold in each precision, over compiled kernels, graphs and two streams.
"""

import gc
import random
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest

from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.engine.executor import Executor
from workbench.engine.memory import block_shape
from workbench.errors import ConfigError, OutOfMemory
from workbench.kvcache.arena import KVArena
from workbench.kvcache.policies import FirstCome, MarginalValue, PhaseAware, StaticSplit
from workbench.search.prm import PRM
from workbench.search.problems import load_problems
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch

MODELS = LLM, _ = "tiny-solver", "tiny-prm"
LIMITS: dict[str, Any] = {"max_model_len": 384, "max_num_seqs": 32, "max_num_batched_tokens": 512}
PARAMS = SamplingParams(temperature=0.8, max_tokens=60, seed=3, ignore_eos=True)
WHERE: dict[str, dict[str, str]] = {"cpu": {"device": "cpu"}} | {
    name: {"device": "cuda", "dtype": name} for name in ("bfloat16", "float16", "float32")
}
PLACES = [name if name == "cpu" else pytest.param(name, marks=pytest.mark.gpu) for name in WHERE]
CUTS: dict[str, dict[str, Any]] = {
    "short of memory": {"num_blocks": 26, "max_num_batched_tokens": 64},
    "blocks of 4": {"num_blocks": 2000, "block_size": 4},
    "partial blocks": {"num_blocks": 600, "reuse_partial_blocks": True},
    "few rows": {"num_blocks": 600, "max_num_seqs": 5},
}


def tree(engines: list[Engine], on_round: Any = None) -> pd.DataFrame:
    """Tokens and scores of every node of three problems' searches."""
    how = {"strategy": BeamSearch(n=8, beam_width=4, max_depth=5), "seed": 1, "on_round": on_round}
    pair = {"llm": engines[0], "prm": PRM(engines[1])}
    found = run_search(load_problems("tiny", limit=3), **pair, **how).tree
    columns = ["problem_id", "node_id", "token_ids", "score"]
    return found[columns].sort_values(columns[:2]).reset_index(drop=True)


def own(place: str, **settings: Any) -> list[Engine]:
    return [Engine(name, **{**LIMITS, **WHERE[place], **settings}) for name in MODELS]


def make_arena(place: str = "cpu", **settings: Any) -> KVArena:
    """Little larger than what both models are guaranteed."""
    longest = LIMITS["max_model_len"]
    shapes = [block_shape(name, max_model_len=longest, **WHERE[place]) for name in MODELS]
    return KVArena(384 * 1024 * shapes[0].element_bytes, shapes, **settings)


def shared(place: str = "cpu", **settings: Any) -> tuple[KVArena, list[Engine]]:
    arena = make_arena(place, **settings)
    return arena, [Engine(name, arena=arena, **LIMITS, **WHERE[place]) for name in MODELS]


@cache
def expected(place: str) -> pd.DataFrame:
    """The search in plenty of memory."""
    return tree(own(place, num_blocks=600))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("place", PLACES)
def test_a_search_is_the_same_however_it_is_cut(place: str, cut: str) -> None:
    """Preemption and eviction, other blocks, copied partial blocks, other batches."""
    engines = own(place, **CUTS[cut])
    assert tree(engines).equals(expected(place))
    done = [sum(getattr(each.cache.stats, n) for each in engines) > 0
            for n in ("evicted", "readmit_query_tokens", "copied")]  # fmt: skip
    assert done == [cut == "short of memory"] * 2 + [cut == "partial blocks"]


@pytest.mark.parametrize("policy", [StaticSplit, FirstCome, PhaseAware, MarginalValue])
@pytest.mark.parametrize("place", PLACES)
def test_a_search_in_an_arena_is_the_same_under_every_policy(place: str, policy: type) -> None:
    """Guards token identity and the arena's laws where memory is short and pages change hands."""
    arena, engines = shared(place, policy=policy(), kv_share=0.4 if policy.keeps_split else None)
    assert tree(engines, lambda _: arena.check()).equals(expected(place))
    assert all(engine.cache.num_active == 0 for engine in engines)


RESPLITS, EACH_STEP = 1000, 4


@pytest.mark.parametrize("policy", [StaticSplit, MarginalValue])
@pytest.mark.parametrize("place", PLACES)
def test_a_thousand_re_splits_change_no_token_and_leak_nothing(place: str, policy: type) -> None:
    """Four at random before every step of searches, until all were asked for; the laws hold."""
    arena, engines = shared(place, policy=policy())
    draw, outcomes = random.Random(0), Counter[str]()

    def resplit_then(step: Callable[[], Any]) -> Any:
        for _ in range(min(EACH_STEP, RESPLITS - outcomes.total())):
            outcomes[arena.resplit(draw.uniform(0.13, 0.49)).outcome] += 1
        return step()

    for engine in engines:
        engine.step = partial(resplit_then, engine.step)  # type: ignore[method-assign]
    while outcomes.total() < RESPLITS:
        assert tree(engines, lambda _: arena.check()).equals(expected(place))
    assert outcomes.keys() == {"reached", "later"}, "every one was accepted"
    assert outcomes.total() == RESPLITS
    assert arena.storage.bytes_zeroed > 0
    assert sum(engine.cache.stats.copied for engine in engines) > 0
    assert all(engine.cache.num_active == 0 for engine in engines)


@pytest.mark.parametrize("policy", [StaticSplit, FirstCome, PhaseAware, MarginalValue])
def test_what_engines_say_of_their_memory_adds_up_to_the_arena(policy: type) -> None:
    """Each its part of the split, also where it may borrow nearly everything."""
    arena, engines = shared(policy=policy())
    whole = arena.num_pages * arena.page.page_bytes
    parts = [engine.memory for engine in engines]
    assert [part.num_blocks for part in parts] == [engine.cache.room for engine in engines]
    assert 0.9 * whole < sum(part.kv for part in parts) <= whole
    for part in parts:
        assert part.total == part.weights + part.activations + part.other + part.kv


def test_a_cache_of_its_own_can_be_resized_while_requests_run() -> None:
    """Shrinking preempts nobody and waits for blocks; the trace shows target and actual."""
    prompts = [list(range(k, k + 40)) for k in range(6)]
    whole = Engine(LLM, num_blocks=256, **LIMITS).generate(prompts, PARAMS)
    engine = Engine(LLM, num_blocks=256, **LIMITS)
    for prompt in prompts:
        engine.add(prompt, PARAMS)
    outputs = engine.step()
    assert engine.cache.resize(23).refused
    answer = engine.cache.resize(24)
    while engine.has_work:
        outputs += engine.step()
        engine.cache.check()
    assert answer.target == 24
    found = {output.request_id: output.token_ids for output in outputs}
    assert [found[i] for i in range(6)] == [output.token_ids for output in whole]
    steps = engine.trace.steps
    assert (steps["blocks_target"].iloc[0], steps["blocks_target"].iloc[-1]) == (256, 24)
    assert steps["blocks_total"].iloc[-1] == 24


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_memory": "1MiB"}, "no memory of its own"),
        ({"max_model_len": 1024}, "guarantees 'tiny-solver' 24 blocks"),
        ({"block_size": 8, "max_model_len": 192}, "bytes a block and layer"),
        ({"arena_name": "llm"}, "no model 'llm'"),
    ],
)
def test_an_engine_that_does_not_fit_its_arena_is_refused(settings, message) -> None:
    """Guards the promise of a floor, and blocks read as another model's."""
    with pytest.raises(ConfigError, match=message):
        Engine(LLM, arena=make_arena(), **{**LIMITS, **settings})


def test_an_engine_that_could_not_be_made_leaves_its_name(monkeypatch) -> None:
    """Guards the next cell of a notebook, where the traceback keeps the first engine alive."""
    arena, full = make_arena(), Mock(side_effect=MemoryError("no room for buffers"))
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "record_steps", full)
        with pytest.raises((MemoryError, OutOfMemory)) as caught:
            Engine(LLM, arena=arena, **LIMITS)
    assert Engine(LLM, arena=arena, **LIMITS).generate([[5] * 4], PARAMS)
    assert caught.tb is not None


def test_two_engines_of_one_name_are_refused_while_both_live() -> None:
    """Once one is gone its name and what it held are free, whoever shares its weights."""
    arena, engines = shared()
    other = Engine(LLM, weights=engines[0].weights, num_blocks=24, **LIMITS)
    with pytest.raises(ConfigError, match="already; give each its own name"):
        Engine(LLM, arena=arena, **LIMITS)
    engines[0].add([5] * 40, PARAMS)
    engines[0].step()
    assert engines[0].cache.num_active > 0
    engines.clear()
    gc.collect()
    second = Engine(LLM, arena=arena, **LIMITS)
    assert second.cache.num_active == 0
    same = [other.generate([[5] * 40], PARAMS), second.generate([[5] * 40], PARAMS)]
    assert same[0][0].token_ids == same[1][0].token_ids
    arena.check()
