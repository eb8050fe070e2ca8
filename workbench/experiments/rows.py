"""The rows that each figure draws, made of a study's tables, each rate with its interval.

Many problems are in flight at once, so none has a wall time of its own: each has the part that its
time in flight is of all problems' (wall_part_s). Intervals come from drawing problems anew, those
of rates also from the machine's noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from math import comb
from typing import Any

import numpy as np
import pandas as pd

from workbench.errors import OutOfMemory, RunStoreError
from workbench.experiments import plans, settings, statistics
from workbench.experiments.execute import DEVICE, rung_answers
from workbench.experiments.memory import ENGINES
from workbench.experiments.plans import BATCHED, BESIDE, LAST_TWO, NONE
from workbench.experiments.provenance import counted
from workbench.experiments.runs import FINISHED, INFEASIBLE, RunTables
from workbench.experiments.settings import CONTINUOUS, TIMED
from workbench.experiments.statistics import Interval, Rates, bootstrap
from workbench.experiments.study import (
    CARRIES_OVER,
    COMPARED_SHARES,
    Committed,
    Study,
    reasons,
    rung,
    rung_of,
)
from workbench.models.registry import model_spec
from workbench.replay.answers import Answers
from workbench.replay.devices import load_device
from workbench.replay.miss_ratio import Allocate, CacheCalls, miss_ratio, optimal_hits
from workbench.replay.simulator import Changes, replay, search_calls
from workbench.replay.workload import load_recording

STRETCHES = 20
"""Stretches of steps a run is cut into where counts belong to no single problem."""
Row = dict[str, Any]


# -- the memory split --


def rooms(sweep: RunTables) -> pd.DataFrame:
    """One row a share: llm_share, llm_kv_tokens, prm_kv_tokens (positions a cache can hold)."""
    columns = ["llm_share", "llm_kv_tokens", "prm_kv_tokens"]
    return sweep.runs[columns].drop_duplicates("llm_share").sort_values("llm_share")


def with_rooms(parts: list[Row] | pd.DataFrame, sweep: RunTables) -> pd.DataFrame:
    """Rows with llm_share as a table, with the columns of `rooms`."""
    return pd.DataFrame(parts).merge(rooms(sweep), on="llm_share", how="left")


def split_rows(sweep: RunTables) -> pd.DataFrame:
    """Rows of plots.memory_split. same_work: the shares that do the same work as the peak's; ratio,
    ratio_low, ratio_high: tokens/s of the share over those at 0.3 (the nearest that was run), of
    the same problems and seeds.
    """
    rates = rates_of(sweep)
    parts = [
        {"llm_share": share, "metric": metric, **found.at(share).cells}
        for metric, found in rates.items()
        for share in found.settings
    ]
    peak = rates["tokens_per_s"].peak
    same = Interval(peak.estimate, *rates["tokens_per_s"].plateau(peak.estimate))
    for metric, each in (("peak_share", peak), ("same_work", same)):
        parts.append({"llm_share": peak.estimate, "metric": metric, **each.cells})
    base = settings.nearest_to_thesis(sweep.runs["llm_share"])
    ratios = statistics.paired_ratio(sweep, "llm_share", base)
    return with_rooms(parts, sweep).merge(ratios, on="llm_share", how="left")


COUNTS = ["prefill_tokens", "decode_tokens", "tokens_held"]


def counted_rows(sweep: RunTables) -> pd.DataFrame:
    """split_rows with more metrics: counted (of what was measured), tokens/s by counts alone; and
    llm_short, prm_short, the last share at which the LLM, the first at which the PRM computes again
    what it had to give up.
    """
    runs, found = sweep.runs, list[Row]()
    if not statistics.is_replayed(rung(runs)):
        rate = counted_rate(runs, sweep.table("steps"))
        over = rate / rate[settings.nearest_to_thesis(rate.index)]
        cells = zip(rate.index, rate, over)
        found = [{"llm_share": s, "metric": "counted", "value": v, "ratio": r} for s, v, r in cells]
    for engine, pick in (("llm", max), ("prm", min)):
        lost = [f"{engine}_recomputed_tokens_{why}" for why in ("evicted", "preempted")]
        short = runs.loc[runs.reindex(columns=lost).sum(axis=1) > 0, "llm_share"]
        if len(short):
            share = pick(short)
            found.append({"llm_share": share, "metric": f"{engine}_short", "value": share})
    more = with_rooms(pd.DataFrame(found, columns=["llm_share", "metric", "value", "ratio"]), sweep)
    return pd.concat([split_rows(sweep), more], ignore_index=True)


def counted_rate(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.Series:
    """Tokens/s of each share by the counts of its steps: a step, a prompt's token, a decoded one
    and one held in the cache have prices, which least squares fit to all of an engine's steps;
    seconds outside of steps are the same at every share.
    """
    fitted, by = steps["duration_s"] * 0.0, runs.groupby("llm_share")
    for _, own in steps.groupby("engine"):
        counts = own[COUNTS].assign(steps=1).to_numpy(float)
        prices, *_ = np.linalg.lstsq(counts, own["duration_s"].to_numpy(), rcond=None)
        fitted[own.index] = counts @ prices
    outside = (runs["wall_s"].sum() - steps["duration_s"].sum()) / len(runs)
    inside = fitted.groupby(steps["llm_share"]).sum() / by.size()
    return by["sampled_tokens"].mean() / (inside + outside)


def critique_rows(plain: RunTables, critiques: RunTables) -> pd.DataFrame:
    """Rows of plots.critiques: problems/min, and the tokens that each model computes again for a
    problem, of a sweep whose PRM scores at once and of one whose PRM writes critiques first.
    ratio, ratio_low, ratio_high: over the kind's fastest share, of the same problems; peak_share:
    that share, and where 95 % of the draws have theirs.
    """
    for each in (plain, critiques):
        if each.runs.empty:
            why = reasons(each.all_runs)
            raise RunStoreError(f"No run of critiques_replayed finished: {why}.")
    parts, rung = [], critiques.runs["rung"].iloc[0]
    for kind, sweep in (("scores", plain), ("critiques", critiques)):
        rates = rates_of(sweep)["problems_per_min"]
        peak, of = rates.peak, {"rung": rung, "kind": kind}
        parts.append(of | {"llm_share": peak.estimate, "metric": "peak_share", **peak.cells})
        for share in rates.settings:
            where = of | {"llm_share": share}
            ratio = rates.ratio(peak.estimate, share).named("ratio")
            parts.append(where | {"metric": "problems_per_min", **rates.at(share).cells, **ratio})
            runs = sweep.runs[sweep.runs["llm_share"] == share]
            for engine in ENGINES:
                lost = f"^{engine}_recomputed_tokens_(evicted|preempted)"
                again = runs.filter(regex=lost).sum(axis=1)
                value = float((again / runs["answered_problems"]).mean())
                parts.append(where | {"metric": "again", "engine": engine, "value": value})
    return with_rooms(parts, critiques)


def rates_of(sweep: RunTables) -> dict[str, Rates]:
    """Rates over the split, drawn with the sweep's noise: generated tokens, and problems."""
    runs, noise = statistics.repeated(sweep), statistics.noise_of(sweep.all_runs)
    rows = sweep.table("problems", runs=runs).assign(sixty=60.0)
    return {
        name: statistics.draw_rates(rows, runs, "llm_share", top, noise=noise)
        for name, top in (("tokens_per_s", "tokens"), ("problems_per_min", "sixty"))
    }


