"""One run of the study of policies, carried out: two engines in one arena, one search.

Beside run.py the only module of this study that loads models. What it does not do: choose runs.
"""

from __future__ import annotations

import gc
from typing import Any

from workbench.engine.engine import Engine
from workbench.engine.shared import block_shape
from workbench.experiments import run
from workbench.experiments.identity import sweep_problems
from workbench.experiments.plan import RunSpec
from workbench.experiments.policy_plan import POLICIES, PolicySpec
from workbench.experiments.record import RunResult
from workbench.kvcache.arena import KVArena
from workbench.search.result import SearchResult

OWN = ("model", "memory")
"""Settings of an engine that its place in an arena decides."""


def execute(spec: RunSpec) -> RunResult:
    """Carry out one run. Raises whatever building the arena, the engines or the search raises."""
    if not isinstance(spec, PolicySpec):
        return run.execute(spec)  # the warm-up
    pair = Pair(spec)
    try:
        return pair.result_of(pair.search(sweep_problems(spec.config)))
    finally:
        del pair
        gc.collect()


class Pair(run.Pair):
    """Both engines of a run in their arena. Raises whatever building them raises."""

    def __init__(self, spec: PolicySpec) -> None:
        self.spec, self.arena = spec, make_arena(spec)
        self.llm, self.prm = (make_engine(spec, role, self.arena) for role in run.ENGINES)

    def result_of(self, result: SearchResult) -> RunResult:
        """What the run hands back."""
        found = super().result_of(result)
        return RunResult({**found.measured, **arena_columns(result, self.arena)}, found.tables)


def make_arena(spec: PolicySpec) -> KVArena:
    """The memory of both models. OutOfMemory where a floor cannot be met."""
    shapes = [
        block_shape(
            config.model,
            name=role,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            dtype=config.dtype,
            device=config.device,
        )
        for role in run.ENGINES
        for config in (spec.engine(role),)
    ]
    return KVArena(spec.kv_bytes, shapes, POLICIES[spec.policy](), spec.kv_share)


def make_engine(spec: PolicySpec, role: str, arena: KVArena) -> Engine:
    """One of the two engines."""
    settings = spec.engine(role).to_dict()
    own = {name: value for name, value in settings.items() if name not in OWN}
    return Engine(settings["model"], arena=arena, arena_name=role, **own)


def arena_columns(result: SearchResult, arena: KVArena) -> dict[str, Any]:
    """Cells of the `runs` row: the working set, and what of the memory each model ended with.

    *_active_bytes: the highest at any step. *_final_share: of a policy that keeps a split. longest:
    tokens of the longest sequence.
    """
    steps, requests = result.trace.steps, result.trace.requests
    most = steps.groupby("engine")["blocks_active"].max()
    longest = (requests["prompt_tokens"] + requests["output_tokens"]).max()
    cells: dict[str, Any] = {"longest": int(longest), "kv_pages": arena.num_pages}
    for name, pages in arena.target.items():
        share = pages / arena.num_pages if arena.policy.keeps_split else None
        cells[f"{name}_active_bytes"] = int(most[name]) * block_bytes(arena, name)
        cells[f"{name}_final_share"] = share
    return cells


def block_bytes(arena: KVArena, model: str) -> int:
    """Bytes of one block of a model of the arena."""
    shape = arena.packing(model).shape
    return shape.layers * shape.cell_bytes
