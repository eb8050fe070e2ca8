"""The claims the study can judge: holds, fails or depends on, with number and interval.

A verdict is a rule over numbers, written beside the claim, so that it can be argued with; it holds
for the models measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.experiments import rows as drawn
from workbench.experiments.export import tex_escaped
from workbench.experiments.sensitivity import missing_values, stored
from workbench.experiments.settings import BATCHED, LAST_TWO, THESIS_SHARE
from workbench.experiments.statistics import Interval, Rates, upper_bound_of_none
from workbench.experiments.study import Study, rung, rung_of

HOLDS, FAILS, DEPENDS, UNTESTED = "holds", "fails", "depends on", "not testable here"
HIGH_HIT_RATE = 0.8
RARE_EVENTS = 10.0
"""Thrash events per 1,000 look-ups below which thrashing is called rare."""
NOISE = 0.01
DRAMATIC = 1.5
"""Times the problems/min from which on a modification is called dramatic."""
HARDLY = 0.05
"""Accuracy below which a gain is hardly one."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim judged. number: what it rests on, with its interval; figure: where to look."""

    key: str
    text: str
    verdict: str
    number: str
    figure: str
    rung: str = "measured tiny"


CLAIMS = {
    "C1": ("Throughput peaks inside the interval, at a share of 0.3", "memory_split"),
    "C2": ("Only the KV cache changes with the share", "memory_parts"),
    "C3": ("Blocks are linear in the share", "kv_blocks"),
    "C4": ("The PRM-starved end slows down through eviction", "lost_time"),
    "C5": ("Hit rates are high everywhere for both models", "prefix_hits"),
    "C6": ("Thrashing is rare", "thrashing"),
    "C7": ("Continuous problem batching helps dramatically", "modifications"),
    "C8": ("Sampling to the end hardly helps accuracy", "modifications"),
    "C9": ("The memory split leaves the output alone", "memory_split"),
}
"""The claims in words, and the figure where each is seen."""


def _judged(key: str, holds: Any, fails: Any, number: str) -> Claim:
    text, figure = CLAIMS[key]
    return Claim(key, text, HOLDS if holds else FAILS if fails else DEPENDS, number, figure)


def claims_table(claims: Sequence[Claim]) -> pd.DataFrame:
    """One row a claim."""
    return pd.DataFrame([asdict(claim) for claim in claims])


def peak_claim(rows: pd.DataFrame) -> Claim:
    """C1. Fails where the interval leaves 0.3 out; holds where it reaches no further than the
    measured shares next to 0.3, inside the axis; else it depends on which of its shares is best.
    """
    peak, same = (rows[rows["metric"] == m].iloc[0] for m in ("peak_share", "same_work"))
    shares = rows.loc[rows["metric"] == "tokens_per_s", "llm_share"]
    below, above = shares[shares < THESIS_SHARE - 1e-9], shares[shares > THESIS_SHARE + 1e-9]
    narrow = below.max() <= peak["low"] and peak["high"] <= above.min()
    inside = shares.min() < peak["low"] and peak["high"] < shares.max()
    covers = peak["low"] <= THESIS_SHARE <= peak["high"]
    number = f"fastest {_fastest(peak, same)} [{peak['low']:.2f}, {peak['high']:.2f}]"
    if peak["low"] <= shares.min() and shares.max() <= peak["high"]:
        number = f"no peak can be told [{peak['low']:.2f}, {peak['high']:.2f}]"
    return _judged("C1", covers and inside and narrow, not covers, number)


def _fastest(peak: pd.Series, same: pd.Series) -> str:
    """The peak in words: shares of equal work are one, of which none is the fastest."""
    if same["low"] == same["high"]:
        return f"at {peak['value']:.2f}"
    return f"from {same['low']:.2f} to {same['high']:.2f}, which do the same work"