def block_rows(sweep: RunTables, llm_share: float, beside: tuple[float, ...] = ()) -> pd.DataFrame:
    """Rows of plots.prm_blocks, of the run at a share, of the first seed that the share and those
    beside it have. beside: other shares whose figures are to have the same axes.
    """
    shares, drawn = (llm_share, *beside), {}
    at = [sweep.runs.loc[np.isclose(sweep.runs["llm_share"], share), "seed"] for share in shares]
    seed = min(set.intersection(*map(set, at)) or set(sweep.runs["seed"]))
    for share in shares:
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


def prefix_hit_rows(sweep: RunTables) -> pd.DataFrame:
    """Rows of plots.prefix_hits: tokens found cached over tokens queried, at first admissions."""
    parts = []
    admitted = sweep.table("requests").dropna(subset="scheduled_s")
    for (share, engine), rows in admitted.groupby(["llm_share", "engine"]):
        units = list(rows["problem_id"])
        found = statistics.bootstrap((rows["cached_tokens"], rows["prompt_tokens"]), units)
        parts.append({"llm_share": share, "engine": engine, **found.cells})
    return with_rooms(parts, sweep)


def thrashing_rows(sweep: RunTables) -> pd.DataFrame:
    """Rows of plots.thrashing: events per 1,000 look-ups (admissions, re-admissions included), and
    thrashed blocks a search.

    Both are counted by step, so intervals come from drawing stretches of steps anew. Where nothing
    thrashed the upper bound is the rule of three's.
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

    def rate(rows: pd.DataFrame, top: str, scale: float) -> Row:
        units = rows["run_id"] + "/" + rows["stretch"].astype(str)
        found = statistics.bootstrap((rows[top], rows["look_ups"]), list(units))
        if rows[top].sum() == 0:
            found = Interval(0.0, 0.0, statistics.upper_bound_of_none(int(rows["look_ups"].sum())))
        return {name: scale * value for name, value in found.cells.items()}

    thrashed = by_stretch(steps, "start_s", ["thrash_events", "thrashed"])
    stretches = thrashed.join(by_stretch(admitted, "scheduled_s", ["look_ups"]), how="outer")
    parts, stretches = [], stretches.fillna(0).reset_index()
    for (share, engine), rows in stretches.groupby(["llm_share", "engine"]):
        where = {"llm_share": share, "engine": engine}
        blocks = rate(rows, "thrashed", rows["look_ups"].sum() / rows["run_id"].nunique())
        if not blocks["value"]:  # an event loses many blocks: the bound of events is none of theirs
            blocks["high"] = np.nan
        parts.append(where | {"metric": "events_per_1000"} | rate(rows, "thrash_events", 1000.0))
        parts.append(where | {"metric": "blocks"} | blocks)
    return with_rooms(parts, sweep)


# -- lost time: every step and span of a run put to one of seven uses --

AGAIN = ("recomputed_evicted", "recomputed_preempted", "recomputed_partial")
SPAN_COLUMNS = ("lane", "start_s", "duration_s")
Cost = Callable[[int, int, int], float]
"""Floating-point operations of a forward: (new tokens, tokens in the cache, rows of logits)."""


def lost_time_rows(sweep: RunTables, costs: Mapping[str, Cost] | None = None) -> pd.DataFrame:
    """Rows of plots.lost_time. costs: of one forward, by engine; default: of the sweep's models."""
    costs = costs or {each: model_spec(str(sweep.runs[each].iloc[0])).flops for each in ENGINES}
    steps, spans = sweep.table("steps"), sweep.table("spans")
    spans = spans.reindex(columns=["run_id", "llm_share", *SPAN_COLUMNS])  # a replay has none
    outside = spans[["llm_share", "lane"]].assign(part="bookkeeping", seconds=spans["duration_s"])
    inside = [_engine_uses(steps[steps["engine"] == e], e, costs[e]) for e in ENGINES]
    uses = pd.concat([*inside, outside], ignore_index=True)
    columns = ["run_id", "llm_share", "start_s", "duration_s"]
    both = pd.concat([steps[columns], spans[columns]])  # first start to last end of each run
    by_run = both.assign(end=both["start_s"] + both["duration_s"]).groupby(["llm_share", "run_id"])
    walls = by_run["end"].max() - by_run["start_s"].min()
    seconds = uses.groupby(["llm_share", "lane", "part"])["seconds"].sum().reset_index()
    rows = seconds.join(walls.groupby("llm_share").mean().rename("wall_s"), on="llm_share")
    rows["seconds"] /= rows["llm_share"].map(walls.groupby("llm_share").size())
    return with_rooms(rows, sweep)


