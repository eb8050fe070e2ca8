"""Many searches at once over two engines, round by round.

A round takes problems in, advances every strategy whose answers are complete, submits all requests
in one fixed order, and runs first the LLM, then the PRM, until they have nothing left. Continuous
problem batching is written here once; strategies know nothing of it. No decision reads a clock.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from workbench.config import SearchSwitches
from workbench.core import SamplingParams, TokenEngine
from workbench.search.active import ActiveSearch
from workbench.search.llm_side import LLMSide
from workbench.search.measure import Mark, SpanClock
from workbench.search.node_request import NodeRequests
from workbench.search.order import RequestOrder
from workbench.search.prm import PRM
from workbench.search.prm_side import PRMSide
from workbench.trace.recorder import Recorder

OnRound = Callable[["Progress"], None]
PLAIN = SearchSwitches()


@dataclass(frozen=True, slots=True)
class Progress:
    """What `on_round` is told after each round; it may raise to stop the search."""

    round: int
    problems: int
    answered: int
    in_flight: int
    tokens: int
    seconds: float


class Rounds:
    """The queue, the searches in flight, and the two engines' sides of the present round."""

    def __init__(
        self,
        llm: TokenEngine,
        prm: PRM,
        *,
        seed: int,
        params: SamplingParams,
        min_problem_batch: int,
        recorder: Recorder,
        clock: Callable[[], float] = time.perf_counter,
        switches: SearchSwitches = PLAIN,
    ) -> None:
        self.llm, self.prm = llm, prm
        self.seed, self.params = seed, params
        self.min_problem_batch, self.switches = min_problem_batch, switches
        self.spans = SpanClock(recorder, clock)
        self._clock, self._recorder = clock, recorder
        self.marks: list[Mark] = []
        self.llm_busy_s = 0.0
        self.prm_busy_s = 0.0
        self.round = 0
        self._queue: deque[ActiveSearch] = deque()
        self._active: list[ActiveSearch] = []
        self._answered = 0
        llm_order, prm_order = (RequestOrder(switches.request_order) for _ in range(2))
        nodes = NodeRequests(seed, params, llm.max_model_len)
        speculates = switches.speculative_extension
        self._sampling = LLMSide(llm, nodes, llm_order, speculates=speculates)
        ahead = self._sampling.ahead if switches.lookahead_scoring else None
        spans = self.spans
        self._scoring = PRMSide(prm, prm_order, spans=spans, recorder=recorder, ahead=ahead)

    def run(self, searches: Iterable[ActiveSearch], on_round: OnRound | None = None) -> None:
        """All rounds, until every search has its outcome; no request is left behind, ever."""
        self._queue.extend(searches)
        self._mark("bookkeeping")
        try:
            while self._queue or self._active:
                self._play_round()
                if on_round is not None:
                    on_round(self._progress())
        finally:
            self._sampling.close()
            self._scoring.close()
            self.spans.switch("")

    @property
    def discarded_tokens(self) -> Counter[str]:
        """Tokens of speculated steps that nobody asked for, by problem; of finished rounds."""
        ahead = self._sampling.ahead
        return Counter() if ahead is None else ahead.discarded_tokens(self._recorder.request_rows)

    def _play_round(self) -> None:
        self.round += 1
        self._admit()
        self._advance()
        self._sampling.submit(self._active)
        self._scoring.submit(self._active)
        self._sample()
        self._score()
        self._mark("bookkeeping")

    def _admit(self) -> None:
        """Problems from the queue; statically, a whole batch once the last one is answered."""
        if self.switches.problem_batching == "static" and self._active:
            return
        while self._queue and len(self._active) < self.min_problem_batch:
            search = self._queue.popleft()
            search.admitted_s = self._clock()
            self._active.append(search)

    def _advance(self) -> None:
        self.spans.switch("strategy")
        for search in self._active:
            if search.served:
                search.advance()
        now = self.spans.switch("bookkeeping")
        answered = [search for search in self._active if search.outcome is not None]
        if answered:
            self._answered += len(answered)
            self.marks.append(Mark(now, self._sampling.tokens, self._answered))
            for search in answered:
                search.finish(now)
            self._active = [search for search in self._active if search.outcome is None]

    def _sample(self) -> None:
        sampled = self.spans.drain(self._sampling.steps())
        self.llm_busy_s += sampled.busy_s
        self.spans.switch("tokenising")  # of the new steps, for the PRM: most of what is done here
        self._sampling.take(sampled.outputs)
        self.spans.switch("bookkeeping")

    def _score(self) -> None:
        scored = self.spans.drain(self._scoring.steps())
        self.prm_busy_s += scored.busy_s
        self._scoring.take(scored.outputs, scored.steps)

    def _mark(self, kind: str) -> None:
        self.marks.append(Mark(self.spans.switch(kind), self._sampling.tokens, self._answered))

    def _progress(self) -> Progress:
        total = self._answered + len(self._active) + len(self._queue)
        seconds = self.marks[-1].time_s - self.marks[0].time_s
        tokens = self._sampling.tokens
        return Progress(self.round, total, self._answered, len(self._active), tokens, seconds)
