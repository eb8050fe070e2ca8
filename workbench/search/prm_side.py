"""The PRM's side of a round: a request for every solution that nobody judged, and its scores.

What it does not do: say which searches are served (rounds.py), or tokenise (scoring.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from workbench.core import RequestOutput, Tag
from workbench.search.active import ActiveSearch
from workbench.search.llm_side import require_fine
from workbench.search.measure import SpanClock
from workbench.search.order import RequestOrder
from workbench.search.pressure import Pressure
from workbench.search.prm import PRM
from workbench.search.requests import Beam, Score
from workbench.search.scoring import ScoreRequest
from workbench.search.speculation import Speculation
from workbench.search.tree import node_id
from workbench.trace import Recorder


class PRMSide:
    """Scores solutions. Steps found in the score cache are told to the trace.

    ahead: whose complete steps are scored together with those before them; None: none are.
    """

    def __init__(
        self,
        prm: PRM,
        order: RequestOrder,
        spans: SpanClock,
        recorder: Recorder,
        ahead: Speculation | None = None,
    ) -> None:
        self.prm = prm
        self._order, self._spans, self._recorder = order, spans, recorder
        self._ahead = ahead
        self._pressure = Pressure(prm.engine)
        self._cache_hits = 0  # not yet in the trace
        self._last_steps = range(0)  # rows of the last PRM steps
        self._scoring: dict[int, tuple[ActiveSearch, ScoreRequest]] = {}

    def submit(self, searches: Iterable[ActiveSearch]) -> None:
        """Queue what must be asked to score these searches' beams."""
        asking = [search for search in searches if isinstance(search.request, Score)]
        if asking:
            self._pressure.open_round()
        for search in self._order.searches(asking):
            search.served = True
            for request in self._unknown(search):
                self._submit(search, request)

    def _unknown(self, search: ActiveSearch) -> list[ScoreRequest]:
        """What nobody has asked yet about a search's beams."""
        asked = search.request
        assert isinstance(asked, Score)
        self._spans.switch("tokenising")
        counts = search.scores.counts
        cached = counts.steps_cached
        beams = [self._with_next_step(search, b) for _, b in self._order.beams(asked.beams)]
        requests = search.scores.requests(beams)
        self._cache_hits += counts.steps_cached - cached
        self._spans.switch("bookkeeping")
        return requests

    def _with_next_step(self, search: ActiveSearch, beam: Beam) -> Beam:
        """The same node; its steps go on with child 0's, if that is complete and memory ample."""
        if self._ahead is None or self._pressure.is_felt:
            return beam
        step = self._ahead.step_of(search.problem.id, (*beam.path, 0))
        return beam if step is None else replace(beam, steps=(*beam.steps, step.text))

    def _submit(self, search: ActiveSearch, request: ScoreRequest) -> None:
        tag = Tag(search.problem.id, node_id(request.beam.path))
        number = self.prm.engine.add_score(
            request.token_ids, request.positions, self.prm.columns, tag=tag
        )
        self._scoring[number] = (search, request)

    def steps(self) -> Iterator[list[RequestOutput]]:
        """Step the engine until it has no request; what finished, step by step."""
        while self.prm.engine.has_work:
            yield self.prm.engine.step()

    def take(self, outputs: Iterable[RequestOutput], steps: range) -> None:
        """Hand the scores to the searches. steps: the rows of the trace that brought them."""
        for output in outputs:
            search, request = self._scoring.pop(output.request_id, (None, None))
            if search is not None and request is not None:
                require_fine(output)
                search.scores.receive(request, output)
        self._credit_cache_hits(steps)

    def _credit_cache_hits(self, steps: range) -> None:
        """Hits of a round go to its first PRM step, or to that of the last round which had one."""
        self._last_steps = steps or self._last_steps
        if self._last_steps and self._cache_hits:
            rows, first = self._recorder.step_rows, self._last_steps[0]
            hits = rows[first].score_cache_hits + self._cache_hits
            rows[first] = rows[first]._replace(score_cache_hits=hits)
            self._cache_hits = 0

    def close(self) -> None:
        """Leave nothing behind in the engine."""
        for number in self._scoring:
            self.prm.engine.abort(number)