def _engine_uses(steps: pd.DataFrame, engine: str, cost: Cost) -> pd.DataFrame:
    """Each step's seconds by part: scheduling is bookkeeping, the rest goes by operations.

    A token attends to the mean context of the step's requests, a prompt's token to half of it.
    """

    def one_token(context: pd.Series, logits: int, far: int = 1024) -> pd.Series:
        """Operations of a token at each context: linear in it, so two calls tell all."""
        near = cost(1, 0, logits)
        return near + context * (cost(1, far, logits) - near) / far

    context = steps["tokens_held"] / steps["running"].clip(lower=1)
    prefill = one_token(context / 2, 0)
    operations = {part: steps[part.replace("_", "_tokens_", 1)] * prefill for part in AGAIN}
    new = steps["prefill_tokens"] * prefill - sum(operations.values())
    decoded = steps["decode_tokens"] * one_token(context, 1)
    llm = {"llm_decode": decoded, "llm_prefill": new}
    uses = pd.DataFrame(operations | (llm if engine == "llm" else {"prm_prefill": new + decoded}))
    total, forward = uses.sum(axis=1), steps["duration_s"] - steps["schedule_s"]
    seconds = uses.mul((forward / total.where(total > 0)).fillna(0.0), axis=0)
    idle = forward.where(total == 0, 0.0)  # a step that computed nothing
    seconds = seconds.assign(bookkeeping=steps["schedule_s"] + idle, llm_share=steps["llm_share"])
    long = seconds.melt(id_vars="llm_share", var_name="part", value_name="seconds")
    return long.assign(lane=engine)


# -- batch limits --

CELL = ["model", "kind", "max_num_seqs", "max_num_batched_tokens"]
CELL_RATES = ["tokens_per_s", "steps_per_s", "padding", "waste"]
RATIO = ["ratio", "ratio_low", "ratio_high"]


def batch_rows(study: Any, model: str) -> pd.DataFrame:
    """Rows of plots.batch_limits, of the batching study: one a cell of one model, also those that
    cannot be; means over the seeds that all have, and steps_per_s over that of the greatest limits.
    """
    cells = study.all_runs
    own = cells[(cells["model"] == model) & (cells["role"] == TIMED)]
    whole = own[own["kind"] == CONTINUOUS]
    limits = product(*(whole[name].unique() for name in plans.LIMITS[:2]))
    refused = [dict(zip(plans.LIMITS, each)) for each in limits if each[0] > each[1]]
    if refused:
        text = "more sequences than tokens in a step: not all could decode"
        why = {"status": INFEASIBLE, "error": text}
        own = pd.concat([own, pd.DataFrame(refused).assign(model=model, kind=CONTINUOUS, **why)])
    rows = own.reindex(columns=[*CELL, "seed", "status", "error", *CELL_RATES])
    rows = rows.astype(dict.fromkeys(CELL_RATES, float))
    rows = rows.sort_values("status", key=lambda status: status != FINISHED, kind="stable")
    firsts: Any = {name: (name, lambda own: own.iloc[0]) for name in ("status", "error")}
    cells = rows.groupby(CELL).agg(**firsts)
    done = rows.dropna(subset="steps_per_s")
    rates = done.groupby([*CELL, "seed"])["steps_per_s"].mean().unstack("seed")
    if (shared := rates.notna().all()).any():  # else some cell would be of other searches
        done, rates = done[done["seed"].isin(rates.columns[shared])], rates.loc[:, shared]
    could = cells.index[(cells["status"] != INFEASIBLE).to_numpy()]
    ratios = cell_ratios(rates.reindex(could))
    return cells.join(done.groupby(CELL)[CELL_RATES].mean()).join(ratios).reset_index()


def cell_ratios(rates: pd.DataFrame) -> pd.DataFrame:
    """Rates [cells, seeds] over those of the continuous cell with the greatest limits, seed by
    seed: columns ratio (the geometric mean), ratio_low, ratio_high.

    95 % by Student's t of the ratios' logarithms; of one seed (-inf, inf).
    """
    logs = pd.DataFrame(np.log(rates.to_numpy(float)), rates.index, rates.columns)
    continuous = logs[logs.index.get_level_values("kind") == CONTINUOUS].sort_index()
    if continuous.empty:
        return pd.DataFrame(index=rates.index, columns=RATIO, dtype=float)
    apart = logs - continuous.iloc[-1]
    found, count = apart.mean(axis=1), apart.count(axis=1)
    half = apart.std(axis=1) / count**0.5 * count.map(lambda number: statistics.student(number - 1))
    half = half.where(count > 1, np.inf).where(apart.abs().max(axis=1) > 0, 0.0)
    ratios = np.exp(np.array([found, found - half, found + half]))
    ratios[1, ~np.isfinite(half)] = -np.inf
    return pd.DataFrame(ratios.T, rates.index, RATIO)


