"""Rungs compared, paired by problem and seed: the rows that the ladder's figure draws.

Seconds are divided among problems as everywhere (wall_part_s); intervals come from drawing problems
anew and from what runs of equal work differ by. What it does not do: judge, or put into words.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from workbench.experiments.ladder import LadderStudy
from workbench.experiments.ladder_plan import (
    BATCHED,
    BESIDE,
    BY_KEY,
    LADDER,
    LAST_TWO,
    QUEUE,
    RUNGS,
)
from workbench.experiments.peak import Rates, draw_rates
from workbench.experiments.statistics import Interval, bootstrap_mean, paired_difference
from workbench.experiments.views import interval_cells

RATES = {"problems_per_min": "sixty", "tokens_per_s": "tokens"}
SIDES = {"finishes": LAST_TWO[0], "stops": LAST_TWO[1]}
"""The last two rungs at a depth limit: beams there are sampled to the end, or stay unfinished."""
COLUMNS = ["rung", "label", "metric", "value", "low", "high", "max_depth"]


def ladder_rows(study: LadderStudy) -> pd.DataFrame:
    """Rows of plots.modifications.

    Columns: rung, label, metric, value, low, high, max_depth. Metrics: problems_per_min,
    tokens_per_s and accuracy of a rung; gain: how many times the problems/min of the rung before
    (of the rung beside: of the last); whole: of the first; finishes and stops: accuracy of the last
    two rungs at a depth limit.
    """
    rows = [cells for key in study.rungs for cells in _rung_cells(study, key)]
    rows += [
        {"rung": after, "metric": "gain", **interval_cells(speed_up(study, before, after))}
        for before, after in steps_up(study.rungs)
    ]
    first, last = ([rung.key for rung in RUNGS if rung.key in study.rungs][i] for i in (0, -1))
    rows.append({"rung": last, "metric": "whole", **interval_cells(speed_up(study, first, last))})
    table = pd.DataFrame(rows).assign(max_depth=study.config.max_depth)
    table["label"] = table["rung"].map({key: rung.label for key, rung in BY_KEY.items()})
    return pd.concat([table[COLUMNS], depth_rows(study)], ignore_index=True)


def steps_up(rungs: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs (before, after) of measured rungs; the one beside comes after the last."""
    ladder = [rung.key for rung in RUNGS if rung.key in rungs]
    beside = [(ladder[-1], BESIDE.key)] if ladder and BESIDE.key in rungs else []
    return [*pairwise(ladder), *beside]


def speed_up(study: LadderStudy, before: str, after: str) -> Interval:
    """How many times the problems/min of `before` has `after`, over the seeds both have.

    Problems are drawn anew, the same for both, and seconds vary as those of equal work do. Rungs
    that did the same work are one, as shares are: exactly 1. Problem batching is compared over the
    longer queue where that was run.
    """
    rates = _rates(study, (before, after), "sixty")
    ratio = float(rates.pooled[1] / rates.pooled[0])
    if rates.problems == 1 or not rates.tells_noise:
        return Interval(ratio, -np.inf, np.inf, rates.problems)
    low, high = np.quantile(rates.pooled_drawn[:, 1] / rates.pooled_drawn[:, 0], (0.025, 0.975))
    return Interval(ratio, float(low), float(high), rates.problems)


def _rung_cells(study: LadderStudy, key: str) -> list[dict[str, Any]]:
    cells = [
        {"rung": key, "metric": metric, **interval_cells(_rates(study, (key,), column).at(0.0))}
        for metric, column in RATES.items()
    ]
    own = _once(study.problems)
    own = own[own["rung"] == key]
    accuracy = bootstrap_mean(own["correct"].astype(float), list(own["problem_id"]))
    return [*cells, {"rung": key, "metric": "accuracy", **interval_cells(accuracy)}]


def _rates(study: LadderStudy, rungs: Sequence[str], column: str) -> Rates:
    """Rates of `column` over the rungs' seconds; a rung stands where a sweep has a share."""
    place = {key: float(number) for number, key in enumerate(rungs)}
    rows, runs = (
        frame[frame["rung"].isin(rungs)].assign(llm_share=frame["rung"].map(place))
        for frame in _compared(study, rungs)
    )
    rows = rows.drop(columns="seed", errors="ignore").rename(columns={"run_seed": "seed"})
    rows = rows.assign(sixty=60.0)
    return draw_rates(rows, column, "wall_part_s", noise=study.noise, runs=runs)


