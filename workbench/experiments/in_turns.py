"""A study of policies carried out in turns: the settings of a budget and seed at one time.

Runs with memory uncapped come first, alone. The one with all techniques takes turns in every round,
so that a ceiling is of the same minutes: the others' column bound_tokens_per_s. Where a budget has
more settings than a round, these tell the rounds' paces apart. The default policy and the static
shares close to the best of them may take turns again. What it does not do: compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pandas as pd

from workbench.experiments.noise import WORK
from workbench.experiments.plan import RunSpec
from workbench.experiments.policy_ceiling import bound_seconds
from workbench.experiments.policy_plan import (
    ELASTIC,
    ROUND,
    STATIC,
    PolicyPlan,
    PolicySpec,
    reference_runs,
    runs_at,
)
from workbench.experiments.policy_study import setting_of
from workbench.experiments.policy_techniques import ALL, NONE
from workbench.experiments.record import RunResult
from workbench.experiments.sweep import Execute
from workbench.experiments.turns import Outcome, Timed, result_of, take_turns

CLOSE = 1.05  # of the fastest static share's seconds


class InTurns:
    """Carries out runs as policy_run.execute does; a whole round when the first of it is asked for.

    repeats: how often those close to the best take turns. turns, alone: who carries out many, and
    one. progress: show a bar of each round.
    """

    def __init__(
        self,
        plan: PolicyPlan,
        repeats: int = 1,
        turns: Callable[[Sequence[PolicySpec]], list[Outcome]] | None = None,
        alone: Execute | None = None,
        progress: bool = False,
    ) -> None:
        self._plan, self._repeats, self._alone = plan, repeats, alone
        self._turns = turns or partial(take_turns, progress=progress)
        self._outcomes: dict[str, Outcome] = {}
        self._timed: list[tuple[float, str, int, int, float, int]] = []

    @property
    def timed(self) -> pd.DataFrame:
        """Columns: budget (whose turns they were), setting, repeat (of its turns, of what the plan
        runs once), seed, seconds, tokens.
        """
        names = ["budget", "setting", "repeat", "seed", "seconds", "tokens"]
        return pd.DataFrame(self._timed, columns=names)

    def __call__(self, spec: RunSpec) -> RunResult:
        """Raises what building the engines or the search raised."""
        if not isinstance(spec, PolicySpec) or spec.budget is None:
            execute = self._alone or import_module("workbench.experiments.policy_run").execute
            alone: RunResult = execute(spec)
            return alone
        if spec.name not in self._outcomes:
            self._take_turns(spec, spec.budget)
        return result_of(self._outcomes.pop(spec.name))

    def _take_turns(self, asked: PolicySpec, budget: float) -> None:
        specs, bound_spec = runs_beside(asked, self._plan), _bound(asked)
        *outcomes, bound = self._turns([*specs, bound_spec])
        found = {spec: _beside(each, bound) for spec, each in zip(specs, outcomes, strict=True)}
        self._keep(budget, 0, [*specs, bound_spec], [*outcomes, bound])
        self._outcomes |= {spec.name: each for spec, each in found.items()}
        close = _close(found)
        for repeat in range(1, self._repeats if len(close) > 1 else 1):
            again = self._turns(close)
            self._keep(budget, repeat, close, again)
            failed = {s.name: each for s, each in zip(close, again) if isinstance(each, Exception)}
            self._outcomes |= failed

    def _keep(
        self, budget: float, repeat: int, specs: list[PolicySpec], outcomes: list[Outcome]
    ) -> None:
        for spec, found in zip(specs, outcomes, strict=True):
            if isinstance(found, Timed) and not spec.repeat:
                tokens = int(found.result.measured["sampled_tokens"])
                at = (budget, _setting(spec), repeat, spec.seed)
                self._timed.append((*at, found.seconds, tokens))


def runs_beside(spec: PolicySpec, plan: PolicyPlan) -> list[PolicySpec]:
    """The runs that take turns with this one, itself included: a round of its budget and seed."""
    assert spec.budget is not None, "no budget is set beside uncapped memory"
    every = runs_at(spec.config, spec.seed, spec.budget, spec.kv_bytes, plan)
    first = every.index(spec) // ROUND * ROUND
    return every[first : first + ROUND]


def _bound(asked: PolicySpec) -> PolicySpec:
    """The uncapped search of this seed with all techniques: the same whenever a study goes on."""
    every = reference_runs(asked.config)
    return next(spec for spec in every if (spec.seed, spec.technique) == (asked.seed, ALL))


def _beside(found: Outcome, bound: Outcome) -> Outcome:
    """What was found, with the bound at the pace of its turns; without one it is worth nothing."""
    if isinstance(found, Exception):
        return found
    if isinstance(bound, Exception):
        return bound
    run = bound.result.measured
    rate = {"bound_tokens_per_s": run["sampled_tokens"] / bound_seconds(run)}
    result = replace(found.result, measured={**found.result.measured, **rate})
    return found._replace(result=result)


def _close(outcomes: Mapping[PolicySpec, Outcome]) -> list[PolicySpec]:
    """The default policy alone and the static shares close to the best, equal work once."""
    found = {
        spec: timed
        for spec, timed in outcomes.items()
        if isinstance(timed, Timed) and spec.technique == NONE and not spec.repeat
    }
    static = {spec: timed.seconds for spec, timed in found.items() if spec.policy == STATIC}
    most = CLOSE * min(static.values(), default=0.0)
    near = [spec for spec, seconds in static.items() if seconds <= most]
    different: dict[tuple[int, ...], PolicySpec] = {}
    for spec in (*(spec for spec in found if spec.policy == ELASTIC), *near):
        different.setdefault(work_of(found[spec].result.measured), spec)
    return list(different.values())


def work_of(run: Mapping[str, Any]) -> tuple[int, ...]:
    """What a run computed, in how many steps."""
    return tuple(int(run[column]) for column in WORK)


def _setting(spec: PolicySpec) -> str:
    return setting_of(spec.budget, spec.policy, spec.kv_share, spec.technique)
