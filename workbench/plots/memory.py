"""The study's headline: throughput against the memory split (thesis, figure 6.1).

Takes the tidy rows that the experiments make (one row a share and metric, with its interval) and
draws them.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.theme import (
    BLACK,
    GREEN,
    MODELS,
    SKY,
    UPPER_AXIS_PX,
    Frame,
    finish,
    interval,
    legend_at,
    legend_note,
    share_axes,
)

THROUGHPUT = {
    "tokens_per_s": ("generated tokens/s (left axis)", BLACK, "solid", "circle"),
    "problems_per_min": ("problems/min (right axis)", GREEN, "dot", "diamond"),
}
BUSY = {"llm_tokens_per_busy_s": "llm", "prm_tokens_per_busy_s": "prm"}
_FRAME = Frame(panels=470, top=66 + UPPER_AXIS_PX, right=62)
_CAPTION = (
    "Throughput of the search against the LLM's share of total memory: generated tokens per second "
    "and problems per minute (above), tokens each model processes per second it is busy (below). "
    "Bars: 95 % bootstrap intervals over problems and seeds, the machine's noise between runs of "
    "equal work included; the band is the interval of the share with the highest throughput, where "
    "shares at which both models do the same work count as one."
)


def memory_split(rows: pd.DataFrame, face: str = "") -> go.Figure:
    """Throughput of the search, and of each model while busy, over the LLM's share.

    rows: llm_share, llm_kv_tokens, prm_kv_tokens, metric, value, low, high; metrics tokens_per_s,
    problems_per_min, llm_tokens_per_busy_s, prm_tokens_per_busy_s, and optionally one row
    peak_share, drawn as a band low .. high.
    """
    specs = [[{"secondary_y": True}], [{}]]
    fig = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.12, specs=specs)
    for metric, (label, colour, dash, symbol) in THROUGHPUT.items():
        right = metric == "problems_per_min"
        line = _line(_of(rows, metric), label, colour, dash, symbol)
        fig.add_trace(line.update(legend="legend"), row=1, col=1, secondary_y=right)
    for metric, model in BUSY.items():
        style = MODELS[model]
        line = _line(_of(rows, metric), style.label, style.colour, style.dash, style.symbol)
        fig.add_trace(line.update(legend="legend2"), row=2, col=1)
    _axes(fig, rows)
    _peak(fig, _of(rows, "peak_share"))
    return finish(fig, "Throughput against the memory split", _CAPTION, face, _FRAME)


def _of(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    return rows[rows["metric"] == metric].sort_values("llm_share")


def _line(rows: pd.DataFrame, label: str, colour: str, dash: str, symbol: str) -> go.Scatter:
    return go.Scatter(
        x=rows["llm_share"],
        y=rows["value"],
        error_y=interval(rows, colour),
        name=label,
        mode="lines+markers",
        line={"color": colour, "dash": dash, "width": 2},
        marker={"symbol": symbol, "size": 7, "color": colour},
        hovertemplate="share %{x:.2f}: %{y:,.1f}<extra>" + label + "</extra>",
    )


def _axes(fig: go.Figure, rows: pd.DataFrame) -> None:
    share_axes(fig, rows, panels=2)
    fig.update_yaxes(rangemode="tozero")
    fig.update_yaxes(title_text="generated tokens/s", row=1, col=1, secondary_y=False)
    # both measure the same searches, so their lines would coincide: the right axis reaches higher
    right_rows = _of(rows, "problems_per_min")
    highest = float(right_rows["high"].where(np.isfinite(right_rows["high"])).max())
    reach = np.nanmax([1.45 * float(right_rows["value"].max()), 1.25 * highest])
    right = {
        "title_text": "problems/min",
        "showgrid": False,
        "range": [0, reach],
        "tickmode": "auto",
    }
    fig.update_yaxes(**right, row=1, col=1, secondary_y=True)
    fig.update_yaxes(title_text="tokens per busy second", row=2, col=1)
    legend_at(fig, "legend", _FRAME.above(UPPER_AXIS_PX - 4))
    legend_at(fig, "legend2", 0.445)


def _peak(fig: go.Figure, peak: pd.DataFrame) -> None:
    """The peak as an interval: a band over both panels, its numbers in the legend."""
    pad = 0.004  # so that an interval of one share is still seen
    for value, low, high in peak[["value", "low", "high"]].to_numpy(float):
        band = {"fillcolor": SKY, "opacity": 0.18, "line_width": 0, "layer": "below"}
        fig.add_vrect(low - pad, high + pad, **band)
        text = f"peak {value:.2f} (95 %: {low:.2f} to {high:.2f})"
        marker = {"symbol": "square", "size": 12, "color": SKY, "opacity": 0.4}
        fig.add_trace(legend_note("legend", text, marker), row=1, col=1)
