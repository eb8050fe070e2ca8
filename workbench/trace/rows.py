"""The rows of the trace tables: one frozen type a table, one field a column.

Tuples, because a row is made every step; seconds count from the run's one origin, counts are the
step's own. What it does not do: hold rows (recorder.py) or files (files.py).
"""

from __future__ import annotations

from typing import NamedTuple


class StepCounts(NamedTuple):
    """What a scheduler did in one step. blocks_*: after scheduling; the rest: this step's counts.

    cached_tokens: found cached by this step's admissions, re-admissions included. tokens_held:
    tokens that the active blocks hold, shared ones once. prefill_tokens and decode_tokens: rows
    computed, in static batches their padding too. recomputed_*: computed in this step and
    once before, lost by eviction, by preemption of their request, or because their block was never
    full. score_requests: first admitted in this step.
    """

    prefill_tokens: int
    decode_tokens: int
    cached_tokens: int
    running: int
    waiting: int
    preempted: int
    blocks_total: int
    blocks_active: int
    blocks_cached: int
    blocks_free: int
    allocated: int
    evicted: int
    thrashed: int
    thrash_events: int
    query_tokens: int
    hit_tokens: int
    readmit_hit_tokens: int
    tokens_held: int
    recomputed_tokens_evicted: int
    recomputed_tokens_preempted: int
    recomputed_tokens_partial: int
    score_requests: int


class StepRow(NamedTuple):
    """One step of one engine. duration_s: the whole step; schedule_s: the scheduler's part."""

    run_id: str
    engine: str
    step: int
    start_s: float
    duration_s: float
    schedule_s: float
    prefill_tokens: int
    decode_tokens: int
    cached_tokens: int
    running: int
    waiting: int
    preempted: int
    blocks_total: int
    blocks_active: int
    blocks_cached: int
    blocks_free: int
    allocated: int
    evicted: int
    thrashed: int
    thrash_events: int
    query_tokens: int
    hit_tokens: int
    readmit_hit_tokens: int
    tokens_held: int
    recomputed_tokens_evicted: int
    recomputed_tokens_preempted: int
    recomputed_tokens_partial: int
    score_requests: int
    score_cache_hits: int
    blocks_target: int


class RequestRow(NamedTuple):
    """One finished request. kind: generate | score; seed: None if it scores; time None: never."""

    run_id: str
    engine: str
    request_id: int
    kind: str
    problem_id: str
    node_id: str
    seed: int | None
    arrival_s: float
    scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
    prompt_tokens: int
    cached_tokens: int
    readmit_cached_tokens: int
    output_tokens: int
    preemptions: int
    finish_reason: str


class NodeRow(NamedTuple):
    """One sampled node of a search tree (no root row). path: ordinals; token_ids: its own."""

    run_id: str
    problem_id: str
    node_id: str
    parent_id: str
    path: tuple[int, ...]
    depth: int
    beam: int
    step_tokens: int
    total_tokens: int
    score: float
    kept: bool
    finished: bool
    token_ids: tuple[int, ...]


class SpanRow(NamedTuple):
    """Time outside steps. lane: whose time; kind: tokenising, strategy, waiting, ..."""

    run_id: str
    lane: str
    kind: str
    start_s: float
    duration_s: float


ROW_TYPES: dict[str, type[NamedTuple]] = {
    "steps": StepRow,
    "requests": RequestRow,
    "nodes": NodeRow,
    "spans": SpanRow,
}
