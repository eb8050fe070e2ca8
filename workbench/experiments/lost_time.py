"""Where the wall time of a search goes: every step and span of a run put to one of eight uses.

A step that mixes kinds of work is divided by the floating-point operations of each (ModelSpec), its
scheduling counted as bookkeeping. Wall time is measured apart, from the first start to the last
end, so what belongs to no step and no span shows as a gap. What it does not do: explain a step's
seconds from first principles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.experiments.views import Tables, rooms
from workbench.models.registry import model_spec

AGAIN = ("recomputed_evicted", "recomputed_preempted", "recomputed_partial")
PARTS = ("llm_decode", "llm_prefill", "prm_prefill", *AGAIN, "waiting", "bookkeeping")
Cost = Callable[[int, int, int], float]
"""Floating-point operations of a forward: (new tokens, tokens in the cache, rows of logits)."""


def lost_time_rows(sweep: Tables, costs: Mapping[str, Cost] | None = None) -> pd.DataFrame:
    """Rows of plots.lost_time: seconds by llm_share, lane and part, wall_s, KV tokens.

    costs: of one forward, by engine ("llm", "prm"); by default those of the sweep's models.
    """
    costs = costs or model_costs(sweep.runs)
    steps, spans = sweep.table("steps"), sweep.table("spans")
    uses = pd.concat([step_uses(steps, costs), span_uses(spans)], ignore_index=True)
    runs = sweep.runs.groupby("llm_share")["run_id"].nunique().rename("runs")
    walls = wall_seconds(steps, spans).groupby("llm_share").mean().rename("wall_s")
    seconds = uses.groupby(["llm_share", "lane", "part"])["seconds"].sum().reset_index()
    rows = seconds.merge(runs, on="llm_share").merge(walls, on="llm_share")
    rows["seconds"] /= rows.pop("runs")
    return rows.merge(rooms(sweep), on="llm_share", how="left")


def accounted(rows: pd.DataFrame) -> pd.Series:
    """What part of each share's wall time the parts add up to: 1 when nothing lacks."""
    by_share = rows.groupby("llm_share")
    return by_share["seconds"].sum() / by_share["wall_s"].first()


def wall_seconds(steps: pd.DataFrame, spans: pd.DataFrame) -> pd.Series:
    """Seconds from the first start to the last end of each run, by (llm_share, run_id)."""
    columns = ["run_id", "llm_share", "start_s", "duration_s"]
    both = pd.concat([steps[columns], spans[columns]])
    both["end_s"] = both["start_s"] + both["duration_s"]
    by_run = both.groupby(["llm_share", "run_id"])
    return by_run["end_s"].max() - by_run["start_s"].min()


def step_uses(steps: pd.DataFrame, costs: Mapping[str, Cost]) -> pd.DataFrame:
    """Each step's seconds by part: scheduling is bookkeeping, the rest goes by operations."""
    frames = [_engine_uses(rows, str(engine), costs) for engine, rows in steps.groupby("engine")]
    return pd.concat(frames, ignore_index=True)


def _engine_uses(steps: pd.DataFrame, engine: str, costs: Mapping[str, Cost]) -> pd.DataFrame:
    operations = step_operations(steps, engine, costs[engine])
    total = operations.sum(axis=1)
    forward = steps["duration_s"] - steps["schedule_s"]
    seconds = operations.mul((forward / total.where(total > 0)).fillna(0.0), axis=0)
    idle = forward.where(total == 0, 0.0)  # a step that computed nothing
    seconds["bookkeeping"] = steps["schedule_s"] + idle
    seconds["llm_share"] = steps["llm_share"]
    long = seconds.melt(id_vars="llm_share", var_name="part", value_name="seconds")
    return long.assign(lane=engine)


def step_operations(steps: pd.DataFrame, engine: str, cost: Cost) -> pd.DataFrame:
    """Floating-point operations of each step (rows) by part (columns).

    A token attends to the mean context of the step's requests, a prompt's token to half of it.
    """
    context = (steps["tokens_held"] / steps["running"].clip(lower=1)).to_numpy(float)
    decode, prefill = _one_token(cost, context, 1), _one_token(cost, context / 2, 0)
    again = {part: steps[part.replace("_", "_tokens_", 1)] * prefill for part in AGAIN}
    new = steps["prefill_tokens"] * prefill - sum(again.values())
    named = {"llm": {"llm_decode": steps["decode_tokens"] * decode, "llm_prefill": new}}
    named["prm"] = {"prm_prefill": new + steps["decode_tokens"] * decode}
    return pd.DataFrame({**named[engine], **again})


def _one_token(
    cost: Cost, context: NDArray[np.float64], logits: int, far: int = 1024
) -> NDArray[np.float64]:
    """Operations of one token at each context: linear in it, so two calls tell all."""
    near = cost(1, 0, logits)
    return near + context * (cost(1, far, logits) - near) / far


def span_uses(spans: pd.DataFrame) -> pd.DataFrame:
    """The time outside steps: waiting where a span says so, else bookkeeping."""
    part = np.where(spans["kind"] == "waiting", "waiting", "bookkeeping")
    columns = spans[["llm_share", "lane"]].assign(part=part, seconds=spans["duration_s"])
    return columns.reset_index(drop=True)


def model_costs(runs: pd.DataFrame) -> dict[str, Cost]:
    """The cost of one forward of the sweep's two models."""
    return {engine: _cost(str(runs[engine].iloc[0])) for engine in ("llm", "prm")}


def _cost(model: str) -> Cost:
    spec = model_spec(model)
    return lambda new_tokens, context, logits: float(spec.flops(new_tokens, context, logits))
