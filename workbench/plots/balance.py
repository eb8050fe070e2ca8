"""Which of the two models a search waits for, and how much room their blocks waste.

Takes rows that the experiments made of a sweep and of a batching study, and draws them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.theme import (
    MODELS,
    PURPLE,
    SYMBOLS,
    UPPER_AXIS_PX,
    Frame,
    finish,
    interval,
    legend_at,
    shade,
    share_axes,
)

CONTINUOUS = "continuous"
_FRAME = Frame(panels=520, top=66 + UPPER_AXIS_PX)
_CAPTION = (
    "Above: reasoning steps of the search over the seconds each model was busy with them, against "
    "the LLM's share of total memory; bars are 95 % bootstrap intervals over problems, and the "
    "search waits longer for the model whose line is lower. Below: share of the room in active "
    "blocks that holds no token, 1 - tokens held / (active blocks x block size) over all steps, "
    "against the block size, for each limit of sequences in a step. Static batches hold blocks for "
    "the longest request each may become."
)


def balance(rows: pd.DataFrame, face: str = "") -> go.Figure:
    """Reasoning steps a second of both models over the split; room wasted over the block size.

    rows: metric steps_per_busy_s with llm_share, llm_kv_tokens, prm_kv_tokens, model, value, low,
    high; metric waste with model, kind, block_size, max_num_seqs, value (a fraction).
    """
    specs = [[{"colspan": 2}, None], [{}, {}]]
    fig = make_subplots(rows=2, cols=2, specs=specs, vertical_spacing=0.24, horizontal_spacing=0.09)
    busy = rows[rows["metric"] == "steps_per_busy_s"]
    for model in MODELS:
        fig.add_trace(_busy_line(busy[busy["model"] == model], model), row=1, col=1)
    share_axes(fig, busy, panels=1)
    fig.update_yaxes(title_text="reasoning steps/s while busy", rangemode="tozero", row=1, col=1)
    waste = rows[rows["metric"] == "waste"]
    limits = sorted(waste.loc[waste["kind"] == CONTINUOUS, "max_num_seqs"].astype(int).unique())
    for column, model in enumerate(MODELS, start=1):
        _waste(fig, waste[waste["model"] == model], model, limits, column)
    _waste_legend(fig, limits, bool((waste["kind"] != CONTINUOUS).any()))
    _waste_axes(fig, waste)
    legend_at(fig, "legend", _FRAME.above(UPPER_AXIS_PX - 4))
    legend_at(fig, "legend2", 0.385)
    return finish(fig, "Balance of both models, and waste", _CAPTION, face, _FRAME)


def _busy_line(rows: pd.DataFrame, model: str) -> go.Scatter:
    style, own = MODELS[model], rows.sort_values("llm_share")
    return go.Scatter(
        x=own["llm_share"],
        y=own["value"],
        error_y=interval(own, style.colour),
        name=style.label,
        mode="lines+markers",
        line={"color": style.colour, "dash": style.dash, "width": 2},
        marker={"symbol": style.symbol, "size": 8, "color": style.colour},
        hovertemplate="share %{x:.2f}: %{y:,.1f} steps/s<extra>" + style.label + "</extra>",
    )


def _waste(
    fig: go.Figure, rows: pd.DataFrame, model: str, limits: Sequence[int], column: int
) -> None:
    for rank, seqs in enumerate(limits):
        own = rows[(rows["kind"] == CONTINUOUS) & (rows["max_num_seqs"] == seqs)]
        line = _waste_line(own.sort_values("block_size"), f"{MODELS[model].label}, {seqs}")
        colour, symbol = shade(model, rank, len(limits)), SYMBOLS[rank % 7]
        line.update(line_color=colour, marker={"symbol": symbol, "size": 8, "color": colour})
        fig.add_trace(line, row=2, col=column)
    padded = rows[rows["kind"] != CONTINUOUS]
    points = _waste_line(padded, f"{MODELS[model].label}, static").update(mode="markers+text")
    points.update(marker={"symbol": "triangle-up-open", "size": 10, "color": PURPLE})
    sides = [f"middle {('right', 'left')[k % 2]}" for k in range(len(padded))]  # apart if equal
    points.update(text=[f"{s:.0f}" for s in padded["max_num_seqs"]], textposition=sides)
    fig.add_trace(points, row=2, col=column)


def _waste_line(rows: pd.DataFrame, name: str) -> go.Scatter:
    return go.Scatter(
        x=rows["block_size"],
        y=100 * rows["value"],
        customdata=rows[["max_num_seqs"]],
        name=name,
        mode="lines+markers",
        showlegend=False,
        cliponaxis=False,
        hovertemplate=(
            "blocks of %{x}, %{customdata[0]} sequences: %{y:.1f} %<extra>" + name + "</extra>"
        ),
    )


def _waste_legend(fig: go.Figure, limits: Sequence[int], has_static: bool) -> None:
    """In grey, since both models' lines are read by the same shades and markers."""
    entries = [
        (f"≤ {seqs:,} sequences", _grey(rank, len(limits)), SYMBOLS[rank % 7], "lines")
        for rank, seqs in enumerate(limits)
    ]
    if has_static:
        entries.append(("static batches of so many", PURPLE, "triangle-up-open", ""))
    for name, colour, symbol, lines in entries:
        marker = {"symbol": symbol, "size": 8, "color": colour}
        mode = "+".join(filter(None, (lines, "markers")))
        entry = go.Scatter(x=[None], y=[None], name=name, mode=mode, marker=marker)
        fig.add_trace(entry.update(line_color=colour, legend="legend2"), row=2, col=1)


def _waste_axes(fig: go.Figure, waste: pd.DataFrame) -> None:
    sizes = sorted(waste["block_size"].unique())
    reach = [np.log10(sizes[0]) - 0.1, np.log10(sizes[-1]) + 0.1]
    top = 1.12 * max(100 * float(waste["value"].max()), 5.0)
    for column, style in enumerate(MODELS.values(), start=1):
        ticks = {"type": "log", "tickmode": "array", "tickvals": sizes, "range": reach}
        title = f"block size of the {style.label} (tokens)"
        fig.update_xaxes(title_text=title, **ticks, row=2, col=column)
        fig.update_yaxes(range=[0, top], title_text="room wasted (%)", row=2, col=column)


def _grey(rank: int, count: int) -> str:
    level = round(190 - 160 * (rank / (count - 1) if count > 1 else 1.0))
    return f"#{level:02X}{level:02X}{level:02X}"
