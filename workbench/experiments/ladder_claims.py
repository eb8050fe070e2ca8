"""C7 and C8, the claims that the ladder of modifications answers.

What it does not do: judge claims of the sweep (claims.py).
"""

from __future__ import annotations

import pandas as pd

from workbench.experiments.claims import DEPENDS, FAILS, HOLDS, Claim
from workbench.experiments.face import rung
from workbench.experiments.ladder import LadderStudy
from workbench.experiments.ladder_plan import LAST_TWO
from workbench.experiments.ladder_rows import accuracy_gain, depth_pairs, speed_up
from workbench.experiments.statistics import Interval, proportion_upper_bound

DRAMATIC = 1.5
"""Times the problems/min from which on a modification is called dramatic."""
HARDLY = 0.05
"""Accuracy below which a gain is hardly one."""


def ladder_claims(study: LadderStudy) -> list[Claim]:
    """Both claims, as far as their rungs were measured."""
    named = rung(study.runs)
    found = []
    if {"score_cache", LAST_TWO[0]} <= set(study.rungs):
        found.append(batching_claim(speed_up(study, "score_cache", LAST_TWO[0]), named))
    if set(LAST_TWO) <= set(study.rungs):
        found.append(finishing_claim(depth_pairs(study), study.config.max_depth, named))
    return found


def batching_claim(gain: Interval, named: str = "measured tiny") -> Claim:
    """C7. Holds where the whole interval of the gain is 1.5 times or more, fails where it is less,
    else it depends.
    """
    verdict = HOLDS if gain.low >= DRAMATIC else FAILS if gain.high < DRAMATIC else DEPENDS
    number = (
        f"{gain.estimate:.2f} times the problems/min [{gain.low:.2f}, {gain.high:.2f}]; "
        f"dramatic means {DRAMATIC:g} times"
    )
    text = "Continuous problem batching helps dramatically"
    return Claim("C7", text, verdict, number, "modifications", named)


def finishing_claim(pairs: pd.DataFrame, max_depth: int, named: str = "measured tiny") -> Claim:
    """C8, at the search's own depth limit. Holds where the upper bound of the accuracy gained is
    below 0.05, fails where the lower one is above it, else it depends.

    Where no answer changed the bound is that of a rate never seen in so many problems, unless no
    beam came to the limit: then nothing was sampled to an end, and the claim is not tested.
    """
    own = pairs[pairs["max_depth"] == max_depth]
    gain, reached = accuracy_bound(own), int(own["reached_finishes"].sum())
    verdict = HOLDS if gain.high < HARDLY else FAILS if gain.low > HARDLY else DEPENDS
    verdict = verdict if reached else DEPENDS
    number = (
        f"accuracy {gain.estimate:+.3f} [{gain.low:.3f}, {gain.high:.3f}] at a limit of "
        f"{max_depth} steps, which {reached} of {len(own)} searches reached"
    )
    lower = pairs[pairs["max_depth"] < max_depth]
    for limit, rows in lower.groupby("max_depth"):
        number += f"; {accuracy_gain(rows).estimate:+.2f} at {limit}"
    text = "Sampling to the end hardly helps accuracy"
    return Claim("C8", text, verdict, f"{number}; hardly means {HARDLY:g}", "modifications", named)


def accuracy_bound(pairs: pd.DataFrame) -> Interval:
    """accuracy_gain; where no answer changed, its bounds are those of changes never seen."""
    gain = accuracy_gain(pairs)
    if (pairs["correct_stops"] != pairs["correct_finishes"]).any():
        return gain
    bound = proportion_upper_bound(0, int(pairs["problem_id"].nunique()))
    return Interval(0.0, -bound, bound, gain.units)
