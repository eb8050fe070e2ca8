"""What is saved by going on within partly filled blocks: the same search with and without.

fork_prm_over_ideal: tokens the PRM computes over the distinct ones of its inputs, which somebody
must compute; a problem's own, so that the beginning which the inputs of all problems share can make
it less than 1. fork_llm_recomputed: tokens the generator computes a second time, over those it
samples. A search's beams start once their parent has left, so what is forked is the copy of its
last block that a hit makes. The peer is the same pair with whole blocks only; memory is roomy, so
that nothing else is lost. What it does not do: time anything, for the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from workbench.bench import search
from workbench.bench.record import Row
from workbench.bench.rows import interval_row
from workbench.engine.engine import Engine
from workbench.errors import WorkbenchError
from workbench.experiments.statistics import bootstrap_ratio
from workbench.search.prm import PRM
from workbench.search.problems import Problem, load_problems
from workbench.search.result import SearchResult
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch

PROBLEMS = 16
PEER = "reuse_partial_blocks=False"
AGAIN = ["recomputed_tokens_evicted", "recomputed_tokens_preempted", "recomputed_tokens_partial"]


def rows(limit: int = PROBLEMS, seed: int = 0) -> Iterator[Row]:
    """The two rows, over the first `limit` tiny problems; n=16, beam width 4."""
    problems = load_problems("tiny", limit=limit)
    whole, partial = (searched(problems, reuse, seed) for reuse in (False, True))
    if not whole.tree["token_ids"].map(list).equals(partial.tree["token_ids"].map(list)):
        raise WorkbenchError(
            "The search samples other tokens when partial blocks are reused; the rows would "
            "compare two different searches. Run `workbench bench identity`."
        )
    yield _prm_over_ideal(whole.problems, partial.problems)
    before, after = (_recomputed(found) for found in (whole, partial))
    yield Row("fork_llm_recomputed", after, "fraction", PEER, before, repeats=1)


def searched(problems: list[Problem], reuse_partial_blocks: bool, seed: int) -> SearchResult:
    """Beam search of the tiny pair in roomy memory."""
    settings: dict[str, Any] = {"num_blocks": search.BLOCKS, "max_num_seqs": 256}
    llm, prm = (
        Engine(name, **settings, reuse_partial_blocks=reuse_partial_blocks)
        for name in ("tiny-solver", "tiny-prm")
    )
    strategy = BeamSearch(n=search.N, beam_width=search.BEAM_WIDTH, max_depth=search.MAX_DEPTH)
    return run_search(
        problems,
        llm=llm,
        prm=PRM(prm),
        strategy=strategy,
        seed=seed,
        min_problem_batch=search.IN_FLIGHT,
        temperature=0.8,
    )


def _prm_over_ideal(whole: pd.DataFrame, partial: pd.DataFrame) -> Row:
    before, after = (
        bootstrap_ratio(
            done["prm_tokens_computed"],
            done["prm_tokens_distinct"],
            done["problem_id"].tolist(),
        )
        for done in (whole, partial)
    )
    row = interval_row("fork_prm_over_ideal", after, "x", 1)
    ratio = before.estimate / after.estimate
    return Row(row.name, row.value, row.unit, PEER, before.estimate, ratio, spread=row.spread)


def _recomputed(found: SearchResult) -> float:
    """Tokens the generator computed again, over those it sampled."""
    steps = found.trace.steps
    own = steps[steps["engine"] == "llm"]
    return float(own[AGAIN].to_numpy().sum() / found.problems["tokens"].sum())
