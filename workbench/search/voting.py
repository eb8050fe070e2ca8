"""From step scores to one number a beam, and from beams to one answer.

Aggregation and voting are applied alike by every strategy. An empty answer never votes; ties go to
the first seen. What it does not do: read answers out of text or compare them (answers.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from workbench.errors import ConfigError, nearest

AGGREGATIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "last": lambda scores: scores[-1],
    "min": min,
    "prod": math.prod,
    "mean": fmean,
}
VOTINGS = ("weighted", "majority", "naive")
UNSCORED = 0.5
"""Score of a beam without a step: the PRM has seen nothing for or against it."""


def check_choice(name: str, given: str, allowed: Sequence[str]) -> None:
    """Raises ConfigError, with the nearest known name, unless `given` is allowed."""
    if given not in allowed:
        hint = nearest(str(given), tuple(allowed))
        raise ConfigError(f"{name} is {given!r}; allowed: {', '.join(allowed)}.{hint}")


def aggregate(scores: Sequence[float], aggregation: str = "last") -> float:
    """One number for a beam from its step scores; 0.5 when it has none."""
    return float(AGGREGATIONS[aggregation](scores)) if scores else UNSCORED


def vote(
    answers: Sequence[str], scores: Sequence[float], groups: Sequence[int], voting: str = "weighted"
) -> str:
    """The answer that wins, as its group's first member wrote it; "" when nobody votes.

    answers, scores, groups: one entry a beam, in the order seen; beams whose answers are equal
    share a group number. majority counts, weighted sums scores, naive takes the best score.
    """
    totals: dict[int, float] = {}
    first: dict[int, str] = {}
    for answer, score, group in zip(answers, scores, groups, strict=True):
        if not answer:
            continue
        first.setdefault(group, answer)
        totals[group] = _tally(totals.get(group), score, voting)
    if not totals:
        return ""
    return first[max(totals, key=totals.__getitem__)]  # max keeps the first of equals


def _tally(total: float | None, score: float, voting: str) -> float:
    if voting == "majority":
        return (total or 0.0) + 1
    if voting == "weighted":
        return (total or 0.0) + score
    return score if total is None else max(total, score)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n samples hold a right one (Chen et al. 2021, eq. 1)."""
    if not 1 <= k <= n:
        raise ConfigError(
            f"pass@k needs 1 <= k <= n; k is {k}, n is {n}: sample more, or ask for less."
        )
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)
