"""The claims the study can judge: holds, fails or depends on, with number and interval.

A verdict is a rule over numbers, written beside the claim, so that it can be argued with; it holds
for the models measured. `against` sets figures drawn anew beside the committed ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import comb
from pathlib import Path
from textwrap import shorten
from typing import Any

import pandas as pd

from workbench.experiments import plans
from workbench.experiments import rows as drawn
from workbench.experiments.export import read_figure
from workbench.experiments.provenance import describe, project_root
from workbench.experiments.sensitivity import missing_values, reach, stored
from workbench.experiments.settings import RECORDED, REPLAYED, THESIS_SHARE, nearest_to_thesis
from workbench.experiments.statistics import LEVEL, is_replayed
from workbench.experiments.study import Study, rung_of

HOLDS, FAILS, DEPENDS, UNTESTED = "holds", "fails", "depends on", "not testable here"
HIGH_HIT_RATE = 0.8
RARE_EVENTS = 10.0  # thrash events per 1,000 look-ups below which thrashing is called rare
NOISE = 0.01
DRAMATIC = 1.5  # times the problems/min from which on a modification is called dramatic
OUT_OF_STEP = (
    "a problem that joins while others wait for scores stays out of step with them, and the LLM's "
    "batches become smaller"
)
"""Why continuous problem batching can be slower: search/rounds.py, reports/bench/NOTES.md."""
HARDLY = 0.05  # accuracy below which a gain is hardly one
AGREE = 0.8  # rank correlation from which on two pairs are said to order the shares alike
SAME_BUDGET = 1.02  # times a budget counts as the same
FEW = 4  # shares, of fewer of which no order is told
MATTERS = 0.01  # of prompt tokens not found cached
SMOL = "measured SmolLM2"
PAIRS = {"measured tiny": "measured tiny pair", SMOL: "SmolLM2, measured",
         RECORDED: "SmolLM2, replayed", REPLAYED: "1B + 8B, replayed"}  # fmt: skip
"""What pages call a pair of models; rows name it in their column `rung`."""


def pair_in_words(rung: str) -> str:
    """As it stands behind `on`: the measured tiny pair; SmolLM2, replayed."""
    name = PAIRS.get(rung, rung)
    return f"the {name}" if name.endswith(" pair") else name


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim judged. number: what it rests on, with its interval; figure: where to look."""

    key: str
    text: str
    verdict: str
    number: str
    figure: str
    rung: str = "measured tiny"


def _judged(key: str, holds: Any, fails: Any, number: str, on: str = "") -> Claim:
    """on: what it depends on where it neither holds nor fails."""
    text, _, figures = CLAIMS[key]
    verdict = HOLDS if holds else FAILS if fails else DEPENDS
    if verdict == DEPENDS:
        number = f"{number}; it depends on {on}"
    return Claim(key, text, verdict, number, figures.split()[0])


def verdicts(judge: Callable[..., Claim], *tables: pd.DataFrame) -> str:
    """A claim as judged of each pair, in Markdown, by tables of rows with a column rung."""
    pairs = list(dict.fromkeys(tables[0]["rung"]))
    found = [judge(*(rows[rows["rung"] == pair] for rows in tables)) for pair in pairs]
    told = [f"- {PAIRS.get(p, p)}: **{c.verdict}** ({c.number})" for p, c in zip(pairs, found)]
    return "\n".join([f"{found[0].text}:\n", *told])


def read_split(rows: pd.DataFrame) -> tuple[Any, pd.Series, pd.Series]:
    """Of rows of plots.memory_split tokens/s by share, the peak, and the shares of equal work."""
    speed = rows[rows["metric"] == "tokens_per_s"].set_index("llm_share").sort_index()
    peak, same = (rows[rows["metric"] == m].iloc[0] for m in ("peak_share", "same_work"))
    return speed, peak, same


def counted_apart(rows: pd.DataFrame) -> pd.Series:
    """By how much counts at fitted prices miss the measured ratio at each share, a fraction of it,
    of rows of plots.memory_split.
    """
    over = rows.pivot_table("ratio", "llm_share", "metric")
    return (over["counted"] / over["tokens_per_s"] - 1).abs()


def listed(shares: Any, form: str = ".2f") -> str:
    """`0.15, 0.20 and 0.30`; none where there is none."""
    *first, last = [f"{share:{form}}" for share in shares] or ["none"]
    return f"{', '.join(first)} and {last}" if first else last


