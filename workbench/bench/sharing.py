"""How two models share one memory: every policy and static share at KV budgets of 0.5, 1 and 2 W.

Searches of the tiny pair in one arena (experiments/settings.py says what W, the shares and
max_model_len are). All settings of a budget and seed are interleaved by rounds, and with them the
uncapped search that bounds them (rows.bound_tokens_per_s): every rate, ratio and ceiling is of
these seconds. The study is carried out as often as the profile says. Settings that did equal work
for a seed count as one in a ratio: 1; their rates stand as measured, and equal_work_differs says by
how much they did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from workbench.bench.record import Row
from workbench.experiments.rows import (
    UNCAPPED_SETTING,
    bound_tokens_per_s,
    differing_nodes,
    recomputed,
)
from workbench.experiments.runs import FINISHED
from workbench.experiments.settings import (
    ALL,
    ELASTIC,
    NONE,
    REFERENCE,
    STATIC,
    THESIS_SHARE,
    PolicyPlan,
    setting_of,
    sweep_config,
)
from workbench.experiments.statistics import WORK
from workbench.experiments.study import Study, run_policies, working_set_of

BUDGETS, SHARES = (0.5, 1.0, 2.0), (0.08, 0.2, THESIS_SHARE, 0.5)
PLANS = {
    "quick": PolicyPlan(3, 2, 1, BUDGETS, SHARES, (), repeats=0),
    "default": PolicyPlan(16, 12, 2, BUDGETS, SHARES, (), repeats=0),
    "full": PolicyPlan(128, 12, 3, BUDGETS, SHARES, (), repeats=0),
}
REPEATS = {"quick": 1, "default": 2, "full": 3}
UNIT = "tokens/s"


def rows(profile: str, seeds: int | None = None) -> Iterator[Row]:
    """All rows of the two models in one memory. seeds: as many, instead of the profile's."""
    plan = PLANS[profile]
    plan = plan if seeds is None else replace(plan, num_seeds=seeds)
    config = replace(sweep_config(profile), seeds=tuple(range(plan.num_seeds)))
    with TemporaryDirectory() as folder:
        places = [Path(folder) / str(number) for number in range(REPEATS[profile])]
        yield from study_rows([run_policies(config, plan, place) for place in places])


def study_rows(studies: Sequence[Study]) -> Iterator[Row]:
    """Every row that the study tells, carried out once or several times."""
    first, tables = studies[0], [each.all_runs for each in studies]
    plan = first.plan
    assert isinstance(plan, PolicyPlan)
    every = pd.concat([table.assign(time=k) for k, table in enumerate(tables)], ignore_index=True)
    need = working_set_of(first.all_runs)
    yield Row("working_set_bytes", need.total, "B", repeats=1)
    yield Row("working_set_llm_bytes", need.llm, "B", repeats=1)
    yield Row("working_set_prm_bytes", need.prm, "B", repeats=1)
    limit = need.max_model_len(first.config.block_size)
    yield Row("max_model_len", limit, "tokens", repeats=1)
    yield from _sameness(studies)
    bounds = _bounds(every)
    yield Row("measured_bound", bound_tokens_per_s(bounds), UNIT, repeats=len(bounds))
    for budget in plan.budgets:
        own = every[every["budget"] == budget]
        ceiling = bound_tokens_per_s(bounds[bounds["beside"] == budget])
        thesis = setting_of(budget, STATIC, THESIS_SHARE, NONE)
        ours, everything = (setting_of(budget, ELASTIC, None, key) for key in (NONE, ALL))
        shares = [setting_of(budget, STATIC, share, NONE) for share in plan.kv_shares]
        slower = {peer: _mean(ratios(own, ours, peer)) for peer in shares if _has(own, peer, ours)}
        best = min(slower, key=slower.__getitem__, default=thesis)
        at = f"@{budget:g}W"
        yield _ratio(own, f"elastic_vs_best_static{at}", ours, best, ceiling)
        yield _ratio(own, f"elastic_vs_static_{THESIS_SHARE:g}{at}", ours, thesis, ceiling)
        yield _ratio(own, f"all_vs_baseline{at}", everything, thesis, ceiling)
        seconds = own[own["status"] == FINISHED].groupby(["time", "seed", *WORK])["wall_s"]
        alike = seconds.agg(["min", "max", "size"]).query("size > 1")
        if len(alike):
            apart, count = (alike["max"] / alike["min"]).max(), alike["size"].sum()
            yield Row(f"equal_work_differs{at}", float(apart), "x", repeats=int(count))
        for setting in sorted(own["setting"].unique()):
            yield from _setting(own, setting, at, ceiling)