def split_in_words(rows: pd.DataFrame) -> str:
    """Where throughput is highest and what the ends of the axis lose, of rows of
    plots.memory_split; where the interval is the whole axis, that no peak can be told.
    """
    peak, same = (rows[rows["metric"] == m].iloc[0] for m in ("peak_share", "same_work"))
    rate = rows[rows["metric"] == "tokens_per_s"].set_index("llm_share")["value"].sort_index()
    first, last = rate.index[[0, -1]]
    if same["low"] <= first and last <= same["high"]:
        return (
            f"No peak can be told: every share from {first:.2f} to {last:.2f} does the same work."
        )
    if peak["low"] <= first and last <= peak["high"]:
        return (
            f"No peak can be told between {first:.2f} and {last:.2f}, for its interval is the "
            f"whole axis: {rate.min():,.0f} to {rate.max():,.0f} generated tokens/s."
        )
    best = rate[(rate.index >= same["low"]) & (rate.index <= same["high"])].mean()
    reach = f"(95 %: {peak['low']:.2f} to {peak['high']:.2f})"
    found = f"Throughput is highest {_fastest(peak, same)} {reach}: {best:,.0f} generated tokens/s"
    ends = [
        f"{rate[end]:,.0f} at {end:.2f} ({rate[end] / best - 1:+.1%})"
        for end in (first, last)
        if not same["low"] <= end <= same["high"]
    ]
    return f"{found}; it is {' and '.join(ends)}."


def thrashing_in_words(rows: pd.DataFrame, lost: pd.DataFrame) -> str:
    """Is thrashing rare, and what does it cost? rows: of plots.thrashing; lost: of lost_time."""
    events = rows[rows["metric"] == "events_per_1000"]
    most = events.loc[events.groupby("llm_share")["value"].idxmax()].set_index("llm_share")
    again = lost[lost["part"] == "recomputed_evicted"].groupby("llm_share")["seconds"].sum()
    walls = lost.groupby("llm_share")["wall_s"].first()
    cost = (again.reindex(walls.index).fillna(0.0) / walls).reindex(most.index)
    often = [
        f"{share:.2f} ({row['engine'].upper()} {row['value']:.0f} in 1,000 look-ups, "
        f"{part:.0%} of the time)"
        for (share, row), part in zip(most.iterrows(), cost)
        if row["value"] >= RARE_EVENTS
    ]
    rare = most.index[most["value"] < RARE_EVENTS]
    found = "Thrashing is rare at no LLM share"
    if len(rare):
        shares = ", ".join(f"{share:.2f}" for share in rare)
        found = (
            f"Thrashing is rare at LLM shares of {shares}, with at most "
            f"{most['value'][rare].max():.1f} events in 1,000 look-ups and {cost[rare].max():.0%} "
            "of the time spent on computing again what was evicted"
        )
    return f"{found}; it is not at {', '.join(often)}." if often else f"{found}."


def constant_claim(rows: pd.DataFrame) -> Claim:
    """C2, of rows of plots.memory_parts. Holds where all but the KV of the engines that were built
    is the same at every share, to 1 % of noise.
    """
    fixed = rows[(rows["how"] == "measured") & (rows["part"] != "kv")]
    sizes = fixed.groupby(["model", "part"])["bytes"].agg(["min", "max"])
    change = float(((sizes["max"] - sizes["min"]) / sizes["max"].clip(lower=1)).max())
    number = f"weights and activations change by at most {change:.2%} over the shares"
    return _judged("C2", change <= NOISE, True, number)


def linear_claim(rows: pd.DataFrame) -> Claim:
    """C3, of rows of plots.kv_blocks. Holds where every cache that was built is within one block of
    what the formula gives.
    """
    built = rows[(rows["how"] == "measured") & (rows["kind"] == "built")]
    off = float((built["blocks"] - built["formula_blocks"]).abs().max())
    return _judged("C3", off <= 1, True, f"largest distance from the formula {off:.2f} blocks")