def critiques_in_words(rows: pd.DataFrame) -> str:
    """What it costs that a PRM writes critiques, and whether it moves the best split (where the
    intervals of both best shares are apart), of rows of plots.critiques.
    """
    own = {metric: each.set_index(["kind", "llm_share"]) for metric, each in rows.groupby("metric")}
    rate = own["problems_per_min"]["value"].unstack("kind")[["critiques", "scores"]]
    peaks = own["peak_share"].droplevel("llm_share").loc[["critiques", "scores"]]
    most, near = rate.max(), rate >= 0.98 * rate.max()
    ends = [f"at {share:.2f} {100 * lost['critiques']:.0f} % ({100 * lost['scores']:.0f} % scoring "
            "at once)" for share, lost in (1 - rate.iloc[[0, -1]] / most).iterrows()]  # fmt: skip
    edges = {rate.index[0]: ", the lowest share tried", rate.index[-1]: ", the highest share tried"}
    best = [f"{share:.2f} (95 %: {low:.2f} to {high:.2f}{edges.get(share, '')})"
            for share, low, high in peaks[["value", "low", "high"]].to_numpy()]  # fmt: skip
    apart = peaks["low"].max() > peaks["high"].min()
    return (
        f"With critiques the search is {most['scores'] / most['critiques']:.1f} times slower, each "
        f"at its best share. The best share is {best[0]} with critiques and {best[1]} scoring at "
        f"once, so {'it moves' if apart else 'no move is shown'}. Within 2 % of the best are "
        f"{listed(rate.index[near['critiques']])} with critiques, "
        f"{listed(rate.index[near['scores']])} scoring at once, of {len(rate)} shares tried; "
        f"against the best are lost {' and '.join(ends)}"
    )


def time_spent(lost: pd.DataFrame, *parts: str) -> pd.Series:
    """What part of its wall time each share spends, on both engines, on these parts of the rows of
    plots.lost_time; default: on computing again what was evicted.
    """
    own = lost[lost["part"].isin(parts or ["recomputed_evicted"])]
    seconds = own.groupby("llm_share")["seconds"].sum()
    return (seconds / lost.groupby("llm_share")["wall_s"].first()).fillna(0.0)


def peak_claim(rows: pd.DataFrame) -> Claim:
    """C1. Fails where the interval leaves 0.3 out; holds where it reaches no further than the
    measured shares next to 0.3, inside the axis; else it depends on which of its shares is best.
    """
    speed, peak, same = read_split(rows)
    shares = speed.index
    if not shares.min() - 1e-9 <= THESIS_SHARE <= shares.max() + 1e-9:
        why = f"{THESIS_SHARE:g} lies outside the shares that ran"
        return Claim("C1", CLAIMS["C1"][0], UNTESTED, why, "")
    below, above = shares[shares < THESIS_SHARE - 1e-9], shares[shares > THESIS_SHARE + 1e-9]
    narrow = below.max() <= peak["low"] and peak["high"] <= above.min()
    inside = shares.min() < peak["low"] and peak["high"] < shares.max()
    covers = peak["low"] <= THESIS_SHARE <= peak["high"]
    number = f"fastest {_fastest(peak, same)} [{peak['low']:.2f}, {peak['high']:.2f}]"
    if peak["low"] <= shares.min() and shares.max() <= peak["high"]:
        number = f"no peak is shown [{peak['low']:.2f}, {peak['high']:.2f}]"
    elif lost := lost_at_ends(speed, same):
        told = " and ".join(f"{less} at {end:.2f}" for end, less in lost.items())
        number += f"; against {nearest_to_thesis(shares):.2f} {told}"
    alike = same["low"] <= THESIS_SHARE <= same["high"]
    several = "do the same work" if alike else "cannot be distinguished from the best"
    on = f"what is called a peak: 0.3 is one of several shares that {several}"
    if not inside:
        end = shares.max() if peak["high"] >= shares.max() else shares.min()
        on = f"whether a model is short of room at {end:.2f}; here none is shown to be"
    return _judged("C1", covers and inside and narrow, not covers, number, on)


def _fastest(peak: pd.Series, same: pd.Series) -> str:
    """The peak in words: shares of equal work are one, of which none is the fastest, and one that
    others may equal is no winner.
    """
    if same["low"] != same["high"]:
        return f"from {same['low']:.2f} to {same['high']:.2f}, which do the same work"
    if peak["low"] != peak["high"]:
        return f"from {peak['low']:.2f} to {peak['high']:.2f}, which are not told apart"
    return f"at {peak['value']:.2f}"


def peak_in_words(rows: pd.DataFrame) -> str:
    """Where throughput is highest, of rows of plots.memory_split; or that no peak is shown."""
    speed, peak, same = read_split(rows)
    first, last = speed.index[[0, -1]]
    if same["low"] <= first and last <= same["high"]:
        return f"no peak is shown: every share from {first:.2f} to {last:.2f} does the same work"
    if peak["low"] <= first and last <= peak["high"]:
        return (
            f"no peak is shown between {first:.2f} and {last:.2f}, for its interval is the whole "
            "axis"
        )
    bounds = f"(95 %: {peak['low']:.2f} to {peak['high']:.2f})"
    return f"throughput is highest {_fastest(peak, same)} {bounds}"


