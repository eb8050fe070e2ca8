"""The claims one sweep can answer: holds, fails or depends on, with number and interval.

A verdict is a rule over numbers, written beside the claim, so that it can be argued with. What it
does not do: judge claims that need other experiments (C7 and C8), or carry a verdict over to other
models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pandas as pd

from workbench.experiments.lost_time import lost_time_rows
from workbench.experiments.peak import Rates
from workbench.experiments.statistics import Interval
from workbench.experiments.views import (
    Tables,
    memory_split_rows,
    prefix_hit_rows,
    thrashing_rows,
    throughput,
)

HOLDS, FAILS, DEPENDS = "holds", "fails", "depends on"
BASELINE_SHARE = 0.3
HIGH_HIT_RATE = 0.8
RARE_EVENTS = 10.0
"""Thrash events per 1,000 look-ups below which thrashing is called rare."""
NOISE = 0.01
CONSTANT = ("weights_bytes", "activations_bytes", "other_bytes")


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim's verdict. number: what it rests on, with its interval; figure: where to look."""

    key: str
    text: str
    verdict: str
    number: str
    figure: str
    rung: str = "measured tiny"


def claims_table(claims: Sequence[Claim]) -> pd.DataFrame:
    """One row a claim."""
    return pd.DataFrame([asdict(claim) for claim in claims])


def claims_of(sweep: Tables, rung: str = "measured tiny") -> list[Claim]:
    """Every claim this sweep can answer, in the study's order."""
    found = [
        peak_claim(memory_split_rows(sweep)),
        constant_claim(sweep.runs),
        linear_claim(sweep.runs),
        eviction_claim(throughput(sweep), lost_time_rows(sweep)),
        hits_claim(prefix_hit_rows(sweep)),
        thrash_claim(thrashing_rows(sweep)),
        sameness_claim(sweep.table("nodes")),
    ]
    return [Claim(**{**asdict(claim), "rung": rung}) for claim in found]


def peak_claim(rows: pd.DataFrame) -> Claim:
    """C1. Fails where the interval leaves 0.3 out; holds where it reaches no further than the
    measured shares next to 0.3, inside the axis; else it depends on which of its shares is best.
    """
    peak, same = (rows[rows["metric"] == m].iloc[0] for m in ("peak_share", "same_work"))
    shares = sorted(rows.loc[rows["metric"] == "tokens_per_s", "llm_share"])
    near = _neighbours(shares, BASELINE_SHARE)
    narrow = near[0] <= peak["low"] and peak["high"] <= near[1]
    inside = shares[0] < peak["low"] and peak["high"] < shares[-1]
    covers = peak["low"] <= BASELINE_SHARE <= peak["high"]
    verdict = FAILS if not covers else HOLDS if inside and narrow else DEPENDS
    number = f"peak at {peak['value']:.2f} [{peak['low']:.2f}, {peak['high']:.2f}]"
    if same["low"] < same["high"]:
        number += f"; from {same['low']:.2f} to {same['high']:.2f} the work is the same"
    text = "Throughput peaks inside the interval, at a share of 0.3"
    return Claim("C1", text, verdict, number, "memory_split")


def _neighbours(shares: list[float], wanted: float) -> tuple[float, float]:
    """The measured shares next to `wanted` on both sides; the ends where there is none."""
    below = [share for share in shares if share < wanted - 1e-9]
    above = [share for share in shares if share > wanted + 1e-9]
    return max(below, default=shares[0]), min(above, default=shares[-1])


def constant_claim(runs: pd.DataFrame) -> Claim:
    """C2. Holds where weights, activations and other are the same in every run, to 1 % of noise.

    Activations are measured by a profiling pass, so they move by a few bytes in ten thousand.
    """
    parts = runs[[f"{engine}_{part}" for engine in ("llm", "prm") for part in CONSTANT]]
    change = float(((parts.max() - parts.min()) / parts.max().clip(lower=1)).max())
    number = f"weights and activations change by at most {change:.2%} over {len(runs)} runs"
    verdict = HOLDS if change <= NOISE else FAILS
    return Claim("C2", "Only the KV cache changes with the share", verdict, number, "memory_parts")


def linear_claim(runs: pd.DataFrame) -> Claim:
    """C3. Holds where both models' blocks are within one block of the line the formula gives."""
    off = max(_off_the_line(runs, engine) for engine in ("llm", "prm"))
    number = f"largest distance from the formula {off:.2f} blocks"
    verdict = HOLDS if off <= 1 else FAILS
    return Claim("C3", "Blocks are linear in the share", verdict, number, "kv_blocks")


