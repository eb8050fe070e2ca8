"""How two models share one memory: every policy and static share at KV budgets of 0.5, 1 and 2 W.

Searches of the tiny pair in one arena (experiments/policy_plan.py says what W, the shares and
max_model_len are). First every setting once; then those that are set against each other again, in
turns, and ratios are taken of these repetitions alone: the share that was fastest by luck in the
first pass has no advantage in the second. The ratio of settings that did equal work is 1; value and
peer_value are as the clock had them. The ceiling is the measured bound of policy_ceiling.py, whose
uncapped searches are repeated, too. What it does not do: choose a policy's split.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from workbench.bench.record import Row
from workbench.config import SweepConfig
from workbench.experiments.policy_ceiling import ceiling_tokens_per_s
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
from workbench.experiments.policy_rows import (
    REFERENCE_SETTING,
    best_static,
    differing,
    recomputed,
)
from workbench.experiments.policy_study import (
    PolicyStudy,
    rates_of,
    run_policies,
    setting_of,
    speed,
    speed_up,
)
from workbench.experiments.policy_techniques import ALL, NONE
from workbench.experiments.profiles import sweep_config
from workbench.experiments.record import FINISHED
from workbench.experiments.sweep import Execute

BUDGETS, SHARES = (0.5, 1.0, 2.0), (0.08, 0.2, THESIS_SHARE, 0.5)
PLANS = {
    "quick": PolicyPlan(3, 2, 1, BUDGETS, SHARES, ()),
    "default": PolicyPlan(16, 12, 2, BUDGETS, SHARES, ()),
    "full": PolicyPlan(128, 12, 3, BUDGETS, SHARES, ()),
}
REPEATS = {"quick": 0, "default": 1, "full": 1}  # of the settings that are compared
UNIT = "tokens/s"


def rows(profile: str, seeds: int | None = None, execute: Execute | None = None) -> Iterator[Row]:
    """All rows of the two models in one memory. seeds: as many, instead of the profile's."""
    plan = PLANS[profile]
    plan = plan if seeds is None else replace(plan, num_seeds=seeds)
    config = replace(sweep_config(profile), seeds=tuple(range(plan.num_seeds)))
    with TemporaryDirectory() as folder:
        yield from study_rows(measured(config, plan, REPEATS[profile], folder, execute))


def measured(
    config: SweepConfig,
    plan: PolicyPlan,
    repeats: int,
    folder: str | Path,
    execute: Execute | None = None,
) -> PolicyStudy:
    """The study, with repetitions of what ratios are taken of."""
    study = run_policies(config, plan, folder, execute=execute)
    again = duels(study, repeats)
    return run_policies(config, plan, folder, more=again, execute=execute) if again else study


def duels(study: PolicyStudy, repeats: int) -> list[PolicySpec]:
    """Both sides of every ratio and the bound's searches again, each repetition shuffled.

    Where both did equal work the ratio is 1 whatever the clock says: nothing is repeated.
    """
    own = policy_config(study.config, study.plan)
    compared = {
        setting
        for budget in study.plan.budgets
        for pair in pairs_at(study, budget).values()
        if all(map(study.has, pair)) and not equal_work(study, *pair)
        for setting in pair
    }
    specs = [
        spec
        for spec in tight_runs(own, study.plan, study.working_set)
        if setting_of(spec.budget, spec.policy, spec.kv_share, spec.technique) in compared
    ] + reference_runs(own)
    order = random.Random(0)
    again = ((number, order.sample(specs, len(specs))) for number in range(1, repeats + 1))
    return [replace(spec, repeat=number) for number, each in again for spec in each]


def pairs_at(study: PolicyStudy, budget: float) -> dict[str, tuple[str, str]]:
    """Ours and its peer of each ratio at a budget, by the row's name."""
    ours = setting_of(budget, ELASTIC, None, NONE)
    everything = setting_of(budget, ELASTIC, None, ALL)
    thesis = setting_of(budget, STATIC, THESIS_SHARE, NONE)
    at = f"@{budget:g}W"
    return {
        f"elastic_vs_best_static{at}": (ours, best_static(study, budget) or thesis),
        f"elastic_vs_static_{THESIS_SHARE:g}{at}": (ours, thesis),
        f"all_vs_baseline{at}": (everything, thesis),
    }


def equal_work(study: PolicyStudy, one: str, other: str) -> bool:
    """Whether the runs of two settings computed as many tokens in as many steps."""
    first, second = rates_of(study, (one, other)).work
    return bool(first == second)


def study_rows(study: PolicyStudy) -> Iterator[Row]:
    """Every row that the study's runs tell."""
    need, block_size = study.working_set, study.config.block_size
    yield Row("working_set_bytes", need.total, "B", repeats=1)
    yield Row("working_set_llm_bytes", need.llm, "B", repeats=1)
    yield Row("working_set_prm_bytes", need.prm, "B", repeats=1)
    yield Row("max_model_len", need.max_model_len(block_size), "tokens", repeats=1)
    yield _sameness(study)
    ceiling = ceiling_tokens_per_s(study)
    yield Row("measured_bound", ceiling, UNIT, repeats=len(study.config.seeds))
    for budget in study.plan.budgets:
        for name, (ours, peer) in pairs_at(study, budget).items():
            yield _ratio(study, name, ours, peer, ceiling)
        yield from _settings(study, budget, ceiling)


def _ratio(study: PolicyStudy, name: str, ours: str, peer: str, ceiling: float) -> Row:
    """Our tokens a second beside the peer's; spread is the interval of the ratio."""
    label = peer.split("/")[1]
    for setting in (ours, peer):
        if not study.has(setting):
            return Row(name, float("nan"), _why_not(study, setting), label)
    repeats = _repetitions(study, ours, peer)
    found = speed_up(study, peer, ours, repeats)
    theirs, value = (float(rate) for rate in rates_of(study, (peer, ours), repeats).pooled)
    return Row(
        name,
        value,
        UNIT,
        label,
        theirs,
        found.estimate,
        ceiling,
        value / ceiling,
        len(repeats) * len(study.config.seeds),
        (found.low, found.high),
    )


def _repetitions(study: PolicyStudy, ours: str, peer: str) -> tuple[int, ...]:
    """The repetitions that both settings have whole; the first pass where there are none."""
    every = study.all_runs
    numbers = sorted(set(every["repeat"].astype(int)) - {0})
    seeds = len(study.config.seeds)
    whole = (n for n in numbers if all(len(study.runs_of(s, (n,))) == seeds for s in (ours, peer)))
    return tuple(whole) or (0,)


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

    Of every finished run but that one: repetitions, and with memory uncapped all techniques.
    Raises AssertionError where one differs: settings are about speed alone.
    """
    runs = study.all_runs[study.all_runs["status"] == FINISHED]
    runs = runs[runs["setting"] != REFERENCE_SETTING]
    counts = {setting: differing(study, setting) for setting in runs["setting"].unique()}
    wrong = {setting: differ for setting, (differ, _) in counts.items() if differ}
    assert not wrong, f"nodes that are not the uncapped search's, by setting: {wrong}"
    return Row("same_nodes", 1.0, "fraction", repeats=len(runs))
