"""Engines on a GPU say what they say however memory, batch and streams are cut.

The same laws as elsewhere, on the device: in half precision, over compiled kernels, graphs, and two
streams. They run on a CPU too, which shows that the tests themselves are right.
"""

from __future__ import annotations

from functools import cache
from itertools import cycle
from typing import Any

import pandas as pd
import pytest
import torch

from tests.engine.test_parity import chats, first_difference, random_model
from tests.models.test_parity import NEAR_TIE
from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.engine.memory import block_shape
from workbench.errors import OutOfMemory
from workbench.kvcache.arena import KVArena
from workbench.kvcache.policies import FirstCome, StaticSplit
from workbench.search.prm import PRM
from workbench.search.problems import load_problems
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch

MODELS = ("tiny-solver", "tiny-prm")
LIMITS: dict[str, Any] = {"max_model_len": 384, "max_num_seqs": 12, "max_num_batched_tokens": 256}
WHERE: dict[str, dict[str, str]] = {
    "cpu": {"device": "cpu"},
    "bfloat16": {"device": "cuda", "dtype": "bfloat16"},
    "float16": {"device": "cuda", "dtype": "float16"},
    "float32": {"device": "cuda", "dtype": "float32"},
}
PLACES = [name if name == "cpu" else pytest.param(name, marks=pytest.mark.gpu) for name in WHERE]
CUTS: dict[str, dict[str, Any]] = {
    "short of memory": {"num_blocks": 26, "max_num_batched_tokens": 64},
    "blocks of 4": {"num_blocks": 2000, "block_size": 4},
    "partial blocks": {"num_blocks": 600, "reuse_partial_blocks": True},
    "few rows": {"num_blocks": 600, "max_num_seqs": 5},
}


def search(engines: list[Engine], on_round: Any = None, **switches: Any) -> pd.DataFrame:
    """Tokens and scores of every node of two problems' searches."""
    found = run_search(
        load_problems("tiny", limit=2),
        llm=engines[0],
        prm=PRM(engines[1]),
        strategy=BeamSearch(n=8, beam_width=4, max_depth=4),
        seed=1,
        min_problem_batch=2,
        on_round=on_round,
        **switches,
    ).tree
    columns = ["problem_id", "node_id", "token_ids", "score"]
    return found[columns].sort_values(columns[:2]).reset_index(drop=True)


def own(place: str, **settings: Any) -> list[Engine]:
    return [Engine(name, **{**LIMITS, **WHERE[place], **settings}) for name in MODELS]


def shared(place: str, policy: Any) -> tuple[KVArena, list[Engine]]:
    shapes = [
        block_shape(name, max_model_len=LIMITS["max_model_len"], **WHERE[place]) for name in MODELS
    ]
    size = 384 * 1024 * shapes[0].element_bytes  # little more than what both are guaranteed
    arena = KVArena(size, shapes, policy=policy, kv_share=0.4 if policy.keeps_split else None)
    return arena, [Engine(n, arena=arena, **LIMITS, **WHERE[place]) for n in MODELS]


@cache
def expected(place: str) -> pd.DataFrame:
    """The search in plenty of memory."""
    return search(own(place, num_blocks=600))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("place", PLACES)
def test_a_search_is_the_same_however_it_is_cut(place: str, cut: str) -> None:
    """Preemption and eviction, other blocks, copied partial blocks, other batches."""
    assert search(own(place, **CUTS[cut])).equals(expected(place))


@pytest.mark.parametrize("place", PLACES)
def test_two_engines_in_one_arena(place: str) -> None:
    """Pages change hands, and are re-split between rounds; every token and score stays."""
    arena, engines = shared(place, FirstCome())
    assert search(engines, lambda _: arena.check()).equals(expected(place))
    arena, engines = shared(place, StaticSplit())
    shares = cycle([0.2, 0.45])

    def shake(_: object) -> None:
        answer = arena.resplit(next(shares))
        assert not answer.refused, answer.reason

    assert search(engines, shake).equals(expected(place))
    assert arena.storage.bytes_zeroed > 0


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [True, False], ids=["invariant", "fast"])
def test_the_mode_chooses_the_kernels(batch_invariant: bool) -> None:
    """Fixed tiles or the fastest; the engine's name for its arithmetic says which."""
    engine = Engine("tiny-solver", num_blocks=64, max_model_len=64, device="cuda",
                    batch_invariant=batch_invariant)  # fmt: skip
    kernels = engine.executor.model.kernels
    assert (kernels.name, kernels.batch_invariant) == ("triton", batch_invariant)
    assert engine.fingerprint.endswith("invariant" if batch_invariant else "fast")
    assert engine.memory.other > 0


@pytest.mark.parametrize("place", ["cpu", pytest.param("float32", marks=pytest.mark.gpu)])
def test_greedy_tokens_of_a_random_llama_equal_transformers(
    place: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A first difference only where the peer's best two are a near tie."""
    folder = tmp_path_factory.mktemp("random")
    peer = random_model(folder).to(WHERE[place]["device"])
    engine = Engine(str(folder), num_blocks=400, max_model_len=512, **WHERE[place])
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = chats(engine)[:8]
    answers = [output.token_ids for output in engine.generate(prompts, params)]
    gaps = [first_difference(peer, *pair) for pair in zip(prompts, answers, strict=True)]
    assert all(gap is None or gap < NEAR_TIE for gap in gaps)
    assert sum(gap is None for gap in gaps) >= 7


@pytest.mark.gpu
def test_a_gpu_that_is_too_small_is_told_with_numbers() -> None:
    """Before anything is allocated."""
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(OutOfMemory, match=r"a KV cache of .* is asked for; cuda.* are free"):
        Engine("tiny-solver", device="cuda", kv_memory=2 * total)