def eviction_claim(rates: Rates, lost: pd.DataFrame) -> Claim:
    """C4: of the seconds more at the highest share than at 0.3, is recomputing more than half?

    Depends where the slow-down is not told from the machine's noise, or its part not from a half.
    """
    shares = lost["llm_share"].drop_duplicates()
    end, base = float(shares.max()), float(shares.iloc[(shares - THESIS_SHARE).abs().argmin()])
    slower = rates.difference(base, end)
    again = lost[lost["part"] == "recomputed_evicted"].groupby("llm_share")["seconds"].sum()
    parts = again / lost.groupby("llm_share")["wall_s"].first()  # of wall time, on both engines
    before, after = (float(parts.fillna(0.0)[share]) for share in (base, end))
    part = rates.part_of_slow_down(base, end, (before, after))
    told = f"{part.estimate:.0%} [{part.low:.0%}, {part.high:.0%}] of the slow-down"
    if rates.plateau(end)[0] <= base:
        told = "and both shares do the same work"
    elif math.isnan(part.estimate):
        told = "and the slow-down is not told from the machine's noise"
    number = (
        f"tokens/s at {end:.2f} minus at {base:.2f}: {slower.estimate:.0f} [{slower.low:.0f}, "
        f"{slower.high:.0f}]; recomputing what was evicted is {after:.0%} of the time at "
        f"{end:.2f}, {told}"
    )
    is_slower = slower.high < 0
    return _judged("C4", is_slower and part.low > 0.5, is_slower and part.high < 0.5, number)


def hits_claim(rows: pd.DataFrame) -> Claim:
    """C5. Holds where every lower bound is 80 % or more; fails where an upper one is below."""
    least, (low, high) = rows.sort_values("value").iloc[0], rows[["low", "high"]].min()
    number = (
        f"lowest {least['engine'].upper()} at {least['llm_share']:.2f}: {least['value']:.1%} "
        f"[{least['low']:.1%}, {least['high']:.1%}]; high means {HIGH_HIT_RATE:.0%}"
    )
    return _judged("C5", low >= HIGH_HIT_RATE, high < HIGH_HIT_RATE, number)


def thrash_claim(rows: pd.DataFrame) -> Claim:
    """C6. Holds below 10 events per 1,000 look-ups at every share, fails above at every share."""
    events = rows[rows["metric"] == "events_per_1000"]
    most = events.sort_values("value").iloc[-1]
    often = events["value"] >= RARE_EVENTS
    shares = ", ".join(f"{share:.2f}" for share in sorted(events.loc[often, "llm_share"].unique()))
    number = (
        f"most {most['engine'].upper()} at {most['llm_share']:.2f}: {most['value']:.1f} "
        f"[{most['low']:.1f}, {most['high']:.1f}] per 1,000 look-ups; "
        + (f"not rare at {shares}" if shares else "rare at every share")
    )
    return _judged("C6", not often.any(), often.all(), number)


def sameness_claim(nodes: pd.DataFrame) -> Claim:
    """C9, as far as the split goes: every node has the same tokens at every share of a seed."""
    tokens = nodes.assign(text=nodes["token_ids"].map(tuple))
    wanted = tokens.groupby("run_seed")["llm_share"].nunique()
    by_node = tokens.groupby(["run_seed", "problem_id", "node_id"])
    found = by_node[["text", "llm_share"]].nunique()
    lacks = found["llm_share"] < found.index.get_level_values("run_seed").map(wanted.to_dict())
    differ = int(((found["text"] > 1) | lacks).sum())
    number = f"{differ:,} of {len(found):,} nodes differ between the shares"
    return _judged("C9", not differ, differ, number)


def ablation_claims(study: Study) -> list[Claim]:
    """C7 and C8, as far as their settings were measured."""
    settings, found = set(study.runs["setting"]), []
    if set(BATCHED) <= settings:
        found.append(batching_claim(drawn.gain_of(study, *BATCHED)))
    if set(LAST_TWO) <= settings:
        found.append(finishing_claim(drawn.depth_pairs(study), study.config.max_depth))
    return [replace(claim, rung=rung(study.runs)) for claim in found]


def batching_claim(gain: Interval) -> Claim:
    """C7. Holds where the whole interval of the gain is 1.5 times or more, fails where below."""
    number = (
        f"{gain.estimate:.2f} times the problems/min [{gain.low:.2f}, {gain.high:.2f}]; "
        f"dramatic means {DRAMATIC:g} times"
    )
    return _judged("C7", gain.low >= DRAMATIC, gain.high < DRAMATIC, number)


