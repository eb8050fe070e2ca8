"""Blocks over scheduling steps (thesis, figures 6.2 and 6.3), and where wall time went.

Long traces are thinned before drawing, never by dropping extremes: the shortest spike of evictions
stays as high as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots import theme
from workbench.plots.theme import MODELS, Frame, finish, legend_at

BLOCK_COLUMNS = ("blocks_active", "blocks_cached", "allocated", "evicted")
LOST_TIME = {  # part: (label, colour), from the foot of a column; neighbours differ in lightness
    "llm_decode": ("LLM decode", theme.BLUE),
    "llm_prefill": ("LLM prefill", theme.SKY),
    "prm_prefill": ("PRM new prefill", theme.VERMILION),
    "recomputed_evicted": ("recomputed: evicted", theme.ORANGE),
    "recomputed_preempted": ("recomputed: preempted", theme.YELLOW),
    "recomputed_partial": ("recomputed: partial", theme.PURPLE),
    "waiting": ("waiting", "#D0D0D0"),
    "bookkeeping": ("bookkeeping", theme.GREEN),
}
_LOST_CAPTION = (
    "Wall time of a search against the LLM's share of total memory, divided among what it was "
    "spent on; the line across each column is wall time measured apart. Recomputed: prompt "
    "tokens computed before and lost because their block was evicted, their request preempted, or "
    "their block never full. A step that mixes kinds of work is divided by its floating-point "
    "operations. Seconds of models of this size do not carry over to larger ones."
)


def decimated(rows: pd.DataFrame, columns: Sequence[str], buckets: int = 400) -> pd.DataFrame:
    """Fewer of `rows`: of each of `buckets` stretches those where a column has an extreme.

    Keeps order, the first row and the last; returns `rows` itself where there are few.
    """
    if len(rows) <= 2 * buckets:
        return rows
    bucket = np.arange(len(rows)) * buckets // len(rows)
    kept = {0, len(rows) - 1}
    for column in columns:
        by_bucket = pd.Series(rows[column].to_numpy()).groupby(bucket)
        kept.update(by_bucket.idxmin(), by_bucket.idxmax())
    return rows.iloc[sorted(kept)]


def prm_blocks(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Blocks one engine holds at each of its scheduling steps, and how many it takes and evicts.

    rows: one a step, in order: engine, step, blocks_total, blocks_active, blocks_cached,
    allocated, evicted; constant columns axis_steps, axis_blocks, axis_events give figures that are
    compared the same axes.
    """
    style = MODELS[str(rows["engine"].iloc[0])]
    fig = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.13, row_heights=[0.6, 0.4])
    thin = decimated(rows, BLOCK_COLUMNS)
    last = thin.iloc[[-1]]  # drawn once more, one step further on: as wide as the others
    drawn = pd.concat([thin, last.assign(step=last["step"] + 1)], ignore_index=True)
    for column, label, colour in (
        ("blocks_active", "active (held)", style.colour),
        ("blocks_cached", "cached (can be hit)", style.soft),
    ):
        look = {"legend": "legend", "hovertemplate": "step %{x}: %{y:,} blocks"}
        held = theme.area(drawn["step"], drawn[column], label, colour, "blocks", **look)
        fig.add_trace(held, row=1, col=1)
    total, ends = int(rows["blocks_total"].max()), [0, int(rows["step"].iloc[-1]) + 1]
    label = f"capacity ({total:,} blocks)"
    fig.add_trace(theme.capacity(ends, [total, total], label, legend="legend"), row=1, col=1)
    for column, colour, sign in (("allocated", theme.SKY, 1), ("evicted", "#444444", -1)):
        events = go.Scatter(  # taken upwards, evicted downwards: neither hides the other
            x=drawn["step"],
            y=sign * drawn[column],
            customdata=drawn[column],
            name=f"{column} per step ({int(rows[column].sum()):,} in all)",
            mode="lines",
            line={"color": colour, "width": 1, "shape": "hv"},
            fill="tozeroy",
            legend="legend2",
            hovertemplate="step %{x}: %{customdata:,} " + f"{column}<extra></extra>",
        )
        fig.add_trace(events, row=2, col=1)
    own = {
        "axis_steps": rows["step"].max() + 1,
        "axis_blocks": total,
        "axis_events": rows[["allocated", "evicted"]].to_numpy().max(),
    }
    steps, blocks, events = (float(rows[c].iloc[0] if c in rows else own[c]) for c in own)
    fig.update_xaxes(range=[0, steps * 1.01])
    fig.update_xaxes(title_text=f"{style.label} scheduling step", row=2, col=1)
    fig.update_yaxes(title_text="blocks", range=[0, blocks * 1.04], row=1, col=1)
    power = 10 ** int(np.log10(max(events / 1.6, 1)))  # of the largest round tick below it
    tick = max(step * power for step in (1, 2, 5) if step * power <= max(events / 1.6, 1))
    most, reach = min(2, int(max(events, 1) // tick)), max(events * 1.1, 1)
    values = [tick * i for i in range(-most, most + 1)]
    ticks = {"tickvals": values, "ticktext": [f"{abs(v):g}" for v in values]}
    fig.update_yaxes(title_text="blocks per step", range=[-reach, reach], **ticks, row=2, col=1)
    legend_at(fig, "legend2", 0.37)
    at = f" at an LLM share of {rows['llm_share'].iloc[0]:.2f}" if "llm_share" in rows else ""
    title = f"{style.label} blocks step by step{at}"
    caption = (
        f"KV blocks of the {style.label} at each of its scheduling steps{at}, after scheduling, "
        "before the forward: active and cached blocks stacked, what is missing is free. "
        "Below, blocks allocated (up) and evicted (down) in each step of one run."
    )
    return finish(fig, title, caption, provenance, Frame(panels=430))


def lost_time(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Wall time of a search, divided among what it was spent on, over the LLM's share.

    rows: llm_share, llm_kv_tokens, prm_kv_tokens, part (a key of LOST_TIME), seconds (a mean over
    runs), wall_s.
    """
    shares = sorted(rows["llm_share"].unique())
    fig = make_subplots(rows=1)
    walls = rows.groupby("llm_share")["wall_s"].first().reindex(shares)
    seconds = rows.pivot_table(index="llm_share", columns="part", values="seconds", aggfunc="sum")
    for part, (label, colour) in LOST_TIME.items():
        own = seconds.get(part, 0 * walls).reindex(shares).fillna(0.0)
        bar = go.Bar(
            x=list(range(len(shares))),
            y=own,
            width=0.6,
            customdata=100 * own / walls,
            name=label,
            marker={"color": colour, "line": {"color": "white", "width": 0.6}},
            hovertemplate="%{y:.2f} s, %{customdata:.1f} %",
        )
        fig.add_trace(bar)
    fig.add_trace(theme.strokes(range(len(walls)), list(walls), 0.4).update(name="wall time"))
    theme.share_axes(fig, rows, panels=1, at=range(len(shares)))
    fig.update_yaxes(title_text="seconds a search (mean over seeds)", rangemode="tozero")
    fig.update_layout(barmode="stack", legend={"traceorder": "normal", "entrywidth": 146})
    frame = Frame(panels=340, top=176, legend=58)
    return finish(fig, "Where the wall time of a search goes", _LOST_CAPTION, provenance, frame)
