"""Search with a model of true size: its pace, and what the PRM's caches save.

The same searches run twice from empty caches: as they are by default, and with the PRM's prefix
cache and the score cache off, so that every step is read with all before it, again and again. Both
give the same tree, so only time and PRM tokens differ. What it does not do: say anything of
accuracy (workload.py says why).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from workbench.bench.record import Row
from workbench.bench.rows import interval_row
from workbench.bench.workload import Workload
from workbench.engine.engine import Engine
from workbench.experiments.statistics import bootstrap_ratio
from workbench.search.result import SearchResult

KV_MEMORY = "2GiB"  # of each engine
WARM_UP_SEED = 10_000
WITHOUT = "without PRM cache and score cache"


def rows(workload: Workload, seed: int = 0) -> Iterator[Row]:
    """Problems/min, tokens/s and PRM tokens beside the run without caches, then the ratio."""
    llm = _engine(workload.llm)
    ours = _measured(workload, llm, seed, caches=True)
    other = _measured(workload, llm, seed, caches=False)
    name, speed, slow = workload.label, ours.throughput, other.throughput
    yield _row(f"search_{name}", speed.problems_per_min, slow.problems_per_min, "problems/min")
    yield _row(f"search_tokens_{name}", speed.tokens_per_s, slow.tokens_per_s, "tokens/s")
    computed, without = ours.prm_tokens["computed"], other.prm_tokens["computed"]
    saved = without / computed
    yield Row(f"prm_tokens_{name}", computed, "tokens", WITHOUT, without, saved, repeats=1)
    dear, cheap = (result.problems["prm_tokens_computed"] for result in (other, ours))
    found = bootstrap_ratio(dear, cheap, ours.problems["problem_id"].tolist())
    yield interval_row(f"prm_tokens_saved_{name}", found, "x", 1)


def _row(name: str, ours: float, other: float, unit: str) -> Row:
    return Row(name, ours, unit, WITHOUT, other, ours / other, repeats=1)


def _measured(workload: Workload, llm: Engine, seed: int, caches: bool) -> SearchResult:
    """One search from empty caches, its kernels compiled and its allocators warm."""
    prm_engine = _engine(workload.prm, enable_prefix_caching=caches)
    prm = workload.reward(prm_engine)
    brief = replace(workload, problems=workload.problems[:1], max_depth=1, max_step_tokens=4)
    brief.search(llm, prm, WARM_UP_SEED)
    llm.cache.reset()
    prm_engine.cache.reset()
    return workload.search(llm, prm, seed, score_cache=caches)


def _engine(model: str, **settings: Any) -> Engine:
    return Engine(model, kv_memory=KV_MEMORY, **settings)