def split_in_words(rows: pd.DataFrame) -> str:
    """The peak as a sentence, with its tokens/s and what the ends of the axis lose to 0.3."""
    speed, peak, same = read_split(rows)
    rate, ends, told = speed["value"], speed.index[[0, -1]], peak_in_words(rows)
    told = told[0].upper() + told[1:]
    alike, base = rate.loc[same["low"] : same["high"]], nearest_to_thesis(rate.index)
    if len(alike) == len(rate):
        return f"{told}."
    if peak["low"] <= ends[0] and ends[1] <= peak["high"]:
        return f"{told}: {rate.min():,.0f} to {rate.max():,.0f} generated tokens/s."
    lost = " and ".join(
        f"{rate[end]:,.0f} at {end:.2f} ({less} against {base:.2f})"
        for end, less in lost_at_ends(speed, same).items()
    )
    return f"{told}: {alike.mean():,.0f} generated tokens/s; it is {lost}."


def lost_at_ends(speed: pd.DataFrame, same: pd.Series) -> dict[float, str]:
    """What the ends of the axis lose to 0.3, with its interval; not of an end of equal work."""
    told = {}
    for end in speed.index[[0, -1]]:
        ratio, low, high = speed.loc[end, ["ratio", "ratio_low", "ratio_high"]].astype(float)
        if not same["low"] <= end <= same["high"] and end != nearest_to_thesis(speed.index):
            bounds = f" [{low - 1:+.1%}, {high - 1:+.1%}]" if math.isfinite(high - low) else ""
            told[end] = f"{ratio - 1:+.1%}{bounds}"
    return told


def is_rare(events: pd.DataFrame) -> pd.Series:
    """Whether the interval is below RARE_EVENTS: that of none seen of few look-ups is not."""
    return events["high"] < RARE_EVENTS


def thrashing_in_words(rows: pd.DataFrame, lost: pd.DataFrame) -> str:
    """Is thrashing rare, and what does it cost? rows: of plots.thrashing; lost: of lost_time."""
    events = rows[rows["metric"] == "events_per_1000"]
    most = events.loc[events.groupby("llm_share")["value"].idxmax()].set_index("llm_share")
    most[["low", "high"]] = events.groupby("llm_share")[["low", "high"]].max()  # as of C6
    most = most.assign(cost=time_spent(lost))
    rare, common = most[is_rare(most)], most[most["low"] >= RARE_EVENTS]
    found = "Thrashing is rare at no LLM share"
    if len(rare):
        found = (
            f"Thrashing is rare at LLM shares of {listed(rare.index)}, with at most "
            f"{rare['value'].max():.1f} events in 1,000 look-ups and {rare['cost'].max():.1%} of "
            "the time spent on computing again what was evicted"
        )
    often = [
        f"{listed(own.index)} (the {str(engine).upper()} up to {own['value'].max():.0f} in 1,000 "
        f"look-ups, {own['cost'].max():.1%} of the time)"
        for engine, own in common.groupby("engine")
    ]
    found += f"; it is common at {' and at '.join(often)}" if often else ""
    open_ = most.index.difference([*rare.index, *common.index])
    return f"{found}; at {listed(open_)} too few events tell." if len(open_) else f"{found}."


def policy_or_size(sizes: pd.DataFrame) -> tuple[str, str]:
    """What costs hits, the policy or the size of a cache; and what where the policy costs most.

    sizes: of plots.miss_ratio. The policy's misses are LRU's beyond the optimum's; the size's the
    optimum's, or where the order does not fit a whole search's, beyond those without limit.
    """
    hits: Any = sizes.pivot_table("hit_ratio", ["engine", "tokens"], "kind")
    misses = 1 - hits[["lru", "optimum"]].dropna()
    least = 1 - hits.groupby("engine").max().max(axis=1)
    told = 1 - hits[hits["optimum"].notna() | hits["lru"].isna()].max(axis=1)
    parts = {"policy": misses["lru"] - misses["optimum"], "size": told.sub(least, level="engine")}
    matter = [name for name, part in parts.items() if part.max() >= MATTERS]
    only = f"only the {matter[0]} matters" if matter else "neither policy nor size matters"
    engine, tokens = worst = parts["policy"].idxmax()
    lru, best, unlimited = (f"{100 * part:.1f} %" for part in (*misses.loc[worst], least[engine]))
    return "policy and size both matter" if len(matter) > 1 else only, (
        f"at {tokens:,.0f} tokens the {engine.upper()} misses {lru}, under an optimal policy "
        f"{best}, in a cache without limit {unlimited}"
    )


def constant_claim(rows: pd.DataFrame) -> Claim:
    """C2, of rows of plots.memory_parts. Holds where built engines differ in KV alone, to 1 %."""
    fixed = rows[(rows["how"] != "computed") & rows["fits"] & (rows["part"] != "kv")]
    sizes = fixed.groupby(["how", "model", "part"])["bytes"].agg(["min", "max"])
    change = float(((sizes["max"] - sizes["min"]) / sizes["max"].clip(lower=1)).max())
    number = f"weights and activations change by at most {change:.2%} over the shares"
    return _judged("C2", change <= NOISE, True, number)


def linear_claim(rows: pd.DataFrame) -> Claim:
    """C3, of rows of plots.kv_blocks. Holds where built caches are within one block of the line."""
    built = rows[rows["kind"] == "built"]
    off = float((built["blocks"] - built["formula_blocks"]).abs().max())
    return _judged("C3", off <= 1, True, f"largest distance from the formula {off:.2f} blocks")


