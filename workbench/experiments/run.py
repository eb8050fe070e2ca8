"""One run, carried out: two engines with their parts of the memory, one search, the tables it left.

The only module of the experiments that loads models. It measures and decides nothing: what failed
is told by an exception, and the sweep makes a row of it.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pandas as pd

from workbench.config import EngineConfig, SearchSwitches, StrategyConfig
from workbench.engine.engine import Engine
from workbench.experiments.identity import sweep_problems
from workbench.experiments.plan import RunSpec
from workbench.experiments.record import RunResult
from workbench.search.prm import PRM
from workbench.search.requests import Strategy
from workbench.search.result import SearchResult
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch, BestOfN

TRACE_TABLES = ("steps", "requests", "spans")
ENGINES = ("llm", "prm")
COUNTS = (
    "preempted",
    "allocated",
    "evicted",
    "thrashed",
    "thrash_events",
    "query_tokens",
    "hit_tokens",
    "prefill_tokens",
    "decode_tokens",
    "recomputed_tokens_evicted",
    "recomputed_tokens_preempted",
    "recomputed_tokens_partial",
)
"""Columns of `steps` whose sums are kept in the `runs` row, one each an engine."""


def execute(spec: RunSpec) -> RunResult:
    """Carry out one run. Raises whatever building the engines or the search raises."""
    problems = sweep_problems(spec.config)
    pair = Pair(spec)
    try:
        return pair.result_of(pair.search(problems))
    finally:
        del pair
        gc.collect()  # engines hold cycles; the next share must not pay for this one's memory


class Pair:
    """Both engines of a run, each in its memory. Raises whatever building them raises."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.llm, self.prm = (build_engine(spec.engine(role)) for role in ENGINES)

    def search(self, problems: list[Any]) -> SearchResult:
        """The run's search."""
        return search(problems, self.llm, self.prm, self.spec.search, self.spec.seed)

    def result_of(self, result: SearchResult) -> RunResult:
        """What the run hands back."""
        return RunResult(measured_columns(result, self.llm, self.prm), tables(result))


def build_engine(config: EngineConfig) -> Engine:
    """The engine of a configuration."""
    return Engine(**config.to_dict())


def make_strategy(config: StrategyConfig) -> Strategy:
    """The strategy a configuration names."""
    if config.strategy == "best_of_n":
        return BestOfN(n=config.n, aggregation=config.aggregation or "last")
    return BeamSearch(
        n=config.n,
        beam_width=config.beam_width,
        max_depth=config.max_depth,
        finish_at_limit=config.finish_at_limit,
        aggregation=config.aggregation or "last",
    )


def search(
    problems: list[Any],
    llm: Engine,
    prm: Engine,
    config: StrategyConfig,
    seed: int,
    prm_format: str | None = None,
) -> SearchResult:
    """One search with the settings of `config`; prm_format: None is the model's own."""
    return run_search(
        problems,
        llm=llm,
        prm=PRM(prm, prm_format),
        strategy=make_strategy(config),
        seed=seed,
        min_problem_batch=config.min_problem_batch,
        score_cache=config.score_cache,
        temperature=config.temperature,
        top_p=config.top_p,
        max_step_tokens=config.max_step_tokens,
        voting=config.voting,
        **{each.name: getattr(config, each.name) for each in fields(SearchSwitches)},
    )


def tables(result: SearchResult) -> dict[str, pd.DataFrame]:
    """Problems, nodes and the trace of both engines, as stored."""
    traced = {name: getattr(result.trace, name) for name in TRACE_TABLES}
    return {"problems": with_wall_part(result), "nodes": result.tree} | traced


def with_wall_part(result: SearchResult) -> pd.DataFrame:
    """The problems with wall_part_s: wall time divided among them by their time in flight.

    The parts add up to wall time, so tokens over wall_part_s is the run's throughput, problem by
    problem.
    """
    seconds = result.problems["seconds"]
    scale = result.throughput.wall_s / seconds.sum() if seconds.sum() else 0.0
    return result.problems.assign(wall_part_s=seconds * scale)


def measured_columns(result: SearchResult, llm: Engine, prm: Engine) -> dict[str, Any]:
    """Cells of the `runs` row: throughputs, accuracy, memory parts and sums over all steps."""
    speed = result.throughput.to_dict()
    speed["sampled_tokens"], speed["answered_problems"] = speed.pop("tokens"), speed.pop("problems")
    row: dict[str, Any] = speed | {"accuracy": result.accuracy}
    for role, engine in zip(ENGINES, (llm, prm), strict=True):
        row |= _prefixed(role, memory_parts(engine))
        row |= _prefixed(role, step_sums(result.trace.steps, role))
    row["llm_tokens_per_busy_s"] = _rate(row["sampled_tokens"], row["llm_busy_s"])
    row["prm_tokens_per_busy_s"] = _rate(new_prm_tokens(row), row["prm_busy_s"])
    return row


def new_prm_tokens(row: Mapping[str, Any]) -> int:
    """Tokens the PRM computed for the first time: recomputing them is no progress."""
    again = (row[f"prm_{name}"] for name in COUNTS if name.startswith("recomputed"))
    return int(row["prm_prefill_tokens"] - sum(again))


def memory_parts(engine: Engine) -> dict[str, Any]:
    """The engine's memory in bytes, part by part, and what its cache holds."""
    memory = engine.memory
    return {
        "weights_bytes": memory.weights,
        "activations_bytes": memory.activations,
        "other_bytes": memory.other,
        "kv_bytes": memory.kv,
        "block_bytes": memory.block_bytes,
        "blocks": memory.num_blocks,
        "kv_tokens": memory.num_blocks * engine.config.block_size,
    }


def step_sums(steps: pd.DataFrame, engine: str) -> dict[str, Any]:
    """Counts of one engine over the whole run; hit_rate is NaN where nothing was asked."""
    own = steps[steps["engine"] == engine]
    sums = {name: int(own[name].sum()) for name in COUNTS}
    return sums | {"steps": len(own), "hit_rate": _rate(sums["hit_tokens"], sums["query_tokens"])}


def _prefixed(role: str, cells: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{role}_{name}": value for name, value in cells.items()}


def _rate(amount: float, of: float) -> float:
    return amount / of if of else float("nan")
