"""One problem's solutions as the PRM sees them: which steps must be asked, and what was answered.

A tree over step texts holds each solution's token ids, so a new step costs one tokenisation and one
list; equal solutions meet in one node and are asked once. A step of white space asks nothing and
takes its parent's score (0.5 at the root), as does a step for which the PRM has no room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from workbench.core import RequestOutput
from workbench.search.prm import PRM
from workbench.search.problems import Problem
from workbench.search.requests import Beam
from workbench.search.score_cache import ScoreCache
from workbench.search.voting import UNSCORED


@dataclass(slots=True, eq=False)
class StepNode:
    """A solution up to one step. token_ids: its PRM input, [] at the root, None: it does not fit.

    asks: whether the PRM is to judge this step; otherwise its score is its parent's.
    """

    parent: StepNode | None
    token_ids: list[int] | None
    asks: bool
    score: float | None = None
    in_flight: bool = False
    children: dict[str, StepNode] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One request to the PRM engine: the last node's input, with the positions of `asked`."""

    beam: Beam
    token_ids: list[int]
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
        self._root = StepNode(None, [], asks=False, score=UNSCORED)

    def has_room(self, steps: Sequence[str]) -> bool:
        """Whether the PRM's max_model_len holds these steps."""
        path = self._path(steps)
        return not path or path[-1].token_ids is not None

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
        self.counts.tokens_computed += len(request.token_ids) - output.num_cached_tokens
        if self.cache is not None:
            self._store(request)

    def replies(self, beams: Sequence[Beam]) -> list[tuple[float, ...]]:
        """One score for each step of each beam; every request must have been received."""
        return [self._scores(self._path(beam.steps)) for beam in beams]

    def finish(self) -> ScoreCounts:
        """Count the distinct tokens and let the inputs go."""
        inputs = [node.token_ids for node in _walk(self._root) if node.token_ids and node.asks]
        self.counts.tokens_distinct = trie_size(inputs)
        self._root.children.clear()
        return self.counts

    def _request(self, beam: Beam) -> ScoreRequest | None:
        path = [node for node in self._path(beam.steps) if node.asks]
        asked = tuple(node for node in path if self._must_ask(node))
        if not asked:
            return None
        for node in asked:
            node.in_flight = True
        token_ids = asked[-1].token_ids
        assert token_ids
        self.counts.requests += 1
        self.counts.tokens_asked += len(token_ids)
        return ScoreRequest(beam, token_ids, asked)

    def _must_ask(self, node: StepNode) -> bool:
        if self.cache is not None and node.in_flight:
            self.counts.steps_shared += 1
            return False
        if self.cache is not None and node.score is not None:
            self.counts.steps_cached += 1
            return False
        self.counts.steps_asked += 1
        return True

    def _scores(self, path: list[StepNode]) -> tuple[float, ...]:
        scores = []
        latest = UNSCORED
        for node in path:
            if node.asks:
                assert node.score is not None
                latest = node.score
            scores.append(latest)
        return tuple(scores)

    def _path(self, steps: Sequence[str]) -> list[StepNode]:
        node, path = self._root, []
        for count, text in enumerate(steps, start=1):
            child = node.children.get(text)
            if child is None:
                child = self._new(node, steps[:count])
            node = child
            path.append(node)
        return path

    def _new(self, parent: StepNode, steps: Sequence[str]) -> StepNode:
        text = steps[-1]
        if parent.token_ids is None or not text.strip():
            node = StepNode(parent, parent.token_ids, asks=False)
        else:
            ids = self._input(parent.token_ids, text)
            fits = self.prm.fits(ids)
            node = StepNode(parent, ids if fits else None, asks=fits)
        if node.asks and self.cache is not None:
            node.score = self.cache.get(self.prm.fingerprint, self._problem_id, steps)
        parent.children[text] = node
        return node

    def _input(self, token_ids: list[int], step: str) -> list[int]:
        if token_ids:
            return self.prm.next_input(token_ids, step)
        return self.prm.first_input(self._question, step)

    def _store(self, request: ScoreRequest) -> None:
        assert self.cache is not None
        path = self._path(request.beam.steps)
        asked = set(map(id, request.asked))
        for count, node in enumerate(path, start=1):
            if id(node) in asked and node.score is not None:
                steps = request.beam.steps[:count]
                self.cache.put(self.prm.fingerprint, self._problem_id, steps, node.score)


def _walk(root: StepNode) -> list[StepNode]:
    nodes = [root]
    for node in nodes:
        nodes += node.children.values()
    return nodes


def trie_size(inputs: Sequence[Sequence[int]]) -> int:
    """Nodes of the trie of these token sequences, its root not counted."""
    ordered = sorted({np.asarray(ids, dtype=">i4").tobytes() for ids in inputs})
    size = 0
    previous = np.empty(0, dtype=">i4")
    for text in ordered:
        current = np.frombuffer(text, dtype=">i4")
        shared = min(len(previous), len(current))
        differs = np.flatnonzero(previous[:shared] != current[:shared])
        size += len(current) - (int(differs[0]) if len(differs) else shared)
        previous = current
    return size
