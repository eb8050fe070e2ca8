"""A recorded search in the models' place: tokens for step plans, scores for the search.

Both models' inputs are kept as tries of token ids. A node of a trie remembers the block hashes of
its path, for each block size once, however often the recording is replayed; sequences of a replay
hand them to the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.core import (
    RequestOutput,
    SamplingParams,
    Sequence,
    StepPlan,
    StepResult,
    Tag,
    node_seed,
)
from workbench.errors import RecordingError
from workbench.kvcache.manager import extend_chain
from workbench.search.prm import (
    PRM,
    Critiques,
    ProblemScores,
    ScoreCache,
    ScoreRequest,
    StepNode,
    critique_seed,
)
from workbench.search.recording import (
    RecordedCritique,
    RecordedProblem,
    RecordedSolution,
    RecordedStep,
    Recording,
)
from workbench.search.result import node_id
from workbench.search.strategies import NodePath


class TokenTrie:
    """A node of a trie of token ids. tokens: its own; length: of the path from the root to it."""

    __slots__ = ("_hashes", "length", "parent", "tokens")

    def __init__(self, parent: TokenTrie | None, tokens: tuple[int, ...]) -> None:
        self.parent, self.tokens = parent, tokens
        self.length: int = len(tokens) + (parent.length if parent else 0)
        self._hashes: dict[tuple[bytes, int], list[bytes]] = {}

    def between(self, start: int, stop: int) -> list[int]:
        """The token ids at these positions of the path."""
        node: TokenTrie | None = self
        parts: list[tuple[int, ...]] = []
        while node is not None and stop > start:
            first = node.length - len(node.tokens)
            if first < stop:
                parts.append(node.tokens[max(0, start - first) : stop - first])
                stop = max(first, start)
            node = node.parent
        return [*chain.from_iterable(reversed(parts))]

    def block_hashes(self, root: bytes, block_size: int) -> list[bytes]:
        """Hashes of the path's full blocks; do not change the list."""
        found = self._hashes.get((root, block_size))
        if found is None:
            found = list(self.parent.block_hashes(root, block_size)) if self.parent else []
            extend_chain(root, found, self.between(0, self.length), block_size)
            self._hashes[root, block_size] = found
        return found


class TriePath:
    """The first `length` token ids of a node's path, used as a sequence's list of token ids.

    Slices from 0 are paths too, and share the node; others are lists.
    """

    __slots__ = ("length", "node")

    def __init__(self, node: TokenTrie, length: int) -> None:
        self.node, self.length = node, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(self.node.between(0, self.length))

    def __getitem__(self, places: slice) -> Any:
        start, stop, _ = places.indices(self.length)
        return self.node.between(start, stop) if start else TriePath(self.node, stop)

    def append(self, token: int) -> None:
        """The path's next token was sampled."""
        self.length += 1

    def block_hashes(self, root: bytes, block_size: int) -> list[bytes]:
        """Hashes of the node's full blocks, these and later ones; do not change the list."""
        return self.node.block_hashes(root, block_size)


class SampledNode(NamedTuple):
    """A recorded step, or critique, and its node in the trie of its problem."""

    step: RecordedStep | RecordedCritique
    trie: TokenTrie


class ReadCritique(NamedTuple):
    """A recorded critique, and the trie's node at whose end its verdict is read."""

    sampled: SampledNode
    verdict: TokenTrie


class ScoredSolution(NamedTuple):
    """A recorded solution and its node in the trie of the PRM's inputs."""

    solution: RecordedSolution
    trie: TokenTrie