def eviction_claim(lost: pd.DataFrame, split: pd.DataFrame) -> Claim:
    """C4, at the highest share beside every one that may be the fastest, so that the range over
    them holds the noise; a replay has none. Holds where what is computed again there and not here
    is more than half of the slow-down.

    lost: rows of plots.lost_time; split: of plots.memory_split, with a column rung.
    """
    (first, last), alike = (
        tuple(split.loc[split["metric"] == name, ["low", "high"]].iloc[0])
        for name in ("peak_share", "same_work")
    )
    end, same = float(lost["llm_share"].max()), f"{reach(first, last, '.2f')}, "
    same += "which do the same work" if first < last and alike == (first, last) else "the fastest"
    if end <= alike[1]:
        number = f"from {alike[0]:.2f} to {end:.2f} the work is the same, so nothing slows down at "
        number += f"{end:.2f}"
        return _judged("C4", False, False, number, f"the PRM's room at {end:.2f}")
    if end <= last:
        number = f"the fastest share may be any from {first:.2f} to {last:.2f}"
        return _judged("C4", False, False, number, "the machine's noise")
    walls, part = lost.groupby("llm_share")["wall_s"].first(), time_spent(lost)
    best, again = walls.loc[first:last], part * walls
    parts = (again[end] - again[best.index]) / (walls[end] - best)
    low, high, part = parts.min(), parts.max(), part[end]
    more = walls[end] / best.max() - 1, walls[end] / best.min() - 1
    sure, rates = "", split[split["metric"] == "tokens_per_s"]
    if len(rates):
        at = rates.set_index("llm_share").loc[end, ["ratio", "ratio_high", "ratio_low"]]
        base = nearest_to_thesis(rates["llm_share"])
        sure = "; against {:.2f} {:+.0%} [{:+.0%}, {:+.0%}]".format(base, *(1 / at - 1))
    number = (
        f"a search takes {reach(*more, '+.0%')} at {end:.2f} beside {same}{sure}; "
        f"recomputing what was evicted is {part:.0%} of its time there, "
        f"{reach(low, high, '.0%')} of the slow-down"
    )
    is_exact = is_replayed(split["rung"].iloc[0])
    slower = walls[end] > best.max() and (is_exact or len(best) > 1)  # one share tells no noise
    verdict = slower and low > 0.5, slower and high < 0.5
    return _judged("C4", *verdict, number, "the machine's noise")


def hits_claim(rows: pd.DataFrame) -> Claim:
    """C5. Holds where every lower bound is 80 % or more; fails where an upper one is below."""
    least, (low, high) = rows.sort_values("value").iloc[0], rows[["low", "high"]].min()
    number = (
        f"lowest {least['engine'].upper()} at {least['llm_share']:.2f}: {least['value']:.1%} "
        f"[{least['low']:.1%}, {least['high']:.1%}]; high means {HIGH_HIT_RATE:.0%}"
    )
    on = f"the problems: the interval holds {HIGH_HIT_RATE:.0%}"
    return _judged("C5", low >= HIGH_HIT_RATE, high < HIGH_HIT_RATE, number, on)


def thrash_claim(rows: pd.DataFrame) -> Claim:
    """C6. Holds below 10 events per 1,000 look-ups at every share, fails above at every share, by
    the whole interval.
    """
    events = rows[rows["metric"] == "events_per_1000"]
    most = events.sort_values("value").iloc[-1]
    ends = events.groupby("llm_share")[["value", "low", "high"]].max()
    seldom, often = is_rare(ends), ends["low"] >= RARE_EVENTS
    rare, common, told = (listed(ends.index[e]) for e in (seldom, often, ~(seldom | often)))
    number = f"most {most['engine'].upper()} at {most['llm_share']:.2f}: {most['value']:.1f} "
    number += f"[{most['low']:.1f}, {most['high']:.1f}] per 1,000 look-ups; "
    number += f"rare means fewer than {RARE_EVENTS:g}"
    on = f"the share: it is rare at {rare} and common at {common}"
    on += "" if told == "none" else f"; too few events tell at {told}"
    return _judged("C6", seldom.all(), often.all(), number, on)


def sameness_claim(nodes: pd.DataFrame) -> Claim:
    """C9, as far as the split goes: every node has the same tokens at every share of a seed."""
    tokens = nodes.assign(text=nodes["token_ids"].map(tuple))
    wanted = tokens.groupby("run_seed")["llm_share"].nunique()
    by_node = tokens.groupby(["run_seed", "problem_id", "node_id"])
    found = by_node[["text", "llm_share"]].nunique()
    lacks = found["llm_share"].lt(wanted, level="run_seed")
    differ = int(((found["text"] > 1) | lacks).sum())
    number = f"{differ:,} of {len(found):,} nodes differ between the shares"
    text = "The memory split leaves the output alone"
    return replace(_judged("C9", not differ, differ, number), text=text, figure="memory_split")


