"""How two models share one memory: every policy and static share at KV budgets of 0.5, 1 and 2 W.

Searches of the tiny pair in one arena (experiments/policy_plan.py says what W, the shares and
max_model_len are). All settings of a budget and seed take turns (turns.py), and with them the
uncapped search that bounds them (policy_ceiling.py): every rate, ratio and ceiling is of these
seconds. The default policy and the static shares close to the best of them take turns again, as
often as the profile says. Settings that did equal work for a seed count as one in a ratio: 1; their
rates stand as measured, and equal_work_differs says by how much such turns did. What it does not
do: choose a policy's split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from workbench.bench.record import Row
from workbench.experiments.in_turns import InTurns, work_of
from workbench.experiments.policy_ceiling import bound_seconds, ceiling_tokens_per_s
from workbench.experiments.policy_plan import ELASTIC, STATIC, THESIS_SHARE, PolicyPlan
from workbench.experiments.policy_rows import REFERENCE_SETTING, differing, recomputed
from workbench.experiments.policy_study import PolicyStudy, run_policies, setting_of
from workbench.experiments.policy_techniques import ALL, NONE
from workbench.experiments.profiles import sweep_config
from workbench.experiments.record import FINISHED

BUDGETS, SHARES = (0.5, 1.0, 2.0), (0.08, 0.2, THESIS_SHARE, 0.5)
PLANS = {
    "quick": PolicyPlan(3, 2, 1, BUDGETS, SHARES, ()),
    "default": PolicyPlan(16, 12, 2, BUDGETS, SHARES, ()),
    "full": PolicyPlan(128, 12, 3, BUDGETS, SHARES, ()),
}
REPEATS = {"quick": 1, "default": 2, "full": 3}  # turns of those close to the best
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


def pairs_at(study: PolicyStudy, budget: float, timed: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Ours and its peer of each ratio at a budget, by the row's name.

    timed: of this budget. The best static share is the one that is fastest beside ours, turn for
    turn.
    """
    ours, everything = (setting_of(budget, ELASTIC, None, technique) for technique in (NONE, ALL))
    thesis = setting_of(budget, STATIC, THESIS_SHARE, NONE)
    shares = [setting_of(budget, STATIC, share, NONE) for share in study.plan.kv_shares]
    slower = {
        static: _mean(_ratios(*_pair(study, timed, ours, static)))
        for static in filter(study.has, shares)
        if study.has(ours)
    }
    at = f"@{budget:g}W"
    return {
        f"elastic_vs_best_static{at}": (ours, min(slower, key=slower.__getitem__, default=thesis)),
        f"elastic_vs_static_{THESIS_SHARE:g}{at}": (ours, thesis),
        f"all_vs_baseline{at}": (everything, thesis),
    }


def study_rows(study: PolicyStudy, timed: pd.DataFrame) -> Iterator[Row]:
    """Every row that the study's runs tell. timed: InTurns's."""
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
        for name, pair in pairs_at(study, budget, own).items():
            yield _ratio(study, own, name, *pair)
        yield from _equal_work(study, budget, own)
        yield from _settings(study, budget, own)


def _ratio(study: PolicyStudy, timed: pd.DataFrame, name: str, ours: str, peer: str) -> Row:
    """Our tokens a second beside the peer's; the ratio, its least and most: of every turn both
    took, each seed counting as much; the rates and the ceiling: of the first.

    timed: of one budget.
    """
    label = peer.split("/")[1]
    for setting in (ours, peer):
        if not study.has(setting):
            return Row(name, float("nan"), _why_not(study, setting), label)
    mine, theirs = _pair(study, timed, ours, peer)
    ratios, ceiling = _ratios(mine, theirs), _ceiling(study, timed)
    rate, other = (_rate(turns.loc[[0]]) for turns in (mine, theirs))
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


def _pair(
    study: PolicyStudy, timed: pd.DataFrame, ours: str, peer: str
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The turns that both took, by repeat and seed. The peer's `counted` seconds: ours, where it
    did equal work.
    """
    mine, theirs = (_timed(timed, setting) for setting in (ours, peer))
    both = mine.index.intersection(theirs.index)
    mine, theirs = mine.loc[both], theirs.loc[both].copy()
    works = _works(study)
    equal = [works[ours, seed] == works[peer, seed] for seed in both.get_level_values("seed")]
    theirs["counted"] = theirs["seconds"].mask(pd.Series(equal, both), mine["seconds"])
    return mine, theirs


def _ratios(mine: pd.DataFrame, theirs: pd.DataFrame) -> pd.Series:
    return theirs["counted"] / mine["seconds"]


def _equal_work(study: PolicyStudy, budget: float, timed: pd.DataFrame) -> Iterator[Row]:
    """What turns of equal work, taken at one time, differed by: the slowest over the fastest."""
    works = _works(study)
    turns = timed[~timed["setting"].str.startswith("uncapped/")]
    work = [works.get(key) for key in zip(turns["setting"], turns["seed"])]
    keys = [turns["repeat"], turns["seed"], pd.Series(work, turns.index)]
    alike = turns["seconds"].groupby(keys).agg(["min", "max", "size"])
    alike = alike[alike["size"] > 1]
    if len(alike):
        apart, count = (alike["max"] / alike["min"]).max(), alike["size"].sum()
        yield Row(f"equal_work_differs@{budget:g}W", float(apart), "x", repeats=int(count))


def _works(study: PolicyStudy) -> dict[tuple[str, int], tuple[int, ...]]:
    """What each finished run computed, by setting and seed."""
    done = _records(study.all_runs[study.all_runs["status"] == FINISHED])
    return {(run["setting"], run["seed"]): work_of(run) for run in done}


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
