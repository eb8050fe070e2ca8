"""The ladder in words: a sentence a result, numbers computed from its rows.

What it does not do: soften a number, or judge a claim (ladder_claims.py).
"""

from __future__ import annotations

import pandas as pd

from workbench.experiments.ladder import LadderStudy
from workbench.experiments.ladder_plan import BATCHED, BESIDE, BY_KEY, LAST_TWO, RUNGS, LadderPlan
from workbench.experiments.ladder_rows import accuracy_gain


def gains_sentence(rows: pd.DataFrame) -> str:
    """What every switch multiplies problems/min by, and all of them. Rows of the figure."""
    gains = rows[rows["metric"] == "gain"]
    rate = rows[rows["metric"] == "problems_per_min"].set_index("rung")["value"]
    ladder = [rung for rung in RUNGS if rung.key in rate.index]
    first, last = ladder[0], ladder[-1]
    parts = [
        f"{r.said} {_times(_first(gains, r.key))}" for r in ladder if r.key in set(gains["rung"])
    ]
    whole = rows[rows["metric"] == "whole"].iloc[0]
    return (
        f"From {rate[first.key]:,.1f} problems/min with {first.said} to {rate[last.key]:,.1f} with "
        f"every modification, over the problems and seeds of both {_times(whole)} as many. Each "
        f"switch multiplies them: {_listed(parts)}."
    )


def static_sentence(rows: pd.DataFrame) -> str:
    """What static, padded batches of the LLM's requests cost. Rows of the figure."""
    gain = rows[(rows["metric"] == "gain") & (rows["rung"] == BESIDE.key)]
    if gain.empty:
        return "Static, padded batches of the LLM's requests were not measured."
    return (
        f"With everything on but the LLM's requests in {BESIDE.said}, a search has "
        f"{_times(gain.iloc[0])} the problems/min."
    )


def tokens_sentence(rows: pd.DataFrame, pairs: pd.DataFrame) -> str:
    """Why problems/min and not tokens/s is compared at the last rung. Rows of the figure."""
    limit = int(pairs["max_depth"].min())
    own = pairs[pairs["max_depth"] == limit]
    more = own["tokens_finishes"].sum() / own["tokens_stops"].sum()
    rate = rows[rows["metric"] == "tokens_per_s"].set_index("rung")["value"]
    speeds = " and ".join(
        f"{rate[rung.key]:,.0f} with {rung.said}" for rung in RUNGS[-2:] if rung.key in rate.index
    )
    return (
        f"At a limit of {limit} steps a search that samples to the end samples **{more:.2f}** "
        "times the tokens of one that stops; they count as throughput and answer no problem "
        f"sooner. At the search's own limit there are {speeds} generated tokens/s."
    )


def finishing_sentence(pairs: pd.DataFrame) -> str:
    """What sampling to the end changes at every depth limit. Rows of depth_pairs."""
    parts = []
    for limit, own in pairs.groupby("max_depth"):
        gain, reached = accuracy_gain(own), int(own["reached_finishes"].sum())
        parts.append(
            f"at {limit} steps, which {reached} of {len(own)} searches reached, it changes "
            f"accuracy by **{gain.estimate:+.2f}** ({own['correct_stops'].mean():.2f} to "
            f"{own['correct_finishes'].mean():.2f})"
        )
    return f"Sampling to the end at the depth limit: {'; '.join(parts)}."


def sameness_sentence(found: tuple[int, int]) -> str:
    """Whether rungs leave the output alone. found: differing_nodes."""
    differ, total = found
    return (
        f"**{differ:,} of {total:,}** nodes differ between one rung and the next, sampling to the "
        "end left out: all other modifications are about speed alone."
    )


def setting_sentence(study: LadderStudy) -> str:
    """How large the padded batches are, and why. For the method."""
    sizes = study.runs["static_seqs"].dropna().unique()
    members = f"batches of {int(sizes[0])}" if len(sizes) else "no batches"
    return (
        f"Here {_problems(study.plan)}; static, padded batches are {members}, the largest power of "
        "two of which every batch surely fits the LLM's cache."
    )


def steps_sentence(study: LadderStudy) -> str:
    """What continuous problem batching does to the LLM's steps: a count, not a time."""
    every = study.queued if len(study.queued) else study.runs
    runs = every[every["ladder"].isin(BATCHED)]
    both = runs.groupby("seed")["ladder"].nunique() == 2
    sums = runs[runs["seed"].map(both)].groupby("ladder")[["llm_steps", "llm_decode_tokens"]].sum()
    if len(sums) < 2:
        return "The steps of static and continuous problem batching were not both counted."
    static, kept_full = sums.loc["score_cache"], sums.loc[LAST_TWO[0]]
    wide = [rows["llm_decode_tokens"] / rows["llm_steps"] for rows in (static, kept_full)]
    return (
        "Counted, not timed: the LLM takes "
        f"**{kept_full['llm_steps'] / static['llm_steps']:.2f}** times the steps "
        f"({static['llm_steps']:,.0f} to {kept_full['llm_steps']:,.0f}) when problem batches are "
        f"kept full, each with {wide[1]:.1f} decoding sequences instead of {wide[0]:.1f}."
    )


def order_sentence(rows: pd.DataFrame) -> str:
    """Which switch gains most and which least. Rows of the figure."""
    rungs = [rung.key for rung in RUNGS]
    gains = rows[(rows["metric"] == "gain") & rows["rung"].isin(rungs)].set_index("rung")["value"]
    if gains.empty:
        return "Only one rung was measured."
    most, least = BY_KEY[str(gains.idxmax())], BY_KEY[str(gains.idxmin())]
    return (
        f"Of {len(gains)} modifications {most.said} gains most (**{gains.max():.2f}** "
        f"times the problems/min) and {least.said} least ({gains.min():.2f})."
    )


def _problems(plan: LadderPlan) -> str:
    text = f"{plan.num_problems} problems are searched, at most {plan.in_flight} of them in flight"
    if not plan.queue_problems:
        return text
    return (
        f"{text}, and problem batching is compared over {plan.queue_problems}, at most "
        f"{plan.queue_in_flight} in flight"
    )


def _first(rows: pd.DataFrame, rung: str) -> pd.Series:
    return rows[rows["rung"] == rung].iloc[0]


def _times(gain: pd.Series) -> str:
    return f"**{gain['value']:.2f}** times (95 %: {gain['low']:.2f} to {gain['high']:.2f})"


def _listed(parts: list[str]) -> str:
    if len(parts) < 2:
        return "".join(parts) or "no step was measured"
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
