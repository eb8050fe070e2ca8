"""Beam search over reasoning steps (Snell et al. 2024; Search and Learn's `beam_search`).

Each iteration extends every active beam by one step, scores it, keeps the best n // beam_width of
those that can go on, and refills from them. A beam that has ended keeps its place among the n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.errors import ConfigError
from workbench.search.best_of_n import outcome
from workbench.search.problems import Problem
from workbench.search.requests import Beam, Extension, Generate, Score, Search
from workbench.search.voting import AGGREGATIONS, aggregate, check_choice


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """n beams, of which n // beam_width survive an iteration, for at most max_depth iterations.

    finish_at_limit samples the last iteration to the end of the solution, with limit_tokens at
    most, as Search and Learn does; without it a beam at the depth limit stays unfinished.
    """

    n: int = 16
    beam_width: int = 4
    max_depth: int = 40
    finish_at_limit: bool = False
    limit_tokens: int = 2048
    aggregation: str = "last"

    def __post_init__(self) -> None:
        for name in ("n", "beam_width", "max_depth", "limit_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"BeamSearch.{name} is {getattr(self, name)}; allowed: >= 1.")
        check_choice("BeamSearch.aggregation", self.aggregation, tuple(AGGREGATIONS))

    @property
    def num_survivors(self) -> int:
        """Beams kept by an iteration."""
        return max(1, self.n // self.beam_width)

    def search(self, problem: Problem) -> Search:
        """Extend, score, keep the best and refill, until n beams have ended or at max_depth."""
        done: list[Beam] = []
        survivors = [Beam()]
        for depth in range(1, self.max_depth + 1):
            active = refill(survivors, self.n - len(done))
            steps = yield self._generate(active, depth)
            beams = tuple(node.grown(step) for node, step in zip(active, steps))
            scores = yield Score(beams)
            scored = [beam.scored(row) for beam, row in zip(beams, scores)]
            done += [beam for beam in scored if not beam.can_grow]
            growing = [beam for beam in scored if beam.can_grow]
            if not growing:
                return outcome(done, self.aggregation)
            survivors = best(growing, self.num_survivors, self.aggregation)
        return outcome(done + growing, self.aggregation)

    def _generate(self, active: tuple[Beam, ...], depth: int) -> Generate:
        here = self._extension(depth)
        then = self._extension(depth + 1) if depth < self.max_depth else None
        return Generate(active, here.stop, here.max_tokens, then)

    def _extension(self, depth: int) -> Extension:
        """How the steps of an iteration are sampled."""
        if self.finish_at_limit and depth == self.max_depth:
            return Extension(stop=(), max_tokens=self.limit_tokens)
        return Extension()


def best(beams: Sequence[Beam], count: int, aggregation: str) -> list[Beam]:
    """The `count` best beams in index order; ties keep the lowest index."""
    scores = [aggregate(beam.step_scores, aggregation) for beam in beams]
    chosen = sorted(range(len(beams)), key=lambda index: (-scores[index], index))[:count]
    return [beams[index] for index in sorted(chosen)]


def refill(survivors: Sequence[Beam], places: int) -> tuple[Beam, ...]:
    """`places` nodes to sample, cycling over the survivors; the k-th copy of one is its child k."""
    width = len(survivors)
    return tuple(survivors[slot % width].child(slot // width) for slot in range(places))
