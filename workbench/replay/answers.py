"""What a recording answers in a model's place: tokens to a step plan, scores to the search.

The executor reads the plan alone: a row's seed names its node, its position names the token. What
it does not do: keep time (engine.py, cost.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.core import (
    RequestOutput,
    SamplingParams,
    Sequence,
    StepPlan,
    StepResult,
    node_seed,
)
from workbench.errors import RecordingError
from workbench.replay.lines import Entry
from workbench.search.prm import PRM, ProblemScores, ScoreCache, ScoreCounts, ScoreRequest, StepNode
from workbench.search.recording import RecordedProblem, RecordedSolution, RecordedStep, Recording
from workbench.search.requests import Path
from workbench.search.result import node_id


class SampledNode(NamedTuple):
    """A recorded step and its entry in the trie of its problem."""

    step: RecordedStep
    entry: Entry


class JudgedSolution(NamedTuple):
    """A recorded solution and its entry in the trie of the PRM's inputs."""

    solution: RecordedSolution
    entry: Entry


class Answers:
    """A recording, ready to be asked; it may be replayed any number of times."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._nodes: dict[tuple[str, str], SampledNode] = {}
        self._solutions = {p.problem.id: dict(_judged(p)) for p in recording.problems}
        for problem in recording.problems:
            for node in _sampled(problem):
                self._nodes[problem.problem.id, node_id(node.step.path)] = node
        self.tokens = RecordedTokens(recording.settings.seed, self._nodes)

    def node(self, problem_id: str, node: str) -> SampledNode:
        """What was sampled for a node; RecordingError if it never was."""
        found = self._nodes.get((problem_id, node))
        if found is None or not found.step.tokens:
            raise RecordingError(
                f"The recording has no tokens of node {node!r} of problem {problem_id!r}: replay "
                "with the strategy, n and sizes that were recorded, or record that search too."
            )
        return found

    def solutions(self, problem_id: str) -> dict[tuple[str, ...], JudgedSolution]:
        """What the PRM was asked about a problem, by the texts of the steps."""
        return self._solutions[problem_id]


def _sampled(problem: RecordedProblem) -> Iterator[SampledNode]:
    entries: dict[Path, Entry] = {(): Entry(None, problem.prompt)}
    for step in problem.steps:
        entries[step.path] = Entry(entries[step.path[:-1]], step.tokens)
        yield SampledNode(step, entries[step.path])


def _judged(problem: RecordedProblem) -> Iterator[tuple[tuple[str, ...], JudgedSolution]]:
    entries: dict[tuple[str, ...], Entry | None] = {(): None}
    for solution in problem.solutions:
        entry = Entry(entries[solution.steps[:-1]], solution.tokens)
        entries[solution.steps] = entry
        yield solution.steps, JudgedSolution(solution, entry)


class RecordedTokens:
    """Every sampled token by its node's seed and its position, as arrays."""

    def __init__(self, run_seed: int, nodes: dict[tuple[str, str], SampledNode]) -> None:
        found = [(node_seed(run_seed, p, n.step.path), n) for (p, _), n in nodes.items()]
        found.sort(key=lambda item: item[0])
        own = [node.step.tokens for _, node in found]
        ends = np.cumsum([len(tokens) for tokens in own], dtype=np.int64)
        lengths = np.array([node.entry.length for _, node in found], np.int64)
        self.seeds = np.array([seed for seed, _ in found], np.uint64)
        self.counts = np.array([len(tokens) for tokens in own], np.int64)
        self.offsets = ends - lengths  # of a token: this and its position in the sequence
        self.tokens = np.array([token for tokens in own for token in tokens], np.int64)
        self.last = np.zeros(len(self.tokens), bool)
        self.last[ends[ends > 0] - 1] = True
        assert len(np.unique(self.seeds)) == len(found), "two nodes share a seed"


