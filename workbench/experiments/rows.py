"""The rows each figure draws, made of a study's tables, each rate with its interval.

Many problems are in flight at once, so none has a wall time of its own; the runs give each the part
that its time in flight is of all problems' (wall_part_s), and intervals come from drawing problems
anew, those of rates also from the machine's noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.errors import RunStoreError
from workbench.experiments.execute import ENGINES, REPLAYED
from workbench.experiments.memory import feasibility
from workbench.experiments.provenance import counted
from workbench.experiments.runs import FINISHED, INFEASIBLE
from workbench.experiments.settings import (
    ABLATION,
    BATCHED,
    BESIDE,
    CONTINUOUS,
    COUNTED,
    DEPTH,
    ELASTIC,
    LAST_TWO,
    MODIFICATIONS,
    NONE,
    QUEUE,
    STATIC,
    STATIC_BATCH,
    TECHNIQUES,
    THESIS_SHARE,
    TIMED,
    PolicyPlan,
    RunSpec,
    accepted,
    setting_of,
    thesis_pair,
)
from workbench.experiments.statistics import (
    Interval,
    Rates,
    Tables,
    bootstrap_mean,
    bootstrap_ratio,
    draw_rates,
    noise_of,
    paired_difference,
    upper_bound_of_none,
)
from workbench.experiments.study import Study, rung
from workbench.models.registry import model_spec

STRETCHES = 20
"""Stretches of steps a run is cut into where counts belong to no single problem."""

# -- the memory split --


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
        {"llm_share": share, "metric": metric, **found.at(share).cells}
        for metric, found in rates.items()
        for share in found.settings
    ]
    peak = rates["tokens_per_s"].peak
    low, high = rates["tokens_per_s"].plateau(peak.estimate)
    at = {"llm_share": peak.estimate}
    parts.append(at | {"metric": "peak_share", **peak.cells})
    parts.append(at | {"metric": "same_work", "value": peak.estimate, "low": low, "high": high})
    return with_rooms(parts, sweep)


def throughput(sweep: Tables) -> Rates:
    """Generated tokens a second over the split, drawn with the sweep's noise."""
    return rates_of(sweep, {"tokens_per_s": ("tokens", "wall_part_s")})["tokens_per_s"]


