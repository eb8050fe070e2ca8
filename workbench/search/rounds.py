"""Many searches at once over two engines, round by round.

A round takes problems in, advances every strategy whose answers are complete, submits all requests
in one fixed order, and runs first the LLM, then the PRM, until they have nothing left. Continuous
problem batching is written here once; strategies know nothing of it. No decision reads a clock.

Switches (SearchSwitches), each off by default. All of them give the same tokens, scores, tree and
answers, alone and together: request ids, order and batches never enter. What may differ:

    switch                 does                                      differs beside time
    request_order          which request meets which blocks          evictions, recomputed tokens
    problem_batching       static: no problem joins others           rounds; fewer blocks in use
                           adaptive: some wait (pace.py)             the same; with overlap in an
                                                                     arena from run to run
    speculative_extension  ended beams sample on (speculation.py)    discarded tokens, LLM requests
    lookahead_scoring      such steps are scored ahead (prm_side.py) PRM requests, score cache hits
    overlap                two groups swap engines (lanes.py),       rounds; in a shared arena also
                           where the device has room for both        evictions, from run to run
    forget_pruned          caches drop pruned beams (pruning.py)     evictions, recomputed tokens

What cannot promise it is no switch of a search: another dtype or quantization, batch_invariant off,
and finish_at_limit, which asks for other steps.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from workbench.config import SearchSwitches
from workbench.core import SamplingParams, TokenEngine
from workbench.search.active import ActiveSearch
from workbench.search.groups import Groups
from workbench.search.lanes import LANES, Lanes, lanes_pay
from workbench.search.llm_side import LLMSide
from workbench.search.measure import LANE, Drained, Mark, SpanClock
from workbench.search.node_request import NodeRequests
from workbench.search.order import RequestOrder
from workbench.search.pace import Pace
from workbench.search.prm import PRM
from workbench.search.prm_side import PRMSide
from workbench.search.pruning import Pruning
from workbench.search.requests import Score
from workbench.search.speculation import Speculation
from workbench.trace import Recorder

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
        self._overlaps = switches.overlap and lanes_pay(llm, prm.engine)
        lanes = LANES if self._overlaps else (LANE,)
        self.spans = SpanClock(recorder, clock, lanes)
        self._clock, self._recorder = clock, recorder
        self.marks: list[Mark] = []
        self.llm_busy_s = 0.0
        self.prm_busy_s = 0.0
        self.round = 0
        self._queue: deque[ActiveSearch] = deque()
        batching, places = switches.problem_batching, min_problem_batch
        self._groups = Groups(
            places,
            swap=self._overlaps,
            whole_batches=batching == "static",
            pace=Pace(llm, prm.engine) if batching == "adaptive" else None,
        )
        self._pruning = Pruning(llm, prm) if switches.forget_pruned else None
        self._answered = 0
        self._make_sides(NodeRequests(seed, params, llm.max_model_len))

    def _make_sides(self, nodes: NodeRequests) -> None:
        llm, prm, switches = self.llm, self.prm, self.switches
        llm_order, prm_order = (RequestOrder(switches.request_order) for _ in range(2))
        speculates = switches.speculative_extension
        ahead = Speculation(llm, prm.engine, nodes) if speculates else None
        self._sampling = LLMSide(llm, nodes, llm_order, ahead)
        told = self.spans, self._recorder
        self._scoring = PRMSide(
            prm, prm_order, *told, ahead if switches.lookahead_scoring else None
        )

    def run(self, searches: Iterable[ActiveSearch], on_round: OnRound | None = None) -> None:
        """All rounds, until every search has its outcome; no request is left behind, ever."""
        self._queue.extend(searches)
        lanes = None
        self._mark("bookkeeping")
        try:
            if self._overlaps:
                told = self._recorder, self.spans, self._clock
                lanes = Lanes(self.llm, self.prm.engine, *told)
            while self._queue or self._groups:
                self._play_round(lanes)
                if on_round is not None:
                    on_round(self._progress())
        finally:
            self._sampling.close()
            self._scoring.close()
            if lanes is not None:
                lanes.close()
            self.spans.switch("")

    @property
    def discarded_tokens(self) -> Counter[str]:
        """Tokens of speculated steps that nobody asked for, by problem; of finished rounds."""
        ahead = self._sampling.ahead
        return Counter() if ahead is None else ahead.discarded_tokens(self._recorder.request_rows)

    def _play_round(self, lanes: Lanes | None) -> None:
        self.round += 1
        self._groups.admit(self._queue, self._clock())
        self._advance()
        self._sampling.submit(self._groups.sampling)
        self._scoring.submit(self._groups.scoring)
        if lanes is None:
            self._take_samples(self.spans.drain(self._sampling.steps()))
            self._take_scores(self.spans.drain(self._scoring.steps()))
        else:
            sampled, scored = lanes.drain(self._sampling.steps(), self._scoring.steps())
            self._take_samples(sampled)
            self._take_scores(scored)
        self._groups.swap()
        self._mark("bookkeeping")

    def _advance(self) -> None:
        self.spans.switch("strategy")
        for search in self._groups:
            if search.served:
                scored = search.request
                search.advance()
                if self._pruning is not None and isinstance(scored, Score):
                    self._pruning.tell(search, scored)
        now = self.spans.switch("bookkeeping")
        answered = self._groups.take_answered()
        if answered:
            self._answered += len(answered)
            self.marks.append(Mark(now, self._sampling.tokens, self._answered))
            for search in answered:
                search.finish(now)

    def _take_samples(self, sampled: Drained) -> None:
        self.llm_busy_s += sampled.busy_s
        self.spans.switch("tokenising")  # of the new steps, for the PRM: most of what is done here
        self._sampling.take(sampled.outputs)
        self.spans.switch("bookkeeping")

    def _take_scores(self, scored: Drained) -> None:
        self.prm_busy_s += scored.busy_s
        self._scoring.take(scored.outputs, scored.steps)

    def _mark(self, kind: str) -> None:
        self.marks.append(Mark(self.spans.switch(kind), self._sampling.tokens, self._answered))

    def _progress(self) -> Progress:
        in_flight = len(self._groups)
        total = self._answered + in_flight + len(self._queue)
        seconds = self.marks[-1].time_s - self.marks[0].time_s
        tokens = self._sampling.tokens
        return Progress(self.round, total, self._answered, in_flight, tokens, seconds)
