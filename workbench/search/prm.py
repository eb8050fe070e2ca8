"""The process reward model: a scoring engine, the format in which it is asked, and what it scored.

The format follows from the model: from its architecture where that has a value head, else from its
name, since a language model's config does not say how it was trained to judge; or it is given.
The law of every format: the input of k + 1 steps, up to step k's position, is the input of k steps,
so a prefix cache serves a growing solution, and only a new step is ever tokenised. A position whose
KV is cached returns no score, so a score cache stands beside the prefix cache.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from workbench.core import RequestOutput, TokenEngine
from workbench.errors import ConfigError
from workbench.search.answers import UNSCORED, check_choice
from workbench.search.prm_formats import FORMATS, TokenIds
from workbench.search.problems import Problem
from workbench.search.requests import Beam

ARCHITECTURES = {
    "Qwen2ForProcessRewardModel": "qwen2.5-math-prm",
    "Qwen2ForPrmModel": "skywork",
}
"""Formats of reward models that their architecture tells."""

NAMES = {
    "tiny-prm": "rlhflow",
    "llama-3.1-8b-prm": "rlhflow",
    "llama3.1-8b-prm": "rlhflow",
    "rlhflow": "rlhflow",
    "math-shepherd": "math-shepherd",
}
"""Formats of language models by a part of their names, in lower case."""

SCORE_UNIT = 2**16
"""Scores are whole multiples of 1 / SCORE_UNIT, so that beams with equal texts tie exactly."""


def known_format(name: str, architecture: str) -> str | None:
    """The format of a model, by its architecture or by its name; None when neither tells it."""
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    end = "/".join(name.lower().rstrip("/").split("/")[-2:])  # owner/name, or a folder's end
    return next((format for part, format in NAMES.items() if part in end), None)


class PRM:
    """A scoring engine together with its format; shared by any number of searches.

    format: None takes the one that fits the model. Raises ConfigError for a format that is unknown,
    cannot be told, or is not for this model's head; ModelError where tokenizer or chat template
    cannot express it.
    """

    def __init__(self, engine: TokenEngine, format: str | None = None) -> None:
        supported = f"supported: {', '.join(FORMATS)}"
        name = format or known_format(engine.name, engine.architecture)
        if name is None:
            raise ConfigError(
                f"The PRM format of {engine.name} ({engine.architecture}) cannot be told from its "
                f"name or architecture; {supported}. Give one: PRM(engine, format=...), or "
                "`workbench run --prm-format`."
            )
        check_choice("PRM format", name, tuple(FORMATS))
        wanted = FORMATS[name].value_outputs
        if wanted != engine.value_outputs:
            raise ConfigError(
                f"PRM format {name!r} reads {_head(wanted)}; {engine.name} "
                f"({engine.architecture}) has {_head(engine.value_outputs)}; {supported}."
            )
        self.engine, self.format = engine, name
        self.fingerprint = f"{engine.fingerprint}/{name}"
        self._inputs = FORMATS[name](engine.tokenizer)
        self.columns = self._inputs.columns

    def first_input(self, question: str, step: str) -> TokenIds:
        """Token ids of a solution with one step; its verdict is read at the last position."""
        return self._inputs.first(question, step.strip())

    def next_input(self, token_ids: TokenIds, step: str) -> TokenIds:
        """Token ids of the solution `token_ids` with one more step; they are its beginning."""
        return self._inputs.next(token_ids, step.strip())

    @staticmethod
    def scores(logits: Iterable[Iterable[float]]) -> Iterator[float]:
        """A probability for each row, rounded to 2^-16.

        A row of two logits is (good, bad), and its softmax taken; of a lone value the sigmoid,
        which is the softmax of it and 0.
        """
        for good, *bad in logits:
            difference = min(max(float(bad[0] if bad else 0.0) - float(good), -700.0), 700.0)
            yield round(SCORE_UNIT / (1.0 + math.exp(difference))) / SCORE_UNIT


def _head(outputs: int | None) -> str:
    return "a vocabulary's logits" if outputs is None else f"a value head of {outputs} outputs"


Key = tuple[str, str, tuple[str, ...]]


class ScoreCache(dict[Key, float]):
    """(PRM's fingerprint, problem's id, steps) -> score of the last step, rounded to 2^-16.

    A run has one of its own unless it is given one.
    """


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
    """What scoring cost, as the problems table has it. prm_tokens_*: of the PRM's inputs;
    scores_*: one a beam and step.
    """

    prm_requests: int = 0
    prm_tokens_asked: int = 0
    prm_tokens_computed: int = 0  # without what the PRM's prefix cache held
    prm_tokens_distinct: int = 0  # nodes of the trie of all inputs: the least to be computed
    scores_asked: int = 0
    scores_cached: int = 0  # known from the score cache
    scores_shared: int = 0  # an equal beam in flight asks


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
        return self.prm.first_input(self._question, "")

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
        found, counts = [], self.counts
        for beam in beams:
            asked = []
            for node in self._node(beam.steps).lineage:
                if not node.asks:
                    continue
                if self.cache is not None and node.in_flight:
                    counts.scores_shared += 1
                elif self.cache is not None and node.score is not None:
                    counts.scores_cached += 1
                else:
                    node.in_flight = True
                    asked.append(node)
            if asked:
                token_ids = asked[-1].token_ids
                assert token_ids
                counts.prm_requests += 1
                counts.scores_asked += len(asked)
                counts.prm_tokens_asked += len(token_ids)
                found.append(ScoreRequest(beam, token_ids, tuple(asked)))
        return found

    def receive(self, request: ScoreRequest, output: RequestOutput) -> None:
        """Keep the scores a finished request brought."""
        for node, score in zip(request.asked, self.verdicts(request, output), strict=True):
            node.score, node.in_flight = score, False
            if self.cache is not None:
                self.cache[self.prm.fingerprint, self._problem_id, node.steps] = score
        self.counts.prm_tokens_computed += len(request.token_ids) - output.num_cached_tokens

    def replies(self, beams: Sequence[Beam]) -> list[tuple[float, ...]]:
        """One score for each step of each beam; every request must have been received."""
        found = []
        for beam in beams:
            scores, latest = [], UNSCORED
            for node in self._node(beam.steps).lineage:
                if node.asks:
                    assert node.score is not None
                    latest = node.score
                scores.append(latest)
            found.append(tuple(scores))
        return found

    def solutions(self) -> Iterator[StepNode]:
        """Every solution known so far but the empty one, each after the one it extends."""
        return (node for node in self._nodes.values() if node.steps)

    def finish(self) -> ScoreCounts:
        """Count the distinct tokens and let the inputs go."""
        asked = [node for node in self._nodes.values() if node.asks]
        self.counts.prm_tokens_distinct = self.distinct_tokens(asked)
        for node in self._nodes.values():
            node.lineage.clear()  # it holds the node itself: no cycle is left to be collected
        self._nodes.clear()
        return self.counts

    def _node(self, steps: tuple[str, ...]) -> StepNode:
        """The node of a solution; it is made, and what is missing on the way to it."""
        missing = []
        while (node := self._nodes.get(steps)) is None:
            missing.append(steps)
            steps = steps[:-1]
        for own in reversed(missing):
            parent, (token_ids, asks) = node, self.entered(node, own)
            node = self._nodes[own] = StepNode(own, token_ids, asks)
            node.lineage = [*parent.lineage, node]
            if asks and self.cache is not None:
                node.score = self.cache.get((self.prm.fingerprint, self._problem_id, own))
        return node

    # -- what a replay reads from a recording --

    def entered(self, parent: StepNode, steps: tuple[str, ...]) -> tuple[TokenIds | None, bool]:
        """A solution's input, None without room for it, and whether its last step is asked."""
        if parent.token_ids is None or not steps[-1].strip():
            return parent.token_ids, False
        if parent.token_ids:
            token_ids = self.prm.next_input(parent.token_ids, steps[-1])
        else:
            token_ids = self.prm.first_input(self._question, steps[-1])
        fits = len(token_ids) < self.prm.engine.max_model_len
        return token_ids if fits else None, fits

    def verdicts(self, request: ScoreRequest, output: RequestOutput) -> Iterable[float]:
        """The scores of a request's asked steps."""
        assert output.logits is not None
        return self.prm.scores(output.logits.tolist())

    def distinct_tokens(self, asked: list[StepNode]) -> int:
        """Nodes of the trie of their inputs."""
        return trie_size(node.token_ids for node in asked if node.token_ids)


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
