"""Many searches at once over two engines, round by round.

A round takes problems in, advances every strategy whose answers are complete, submits all requests
in one fixed order, and runs first the LLM, then the PRM, until they have nothing left. Continuous
problem batching is written here once; strategies know nothing of it. No decision reads a clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from workbench.core import RequestOutput, SamplingParams, Tag, TokenEngine, node_seed
from workbench.errors import StepError
from workbench.search.active import ActiveSearch, in_order
from workbench.search.measure import Mark, SpanClock
from workbench.search.prm import PRM
from workbench.search.requests import Generate, Score, Step
from workbench.search.scoring import ScoreRequest
from workbench.search.tree import node_id
from workbench.trace.recorder import Recorder

OnRound = Callable[["Progress"], None]


@dataclass(frozen=True, slots=True)
class Progress:
    """What `on_round` is told after each round; it may raise to stop the search."""

    round: int
    problems: int
    answered: int
    in_flight: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Sampling:
    """A Generate's request in flight: `room` tokens are what the LLM's max_model_len leaves."""

    search: ActiveSearch
    slot: int
    room: int


class Rounds:
    """The queue, the searches in flight, and the requests of the present round."""

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
    ) -> None:
        self.llm, self.prm = llm, prm
        self.seed, self.params = seed, params
        self.min_problem_batch = min_problem_batch
        self.spans = SpanClock(recorder, clock)
        self._clock = clock
        self.marks: list[Mark] = []
        self.llm_busy_s = 0.0
        self.prm_busy_s = 0.0
        self.round = 0
        self._queue: deque[ActiveSearch] = deque()
        self._active: list[ActiveSearch] = []
        self._cache_hits = 0  # not yet in the trace
        self._prm_steps = range(0)  # rows of the last PRM steps
        self._recorder = recorder
        self._answered = 0
        self._tokens = 0
        self._sampling: dict[int, Sampling] = {}
        self._scoring: dict[int, tuple[ActiveSearch, ScoreRequest]] = {}

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
            self._abort_all()
            self.spans.switch("")

    def _play_round(self) -> None:
        self.round += 1
        self._admit()
        self._advance()
        self._submit_samples()
        self._submit_scores()
        sampled = self.spans.drain(self.llm)
        self.llm_busy_s += sampled.busy_s
        self._take_samples(sampled.outputs)
        scored = self.spans.drain(self.prm.engine)
        self.prm_busy_s += scored.busy_s
        self._prm_steps = scored.steps or self._prm_steps
        self._take_scores(scored.outputs)
        self._credit_cache_hits()
        self._mark("bookkeeping")

    def _admit(self) -> None:
        while self._queue and len(self._active) < self.min_problem_batch:
            search = self._queue.popleft()
            search.admitted_s = self._clock()
            self._active.append(search)

    def _advance(self) -> None:
        self.spans.switch("strategy")
        for search in self._active:
            search.advance()
        now = self.spans.switch("bookkeeping")
        answered = [search for search in self._active if search.outcome is not None]
        if answered:
            self._answered += len(answered)
            self.marks.append(Mark(now, self._tokens, self._answered))
            for search in answered:
                search.finish(now)
            self._active = [search for search in self._active if search.outcome is None]

    def _submit_samples(self) -> None:
        for search in self._active:
            request = search.request
            if isinstance(request, Generate):
                self._submit_generate(search, request)

    def _submit_generate(self, search: ActiveSearch, request: Generate) -> None:
        problem_id, base = search.problem.id, self.params
        wanted = base.max_tokens if request.max_tokens is None else request.max_tokens
        for slot, beam in in_order(request.beams):
            room = self.llm.max_model_len - len(search.prompt) - len(beam.token_ids)
            if room < 1:
                search.steps[slot] = Step((), "", "context")
                continue
            params = SamplingParams(
                temperature=base.temperature,
                max_tokens=min(wanted, room),
                top_k=base.top_k,
                top_p=base.top_p,
                min_p=base.min_p,
                stop=request.stop,
                seed=node_seed(self.seed, problem_id, beam.path),
            )
            tag = Tag(problem_id, node_id(beam.path))
            number = self.llm.add([*search.prompt, *beam.token_ids], params, tag=tag)
            self._sampling[number] = Sampling(search, slot, room)

    def _submit_scores(self) -> None:
        for search in self._active:
            request = search.request
            if isinstance(request, Score):
                self.spans.switch("tokenising")
                cached = search.scores.counts.steps_cached
                asked = search.scores.requests([beam for _, beam in in_order(request.beams)])
                self._cache_hits += search.scores.counts.steps_cached - cached
                self.spans.switch("bookkeeping")
                for score_request in asked:
                    self._submit_score(search, score_request)

    def _submit_score(self, search: ActiveSearch, request: ScoreRequest) -> None:
        tag = Tag(search.problem.id, node_id(request.beam.path))
        number = self.prm.engine.add_score(
            request.token_ids, request.positions, self.prm.columns, tag=tag
        )
        self._scoring[number] = (search, request)

    def _take_samples(self, outputs: Iterable[RequestOutput]) -> None:
        self.spans.switch("tokenising")  # of the new steps, for the PRM: most of what is done here
        for output in outputs:
            sampling = self._sampling.pop(output.request_id, None)
            if sampling is not None:
                _check(output)
                sampling.search.steps[sampling.slot] = _step(sampling, output)
                self._tokens += len(output.token_ids)
        self.spans.switch("bookkeeping")

    def _take_scores(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            search, request = self._scoring.pop(output.request_id, (None, None))
            if search is not None and request is not None:
                _check(output)
                search.scores.receive(request, output)

    def _credit_cache_hits(self) -> None:
        """Hits of a round go to its first PRM step, or to that of the last round which had one."""
        if self._prm_steps and self._cache_hits:
            rows, first = self._recorder.step_rows, self._prm_steps[0]
            hits = rows[first].score_cache_hits + self._cache_hits
            rows[first] = rows[first]._replace(score_cache_hits=hits)
            self._cache_hits = 0

    def _mark(self, kind: str) -> None:
        self.marks.append(Mark(self.spans.switch(kind), self._tokens, self._answered))

    def _progress(self) -> Progress:
        total = self._answered + len(self._active) + len(self._queue)
        seconds = self.marks[-1].time_s - self.marks[0].time_s
        return Progress(self.round, total, self._answered, len(self._active), self._tokens, seconds)

    def _abort_all(self) -> None:
        for number in self._sampling:
            self.llm.abort(number)
        for number in self._scoring:
            self.prm.engine.abort(number)


def _check(output: RequestOutput) -> None:
    """A request that came to nothing ends the search: its beam cannot be replaced by another."""
    if output.error is not None:
        raise output.error
    if output.finish_reason in ("abort", "error"):
        raise StepError(
            f"Request {output.request_id} of this search ended with {output.finish_reason!r}; "
            "a search needs all its requests: give it engines that nobody else aborts requests on."
        )


def _step(sampling: Sampling, output: RequestOutput) -> Step:
    """What was sampled; "context" where one of the two models has no room for another step."""
    token_ids, reason = tuple(output.token_ids), output.finish_reason
    if reason != "eos":
        request = sampling.search.request
        assert isinstance(request, Generate)
        steps = (*request.beams[sampling.slot].steps, output.text)
        full = len(token_ids) >= sampling.room
        if full or (request.stop and not sampling.search.scores.has_room(steps)):
            reason = "context"
    return Step(token_ids, output.text, reason)