def batching_claim(rows: pd.DataFrame) -> Claim:
    """C7, of rows of plots.modifications, by the whole interval of the gain; of a loss, why. Not
    tested where the work was the same: all problems in flight ended together.
    """
    gains = rows[(rows["metric"] == "gain") & (rows["setting"] == plans.BATCHED[1])]
    if gains.empty:
        return Claim("C7", CLAIMS["C7"][0], UNTESTED, "no run of both ways finished", "")
    gain = gains.iloc[0]
    if gain["low"] == gain["high"] == 1:
        why = "both did the same work: all problems in flight ended together"
        return Claim("C7", CLAIMS["C7"][0], UNTESTED, why, "")
    number = (
        f"{gain['value']:.2f} times the problems/min [{gain['low']:.2f}, {gain['high']:.2f}]; "
        f"dramatic means {DRAMATIC:g} times"
    )
    if gain["high"] < 1:
        number += f"; slower, since {OUT_OF_STEP}"
    on = f"the problems: the interval holds {DRAMATIC:g}"
    return _judged("C7", gain["low"] >= DRAMATIC, gain["high"] < DRAMATIC, number, on)


def finishing_claim(rows: pd.DataFrame) -> Claim:
    """C8 at each depth limit, the greatest the search's own, of rows of plots.modifications with
    num_problems. Fails where the whole interval of the accuracy gained there is above 0.05, holds
    where the intervals at all limits are below.
    """
    gains = rows[rows["metric"] == "finishing"].sort_values("max_depth")
    if gains.empty:
        return Claim("C8", CLAIMS["C8"][0], UNTESTED, "no run of both endings finished", "")
    told = [f"{row.value:+.2f} at a limit of {row.max_depth} steps" for row in gains.itertuples()]
    low, high = gains[["low", "high"]].iloc[-1]
    number = f"accuracy {'; '.join(told)} [{low:.2f}, {high:.2f}], over "
    number += f"{rows['num_problems'].iloc[0]:.0f} problems; hardly means {HARDLY:g}"
    on = "the depth limit"
    on += ", and on more problems than were searched" if low <= HARDLY < high else ""
    return _judged("C8", gains["high"].max() < HARDLY, low > HARDLY, number, on)


def _same_nodes_claim(*tables: pd.DataFrame) -> Claim:
    """C9, of rows of plots.optimisation and plots.modifications: over every split, policy,
    technique and modification but sampling to the end.
    """
    same = pd.concat([rows.loc[rows["metric"] == "same", "value"] for rows in tables])
    equal = "all nodes are equal under all"
    if same.min() < 1:
        equal = f"{same.min():.2%} of nodes are equal under the least equal of"
    number = f"{equal} {len(same)} settings of split, policy and techniques, and of modifications"
    return _judged("C9", same.min() == 1, True, number)


def identical_claim(record: Path | None = None) -> Claim:
    """C9, as far as `workbench bench identity` goes: over splits, limits of a batch, block sizes,
    policies, techniques and sets of instructions, of its committed record of SmolLM2.
    """
    record = record or project_root() / "reports" / "bench" / "identity_smollm2.json"
    if not record.is_file():
        return Claim("C9", CLAIMS["C9"][0], UNTESTED, "there is no record of bench identity", "")
    rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
    values = {row["name"]: row["value"] for row in rows}
    same = [value for name, value in values.items() if name.startswith("identical@")]
    preempted = sum(value for name, value in values.items() if name.startswith("preemptions@"))
    policies = sum(f"@{policy}," in name for name in values for policy in plans.POLICIES) // 2
    both = sum(",techniques" in name for name in values) // 2
    number = (
        f"all nodes are equal under {sum(each == 1 for each in same)} of {len(same)} further "
        f"settings of split, batch limits, block size and instructions, {policies} of them of a "
        f"policy and {both} with all techniques, with {preempted:.0f} preemptions (workbench bench "
        "identity)"
    )
    found = replace(_judged("C9", min(same) == 1, True, number), figure="")
    return found if (policies and both) or min(same) < 1 else replace(found, verdict=UNTESTED)


# -- strategies: which is best, and which others it is shown to beat --


