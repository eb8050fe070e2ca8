"""What a cache holds at each scheduling step (thesis, figures 6.2 and 6.3), how well it remembers
prefixes over the split (6.6 and 6.7) and over its size, and where wall time went.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots import theme
from workbench.plots.theme import MODELS, finish, legend_at, say, series

_HITS_CAPTION = (
    "Share of queried prompt tokens that the prefix cache answered, first admissions only, against "
    "the LLM's share of total memory. Bars: 95 % bootstrap intervals over problems."
)
_THRASH_CAPTION = (
    "Thrashing against the LLM's share of total memory: look-ups that missed a block which had "
    "been evicted, per 1,000 look-ups (above), and blocks so lost per search (below). Filled "
    "markers with 95 % intervals of a block bootstrap, whose blocks are twentieths of the runs; an "
    "open marker is a true zero, its bar the upper bound of the rate (rule of three)."
)
_SIZES_CAPTION = (
    "Prompt tokens found cached (above) and blocks asked for again after their eviction (below) "
    "over the size of each model's cache, for one order of cache calls; first admissions only. "
    "Thin line: Belady's optimum, which knows the future; no bound where sequences fill equal "
    "blocks at once, since the victim decides whose block others share. Crosses: the whole search "
    "replayed at that size; between those below the order's own peak of active blocks, where a "
    "scheduler changes the order, the line is dashed. Dotted: sizes that some shares of the memory "
    "give."
)


def prefix_hits(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Prefix hit rate of both models, 0 to 100 %, over the LLM's share.

    rows: llm_share, llm_kv_tokens, prm_kv_tokens, engine, value, low, high; rates as fractions.
    """
    fig = make_subplots(rows=1)
    for engine in MODELS:
        _line(fig, theme.in_percent(rows), engine, ".1f", " %")
    theme.share_axes(fig, rows, panels=1)
    fig.update_yaxes(title_text="prompt tokens found cached (%)", range=[0, 103])
    title = "Prefix cache hits of both models"
    return finish(fig, title, _HITS_CAPTION, provenance, 320, **theme.OVER_SHARES)


