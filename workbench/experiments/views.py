"""The rows each figure draws, made of one sweep's tables, each rate with its interval.

Many problems are in flight at once, so none has a wall time of its own; the runs give each the part
that its time in flight is of all problems' (wall_part_s), and intervals come from drawing problems
anew, those of rates also from the machine's noise. What it does not do: draw, or run anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import pandas as pd

from workbench.errors import RunStoreError
from workbench.experiments.noise import noise_of
from workbench.experiments.peak import Rates, draw_rates
from workbench.experiments.statistics import Interval, bootstrap_ratio, proportion_upper_bound

ENGINES = ("llm", "prm")
STRETCHES = 20
"""Stretches of steps a run is cut into where counts belong to no single problem."""


class Tables(Protocol):
    """What a view needs of a sweep: experiments.sweep.Sweep, or a look-alike in tests."""

    @property
    def runs(self) -> pd.DataFrame: ...

    @property
    def all_runs(self) -> pd.DataFrame: ...

    def table(
        self, name: str, llm_share: float | None = None, seed: int | None = None
    ) -> pd.DataFrame: ...


def rooms(sweep: Tables) -> pd.DataFrame:
    """One row a share: llm_share, llm_kv_tokens, prm_kv_tokens (positions a cache can hold)."""
    columns = ["llm_share", "llm_kv_tokens", "prm_kv_tokens"]
    return sweep.runs[columns].drop_duplicates("llm_share").sort_values("llm_share")


def memory_split_rows(sweep: Tables) -> pd.DataFrame:
    """Rows of plots.memory_split: four rates a share, and the peak's share with its interval.

    The row same_work is the range of shares that do the same work as the peak's.
    """
    columns = {
        "tokens_per_s": ("tokens", "wall_part_s"),
        "problems_per_min": ("sixty", "wall_part_s"),
        "llm_tokens_per_busy_s": ("tokens", "llm_busy_part_s"),
        "prm_tokens_per_busy_s": ("prm_tokens", "prm_busy_part_s"),
    }
    rates = rates_of(sweep, columns)
    parts = [
        {"llm_share": share, "metric": metric, **interval_cells(found.at(share))}
        for metric, found in rates.items()
        for share in found.shares
    ]
    peak = rates["tokens_per_s"].peak
    low, high = rates["tokens_per_s"].plateau(peak.estimate)
    at = {"llm_share": peak.estimate}
    parts.append(at | {"metric": "peak_share", **interval_cells(peak)})
    parts.append(at | {"metric": "same_work", "value": peak.estimate, "low": low, "high": high})
    return with_rooms(parts, sweep)


def throughput(sweep: Tables) -> Rates:
    """Generated tokens a second over the split, drawn with the sweep's noise."""
    return rates_of(sweep, {"tokens_per_s": ("tokens", "wall_part_s")})["tokens_per_s"]


def rates_of(sweep: Tables, columns: Mapping[str, tuple[str, str]]) -> dict[str, Rates]:
    """Rates of two columns of problem_seconds each, by name, drawn with the sweep's noise."""
    rows, runs, noise = problem_seconds(sweep), sweep.runs, noise_of(sweep.all_runs)
    return {
        name: draw_rates(rows, top, bottom, noise=noise, runs=runs)
        for name, (top, bottom) in columns.items()
    }


def problem_seconds(sweep: Tables) -> pd.DataFrame:
    """One row a run and problem: seed, tokens, and its parts of wall and busy seconds.

    prm_tokens: prompt tokens the PRM computed for the first time; what each problem computed again
    is not recorded, so a run's total is divided by what each had computed.
    """
    columns = ["run_id", "llm_share", "problem_id", "tokens", "wall_part_s", "prm_tokens_computed"]
    rows = sweep.table("problems")[columns]
    runs = sweep.runs[["run_id", "seed", "wall_s", "llm_busy_s", "prm_busy_s"]]
    rows = rows.merge(runs, on="run_id")
    part = rows["wall_part_s"] / rows["wall_s"]
    computed = rows.pop("prm_tokens_computed")
    read = computed / computed.groupby(rows["run_id"]).transform("sum")
    return rows.assign(
        sixty=60.0,
        llm_busy_part_s=part * rows["llm_busy_s"],
        prm_busy_part_s=part * rows["prm_busy_s"],
        prm_tokens=read * rows["run_id"].map(new_prm_tokens(sweep)),
    )


def new_prm_tokens(sweep: Tables) -> pd.Series:
    """Prompt tokens the PRM computed for the first time, by run_id."""
    steps = sweep.table("steps")
    prm = steps[steps["engine"] == "prm"]
    again = prm[[c for c in prm.columns if c.startswith("recomputed_tokens_")]].sum(axis=1)
    return (prm["prefill_tokens"] - again).groupby(prm["run_id"]).sum()


def block_rows(sweep: Tables, llm_share: float, beside: tuple[float, ...] = ()) -> pd.DataFrame:
    """Rows of plots.prm_blocks: every PRM step of the first seed's run at a share.

    beside: other shares whose figures are to have the same axes.
    """
    seed = int(sweep.runs["seed"].min())
    wanted = {share: _prm_steps(sweep, share, seed) for share in (llm_share, *beside)}
    limits = {
        "axis_steps": max(len(rows) for rows in wanted.values()),
        "axis_blocks": max(rows["blocks_total"].max() for rows in wanted.values()),
        "axis_events": max(
            rows[["allocated", "evicted"]].to_numpy().max() for rows in wanted.values()
        ),
    }
    return wanted[llm_share].assign(**limits)