def rates_of(sweep: Tables, columns: Mapping[str, tuple[str, str]]) -> dict[str, Rates]:
    """Rates of two columns of problem_seconds each, by name, drawn with the sweep's noise."""
    rows, runs, noise = problem_seconds(sweep), sweep.runs, noise_of(sweep.all_runs)
    return {
        name: draw_rates(rows, runs, "llm_share", top, bottom, noise=noise)
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
    steps = sweep.table("steps")
    prm = steps[steps["engine"] == "prm"]
    again = prm[[c for c in prm.columns if c.startswith("recomputed_tokens_")]].sum(axis=1)
    new = (prm["prefill_tokens"] - again).groupby(prm["run_id"]).sum()
    return rows.assign(
        sixty=60.0,
        llm_busy_part_s=part * rows["llm_busy_s"],
        prm_busy_part_s=part * rows["prm_busy_s"],
        prm_tokens=read * rows["run_id"].map(new),
    )


def block_rows(sweep: Tables, llm_share: float, beside: tuple[float, ...] = ()) -> pd.DataFrame:
    """Rows of plots.prm_blocks: every PRM step of the first seed's run at a share.

    beside: other shares whose figures are to have the same axes.
    """
    seed, drawn = int(sweep.runs["seed"].min()), {}
    for share in (llm_share, *beside):
        steps = sweep.table("steps", llm_share=share, seed=seed)
        prm = steps[steps["engine"] == "prm"].sort_values("start_s", ignore_index=True)
        if prm.empty:
            raise RunStoreError(f"The run at llm_share={share} recorded no step of the PRM.")
        drawn[share] = prm.assign(step=np.arange(len(prm)))
    every = pd.concat(drawn.values())
    return drawn[llm_share].assign(
        axis_steps=max(map(len, drawn.values())),
        axis_blocks=every["blocks_total"].max(),
        axis_events=every[["allocated", "evicted"]].to_numpy().max(),
    )


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
    rows = []
    for engine, share, column, words in wanted:
        here = (steps["engine"] == engine) & ((steps["llm_share"] - share).abs() < 1e-9)
        count = int(steps.loc[here, column].sum())
        rows.append({"engine": engine, "llm_share": share, "what": words, "count": count})
    return pd.DataFrame(rows).assign(seen=lambda table: table["count"] > 0)


def prefix_hit_rows(sweep: Tables) -> pd.DataFrame:
    """Rows of plots.prefix_hits: tokens found cached over tokens queried, at first admissions."""
    requests = sweep.table("requests").rename(
        columns={"cached_tokens": "hit", "prompt_tokens": "asked"}
    )
    parts = [
        {
            "llm_share": share,
            "engine": engine,
            **problem_ratio(rows, "hit", "asked").cells,
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
    keys = ["run_id", "llm_share", "engine"]
    steps, requests = sweep.table("steps"), sweep.table("requests")
    ends = steps.assign(end=steps["start_s"] + steps["duration_s"]).groupby(keys)["end"].max()
    admitted = requests[requests["scheduled_s"].notna()]
    admitted = admitted.assign(look_ups=1 + admitted["preemptions"])

    def by_stretch(rows: pd.DataFrame, time: str, columns: list[str]) -> pd.DataFrame:
        end = ends.reindex(pd.MultiIndex.from_frame(rows[keys])).to_numpy()
        stretch = np.minimum(rows[time].to_numpy() * STRETCHES // end, STRETCHES - 1).astype(int)
        return rows.assign(stretch=stretch).groupby([*keys, "stretch"])[columns].sum()

    thrashed = by_stretch(steps, "start_s", ["thrash_events", "thrashed"])
    stretches = thrashed.join(by_stretch(admitted, "scheduled_s", ["look_ups"]), how="outer")
    searches, parts = sweep.runs["seed"].nunique(), []
    for (share, engine), rows in stretches.fillna(0).reset_index().groupby(keys[1:]):
        where = {"llm_share": share, "engine": engine}
        events = _rate(rows, "thrash_events", "look_ups", 1000.0)
        blocks = _rate(rows, "thrashed", "look_ups", rows["look_ups"].sum() / searches)
        parts += [
            {**where, "metric": "events_per_1000", **events},
            {**where, "metric": "blocks", **blocks},
        ]
    return with_rooms(parts, sweep)


def _rate(rows: pd.DataFrame, top: str, bottom: str, scale: float) -> dict[str, float]:
    units = rows["run_id"] + "/" + rows["stretch"].astype(str)
    if rows[top].sum() == 0:
        bound = upper_bound_of_none(int(rows[bottom].sum()))
        return {"value": 0.0, "low": 0.0, "high": scale * bound}
    found = bootstrap_ratio(rows[top], rows[bottom], list(units))
    return {name: scale * value for name, value in found.cells.items()}


def problem_ratio(rows: pd.DataFrame, top: str, bottom: str) -> Interval:
    """Sum of `top` over sum of `bottom`, its interval from drawing problems anew."""
    return bootstrap_ratio(rows[top], rows[bottom], list(rows["problem_id"]))


def with_rooms(parts: list[dict[str, Any]], sweep: Tables) -> pd.DataFrame:
    """Rows with llm_share as a table, with the columns of `rooms`."""
    return pd.DataFrame(parts).merge(rooms(sweep), on="llm_share", how="left")


# -- lost time: every step and span of a run put to one of eight uses --

AGAIN = ("recomputed_evicted", "recomputed_preempted", "recomputed_partial")
PARTS = ("llm_decode", "llm_prefill", "prm_prefill", *AGAIN, "waiting", "bookkeeping")
Cost = Callable[[int, int, int], float]
"""Floating-point operations of a forward: (new tokens, tokens in the cache, rows of logits)."""


def lost_time_rows(sweep: Tables, costs: Mapping[str, Cost] | None = None) -> pd.DataFrame:
    """Rows of plots.lost_time: seconds by llm_share, lane and part, wall_s, KV tokens.

    costs: of one forward, by engine ("llm", "prm"); by default those of the sweep's models.
    """
    costs = costs or {each: model_spec(str(sweep.runs[each].iloc[0])).flops for each in ENGINES}
    steps, spans = sweep.table("steps"), sweep.table("spans")
    outside = spans[["llm_share", "lane"]].assign(
        part=np.where(spans["kind"] == "waiting", "waiting", "bookkeeping"),
        seconds=spans["duration_s"],
    )
    inside = [_engine_uses(steps[steps["engine"] == e], e, costs[e]) for e in ENGINES]
    uses = pd.concat([*inside, outside], ignore_index=True)
    runs = sweep.runs.groupby("llm_share")["run_id"].nunique().rename("runs")
    columns = ["run_id", "llm_share", "start_s", "duration_s"]
    both = pd.concat([steps[columns], spans[columns]])  # first start to last end of each run
    by_run = both.assign(end=both["start_s"] + both["duration_s"]).groupby(["llm_share", "run_id"])
    walls = by_run["end"].max() - by_run["start_s"].min()
    walls = walls.groupby("llm_share").mean().rename("wall_s")
    seconds = uses.groupby(["llm_share", "lane", "part"])["seconds"].sum().reset_index()
    rows = seconds.merge(runs, on="llm_share").merge(walls, on="llm_share")
    rows["seconds"] /= rows.pop("runs")
    return rows.merge(rooms(sweep), on="llm_share", how="left")


def accounted(rows: pd.DataFrame) -> pd.Series:
    """What part of each share's wall time the parts add up to: 1 when nothing lacks."""
    by_share = rows.groupby("llm_share")
    return by_share["seconds"].sum() / by_share["wall_s"].first()


def _engine_uses(steps: pd.DataFrame, engine: str, cost: Cost) -> pd.DataFrame:
    """Each step's seconds by part: scheduling is bookkeeping, the rest goes by operations.

    A token attends to the mean context of the step's requests, a prompt's token to half of it.
    """
    context = (steps["tokens_held"] / steps["running"].clip(lower=1)).to_numpy(float)
    decode, prefill = _one_token(cost, context, 1), _one_token(cost, context / 2, 0)
    again = {part: steps[part.replace("_", "_tokens_", 1)] * prefill for part in AGAIN}
    new = steps["prefill_tokens"] * prefill - sum(again.values())
    decoded = steps["decode_tokens"] * decode
    named = {"prm_prefill": new + decoded}
    if engine == "llm":
        named = {"llm_decode": decoded, "llm_prefill": new}
    operations = pd.DataFrame({**named, **again})
    total = operations.sum(axis=1)
    forward = steps["duration_s"] - steps["schedule_s"]
    seconds = operations.mul((forward / total.where(total > 0)).fillna(0.0), axis=0)
    idle = forward.where(total == 0, 0.0)  # a step that computed nothing
    seconds["bookkeeping"] = steps["schedule_s"] + idle
    seconds["llm_share"] = steps["llm_share"]
    long = seconds.melt(id_vars="llm_share", var_name="part", value_name="seconds")
    return long.assign(lane=engine)


def _one_token(
    cost: Cost, context: NDArray[np.float64], logits: int, far: int = 1024
) -> NDArray[np.float64]:
    """Operations of one token at each context: linear in it, so two calls tell all."""
    near = cost(1, 0, logits)
    return near + context * (cost(1, far, logits) - near) / far


# -- batch limits --

CELL = ["model", "kind", "max_num_seqs", "max_num_batched_tokens"]
CELL_RATES = ["tokens_per_s", "steps_per_s", "padding", "waste", "most_running", "kv_blocks"]
TOO_FEW_TOKENS = "more sequences than tokens in a step: not all could decode"


def batch_rows(cells: pd.DataFrame, model: str) -> pd.DataFrame:
    """Rows of plots.batch_limits: one a cell of one model, also those that cannot be.

    cells: all runs of the batching study. Columns: those of CELL, status, error (why a cell has no
    rate), of CELL_RATES the median over repetitions, and the range of steps_per_s.
    """
    own = cells[(cells["model"] == model) & (cells["role"] == TIMED)]
    whole = own[own["kind"] == CONTINUOUS]
    refused = [
        {"model": model, "kind": CONTINUOUS, "max_num_seqs": seqs, "max_num_batched_tokens": tokens}
        | {"status": INFEASIBLE, "error": TOO_FEW_TOKENS}
        for seqs in whole["max_num_seqs"].unique()
        for tokens in whole["max_num_batched_tokens"].unique()
        if not accepted(seqs, tokens)
    ]
    rows = pd.concat([own, pd.DataFrame(refused)], ignore_index=True)
    rows = rows.reindex(columns=[*CELL, "status", "error", *CELL_RATES])
    rows = rows.astype(dict.fromkeys(CELL_RATES, float))
    medians = {name: (name, "median") for name in CELL_RATES}
    said = {name: (name, "first") for name in ("status", "error")}
    reach = {
        f"steps_per_s_{end}": ("steps_per_s", f) for end, f in (("low", "min"), ("high", "max"))
    }
    return rows.groupby(CELL, as_index=False).agg(**said, **medians, **reach)


def balance_rows(sweep: Tables, cells: pd.DataFrame) -> pd.DataFrame:
    """Rows of plots.balance: steps a second of both models over the split, and wasted blocks.

    Columns: metric (steps_per_busy_s | waste), model, value, low, high; of the first llm_share and
    the tokens both caches hold, of the second kind, block_size and max_num_seqs.
    """
    keys = ["run_id", "problem_id"]
    steps = sweep.table("nodes").groupby(keys).size().rename("steps").reset_index()
    rows = sweep.table("problems")[[*keys, "llm_share", "wall_part_s"]].merge(steps, on=keys)
    rows = rows.merge(sweep.runs[["run_id", "wall_s", "llm_busy_s", "prm_busy_s"]], on="run_id")
    part = rows["wall_part_s"] / rows["wall_s"]
    busy = [
        {"llm_share": share, "metric": "steps_per_busy_s", "model": model}
        | problem_ratio(own.assign(busy=part * own[f"{model}_busy_s"]), "steps", "busy").cells
        for share, own in rows.groupby("llm_share")
        for model in ENGINES
    ]
    done = cells[cells["status"] == FINISHED]
    wanted = done[(done["role"] == COUNTED) | (done["kind"] == STATIC_BATCH)]
    columns = ["model", "kind", "block_size", "max_num_seqs"]
    waste = wanted[[*columns, "waste"]].drop_duplicates(columns).rename(columns={"waste": "value"})
    waste = waste.assign(metric="waste").sort_values(columns, ignore_index=True)
    return pd.concat([with_rooms(busy, sweep), waste], ignore_index=True)


# -- the ablation of the thesis's modifications --

SIDES = {"finishes": LAST_TWO[0], "stops": LAST_TWO[1]}
"""The last two at a depth limit: beams there are sampled to the end, or stay unfinished."""


def ablation_rows(study: Study) -> pd.DataFrame:
    """Rows of plots.modifications.

    Columns: rung, label, metric, value, low, high, max_depth. Metrics: problems_per_min,
    tokens_per_s and accuracy of a setting; gain: how many times the problems/min of the one before
    (of the one beside: of the last); whole: of the first; finishes and stops: accuracy of the last
    two at a depth limit.
    """
    noise, problems = study.noise, study.table("problems").assign(sixty=60.0)
    rows: list[dict[str, Any]] = []
    for key, runs in study.runs.groupby("setting", sort=False):
        own = problems[problems["setting"] == key]
        for metric, top in (("problems_per_min", "sixty"), ("tokens_per_s", "tokens")):
            rate = draw_rates(own, runs, "setting", top, noise=noise).at(key)
            rows.append({"rung": key, "metric": metric, **rate.cells})
        right = bootstrap_mean(own["correct"].astype(float), list(own["problem_id"]))
        rows.append({"rung": key, "metric": "accuracy", **right.cells})
    rows += [
        {"rung": after, "metric": "gain", **gain_of(study, before, after).cells}
        for before, after in steps_up(study)
    ]
    stacked = [key for key in measured_settings(study) if key != BESIDE]
    whole = gain_of(study, stacked[0], stacked[-1])
    rows.append({"rung": stacked[-1], "metric": "whole", **whole.cells})
    pairs = depth_pairs(study)
    limits = [
        {"rung": key, "metric": side, "max_depth": limit}
        | bootstrap_mean(own[f"correct_{side}"], list(own["problem_id"])).cells
        for limit, own in pairs.groupby("max_depth")
        for side, key in SIDES.items()
    ]
    table = pd.DataFrame(rows).assign(max_depth=study.config.max_depth)
    table = pd.concat([table, pd.DataFrame(limits)], ignore_index=True)
    labels = table["rung"].map({key: each.label for key, each in MODIFICATIONS.items()})
    columns = ["rung", "label", "metric", "value", "low", "high", "max_depth"]
    return table.assign(label=labels)[columns]


def measured_settings(study: Study) -> list[str]:
    """Settings of the ablation that were measured, in order."""
    return list(dict.fromkeys(study.runs["setting"]))


def steps_up(study: Study) -> list[tuple[str, str]]:
    """Pairs (before, after) of measured settings; the one beside comes after the last."""
    settings = measured_settings(study)
    stacked = [key for key in settings if key != BESIDE]
    beside = [(stacked[-1], BESIDE)] if BESIDE in settings and stacked else []
    return [*pairwise(stacked), *beside]


def gain_of(study: Study, before: str, after: str) -> Interval:
    """How many times the problems/min of `before` has `after`, over the seeds both have.

    Problem batching is compared over the longer queue where that was run.
    """
    queued = study.having(role=QUEUE)
    is_queued = (before, after) == BATCHED and set(queued["setting"]) >= set(BATCHED)
    return speed_up(study, before, after, "sixty", queued if is_queued else None)


def depth_pairs(study: Study) -> pd.DataFrame:
    """One row a problem, seed and depth limit that both of the last two settings have.

    Columns: max_depth, problem_id, run_seed, and with the endings _finishes and _stops: correct,
    tokens, and reached: whether a beam came to the limit without an end.
    """
    runs = study.having(role=(ABLATION, DEPTH), repeat=0, setting=LAST_TWO)
    keys = ["max_depth", "problem_id", "run_seed"]
    if runs.empty:
        return pd.DataFrame(columns=keys)
    limits = dict(zip(runs["run_id"], runs["max_depth"].astype(int)))
    rows, nodes = (
        table.assign(max_depth=table["run_id"].map(limits))
        for table in (study.table(name, runs=runs) for name in ("problems", "nodes"))
    )
    last = nodes[nodes["depth"] >= nodes["max_depth"]]
    found = set(zip(last["run_id"], last["problem_id"]))
    reached = [pair in found for pair in zip(rows["run_id"], rows["problem_id"])]
    rows = rows.assign(correct=rows["correct"].astype(float), reached=reached)
    values = ["correct", "reached", "tokens"]
    finishes, stops = (rows.loc[rows["setting"] == s, [*keys, *values]] for s in SIDES.values())
    return finishes.merge(stops, on=keys, suffixes=("_finishes", "_stops"))


def accuracy_gain(pairs: pd.DataFrame) -> Interval:
    """Accuracy with sampling to the end minus without, paired. pairs: rows of depth_pairs."""
    sides = pairs["correct_stops"], pairs["correct_finishes"]
    return paired_difference(*sides, list(pairs["problem_id"]))


# -- the same output --


def differing_nodes(study: Study, pairs: Sequence[tuple[str, str]]) -> dict[str, tuple[int, int]]:
    """Of each pair (expected, setting): nodes of the setting that differ in tokens or score from
    the expected one's of their seed, or that one of both lacks; of how many. Repetitions count.
    """
    wanted = tuple({setting for pair in pairs for setting in pair})
    runs = study.having(setting=wanted)
    runs = runs[~runs["role"].isin((DEPTH, QUEUE))]
    nodes = study.table("nodes", runs=runs)
    nodes["text"] = nodes["token_ids"].map(tuple)
    keys = ["problem_id", "run_seed", "node_id"]
    first = nodes[nodes["repeat"] == 0].drop_duplicates([*keys, "setting"])
    found = {}
    for before, after in pairs:
        own = nodes.loc[nodes["setting"] == after, ["run_id", *keys, "text", "score"]]
        reference = first.loc[first["setting"] == before, [*keys, "text", "score"]]
        expected = own[["run_id", "run_seed"]].drop_duplicates().merge(reference, on="run_seed")
        own = own[own["run_seed"].isin(reference["run_seed"])]
        both = own.merge(expected, on=["run_id", *keys], how="outer", suffixes=("_a", "_b"))
        same = (both["text_a"] == both["text_b"]) & (both["score_a"] == both["score_b"])
        found[after] = int((~same).sum()), len(both)
    return found


# -- policies and techniques --

PARTS_OF_SETTING = ["setting", "budget", "policy", "kv_share", "llm_share", "technique"]
POINTS = 240
"""Stretches of a run's steps of one engine of which one point each is kept."""
UNCAPPED_SETTING = setting_of(None, "first_come", None, NONE)


def optimisation_rows(study: Study) -> pd.DataFrame:
    """Rows of plots.optimisation.

    Columns: metric, setting and its parts (budget, policy, kv_share, llm_share, technique, label),
    value, low, high; of memory over time also model and second. Metrics: tokens_per_s (its interval
    is that of its ratio to the elastic policy at this budget, on the same problems), accuracy,
    same (part of the nodes that are the uncapped search's), recomputed (tokens a search computes
    again because blocks were evicted or requests preempted), infeasible (no value), and in bytes
    held, active, target.
    """
    runs, problems = study.runs, study.table("problems")
    done = [s for s in dict.fromkeys(runs["setting"]) if study.has(s)]
    differing = differing_nodes(study, [(UNCAPPED_SETTING, setting) for setting in done])
    rows: list[dict[str, Any]] = []
    for setting in done:
        own, its = runs[runs["setting"] == setting], problems[problems["setting"] == setting]
        cells = {str(name): own.iloc[0][name] for name in PARTS_OF_SETTING}
        right = bootstrap_mean(its["correct"].astype(float), list(its["problem_id"]))
        differ, total = differing[setting]
        speed = _beside_elastic(study, cells["budget"], setting)
        rows.append(cells | {"metric": "tokens_per_s", **speed.cells})
        rows.append(cells | {"metric": "accuracy", **right.cells})
        rows.append(cells | {"metric": "same", "value": 1 - differ / max(total, 1)})
        rows.append(cells | {"metric": "recomputed", "value": recomputed(own)})
    every = study.all_runs
    bad = every[every["status"] == INFEASIBLE].drop_duplicates("setting")[PARTS_OF_SETTING]
    table = pd.concat(
        [pd.DataFrame(rows), bad.assign(metric="infeasible"), _memory_rows(study, done)],
        ignore_index=True,
    )
    labels = {key: technique.label for key, technique in TECHNIQUES.items()}
    return table.assign(label=table["technique"].map(labels))


def speed_up(
    study: Study, before: str, after: str, top: str = "tokens", runs: pd.DataFrame | None = None
) -> Interval:
    """How many times the tokens a second of `before` has `after`; of equal work exactly 1.

    top: what is counted in place of tokens. runs: some of the study's (default: all its runs).
    """
    runs = study.runs if runs is None else runs
    pair = runs[runs["setting"].isin([before, after])]
    rows = study.table("problems", runs=pair).assign(sixty=60.0)
    return draw_rates(rows, pair, "setting", top, noise=study.noise).ratio(before, after)


def recomputed(runs: pd.DataFrame) -> float:
    """Tokens a run computes again for want of memory, both models together; mean over seeds."""
    columns = [f"{e}_recomputed_tokens_{why}" for e in ENGINES for why in ("evicted", "preempted")]
    return float(runs[columns].sum(axis=1).mean())


def speed_of(study: Study, setting: str) -> float:
    """Generated tokens a second of a setting, over all its seeds."""
    runs = study.runs[study.runs["setting"] == setting]
    return float(runs["sampled_tokens"].sum() / runs["wall_s"].sum())


def best_static(study: Study, budget: float) -> str | None:
    """The setting of the fastest static share at a budget; None where none is feasible."""
    plan = study.plan
    assert isinstance(plan, PolicyPlan)
    settings = [setting_of(budget, STATIC, share, NONE) for share in plan.kv_shares]
    return max(filter(study.has, settings), key=lambda s: speed_of(study, s), default=None)


def bound_tokens_per_s(runs: pd.DataFrame) -> float:
    """How fast any arrangement of the memory could be: uncapped searches, had they computed every
    distinct token once.

        bound_s = wall_s * (outside + sum of busy_s * once) / (outside + sum of busy_s)
        once    = (tokens computed - tokens computed again) / tokens computed      of one model
        outside = wall_s - sum of busy_s, at least 0

    With memory uncapped nothing is evicted and no request waits for room, so every step is as large
    as the limits allow; what is still computed twice are the tokens of blocks that were never full.
    No budget enters. It is our own, no machine's: a change to the engine moves it.
    """
    total = runs[[f"{engine}_busy_s" for engine in ENGINES]].sum(axis=1)
    outside = (runs["wall_s"] - total).clip(lower=0)
    needed = outside.copy()
    for engine in ENGINES:
        computed = runs[f"{engine}_prefill_tokens"] + runs[f"{engine}_decode_tokens"]
        whys = ("evicted", "preempted", "partial")
        again = runs[[f"{engine}_recomputed_tokens_{why}" for why in whys]].sum(axis=1)
        needed += runs[f"{engine}_busy_s"] * (1 - again / computed.clip(lower=1))
    seconds = runs["wall_s"] * needed / (outside + total)
    return float(runs["sampled_tokens"].sum() / seconds.sum())


def _beside_elastic(study: Study, budget: float, setting: str) -> Interval:
    """A setting's tokens a second, its interval that of its ratio to the elastic policy alone on
    the same problems; without one where that was not measured.
    """
    elastic, rate = setting_of(budget, ELASTIC, None, NONE), speed_of(study, setting)
    if not study.has(elastic):
        return Interval(rate, float("nan"), float("nan"), 0)
    ratio = speed_up(study, elastic, setting)
    base = rate / ratio.estimate
    return replace(ratio, estimate=rate, low=base * ratio.low, high=base * ratio.high)


def _memory_rows(study: Study, done: Sequence[str]) -> pd.DataFrame:
    """Bytes that each model holds (with content), uses, and should come to, over a search.

    The first seed at the smallest budget, of the static share nearest the thesis's and of the
    elastic policy; each engine at its own steps, of each stretch of steps the one that holds most.
    """
    runs = study.runs[study.runs["setting"].isin(done) & (study.runs["technique"] == NONE)]
    runs = runs[(runs["budget"] == runs["budget"].min()) & (runs["seed"] == runs["seed"].min())]
    far = (runs["kv_share"] - THESIS_SHARE).abs()
    drawn = [runs[runs["policy"] == ELASTIC], runs.loc[far.dropna().sort_values().index[:1]]]
    frames = []
    for run in pd.concat(drawn).to_dict("records"):
        steps = study.table("steps", runs=study.runs[study.runs["run_id"] == run["run_id"]])
        for engine, own in steps.groupby("engine"):
            held = own["blocks_active"] + own["blocks_cached"]
            stretch = np.arange(len(own)) * POINTS // max(len(own), 1)
            kept = own.loc[held.groupby(stretch).idxmax()].sort_values("start_s")
            values = {"held": held[kept.index], "active": kept["blocks_active"]}
            for metric, blocks in (values | {"target": kept["blocks_target"]}).items():
                bytes_ = blocks.to_numpy() * float(run[f"{engine}_block_bytes"])
                base = {name: run[name] for name in PARTS_OF_SETTING}
                base |= {"metric": metric, "model": engine}
                frame = pd.DataFrame({"second": kept["start_s"].to_numpy(), "value": bytes_})
                frames.append(frame.assign(**base))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


# -- how short of room both models are, and whether the rungs agree --

SHARES = (0.08, 0.3, 0.5)


def pressure_rows(sweep: Any) -> pd.DataFrame:
    """Working set over capacity, a row a share and model: here, and at thesis scale.

    Columns: llm_share, model, need, room, ratio of this sweep; thesis_need, thesis_room,
    thesis_ratio of the thesis's pair. The working set is the peak of active blocks where a model
    has the most room. At thesis scale it was not measured: the tokens of a problem there are chosen
    such that the PRM is as short at the upper end as here, so its last ratios are equal by choice.
    """
    steps, block_size = sweep.table("steps"), int(sweep.runs["block_size"].iloc[0])
    widest = steps[
        steps["blocks_total"] == steps.groupby("engine")["blocks_total"].transform("max")
    ]
    need = widest.groupby("engine")["blocks_active"].max() * block_size
    rows = pd.DataFrame([(s, m) for s in SHARES for m in ENGINES], columns=["llm_share", "model"])
    for name, config in (("room", sweep.config), ("thesis_room", thesis_pair())):
        fits = {share: feasibility(RunSpec(config, share, 0)) for share in SHARES}
        pairs = zip(rows["llm_share"], rows["model"])
        rows[name] = [fits[share].blocks(model) * config.block_size for share, model in pairs]
    rows["need"] = rows["model"].map(need)
    rows["ratio"] = rows["need"] / rows["room"]
    last = rows[rows["model"] == "prm"].iloc[-1]
    rows["thesis_need"] = rows["need"] * last["ratio"] * last["thesis_room"] / last["need"]
    rows["thesis_ratio"] = rows["thesis_need"] / rows["thesis_room"]
    columns = ["need", "room", "ratio", "thesis_need", "thesis_room", "thesis_ratio"]
    return rows[["llm_share", "model", *columns]]


def rung_rows(*sweeps: Tables) -> pd.DataFrame:
    """Rows of plots.rungs: tokens/s of each sweep over its best; seconds do not carry over."""
    parts = []
    for sweep in sweeps:
        rows = memory_split_rows(sweep)
        own = rows[rows["metric"] == "tokens_per_s"]
        scaled = own[["value", "low", "high"]] / own["value"].max()
        name = rung(sweep.runs)
        parts.append(
            scaled.assign(rung=name, replayed=name == REPLAYED, llm_share=own["llm_share"])
        )
    return pd.concat(parts, ignore_index=True)


def cells_provenance(cells: pd.DataFrame) -> str:
    """What stands on the figures of batch limits beside their runs: what was asked, and how."""
    timed = cells[(cells["role"] == TIMED) & (cells["status"] == FINISHED)]
    if timed.empty:
        return "Cells of batch limits."
    first, requests = timed.iloc[0], timed.groupby("model")["requests"].max()
    asked = " and ".join(f"{requests[m]:,.0f} of the {m.upper()}" for m in requests.index)
    times, every = timed["repeat"].nunique(), int(timed["every"].max())
    part = f", without a prefix cache 1 in {every}" if every > 1 else ""
    return (
        f"Each model alone, with its memory at an LLM share of {first['llm_share']:g}; requests of "
        f"one search of {counted(first['num_problems'], 'problem')} ({asked}{part}), queued at "
        f"once, each cell {'once' if times == 1 else f'{times} times'}."
    )
