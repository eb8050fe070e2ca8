"""Two engines in one arena: memory moves between them while they run, and their tokens never do."""

from __future__ import annotations

import gc
import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import pytest

from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.engine.memory import block_shape
from workbench.errors import ConfigError
from workbench.kvcache.arena import KVArena
from workbench.kvcache.policies import FirstCome, MarginalValue, PhaseAware, StaticSplit
from workbench.search.prm import PRM
from workbench.search.problems import load_problems
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch

LLM, PRM_NAME = "tiny-solver", "tiny-prm"
LIMITS: dict[str, Any] = {"max_model_len": 768, "max_num_seqs": 32, "max_num_batched_tokens": 512}
PARAMS = SamplingParams(temperature=0.8, max_tokens=60, seed=3, ignore_eos=True)


def make_arena(memory: str = "4MiB", **settings: Any) -> KVArena:
    shapes = [block_shape(name, max_model_len=768) for name in (LLM, PRM_NAME)]
    return KVArena(memory, shapes, **settings)


def tree(llm: Engine, prm: Engine, on_round: Any = None) -> pd.DataFrame:
    """Tokens and scores of every node of a small search."""
    strategy = BeamSearch(n=8, beam_width=4, max_depth=5)
    problems = load_problems("tiny", limit=3)
    found = run_search(
        problems, llm=llm, prm=PRM(prm), strategy=strategy, seed=1, on_round=on_round
    ).tree
    columns = ["problem_id", "node_id", "token_ids", "score"]
    return found[columns].sort_values(columns[:2]).reset_index(drop=True)


@pytest.fixture(scope="module")
def expected() -> pd.DataFrame:
    """The search on engines with plenty of memory of their own."""
    return tree(*(Engine(name, kv_memory="16MiB", **LIMITS) for name in (LLM, PRM_NAME)))


@pytest.mark.parametrize("policy", [StaticSplit, FirstCome, PhaseAware, MarginalValue])
def test_a_search_in_an_arena_is_the_same_under_every_policy(
    policy: type, expected: pd.DataFrame
) -> None:
    """Guards token identity and the arena's laws where memory is short and pages change hands."""
    arena = make_arena(policy=policy(), kv_share=0.3 if policy.keeps_split else None)
    engines = [Engine(name, arena=arena, **LIMITS) for name in (LLM, PRM_NAME)]
    assert tree(*engines, on_round=lambda _: arena.check()).equals(expected)
    assert all(engine.cache.num_active == 0 for engine in engines)


def test_resplitting_from_another_thread_changes_no_token(expected: pd.DataFrame) -> None:
    """Shares drawn at random all through a search: live blocks move, and every token stays."""
    arena = make_arena(policy=StaticSplit(), kv_share=0.5)
    engines = [Engine(name, arena=arena, **LIMITS) for name in (LLM, PRM_NAME)]
    done, outcomes, draw = threading.Event(), set(), random.Random(0)

    def shake() -> None:
        while not done.wait(0.002):
            outcomes.add(arena.resplit(draw.uniform(0.2, 0.8)).outcome)

    thread = threading.Thread(target=shake)
    thread.start()
    try:
        found = tree(*engines)
    finally:
        done.set()
        thread.join()
    arena.check()
    assert found.equals(expected)
    assert "reached" in outcomes


RESPLITS, EACH_STEP = 1000, 4


@pytest.mark.parametrize("policy", [StaticSplit, MarginalValue])
def test_a_thousand_re_splits_change_no_token_and_leak_nothing(
    policy: type, expected: pd.DataFrame
) -> None:
    """Four at random before every step of searches, until all were asked for; the laws hold."""
    short = {**LIMITS, "max_model_len": 384}
    shapes = [block_shape(name, max_model_len=384) for name in (LLM, PRM_NAME)]
    arena = KVArena("1536KiB", shapes, policy())
    engines = [Engine(name, arena=arena, **short) for name in (LLM, PRM_NAME)]
    draw, outcomes = random.Random(0), Counter[str]()

    def resplit_then(step: Callable[[], Any]) -> Any:
        for _ in range(min(EACH_STEP, RESPLITS - outcomes.total())):
            outcomes[arena.resplit(draw.uniform(0.13, 0.49)).outcome] += 1
        return step()

    for engine in engines:
        engine.step = partial(resplit_then, engine.step)  # type: ignore[method-assign]
    while outcomes.total() < RESPLITS:
        assert tree(*engines, on_round=lambda _: arena.check()).equals(expected)
    assert outcomes.keys() == {"reached", "later"}, "every one was accepted"
    assert outcomes.total() == RESPLITS
    assert arena.storage.bytes_zeroed > 0
    assert arena.storage.bytes_copied > 0
    assert all(engine.cache.num_active == 0 for engine in engines)
    arena.check()


def test_a_cache_of_its_own_can_be_resized_while_requests_run() -> None:
    """Shrinking preempts nobody and waits for blocks; the trace shows target and actual."""
    prompts = [list(range(k, k + 40)) for k in range(6)]
    whole = Engine(LLM, num_blocks=256, **LIMITS).generate(prompts, PARAMS)
    engine = Engine(LLM, num_blocks=256, **LIMITS)
    for prompt in prompts:
        engine.add(prompt, PARAMS)
    outputs = engine.step()
    assert engine.cache.resize(47).refused
    answer = engine.cache.resize(48)
    while engine.has_work:
        outputs += engine.step()
        engine.cache.check()
    assert (answer.outcome, answer.target) == ("reached", 48)
    found = {output.request_id: output.token_ids for output in outputs}
    assert [found[i] for i in range(6)] == [output.token_ids for output in whole]
    steps = engine.trace.steps
    assert (steps["blocks_target"].iloc[0], steps["blocks_target"].iloc[-1]) == (256, 48)
    assert steps["blocks_total"].iloc[-1] == 48


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_memory": "1MiB"}, "no memory of its own"),
        ({"max_model_len": 1024}, "guarantees 'tiny-solver' 48 blocks"),
        ({"block_size": 8, "max_model_len": 384}, "bytes a block and layer"),
        ({"arena_name": "llm", "max_model_len": 768}, "no model 'llm'"),
    ],
)
def test_an_engine_that_does_not_fit_its_arena_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    """Guards the promise of a floor, and blocks read as another model's."""
    with pytest.raises(ConfigError, match=message):
        Engine(LLM, arena=make_arena(), **{"max_model_len": 768, **settings})


def test_two_engines_of_one_name_are_refused_while_both_live() -> None:
    """Guards one table of requests a cache; a name is free again once its engine is gone, and what
    its requests held, too.
    """
    arena = make_arena()
    first = Engine(LLM, arena=arena, **LIMITS)
    with pytest.raises(ConfigError, match="already; give each its own name"):
        Engine(LLM, arena=arena, **LIMITS)
    first.add([5] * 40, PARAMS)
    first.step()
    assert first.cache.num_active > 0
    del first
    gc.collect()
    second = Engine(LLM, arena=arena, **LIMITS)
    assert second.cache.num_active == 0
    assert second.generate([[5] * 40], PARAMS)
    arena.check()
