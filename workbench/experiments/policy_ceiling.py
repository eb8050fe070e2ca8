"""The measured bound of the study of policies: how fast any arrangement of the memory could be.

With memory uncapped nothing is evicted and nobody waits for room, so every step is as large as the
limits allow; that is the best pace this machine has for the search. What an uncapped search still
computes twice are the tokens of blocks that were never full. So the bound takes an uncapped search
and leaves that out:

    bound_s = wall_s * (outside + sum over models of busy_s * once) / (outside + sum of busy_s)
    once    = (tokens computed - tokens computed again) / tokens computed        of one model
    outside = wall_s - sum of busy_s, at least 0 (models that overlap are busy at one time)

that is, each distinct token computed exactly once at the uncapped pace. Both uncapped searches of
the study, without techniques and with all, give a bound; the faster counts. No budget enters: a
tight one may forbid to keep what is needed again, so the bound is the same for all budgets and
need not be within reach of any policy. Runs that take turns have it from the uncapped search with
all techniques, at their own pace. It is our own, no machine's: a change to the engine moves it, and
a share of it a little above 1 is noise, or what an uncapped memory loses by being larger than the
caches. What it does not do: bound machines (GB/s, GFLOP/s: machine_ceiling.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from workbench.experiments.policy_study import PolicyStudy, setting_of
from workbench.experiments.policy_techniques import ALL, NONE
from workbench.experiments.run import ENGINES

WHY = ("evicted", "preempted", "partial")


def ceiling_tokens_per_s(study: PolicyStudy) -> float:
    """Generated tokens a second; at the pace of the runs where they took turns. NaN where no
    uncapped search finished.
    """
    if "bound_tokens_per_s" in study.all_runs:
        own = study.all_runs.dropna(subset="bound_tokens_per_s").drop_duplicates("seed")
        seconds = own["sampled_tokens"] / own["bound_tokens_per_s"]
        return float(own["sampled_tokens"].sum() / seconds.sum())
    fastest = bound_setting(study)
    return float("nan") if fastest is None else _rate(study.runs_of(fastest))


def bound_setting(study: PolicyStudy) -> str | None:
    """The uncapped search that gives the bound; None where none finished."""
    settings = [setting_of(None, "first_come", None, technique) for technique in (NONE, ALL)]
    finished = [setting for setting in settings if study.has(setting)]
    return max(finished, key=lambda setting: _rate(study.runs_of(setting)), default=None)


def bound_seconds(run: Mapping[str, Any]) -> float:
    """Seconds of one uncapped run, had it computed every distinct token once. run: its row."""
    busy = {engine: float(run[f"{engine}_busy_s"]) for engine in ENGINES}
    outside = max(0.0, float(run["wall_s"]) - sum(busy.values()))
    needed = outside + sum(seconds * once(run, engine) for engine, seconds in busy.items())
    return float(run["wall_s"]) * needed / (outside + sum(busy.values()))


def once(run: Mapping[str, Any], engine: str) -> float:
    """The part of the tokens one model computed that it had not computed before."""
    computed = float(run[f"{engine}_prefill_tokens"] + run[f"{engine}_decode_tokens"])
    again = sum(float(run[f"{engine}_recomputed_tokens_{why}"]) for why in WHY)
    return 1.0 - again / computed if computed else 1.0


def _rate(runs: pd.DataFrame) -> float:
    """Tokens of all seeds over their bounds."""
    rows = runs.to_dict("records")
    seconds = sum(bound_seconds({str(k): v for k, v in row.items()}) for row in rows)
    return float(runs["sampled_tokens"].sum() / seconds)
