"""The rows that the figure of the optimisation chapter draws, made of the study of policies.

What it does not do: run anything, draw, or put into words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from workbench.experiments.policy_plan import ELASTIC, STATIC, THESIS_SHARE
from workbench.experiments.policy_study import PolicyStudy, setting_of, speed, speed_up
from workbench.experiments.policy_techniques import ALL, NONE, TECHNIQUES
from workbench.experiments.record import INFEASIBLE
from workbench.experiments.run import ENGINES
from workbench.experiments.statistics import Interval, bootstrap_mean
from workbench.experiments.store import load_table
from workbench.experiments.views import interval_cells

SETTING = ["setting", "budget", "policy", "kv_share", "llm_share", "technique"]
AGAIN = ("evicted", "preempted")
POINTS = 240
"""Stretches of a run's steps of one engine of which one point each is kept."""
REFERENCE_SETTING = setting_of(None, "first_come", None, NONE)


def optimisation_rows(study: PolicyStudy) -> pd.DataFrame:
    """Rows of plots.optimisation.

    Columns: metric, setting and its parts (budget, policy, kv_share, llm_share, technique, label),
    value, low, high; of memory over time also model and second. Metrics: tokens_per_s (its interval
    is that of its ratio to the elastic policy at this budget, on the same problems), accuracy,
    same (part of the nodes that are the uncapped search's), recomputed (tokens a search computes
    again because blocks were evicted or requests preempted), infeasible (no value), and in bytes
    held, active, target.
    """
    parts = [cells for row in _settings(study) for cells in _cells(study, row)]
    parts += [{**row, "metric": "infeasible"} for row in _infeasible(study)]
    rows = pd.concat([pd.DataFrame(parts), memory_rows(study)], ignore_index=True)
    labels = {key: technique.label for key, technique in TECHNIQUES.items()}
    return rows.assign(label=rows["technique"].map(labels))


def memory_rows(study: PolicyStudy) -> pd.DataFrame:
    """Bytes that each model holds (with content), uses, and should come to, over a search.

    The first seed at the smallest budget, of the thesis's split and of the elastic policy; each
    engine at its own steps.
    """
    settings = (setting_of(min(study.plan.budgets), *each) for each in _drawn(study))
    frames = [_held(study.runs_of(s).iloc[0]) for s in settings if study.has(s)]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def best_static(study: PolicyStudy, budget: float, technique: str = NONE) -> str | None:
    """The setting of the fastest static share at a budget; None where none is feasible."""
    settings = [setting_of(budget, STATIC, share, technique) for share in study.plan.kv_shares]
    measured = {s: speed(study, s).estimate for s in settings if study.has(s)}
    return max(measured, key=measured.__getitem__, default=None)


def differing(study: PolicyStudy, setting: str) -> tuple[int, int]:
    """Nodes of a setting, every repetition, that are not the uncapped search's; of how many.

    In tokens or score, or that one of both lacks.
    """
    nodes = study.nodes.assign(text=study.nodes["token_ids"].map(tuple))
    keys, values = ["problem_id", "run_seed", "node_id"], ["text", "score"]
    own = nodes.loc[nodes["setting"] == setting, ["repeat", *keys, *values]]
    reference = nodes.loc[
        (nodes["setting"] == REFERENCE_SETTING) & (nodes["repeat"] == 0), [*keys, *values]
    ]
    expected = own[["repeat", "run_seed"]].drop_duplicates().merge(reference, on="run_seed")
    both = own.merge(expected, on=["repeat", *keys], how="outer", suffixes=("_a", "_b"))
    same = (both["text_a"] == both["text_b"]) & (both["score_a"] == both["score_b"])
    return int((~same).sum()), len(both)


def recomputed(runs: pd.DataFrame) -> float:
    """Tokens a run computes again for want of memory, both models together; mean over seeds."""
    columns = [f"{e}_recomputed_tokens_{why}" for e in ENGINES for why in AGAIN]
    return float(runs[columns].sum(axis=1).mean())


def elastic_gain(study: PolicyStudy, budget: float) -> dict[str, Any]:
    """The elastic policy against the best static share and the thesis's: intervals by peer.

    A peer that is infeasible is missing.
    """
    ours = setting_of(budget, ELASTIC, None, NONE)
    peers = {
        "best static": best_static(study, budget),
        "thesis": setting_of(budget, STATIC, THESIS_SHARE, NONE),
    }
    return {
        name: speed_up(study, peer, ours)
        for name, peer in peers.items()
        if peer is not None and study.has(peer) and study.has(ours)
    }