def _off_the_line(runs: pd.DataFrame, engine: str) -> float:
    fixed = runs[f"{engine}_bytes"] - runs[f"{engine}_kv_bytes"]
    line = (runs[f"{engine}_bytes"] - fixed.iloc[0]) / runs[f"{engine}_block_bytes"]
    return float((runs[f"{engine}_blocks"] - line).abs().max())


def eviction_claim(rates: Rates, lost: pd.DataFrame) -> Claim:
    """C4: of the seconds more at the highest share than at 0.3, is recomputing more than half?

    Depends where the slow-down is not told from the machine's noise, or its part not from a half.
    """
    end, base = lost["llm_share"].max(), _nearest(lost["llm_share"], BASELINE_SHARE)
    slower = rates.difference(base, end)
    parts = [_part(lost, share, "recomputed_evicted") for share in (base, end)]
    part = rates.part_of_slow_down(base, end, (parts[0], parts[1]))
    verdict = DEPENDS
    if slower.high < 0:
        verdict = HOLDS if part.low > 0.5 else FAILS if part.high < 0.5 else DEPENDS
    number = (
        f"tokens/s at {end:.2f} minus at {base:.2f}: {slower.estimate:.0f} [{slower.low:.0f}, "
        f"{slower.high:.0f}]; recomputing what was evicted is {parts[1]:.0%} of the time at "
        f"{end:.2f}, {_part_in_words(part, rates.plateau(end)[0] <= base)}"
    )
    text = "The PRM-starved end slows down through eviction"
    return Claim("C4", text, verdict, number, "lost_time")


def _part_in_words(part: Interval, same_work: bool) -> str:
    if same_work:
        return "and both shares do the same work"
    if math.isnan(part.estimate):
        return "and the slow-down is not told from the machine's noise"
    return f"{part.estimate:.0%} [{part.low:.0%}, {part.high:.0%}] of the slow-down"


def _nearest(shares: pd.Series, wanted: float) -> float:
    distinct = shares.drop_duplicates()
    return float(distinct.iloc[(distinct - wanted).abs().argmin()])


def _part(lost: pd.DataFrame, share: float, use: str) -> float:
    """What part of a share's wall time goes to one use, on both engines."""
    rows = lost[lost["llm_share"] == share]
    return float(rows.loc[rows["part"] == use, "seconds"].sum() / rows["wall_s"].iloc[0])


def hits_claim(rows: pd.DataFrame) -> Claim:
    """C5. Holds where every lower bound is 80 % or more; fails where an upper one is below."""
    least = rows.sort_values("value").iloc[0]
    verdict = HOLDS if rows["low"].min() >= HIGH_HIT_RATE else DEPENDS
    verdict = FAILS if rows["high"].min() < HIGH_HIT_RATE else verdict
    number = (
        f"lowest {least['engine'].upper()} at {least['llm_share']:.2f}: {least['value']:.1%} "
        f"[{least['low']:.1%}, {least['high']:.1%}]; high means {HIGH_HIT_RATE:.0%}"
    )
    return Claim(
        "C5", "Hit rates are high everywhere for both models", verdict, number, "prefix_hits"
    )


def thrash_claim(rows: pd.DataFrame) -> Claim:
    """C6. Holds below 10 events per 1,000 look-ups at every share, fails above at every share."""
    events = rows[rows["metric"] == "events_per_1000"]
    most = events.sort_values("value").iloc[-1]
    often = events["value"] >= RARE_EVENTS
    verdict = HOLDS if not often.any() else FAILS if often.all() else DEPENDS
    shares = ", ".join(f"{share:.2f}" for share in sorted(events.loc[often, "llm_share"].unique()))
    number = (
        f"most {most['engine'].upper()} at {most['llm_share']:.2f}: {most['value']:.1f} "
        f"[{most['low']:.1f}, {most['high']:.1f}] per 1,000 look-ups; "
        f"not rare at {shares or 'no share'}"
    )
    return Claim("C6", "Thrashing is rare", verdict, number, "thrashing")


def sameness_claim(nodes: pd.DataFrame) -> Claim:
    """C9, as far as the split goes: every node has the same tokens at every share of a seed."""
    tokens = nodes.assign(text=nodes["token_ids"].map(tuple))
    tokens["all_shares"] = tokens.groupby("run_seed")["llm_share"].transform("nunique")
    found = tokens.groupby(["run_seed", "problem_id", "node_id"]).agg(
        texts=("text", "nunique"), shares=("llm_share", "nunique"), wanted=("all_shares", "first")
    )
    differ = int(((found["texts"] > 1) | (found["shares"] < found["wanted"])).sum())
    number = f"{differ:,} of {len(found):,} nodes differ between the shares"
    verdict = FAILS if differ else HOLDS
    return Claim("C9", "The memory split leaves the output alone", verdict, number, "memory_split")
