"""The LLM's side of a round: a request for every node to be sampled, and what came of it.

What it does not do: say which searches are served (rounds.py), or score (prm_side.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from workbench.core import RequestOutput, SamplingParams, Tag, TokenEngine, node_seed
from workbench.errors import StepError
from workbench.search.active import ActiveSearch
from workbench.search.order import RequestOrder
from workbench.search.requests import Beam, Generate, Path, Step
from workbench.search.tree import node_id


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """All that a node's tokens depend on, beside the model."""

    problem_id: str
    path: Path
    token_ids: list[int]
    params: SamplingParams

    @property
    def tag(self) -> Tag:
        """Its name in the trace."""
        return Tag(self.problem_id, node_id(self.path))


@dataclass(frozen=True, slots=True)
class Sampling:
    """A Generate's request in flight: `room` tokens are what the LLM's max_model_len leaves."""

    search: ActiveSearch
    slot: int
    room: int


class LLMSide:
    """Samples nodes. tokens: sampled into nodes so far."""

    def __init__(
        self, llm: TokenEngine, *, seed: int, params: SamplingParams, order: RequestOrder
    ) -> None:
        self.llm, self.seed, self.params = llm, seed, params
        self.tokens = 0
        self._order = order
        self._sampling: dict[int, Sampling] = {}

    def submit(self, searches: Iterable[ActiveSearch]) -> None:
        """Queue the nodes that these searches ask for."""
        asking = [search for search in searches if isinstance(search.request, Generate)]
        for search in self._order.searches(asking):
            search.served = True
            self._submit(search)

    def _submit(self, search: ActiveSearch) -> None:
        asked = search.request
        assert isinstance(asked, Generate)
        for slot, beam in self._order.beams(asked.beams):
            room = self._room(search, beam)
            if room < 1:
                search.steps[slot] = Step((), "", "context")
                continue
            request = self._request(search, beam, asked.stop, asked.max_tokens)
            number = self.llm.add(request.token_ids, request.params, tag=request.tag)
            self._sampling[number] = Sampling(search, slot, room)

    def _room(self, search: ActiveSearch, beam: Beam) -> int:
        """Tokens that the LLM may still sample after this beam."""
        return self.llm.max_model_len - len(search.prompt) - len(beam.token_ids)

    def _request(
        self, search: ActiveSearch, beam: Beam, stop: tuple[str, ...], max_tokens: int | None
    ) -> NodeRequest:
        """What samples the node `beam.path`. max_tokens None: the run's."""
        base, problem_id = self.params, search.problem.id
        wanted = base.max_tokens if max_tokens is None else max_tokens
        params = SamplingParams(
            temperature=base.temperature,
            max_tokens=min(wanted, self._room(search, beam)),
            top_k=base.top_k,
            top_p=base.top_p,
            min_p=base.min_p,
            stop=stop,
            seed=node_seed(self.seed, problem_id, beam.path),
        )
        return NodeRequest(problem_id, beam.path, [*search.prompt, *beam.token_ids], params)

    def steps(self) -> Iterator[list[RequestOutput]]:
        """Step the engine until it has no request; what finished, step by step."""
        while self.llm.has_work:
            yield self.llm.step()

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        """Hand what was sampled to the searches. Raises what a request ended with."""
        for output in outputs:
            sampling = self._sampling.pop(output.request_id, None)
            if sampling is not None:
                require_fine(output)
                sampling.search.steps[sampling.slot] = _step(sampling, output)
                self.tokens += len(output.token_ids)

    def abort_all(self) -> None:
        """Leave nothing behind in the engine."""
        for number in self._sampling:
            self.llm.abort(number)


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
        request = sampling.search.request
        assert isinstance(request, Generate)
        steps = (*request.beams[sampling.slot].steps, output.text)
        full = len(token_ids) >= sampling.room
        if full or (request.stop and not sampling.search.scores.has_room(steps)):
            reason = "context"
    return Step(token_ids, output.text, reason)
