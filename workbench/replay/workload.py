"""Searches at the thesis's scale, made of MATH-500's lengths and stated assumptions.

Llama-3.2-1B and an 8B PRM in RLHFlow's form, 128 problems. Lengths of problems and reference
solutions are real, and so are those of prompts and templates; how a 1B model's solutions differ
from the reference, branch and end is assumed (`Assumptions`). The same seed gives the same search.
What it does not do: pretend to texts; a token id here is a name.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from workbench.errors import ConfigError, require_types
from workbench.replay.completions import from_completions
from workbench.replay.growth import Asked, DrawnStep, grow
from workbench.replay.lengths import Lengths, math500_lengths
from workbench.replay.thesis_pair import (
    IN_FLIGHT,
    MAX_MODEL_LEN,
    PRM_BETWEEN,
    PRM_HEAD,
    PRM_VERDICT,
    PROMPT_HEAD,
    PROMPT_TAIL,
    drawn_tokens,
    prm_template,
    prompt_of,
    recording_of,
)
from workbench.search.beam import BeamSearch
from workbench.search.problems import Problem
from workbench.search.record import RecordedProblem, Recording
from workbench.search.requests import Beam, Path

__all__ = ["IN_FLIGHT", "MAX_MODEL_LEN", "Assumptions", "drawn_tokens", "from_completions",
           "recording_of", "thesis_search"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What is not known of the 1B model's steps without running it.

    length_ratio: a solution's tokens over the reference's (headings and small steps are written
    out). length_spread: standard deviation of the log of what a step changes in the length to come.
    step_tokens, step_spread: median and log standard deviation of a step's tokens; twins: the part
    of siblings that repeat the one before word for word: all three as SmolLM2's are in the
    recordings of real text. endless: the part of steps after which a solution never ends.
    score_spread: how far a step's score lies from its parent's.
    """

    length_ratio: float = 2.0
    length_spread: float = 0.25
    step_tokens: float = 40.0
    step_spread: float = 0.68
    endless: float = 0.001
    twins: float = 0.004
    score_spread: float = 0.12

    def __post_init__(self) -> None:
        require_types(self)
        for field in fields(self):
            value = getattr(self, field.name)
            most = 1.0 if field.name in ("endless", "twins") else math.inf
            least = 1.0 if field.name == "step_tokens" else 0.0
            if not least <= value <= most or not math.isfinite(value):
                raise ConfigError(
                    f"Assumptions.{field.name} is {value}; allowed: {least:g} to {most:g}."
                )


def thesis_search(
    num_problems: int = 128,
    n: int = 16,
    beam_width: int = 4,
    max_depth: int = 40,
    seed: int = 0,
    assumptions: Assumptions | None = None,
) -> Recording:
    """A beam search over MATH-500 problems by the 1B + 8B pair, ready to be replayed.

    seed: of the draws; the problems are those of the study, whatever it is. Raises ConfigError.
    """
    strategy = BeamSearch(n, beam_width, max_depth)
    given = assumptions or Assumptions()
    problems = [
        _problem(lengths, strategy, seed, given) for lengths in math500_lengths(num_problems)
    ]
    return recording_of(problems, strategy, seed)


def _problem(
    lengths: Lengths, strategy: BeamSearch, seed: int, given: Assumptions
) -> RecordedProblem:
    own = drawn_tokens(random.Random(lengths.id), lengths.problem_tokens)
    asked = Asked(Problem(lengths.id, lengths.id, None, lengths.level), prompt_of(own), own)
    return grow(asked, prm_template(), strategy, _Draws(lengths, seed, given))


class _Progress(NamedTuple):
    """Where a partial solution stands. wanted: tokens to come as it goes now; inf: for ever."""

    wanted: float
    score: float
    tokens: int  # of all steps
    steps: int


class _Draws:
    """Steps of one problem: each from a generator that its path seeds, whoever asks when."""

    def __init__(self, lengths: Lengths, seed: int, given: Assumptions) -> None:
        self._given, self._name = given, f"{seed}/{lengths.id}"
        start = _Progress(given.length_ratio * lengths.solution_tokens, 0.9, 0, 0)
        self._progress: dict[Path, _Progress] = {(): start}
        self._steps: dict[Path, DrawnStep] = {}
        around = PRM_HEAD + PRM_VERDICT + lengths.problem_tokens
        self._room = MAX_MODEL_LEN - max(around, PROMPT_HEAD + PROMPT_TAIL) - 64

    def __call__(self, beams: Sequence[Beam]) -> list[DrawnStep]:
        return list(self._drawn(beams))

    def _drawn(self, beams: Sequence[Beam]) -> Iterator[DrawnStep]:
        for beam in sorted(beams, key=lambda beam: beam.path[-1]):  # twins follow their siblings
            self._steps[beam.path] = self._draw(beam.path)
        for beam in beams:
            yield self._steps[beam.path]

    def _draw(self, path: Path) -> DrawnStep:
        draws, before = random.Random(f"{self._name}/{path}"), (*path[:-1], path[-1] - 1)
        if before in self._steps and draws.random() < self._given.twins:
            self._progress[path] = self._progress[before]
            return self._steps[before]
        step, self._progress[path] = self._new(draws, self._progress[path[:-1]], path)
        return step

    def _new(
        self, draws: random.Random, parent: _Progress, path: Path
    ) -> tuple[DrawnStep, _Progress]:
        given = self._given
        wanted = parent.wanted * draws.lognormvariate(0, given.length_spread)
        count = max(2, round(draws.lognormvariate(math.log(given.step_tokens), given.step_spread)))
        left = self._room - parent.tokens - (parent.steps + 1) * (PRM_BETWEEN + PRM_VERDICT)
        if draws.random() < given.endless:
            wanted = math.inf
        ends = count >= wanted or count >= left - 2 * given.step_tokens
        count = max(2, min(count, math.ceil(min(wanted, left))))
        score = min(max(parent.score + draws.gauss(0, given.score_spread), 0.0), 1.0)
        text = "/".join(map(str, path)) + "\n\n"
        step = DrawnStep(drawn_tokens(draws, count), text, score, ends)
        after = _Progress(wanted - count, score, parent.tokens + count, parent.steps + 1)
        return step, after
