"""Where a search spent its time: a clock over its own work, and throughput from a time line.

Spans name the time outside engine steps (strategy, tokenising, bookkeeping), so that steps and
spans add up to wall time. Throughput is as CONTRACTS says: tokens sampled into nodes, pruned ones
included, over wall time from first admission to last answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from workbench.core import RequestOutput
from workbench.trace import Recorder

LANE = "search"
STEADY = (0.1, 0.9)
"""The part of wall time that the steady state keeps: the first and last 10 % are dropped."""


class SpanClock:
    """Which kind of work goes on: one at a time; an engine's steps in between belong to none.

    lanes: whose time it is; with overlap both engines'.
    """

    def __init__(
        self,
        recorder: Recorder,
        clock: Callable[[], float] = time.perf_counter,
        lanes: tuple[str, ...] = (LANE,),
    ) -> None:
        self._recorder = recorder
        self._clock = clock
        self._lanes = lanes
        self._kind = ""
        self._since = 0.0

    def switch(self, kind: str) -> float:
        """End the running span and begin one of `kind` ("": none); answers the time."""
        now = self._clock()
        if self._kind:
            for lane in self._lanes:
                self._recorder.span(lane, self._kind, self._since, now - self._since)
        self._kind, self._since = kind, now
        return now

    def drain(self, work: Iterable[list[RequestOutput]]) -> Drained:
        """Go through an engine's steps to their end.

        What the loop and the engine spent outside recorded steps becomes a bookkeeping span.
        """
        rows, outputs = self._recorder.step_rows, []
        first, start = len(rows), self.switch("")
        for finished in work:
            outputs += finished
        end = self.switch("bookkeeping")
        steps = rows[first:]
        if steps:
            outside = end - start - sum(step.duration_s for step in steps)
            self._recorder.span(LANE, "bookkeeping", end - max(outside, 0.0), max(outside, 0.0))
        return Drained(outputs, end - start, range(first, len(rows)))


class Drained(NamedTuple):
    """What running an engine to the end brought; steps: their rows in the trace, if it has one."""

    outputs: list[RequestOutput]
    busy_s: float
    steps: range


class Mark(NamedTuple):
    """A point of the time line: what was done by then."""

    time_s: float
    tokens: int
    answered: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """How fast a search was.

    steady_*: over the middle 80 % of wall time; busy: seconds inside an engine's steps.
    discarded_tokens: speculated steps that nobody asked for; no other number counts them.
    """

    tokens: int
    problems: int
    wall_s: float
    tokens_per_s: float
    problems_per_min: float
    steady_tokens_per_s: float
    steady_problems_per_min: float
    llm_busy_s: float
    prm_busy_s: float
    discarded_tokens: int = 0

    @classmethod
    def of(
        cls, marks: list[Mark], llm_busy_s: float, prm_busy_s: float, discarded_tokens: int = 0
    ) -> Throughput:
        """From the time line: first mark at the first admission, last one at the last answer."""
        times, tokens, answered = (np.array(column, dtype=float) for column in zip(*marks))
        wall = max(times[-1] - times[0], 1e-9)
        ends = times[0] + wall * np.array(STEADY)
        kept = max(ends[1] - ends[0], 1e-9)
        steady = [
            float(np.diff(np.interp(ends, times, column))[0] / kept)
            for column in (tokens, answered)
        ]
        return cls(
            tokens=int(tokens[-1]),
            problems=int(answered[-1]),
            wall_s=float(wall),
            tokens_per_s=float(tokens[-1] / wall),
            problems_per_min=float(60 * answered[-1] / wall),
            steady_tokens_per_s=steady[0],
            steady_problems_per_min=60 * steady[1],
            llm_busy_s=llm_busy_s,
            prm_busy_s=prm_busy_s,
            discarded_tokens=discarded_tokens,
        )

    def to_dict(self) -> dict[str, float]:
        """The fields by name, for a table's row."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_s:,.0f} tokens/s, {self.problems_per_min:.1f} problems/min "
            f"({self.problems} problems in {self.wall_s:.1f} s)"
        )
