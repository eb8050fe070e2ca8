"""One cell of the batching study, carried out: all requests queued at once, steps until all ended.

A timed cell has an engine; a counted cell has only its scheduler and cache, and the recorded tokens
for a model, since block counts depend on nothing else. What it does not do: choose cells.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.core import (
    RequestOutput,
    SamplingParams,
    ScoreParams,
    Sequence,
    StepPlan,
    StepResult,
)
from workbench.engine.engine import Engine
from workbench.engine.scheduler import Scheduler
from workbench.experiments.batch_plan import COUNTED, STATIC, BatchSpec
from workbench.experiments.batch_requests import Asked, Workload, record_requests
from workbench.experiments.feasible import feasibility
from workbench.experiments.plan import RunSpec
from workbench.experiments.record import RunResult
from workbench.experiments.run import build_engine
from workbench.kvcache.manager import KVCacheManager
from workbench.models.registry import model_spec
from workbench.trace import Recorder

MASK = 2**64 - 1  # seeds are unsigned in a plan


class BatchRuns:
    """Carries out cells; the search they all repeat is recorded when the first needs it."""

    def __init__(self) -> None:
        self._workloads: dict[str, Workload] = {}

    def __call__(self, spec: RunSpec) -> RunResult:
        """Carry out one cell. OutOfMemory when a padded batch cannot fit, and what building an
        engine raises.
        """
        assert isinstance(spec, BatchSpec)
        if not self._workloads:
            self._workloads = record_requests(spec)
        workload = self._workloads[spec.model].thinned(spec.every)
        carry_out = count_blocks if spec.role == COUNTED else time_engine
        try:
            return carry_out(spec, workload)
        finally:
            gc.collect()  # engines hold cycles; the next cell must not pay for this one's memory


def time_engine(spec: BatchSpec, workload: Workload) -> RunResult:
    """The whole workload through one engine: rates, rows computed for nothing, blocks wasted."""
    engine, recorder = build_engine(spec.engine(spec.model)), Recorder()
    engine.trace_as(recorder, spec.model)
    start = time.perf_counter()
    numbers = [request.ask(engine) for request in workload.requests]
    outputs = run_all(engine)
    engine_s = time.perf_counter() - start
    pairs = zip(numbers, workload.requests, strict=True)
    measured = {
        "engine_s": engine_s,
        "tokens_per_s": workload.tokens / engine_s if spec.every == 1 else float("nan"),
        "steps_per_s": workload.steps / engine_s,
        "same_answers": all(asked.is_answered_by(outputs[number]) for number, asked in pairs),
        "kv_blocks": engine.memory.num_blocks,
        "padding": padding_share(recorder.steps, workload) if spec.kind == STATIC else 0.0,
    }
    tables = {"steps": recorder.steps, "requests": recorder.requests}
    return RunResult(measured | _counts(recorder.steps, spec, workload), tables)


def run_all(engine: Engine) -> dict[int, RequestOutput]:
    """Step until nothing is left; outputs by request id."""
    outputs: dict[int, RequestOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def padding_share(steps: pd.DataFrame, workload: Workload) -> float:
    """Share of the computed rows that no request needed: prompts filled up, members that ended.

    The trace counts all rows computed; what the requests needed of them follows from the requests,
    as static batches neither cache nor preempt.
    """
    rows = int(steps[["prefill_tokens", "decode_tokens"]].to_numpy().sum())
    return 1 - sum(request.num_rows for request in workload.requests) / rows


def wasted_share(steps: pd.DataFrame, block_size: int) -> float:
    """Share of the active blocks' room that holds no token, over all steps."""
    room = steps["blocks_active"].sum() * block_size
    return float(1 - steps["tokens_held"].sum() / room) if room else 0.0


def _counts(steps: pd.DataFrame, spec: BatchSpec, workload: Workload) -> dict[str, Any]:
    return {
        "waste": wasted_share(steps, spec.cell["block_size"]),
        "num_steps": len(steps),
        "most_running": int(steps["running"].max()),
        "preempted": int(steps["preempted"].sum()),
        "requests": len(workload.requests),
    }


# -- counting without a model --


def count_blocks(spec: BatchSpec, workload: Workload) -> RunResult:
    """The whole workload through the scheduler and the cache alone, recorded tokens for results."""
    scheduler = _scheduler(spec)
    told = {}
    for number, request in enumerate(workload.requests):
        scheduler.add(_sequence(number, request))
        if request.params is not None:
            told[request.params.seed & MASK] = (len(request.token_ids), request.sampled)
    recorder = Recorder()
    while (plan := scheduler.schedule()) is not None:
        assert scheduler.counts is not None
        recorder.step(spec.model, plan.step, 0.0, 0.0, 0.0, scheduler.counts)
        scheduler.update(plan, recorded_result(plan, told))
    return RunResult(_counts(recorder.steps, spec, workload))


class NeverStops:
    """Recorded requests end by their length."""

    def add(self, request_id: int, params: SamplingParams) -> None:
        """Nothing to remember."""

    def remove(self, request_id: int) -> None:
        """Nothing to forget."""

    def suspects(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """None of them."""
        return np.zeros(len(tokens), bool)

    def finish_reason(self, seq: Sequence) -> str | None:
        """The scheduler's own, "length"."""
        return None


def recorded_result(plan: StepPlan, told: dict[int, tuple[int, tuple[int, ...]]]) -> StepResult:
    """What the model answered; told: by seed, the prompt's length and what was sampled."""
    pairs = zip(plan.sampling.seeds.tolist(), plan.sampling.positions.tolist())
    tokens = [told[seed][1][position - told[seed][0]] for seed, position in pairs]
    wanted = tuple(np.zeros((len(w.rows), len(w.columns)), np.float32) for w in plan.wanted)
    return StepResult(np.array(tokens, np.int64), wanted=wanted)


def _sequence(number: int, request: Asked) -> Sequence:
    tokens, params = list(request.token_ids), request.params
    if params is None:
        score = ScoreParams(request.positions, request.columns)
        return Sequence(number, tokens, len(tokens), score=score)
    own = replace(params, max_tokens=len(request.sampled))
    return Sequence(number, tokens, len(tokens), own)


def _scheduler(spec: BatchSpec) -> Scheduler:
    """The scheduler and cache that the cell's engine would have."""
    config, room = spec.engine(spec.model), feasibility(spec)
    needs = {"llm": (room.llm, spec.llm_bytes), "prm": (room.prm, spec.prm_bytes)}
    need, budget = needs[spec.model]
    num_blocks = need.num_blocks(budget)
    return Scheduler(
        KVCacheManager(num_blocks, config.block_size, config.enable_prefix_caching),
        np.arange(num_blocks),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len or model_spec(config.model).max_model_len,
        stops=NeverStops(),
        watermark=config.watermark,
    )