def balance_rows(sweep: RunTables, cells: pd.DataFrame) -> pd.DataFrame:
    """Rows of plots.balance: steps a second of both models over the split, and wasted blocks, of
    the cells of one search (`counted_search`).
    """
    keys, busy, nodes = ["run_id", "problem_id"], list[Row](), sweep.table("nodes")
    if nodes.empty:
        raise RunStoreError("Replays sample no nodes, so no steps to be counted: pick a search.")
    steps = nodes.groupby(keys).size().rename("steps").reset_index()
    seconds = sweep.runs[["run_id", "wall_s", *(f"{model}_busy_s" for model in ENGINES)]]
    problems = sweep.table("problems").merge(seconds, on="run_id").merge(steps, on=keys)
    for (share, own), model in product(problems.groupby("llm_share"), ENGINES):
        part = own["wall_part_s"] / own["wall_s"] * own[f"{model}_busy_s"]
        cells_of = statistics.bootstrap((own["steps"], part), list(own["problem_id"])).cells
        busy.append({"llm_share": share, "metric": "steps_per_busy_s", "model": model} | cells_of)
    cells = counted_search(cells)
    done = cells[cells["status"] == FINISHED]
    static = done["kind"] == settings.STATIC_BATCH
    columns = ["model", "kind", "block_size", "max_num_seqs"]
    waste = done[(done["role"] == settings.COUNTED) | static].drop_duplicates(columns)
    waste = waste[[*columns, "waste"]].rename(columns={"waste": "value"}).assign(metric="waste")
    waste = waste.sort_values(columns, ignore_index=True)
    return pd.concat([with_rooms(busy, sweep), waste], ignore_index=True)