def _bounds(every: pd.DataFrame) -> pd.DataFrame:
    """The uncapped searches with all techniques that were interleaved with a budget's."""
    done = every[(every["status"] == FINISHED) & (every["role"] == REFERENCE)]
    return done[done["technique"] == ALL]


def _ratio(runs: pd.DataFrame, name: str, ours: str, peer: str, ceiling: float) -> Row:
    """Our tokens a second beside the peer's; the ratio, its least and most: of every time and
    seed, each seed counting as much. runs: of one budget.
    """
    label = peer.split("/")[1]
    for setting in (ours, peer):
        if not _has(runs, setting):
            return Row(name, float("nan"), _why_not(runs, setting), label)
    found = ratios(runs, ours, peer)
    rate, other = (_rate(_of(runs, setting)) for setting in (ours, peer))
    return Row(
        name,
        rate,
        UNIT,
        label,
        other,
        _mean(found),
        ceiling,
        rate / ceiling,
        len(found),
        (float(found.min()), float(found.max())),
    )


def ratios(runs: pd.DataFrame, ours: str, peer: str) -> pd.Series:
    """Seconds of the peer over ours by time and seed; of equal work 1."""
    mine, theirs = (_of(runs, setting).set_index(["time", "seed"]) for setting in (ours, peer))
    both = mine.index.intersection(theirs.index)
    mine, theirs = mine.loc[both], theirs.loc[both]
    columns = [*WORK, "technique"]
    equal = (mine[columns] == theirs[columns]).all(axis=1)
    return (theirs["wall_s"] / mine["wall_s"]).mask(equal, 1.0)


def _setting(runs: pd.DataFrame, setting: str, at: str, ceiling: float) -> Iterator[Row]:
    """A policy and share, and what it computed again. The spread is the slowest and the fastest."""
    _, policy, technique = setting.split("/")
    name = policy if technique == NONE else f"{policy}_{technique}"
    if not _has(runs, setting):
        yield Row(f"{name}{at}", float("nan"), _why_not(runs, setting))
        return
    own = _of(runs, setting)
    rate, each = _rate(own), own["tokens_per_s"]
    yield Row(
        f"{name}{at}",
        rate,
        UNIT,
        ceiling=ceiling,
        share_of_ceiling=rate / ceiling,
        repeats=len(own),
        spread=(float(each.min()), float(each.max())),
    )
    yield Row(f"recomputed_{name}{at}", recomputed(own), "tokens", repeats=len(own))


def _of(runs: pd.DataFrame, setting: str) -> pd.DataFrame:
    return runs[(runs["setting"] == setting) & (runs["status"] == FINISHED)]


def _has(runs: pd.DataFrame, *settings: str) -> bool:
    """Whether all seeds finished with these settings, every time."""
    times = len(runs[["time", "seed"]].drop_duplicates())
    return all(len(_of(runs, setting)) == times for setting in settings)


def _mean(found: pd.Series) -> float:
    return float(found.groupby("seed").mean().mean())


def _rate(runs: pd.DataFrame) -> float:
    return float(runs["sampled_tokens"].sum() / runs["wall_s"].sum())


def _why_not(runs: pd.DataFrame, setting: str) -> str:
    """In place of a unit: a value that there cannot be says why."""
    rows = runs[(runs["setting"] == setting) & (runs["status"] != FINISHED)]
    reasons = rows["error"].dropna().astype(str).drop_duplicates()
    return f"{rows['status'].iloc[0]}: {reasons.iloc[0]}" if len(reasons) else "not measured"


def _sameness(studies: Sequence[Study]) -> Iterator[Row]:
    """Nodes whose tokens and score are those of the uncapped search without techniques, over all.

    Of every finished run but that one: with memory uncapped all techniques, too.
    Raises AssertionError where one differs: settings are about speed alone.
    """
    runs = 0
    for study in studies:
        done = study.having(status=FINISHED)
        settings = [s for s in done["setting"].unique() if s != UNCAPPED_SETTING]
        counts = differing_nodes(study, [(UNCAPPED_SETTING, setting) for setting in settings])
        wrong = {setting: differ for setting, (differ, _) in counts.items() if differ}
        assert not wrong, f"nodes that are not the uncapped search's, by setting: {wrong}"
        runs += int(done["setting"].isin(settings).sum())
    yield Row("same_nodes", 1.0, "fraction", repeats=runs)