def finishing_claim(pairs: pd.DataFrame, max_depth: int) -> Claim:
    """C8, at the search's own depth limit. Holds where the upper bound of the accuracy gained is
    below 0.05, fails where the lower one is above it, else it depends.

    Where no answer changed the bound is that of a rate never seen in so many problems, unless no
    beam came to the limit: then nothing was sampled to an end, and the claim is not tested.
    """
    own = pairs[pairs["max_depth"] == max_depth]
    gain, reached = drawn.accuracy_gain(own), int(own["reached_finishes"].sum())
    if (own["correct_stops"] == own["correct_finishes"]).all():
        bound = upper_bound_of_none(int(own["problem_id"].nunique()))
        gain = replace(gain, estimate=0.0, low=-bound, high=bound)
    number = (
        f"accuracy {gain.estimate:+.3f} [{gain.low:.3f}, {gain.high:.3f}] at a limit of "
        f"{max_depth} steps, which {reached} of {len(own)} searches reached"
    )
    lower = pairs[pairs["max_depth"] < max_depth]
    for limit, rows in lower.groupby("max_depth"):
        number += f"; {drawn.accuracy_gain(rows).estimate:+.2f} at {limit}"
    holds, fails = reached and gain.high < HARDLY, reached and gain.low > HARDLY
    return _judged("C8", holds, fails, f"{number}; hardly means {HARDLY:g}")


# -- the same from the rows of figures that are kept, and the page made of them --

REPLAYED = "replayed 1B + 8B"
NOT_REPLAYED = {
    "C2": "memory parts of this pair are computed, not measured",
    "C3": "its blocks are computed by the formula itself",
    "C7": "a replay keeps the recorded batching",
    "C8": "a replay samples nothing",
    "C9": "a replay samples nothing",
}


def claims_of_figures(folder: Path) -> list[Claim]:
    """Every claim for each rung, as far as the rows of the figures in a folder tell it."""
    judges: tuple[tuple[str, str, Callable[..., Claim]], ...] = (
        ("C1", "memory_split", peak_claim),
        ("C2", "memory_parts", constant_claim),
        ("C3", "kv_blocks", linear_claim),
        ("C4", "memory_split lost_time", _slow_down_claim),
        ("C5", "prefix_hits", hits_claim),
        ("C6", "thrashing", thrash_claim),
        ("C7", "modifications", _gain_claim),
        ("C8", "modifications", _accuracy_claim),
        ("C9", "optimisation", _same_nodes_claim),
    )
    found = []
    for key, names, judge in judges:
        files = [folder / f"{name}.parquet" for name in names.split()]
        if all(file.is_file() for file in files):
            parameters = json.loads(files[0].with_suffix(".json").read_text())["parameters"]
            more = [parameters["plan"]["num_problems"]] if key == "C8" else []
            with suppress(LookupError):  # what did not run has no rows in a figure
                claim = judge(*map(pd.read_parquet, files), *more)
                found.append(replace(claim, rung=rung_of(parameters["llm"])))
        far = folder / f"{names.split()[0]}_replayed.parquet"
        if key in NOT_REPLAYED:
            found.append(Claim(key, CLAIMS[key][0], UNTESTED, NOT_REPLAYED[key], "", REPLAYED))
        elif far.is_file():
            found.append(replace(judge(pd.read_parquet(far)), rung=REPLAYED, figure=far.stem))
    return found


def _slow_down_claim(split: pd.DataFrame, lost: pd.DataFrame | None = None) -> Claim:
    """C4 without the problems: beside every share that does the work of the fastest, so that the
    range over them is the noise.
    """
    same, end = split[split["metric"] == "same_work"].iloc[0], float(split["llm_share"].max())
    if lost is None or end <= same["high"]:
        number = f"from {same['low']:.2f} to {same['high']:.2f} the work is the same"
        number += f", so nothing slows down at {end:.2f}" if end <= same["high"] else ""
        return _judged("C4", False, False, number)
    walls = lost.groupby("llm_share")["wall_s"].first()
    again = lost[lost["part"] == "recomputed_evicted"].groupby("llm_share")["seconds"].sum()
    alike = walls[(walls.index >= same["low"]) & (walls.index <= same["high"])]
    low, high = (float(again[end] / (walls[end] - wall)) for wall in (alike.min(), alike.max()))
    number = (
        f"a search takes {walls[end] / alike.max() - 1:+.0%} to "
        f"{walls[end] / alike.min() - 1:+.0%} at {end:.2f} beside {same['low']:.2f} to "
        f"{same['high']:.2f}, which do the same work; "
        f"recomputing what was evicted is {again[end] / walls[end]:.0%} of its time there, "
        f"{low:.0%} to {high:.0%} of the slow-down"
    )
    slower = walls[end] > alike.max() and len(alike) > 1  # one share alone tells no noise
    return _judged("C4", slower and low > 0.5, slower and high < 0.5, number)


