"""Partial blocks reused by real engines: fewer tokens are computed, and every token is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.engine.test_shared import LIMITS, LLM, PRM_NAME, tree
from workbench.core import SamplingParams
from workbench.engine.engine import Engine

REUSE: dict[str, Any] = {"reuse_partial_blocks": True}


def own(**settings: Any) -> list[Engine]:
    return [Engine(name, **LIMITS | settings) for name in (LLM, PRM_NAME)]


def prefilled(engine: Engine) -> int:
    return int(engine.trace.steps["prefill_tokens"].sum())


@pytest.fixture(scope="module")
def expected() -> pd.DataFrame:
    """The search without the switch, in plenty of memory."""
    return tree(*own(kv_memory="16MiB"))


def test_a_search_recomputes_nothing_and_samples_the_same(expected: pd.DataFrame) -> None:
    """In plenty of memory no token of a parent is computed by its children."""
    llm, prm = own(kv_memory="16MiB", **REUSE)
    assert tree(llm, prm).equals(expected)
    for engine in (llm, prm):
        assert engine.cache.stats.copied > 0
        assert engine.executor.storage.bytes_copied > 0
        engine.cache.check()


def test_of_a_text_scored_again_the_last_token_alone_is_computed() -> None:
    """Its logits are wanted; they have the same bits as when all of the text was computed."""
    engine = Engine(PRM_NAME, num_blocks=64, **LIMITS, **REUSE)
    text = engine.tokenizer.encode("What is 12 + 30? Answer in steps.")
    assert len(text) % 16 > 2, "the last block is to be partly filled"
    last = len(text) - 1
    first = engine.score(text, [last], [5, 6]).logits
    before = prefilled(engine)
    again = [engine.add_score(text, [last], [5, 6]) for _ in range(4)]
    outputs = engine.step()
    assert sorted(output.request_id for output in outputs) == again
    assert all(np.array_equal(output.logits, first) for output in outputs)
    assert all(output.num_cached_tokens == last for output in outputs)
    assert prefilled(engine) - before == 4
    earlier = engine.score(text, [last - 1, last], [5, 6])
    assert earlier.num_cached_tokens == last - 1, "the first wanted position is computed again"


def test_a_conversation_goes_on_from_the_token_where_it_stopped() -> None:
    """What was sampled is found again up to the last token, which nothing was computed from."""
    engine = Engine(LLM, num_blocks=64, **LIMITS, **REUSE)
    params = SamplingParams(max_tokens=21, ignore_eos=True)
    prompt = engine.tokenizer.encode("What is 7 * 8?")
    whole = [*prompt, *engine.generate([prompt], params)[0].token_ids]
    found = engine.generate([whole], params)[0]
    assert found.num_cached_tokens == len(whole) - 1
    plain = Engine(LLM, num_blocks=64, **LIMITS)
    assert found.token_ids == plain.generate([whole], params)[0].token_ids
