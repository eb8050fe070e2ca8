"""Steps sampled before anybody asked: beams that ended early go on as their own child 0.

While stragglers of a round still run, rows of the LLM stand empty (FastTTS's speculative beam
extension). What is sampled there has child 0's seed, so it is child 0's own step: if that node is
asked for next, complete or not, it is used, else discarded. Real requests come first: nothing is
speculated while one waits or is read, or while either model's cache loses what is wanted again (the
two may share one memory), and what was begun is aborted before a step that could run out of blocks.
A round still lasts as long as its longest new child: rounds get shorter where most children are a
child 0 (a small beam_width), or where more is asked than there are rows; else rows are filled, at
the price of computing them. What it does not do: say what a node's request is (node_request.py), or
step the engine.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from workbench.core import RequestOutput, TokenEngine
from workbench.search.active import ActiveSearch
from workbench.search.node_request import NodeRequest, NodeRequests
from workbench.search.pressure import Fullness, Pressure
from workbench.search.requests import Beam, Path
from workbench.trace import RequestRow


@dataclass(frozen=True, slots=True)
class Ended:
    """A beam that has ended its step and may go on. rank: the smaller, the likelier it is kept."""

    rank: tuple[float, int]
    search: ActiveSearch
    beam: Beam


@dataclass(frozen=True, slots=True)
class Speculated:
    """A request nobody has asked for yet. output: once its step is complete."""

    number: int
    search: ActiveSearch
    request: NodeRequest
    output: RequestOutput | None = None


class Speculation:
    """The speculated steps of one LLM. beside: the engine that runs when this one does not."""

    def __init__(self, llm: TokenEngine, beside: TokenEngine, nodes: NodeRequests) -> None:
        self._llm, self._nodes = llm, nodes
        self._fullness, self._beside = Fullness(llm), Pressure(beside)
        self._yields = False  # in the present round, to the engine beside
        self._ended: list[Ended] = []  # of the present round, best first
        self._arrivals = 0
        self._running: dict[int, Speculated] = {}
        self._complete: dict[tuple[str, Path], Speculated] = {}
        self._discarded: set[int] = set()

    # -- a round of the LLM --

    def adopt(self, request: NodeRequest) -> Speculated | None:
        """This very request, if it was speculated on: no longer a speculation from now on."""
        found = self._complete.pop((request.problem_id, request.path), None)
        if found is None:
            found = next((s for s in self._running.values() if s.request == request), None)
            if found is not None:
                del self._running[found.number]
        elif found.request != request:
            self._discarded.add(found.number)
            return None
        return found

    def open_round(self, served: Collection[ActiveSearch]) -> None:
        """All that is wanted has been adopted; the rest of these searches', and what runs, goes."""
        self._abort(list(self._running))
        self._ended.clear()
        for pressure in (self._fullness.pressure, self._beside):
            pressure.open_round()
        self._yields = self._beside.is_felt  # asked between rounds: with overlap it runs in them
        for key, speculated in list(self._complete.items()):
            if speculated.search in served or speculated.search.outcome is not None:
                del self._complete[key]
                self._discarded.add(speculated.number)

    def offer(self, search: ActiveSearch, beam: Beam) -> None:
        """A beam has ended its step and can go on; its latest score says how likely it is kept."""
        self._arrivals += 1
        promise = beam.step_scores[-1] if beam.step_scores else 0.0
        insort(self._ended, Ended((-promise, self._arrivals), search, beam), key=lambda e: e.rank)

    def fill_rows(self) -> None:
        """Before a step: give way where memory is short, else use the rows that stand empty."""
        fullness = self._fullness
        short = self._yields or fullness.pressure.is_felt
        if short or fullness.is_queueing:
            self._abort(list(self._running))
        while self._running and fullness.spare_blocks < 0:
            self._abort([next(reversed(self._running))])
        if self._ended and not short:
            self._start(fullness.empty_rows, fullness.spare_blocks)

    def _start(self, rows: int, blocks: int) -> None:
        while rows and self._ended:
            ended = self._ended[0]
            request = self._nodes.next_of(ended.search, ended.beam)
            blocks -= self._fullness.blocks_of(len(request.token_ids))
            if blocks < 0:
                return
            number = self._llm.add(request.token_ids, request.params, tag=request.tag)
            self._running[number] = Speculated(number, ended.search, request)
            del self._ended[0]
            rows -= 1

    def take(self, outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
        """Keep the speculated steps that are complete; answers the other outputs."""
        others = []
        for output in outputs:
            known = self._running.pop(output.request_id, None)
            if known is None:
                others.append(output)
            elif output.error is not None or output.finish_reason in ("abort", "error"):
                self._discarded.add(known.number)
            else:
                key = (known.request.problem_id, known.request.path)
                self._complete[key] = Speculated(known.number, known.search, known.request, output)
        return others

    # -- beside it --

    def step_of(self, problem_id: str, path: Path) -> RequestOutput | None:
        """The complete step of a node that nobody has asked for yet."""
        found = self._complete.get((problem_id, path))
        return None if found is None else found.output

    def close(self) -> None:
        """The search is over: nothing is left behind in the engine."""
        self._abort(list(self._running))
        self._discarded |= {speculated.number for speculated in self._complete.values()}
        self._complete.clear()

    def discarded_tokens(self, rows: Iterable[RequestRow]) -> Counter[str]:
        """Tokens sampled for nothing by problem. rows: of the trace; a PRM's generate none."""
        found: Counter[str] = Counter()
        for row in rows:
            if row.kind == "generate" and row.request_id in self._discarded:
                found[row.problem_id] += row.output_tokens
        return found

    def _abort(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            del self._running[number]
            self._llm.abort(number)
            self._discarded.add(number)
