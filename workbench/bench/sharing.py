"""How two models share one memory: every policy and static share at KV budgets of 0.5, 1 and 2 W.

Searches of the tiny pair in one arena (experiments/policy_plan.py says what W, the shares and
max_model_len are). All settings of a budget and seed take turns (turns.py), and with them the
uncapped search that bounds them (policy_ceiling.py): every rate, ratio and ceiling is of these
seconds. The default policy and the static shares close to the best of them take turns once more.
Settings that did equal work count as one, so their ratio is 1. What it does not do: choose a
policy's split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from operator import itemgetter
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from workbench.bench.record import Row
from workbench.bench.turns import Outcome, Timed, take_turns
from workbench.experiments.plan import RunSpec
from workbench.experiments.policy_ceiling import bound_seconds, ceiling_tokens_per_s
from workbench.experiments.policy_plan import (
    ELASTIC,
    STATIC,
    THESIS_SHARE,
    PolicyPlan,
    PolicySpec,
    runs_beside,
)
from workbench.experiments.policy_rows import REFERENCE_SETTING, differing, recomputed
from workbench.experiments.policy_study import PolicyStudy, run_policies, setting_of
from workbench.experiments.policy_techniques import ALL, NONE
from workbench.experiments.profiles import sweep_config
from workbench.experiments.record import FINISHED, RunResult
from workbench.experiments.run import ENGINES
from workbench.experiments.sweep import Execute

BUDGETS, SHARES = (0.5, 1.0, 2.0), (0.08, 0.2, THESIS_SHARE, 0.5)
PLANS = {
    "quick": PolicyPlan(3, 2, 1, BUDGETS, SHARES, ()),
    "default": PolicyPlan(16, 12, 2, BUDGETS, SHARES, ()),
    "full": PolicyPlan(128, 12, 3, BUDGETS, SHARES, ()),
}
REPEATS = {"quick": 1, "default": 2, "full": 3}  # turns of those close to the best
CLOSE = 1.1  # of the fastest static share's seconds
UNIT = "tokens/s"


def rows(profile: str, seeds: int | None = None) -> Iterator[Row]:
    """All rows of the two models in one memory. seeds: as many, instead of the profile's."""
    plan = PLANS[profile]
    plan = plan if seeds is None else replace(plan, num_seeds=seeds)
    config = replace(sweep_config(profile), seeds=tuple(range(plan.num_seeds)))
    in_turns = InTurns(plan, REPEATS[profile])
    with TemporaryDirectory() as folder:
        study = run_policies(config, plan, folder, execute=in_turns)
        yield from study_rows(study, in_turns.timed)


class InTurns:
    """Carries out a study's runs: those with memory uncapped alone, then all of a budget and seed
    at once, when the first of them is asked for.
    """

    def __init__(
        self,
        plan: PolicyPlan,
        repeats: int,
        turns: Callable[[Sequence[PolicySpec]], list[Outcome]] = take_turns,
        alone: Execute | None = None,
    ) -> None:
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
            self._keep(budget, repeat, close, self._turns(close))

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
    ours = [spec for spec in found if spec.policy == ELASTIC]
    near = [spec for spec, seconds in static.items() if seconds <= most]
    work = {_work(found[spec].result.measured): spec for spec in [*near, *ours]}
    return list(work.values())


def _work(run: Mapping[str, Any]) -> tuple[int, ...]:
    """What a run computed, in how many steps."""
    kinds = ("prefill_tokens", "decode_tokens", "steps")
    return tuple(int(run[f"{engine}_{kind}"]) for engine in ENGINES for kind in kinds)


def stand_ins(study: PolicyStudy, budget: float) -> dict[str, str]:
    """Every side of a ratio at a budget that could be run, and who takes its turns.

    Itself, or the first of them that did equal work.
    """
    found: dict[str, str] = {}
    for setting in filter(study.has, (*_ours(budget), *_statics(study, budget))):
        twins = (other for other in found.values() if equal_work(study, setting, other))
        found[setting] = next(twins, setting)
    return found


def _ours(budget: float) -> tuple[str, str]:
    """The default policy alone, and with all techniques."""
    return setting_of(budget, ELASTIC, None, NONE), setting_of(budget, ELASTIC, None, ALL)


def _statics(study: PolicyStudy, budget: float) -> list[str]:
    return [setting_of(budget, STATIC, share, NONE) for share in study.plan.kv_shares]


def _setting(spec: PolicySpec) -> str:
    return setting_of(spec.budget, spec.policy, spec.kv_share, spec.technique)


