"""How two models share one memory: every policy and static share at KV budgets of 0.5, 1 and 2 W.

Searches of the tiny pair in one arena (experiments/policy_plan.py says what W, the shares and
max_model_len are). First every setting once, one after the other; then those that are set against
each other again, every static share among them, taking turns (turns.py). Which share is the best,
and all ratios, are of these seconds alone: the first pass measures the minute. Of settings that did
equal work one takes the turns of all, and their ratio is 1. The ceiling is the measured bound of
policy_ceiling.py; its uncapped search takes turns with the others. What it does not do: choose a
policy's split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from tempfile import TemporaryDirectory

import pandas as pd

from workbench.bench.record import Row
from workbench.bench.turns import Timed, take_turns
from workbench.experiments.policy_ceiling import (
    bound_seconds,
    bound_setting,
    ceiling_tokens_per_s,
)
from workbench.experiments.policy_plan import (
    ELASTIC,
    STATIC,
    THESIS_SHARE,
    PolicyPlan,
    PolicySpec,
    policy_config,
    reference_runs,
    tight_runs,
)
from workbench.experiments.policy_rows import REFERENCE_SETTING, differing, recomputed
from workbench.experiments.policy_study import (
    PolicyStudy,
    rates_of,
    run_policies,
    setting_of,
    speed,
)
from workbench.experiments.policy_techniques import ALL, NONE
from workbench.experiments.profiles import sweep_config
from workbench.experiments.record import FINISHED

BUDGETS, SHARES = (0.5, 1.0, 2.0), (0.08, 0.2, THESIS_SHARE, 0.5)
PLANS = {
    "quick": PolicyPlan(3, 2, 1, BUDGETS, SHARES, ()),
    "default": PolicyPlan(16, 12, 2, BUDGETS, SHARES, ()),
    "full": PolicyPlan(128, 12, 3, BUDGETS, SHARES, ()),
}
REPEATS = {"quick": 1, "default": 1, "full": 3}  # of what takes turns, each seed
UNIT = "tokens/s"
TakeTurns = Callable[[Sequence[PolicySpec]], list[Timed]]


def rows(profile: str, seeds: int | None = None) -> Iterator[Row]:
    """All rows of the two models in one memory. seeds: as many, instead of the profile's."""
    plan = PLANS[profile]
    plan = plan if seeds is None else replace(plan, num_seeds=seeds)
    config = replace(sweep_config(profile), seeds=tuple(range(plan.num_seeds)))
    with TemporaryDirectory() as folder:
        study = run_policies(config, plan, folder)
        yield from study_rows(study, duels(study, REPEATS[profile]))


def duels(study: PolicyStudy, repeats: int, turns: TakeTurns = take_turns) -> pd.DataFrame:
    """All sides of ratios and the bound again: at each budget and seed they take turns.

    Columns: budget, setting, repeat, seed, seconds, tokens. AssertionError where other tokens were
    sampled.
    """
    own = policy_config(study.config, study.plan)
    every = [*reference_runs(own), *tight_runs(own, study.plan, study.working_set)]
    found = []
    for budget in study.plan.budgets:
        wanted = {*stand_ins(study, budget).values(), bound_setting(study)}
        specs = [spec for spec in every if _setting(spec) in wanted]
        for repeat, seed in product(range(repeats), own.seeds):
            each = [spec for spec in specs if spec.seed == seed]
            for spec, timed in zip(each, turns(each), strict=True):
                sampled = study.runs_of(_setting(spec)).set_index("seed").at[seed, "sampled_tokens"]
                assert timed.tokens == sampled, f"{spec.name} sampled other tokens in its turns"
                found.append((budget, _setting(spec), repeat, seed, *timed))
    return pd.DataFrame(found, columns=["budget", "setting", "repeat", "seed", *Timed._fields])


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

    timed: of this budget. turns: its stand_ins.
    """
    ours, everything = _ours(budget)
    thesis = setting_of(budget, STATIC, THESIS_SHARE, NONE)
    rates = {
        static: _rate(_timed(timed, turns[static]))
        for static in _statics(study, budget)
        if static in turns
    }
    at = f"@{budget:g}W"
    return {
        f"elastic_vs_best_static{at}": (ours, max(rates, key=rates.__getitem__, default=thesis)),
        f"elastic_vs_static_{THESIS_SHARE:g}{at}": (ours, thesis),
        f"all_vs_baseline{at}": (everything, thesis),
    }


def equal_work(study: PolicyStudy, one: str, other: str) -> bool:
    """Whether the runs of two settings computed as many tokens in as many steps."""
    first, second = rates_of(study, (one, other)).work
    return bool(first == second)


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
        yield from _settings(study, budget, ceiling)


def _ratio(
    study: PolicyStudy,
    timed: pd.DataFrame,
    name: str,
    turns: Mapping[str, str],
    ours: str,
    peer: str,
) -> Row:
    """Our tokens a second beside the peer's; spread: the least and most of a seed.

    timed: of one budget. turns: its stand_ins.
    """
    label = peer.split("/")[1]
    for setting in (ours, peer):
        if not study.has(setting):
            return Row(name, float("nan"), _why_not(study, setting), label)
    mine, theirs = (_timed(timed, turns[setting]) for setting in (ours, peer))
    ratios = theirs["seconds"] / mine["seconds"]
    rate, other, ceiling = _rate(mine), _rate(theirs), _ceiling(study, timed)
    return Row(
        name,
        rate,
        UNIT,
        label,
        other,
        rate / other,
        ceiling,
        rate / ceiling,
        len(ratios),
        (float(ratios.min()), float(ratios.max())),
    )


def _rate(timed: pd.DataFrame) -> float:
    """Tokens a second of all seeds' turns."""
    return float(timed["tokens"].sum() / timed["seconds"].sum())


def _ceiling(study: PolicyStudy, timed: pd.DataFrame) -> float:
    """The bound at the pace of these turns."""
    setting = bound_setting(study)
    if setting is None:
        return float("nan")
    needed = {
        row["seed"]: bound_seconds({str(k): v for k, v in row.items()}) / row["wall_s"]
        for row in study.runs_of(setting).to_dict("records")
    }
    own = _timed(timed, setting)
    seconds = own["seconds"] * own.index.get_level_values("seed").map(needed)
    return float(own["tokens"].sum() / seconds.sum())


def _timed(timed: pd.DataFrame, setting: str) -> pd.DataFrame:
    return timed[timed["setting"] == setting].set_index(["repeat", "seed"]).sort_index()


def _settings(study: PolicyStudy, budget: float, ceiling: float) -> Iterator[Row]:
    """One row a policy and share, with what it computed again in another."""
    every = study.all_runs
    for setting in sorted(every.loc[every["budget"] == budget, "setting"].unique()):
        _, policy, technique = setting.split("/")
        name = policy if technique == NONE else f"{policy}_{technique}"
        if not study.has(setting):
            yield Row(f"{name}@{budget:g}W", float("nan"), _why_not(study, setting))
            continue
        found, repeats = speed(study, setting), len(study.config.seeds)
        yield Row(
            f"{name}@{budget:g}W",
            found.estimate,
            UNIT,
            ceiling=ceiling,
            share_of_ceiling=found.estimate / ceiling,
            repeats=repeats,
            spread=(found.low, found.high),
        )
        again = recomputed(study.runs_of(setting))
        yield Row(f"recomputed_{name}@{budget:g}W", again, "tokens", repeats=repeats)


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
