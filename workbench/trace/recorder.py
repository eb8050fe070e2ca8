"""Collects the rows of a run while it happens, for all engines of the run, on one clock.

Appending a row costs about a microsecond; DataFrames are made when asked for. All times given to it
are readings of one monotonic clock (time.perf_counter unless the run says otherwise) and are
recorded relative to the run's origin.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.core import Sequence
from workbench.trace.files import Trace, frame
from workbench.trace.rows import NodeRow, RequestRow, SpanRow, StepCounts, StepRow

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Recorder", "Trace"]


class Recorder:
    """The trace of a run in the making. origin: the clock's reading at second 0 (default: now)."""

    def __init__(self, run_id: str = "run", origin: float | None = None) -> None:
        self.run_id = run_id
        self.origin = time.perf_counter() if origin is None else origin
        self.step_rows: list[StepRow] = []
        self.request_rows: list[RequestRow] = []
        self.node_rows: list[NodeRow] = []
        self.span_rows: list[SpanRow] = []

    def step(
        self,
        engine: str,
        step: int,
        start_s: float,
        duration_s: float,
        schedule_s: float,
        counts: StepCounts,
        *,
        score_cache_hits: int = 0,
        blocks_target: int | None = None,
    ) -> None:
        """One scheduling step; start_s is a clock reading, blocks_target default: blocks_total."""
        target = counts.blocks_total if blocks_target is None else blocks_target
        timing = (start_s - self.origin, duration_s, schedule_s)
        row = (self.run_id, engine, step, *timing, *counts, score_cache_hits, target)
        self.step_rows.append(StepRow._make(row))

    def request(
        self, engine: str, sequence: Sequence, finish_reason: str, finished_s: float
    ) -> None:
        """One finished request; finished_s and the sequence's own times are clock readings."""
        params, tag = sequence.params, sequence.tag
        self.request_rows.append(
            RequestRow(
                run_id=self.run_id,
                engine=engine,
                request_id=sequence.request_id,
                kind=sequence.kind,
                problem_id=tag.problem_id,
                node_id=tag.node_id,
                seed=None if params is None else params.seed & 0xFFFF_FFFF_FFFF_FFFF,
                arrival_s=sequence.arrival_s - self.origin,
                scheduled_s=self._since_origin(sequence.scheduled_s),
                first_token_s=self._since_origin(sequence.first_token_s),
                finished_s=finished_s - self.origin,
                prompt_tokens=sequence.num_prompt_tokens,
                cached_tokens=sequence.num_cached_tokens,
                readmit_cached_tokens=sequence.readmit_cached_tokens,
                output_tokens=sequence.num_output_tokens,
                preemptions=sequence.preemptions,
                finish_reason=finish_reason,
            )
        )

    def node(
        self,
        *,
        problem_id: str,
        node_id: str,
        parent_id: str,
        path: SequenceOf[int],
        depth: int,
        beam: int,
        step_tokens: int,
        total_tokens: int,
        score: float,
        kept: bool,
        finished: bool,
        token_ids: SequenceOf[int],
    ) -> None:
        """One sampled node of a search tree."""
        place = (
            problem_id,
            node_id,
            parent_id,
            tuple(path),
            depth,
            beam,
            step_tokens,
            total_tokens,
        )
        self.node_rows.append(NodeRow(self.run_id, *place, score, kept, finished, tuple(token_ids)))

    def span(self, lane: str, kind: str, start_s: float, duration_s: float) -> None:
        """Time outside steps; start_s is a clock reading."""
        self.span_rows.append(SpanRow(self.run_id, lane, kind, start_s - self.origin, duration_s))

    def _since_origin(self, clock_reading: float | None) -> float | None:
        return None if clock_reading is None else clock_reading - self.origin

    @property
    def steps(self) -> pd.DataFrame:
        """A row a step, so far."""
        return frame("steps", self.step_rows)

    @property
    def requests(self) -> pd.DataFrame:
        """A row a request that ended, so far."""
        return frame("requests", self.request_rows)

    @property
    def nodes(self) -> pd.DataFrame:
        """A row a node of a search tree, so far."""
        return frame("nodes", self.node_rows)

    @property
    def spans(self) -> pd.DataFrame:
        """A row a stretch of wall time, so far."""
        return frame("spans", self.span_rows)

    def trace(self) -> Trace:
        """All that was recorded so far, as frames."""
        return Trace(self.steps, self.requests, self.nodes, self.spans)

    def to_parquet(self, folder: str | os.PathLike[str]) -> Path:
        """Write what was recorded so far (Trace.to_parquet)."""
        return self.trace().to_parquet(folder)