def pairs_at(
    study: PolicyStudy, budget: float, timed: pd.DataFrame, turns: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Ours and its peer of each ratio at a budget, by the row's name.

    timed: of this budget. turns: its stand_ins. The best static share is the one that is fastest
    beside ours, turn for turn.
    """
    ours, everything = _ours(budget)
    thesis = setting_of(budget, STATIC, THESIS_SHARE, NONE)
    beside = {
        static: _mean(_ratios(timed, turns[static], turns[ours]))
        for static in _statics(study, budget)
        if static in turns and ours in turns
    }
    at = f"@{budget:g}W"
    return {
        f"elastic_vs_best_static{at}": (ours, max(beside, key=beside.__getitem__, default=thesis)),
        f"elastic_vs_static_{THESIS_SHARE:g}{at}": (ours, thesis),
        f"all_vs_baseline{at}": (everything, thesis),
    }


def equal_work(study: PolicyStudy, one: str, other: str) -> bool:
    """Whether the runs of two settings computed as many tokens in as many steps, seed by seed."""
    first, second = (
        [_work(run) for run in _records(study.runs_of(setting))] for setting in (one, other)
    )
    return first == second


def study_rows(study: PolicyStudy, timed: pd.DataFrame) -> Iterator[Row]:
    """Every row that the study's runs tell. timed: of `duels`."""
    need, block_size = study.working_set, study.config.block_size
    yield Row("working_set_bytes", need.total, "B", repeats=1)
    yield Row("working_set_llm_bytes", need.llm, "B", repeats=1)
    yield Row("working_set_prm_bytes", need.prm, "B", repeats=1)
    yield Row("max_model_len", need.max_model_len(block_size), "tokens", repeats=1)
    yield _sameness(study)
    ceiling = ceiling_tokens_per_s(study)
    yield Row("measured_bound", ceiling, UNIT, repeats=len(study.config.seeds))
    for budget in study.plan.budgets:
        own = timed[timed["budget"] == budget]
        turns = stand_ins(study, budget)
        for name, pair in pairs_at(study, budget, own, turns).items():
            yield _ratio(study, own, name, turns, *pair)
        yield from _settings(study, budget, own)


def _ratio(
    study: PolicyStudy,
    timed: pd.DataFrame,
    name: str,
    turns: Mapping[str, str],
    ours: str,
    peer: str,
) -> Row:
    """Our tokens a second beside the peer's; the ratio and its least and most: of every turn both
    took, each seed counting as much; the rates and the ceiling: of the first.

    timed: of one budget. turns: its stand_ins.
    """
    label = peer.split("/")[1]
    for setting in (ours, peer):
        if not study.has(setting):
            return Row(name, float("nan"), _why_not(study, setting), label)
    ratios = _ratios(timed, turns[ours], turns[peer])
    rate, other = (_rate(_timed(timed, turns[setting]).loc[[0]]) for setting in (ours, peer))
    ceiling = _ceiling(study, timed)
    return Row(
        name,
        rate,
        UNIT,
        label,
        other,
        _mean(ratios),
        ceiling,
        rate / ceiling,
        len(ratios),
        (float(ratios.min()), float(ratios.max())),
    )


def _ratios(timed: pd.DataFrame, ours: str, peer: str) -> pd.Series:
    """How much faster ours was, by repeat and seed; of the turns that both took."""
    mine, theirs = (_timed(timed, setting)["seconds"] for setting in (ours, peer))
    return (theirs / mine).dropna()


def _mean(ratios: pd.Series) -> float:
    return float(ratios.groupby("seed").mean().mean())


def _rate(timed: pd.DataFrame) -> float:
    """Tokens a second of all seeds' turns."""
    return float(timed["tokens"].sum() / timed["seconds"].sum())


def _ceiling(study: PolicyStudy, timed: pd.DataFrame) -> float:
    """The bound at the pace of these turns. NaN where no uncapped search took any."""
    seconds, tokens = 0.0, 0
    for turn in _records(timed[timed["setting"].str.startswith("uncapped/")]):
        runs = study.runs_of(turn["setting"])
        run = _records(runs[runs["seed"] == turn["seed"]])[0]
        seconds += turn["seconds"] * bound_seconds(run) / run["wall_s"]
        tokens += turn["tokens"]
    return tokens / seconds if seconds else float("nan")


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): cell for name, cell in row.items()} for row in table.to_dict("records")]


def _timed(timed: pd.DataFrame, setting: str) -> pd.DataFrame:
    return timed[timed["setting"] == setting].set_index(["repeat", "seed"]).sort_index()


def _settings(study: PolicyStudy, budget: float, timed: pd.DataFrame) -> Iterator[Row]:
    """One row a policy and share, in the turns all took; what it computed again in another.

    timed: of the budget. The spread is the slowest and the fastest seed's.
    """
    every, ceiling = study.all_runs, _ceiling(study, timed)
    for setting in sorted(every.loc[every["budget"] == budget, "setting"].unique()):
        _, policy, technique = setting.split("/")
        name = policy if technique == NONE else f"{policy}_{technique}"
        if not study.has(setting):
            yield Row(f"{name}@{budget:g}W", float("nan"), _why_not(study, setting))
            continue
        own = _timed(timed, setting).loc[[0]]
        rate, each = _rate(own), own["tokens"] / own["seconds"]
        yield Row(
            f"{name}@{budget:g}W",
            rate,
            UNIT,
            ceiling=ceiling,
            share_of_ceiling=rate / ceiling,
            repeats=len(own),
            spread=(float(each.min()), float(each.max())),
        )
        again = recomputed(study.runs_of(setting))
        yield Row(f"recomputed_{name}@{budget:g}W", again, "tokens", repeats=len(own))


def _why_not(study: PolicyStudy, setting: str) -> str:
    """In place of a unit: a value that there cannot be says why."""
    every = study.all_runs
    rows = every[(every["setting"] == setting) & (every["status"] != FINISHED)]
    reasons = rows["error"].dropna().astype(str).drop_duplicates()
    return f"{rows['status'].iloc[0]}: {reasons.iloc[0]}" if len(reasons) else "not measured"


def _sameness(study: PolicyStudy) -> Row:
    """Nodes whose tokens and score are those of the uncapped search without techniques, over all.

    Of every finished run but that one: with memory uncapped all techniques, too.
    Raises AssertionError where one differs: settings are about speed alone.
    """
    runs = study.all_runs[study.all_runs["status"] == FINISHED]
    runs = runs[runs["setting"] != REFERENCE_SETTING]
    counts = {setting: differing(study, setting) for setting in runs["setting"].unique()}
    wrong = {setting: differ for setting, (differ, _) in counts.items() if differ}
    assert not wrong, f"nodes that are not the uncapped search's, by setting: {wrong}"
    return Row("same_nodes", 1.0, "fraction", repeats=len(runs))
