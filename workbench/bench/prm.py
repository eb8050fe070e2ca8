"""Whether a PRM finds the first wrong step, by ProcessBench's measures: its files, the tiny family.

A solution is predicted to go wrong at its first step that scores below 1/2, or nowhere. Of
erroneous solutions those count whose first wrong step was named, of correct ones those where none
was; F1 is the harmonic mean of both. Source: Zheng et al. 2024, arXiv 2412.06559; for reward models
whose scores are no probabilities the paper chooses the threshold, the best on one of its subsets.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import harmonic_mean

import numpy as np

from workbench.bench.record import Row
from workbench.bench.search import TINY_PRM
from workbench.engine.engine import Engine
from workbench.errors import ProblemFileError
from workbench.experiments.statistics import wilson
from workbench.search.prm import PRM, ProblemScores, ScoreCache, ScoreRequest
from workbench.search.problems import Problem, tiny_problems
from workbench.search.strategies import Beam
from workbench.training.corpus import StudentRates, work_out

PROFILES = {"quick": 100, "default": 1000, "full": 4000}  # solutions of the tiny family
THRESHOLD = 0.5
MODE = {"batch_invariant": True}
STUDENT = StudentRates(check=0.0)
"""A step that only checks is labelled not right and is no error: none is written here."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """A solution by its steps. first_error: index of the first wrong one; None: all are right."""

    problem: Problem
    steps: tuple[str, ...]
    first_error: int | None


def run(
    profile: str = "default",
    prm: str = TINY_PRM,
    data: str | None = None,
    seed: int = 0,
    prm_format: str | None = None,
    critiques: int | None = None,
    critique_tokens: int | None = None,
) -> Iterator[Row]:
    """The rows of `workbench bench prm`. seed: of the tiny family's solutions, and of critiques."""
    solutions = tiny_solutions(PROFILES[profile], seed) if data is None else read_solutions(data)
    judge = PRM(Engine(prm), prm_format).changed(None, count=critiques, tokens=critique_tokens)
    yield from rows_of(judge, solutions, seed)


def tiny_solutions(count: int, seed: int = 0) -> list[Labelled]:
    """Worked solutions of held-out problems, a step right if what it leaves has the sum's value."""
    found, rng = [], random.Random(f"bench-prm-{seed}")
    for problem in tiny_problems(count, seed=seed):
        terms = tuple(int(term) for term in re.findall(r"[+-]?\d+", problem.problem))
        steps = work_out(terms, rng, STUDENT).steps
        wrong = [place for place, step in enumerate(steps) if not step.correct]
        first = wrong[0] if wrong else None
        found.append(Labelled(problem, tuple(step.text for step in steps), first))
    return found


def read_solutions(path: str | Path) -> list[Labelled]:
    """A file's solutions: rows with problem, steps and label, the index of the first wrong step or
    -1. Raises ProblemFileError naming the row.
    """
    found = []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ProblemFileError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            problem, steps, label = row["problem"], tuple(row["steps"]), row["label"]
            texts = all(isinstance(text, str) and text.strip() for text in (problem, *steps))
            if not (steps and texts and type(label) is int and -1 <= label < len(steps)):
                raise ValueError(f"label is {label!r} of {len(steps)} steps")
        except (ValueError, KeyError, TypeError) as error:
            raise ProblemFileError(
                f"{path}, row {number}: {type(error).__name__} {error}; a row holds problem, "
                "a text, steps (texts, one or more) and label (-1, or the index of a step)."
            ) from error
        name = Problem(f"{number}-{row.get('id', '')}", problem)
        found.append(Labelled(name, steps, None if label < 0 else label))
    if not found:
        raise ProblemFileError(f"{path} holds no solution; give one row or more.")
    return found


def step_scores(prm: PRM, solutions: Sequence[Labelled], seed: int = 0) -> list[ProblemScores]:
    """Every step of every solution scored: the scores of each, which reply to its beam alone."""
    prm.require_room()
    found, asked = [], dict[int, tuple[ProblemScores, ScoreRequest]]()
    for each in solutions:
        found.append(ProblemScores(prm, each.problem, ScoreCache(), seed))
        asked |= {prm.queue(r): (found[-1], r) for r in found[-1].requests([_beam(each)])}
    while prm.engine.has_work:
        for output in prm.engine.step():
            own, request = asked.pop(output.request_id)
            if output.error is not None:
                raise output.error
            if request.params is None:
                own.receive(request, output)
            else:
                verdict = own.verdict_request(request, output)
                asked[prm.queue(verdict)] = own, verdict
    return found


def rows_of(prm: PRM, solutions: Sequence[Labelled], seed: int = 0) -> Iterator[Row]:
    """The measures, with 95 % intervals of the two accuracies."""
    found = step_scores(prm, solutions, seed)
    scores = [own.replies([_beam(each)])[0] for own, each in zip(found, solutions, strict=True)]
    right = _named(scores, solutions, THRESHOLD)
    wrong = np.array([each.first_error is not None for each in solutions])
    for name, which in (("erroneous", wrong), ("correct", ~wrong)):
        yield Row(name, float(which.sum()), "solutions")
        spread = None
        if which.any():
            bounds = wilson(float(right[which].mean()), int(which.sum()))
            spread = (bounds.low, bounds.high)
        share = float(right[which].mean()) if which.any() else float("nan")
        yield Row(f"accuracy_{name}", share, "of them", repeats=int(which.sum()), spread=spread)
    yield Row("f1", f1(right, wrong), "F1")
    tried = sorted({score for own in scores for score in own})
    tried = tried[:: max(1, len(tried) // 200)]
    best = max(
        (THRESHOLD, *tried), key=lambda threshold: f1(_named(scores, solutions, threshold), wrong)
    )
    yield Row("f1_best_threshold", f1(_named(scores, solutions, best), wrong), "F1")
    yield Row("best_threshold", best, "score")
    cut = sum(not own.has_room(each.steps) for own, each in zip(found, solutions, strict=True))
    yield Row("beyond_context", float(cut), "solutions")


def f1(right: np.ndarray, wrong: np.ndarray) -> float:
    """Harmonic mean of the accuracies on erroneous and on correct solutions; NaN without either."""
    if wrong.all() or not wrong.any():
        return float("nan")
    return harmonic_mean([float(right[wrong].mean()), float(right[~wrong].mean())])


def _named(
    scores: Sequence[Sequence[float]], solutions: Sequence[Labelled], threshold: float
) -> np.ndarray:
    """Of each solution, whether the prediction is its label."""
    predicted = [next((k for k, s in enumerate(own) if s < threshold), None) for own in scores]
    pairs = zip(predicted, solutions, strict=True)
    return np.array([prediction == each.first_error for prediction, each in pairs])


def _beam(each: Labelled) -> Beam:
    return Beam(path=(0,), steps=each.steps)
