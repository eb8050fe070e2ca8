"""One problem's solutions as the PRM sees them: which steps must be asked, and what was answered.

A node for each solution's step texts holds its token ids, so a new step costs one tokenisation and
one list; equal solutions meet in one node and are asked once. A step of white space asks nothing
and takes its parent's score (0.5 at the root), as does a step for which the PRM has no room.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from workbench.core import RequestOutput
from workbench.search.prm import PRM
from workbench.search.prm_formats import TokenIds
from workbench.search.problems import Problem
from workbench.search.requests import Beam
from workbench.search.score_cache import ScoreCache
from workbench.search.voting import UNSCORED


@dataclass(slots=True, eq=False)
class StepNode:
    """A solution up to one step. token_ids: its PRM input, empty before any step, None: no room.

    steps: the texts so far, this one last; lineage: their nodes, this one last.
    asks: whether the PRM is to judge this step; otherwise its score is its parent's.
    """

    steps: tuple[str, ...]
    token_ids: TokenIds | None
    asks: bool
    lineage: list[StepNode] = field(default_factory=list)
    score: float | None = None
    in_flight: bool = False


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One request to the PRM engine: the last node's input, with the positions of `asked`."""

    beam: Beam
    token_ids: TokenIds
    asked: tuple[StepNode, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        """The last token before each asked step's verdict."""
        return tuple(len(node.token_ids or ()) - 1 for node in self.asked)


@dataclass(slots=True)
class ScoreCounts:
    """What scoring cost. steps_*: one a beam and step; tokens_*: of the PRM's inputs."""

    requests: int = 0
    steps_asked: int = 0
    steps_cached: int = 0  # known from the score cache
    steps_shared: int = 0  # an equal beam in flight asks
    tokens_asked: int = 0
    tokens_computed: int = 0  # without what the PRM's prefix cache held
    tokens_distinct: int = 0  # nodes of the trie of all inputs: the least anyone must compute


class ProblemScores:
    """The PRM's view of one problem in one search. It keeps the question, not the answer."""

    def __init__(self, prm: PRM, problem: Problem, cache: ScoreCache | None) -> None:
        self.prm = prm
        self.cache = cache
        self.counts = ScoreCounts()
        self._question = problem.problem
        self._problem_id = problem.id
        self._nodes: dict[tuple[str, ...], StepNode] = {(): StepNode((), array("i"), asks=False)}

    def has_room(self, steps: tuple[str, ...]) -> bool:
        """Whether the PRM's max_model_len holds these steps."""
        return self._node(steps).token_ids is not None

    @property
    def beginning(self) -> TokenIds:
        """What the inputs of this problem begin with: the question, with an empty step."""
        return self._input(array("i"), "")

    def inputs(self, solutions: Iterable[tuple[str, ...]]) -> list[TokenIds]:
        """The PRM's inputs of these solutions, those left out that it has no room for."""
        found = (self._node(steps).token_ids for steps in solutions)
        return [token_ids for token_ids in found if token_ids]

    def spans(self, steps: tuple[str, ...]) -> Iterator[tuple[StepNode, tuple[int, int]]]:
        """The solutions on the way to this one, and where in its input the tokens of each lie."""
        start = 0
        for node in self._node(steps).lineage:
            end = len(node.token_ids or ())
            if end > start:
                yield node, (start, end)
                start = end

    def requests(self, beams: Sequence[Beam]) -> list[ScoreRequest]:
        """What must be asked for these beams, in their order; nothing twice with a score cache."""
        found = [self._request(beam) for beam in beams]
        return [request for request in found if request is not None]

    def receive(self, request: ScoreRequest, output: RequestOutput) -> None:
        """Keep the scores a finished request brought."""
        assert output.logits is not None
        for node, score in zip(request.asked, self.prm.scores(output.logits.tolist()), strict=True):
            node.score = score
            node.in_flight = False
            if self.cache is not None:
                self.cache.put(self.prm.fingerprint, self._problem_id, node.steps, score)
        self.counts.tokens_computed += len(request.token_ids) - output.num_cached_tokens

    def replies(self, beams: Sequence[Beam]) -> list[tuple[float, ...]]:
        """One score for each step of each beam; every request must have been received."""
        return [_scores(self._node(beam.steps).lineage) for beam in beams]

    def solutions(self) -> Iterator[StepNode]:
        """Every solution known so far but the empty one, each after the one it extends."""
        return (node for node in self._nodes.values() if node.steps)

    def finish(self) -> ScoreCounts:
        """Count the distinct tokens and let the inputs go."""
        inputs = [node.token_ids for node in self._nodes.values() if node.asks and node.token_ids]
        self.counts.tokens_distinct = trie_size(inputs)
        for node in self._nodes.values():
            node.lineage.clear()  # it holds the node itself: no cycle is left to be collected
        self._nodes.clear()
        return self.counts

    def _request(self, beam: Beam) -> ScoreRequest | None:
        asked = tuple(self._to_ask(self._node(beam.steps).lineage))
        if not asked:
            return None
        token_ids = asked[-1].token_ids
        assert token_ids
        self.counts.requests += 1
        self.counts.steps_asked += len(asked)
        self.counts.tokens_asked += len(token_ids)
        return ScoreRequest(beam, token_ids, asked)

    def _to_ask(self, lineage: list[StepNode]) -> Iterator[StepNode]:
        """Nodes nobody knows or asks; they are marked as being asked."""
        for node in lineage:
            if not node.asks:
                continue
            if self.cache is not None and node.in_flight:
                self.counts.steps_shared += 1
            elif self.cache is not None and node.score is not None:
                self.counts.steps_cached += 1
            else:
                node.in_flight = True
                yield node

    def _node(self, steps: tuple[str, ...]) -> StepNode:
        node = self._nodes.get(steps)
        if node is not None:
            return node
        known = len(steps) - 1
        while steps[:known] not in self._nodes:
            known -= 1
        node = self._nodes[steps[:known]]
        for count in range(known + 1, len(steps) + 1):
            node = self._nodes[steps[:count]] = self._new(node, steps[:count])
        return node

    def _new(self, parent: StepNode, steps: tuple[str, ...]) -> StepNode:
        token_ids, asks = parent.token_ids, False
        if token_ids is not None and steps[-1].strip():
            ids = self._input(token_ids, steps[-1])
            asks = self.prm.fits(ids)
            token_ids = ids if asks else None
        node = StepNode(steps, token_ids, asks)
        node.lineage = [*parent.lineage, node]
        if asks and self.cache is not None:
            node.score = self.cache.get(self.prm.fingerprint, self._problem_id, steps)
        return node

    def _input(self, token_ids: TokenIds, step: str) -> TokenIds:
        if token_ids:
            return self.prm.next_input(token_ids, step)
        return self.prm.first_input(self._question, step)


def _scores(lineage: list[StepNode]) -> tuple[float, ...]:
    scores = []
    latest = UNSCORED
    for node in lineage:
        if node.asks:
            assert node.score is not None
            latest = node.score
        scores.append(latest)
    return tuple(scores)


def trie_size(inputs: Iterable[TokenIds]) -> int:
    """Nodes of the trie of these token sequences, its root not counted."""
    size = 0
    previous = np.empty(0, np.intc)
    for text in sorted({ids.tobytes() for ids in inputs}):  # prefixes lie together
        current = np.frombuffer(text, np.intc)
        shared = min(len(previous), len(current))
        differs = np.flatnonzero(previous[:shared] != current[:shared])
        size += len(current) - (int(differs[0]) if len(differs) else shared)
        previous = current
    return size