def counted_search(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells of the one search whose blocks were counted."""
    counted = cells.loc[cells["role"] == settings.COUNTED, "seed"]
    return cells[cells["seed"] == (counted if len(counted) else cells["seed"]).min()]


def cells_provenance(cells: pd.DataFrame) -> str:
    """What stands on the figures of batch limits beside their runs: what was asked, and how."""
    timed = cells[(cells["role"] == TIMED) & (cells["status"] == FINISHED)]
    if timed.empty:
        return "Cells of batch limits."
    first, requests = timed.iloc[0], timed.groupby(["model", "seed"])["requests"].max()
    counts = requests.groupby("model").sum().items()
    asked = " and ".join(f"{count:,.0f} to the {str(model).upper()}" for model, count in counts)
    seeds, every = timed["seed"].nunique(), int(timed["every"].max())
    part = f" (without a prefix cache one in {every} of them)" if every > 1 else ""
    searches = "one search" if seeds == 1 else f"{seeds} searches, each with its seed,"
    return (
        f"Each model alone, with its memory at an LLM share of {first['llm_share']:g}; the "
        f"requests of {searches} of {counted(first['num_problems'], 'problem')}, {asked}{part}, "
        "those of one queued at once."
    )


# -- the ablation of the thesis's modifications --

SIDES = {"finishes": LAST_TWO[0], "stops": LAST_TWO[1]}
"""The last two at a depth limit: beams there are sampled to the end, or stay unfinished."""


def ablation_rows(study: Study) -> pd.DataFrame:
    """Rows of plots.modifications.

    gain: how many times the problems/min of the setting before (of the one beside: of the last);
    whole: of the first; same: part of the nodes that are those of the setting before, or beside;
    finishes and stops: accuracy of the last two at a depth limit; finishing: what the first of them
    has more, problem by problem, where no answer changed within the bound of a rate that is never
    seen. queued: whether the gain is of the longer queue.
    """
    noise, problems = study.noise, study.table("problems").assign(sixty=60.0)
    rows: list[Row] = []

    def add(key: Any, metric: str, found: Interval, limit: Any = study.config.max_depth) -> None:
        where = {"setting": key, "metric": metric, "max_depth": limit, "queued": False}
        rows.append(where | found.cells)

    for key, runs in study.runs.groupby("setting", sort=False):
        own = problems[problems["setting"] == key]
        for metric, top in (("problems_per_min", "sixty"), ("tokens_per_s", "tokens")):
            add(key, metric, statistics.draw_rates(own, runs, "setting", top, noise=noise).at(key))
        if "correct" in own:  # a replay answers nothing
            add(key, "accuracy", _mean(own, "correct"))
    for before, after in steps_up(study):
        gain, queued = gain_of(study, before, after)
        add(after, "gain", gain)
        rows[-1]["queued"] = queued
        if "correct" in problems and after != LAST_TWO[1]:  # which samples less
            ((differ, total),) = differing_nodes(study, [(before, after)]).values()
            if total:  # the two have a seed in common
                exact = Interval(1 - differ / total, np.nan, np.nan)
                add(after, "same", exact)  # a count, whose interval is not known
    first, *_, last = (key for key in _ladder(study) if key != BESIDE)
    if {first, last} <= set(study.runs["setting"]):
        add(last, "whole", gain_of(study, first, last)[0])
    for limit, own in depth_pairs(study).groupby("max_depth") if "correct" in problems else ():
        for side, key in SIDES.items():
            add(key, side, _mean(own, f"correct_{side}"), limit)
        more = own["correct_finishes"] - own["correct_stops"]
        found = statistics.bootstrap_mean(more, list(own["problem_id"]))
        found = statistics.unlike_a_point(found, own["problem_id"].nunique())
        add(LAST_TWO[0], "finishing", found, limit)
    labels = {key: each.label for key, each in plans.MODIFICATIONS.items()}
    table = pd.DataFrame(rows)
    return table.assign(label=table["setting"].map(labels))


HARD = 4
"""The lowest of the levels that are called hard."""
PLAIN = "best_of_n"  # a search without rounds, which the others are set beside
ONE_ROUND = (PLAIN, "self_consistency")
EASIER, HARDER = f"levels to {HARD - 1}", f"levels from {HARD}"


def strategy_rows(study: Study) -> pd.DataFrame:
    """Rows of plots.search_strategies, and what else there is to tell a strategy by.

    value, low, high: accuracy, in Wilson's interval of as many trials as problems: seeds repeat
    them. gap, gap_low, gap_high, gap_chance: accuracy of `best`, the most accurate of this n, less
    this one's, problem by problem; and the sign test of these. more, more_low, more_high: its
    accuracy less best-of-n's; times: its seconds over best-of-n's, of all levels (one run each has
    no interval). Of whole runs, by model: *_peak, the part of its blocks active at most; *_hits, of
    prompt tokens found cached; *_thrash, events per 1,000 look-ups (thrashing_rows).
    """
    caches = {key: _cache_cells(own) for key, own in study.runs.groupby(["n", "strategy"])}
    sums = {"tokens": "tokens", "prm_tokens": "prm_tokens_computed", "seconds": "wall_part_s"}
    rows = list[Row]()
    for levels, problems in by_levels(study).items():
        right: Any
        right, spent = (problems.pivot_table(column, "problem_id", ["n", "strategy"])
                        for column in ("correct", "wall_part_s"))  # fmt: skip
        most = {n: str(right[n].dropna().mean().idxmax()) for n in right.columns.unique("n")}
        for (n, name), own in problems.groupby(["n", "strategy"], sort=False):
            cells = {key: float(own[column].mean()) for key, column in sums.items()}
            if name in ONE_ROUND and levels != "all levels":
                cells["seconds"] = np.nan  # a round's are divided evenly, whatever was sampled
            found = statistics.wilson(float(own["correct"].mean()), own["problem_id"].nunique())
            best = most[n]  # on the problems that all have
            ahead = (right[n][best] - right[n][name]).dropna()
            where: Row = {"strategy": name, "n": n, "levels": levels, "best": best}
            where |= statistics.bootstrap_mean(ahead, list(ahead.index)).named("gap")
            where |= dict.fromkeys(("more", "more_low", "more_high", "times"), np.nan)
            if PLAIN in right[n]:
                more = (right[n][name] - right[n][PLAIN]).dropna()
                where |= statistics.bootstrap_mean(more, list(more.index)).named("more")
                if levels == "all levels":
                    own_s, plain_s = (spent[n, each][more.index].sum() for each in (name, PLAIN))
                    where["times"] = own_s / plain_s
            where["gap_chance"] = sign_test(int((ahead > 0).sum()), int((ahead < 0).sum()))
            rows.append(where | cells | found.cells | caches[n, name])
    return pd.DataFrame(rows)


def sign_test(more: int, fewer: int) -> float:
    """Exact two-sided probability of numbers as far apart as these where both ways are as likely:
    of problems that one side answers more often, and the other. With one seed McNemar's test.
    """
    total = more + fewer
    tail = sum(comb(total, k) for k in range(max(more, fewer), total + 1))
    return min(1.0, 2 * tail / 2**total)


def by_levels(study: Study) -> dict[str, pd.DataFrame]:
    """One row a run and problem with its strategy and n, of every kind of levels there is."""
    named = study.runs[["run_id", "strategy", "n"]]
    problems = named.merge(study.table("problems"), on="run_id").astype({"correct": float})
    kinds = {EASIER: problems["level"] < HARD, HARDER: problems["level"] >= HARD}
    return {"all levels": problems} | {k: problems[own] for k, own in kinds.items() if own.any()}


def _cache_cells(runs: pd.DataFrame) -> Row:
    """What these runs did to both caches; NaN of a model that was never asked."""
    cells: Row = {}
    for engine in ENGINES:
        own = runs.filter(regex=f"^{engine}_").rename(columns=lambda name: name[4:])
        own = own.reindex(columns=["hit_tokens", "query_tokens", "thrash_events", "look_ups",
                                   "blocks_peak", "blocks"])  # fmt: skip
        total = own.sum(skipna=False)  # NaN where one of them is of code that did not count it
        peak = (own["blocks_peak"] / own["blocks"]).max(skipna=False)
        cells[f"{engine}_peak"] = peak if total["look_ups"] else np.nan
        cells[f"{engine}_hits"] = total["hit_tokens"] / (total["query_tokens"] or np.nan)
        cells[f"{engine}_thrash"] = 1000 * total["thrash_events"] / (total["look_ups"] or np.nan)
    return cells


def gains_by_level(study: Study) -> tuple[pd.DataFrame, float]:
    """What accuracy gains from the fewest beams to the most, on the problems that both have and as
    a mean over strategies (gain, gain_low, gain_high), and where these begin (gain_from): at the
    easier levels, at the harder, and of all levels, harder less easier. And the chance of a
    difference as large if levels did not matter (a permutation test): of few problems the bootstrap
    sees too much. Problems without a level have no part.
    """
    problems = by_levels(study)["all levels"].dropna(subset="level")
    if problems.empty:
        cells = dict.fromkeys(("gain", "gain_low", "gain_high", "gain_from"), np.nan)
        return pd.DataFrame(cells, index=[EASIER, HARDER, "all levels"]), np.nan
    right: Any = problems.pivot_table("correct", "problem_id", ["n", "strategy"])
    few, many = right[problems["n"].min()], right[problems["n"].max()]
    gain = (many - few).dropna(axis=1, how="all").dropna()  # of strategies that have both
    start, gain = few.loc[gain.index, gain.columns].mean(axis=1), gain.mean(axis=1)
    level = problems.groupby("problem_id")["level"].first()[gain.index]
    easy, hard = (level < HARD).to_numpy(bool), (level >= HARD).to_numpy(bool)
    parts: dict[str, Callable[..., Any]] = {
        EASIER: lambda a, easy, b, hard: a / easy,
        HARDER: lambda a, easy, b, hard: b / hard,
        "all levels": lambda a, easy, b, hard: b / hard - a / easy,
    }
    columns = gain * easy, easy, gain * hard, hard
    found = {
        name: bootstrap(columns, list(gain.index), part).named("gain")
        for name, part in parts.items()
    }
    table = pd.DataFrame(found).T
    table["gain_from"] = [start[easy].mean(), start[hard].mean(), start.mean()]
    draw, values = np.random.default_rng(0), gain.to_numpy()
    dealt = [hard, *(draw.permutation(hard) for _ in range(statistics.DRAWS))]
    apart = np.abs([values[each].mean() - values[~each].mean() for each in dealt])
    return table, float(np.mean(apart >= apart[0] - 1e-9))


def _mean(problems: pd.DataFrame, column: str) -> Interval:
    """A share of the problems, which seeds repeat."""
    share = float(problems[column].astype(float).mean())
    return statistics.wilson(share, problems["problem_id"].nunique())


def steps_up(study: Study) -> list[tuple[str, str]]:
    """Pairs (before, after) of measured settings; the one beside comes after the last. Where a
    setting has no finished run both its pairs are missing: its neighbours are two steps apart.
    """
    done = set(study.runs["setting"])
    return [pair for pair in pairwise(_ladder(study)) if done.issuperset(pair)]


def _ladder(study: Study) -> list[str]:
    """The settings that the study has planned, in the order of the ablation."""
    return [key for key in plans.MODIFICATIONS if key in study.order]


def gain_of(study: Study, before: str, after: str) -> tuple[Interval, bool]:
    """How many times the problems/min of `before` has `after`, over the seeds both have; and
    whether that is of the longer queue, over which problem batching is compared if both ran it.
    """
    queue = study.having(role=settings.QUEUE)
    queued = (before, after) == BATCHED and set(queue["setting"]) >= set(BATCHED)
    return speed_up(study, before, after, "sixty", queue if queued else None), queued


def depth_pairs(study: Study) -> pd.DataFrame:
    """One row a problem, seed and depth limit that both of the last two settings have, with the
    endings _finishes and _stops: correct, tokens, and reached (a beam came to the limit).
    """
    runs = study.having(role=(settings.ABLATION, settings.DEPTH), repeat=0, setting=LAST_TWO)
    keys = ["max_depth", "problem_id", "run_seed"]
    if runs.empty:
        return pd.DataFrame(columns=keys)
    of_run, limits = ["run_id", "problem_id"], runs.set_index("run_id")["max_depth"].astype(int)
    deepest = study.table("nodes", runs=runs).groupby(of_run)["depth"].max()
    rows = study.table("problems", runs=runs).join(deepest, on=of_run)
    rows = rows.assign(max_depth=rows["run_id"].map(limits), correct=rows["correct"].astype(float))
    rows["reached"] = rows["depth"] >= rows["max_depth"]
    values = ["correct", "reached", "tokens"]
    finishes, stops = (rows.loc[rows["setting"] == s, [*keys, *values]] for s in SIDES.values())
    return finishes.merge(stops, on=keys, suffixes=("_finishes", "_stops"))


def differing_nodes(study: Study, pairs: Sequence[tuple[str, str]]) -> dict[str, tuple[int, int]]:
    """Of each pair (expected, setting): nodes of the setting that differ in tokens or score from
    the expected one's of their seed, or that one of both lacks; of how many. Repetitions count.
    """
    wanted = tuple({setting for pair in pairs for setting in pair})
    runs = study.having(setting=wanted)
    runs = runs[~runs["role"].isin((settings.DEPTH, settings.QUEUE))]
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
UNCAPPED_SETTING = plans.setting_of(None, "first_come", None, NONE)


def optimisation_rows(study: Study) -> pd.DataFrame:
    """Rows of plots.optimisation.

    tokens_per_s: its interval is that of its ratio to the best static split at this budget, on the
    same problems; same: part of the nodes that are the uncapped search's; recomputed: tokens
    computed again for want of memory; held, active, target: bytes of KV over time.
    """
    runs, problems = study.runs, study.table("problems")
    done = [setting for setting in runs["setting"].unique() if study.has(setting)]
    answered, differing = "correct" in problems, dict[str, tuple[int, int]]()
    if answered:  # a replay has neither nodes nor answers of its own
        differing = differing_nodes(study, [(UNCAPPED_SETTING, setting) for setting in done])
    again = [f"{e}_recomputed_tokens_{why}" for e in ENGINES for why in ("evicted", "preempted")]
    best = {budget: best_static(study, budget) for budget in runs["budget"].unique()}
    rows: list[Row] = []
    for setting in done:
        own, its = runs[runs["setting"] == setting], problems[problems["setting"] == setting]
        cells = {str(name): own.iloc[0][name] for name in PARTS_OF_SETTING}
        rate: Row = {"value": speed_of(study, setting), "low": float("nan"), "high": float("nan")}
        if static := best[cells["budget"]]:
            ratio = speed_up(study, static, setting)
            rate = {name: v * rate["value"] / ratio.estimate for name, v in ratio.cells.items()}
        found = {"tokens_per_s": rate}
        if answered:
            differ, total = differing[setting]
            found |= {"accuracy": _mean(its, "correct").cells}
            found |= {"same": {"value": 1 - differ / total}} if total else {}
        found |= {"recomputed": {"value": float(own[again].sum(axis=1).mean())}}
        rows += [cells | {"metric": metric, **each} for metric, each in found.items()]
    bad = study.all_runs[study.all_runs["status"] == INFEASIBLE].drop_duplicates("setting")
    frames = [pd.DataFrame(rows), bad[PARTS_OF_SETTING].assign(metric="infeasible")]
    table = pd.concat([*frames, *_memory_rows(study, done)], ignore_index=True)
    labels = {key: technique.label for key, technique in plans.TECHNIQUES.items()}
    return table.assign(label=table["technique"].map(labels))


def speed_up(
    study: Study, before: str, after: str, top: str = "tokens", runs: pd.DataFrame | None = None
) -> Interval:
    """How many times the tokens a second of `before` has `after`; of equal work exactly 1.

    top: what is counted in place of tokens. runs: some of the study's (default: all its runs).
    """
    runs = statistics.repeated(study) if runs is None else runs
    pair = runs[runs["setting"].isin([before, after])]
    rows = study.table("problems", runs=pair).assign(sixty=60.0)
    return statistics.draw_rates(rows, pair, "setting", top, noise=study.noise).ratio(before, after)


def speed_of(study: Study, setting: str) -> float:
    """Generated tokens a second of a setting, over all its seeds; of repeated runs the mean."""
    runs = statistics.repeated(study).query("setting == @setting")
    mean = runs.groupby("seed")[["sampled_tokens", "wall_s"]].mean().sum()
    return float(mean["sampled_tokens"] / mean["wall_s"])


def best_static(study: Study, budget: float) -> str | None:
    """The setting of the fastest static share at a budget; None where none is feasible."""
    found = study.runs.query("budget == @budget and policy == 'static' and technique == 'none'")
    return max(filter(study.has, found["setting"]), key=lambda s: speed_of(study, s), default=None)


def bound_tokens_per_s(runs: pd.DataFrame) -> float:
    """A bound for any arrangement of memory: uncapped searches that compute each token once.

        bound_s = wall_s * (outside + sum of busy_s * once) / (outside + sum of busy_s)
        once    = (tokens computed - tokens computed again) / tokens computed      of one model
        outside = wall_s - sum of busy_s, at least 0

    With memory uncapped every step is as large as the limits allow; what is still computed twice
    are the tokens of blocks that were never full. It is this engine's bound, not the machine's.
    """
    total = runs[[f"{engine}_busy_s" for engine in ENGINES]].sum(axis=1)
    outside = (runs["wall_s"] - total).clip(lower=0)
    needed = outside.copy()
    for engine in ENGINES:
        computed = runs[f"{engine}_prefill_tokens"] + runs[f"{engine}_decode_tokens"]
        again = runs.filter(regex=f"^{engine}_recomputed_tokens_").sum(axis=1)
        needed += runs[f"{engine}_busy_s"] * (1 - again / computed.clip(lower=1))
    seconds = runs["wall_s"] * needed / (outside + total)
    return float(runs["sampled_tokens"].sum() / seconds.sum())


def _memory_rows(study: Study, done: Sequence[str]) -> Iterator[pd.DataFrame]:
    """Memory over time at the smallest budget under the elastic policy: of each stretch of an
    engine's steps the one that holds most.
    """
    runs = study.runs[study.runs["setting"].isin(done) & (study.runs["technique"] == NONE)]
    runs = runs[(runs["budget"] == runs["budget"].min()) & (runs["seed"] == runs["seed"].min())]
    for run in runs[runs["policy"] == plans.ELASTIC].to_dict("records"):
        steps = study.table("steps", runs=runs[runs["run_id"] == run["run_id"]])
        for engine, own in steps.groupby("engine"):
            own = own.assign(held=own["blocks_active"] + own["blocks_cached"])
            stretch = np.arange(len(own)) * POINTS // max(len(own), 1)
            kept = own.loc[own["held"].groupby(stretch).idxmax()].sort_values("start_s")
            cells = {name: run[name] for name in PARTS_OF_SETTING} | {"model": engine}
            for metric in ("held", "active", "target"):
                blocks = kept["held" if metric == "held" else f"blocks_{metric}"].to_numpy()
                bytes_ = blocks * float(run[f"{engine}_block_bytes"])
                frame = pd.DataFrame({"second": kept["start_s"].to_numpy(), "value": bytes_})
                yield frame.assign(metric=metric, **cells)


# -- how short of room both models are, and whether the rungs agree --


def pressure_rows(sweep: Any) -> pd.DataFrame:
    """Working set (need) over capacity (room), in tokens, a row a share and model.

    The working set is the peak of active blocks where a model has the most room.
    """
    steps, size = sweep.table("steps"), sweep.config.block_size
    most = steps.groupby("engine")["blocks_total"].transform("max")
    need = steps[steps["blocks_total"] == most].groupby("engine")["blocks_active"].max()
    ran = sweep.runs.drop_duplicates("llm_share")
    near = ran["llm_share"].map(lambda share: np.isclose(share, COMPARED_SHARES).any())
    ran = ran[near] if near.any() else ran
    rows = pd.DataFrame(list(product(ran["llm_share"], ENGINES)), columns=["llm_share", "model"])
    rows["need"] = rows["model"].map(need * size)
    rows["room"] = ran[[f"{model}_kv_tokens" for model in ENGINES]].to_numpy().ravel()
    return rows.assign(ratio=rows["need"] / rows["room"], rung=rung(sweep.runs))


def on_rungs(
    view: Callable[[Any], pd.DataFrame], studies: Sequence[RunTables | Committed], figure: str
) -> pd.DataFrame:
    """Rows of a figure with a panel for each rung: a view of each study, or what is committed of
    this figure, with a column rung.
    """
    parts = []
    for each in studies:
        if isinstance(each, Committed):
            parts.append(each.figure(figure)[0])
        elif each.runs.empty:
            raise RunStoreError(f"No run of {figure} finished: {reasons(each.all_runs)}.")
        else:
            parts.append(view(each).assign(rung=rung(each.runs)))
    return pd.concat(parts, ignore_index=True)


# -- the size of a cache: one recorded order of calls at every size, whole searches at some --

SIZES, OPTIMA = 40, 8
REPLAYS: Sequence[float] = (0.6, 0.8, 1.0, 1.3, 2.0)
"""Sizes at which whole searches are replayed, over the order's own peak of active blocks."""
FEW_REPLAYS = (0.75,)  # of a search of true size


def size_rows(sweep: Study, recording: str | None = None, device: str = DEVICE) -> pd.DataFrame:
    """Rows of plots.miss_ratio, of a recording of the package, or else of the replayed rung's own
    search: LRU and Belady's optimum from the order, whole replays beside them.

    The replayed rung's order is that at a share of about 0.3. The ends and the middle of the
    sweep's axis are marked.
    """
    found, replays = load_device(device), REPLAYS
    changes: Changes = {}
    if recording is not None:
        answers = Answers(load_recording(recording))
    else:
        answers, replays = rung_answers(sweep.config, sweep.config.seeds[0]), FEW_REPLAYS
        changes = {"min_problem_batch": sweep.config.min_problem_batch}
    room, rows = rooms(sweep), list[Row]()
    marked = room.iloc[[0, len(room) // 2, -1]].to_dict("records")
    for engine, calls in zip(ENGINES, search_calls(answers, found, changes), strict=True):
        if not calls.calls:  # of a PRM that was asked nothing
            continue
        peak = int(miss_ratio(calls, [1]).iloc[0]["peak_active"])
        own = _curves(calls, peak)
        for num_blocks in (round(peak * each) for each in replays):
            try:
                cache: Any = {engine: {"num_blocks": num_blocks}}
                trace = replay(answers, found, **changes, **cache).trace
            except OutOfMemory:  # one request would not fit
                continue
            steps = trace.steps[trace.steps["engine"] == engine]
            requests = trace.requests[trace.requests["engine"] == engine]
            look_ups = max(len(requests) + int(requests["preemptions"].sum()), 1)
            hits = steps["hit_tokens"].sum() / max(int(steps["query_tokens"].sum()), 1)
            row: Row = {"kind": "replay", "num_blocks": num_blocks, "hit_ratio": hits}
            own.append(row | {"thrashed_per_1000": 1000 * steps["thrashed"].sum() / look_ups})
        for row in own:
            row["tokens"] = calls.block_size * row["num_blocks"]
        for at in marked:
            row = {"kind": "share", "llm_share": at["llm_share"]}
            own.append(row | {"tokens": int(at[f"{engine}_kv_tokens"])})
        rows += [row | {"engine": engine} for row in own]
    columns = ["engine", "kind", "num_blocks", "tokens", "hit_ratio", "thrashed_per_1000"]
    return pd.DataFrame(rows).reindex(columns=[*columns, "llm_share"])


def _curves(calls: CacheCalls, peak: int) -> list[Row]:
    """LRU at many sizes, the optimum at some of them; near the peak they lie closest."""
    most = max(calls.num_contents + peak, 2 * peak)
    found = np.geomspace(max(peak // 2, 1), most, SIZES).astype(int).tolist()
    sizes = sorted({*found, *(round(peak * each) for each in REPLAYS)})
    lru = miss_ratio(calls, sizes).query("fits")  # the others are of no order that happens
    look_ups = sum(isinstance(call, Allocate) for call in calls.calls)
    lru = lru.assign(thrashed_per_1000=1000 * lru["thrashed"] / max(look_ups, 1))
    tight = [size for size in sizes if peak < size <= 3 * peak]  # beyond, both find the same
    some = [peak, *tight[:: -(-len(tight) // OPTIMA) or 1], sizes[-1]]
    both = [lru.assign(kind="lru"), optimal_hits(calls, some).assign(kind="optimum")]
    columns = ["kind", "num_blocks", "hit_ratio", "thrashed_per_1000"]
    rows: Any = pd.concat(both)[columns].to_dict("records")
    return rows


def provenance_recorded(recording: str) -> str:
    """What stands below the figure of a recording."""
    found = load_recording(recording)
    sizes = found.settings.strategy_settings
    return (
        f"LLM {found.llm.name}, PRM {found.prm.name} ({rung_of(found.llm.name)}); the order of "
        f"cache calls of the recording {recording}, replayed: {len(found.problems)} problems, "
        f"1 seed, n = {sizes['n']}, beam width {sizes['beam_width']}.\n{CARRIES_OVER}"
    )