class RecordedExecutor:
    """Carries out step plans with recorded tokens; wanted logits are zeros nobody reads.

    Of the scheduler's stop conditions it knows one: a node ends with its last recorded token.
    """

    def __init__(self, recorded: RecordedTokens) -> None:
        self._recorded = recorded
        self._ended = np.zeros(0, bool)
        self._counts: dict[int, int] = {}  # recorded tokens of the requests in flight

    def run(self, plan: StepPlan) -> StepResult:
        """What the models answered."""
        sampling, recorded = plan.sampling, self._recorded
        nodes = np.searchsorted(recorded.seeds, sampling.seeds)
        places = recorded.offsets[nodes] + sampling.positions
        places = np.minimum(places, len(recorded.tokens) - 1)  # static batches go on for nothing
        self._ended = recorded.last[places]
        wanted = tuple(np.zeros((len(w.rows), 1), np.float32) for w in plan.wanted)
        return StepResult(recorded.tokens[places], wanted=wanted)

    def add(self, request_id: int, params: SamplingParams) -> None:
        """Watch a request; its seed names its node."""
        node = np.searchsorted(self._recorded.seeds, np.uint64(params.seed))
        self._counts[request_id] = int(self._recorded.counts[node])

    def count(self, request_id: int) -> int:
        """How many tokens the request's node has."""
        return self._counts[request_id]

    def remove(self, request_id: int) -> None:
        """Forget a request."""
        self._counts.pop(request_id, None)

    def suspects(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which tokens of the step just run may be their nodes' last."""
        everyone = len(tokens) == len(self._ended)  # a static batch leaves out what has ended
        return self._ended if everyone else np.ones(len(tokens), bool)

    def finish_reason(self, seq: Sequence) -> str | None:
        """Whether the node's last token was sampled."""
        return "stop" if seq.num_output_tokens >= self._counts[seq.request_id] else None


class RecordedPRM(PRM):
    """A PRM that knows its format and columns by name and needs no tokenizer."""

    def __init__(self, engine: Any, recording: Recording) -> None:
        self.engine = engine
        self.format = recording.settings.prm_format
        self.fingerprint = recording.settings.prm_fingerprint
        self.columns = recording.settings.prm_columns


class RecordedScores(ProblemScores):
    """The PRM's view of one problem, read from the recording: inputs, room and scores."""

    def __init__(
        self, prm: PRM, problem: RecordedProblem, answers: Answers, cache: ScoreCache | None
    ) -> None:
        super().__init__(prm, problem.problem, cache)
        self._judged = answers.solutions(problem.problem.id)

    def receive(self, request: ScoreRequest, output: RequestOutput) -> None:
        """Keep the scores that were recorded for what was asked."""
        for node in request.asked:
            score = self._judged[node.steps].solution.score
            if score is None:
                raise self._missing(node.steps)
            node.score = score
            node.in_flight = False
            if self.cache is not None:
                self.cache.put(self.prm.fingerprint, self._problem_id, node.steps, score)
        self.counts.tokens_computed += len(request.token_ids) - output.num_cached_tokens

    def finish(self) -> ScoreCounts:
        """Let the inputs go; a trie's distinct tokens are those of its entries."""
        asked = [node.steps for node in self._nodes.values() if node.asks]
        self.counts.tokens_distinct = sum(len(self._judged[s].solution.tokens) for s in asked)
        for node in self._nodes.values():
            node.lineage.clear()
        self._nodes.clear()
        return self.counts

    def _new(self, parent: StepNode, steps: tuple[str, ...]) -> StepNode:
        found = self._judged.get(steps)
        if found is None:
            raise self._missing(steps)
        solution, entry = found
        tokens: Any = entry.line() if solution.fits else None
        node = StepNode(steps, tokens, solution.asks)
        node.lineage = [*parent.lineage, node]
        if node.asks and self.cache is not None:
            node.score = self.cache.get(self.prm.fingerprint, self._problem_id, steps)
        return node

    def _missing(self, steps: tuple[str, ...]) -> RecordingError:
        return RecordingError(
            f"The recording has no score of {len(steps)} steps of problem {self._problem_id!r} "
            f"that end with {steps[-1][-40:]!r}: replay with the strategy that was recorded."
        )
