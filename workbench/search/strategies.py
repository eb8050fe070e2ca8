"""What a strategy and the runner say to each other, and the strategies, as they read on paper.

A strategy is a generator over plain data: no engine, no tokenizer, no torch. It yields `Generate`
and is sent one `Step` a beam; it yields `Score` and is sent, for each beam, one score for each of
its steps; it returns an `Outcome`. Beam search over reasoning steps (Snell et al. 2024; Search and
Learn's `beam_search`) and best-of-N (its `best_of_n`), whose rows are also where pass@1, pass@k and
majority voting at n come from. variants.py has the others, and the list of all.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

from workbench.config import AGGREGATIONS, AtLeastOne, Checked
from workbench.search.answers import aggregate
from workbench.search.problems import Problem

STEP_END = "\n\n"
NodePath = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Beam:
    """A partial solution: the node `path` of the tree and everything sampled on the way to it.

    token_ids: what was sampled, without the prompt, never re-tokenised and never cut.
    steps: the text of each step; step_scores: of each that is more than white space, once it was
    scored.
    finished: the model ended the solution. ended: why a beam that is not finished cannot go on.
    """

    path: NodePath = ()
    token_ids: tuple[int, ...] = ()
    text: str = ""
    step_scores: tuple[float, ...] = ()
    finished: bool = False
    steps: tuple[str, ...] = ()
    ended: str = ""

    @property
    def can_grow(self) -> bool:
        """Whether another step may be sampled."""
        return not self.finished and not self.ended

    def child(self, ordinal: int) -> Beam:
        """The node to be sampled as this beam's `ordinal`-th child; it holds nothing new yet."""
        return replace(self, path=(*self.path, ordinal))

    def grown(self, step: Step, pieces: Sequence[str] | None = None) -> Beam:
        """This node with what was sampled for it: one step, or the `pieces` its text is made of."""
        return replace(
            self,
            token_ids=self.token_ids + step.token_ids,
            text=self.text + step.text,
            finished=step.finish_reason == "eos",
            steps=self.steps + ((step.text,) if pieces is None else tuple(pieces)),
            ended="context" if step.finish_reason == "context" else "",
        )

    def scored(self, scores: Sequence[float]) -> Beam:
        """The same beam with the scores of all its steps; white space alone was not judged."""
        known = zip(self.steps, scores, strict=True)
        return replace(self, step_scores=tuple(score for step, score in known if step.strip()))


@dataclass(frozen=True, slots=True)
class Step:
    """What one Generate brought for one beam; `text` keeps the stop string.

    finish_reason: "stop", its stop string; "eos", the model ended the solution; "length",
    max_tokens; "context", a model has no room left (max_model_len), and the beam ends unfinished.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Generate:
    """Please sample one step for each beam. max_tokens None is the run's max_step_tokens. ahead: to
    judge what it follows, which is not kept for it.
    """

    beams: tuple[Beam, ...]
    stop: tuple[str, ...] = (STEP_END,)
    max_tokens: int | None = None
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """Please score every step of each beam. own: so many of them, the first, are asked about for
    themselves (None: all), the others for those that they follow.
    """

    beams: tuple[Beam, ...]
    own: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a search ended: n beams, finished and unfinished, best first, ties by path.

    DVTS may return fewer; the same beam may stand several times in a particle filter's.
    """

    beams: tuple[Beam, ...]


SearchGenerator = Generator[Generate | Score, Any, Outcome]


class Strategy(Protocol):
    """Frozen settings and one generator; needs no engine, no tokenizer and no torch."""

    @property
    def n(self) -> int:
        """Beams of the outcome."""
        ...

    @property
    def aggregation(self) -> str:
        """How a beam's step scores become one number."""
        ...

    def search(self, problem: Problem) -> SearchGenerator:
        """The search for one problem, whose answer it is never given."""
        ...


# -- strategies --


