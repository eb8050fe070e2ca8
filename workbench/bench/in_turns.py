"""A study of policies carried out in turns: all settings of a budget and seed at one time.

Runs with memory uncapped come first, alone. The one of the lower bound takes turns with every
budget's settings, so that a ceiling is of the same minutes. The default policy and the static
shares close to the best of them may take turns again. What it does not do: compare (sharing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from operator import itemgetter
from typing import Any

import pandas as pd

from workbench.bench.turns import Outcome, Timed, take_turns
from workbench.experiments.plan import RunSpec
from workbench.experiments.policy_ceiling import bound_seconds
from workbench.experiments.policy_plan import ELASTIC, STATIC, PolicyPlan, PolicySpec, runs_beside
from workbench.experiments.policy_study import setting_of
from workbench.experiments.policy_techniques import NONE
from workbench.experiments.record import RunResult
from workbench.experiments.run import ENGINES
from workbench.experiments.sweep import Execute

CLOSE = 1.05  # of the fastest static share's seconds


class InTurns:
    """Carries out runs as policy_run.execute does; all of a budget and seed when the first of them
    is asked for.

    repeats: how often those close to the best take turns. turns, alone: who carries out many, and
    one.
    """

    def __init__(
        self,
        plan: PolicyPlan,
        repeats: int,
        turns: Callable[[Sequence[PolicySpec]], list[Outcome]] = take_turns,
        alone: Execute | None = None,
    ) -> None:
        assert not plan.repeats, "turns are repeated, not runs"
        self._plan, self._repeats, self._turns, self._alone = plan, repeats, turns, alone
        self._uncapped: list[tuple[float, PolicySpec]] = []  # seconds of the bound
        self._outcomes: dict[str, Outcome] = {}
        self._timed: list[tuple[float, str, int, int, float, int]] = []

    @property
    def timed(self) -> pd.DataFrame:
        """Columns: budget (whose turns they were), setting, repeat, seed, seconds, tokens."""
        names = ["budget", "setting", "repeat", "seed", "seconds", "tokens"]
        return pd.DataFrame(self._timed, columns=names)

    def __call__(self, spec: RunSpec) -> RunResult:
        """Raises what building the engines or the search raised."""
        if not isinstance(spec, PolicySpec) or spec.budget is None:
            return self._execute_alone(spec)
        if spec.name not in self._outcomes:
            self._take_turns(spec, spec.budget)
        outcome = self._outcomes.pop(spec.name)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome.result

    def _execute_alone(self, spec: RunSpec) -> RunResult:
        execute = self._alone or import_module("workbench.experiments.policy_run").execute
        result: RunResult = execute(spec)
        if isinstance(spec, PolicySpec):
            self._uncapped.append((bound_seconds(result.measured), spec))
        return result

    def _take_turns(self, asked: PolicySpec, budget: float) -> None:
        specs = runs_beside(asked, self._plan)
        bounds = [pair for pair in self._uncapped if pair[1].seed == asked.seed]
        bound = [min(bounds, key=itemgetter(0))[1]] if bounds else []
        outcomes = self._turns([*specs, *bound])
        self._outcomes |= {spec.name: found for spec, found in zip(specs, outcomes)}
        self._keep(budget, 0, [*specs, *bound], outcomes)
        close = _close(dict(zip(specs, outcomes)))
        for repeat in range(1, self._repeats if len(close) > 1 else 1):
            again = self._turns(close)
            self._keep(budget, repeat, close, again)
            failed = {s.name: each for s, each in zip(close, again) if isinstance(each, Exception)}
            self._outcomes |= failed

    def _keep(
        self, budget: float, repeat: int, specs: list[PolicySpec], outcomes: list[Outcome]
    ) -> None:
        for spec, found in zip(specs, outcomes, strict=True):
            if isinstance(found, Timed):
                tokens = int(found.result.measured["sampled_tokens"])
                at = (budget, _setting(spec), repeat, spec.seed)
                self._timed.append((*at, found.seconds, tokens))


def _close(outcomes: Mapping[PolicySpec, Outcome]) -> list[PolicySpec]:
    """The default policy alone and the static shares close to the best, equal work once."""
    found = {s: o for s, o in outcomes.items() if isinstance(o, Timed) and s.technique == NONE}
    static = {spec: timed.seconds for spec, timed in found.items() if spec.policy == STATIC}
    most = CLOSE * min(static.values(), default=0.0)
    near = [spec for spec, seconds in static.items() if seconds <= most]
    different: dict[tuple[int, ...], PolicySpec] = {}
    for spec in (*(spec for spec in found if spec.policy == ELASTIC), *near):
        different.setdefault(work_of(found[spec].result.measured), spec)
    return list(different.values())


def work_of(run: Mapping[str, Any]) -> tuple[int, ...]:
    """What a run computed, in how many steps."""
    kinds = ("prefill_tokens", "decode_tokens", "steps")
    return tuple(int(run[f"{engine}_{kind}"]) for engine in ENGINES for kind in kinds)


def _setting(spec: PolicySpec) -> str:
    return setting_of(spec.budget, spec.policy, spec.kv_share, spec.technique)