def _drawn(study: PolicyStudy) -> Iterator[tuple[str, float | None, str]]:
    """The thesis's share or the nearest feasible one, then the elastic policy."""
    budget, shares = min(study.plan.budgets), study.plan.kv_shares
    feasible = [s for s in shares if study.has(setting_of(budget, STATIC, s, NONE))]
    if feasible:
        yield STATIC, min(feasible, key=lambda share: abs(share - THESIS_SHARE)), NONE
    yield ELASTIC, None, NONE


def _settings(study: PolicyStudy) -> Iterator[dict[str, Any]]:
    """One row a setting that every seed finished."""
    runs = study.runs.drop_duplicates("setting")
    for row in runs[SETTING].to_dict("records"):
        if study.has(str(row["setting"])):
            yield {str(key): value for key, value in row.items()}


def _cells(study: PolicyStudy, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    setting = row["setting"]
    yield row | {"metric": "tokens_per_s", **interval_cells(_beside_elastic(study, row))}
    own = study.problems[(study.problems["setting"] == setting) & (study.problems["repeat"] == 0)]
    right = bootstrap_mean(own["correct"].astype(float), list(own["problem_id"]))
    yield row | {"metric": "accuracy", **interval_cells(right)}
    differ, total = differing(study, setting)
    yield row | {"metric": "same", "value": 1 - differ / max(total, 1)}
    yield row | {"metric": "recomputed", "value": recomputed(study.runs_of(setting))}


def _beside_elastic(study: PolicyStudy, row: dict[str, Any]) -> Interval:
    """A setting's tokens a second, its interval that of its ratio to the elastic policy alone on
    the same problems; without one where that was not measured.
    """
    setting, elastic = row["setting"], setting_of(row["budget"], ELASTIC, None, NONE)
    rate = speed(study, setting)
    if not study.has(elastic):
        return replace(rate, low=float("nan"), high=float("nan"))
    if setting == elastic:
        return replace(rate, low=rate.estimate, high=rate.estimate)
    ratio = speed_up(study, elastic, setting)
    base = rate.estimate / ratio.estimate
    return replace(rate, low=base * ratio.low, high=base * ratio.high)


def _infeasible(study: PolicyStudy) -> Iterator[dict[str, Any]]:
    every = study.all_runs
    bad = every[(every["status"] == INFEASIBLE)].drop_duplicates("setting")
    yield from ({str(k): v for k, v in row.items()} for row in bad[SETTING].to_dict("records"))


def _held(run: pd.Series) -> pd.DataFrame:
    steps = load_table(run["folder"], "steps")
    frames = [
        _thinned(steps[steps["engine"] == engine], float(run[f"{engine}_block_bytes"]), engine)
        for engine in ENGINES
    ]
    return pd.concat(frames, ignore_index=True).assign(**{name: run[name] for name in SETTING})


def _thinned(steps: pd.DataFrame, block_bytes: float, engine: str) -> pd.DataFrame:
    """Of each stretch of steps the one that holds most; metrics held, active and target."""
    held = steps["blocks_active"] + steps["blocks_cached"]
    stretch = np.arange(len(steps)) * POINTS // max(len(steps), 1)
    kept = steps.loc[held.groupby(stretch).idxmax()].sort_values("start_s")
    columns = {
        "held": kept["blocks_active"] + kept["blocks_cached"],
        "active": kept["blocks_active"],
        "target": kept["blocks_target"],
    }
    base = pd.DataFrame({"second": kept["start_s"].to_numpy(), "model": engine})
    return pd.concat(
        [base.assign(metric=m, value=block_bytes * v.to_numpy()) for m, v in columns.items()],
        ignore_index=True,
    )


def technique_gains(study: PolicyStudy, budget: float, kv_share: float) -> dict[str, Any]:
    """What each technique multiplies throughput by at one static share: intervals by technique."""
    base = setting_of(budget, STATIC, kv_share, NONE)
    settings = {t: setting_of(budget, STATIC, kv_share, t) for t in TECHNIQUES if t != NONE}
    measured = {t: s for t, s in settings.items() if study.has(s) and study.has(base)}
    return {technique: speed_up(study, base, s) for technique, s in measured.items()}


def all_gain(study: PolicyStudy, budget: float) -> Any:
    """All techniques and the elastic policy over the thesis's baseline; None if it is missing."""
    base = setting_of(budget, STATIC, THESIS_SHARE, NONE)
    ours = setting_of(budget, ELASTIC, None, ALL)
    return speed_up(study, base, ours) if study.has(base) and study.has(ours) else None
