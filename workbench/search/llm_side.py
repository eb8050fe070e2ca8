"""The LLM's side of a round: a request for every node to be sampled, and what came of it.

What it does not do: say which searches are served (rounds.py), or score (prm_side.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from workbench.core import RequestOutput, TokenEngine
from workbench.errors import StepError
from workbench.search.active import ActiveSearch
from workbench.search.node_request import NodeRequest, NodeRequests
from workbench.search.order import RequestOrder
from workbench.search.requests import Beam, Generate, Step
from workbench.search.speculation import Speculation

GOES_ON = ("stop", "length")
"""Reasons for which a request ends and its beam does not."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """A Generate's request in flight: `room` tokens are what the LLM's max_model_len leaves."""

    search: ActiveSearch
    slot: int
    room: int

    @property
    def asked(self) -> Generate:
        """What the search wants."""
        assert isinstance(self.search.request, Generate)
        return self.search.request

    def grown(self, output: RequestOutput) -> Beam:
        """The node with what was sampled for it."""
        step = Step(tuple(output.token_ids), output.text, output.finish_reason)
        return self.asked.beams[self.slot].grown(step)


class LLMSide:
    """Samples nodes. tokens: sampled into nodes so far. ahead: None unless steps are speculated."""

    def __init__(
        self,
        llm: TokenEngine,
        nodes: NodeRequests,
        order: RequestOrder,
        ahead: Speculation | None = None,
    ) -> None:
        self.llm, self.ahead = llm, ahead
        self.tokens = 0
        self._nodes, self._order = nodes, order
        self._sampling: dict[int, Sampling] = {}
        self._early: list[RequestOutput] = []  # complete before they were asked for

    def submit(self, searches: Iterable[ActiveSearch]) -> None:
        """Queue the nodes that these searches ask for."""
        asking = [search for search in searches if isinstance(search.request, Generate)]
        for search in self._order.searches(asking):
            search.served = True
            self._submit(search)
        if asking and self.ahead is not None:
            self.ahead.open_round(asking)

    def _submit(self, search: ActiveSearch) -> None:
        asked = search.request
        assert isinstance(asked, Generate)
        for slot, beam in self._order.beams(asked.beams):
            room = self._nodes.room(search, beam)
            if room < 1:
                search.steps[slot] = Step((), "", "context")
                continue
            number = self._queue(self._nodes.of(search, beam, asked.how))
            self._sampling[number] = Sampling(search, slot, room)

    def _queue(self, request: NodeRequest) -> int:
        """The number of this request: a new one, unless it was speculated on."""
        begun = None if self.ahead is None else self.ahead.adopt(request)
        if begun is None:
            return self.llm.add(request.token_ids, request.params, tag=request.tag)
        if begun.output is not None:
            self._early.append(begun.output)
        return begun.number

    def steps(self) -> Iterator[list[RequestOutput]]:
        """Step the engine until it has what was asked; what finished, step by step."""
        early, self._early = self._early, []
        yield early
        if self.ahead is not None:
            yield from self._steps_and_more(self.ahead, early)
        while self.llm.has_work and self.ahead is None:
            yield self.llm.step()

    def _steps_and_more(
        self, ahead: Speculation, finished: list[RequestOutput]
    ) -> Iterator[list[RequestOutput]]:
        """As long as a real request runs; rows that would stand empty speculate meanwhile."""
        waited_for = set(self._sampling)
        while True:
            for output in finished:
                waited_for.discard(output.request_id)
                self._offer(ahead, output)
            if not waited_for or not self.llm.has_work:
                return
            ahead.fill_rows()
            finished = ahead.take(self.llm.step())
            yield finished

    def _offer(self, ahead: Speculation, output: RequestOutput) -> None:
        """A beam whose step has ended may go on, where the strategy says how and there is room."""
        sampling = self._sampling.get(output.request_id)
        if sampling is None or sampling.asked.then is None or output.finish_reason not in GOES_ON:
            return
        if len(output.token_ids) < sampling.room:
            ahead.offer(sampling.search, sampling.grown(output).child(0))

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        """Hand what was sampled to the searches. Raises what a request ended with."""
        for output in outputs:
            sampling = self._sampling.pop(output.request_id, None)
            if sampling is not None:
                require_fine(output)
                sampling.search.steps[sampling.slot] = _step(sampling, output)
                self.tokens += len(output.token_ids)

    def close(self) -> None:
        """Leave nothing behind in the engine."""
        for number in self._sampling:
            self.llm.abort(number)
        if self.ahead is not None:
            self.ahead.close()


def require_fine(output: RequestOutput) -> None:
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
        asked = sampling.asked
        steps = (*asked.beams[sampling.slot].steps, output.text)
        full = len(token_ids) >= sampling.room
        if full or (asked.stop and not sampling.search.scores.has_room(steps)):
            reason = "context"
    return Step(token_ids, output.text, reason)