class Answers:
    """A recording prepared for replays, any number of them."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        settings = recording.settings
        self._critiques: dict[int, SampledNode] = {}  # by seed
        # by problem, the texts of the steps and its number
        self.critiques: dict[str, dict[tuple[Any, ...], ReadCritique]] = {}
        self._nodes: dict[tuple[str, str], SampledNode] = {}
        by_seed: dict[int, SampledNode] = {}
        # the PRM's inputs and scores by problem and the texts of the steps
        self.solutions: dict[str, dict[tuple[str, ...], ScoredSolution]] = {}
        for problem in recording.problems:
            name = problem.problem.id
            sampled: dict[NodePath, TokenTrie] = {(): TokenTrie(None, problem.prompt)}
            for step in problem.steps:
                trie = sampled[step.path] = TokenTrie(sampled[step.path[:-1]], step.tokens)
                node = self._nodes[name, node_id(step.path)] = SampledNode(step, trie)
                by_seed[node_seed(settings.seed, name, step.path)] = node
            scored = self.solutions[name] = {}
            for each in problem.solutions:
                before = scored[each.steps[:-1]].trie if len(each.steps) > 1 else None
                scored[each.steps] = ScoredSolution(each, TokenTrie(before, each.tokens))
            read = self.critiques[name] = {}
            for c in problem.critiques:
                *steps, number = c.key
                asked = TokenTrie(scored[tuple(steps)].trie, settings.prm_ask)
                sampled_node = SampledNode(c, TokenTrie(asked, c.tokens))
                shown = c.tokens[:-1] if c.finish_reason == "eos" else c.tokens
                verdict = TokenTrie(TokenTrie(asked, shown), settings.prm_lead)
                read[c.key] = ReadCritique(sampled_node, verdict)
                seed = critique_seed(settings.seed, name, tuple(steps), number)
                self._critiques[seed] = sampled_node
        assert len(by_seed) == len(self._nodes), "two nodes share a seed"
        self.tokens = RecordedTokens(by_seed | self._critiques)

    def sampled(self, params: SamplingParams, tag: Tag) -> SampledNode:
        """What a request sampled: a critique, by its seed, or the node that the tag names."""
        problem, node = tag.problem_id, tag.node_id
        found = self._critiques.get(params.seed) or self._nodes.get((problem, node))
        if found is None or not found.step.tokens:
            raise RecordingError(
                f"The recording has no tokens of node {node!r} of problem {problem!r}: replay "
                "with the strategy, n and sizes that were recorded, or record that search too."
            )
        return found


class RecordedTokens:
    """Every sampled token by its node's or critique's seed and its position, as arrays."""

    def __init__(self, nodes: dict[int, SampledNode]) -> None:
        found = sorted(nodes.items(), key=lambda item: item[0])
        own = [node.step.tokens for _, node in found]
        ends = np.cumsum([len(tokens) for tokens in own], dtype=np.int64)
        lengths = np.array([node.trie.length for _, node in found], np.int64)
        self.seeds = np.array([seed for seed, _ in found], np.uint64)
        self.counts = np.array([len(tokens) for tokens in own], np.int64)
        self.offsets = ends - lengths  # of a token: this and its position in the sequence
        self.tokens = np.array([token for tokens in own for token in tokens], np.int64)
        self.last = np.zeros(len(self.tokens), bool)
        self.last[ends[ends > 0] - 1] = True


class RecordedExecutor:
    """Carries out step plans with recorded tokens, and tells the scheduler when a node ends.

    A row's seed names its node, its position the token. Wanted logits are zeros that are not read.
    """

    def __init__(self, recorded: RecordedTokens) -> None:
        self._recorded = recorded
        self._seeds = np.zeros(0, np.uint64)  # of the rows sampled last, and
        self._offsets = np.zeros(0, np.int64)  # their nodes' RecordedTokens.offsets
        self._ended = np.zeros(0, bool)
        self._counts: dict[int, int] = {}  # recorded tokens of the requests in flight

    def run(self, plan: StepPlan) -> StepResult:
        """The recorded tokens of a step."""
        sampling, recorded = plan.sampling, self._recorded
        if not np.array_equal(sampling.seeds, self._seeds):  # most steps sample the same nodes
            self._seeds = sampling.seeds
            self._offsets = recorded.offsets[np.searchsorted(recorded.seeds, sampling.seeds)]
        places = self._offsets + sampling.positions
        places = np.minimum(places, len(recorded.tokens) - 1)  # rows of a static batch that ended
        self._ended = recorded.last[places]
        wanted = tuple(np.zeros((len(w.rows), 1), np.float32) for w in plan.wanted)
        return StepResult(recorded.tokens[places], wanted=wanted)

    def add(self, request_id: int, params: SamplingParams) -> None:
        """Watch a request; its seed names its node."""
        node = np.searchsorted(self._recorded.seeds, np.uint64(params.seed))
        self._counts[request_id] = int(self._recorded.counts[node])

    def remove(self, request_id: int) -> None:
        """Forget a request."""
        self._counts.pop(request_id, None)

    def suspects(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which tokens of the step just run may be their nodes' last."""
        all_rows = len(tokens) == len(self._ended)  # a static batch leaves out what has ended
        return self._ended if all_rows else np.ones(len(tokens), bool)

    def finish_reason(self, seq: Sequence) -> str | None:
        """Whether the node's last token was sampled."""
        return "stop" if seq.num_output_tokens >= self._counts[seq.request_id] else None