@dataclass(frozen=True, slots=True)
class BeamSearch(Checked):
    """n beams, of which n // beam_width survive an iteration, for at most max_depth iterations.

    Snell et al. 2024 (arXiv 2408.03314), as the thesis runs it. finish_at_limit samples the last
    iteration to the end of the solution, with limit_tokens at most, as Search and Learn does, and
    has each of its steps scored; without it a beam at the depth limit stays unfinished.
    """

    n: AtLeastOne = 16
    beam_width: AtLeastOne = 4
    max_depth: AtLeastOne = 40
    finish_at_limit: bool = False
    limit_tokens: AtLeastOne = 2048
    aggregation: Annotated[str, AGGREGATIONS] = "last"

    def search(self, problem: Problem) -> SearchGenerator:
        """Extend, score, keep the best and refill, until n beams have ended or at max_depth."""
        done: list[Beam] = []
        survivors = [Beam()]
        for depth in range(1, self.max_depth + 1):
            active = refill(survivors, self.n - len(done))
            if self.finish_at_limit and depth == self.max_depth:
                steps = yield Generate(active, stop=(), max_tokens=self.limit_tokens)
                pieces = [split_steps(step.text) for step in steps]
            else:
                steps = yield Generate(active)
                pieces = [(step.text,) for step in steps]
            beams = tuple(map(Beam.grown, active, steps, pieces))
            scores = yield Score(beams)
            scored = [beam.scored(row) for beam, row in zip(beams, scores)]
            done += [beam for beam in scored if not beam.can_grow]
            growing = [beam for beam in scored if beam.can_grow]
            if not growing:
                return outcome(done, self.aggregation)
            survivors = best(growing, max(1, self.n // self.beam_width), self.aggregation)
        return outcome(done + growing, self.aggregation)


def best(beams: Sequence[Beam], count: int, aggregation: str) -> list[Beam]:
    """The `count` best beams in index order; ties keep the lowest index."""
    return [beams[index] for index in best_places(beams, count, aggregation)]


def best_places(beams: Sequence[Beam], count: int, aggregation: str) -> list[int]:
    """Where the `count` best beams stand, ascending."""
    scores = [aggregate(beam.step_scores, aggregation) for beam in beams]
    chosen = sorted(range(len(beams)), key=lambda index: (-scores[index], index))[:count]
    return sorted(chosen)


def refill(survivors: Sequence[Beam], places: int) -> tuple[Beam, ...]:
    """`places` nodes to sample, cycling over the survivors; the k-th copy of one is its child k."""
    width = len(survivors)
    return tuple(survivors[slot % width].child(slot // width) for slot in range(places))


def split_steps(text: str) -> tuple[str, ...]:
    """The non-empty pieces of a completion between blank lines; each but the last keeps its end.

    "a", "a\\n\\nb", "a\\n\\nb\\n\\n" and "a\\n\\n\\n\\nb" have 1, 2, 2 and 2 steps.
    """
    pieces = text.split(STEP_END)
    ended = [piece + STEP_END for piece in pieces[:-1]] + pieces[-1:]
    return tuple(piece for piece in ended if piece.strip())


@dataclass(frozen=True, slots=True)
class BestOfN(Checked):
    """n samples of at most max_tokens tokens each, every one scored step by step.

    After Cobbe et al. 2021 (arXiv 2110.14168), whose verifier judges whole solutions.
    """

    n: AtLeastOne = 16
    max_tokens: AtLeastOne = 2048
    aggregation: Annotated[str, AGGREGATIONS] = "last"

    def search(self, problem: Problem) -> SearchGenerator:
        """One Generate, one Score, and the samples in order of their scores."""
        nodes = tuple(Beam().child(ordinal) for ordinal in range(self.n))
        steps = yield Generate(nodes, stop=(), max_tokens=self.max_tokens)
        beams = tuple(node.grown(step, split_steps(step.text)) for node, step in zip(nodes, steps))
        scores = yield Score(beams)
        return outcome([b.scored(s) for b, s in zip(beams, scores)], self.aggregation)


def outcome(beams: list[Beam], aggregation: str) -> Outcome:
    """The beams best first, ties by path."""
    return Outcome(
        tuple(sorted(beams, key=lambda b: (-aggregate(b.step_scores, aggregation), b.path)))
    )