def thrashing(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Thrash events per 1,000 look-ups and thrashed blocks a search, over the LLM's share.

    rows: llm_share, llm_kv_tokens, prm_kv_tokens, engine, metric (events_per_1000 | blocks), value,
    low, high.
    """
    fig = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.08)
    events, blocks = (rows[rows["metric"] == metric] for metric in ("events_per_1000", "blocks"))
    for engine in MODELS:
        _line(fig, events, engine, ".2f", "", row=1, col=1)
        _line(fig, blocks, engine, ",.0f", "", row=2, col=1, showlegend=False)
    theme.share_axes(fig, rows, panels=2)
    fig.update_yaxes(rangemode="tozero")
    fig.update_yaxes(title_text="events per 1,000 look-ups", row=1, col=1)
    fig.update_yaxes(title_text="thrashed blocks per search", row=2, col=1)
    zeros = events[events["value"] == 0]
    if len(zeros):  # their bars are often too short to be seen: the bound is in the legend
        text = f"open markers: 0, upper bound at most {zeros['high'].max():.2f}"
        marker = {"symbol": "circle-open", "color": theme.GREY, "line": {"width": 1.5}}
        theme.legend_note(fig, "legend", text, marker, row=1, col=1)
    title = "Thrashing of both models"
    return finish(fig, title, _THRASH_CAPTION, provenance, 470, **theme.OVER_SHARES)


def _line(
    fig: go.Figure, rows: pd.DataFrame, engine: str, form: str, unit: str, **more: Any
) -> None:
    """One model's line; a value of exactly zero gets an open marker."""
    style = MODELS[engine]
    own = rows[rows["engine"] == engine].sort_values("llm_share")
    hover = (
        f"share %{{x:.2f}}: %{{y:{form}}}{unit} (95 %: %{{customdata[0]:{form}}} to "
        f"%{{customdata[1]:{form}}})"
    )
    symbols = [style.symbol + ("-open" if value == 0 else "") for value in own["value"]]
    marker = {"symbol": symbols, "line": {"color": style.colour, "width": 1.5}}
    bounds = own[["low", "high"]].to_numpy()
    series(fig, own, "llm_share", style, hover, customdata=bounds, marker=marker, **more)


def miss_ratio(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Hit rate and thrashed blocks of each model over cache sizes.

    rows: engine, tokens (the size), kind (lru | optimum | replay | share), hit_ratio and
    thrashed_per_1000 (of look-ups; missing for the optimum), llm_share (kind share only: a size
    and no point of a curve). LRU and the optimum have no size below the order's own peak of active
    blocks: there a scheduler changes the order, and whole searches are replayed.
    """
    titles = [f"{style.label}'s cache" for style in MODELS.values()]
    fig = make_subplots(rows=2, cols=2, shared_xaxes=True, vertical_spacing=0.08,
                        horizontal_spacing=0.09, subplot_titles=titles)  # fmt: skip
    for column, engine in enumerate(MODELS, start=1):
        own = rows[rows["engine"] == engine].sort_values("tokens")
        _sizes(fig, own, engine, column)
        for tokens, share in own.loc[own["kind"] == "share", ["tokens", "llm_share"]].to_numpy():
            line = {"color": theme.GREY, "dash": "dot", "width": 1}
            fig.add_vline(float(tokens), line=line, row="all", col=column)
            at = {"textangle": -90, "xanchor": "right", "font": {"size": 10, "color": "#555555"}}
            say(fig, f"{share:.2f}", float(np.log10(tokens)), 2, **at, row=1, col=column)
        fig.update_xaxes(title_text="cache size (tokens)", row=2, col=column)
    fig.update_xaxes(type="log", dtick="D2", tickformat="~s")
    fig.update_yaxes(range=[0, 103], row=1)
    fig.update_yaxes(rangemode="tozero", row=2)
    fig.update_yaxes(title_text="prompt tokens found cached (%)", row=1, col=1)
    fig.update_yaxes(title_text="thrashed blocks per 1,000 look-ups", row=2, col=1)
    title = "Is it the policy or the size?"
    return finish(fig, title, _SIZES_CAPTION, provenance, 430, top=96, legend=22)


def _sizes(fig: go.Figure, rows: pd.DataFrame, engine: str, column: int) -> None:
    """One model's curves: LRU, dashed below the sizes it has, the optimum, and replays."""
    style = MODELS[engine]
    lru, best, replays = (rows[rows["kind"] == kind] for kind in ("lru", "optimum", "replay"))
    first = lru.head(1)
    below = pd.concat([replays[replays["tokens"] < first["tokens"].min()], first])
    curves = [
        (lru, f"{style.label}, LRU", {"color": style.colour, "dash": "solid", "width": 2.2}),
        (below, "", {"color": style.colour, "dash": "dash", "width": 2.2}),
        (best, "optimum", {"color": theme.BLACK, "dash": "solid", "width": 1}),
    ]
    for panel, (value, scale) in enumerate((("hit_ratio", 100), ("thrashed_per_1000", 1)), start=1):
        for own, label, line in curves[: 3 if value == "hit_ratio" else 2]:
            curve = go.Scatter(
                x=own["tokens"],
                y=scale * own[value],
                mode="lines",
                line=line,
                text=[f"{theme.tokens_text(tokens)} tokens" for tokens in own["tokens"]],
                name=label,
                showlegend=panel == 1 and label != "" and (label != "optimum" or column == 1),
                hovertemplate="%{text}: %{y:.1f}<extra></extra>",
            )
            fig.add_trace(curve, row=panel, col=column)
        crosses = go.Scatter(
            x=replays["tokens"],
            y=scale * replays[value],
            mode="markers",
            marker={"symbol": "x-thin", "size": 9, "line": {"width": 2, "color": style.colour}},
            name="whole search replayed",
            showlegend=panel == column == 1 and len(replays) > 0,
        )
        fig.add_trace(crosses, row=panel, col=column)


# -- step by step, and in seconds --

BLOCK_COLUMNS = ("blocks_active", "blocks_cached", "allocated", "evicted")
LOST_TIME = {  # part: (label, colour), from the foot of a column; neighbours differ in lightness
    "llm_decode": ("LLM decode", theme.BLUE),
    "llm_prefill": ("LLM prefill", theme.SKY),
    "prm_prefill": ("PRM new prefill", theme.VERMILION),
    "recomputed_evicted": ("recomputed: evicted", theme.ORANGE),
    "recomputed_preempted": ("recomputed: preempted", theme.YELLOW),
    "recomputed_partial": ("recomputed: partial", theme.PURPLE),
    "bookkeeping": ("bookkeeping", theme.GREEN),
}
_LOST_CAPTION = (
    "Wall time of a search against the LLM's share of total memory, divided among what it was "
    "spent on; the line across each column is from the first record to the last. Recomputed: "
    "prompt tokens computed before and lost because their block was evicted, their request "
    "preempted, or their block never full. A step that mixes kinds of work is divided by its "
    "floating-point operations. Seconds of models of this size do not carry over to larger ones."
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
    largest = rows[["allocated", "evicted"]].to_numpy().max()
    own = {"axis_steps": ends[1], "axis_blocks": total, "axis_events": largest}
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
    return finish(fig, title, caption, provenance, 430)


def lost_time(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Wall time of a search, divided among what it was spent on, over the LLM's share.

    rows: llm_share, llm_kv_tokens, prm_kv_tokens, part (a key of LOST_TIME), seconds (a mean over
    runs), wall_s.
    """
    fig = make_subplots(rows=1)
    walls = rows.groupby("llm_share")["wall_s"].first()
    seconds = rows.pivot_table(index="llm_share", columns="part", values="seconds", aggfunc="sum")
    for part, (label, colour) in LOST_TIME.items():
        own = seconds.get(part, 0 * walls).reindex(walls.index).fillna(0.0)
        bar = go.Bar(
            x=list(range(len(walls))),
            y=own,
            width=0.6,
            customdata=100 * own / walls,
            name=label,
            marker={"color": colour, "line": {"color": "white", "width": 0.6}},
            hovertemplate="%{y:.2f} s, %{customdata:.1f} %",
        )
        fig.add_trace(bar)
    fig.add_trace(theme.strokes(range(len(walls)), list(walls), 0.4).update(name="wall time"))
    theme.share_axes(fig, rows, panels=1, at=range(len(walls)))
    fig.update_yaxes(title_text="seconds a search (mean over seeds)", rangemode="tozero")
    fig.update_layout(barmode="stack", legend={"traceorder": "normal", "entrywidth": 146})
    title = "Where the wall time of a search goes"
    return finish(fig, title, _LOST_CAPTION, provenance, 340, top=176, legend=58)
