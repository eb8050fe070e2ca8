"""Best-of-N: n whole solutions, one scoring pass (Search and Learn's `best_of_n`).

Its rows are also where pass@1, pass@k and majority voting at n come from.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.errors import ConfigError
from workbench.search.problems import Problem
from workbench.search.requests import STEP_END, Beam, Generate, Outcome, Score, Search
from workbench.search.voting import AGGREGATIONS, aggregate, check_choice


def split_steps(text: str) -> tuple[str, ...]:
    """The non-empty pieces of a completion between blank lines; each but the last keeps its end.

    "a", "a\\n\\nb", "a\\n\\nb\\n\\n" and "a\\n\\n\\n\\nb" have 1, 2, 2 and 2 steps.
    """
    pieces = text.split(STEP_END)
    ended = [piece + STEP_END for piece in pieces[:-1]] + pieces[-1:]
    return tuple(piece for piece in ended if piece.strip())


@dataclass(frozen=True, slots=True)
class BestOfN:
    """n samples of at most max_tokens tokens each, every one scored step by step."""

    n: int = 16
    max_tokens: int = 2048
    aggregation: str = "last"

    def __post_init__(self) -> None:
        for name in ("n", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"BestOfN.{name} is {getattr(self, name)}; allowed: >= 1.")
        check_choice("BestOfN.aggregation", self.aggregation, tuple(AGGREGATIONS))

    def search(self, problem: Problem) -> Search:
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
