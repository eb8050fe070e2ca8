"""Many searches at once over two engines, round by round.

A round takes problems in, advances every strategy whose replies are complete, submits all requests
in one fixed order, and runs first the LLM, then the PRM, until they have nothing left. Continuous
problem batching is written here once; strategies know nothing of it. No decision reads a clock.

The switches of a search (`SearchSwitches`), off by default, change no token, score or answer, alone
or together, because request ids, order and batches never enter a token. Beside time they change:

    request_order     which request meets which blocks: evictions, recomputed tokens
    problem_batching  static, adaptive: rounds, and blocks in use
    forget_pruned     what a cache keeps: evictions, recomputed tokens
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.config import SearchSwitches
from workbench.core import RequestOutput, SamplingParams, Tag, TokenEngine, node_seed
from workbench.errors import ConfigError, StepError
from workbench.search.answers import UNSCORED
from workbench.search.prm import PRM, ProblemScores, ScoreRequest
from workbench.search.problems import Problem
from workbench.search.result import Mark, Tree, node_id
from workbench.search.strategies import Beam, Generate, Outcome, Score, Step, Strategy
from workbench.trace import Recorder

LANE = "search"
TO_KEEP = 0.75
"""Part of a cache that beams to go on from may fill; the new steps pass through the rest."""
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


class ActiveSearch:
    """One problem being searched: its strategy's generator, what it asked last, and its replies.

    It knows no engine. Once `outcome` is set nothing more is asked. shuffle_seed: the control
    experiment, in which the beams of each Score get each other's scores, seeded by problem;
    whatever accuracy is left then is not the PRM's doing. The tree records what the PRM said.
    """

    def __init__(
        self,
        problem: Problem,
        prompt: list[int],
        strategy: Strategy,
        scores: ProblemScores,
        shuffle_seed: int | None = None,
    ) -> None:
        self.problem = problem
        self.prompt = prompt
        self.scores = scores
        self.tree = Tree()
        self.outcome: Outcome | None = None
        self.admitted_s = 0.0
        self.answered_s = 0.0
        self.is_answered = False
        self.request: Generate | Score | None = None
        self.steps: list[Step | None] = []
        self.served = True  # by the engine that `request` is for; False until it is queued
        self._aggregation = strategy.aggregation
        self._round = 0  # in which `request` was made
        self._dealer: random.Random | None = None
        if shuffle_seed is not None:
            digest = hashlib.sha256(f"shuffle\x1f{shuffle_seed}\x1f{problem.id}".encode()).digest()
            self._dealer = random.Random(int.from_bytes(digest[:8], "little"))
        self._search = strategy.search(problem.without_answer())

    def advance(self, round: int) -> None:
        """Hand the strategy what it asked for and take its next request, or its outcome."""
        reply: Any = None
        request, self.served = self.request, False
        if isinstance(request, Generate):
            reply = [step for step in self.steps if step is not None]
            self.tree.add(request.beams, reply, self._round)
        elif isinstance(request, Score):
            reply = self.scores.replies(request.beams)
            self.tree.score(request.beams, reply, self._aggregation)
            if self._dealer is not None:  # of another beam, its latest scores: it may be deeper
                dealt = self._dealer.sample(reply, len(reply))
                reply = [_of_length(len(own), row) for own, row in zip(reply, dealt)]
        try:
            self.request, self._round = self._search.send(reply), round
        except StopIteration as end:
            self.request, self.outcome = None, end.value
            self.tree.keep(beam.path for beam in end.value.beams)
            return
        if isinstance(self.request, Generate):
            if not self.request.ahead:
                self.tree.keep(beam.path[:-1] for beam in self.request.beams)
            self.steps = [None] * len(self.request.beams)
        else:  # all children of a lookahead's survivor may have been sampled ahead
            own = self.request.beams[: self.request.own]
            self.tree.keep(beam.path[:-1] for beam in own)

    def finish(self, now_s: float) -> None:
        """Note the time of the answer, count, and let everything large but the tree go."""
        self.answered_s = now_s
        self.scores.finish()
        self.prompt, self.steps = [], []
        self.is_answered = True


def _of_length(count: int, scores: tuple[float, ...]) -> tuple[float, ...]:
    """The last so many scores, the first of them repeated where there are fewer."""
    filled = (scores[:1] or (UNSCORED,)) * count + scores
    return filled[len(filled) - count :]


class WorkClock:
    """A search's own seconds, and which kind of work they went to.

    Spans in the trace name the time outside engine steps (strategy, tokenising, bookkeeping), so
    that steps and spans add up to wall time. Between `pause` and `resume` no time passes: the
    trace's origin is moved over what another search did meanwhile.
    """

    def __init__(self, recorder: Recorder, clock: Callable[[], float] = time.perf_counter) -> None:
        self._recorder, self._clock = recorder, clock
        self._kind, self._since = "", 0.0
        self._paused_at: float | None = None

    def switch(self, kind: str, now: float | None = None) -> float:
        """End the running span and begin one of `kind` ("": none); returns seconds of work."""
        now = self._clock() if now is None else now
        if self._kind:
            self._recorder.span(LANE, self._kind, self._since, now - self._since)
        self._kind, self._since = kind, now
        return now - self._recorder.origin

    def pause(self) -> None:
        """No time passes from now on."""
        self.switch("")
        self._paused_at = self._since

    def resume(self, kind: str) -> float:
        """Time passes again, with work of this kind."""
        now = self._clock()
        if self._paused_at is not None:
            self._recorder.origin += now - self._paused_at
            self._paused_at = None
        return self.switch(kind, now)

    def drain(
        self, engine: TokenEngine, follow: Callable[[list[RequestOutput]], None] | None = None
    ) -> tuple[list[RequestOutput], float, range]:
        """Step an engine until it has no request: outputs, seconds, and its rows in the trace.

        follow: told each step's outputs, upon which it may queue more, or raise: the rest is then
        the caller's to abort. What was spent outside recorded steps becomes a bookkeeping span.
        """
        rows = self._recorder.step_rows
        outputs: list[RequestOutput] = []
        self.switch("")
        first, start = len(rows), self._since
        while engine.has_work:
            finished = engine.step()
            if follow is not None:
                follow(finished)
            outputs += finished
        self.switch("bookkeeping")
        end, steps = self._since, rows[first:]
        if steps:
            outside = max(end - start - sum(step.duration_s for step in steps), 0.0)
            self._recorder.span(LANE, "bookkeeping", end - outside, outside)
        return outputs, end - start, range(first, len(rows))


class RequestOrder:
    """The order in which one engine gets a round's requests, so what lies in its cache when.

    slot: as the strategy lists its beams; refilled ones alternate between the survivors.
    path: by depth, then path; siblings lie side by side and meet their parent's blocks together.
    prefix: path, and the problems that this engine served last go first: from round to round a
        cyclic order is the worst that a least-recently-used cache can be asked for.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._served: dict[str, int] = {}  # problem -> a number that grows with every request

    def searches(self, searches: Iterable[ActiveSearch]) -> list[ActiveSearch]:
        """These searches, all of which are served now, in their order."""
        ordered = list(searches)
        if self._kind == "prefix":
            ordered.sort(key=lambda search: -self._served.get(search.problem.id, 0))
            first = max(self._served.values(), default=0) + 1
            self._served |= {s.problem.id: place for place, s in enumerate(ordered, first)}
        return ordered

    def beams(self, beams: Sequence[Beam]) -> list[tuple[int, Beam]]:
        """Slots and beams of one search in order of their requests."""
        slots = list(enumerate(beams))
        if self._kind != "slot":
            slots.sort(key=lambda item: (len(item[1].path), item[1].path))
        return slots


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
        switches: SearchSwitches,
        recorder: Recorder,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.llm, self.prm = llm, prm
        self.seed, self.params = seed, params
        self.min_problem_batch, self.switches = min_problem_batch, switches
        self.recorder, self.clock = recorder, WorkClock(recorder, clock)
        self.marks: list[Mark] = []
        self.round = self.answered = self.tokens = 0  # tokens: sampled into nodes so far
        self.llm_busy_s = self.prm_busy_s = 0.0
        self._given_up = 0  # problems without an answer, once the search has ended
        self.queue: deque[ActiveSearch] = deque()  # of searches that rounds are to take in
        self._in_flight: list[ActiveSearch] = []
        for engine in (llm, prm.engine):
            if switches.forget_pruned and "forget" not in engine.capabilities:
                able = ", ".join(sorted(engine.capabilities)) or "none"
                raise ConfigError(
                    f"forget_pruned needs engines that can forget; the capabilities of "
                    f"{engine.name} are: {able}. Give forget_pruned=False."
                )
            if switches.problem_batching == "adaptive" and engine.cache_room is None:
                raise ConfigError(
                    f"problem_batching='adaptive' asks how much room a cache has; {engine.name} "
                    "does not tell (its cache_room is None). Give 'continuous' or 'static'."
                )
        self._llm_order, self._prm_order = (RequestOrder(switches.request_order) for _ in range(2))
        # Of each request in flight: its search, its beam's slot, and the tokens there is room for.
        self._sampling: dict[int, tuple[ActiveSearch, int, int]] = {}
        self._scoring: dict[int, tuple[ActiveSearch, ScoreRequest]] = {}
        self._cache_hits = 0  # of the score cache, not yet in the trace
        self._last_steps = range(0)  # rows of the last PRM steps

    def play_round(self, on_round: OnRound | None = None) -> bool:
        """One round; whether there is more to do.

        Its requests are aborted in both engines, whatever a step or on_round raises; what is not
        answered by then is given up. ConfigError while an engine has requests of others, whose
        outputs would be lost.
        """
        if not self.queue and not self._in_flight:
            return False
        for engine in (self.llm, self.prm.engine):
            if engine.has_work:
                raise ConfigError(
                    f"{engine.name} has requests that are none of this search's: call step() until "
                    "has_work is False, or abort them."
                )
        now = self.clock.resume("bookkeeping")
        try:
            if not self.marks:
                self.marks.append(Mark(now, 0, 0))
            self.round += 1
            self._advance()
            self._submit_samples()
            self._submit_scores()
            sampled, busy_s, _ = self.clock.drain(self.llm, self._require_sampled)
            self.llm_busy_s += busy_s
            self.clock.switch("tokenising")  # of the new steps, for the PRM
            self._take_samples(sampled)
            self.clock.switch("bookkeeping")
            scored, busy_s, steps = self.clock.drain(self.prm.engine, self._ask_verdicts)
            self.prm_busy_s += busy_s
            self._take_scores(scored, steps)
            self._mark(self.clock.switch("bookkeeping"))
            if on_round is not None:
                on_round(self.progress)
        except BaseException:
            try:
                self._give_up()
            finally:
                self._give_up()  # whatever an interrupt of the first left
            raise
        finally:
            self.clock.pause()
        return bool(self.queue or self._in_flight)

    def _give_up(self) -> None:
        """Abort every request, and go on with no search."""
        for number in self._sampling:
            self.llm.abort(number)
        for number in self._scoring:
            self.prm.engine.abort(number)
        self._given_up += len(self.queue) + len(self._in_flight)
        self.queue.clear()
        self._in_flight.clear()

    def _advance(self) -> None:
        """Take problems in, in the queue's order, and advance every search that has its replies.

        A static batch takes none in before its last problem is answered.
        """
        now = self.clock.switch("bookkeeping")
        if self.switches.problem_batching != "static" or not self._in_flight:
            while self.queue and len(self._in_flight) < self.min_problem_batch:
                search = self.queue.popleft()
                search.admitted_s = now
                self._in_flight.append(search)
        self.clock.switch("strategy")
        for search in self._in_flight:
            if search.served:
                scored = search.request
                search.advance(self.round)
                if self.switches.forget_pruned and isinstance(scored, Score):
                    forget_pruned(search, scored, self.llm, self.prm.engine)
        now = self.clock.switch("bookkeeping")
        answered = [search for search in self._in_flight if search.outcome is not None]
        self._in_flight = [search for search in self._in_flight if search.outcome is None]
        if answered:
            self.answered += len(answered)
            self._mark(now)
            for search in answered:
                search.finish(now)

    # -- the LLM's part of a round --

    def _submit_samples(self) -> None:
        """Queue the nodes to be sampled."""
        admitted = self._in_flight
        if self.switches.problem_batching == "adaptive":
            admitted = fitting(admitted, (self.llm, self.prm.engine))
        asking = [search for search in admitted if isinstance(search.request, Generate)]
        for search in self._llm_order.searches(asking):
            search.served = True
            asked = search.request
            assert isinstance(asked, Generate)
            for slot, beam in self._llm_order.beams(asked.beams):
                room = self.llm.max_model_len - len(search.prompt) - len(beam.token_ids)
                if room < 1:
                    search.steps[slot] = Step((), "", "context")
                    continue
                most = self.params.max_tokens if asked.max_tokens is None else asked.max_tokens
                params = replace(
                    self.params,
                    max_tokens=min(most, room),
                    stop=asked.stop,
                    seed=node_seed(self.seed, search.problem.id, beam.path),
                )
                prompt = [*search.prompt, *beam.token_ids]
                tag = Tag(search.problem.id, node_id(beam.path))
                # On one line: no interrupt comes between a request and the note of its number.
                self._sampling[self.llm.add(prompt, params, tag=tag)] = (search, slot, room)

    def _require_sampled(self, outputs: Iterable[RequestOutput]) -> None:
        """The first that fails ends the round; the others are not waited for."""
        for output in outputs:
            if output.request_id in self._sampling:
                _require_fine(output)

    def _take_samples(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            search, slot, room = self._sampling.pop(output.request_id, (None, 0, 0))
            if search is None:
                continue
            token_ids, reason, asked = tuple(output.token_ids), output.finish_reason, search.request
            assert isinstance(asked, Generate)
            if reason != "eos":
                steps = (*asked.beams[slot].steps, output.text)
                if len(token_ids) >= room or (asked.stop and not search.scores.has_room(steps)):
                    reason = "context"  # one of the two models has no room for another step
            search.steps[slot] = Step(token_ids, output.text, reason)
            self.tokens += len(token_ids)

    # -- the PRM's part of a round --

    def _submit_scores(self) -> None:
        """Queue what must be asked to score beams: the steps that are not known yet."""
        asking = [search for search in self._in_flight if isinstance(search.request, Score)]
        for search in self._prm_order.searches(asking):
            search.served = True
            asked = search.request
            assert isinstance(asked, Score)
            self.clock.switch("tokenising")
            cached = search.scores.counts.scores_cached
            beams = [beam for _, beam in self._prm_order.beams(asked.beams)]
            requests = search.scores.requests(beams)
            self._cache_hits += search.scores.counts.scores_cached - cached
            self.clock.switch("bookkeeping")
            for request in requests:
                self._ask(search, request)

    def _ask(self, search: ActiveSearch, request: ScoreRequest) -> None:
        tag = Tag(search.problem.id, node_id(request.beam.path))
        self._scoring[self.prm.queue(request, tag)] = (search, request)

    def _ask_verdicts(self, outputs: Iterable[RequestOutput]) -> None:
        """Ask for the verdict on each critique that is whole, while its blocks are in the cache. As
        of samples, the first request that fails ends the round.
        """
        for output in outputs:
            search, request = self._scoring.get(output.request_id, (None, None))
            if search is None or request is None:
                continue
            _require_fine(output)
            if request.params is not None:
                del self._scoring[output.request_id]
                self._ask(search, search.scores.verdict_request(request, output))

    def _take_scores(self, outputs: Iterable[RequestOutput], steps: range) -> None:
        for output in outputs:
            search, request = self._scoring.pop(output.request_id, (None, None))
            if search is not None and request is not None:
                search.scores.receive(request, output)
        # Hits of a round go to its first PRM step, or to that of the last round which had one.
        self._last_steps = steps or self._last_steps
        if self._last_steps and self._cache_hits:
            rows, first = self.recorder.step_rows, self._last_steps[0]
            hits = rows[first].score_cache_hits + self._cache_hits
            rows[first] = rows[first]._replace(score_cache_hits=hits)
            self._cache_hits = 0

    # -- how far it is --

    def _mark(self, now: float) -> None:
        self.marks.append(Mark(now, self.tokens, self.answered))

    @property
    def progress(self) -> Progress:
        """How far the search is after its last round."""
        in_flight = len(self._in_flight)
        return Progress(
            round=self.round,
            problems=self.answered + in_flight + len(self.queue) + self._given_up,
            answered=self.answered,
            in_flight=in_flight,
            tokens=self.tokens,
            seconds=self.marks[-1].time_s - self.marks[0].time_s if self.marks else 0.0,
        )


def _require_fine(output: RequestOutput) -> None:
    """A request that came to nothing ends the search: its beam cannot be replaced by another."""
    if output.error is not None:
        raise output.error
    if output.finish_reason in ("abort", "error"):
        raise StepError(
            f"Request {output.request_id} of this search ended with {output.finish_reason!r}; "
            "a search needs all its requests: give it engines whose requests nothing else aborts."
        )


def fitting(
    in_flight: Sequence[ActiveSearch], engines: Iterable[TokenEngine]
) -> list[ActiveSearch]:
    """Adaptive batching: the first searches whose beams both caches can hold, at least one.

    Every problem comes round again in each round. If together they need more than there is, each
    loses its prefixes before its next turn, and all are computed again; with some of them waiting,
    the rest keep theirs. What one needs is known: the blocks of the beams that it goes on from.
    None while one in flight waits for scores: half a batch costs nearly as much as a whole one.
    """
    if any(isinstance(search.request, Score) for search in in_flight):
        return []
    rooms = [room for engine in engines if (room := engine.cache_room) is not None]
    left = [TO_KEEP * room.blocks for room in rooms]
    admitted: list[ActiveSearch] = []
    for search in in_flight:
        assert isinstance(search.request, Generate)
        parents, prompt = {beam.path[:-1]: beam for beam in search.request.beams}, search.prompt
        # first token, and the one after the last, of every node on the way; none overlap
        sampled = {
            node.path: (node.total_tokens - len(node.step.token_ids), node.total_tokens)
            for path in parents
            for node in search.tree.lineage(path)
        }
        nodes = [(len(prompt) + start, len(prompt) + end) for start, end in sampled.values()]
        scored = {
            node.steps: span
            for beam in parents.values()
            for node, span in search.scores.spans(beam.steps)
        }
        for side, spans in enumerate(([(0, len(prompt)), *nodes], scored.values())):
            size = rooms[side].block_size
            left[side] -= sum(end // size - start // size for start, end in spans)
        if admitted and min(left) < 0:
            break
        admitted.append(search)
    return admitted


def forget_pruned(search: ActiveSearch, scored: Score, llm: TokenEngine, prm: TokenEngine) -> None:
    """Tell both engines which of the beams just scored are dropped, so that their caches forget.

    A strategy goes on from some beams, and from what it has sampled below them; the others,
    finished ones among them, are never read again, nor is anything of a problem that is answered.
    Its prompt is left to age: other prompts may begin with the same.
    """
    request, kept, dropped = search.request, list[Beam](), list[Beam]()
    cut = -1 if isinstance(request, Generate) else None
    starts = {beam.path[:cut] for beam in request.beams} if request is not None else set()
    for beam in scored.beams:
        lineage = (beam.path[:depth] for depth in range(1, len(beam.path) + 1))
        (dropped if starts.isdisjoint(lineage) else kept).append(beam)
    if dropped:
        prompt, scores = search.prompt, search.scores
        lines, needed = ([[*prompt, *b.token_ids] for b in beams] for beams in (dropped, kept))
        llm.forget(lines, [prompt, *needed])
        inputs, needed_inputs = (scores.inputs([b.steps for b in bs]) for bs in (dropped, kept))
        prm.forget(inputs, [scores.beginning, *needed_inputs])