def _gain_claim(rows: pd.DataFrame) -> Claim:
    """C7, of rows of plots.modifications."""
    gain = rows[(rows["metric"] == "gain") & (rows["rung"] == BATCHED[1])].iloc[0]
    return batching_claim(Interval(gain["value"], gain["low"], gain["high"]))


def _accuracy_claim(rows: pd.DataFrame, num_problems: int) -> Claim:
    """C8 without the problems, at each depth limit; the greatest is the search's own. Which beams
    came to it is not told, so it cannot hold; where no answer changed the bound is exact.
    """
    wide = rows.pivot_table(index="max_depth", columns="metric", values="value")
    gains = (wide["finishes"] - wide["stops"]).dropna()
    bound = upper_bound_of_none(num_problems)
    told = [f"{gain:+.2f} at a limit of {at} steps" for at, gain in gains.items()]
    if gains.iloc[-1] == 0:
        told[-1] += f" [{-bound:.2f}, {bound:.2f}]"
    number = f"accuracy {'; '.join(told)}, over {num_problems} problems; hardly means {HARDLY:g}"
    return _judged("C8", False, gains.iloc[-1] > HARDLY, number)


def _same_nodes_claim(rows: pd.DataFrame) -> Claim:
    """C9, of rows of plots.optimisation: over every split, policy and technique."""
    same = rows.loc[rows["metric"] == "same", "value"]
    number = f"{same.min():.2%} of nodes are equal under the least equal of {len(same)} settings"
    claim = _judged("C9", same.min() == 1, True, f"{number} of split, policy and techniques")
    return replace(claim, text="Optimisations leave the output alone", figure="optimisation")


def claims_page(folder: Path, link: str) -> str:
    """The claims as Markdown, and what was taken for missing values. folder: of the figures; link:
    how the page's own folder names it.
    """

    def table(head: str, rows: Sequence[Sequence[str]]) -> list[str]:
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return [f"| {head} |", "|---" * (head.count("|") + 1) + "|", *lines, ""]

    judged, values = [], missing_values(stored(folder)[0])
    for claim in claims_of_figures(folder):
        figure = f"[{claim.figure}]({link}/{claim.figure}.svg)" if claim.figure else ""
        cells = (claim.key, claim.text, f"**{claim.verdict}**", claim.number, figure, claim.rung)
        judged.append(cells)
    record = json.loads((folder / "memory_split.json").read_text(encoding="utf-8"))
    lines = [
        "# What the thesis claims, and what was found",
        "",
        "Written by `workbench figures` (and `--replot`) from the rows beside each figure; the "
        "rules stand in",
        "`workbench/experiments/claims.py`. *Depends on* means that the numbers tell neither: the "
        "interval reaches to both sides",
        "of the rule, or the shares compared do the same work.",
        "",
        record["parameters"]["provenance"].replace("\n", " "),
        "",
        *table(" | claim | verdict | number and interval | figure | rung", judged),
        "## What the thesis leaves open, and what is taken instead",
        "",
        "*Survives*: at every setting tried a share of 0.3 loses at most 2 % to the best, and both "
        "ends of the interval more than",
        "2 %; ranges are over the settings (replays of 1B + 8B, see "
        f"[sensitivity]({link}/sensitivity.svg)).",
        "",
        *table(" | ".join(map(str, values.columns)), values.to_numpy().tolist()),
    ]
    return "\n".join(lines)


def claims_tex(claims: Sequence[Claim]) -> str:
    """The claims as a table of LaTeX, with booktabs."""
    rows = [
        " & ".join(map(tex_escaped, (c.key, c.text, c.verdict, c.number, c.rung))) + r" \\"
        for c in claims
    ]
    head = [r"\begin{tabular}{@{}lp{.22\linewidth}lp{.34\linewidth}l@{}}", r"\toprule"]
    head += [r" & claim & verdict & number and interval & rung \\", r"\midrule"]
    return "\n".join([*head, *rows, r"\bottomrule", r"\end{tabular}", ""])