def judge_strategies(study: Study, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of rows.strategy_rows with what they show: `alike`, the others that the best of this
    n is not shown to beat; gain, gain_low, gain_high, gain_from and chance, of rows.gains_by_level.

    Shown to beat is what the bootstrap over problems shows (gap_low above 0), and an exact test of
    the problems that one of both answers more often (gap_chance): where few differ, the bootstrap
    sees too much. The best was picked among all by the same problems, so there the limit of 5 % is
    that of every pair of strategies together.
    """
    most, by = (1 - LEVEL) / max(1, comb(rows["strategy"].nunique(), 2)), ["levels", "n"]
    others = rows[rows["strategy"] != rows["best"]]
    near = others[(others["gap_low"] <= 0) | (others["gap_chance"] >= most)]
    rows = rows.join(near.groupby(by)["strategy"].agg(", ".join).rename("alike"), on=by)
    gained, chance = drawn.gains_by_level(study)
    return rows.fillna({"alike": ""}).join(gained, on="levels").assign(chance=chance)


def ranked_strategies(rows: pd.DataFrame) -> pd.Series:
    """Of rows of judge_strategies which strategy is best and what it is shown to beat, by levels
    and n.
    """
    best = rows[rows["strategy"] == rows["best"]].set_index(["levels", "n"])
    beaten = f"shown to beat all {rows['strategy'].nunique() - 1} others"
    shown = ("not shown to beat " + best["alike"]).where(best["alike"] != "", beaten)
    return best["strategy"] + best["value"].map(" ({:.3f}), ".format) + shown


def most_accurate_for(rows: pd.DataFrame, spent: str) -> str:
    """Of rows of rows.strategy_rows those that are most accurate of all that spend no more (tokens
    or seconds, 2 % more counting as none), from little to much; estimates, without a test, each
    over the problems of its n.
    """
    own = rows[rows["levels"] == "all levels"].sort_values(spent)
    told = []
    for _, row in own.iterrows():
        if row["value"] >= own.loc[own[spent] <= SAME_BUDGET * row[spent], "value"].max():
            told.append(f"{row['strategy']} with n = {row['n']} ({row['value']:.3f})")
    return listed(told, "")


def harder_in_words(rows: pd.DataFrame) -> str:
    """Whether more compute helps most where problems are hard, of rows of judge_strategies."""
    by, asked = rows.drop_duplicates("levels").set_index("levels"), "Does more compute help most"
    asked += " where problems are hard?"
    if len(by) < 3:
        return f"{asked} Not told: there are no problems but of {listed(by.index[1:], '')}"
    said = {
        levels: f"{row['gain']:+.3f} ({row['gain_low']:+.3f} to {row['gain_high']:+.3f})"
        for levels, row in by.iterrows()
    }
    more = by.loc["all levels"]
    shown = "yes" if more["gain_low"] > 0 else "no, less" if more["gain_high"] < 0 else "not shown"
    start = by["gain_from"].astype(float)
    wrong = (1 - start).clip(lower=1e-9)  # at 1 nothing was wrong, nor gained
    righted = 100 * by["gain"].astype(float) / wrong
    return (
        f"{asked} {(shown if more['chance'] < 0.05 else 'not shown').capitalize()}: from n = "
        f"{rows['n'].min()} to {rows['n'].max()} accuracy, a mean over strategies, gains "
        f"{said[drawn.EASIER]} at {drawn.EASIER}, from {start[drawn.EASIER]:.2f}, and "
        f"{said[drawn.HARDER]} at {drawn.HARDER}, from {start[drawn.HARDER]:.2f}: "
        f"{said['all levels']} more there, by the interval, and a probability of "
        f"{more['chance']:.3f} that levels drawn by lot differ as much; it counts as shown where "
        "the interval leaves out 0 and the probability is below 0.05. These are differences of "
        f"accuracy; in proportion, of the answers that were wrong about "
        f"{righted[drawn.EASIER]:.0f} % are right then at {drawn.EASIER} and "
        f"{righted[drawn.HARDER]:.0f} % at {drawn.HARDER}, net of right ones that are lost"
    )


# -- every claim on every pair of models --

CLAIMS: dict[str, tuple[str, Callable[..., Claim], str]] = {
    "C1": ("Throughput peaks inside the interval, at a share of 0.3", peak_claim, "memory_split"),
    "C2": ("Only the KV cache changes with the share", constant_claim, "memory_parts"),
    "C3": ("Blocks are linear in the share", linear_claim, "kv_blocks"),
    "C4": ("The PRM-starved end slows down through eviction",
           eviction_claim, "lost_time memory_split"),
    "C5": ("Hit rates are high everywhere for both models", hits_claim, "prefix_hits"),
    "C6": ("Thrashing is rare", thrash_claim, "thrashing"),
    "C7": ("Continuous problem batching helps dramatically", batching_claim, "modifications"),
    "C8": ("Sampling to the end hardly helps accuracy", finishing_claim, "modifications"),
    "C9": ("The optimisations leave the output alone",
           _same_nodes_claim, "optimisation modifications"),
}  # fmt: skip
"""The claims in words, what judges each, and by the rows of which figures: the first shows it."""
UNTESTED_BECAUSE = {
    **dict.fromkeys(product(("C2", "C3"), (RECORDED, REPLAYED)),
                    "a replay builds no engine: memory is computed by the formula that is claimed"),
    **dict.fromkeys((("C8", RECORDED), ("C8", SMOL)),
                    "its PRM is no trained one: scores mean nothing, and so does accuracy"),
    **dict.fromkeys((("C8", REPLAYED), ("C9", RECORDED), ("C9", REPLAYED)),
                    "a replay samples nothing"),
}  # fmt: skip
NO_ROWS = "the figure has no rows of this pair of models"
WITHOUT_ROWS = {
    ("C7", SMOL): "it was run at three splits alone; the modifications are replayed",
}
"""Why a figure has none, where that is known."""


def claims_of_figures(folder: Path) -> list[Claim]:
    """Every claim for each rung, by the figures of a folder; or that it is not tested, and why."""
    names = " ".join(figures for _, _, figures in CLAIMS.values()).split()
    tables = {name: rows_with_rung(folder / f"{name}.parquet") for name in dict.fromkeys(names)}
    found, rungs = [], dict.fromkeys(at for rows in tables.values() for at in rows["rung"])
    for (key, (text, judge, figures)), at in product(CLAIMS.items(), rungs):
        never = UNTESTED_BECAUSE.get((key, at))
        claim = Claim(key, text, UNTESTED, never or WITHOUT_ROWS.get((key, at), NO_ROWS), "")
        own = [rows[rows["rung"] == at] for rows in (tables[name] for name in figures.split())]
        if never is None and all(map(len, own)):
            with suppress(LookupError):  # what did not run has no rows in a figure
                claim = judge(*own)
        if (key, at) == ("C9", SMOL) and claim.verdict == UNTESTED:
            claim = identical_claim()
        found.append(replace(claim, rung=at))
    return found


def rows_with_rung(file: Path) -> pd.DataFrame:
    """Rows of a figure, none where it is not drawn, with the rung of each: those without one are of
    the models measured; of memory_parts and kv_blocks `how` tells. Of an ablation also
    num_problems.
    """
    if not file.is_file():
        return pd.DataFrame({"rung": []})
    rows, record = read_figure(file.stem, file.parent)
    told = record["parameters"]
    if "rung" not in rows:
        hows = rows.get("how", pd.Series("measured", rows.index))
        known = {"computed": REPLAYED, "measured": rung_of(told["llm"])}
        rows = rows.assign(rung=hows.replace(known))
    return rows.assign(num_problems=(told.get("plan") or told).get("num_problems"))


def rungs_in_words(split: pd.DataFrame) -> str:
    """Whether the peak and the order of shares agree between the first rung and each other, of rows
    of plots.memory_split. Shares that do the work of the fastest are of one rank.
    """
    rates, peaks = dict[str, pd.Series](), list[tuple[float, float]]()
    for at, rows in split.groupby("rung", sort=False):
        speed, peak, same = read_split(rows)
        alike = speed.index.to_series().between(same["low"], same["high"])
        rates[str(at)] = speed["value"].mask(alike, speed.loc[alike, "value"].mean()).round(6)
        peaks.append((peak["low"], peak["high"]))
    orders = pd.DataFrame(rates).corr("spearman").iloc[0]  # over the shares that both have
    (low, high), told = peaks[0], []
    for (other, order), (first, last) in zip(orders.iloc[1:].items(), peaks[1:]):
        overlap = "overlaps" if max(low, first) <= min(high, last) else "does not overlap"
        alike = "agrees" if order >= AGREE else "differs"
        ranks = f"the order of shares {alike} (Spearman's rank correlation {order:.2f})"
        if len(rates[str(other)]) < FEW:
            ranks = "too few shares were tried there for an order"
        elif pd.isna(order):
            ranks = "the shares have no order to compare: on one of the two all do the same work"
        told.append(
            f"on {pair_in_words(str(other))}, {first:.2f} to {last:.2f}, which {overlap}, and "
            f"{ranks}"
        )
    measured = f"The interval of the best share is {low:.2f} to {high:.2f} measured"
    return "; ".join([measured, *told]) + "."


def chosen_in_words(folder: Path | None = None) -> str:
    """How far the agreement of the pairs was chosen, and what other problems in flight lose.
    folder: of the figures, else the committed ones.
    """
    value = missing_values(*stored(folder)).set_index("value").loc["problems in flight"]
    lost = value["told"].partition("; plateau")[0]
    return (
        "That agreement is partly chosen: how short the caches are follows from the problems in "
        f"flight, which the thesis does not state; {value['taken']} are taken, for {value['why']}. "
        f"In replays of 1B + 8B, {lost}."
    )


def prm_need(folder: Path) -> pd.Series:
    """Of each pair the most blocks that its PRM uses at once at 0.3, over those it has at 0.50."""
    low, high = (rows_with_rung(folder / f"prm_blocks_0{share}.parquet") for share in (30, 50))
    need = low.groupby("rung", sort=False)["blocks_active"].max()
    return need / high.groupby("rung", sort=False)["blocks_total"].max()


# -- the figures of a folder beside the committed ones --

COMPARED = (
    ("tokens/s over those at 0.3", "memory_split", "tokens_per_s", ("llm_share",)),
    ("share of the highest tokens/s", "memory_split", "peak_share", ()),
    ("prompt tokens found cached", "prefix_hits", None, ("engine", "llm_share")),
    ("thrash events in 1,000 look-ups", "thrashing", "events_per_1000", ("engine", "llm_share")),
    ("problems/min over those without", "modifications", "gain", ("setting",)),
    ("accuracy", "modifications", "accuracy", ("setting",)),
    ("tokens/s over the best split's", "optimisation", "tokens_per_s", ("setting",)),
    ("tokens/s over the best split's", "optimisation_replayed", "tokens_per_s", ("setting",)),
)
"""Numbers that other machines may have too: in words, figure, metric, keys beside the rung."""
Bounds = dict[tuple[Any, ...], tuple[Any, Any, str]]  # by keys: low, high, and how both are told


def against(figures: Path, committed: Path) -> list[str]:
    """How numbers and verdicts of figures differ from the committed ones, if these are others."""
    if figures.resolve() == committed.resolve():
        return []
    folders, tables, made = (figures, committed), list[Bounds](), dict[str, list[str]]()
    here, there = ({file.stem for file in folder.glob("*.parquet")} for folder in folders)
    if not here & there:
        return ["None of these figures is among the committed ones: nothing is compared."]
    lines = [
        "A number agrees with the committed one where their 95 % intervals overlap; one without an "
        "interval is taken as exact. Absolute rates are not compared, and replays that are the "
        "same in both, as where the committed rows are drawn again, are not counted."
    ]
    for said, name, metric, keys in COMPARED:
        if name in here & there:
            parts = (_intervals(folder / f"{name}.parquet", metric, keys) for folder in folders)
            lines += _beside(f"{said} ({name})", *parts)
    for claims in map(claims_of_figures, folders):  # a verdict is an interval of its own
        tested = ((c, f"{c.verdict} ({c.number})") for c in claims if c.verdict != UNTESTED)
        tables.append({(c.key, c.rung): (c.verdict, c.verdict, told) for c, told in tested})
    lines += _beside("verdicts of the claims", *tables)
    for where, only in (("here", here - there), ("committed", there - here)):
        lines += [f"Figures only {where}: {', '.join(sorted(only))}."] if only else []
    for name in sorted(here & there):
        a, b = (_origin(folder / f"{name}.json") for folder in folders)
        apart = [key for key in a if a[key] != b.get(key, a[key])]
        pairs = [f"{key} {shorten(a[key], 60)} ({shorten(b[key], 60)})" for key in apart]
        made.setdefault("; ".join(pairs), []).append(name)
    told = [f"  {', '.join(names)}: {pairs}." for pairs, names in made.items() if pairs]
    return [*lines, f"Settings that differ, here (committed):{'' if told else ' none.'}", *told]


def _intervals(file: Path, metric: str | None, keys: tuple[str, ...]) -> Bounds:
    """One entry of COMPARED, of a figure's rows."""
    rows, columns = rows_with_rung(file), ["value", "low", "high"]
    rows = rows[rows["metric"] == metric] if metric else rows
    if metric == "tokens_per_s" and "ratio" in rows:
        columns = ["ratio", "ratio_low", "ratio_high"]
    elif metric == "tokens_per_s":
        static = (rows["policy"] == plans.STATIC) & (rows["technique"] == plans.NONE)
        rates = rows[static].groupby("budget")["value"].max()
        rows[columns] = rows[columns].div(rows["budget"].map(rates), axis=0)
        rows.loc[rows["low"] == rows["high"], columns] = 1.0  # equal work: apart by noise alone
    found = Bounds()
    rows = rows.dropna(subset=columns[0]).round(9)  # sums in another order are equal
    for *at, value, low, high in rows[["rung", *keys, *columns]].itertuples(index=False):
        low, high = (value if math.isnan(end) else end for end in (low, high))
        found[tuple(at)] = low, high, f"{value:.4g} [{low:.4g}, {high:.4g}]"
    return found


def _origin(file: Path) -> dict[str, str]:
    """Every setting of a figure, those of a plan among them, its commit and its machine."""
    record = json.loads(file.read_text(encoding="utf-8"))
    told = record["parameters"]
    told |= told.pop("plan", {}) | told.pop("asked", {})
    told |= {"commit": str(record["git"]["commit"])[:7], "machine": describe(record["machine"])}
    return {key: str(told[key]) for key in told if key not in ("profile", "provenance")}


def _beside(said: str, here: Bounds, there: Bounds) -> list[str]:
    """How many intervals overlap, what one side alone has, each that does not overlap: in lines."""
    replayed = [at for at in here if any(isinstance(v, str) and is_replayed(v) for v in at)]
    again = [at for at in replayed if here[at] == there.get(at)]
    both = [at for at in here if at in there and at not in again]
    if again and len(again) == len(here) == len(there):
        return []
    apart = [at for at in both if here[at][0] > there[at][1] or there[at][0] > here[at][1]]
    text = f"{said}: {len(both) - len(apart)} of {len(both)} agree"
    for where, own, other in (("here", here, there), ("committed", there, here)):
        if count := len(own.keys() - other.keys()):
            known = {value for at in other for value in at}
            new = dict.fromkeys(value for at in own for value in at if value not in known)
            text += f"; {count} only {where}" + f" ({_in_words(new)})" * bool(new)
    told = [f"{_in_words(at)}: {here[at][2]} here, {there[at][2]} committed" for at in apart]
    return [f"{text}.", *(f"  differs: {line}" for line in told)]


def _in_words(values: Iterable[Any]) -> str:
    """What tells rows apart: `measured tiny pair, prm, share 0.5`."""
    return ", ".join(f"share {v:g}" if isinstance(v, float) else PAIRS.get(v, v) for v in values)