class RecordedPRM(PRM):
    """A PRM that knows its format and columns by name and needs no tokenizer."""

    def __init__(self, engine: Any, recording: Recording) -> None:
        settings, self.engine = recording.settings, engine
        self.format = settings.prm_format
        self.fingerprint = settings.prm_fingerprint
        self.columns = settings.prm_columns
        if settings.prm_critiques is not None:
            self.critiques = Critiques(**settings.prm_critiques)


class RecordedScores(ProblemScores):
    """The PRM's view of one problem, read from the recording: inputs, room and scores."""

    def __init__(
        self, prm: PRM, problem: RecordedProblem, answers: Answers, cache: ScoreCache | None
    ) -> None:
        super().__init__(prm, problem.problem, cache, answers.recording.settings.seed)
        self._scored = answers.solutions[problem.problem.id]
        self._read = answers.critiques[problem.problem.id]

    def entered(self, parent: StepNode, steps: tuple[str, ...]) -> tuple[Any, bool]:
        found = self._scored.get(steps)
        if found is None:
            raise self._missing(steps)
        solution, trie = found
        return TriePath(trie, trie.length) if solution.fits else None, solution.asks

    def critique_input(self, node: StepNode, number: int) -> Any:
        sampled = self._critique(node, number).sampled
        return TriePath(sampled.trie, sampled.trie.length - len(sampled.step.tokens))

    def verdict_input(self, node: StepNode, number: int) -> Any:
        verdict = self._critique(node, number).verdict
        return TriePath(verdict, verdict.length)

    def _critique(self, node: StepNode, number: int) -> ReadCritique:
        found = self._read.get((*node.steps, number))
        if found is None:
            raise self._missing(node.steps)
        return found

    def verdicts(self, request: ScoreRequest, output: RequestOutput) -> Iterator[float]:
        for node in request.asked:
            score = self._scored[node.steps].solution.score
            if self.prm.critiques is not None:
                critique = self._critique(node, request.critique).sampled.step
                assert isinstance(critique, RecordedCritique)
                score = critique.score
            if score is None:
                raise self._missing(node.steps)
            yield score

    def distinct_tokens(self, asked: list[StepNode]) -> int:
        own = sum(len(self._scored[node.steps].solution.tokens) for node in asked)
        for node in asked:
            start = self._scored[node.steps].trie.length
            own += sum(self._critique(node, k).verdict.length - start for k in node.critiques)
        return own

    def _missing(self, steps: tuple[str, ...]) -> RecordingError:
        return RecordingError(
            f"The recording has no score of {len(steps)} steps of problem {self._problem[0]!r} "
            f"that end with {steps[-1][-40:]!r}: replay with the strategy that was recorded."
        )
