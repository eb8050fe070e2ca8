"""The strategies that papers propose beside beam search and best-of-N, and the list of all.

Each says what it keeps and how often it goes on from it, over the protocol of strategies.py.
Chance, where there is any, is a hash of seed, problem and step: no batch and no order enters.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from itertools import accumulate
from typing import Annotated, Any, ClassVar

import numpy as np

from workbench.config import AGGREGATIONS, AtLeastOne, Checked, Range, check, check_subtrees
from workbench.core import node_seed
from workbench.search.answers import aggregate
from workbench.search.problems import Problem
from workbench.search.strategies import (
    Beam,
    BeamSearch,
    BestOfN,
    Generate,
    NodePath,
    Score,
    SearchGenerator,
    Strategy,
    best,
    best_places,
    outcome,
    refill,
    split_steps,
)

Positive = Annotated[float, Range(1e-6)]


STEP_BY_STEP = "Let's think step by step."
"""An instruction: chain of thought without examples (Kojima et al. 2022, arXiv 2205.11916)."""
WORKED = (
    "Q: A shelf holds 3 boxes of 8 pens, and 5 pens lie beside them. How many pens are there?\nA: "
    "3 boxes of 8 pens are 3 * 8 = 24 pens. With the 5 beside them there are 24 + 5 = 29. The "
    "answer is \\boxed{29}.",
    "Q: What is the sum of all x with x^2 = 7x - 12?\nA: x^2 - 7x + 12 = (x - 3)(x - 4), so x is 3 "
    "or 4. Their sum is 3 + 4 = 7. The answer is \\boxed{7}.",
)
"""Examples of chain of thought (Wei et al. 2022, arXiv 2201.11903); the problems are our own."""


@dataclass(frozen=True, slots=True)
class SelfConsistency(Checked):
    """The answer that most of n samples give, without a score (Wang et al. 2022, arXiv 2203.11171).

    examples: worked problems, put before the question, as WORKED; instruction: put after it, as
    STEP_BY_STEP.
    """

    n: AtLeastOne = 16
    max_tokens: AtLeastOne = 2048
    instruction: str = ""
    examples: tuple[str, ...] = ()
    aggregation: Annotated[str, AGGREGATIONS] = "last"  # of no scores: all votes weigh the same
    asks_scores: ClassVar[bool] = False

    def posed(self, problem: Problem) -> Problem:
        """The problem as the model is asked it; the PRM, for another vote, sees it as it is."""
        parts = (*self.examples, problem.problem, self.instruction)
        return replace(problem, problem="\n\n".join(filter(None, parts)))

    def search(self, problem: Problem) -> SearchGenerator:
        """One Generate, and the samples in their order."""
        nodes = children([Beam()], [self.n])
        steps = yield Generate(nodes, stop=(), max_tokens=self.max_tokens)
        beams = [node.grown(step, split_steps(step.text)) for node, step in zip(nodes, steps)]
        return outcome(beams, self.aggregation)


@dataclass(frozen=True, slots=True)
class DVTS:
    """Diverse verifier tree search: n // beam_width subtrees that go on from their best child.

    Beeching, Tunstall and Rush 2024, "Scaling test-time compute with open models" (Search and
    Learn's `dvts`). A subtree ends with its best child; that child's finished siblings vote with
    it, unfinished ones never do.
    """

    n: AtLeastOne = 16
    beam_width: AtLeastOne = 4
    max_depth: AtLeastOne = 40
    aggregation: Annotated[str, AGGREGATIONS] = "last"

    def __post_init__(self) -> None:
        check(self)
        check_subtrees(self)

    def search(self, problem: Problem) -> SearchGenerator:
        """Extend each subtree's node by beam_width children, and keep the best of them."""
        done: list[Beam] = []
        nodes = children([Beam()], [self.n])
        for depth in range(1, self.max_depth + 1):
            beams = yield from extended(nodes)
            kept = []
            for first in range(0, len(beams), self.beam_width):
                siblings = beams[first : first + self.beam_width]
                (chosen,) = best(siblings, 1, self.aggregation)
                if chosen.can_grow and depth < self.max_depth:
                    kept.append(chosen)
                else:
                    done += [beam for beam in siblings if beam is chosen or beam.finished]
            if not kept:
                break
            nodes = children(kept, [self.beam_width] * len(kept))
        return outcome(done, self.aggregation)


@dataclass(frozen=True, slots=True)
class Lookahead(Checked):
    """Beam search that judges a beam by the steps that follow it (Snell et al. 2024, 2408.03314).

    What is sampled ahead is the first child of what it judges, so a survivor keeps it and it is not
    sampled again; where its parent is dropped it was sampled for its score alone. It has the
    temperature of all steps; the paper's roll-outs have 0, and are thrown away.
    """

    n: AtLeastOne = 16
    beam_width: AtLeastOne = 4
    max_depth: AtLeastOne = 40
    lookahead: AtLeastOne = 1
    aggregation: Annotated[str, AGGREGATIONS] = "last"

    def search(self, problem: Problem) -> SearchGenerator:
        """As BeamSearch; a beam's score is that of its first child's first child's ... steps."""
        known: dict[NodePath, Beam] = {}
        done: list[Beam] = []
        survivors = [Beam()]
        for depth in range(1, self.max_depth + 1):
            beams = yield from sampled(refill(survivors, self.n - len(done)), known)
            ahead = beams
            for _ in range(min(self.lookahead, self.max_depth - depth)):
                if not any(beam.can_grow for beam in ahead):
                    break
                further = [beam.child(0) if beam.can_grow else beam for beam in ahead]
                ahead = yield from sampled(further, known, ahead=True)
            asked = {beam.path: beam for beam in (*beams, *ahead)}
            rows = dict(zip(asked, (yield Score(tuple(asked.values()), len(beams)))))
            beams = [beam.scored(rows[beam.path]) for beam in beams]
            done += [beam for beam in beams if not beam.can_grow]
            growing = [beam for beam in beams if beam.can_grow]
            if not growing:
                break
            judged = [a.scored(rows[a.path]) for b, a in zip(beams, ahead) if b.can_grow]
            places = best_places(judged, max(1, self.n // self.beam_width), self.aggregation)
            survivors = [growing[place] for place in places]
        return outcome(done + growing, self.aggregation)


@dataclass(frozen=True, slots=True)
class REBASE(Checked):
    """Reward-balanced search (Wu et al. 2024, arXiv 2408.00724): children by softmax of scores.

    The n places that finished beams leave are divided among all beams that can grow, in proportion
    to exp(score / balance_temperature).
    """

    n: AtLeastOne = 16
    max_depth: AtLeastOne = 40
    balance_temperature: Positive = 0.2
    aggregation: Annotated[str, AGGREGATIONS] = "last"

    def search(self, problem: Problem) -> SearchGenerator:
        """Extend, score and give every beam its share of the next step's children."""
        done: list[Beam] = []
        nodes = children([Beam()], [self.n])
        for _ in range(self.max_depth):
            beams = yield from extended(nodes)
            done += [beam for beam in beams if not beam.can_grow]
            growing = [beam for beam in beams if beam.can_grow]
            if not growing:
                break
            nodes = children(growing, allotted(self.weights(growing), self.n - len(done)))
        return outcome(done + growing, self.aggregation)

    def weights(self, beams: Sequence[Beam]) -> list[float]:
        """The relative number of children of each beam."""
        scores = [aggregate(beam.step_scores, self.aggregation) for beam in beams]
        return softmax(scores, self.balance_temperature)


@dataclass(frozen=True, slots=True)
class ETS(REBASE):
    """Efficient tree search (Hooper et al. 2025, arXiv 2502.13575): REBASE of beams worth their KV.

    Kept are those that maximise their shares of REBASE's children, minus sharing_weight times the
    part of the tree's nodes they need, plus coverage_weight times the part of all kinds of steps
    they cover. Where the paper solves an integer program, this begins with all beams and leaves out
    or takes back the beams of one subtree at a time, the smallest first, while that gains; where it
    clusters embeddings of last steps, a kind is here the same text.
    """

    sharing_weight: Annotated[float, Range(0)] = 1.0
    coverage_weight: Annotated[float, Range(0)] = 1.0

    def weights(self, beams: Sequence[Beam]) -> list[float]:
        """REBASE's, and 0 for what is not kept."""
        weights = REBASE.weights(self, beams)
        counts = allotted(weights, len(beams))
        below, alike = Counter[NodePath](), Counter[str]()  # sets of beams as bits
        for i, beam in enumerate(beams):
            below.update({beam.path[:depth]: 1 << i for depth in range(len(beam.path) + 1)})
            alike[" ".join(beam.steps[-1].split())] += 1 << i
        nodes_below = Counter(below.values())
        # the three parts over one denominator: whole numbers, so ties are exact
        child = len(below) * len(alike)
        node = self.sharing_weight * len(beams) * len(alike)
        kind = self.coverage_weight * len(beams) * len(below)

        def worth(kept: int) -> float:
            children = sum(count for i, count in enumerate(counts) if kept >> i & 1)
            nodes = sum(count for these, count in nodes_below.items() if kept & these)
            kinds = sum(1 for these in alike.values() if kept & these)
            return child * children - node * nodes + kind * kinds

        kept, before = (1 << len(beams)) - 1, 0
        while kept != before:
            before = kept
            for these in sorted(nodes_below, key=int.bit_count):
                kept = max(kept, kept & ~these or kept, kept | these, key=worth)
        return [weight if kept >> i & 1 else 0.0 for i, weight in enumerate(weights)]


@dataclass(frozen=True, slots=True)
class DORA(REBASE):
    """Direction-oriented allocation (Wang et al. 2025, arXiv 2506.15707): REBASE by direction.

    Beams that say the same share one direction's children instead of multiplying them: a weight is
    multiplied by the beam's part in its own direction, the softmax of similarities over
    direction_temperature. Where the paper compares embeddings of the solutions, this compares
    their counts of three characters in a row, by cosine.
    """

    direction_temperature: Positive = 0.01

    def weights(self, beams: Sequence[Beam]) -> list[float]:
        """REBASE's of the beams that it would extend, times each one's uniqueness among them."""
        weights = REBASE.weights(self, beams)
        counts = allotted(weights, len(beams))
        chosen = [i for i, count in enumerate(counts) if count]
        rows = similarities([beams[i].text for i in chosen])
        unique = [softmax(row, self.direction_temperature)[k] for k, row in enumerate(rows)]
        part = dict(zip(chosen, unique))
        return [weight * part.get(i, 0.0) for i, weight in enumerate(weights)]


@dataclass(frozen=True, slots=True)
class ParticleFilter(Checked):
    """n particles, resampled by score after every step (Puri et al. 2025, arXiv 2502.01618).

    A particle's weight is exp(logit(score) / weight_temperature). Finished particles are drawn from
    like the others, so one may stand in the outcome several times. The last step is not resampled:
    its scores weigh in the vote. seed: None is the run's; draws depend on it, problem and step.
    """

    n: AtLeastOne = 16
    max_depth: AtLeastOne = 40
    weight_temperature: Positive = 1.0
    aggregation: Annotated[str, AGGREGATIONS] = "last"
    seed: int | None = None

    def search(self, problem: Problem) -> SearchGenerator:
        """Extend what can grow, weigh all, and draw the next n particles."""
        ended: list[Beam] = []
        nodes = children([Beam()], [self.n])
        for step in range(1, self.max_depth + 1):
            beams = yield from extended(nodes)
            particles = ended + beams
            if step == self.max_depth or not any(beam.can_grow for beam in beams):
                break
            counts = self.drawn(particles, problem, step)
            copies = [(b, count) for b, count in zip(particles, counts) if not b.can_grow]
            ended = [beam for beam, count in copies for _ in range(count)]
            growing = [(b, count) for b, count in zip(particles, counts) if b.can_grow and count]
            particles = ended
            if not growing:
                break
            nodes = children(*zip(*growing))
        return outcome(particles, self.aggregation)

    def drawn(self, particles: Sequence[Beam], problem: Problem, step: int) -> list[int]:
        """How often each particle is among n independent draws."""
        scores = [aggregate(beam.step_scores, self.aggregation) for beam in particles]
        clipped = (min(max(score, 1e-7), 1 - 1e-7) for score in scores)
        logits = [math.log(score / (1 - score)) for score in clipped]
        ends = list(accumulate(softmax(logits, self.weight_temperature)))
        stream = f"{problem.id}\x1fresampling"  # its numbers are no node's
        seeds = (node_seed(self.seed or 0, stream, (step, draw)) for draw in range(self.n))
        places = Counter(bisect_right(ends, (seed >> 11) / 2**53 * ends[-1]) for seed in seeds)
        return [places[k] for k in range(len(particles))]


STRATEGIES: dict[str, type[Any]] = {
    "beam_search": BeamSearch,
    "best_of_n": BestOfN,
    "self_consistency": SelfConsistency,
    "dvts": DVTS,
    "lookahead": Lookahead,
    "rebase": REBASE,
    "ets": ETS,
    "dora": DORA,
    "particle_filter": ParticleFilter,
}
"""By their names in settings; the first line of each class says what it does."""


def strategy_with(name: str, given: Mapping[str, Any]) -> Strategy:
    """The strategy of a name, with what is given of its own settings; None is as usual."""
    kind = STRATEGIES[name]
    own = {each.name for each in fields(kind)} & {key for key in given if given[key] is not None}
    made: Strategy = kind(**{key: given[key] for key in own})
    return made


# -- what strategies have in common --


def extended(nodes: Sequence[Beam]) -> Generator[Generate | Score, Any, list[Beam]]:
    """These nodes with one more step each, scored."""
    steps = yield Generate(tuple(nodes))
    beams = tuple(node.grown(step) for node, step in zip(nodes, steps))
    scores = yield Score(beams)
    return [beam.scored(row) for beam, row in zip(beams, scores)]


def sampled(
    nodes: Sequence[Beam], known: dict[NodePath, Beam], ahead: bool = False
) -> Generator[Generate, Any, list[Beam]]:
    """These nodes with their step, not scored; each is sampled once and then `known`."""
    new = tuple(node for node in nodes if node.path not in known)
    if new:
        steps = yield Generate(new, ahead=ahead)
        known |= {node.path: node.grown(step) for node, step in zip(new, steps)}
    return [known[node.path] for node in nodes]


def children(beams: Iterable[Beam], counts: Iterable[int]) -> tuple[Beam, ...]:
    """So many nodes to sample below each beam."""
    return tuple(beam.child(k) for beam, count in zip(beams, counts) for k in range(count))


def allotted(weights: Sequence[float], places: int) -> list[int]:
    """`places` divided in proportion to the weights, as REBASE's authors do: each gets its share of
    what is left, rounded up, the heaviest first; ties keep the lowest index.
    """
    counts, exact = [0] * len(weights), [Fraction(weight) for weight in weights]
    left = sum(exact)
    for index in sorted(range(len(weights)), key=lambda i: -weights[i]):
        if places:
            counts[index] = math.ceil(places * exact[index] / left)
            places -= counts[index]
            left -= exact[index]
    return counts


def softmax(values: Sequence[float], temperature: float) -> list[float]:
    """exp(value / temperature), in parts of their sum."""
    most = max(values)
    powers = [math.exp((value - most) / temperature) for value in values]
    total = math.fsum(powers)
    return [power / total for power in powers]


def similarities(texts: Sequence[str]) -> list[list[float]]:
    """The cosine between any two texts' counts of three characters in a row; 1 on the diagonal."""
    bags = [Counter(zip(f"  {text}", f" {text}", text)) for text in texts]
    column = {key: place for place, key in enumerate({key for bag in bags for key in bag})}
    counts = np.zeros((len(bags), len(column)))
    for row, bag in zip(counts, bags):
        row[[column[key] for key in bag]] = list(bag.values())
    products = counts @ counts.T  # sums of whole numbers: exact, in any order
    squares = np.maximum(products.diagonal(), 1)
    found = products / np.sqrt(squares[:, None] * squares[None, :])
    np.fill_diagonal(found, 1.0)
    return found.tolist()