def _prm_steps(sweep: Tables, llm_share: float, seed: int) -> pd.DataFrame:
    steps = sweep.table("steps", llm_share=llm_share, seed=seed)
    prm = steps[steps["engine"] == "prm"].sort_values("start_s", ignore_index=True)
    if prm.empty:
        raise RunStoreError(f"The run at llm_share={llm_share} recorded no step of the PRM.")
    return prm.assign(step=np.arange(len(prm)))


def starvation_rows(sweep: Tables, prm_share: float = 0.5, llm_share: float = 0.08) -> pd.DataFrame:
    """Whether each model runs out of blocks at its end of the axis: what, where, count, seen.

    Counts are sums over all seeds; `seen` is whether there was any.
    """
    steps = sweep.table("steps")
    wanted = (
        ("prm", prm_share, "evicted", "blocks evicted"),
        ("prm", prm_share, "recomputed_tokens_evicted", "evicted tokens computed again"),
        ("llm", llm_share, "preempted", "requests preempted"),
    )
    rows = [
        {
            "engine": engine,
            "llm_share": share,
            "what": words,
            "count": _sum_at(steps, engine, share, column),
        }
        for engine, share, column, words in wanted
    ]
    table = pd.DataFrame(rows)
    return table.assign(seen=table["count"] > 0)


def _sum_at(steps: pd.DataFrame, engine: str, share: float, column: str) -> int:
    here = (steps["engine"] == engine) & ((steps["llm_share"] - share).abs() < 1e-9)
    return int(steps.loc[here, column].sum())


def prefix_hit_rows(sweep: Tables) -> pd.DataFrame:
    """Rows of plots.prefix_hits: tokens found cached over tokens queried, at first admissions."""
    requests = sweep.table("requests").rename(
        columns={"cached_tokens": "hit", "prompt_tokens": "asked"}
    )
    parts = [
        {
            "llm_share": share,
            "engine": engine,
            **interval_cells(problem_ratio(rows, "hit", "asked")),
        }
        for (share, engine), rows in requests.groupby(["llm_share", "engine"])
    ]
    return with_rooms(parts, sweep)


def thrashing_rows(sweep: Tables) -> pd.DataFrame:
    """Rows of plots.thrashing: events per 1,000 look-ups, and thrashed blocks a search.

    Both are counted by step, not by problem, so intervals come from drawing stretches of steps
    anew. A look-up is an admission, re-admissions included. Where nothing thrashed the upper bound
    is the rule of three's.
    """
    stretches = _stretches(sweep)
    searches = len(sweep.runs["seed"].unique())
    parts = []
    for (share, engine), rows in stretches.groupby(["llm_share", "engine"]):
        where = {"llm_share": share, "engine": engine}
        events = _rate(rows, "thrash_events", "look_ups", 1000.0)
        blocks = _rate(rows, "thrashed", "look_ups", rows["look_ups"].sum() / searches)
        parts += [
            {**where, "metric": "events_per_1000", **events},
            {**where, "metric": "blocks", **blocks},
        ]
    return with_rooms(parts, sweep)


def _stretches(sweep: Tables) -> pd.DataFrame:
    """Counts of each run and engine in STRETCHES equal parts of its time."""
    keys = ["run_id", "llm_share", "engine"]
    steps = sweep.table("steps")
    ends = steps.assign(end=steps["start_s"] + steps["duration_s"]).groupby(keys)["end"].max()
    counts = _by_stretch(steps, "start_s", ends, keys, ["thrash_events", "thrashed"])
    requests = sweep.table("requests")
    admitted = requests[requests["scheduled_s"].notna()]
    look_ups = admitted.assign(look_ups=1 + admitted["preemptions"])
    look_ups = _by_stretch(look_ups, "scheduled_s", ends, keys, ["look_ups"])
    return counts.join(look_ups, how="outer").fillna(0).reset_index()


def _by_stretch(
    rows: pd.DataFrame, time: str, ends: pd.Series, keys: list[str], columns: list[str]
) -> pd.DataFrame:
    end = ends.reindex(pd.MultiIndex.from_frame(rows[keys])).to_numpy()
    stretch = np.minimum(rows[time].to_numpy() * STRETCHES // end, STRETCHES - 1).astype(int)
    return rows.assign(stretch=stretch).groupby([*keys, "stretch"])[columns].sum()


def _rate(rows: pd.DataFrame, top: str, bottom: str, scale: float) -> dict[str, float]:
    units = rows["run_id"] + "/" + rows["stretch"].astype(str)
    if rows[top].sum() == 0:
        bound = proportion_upper_bound(0, int(rows[bottom].sum()))
        return {"value": 0.0, "low": 0.0, "high": scale * bound}
    found = bootstrap_ratio(rows[top], rows[bottom], list(units))
    return {name: scale * value for name, value in interval_cells(found).items()}


def problem_ratio(rows: pd.DataFrame, top: str, bottom: str) -> Interval:
    """Sum of `top` over sum of `bottom`, its interval from drawing problems anew."""
    return bootstrap_ratio(rows[top], rows[bottom], list(rows["problem_id"]))


def interval_cells(interval: Interval) -> dict[str, float]:
    """An interval as columns value, low, high."""
    return {"value": interval.estimate, "low": interval.low, "high": interval.high}


def with_rooms(parts: list[dict[str, Any]], sweep: Tables) -> pd.DataFrame:
    """Rows with llm_share as a table, with the columns of `rooms`."""
    return pd.DataFrame(parts).merge(rooms(sweep), on="llm_share", how="left")