def _compared(study: LadderStudy, rungs: Sequence[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Problems and runs that tell these rungs apart."""
    queued = tuple(rungs) == BATCHED and set(study.queued.get("ladder", ())) >= set(BATCHED)
    runs = study.queued if queued else study.runs
    rows = study.problems[study.problems["role"] == QUEUE] if queued else _once(study.problems)
    return rows, runs.assign(rung=runs["ladder"])


def _once(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the rungs at the profile's own depth limit, repetitions left out."""
    return rows[(rows["role"] == LADDER) & (rows["repeat"] == 0)]


# -- sampling to the end, at several depth limits --


def depth_rows(study: LadderStudy) -> pd.DataFrame:
    """Accuracy of the last two rungs at each depth limit: metrics finishes and stops."""
    rows = [
        {"rung": rung, "label": BY_KEY[rung].label, "metric": metric, "max_depth": limit}
        | interval_cells(bootstrap_mean(own[f"correct_{metric}"], list(own["problem_id"])))
        for limit, own in depth_pairs(study).groupby("max_depth")
        for metric, rung in SIDES.items()
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def depth_pairs(study: LadderStudy) -> pd.DataFrame:
    """One row a problem, seed and depth limit that both of the last two rungs have.

    Columns: max_depth, problem_id, run_seed, and with the endings _finishes and _stops: correct,
    tokens, and reached: whether a beam came to the limit without an end.
    """
    rows = study.problems[(study.problems["repeat"] == 0) & (study.problems["role"] != QUEUE)]
    rows = rows.assign(correct=rows["correct"].astype(float), reached=_reached(study, rows))
    keys, values = ["max_depth", "problem_id", "run_seed"], ["correct", "reached", "tokens"]
    finishes, stops = (rows.loc[rows["rung"] == r, [*keys, *values]] for r in SIDES.values())
    return finishes.merge(stops, on=keys, suffixes=("_finishes", "_stops"))


def _reached(study: LadderStudy, rows: pd.DataFrame) -> pd.Series:
    """Whether each run and problem of `rows` has a node at its depth limit."""
    nodes = study.nodes
    last = nodes[nodes["depth"] >= nodes["max_depth"]]
    found = set(zip(last["run_id"], last["problem_id"], strict=True))
    pairs = zip(rows["run_id"], rows["problem_id"], strict=True)
    return pd.Series([pair in found for pair in pairs], index=rows.index, dtype=bool)


def accuracy_gain(pairs: pd.DataFrame) -> Interval:
    """Accuracy with sampling to the end minus without, paired. pairs: rows of depth_pairs."""
    sides = pairs["correct_stops"], pairs["correct_finishes"]
    return paired_difference(*sides, list(pairs["problem_id"]))


# -- the same answers on every rung --


def differing_nodes(study: LadderStudy) -> tuple[int, int]:
    """Nodes that differ from the rung before's in tokens or score, or are there once; of how many.

    Sampling to the end is left out: it is meant to change tokens. The rung beside is compared with
    the last.
    """
    nodes = _once(study.nodes)
    nodes = nodes.assign(text=nodes["token_ids"].map(tuple))
    pairs = [(before, after) for before, after in steps_up(study.rungs) if after != LAST_TWO[1]]
    found = [_differing(nodes, before, after) for before, after in pairs]
    return sum(differ for differ, _ in found), sum(total for _, total in found)


def _differing(nodes: pd.DataFrame, before: str, after: str) -> tuple[int, int]:
    keys = ["problem_id", "run_seed", "node_id"]
    sides = [nodes.loc[nodes["rung"] == rung, [*keys, "text", "score"]] for rung in (before, after)]
    seeds = set(sides[0]["run_seed"]) & set(sides[1]["run_seed"])
    first, second = (side[side["run_seed"].isin(seeds)] for side in sides)
    both = first.merge(second, on=keys, how="outer", suffixes=("_a", "_b"))
    same = (both["text_a"] == both["text_b"]) & (both["score_a"] == both["score_b"])
    return int((~same).sum()), len(both)
