"""The study of policies in words: a sentence a result, numbers computed from its runs and rows.

What it does not do: soften a number. A ratio whose interval holds 1 is said to be none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from workbench.config import format_size
from workbench.experiments.policy_ceiling import ceiling_tokens_per_s
from workbench.experiments.policy_plan import ELASTIC, STATIC, THESIS_SHARE
from workbench.experiments.policy_rows import (
    all_gain,
    best_static,
    elastic_gain,
    technique_gains,
)
from workbench.experiments.policy_study import PolicyStudy, setting_of, speed
from workbench.experiments.policy_techniques import NONE, TECHNIQUES
from workbench.experiments.statistics import Interval


def working_set_sentence(study: PolicyStudy) -> str:
    """What W is here, and how much of it one request of each model takes."""
    need = study.working_set
    return (
        f"With memory uncapped the LLM uses at most {format_size(need.llm)} and the PRM "
        f"{format_size(need.prm)} of KV at once: **W = {format_size(need.total)}**. The models "
        f"take turns, so at one time it is never more than {format_size(need.at_once)}. The "
        f"longest sequence has {need.longest:,} tokens; max_model_len is "
        f"{need.max_model_len(study.config.block_size):,} for both, so that no sequence is cut "
        "short and the guarantee of one request takes as little as it can."
    )


def elastic_sentence(study: PolicyStudy) -> str:
    """The elastic policy against the best static share and the thesis's, at every budget."""
    parts = [_elastic_at(study, budget) for budget in study.plan.budgets]
    return f"Marginal value, which is told no share: {'; '.join(parts)}."


def _elastic_at(study: PolicyStudy, budget: float) -> str:
    gains = elastic_gain(study, budget)
    best = best_static(study, budget)
    named = "" if best is None else f", {best.split('_')[1].split('/')[0]},"
    words = {"best static": f"the best static share{named}", "thesis": f"static {THESIS_SHARE:g}"}
    told = [f"{_times(gain)} the throughput of {words[name]}" for name, gain in gains.items()]
    if not told:
        return f"at {budget:g} W no static share was feasible to compare it with"
    return f"at {budget:g} W it has {' and '.join(told)}"


def infeasible_sentence(study: PolicyStudy) -> str:
    """Which static shares leave a model less than one request."""
    every = study.all_runs
    bad = every[(every["status"] == "infeasible") & (every["technique"] == NONE)]
    named = [
        f"{share:g} at {budget:g} W"
        for budget, share in sorted(set(zip(bad["budget"], bad["kv_share"], strict=True)))
    ]
    if not named:
        return "Every static share leaves each model room for its longest request."
    return f"Shares that leave a model less than its longest request: {', '.join(named)}."


def techniques_sentence(study: PolicyStudy) -> str:
    """What each technique multiplies throughput by, at the feasible share nearest the thesis's."""
    budget = min(study.plan.alone_at, default=None)
    share = None if budget is None else _nearest_feasible(study, budget)
    gains = {} if budget is None or share is None else technique_gains(study, budget, share)
    if not gains:
        return "No technique was measured at a static share."
    parts = [f"{TECHNIQUES[name].said} {_times(gain)}" for name, gain in gains.items()]
    return (
        f"At {budget:g} W and a static share of {share:g} throughput is multiplied by "
        f"{'; '.join(parts)}."
    )


def all_sentence(study: PolicyStudy) -> str:
    """All techniques and the elastic policy against the baseline, and the measured bound."""
    ceiling = ceiling_tokens_per_s(study)
    parts = []
    for budget in study.plan.budgets:
        gain = all_gain(study, budget)
        if gain is not None:
            ours = speed(study, setting_of(budget, ELASTIC, None, "all")).estimate
            parts.append(
                f"at {budget:g} W {_times(gain)} the baseline's, {ours / ceiling:.0%} of the bound"
            )
    if not parts:
        return f"The thesis's share of {THESIS_SHARE:g} was feasible at no budget."
    return (
        f"All techniques under the elastic policy have {'; '.join(parts)}. The bound, measured, is "
        f"**{ceiling:,.0f} tokens/s**: each distinct token computed once at the pace with memory "
        "uncapped, whatever the budget."
    )


def recomputed_sentence(rows: pd.DataFrame) -> str:
    """Tokens computed again for want of memory: counts, the same on every machine. Figure rows."""
    again = rows[(rows["metric"] == "recomputed") & (rows["technique"] == NONE)]
    parts = []
    for budget, own in again.groupby("budget"):
        static = own.loc[own["policy"] == STATIC, "value"]
        others = own[own["policy"] != STATIC].set_index("policy")["value"]
        told = [f"{_words(name)} {value:,.0f}" for name, value in others.items()]
        if len(static):
            told.append(f"static shares {static.min():,.0f} to {static.max():,.0f}")
        parts.append(f"at {budget:g} W {', '.join(told)}")
    return f"Tokens that a search computes again for want of memory: {'; '.join(parts)}."


def memory_sentence(study: PolicyStudy) -> str:
    """Where the elastic policy's split came to."""
    parts = []
    for budget in study.plan.budgets:
        runs = study.runs_of(setting_of(budget, ELASTIC, None, NONE))
        if len(runs):
            parts.append(f"{float(runs['llm_final_share'].mean()):.2f} at {budget:g} W")
    return f"Marginal value ended with an LLM share of the KV of {', '.join(parts)}."


def sameness_sentence(rows: pd.DataFrame) -> str:
    """How many settings sample the uncapped search's tokens and scores, and accuracy's range."""
    same = rows.loc[rows["metric"] == "same", "value"]
    right = rows.loc[rows["metric"] == "accuracy", "value"]
    return (
        f"**{int((same == 1).sum())} of {len(same)}** settings have every node's tokens and score "
        f"as the search with memory uncapped; accuracy is {right.min():.1%} to {right.max():.1%}."
    )


def _nearest_feasible(study: PolicyStudy, budget: float) -> float | None:
    """The static share nearest the thesis's that was carried out."""
    shares = study.plan.kv_shares
    done = [s for s in shares if study.has(setting_of(budget, STATIC, s, NONE))]
    return min(done, key=lambda share: abs(share - THESIS_SHARE), default=None)


def _times(gain: Interval) -> str:
    if not math.isfinite(gain.low):
        return f"**{gain.estimate:.2f}** times (no interval: too few runs)"
    if gain.low == gain.high == 1:
        return "by equal work **1.00** times"
    sure = "" if gain.low > 1 or gain.high < 1 else ", not told from 1"
    return f"**{gain.estimate:.2f}** times ({gain.low:.2f} to {gain.high:.2f}{sure})"


def _words(policy: object) -> str:
    labels: Mapping[str, str] = {"first_come": "first come", "phase_aware": "phase-aware"}
    return labels.get(str(policy), "marginal value")
