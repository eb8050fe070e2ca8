"""The thesis's pair as a search without models sees it: prompts, templates, limits, engines.

Llama-3.2-1B-Instruct asked as search-and-learn asks it, judged by an 8B PRM in RLHFlow's form. What
it does not do: say how long anything is that a model writes (workload.py, completions.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from workbench.config import EngineConfig
from workbench.replay.growth import PRMTemplate, Tokens, grown_recording
from workbench.search.recording import RecordedProblem, Recording
from workbench.search.strategies import BeamSearch

LLM, PRM = "llama-3.2-1b", "llama-3.1-8b-prm"
VOCABULARY = 128_000  # of Llama 3, special tokens left out
MAX_MODEL_LEN = 4096
IN_FLIGHT = 48  # 768 beams of n = 16, three times max_num_seqs, as 12 problems are on the tiny rung

PROMPT_HEAD, PROMPT_TAIL = 154, 5
"""Llama 3.2's chat template with search-and-learn's system prompt and a date, around a problem."""
PRM_HEAD, PRM_VERDICT, PRM_BETWEEN, PRM_DROPPED = 30, 5, 6, 1
"""RLHFlow's chat in Llama 3.1's template; a step's last token is its blank line."""
PLUS, MINUS = 10, 12  # verdict columns: "+" and "-"


def recording_of(
    problems: Sequence[RecordedProblem], strategy: BeamSearch, seed: int = 0
) -> Recording:
    """Grown problems as a search of the 1B + 8B pair, with the thesis profile's limits."""
    limits: dict[str, Any] = {
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "dtype": "bfloat16",
    }
    llm, prm = (
        EngineConfig(model, num_blocks=blocks, max_model_len=MAX_MODEL_LEN, **limits)
        for model, blocks in ((LLM, 19_000), (PRM, 6_500))  # about a share of 0.3 of 40 GiB
    )
    return grown_recording(
        problems,
        strategy,
        llm=llm,
        prm=prm,
        prm_format="rlhflow",
        prm_columns=(PLUS, MINUS),
        in_flight=IN_FLIGHT,
        seed=seed,
        max_step_tokens=2048,
    )


def prompt_of(problem: Tokens) -> Tokens:
    """The LLM's prompt around a problem's tokens."""
    return _fixed("prompt", PROMPT_HEAD) + problem + _fixed("answer", PROMPT_TAIL)


def prm_template() -> PRMTemplate:
    """What RLHFlow's chat puts around steps."""
    return PRMTemplate(
        _fixed("prm", PRM_HEAD),
        _fixed("verdict", PRM_VERDICT),
        (PLUS, *_fixed("between", PRM_BETWEEN - 1)),
        PRM_DROPPED,
    )


def drawn_tokens(draws: random.Random, count: int) -> Tokens:
    """`count` token ids that no others begin with: three are drawn, the rest counts on."""
    drawn = [draws.randrange(VOCABULARY) for _ in range(min(3, count))]
    return (*drawn, *((drawn[-1] + k) % VOCABULARY for k in range(1, count - 2)))


def _fixed(name: str, count: int) -> Tokens:
    return drawn_tokens(random.Random(name), count)
