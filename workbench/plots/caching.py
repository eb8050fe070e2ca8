"""How well prefixes are remembered: hit rates and thrashing (thesis, figures 6.6 and 6.7).

Both figures draw the two models side by side over the LLM's share, with intervals made by the
experiments.
"""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.theme import (
    GREY,
    MODELS,
    UPPER_AXIS_PX,
    Frame,
    finish,
    interval,
    legend_at,
    legend_note,
    share_axes,
)

_HITS_FRAME = Frame(panels=320, top=66 + UPPER_AXIS_PX)
_THRASH_FRAME = Frame(panels=470, top=66 + UPPER_AXIS_PX)
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


def prefix_hits(rows: pd.DataFrame, face: str = "") -> go.Figure:
    """Prefix hit rate of both models, 0 to 100 %, over the LLM's share.

    rows: llm_share, llm_kv_tokens, prm_kv_tokens, engine, value, low, high; rates as fractions.
    """
    fig = make_subplots(rows=1)
    percent = rows.assign(**{column: 100 * rows[column] for column in ("value", "low", "high")})
    for engine in MODELS:
        fig.add_trace(_line(percent, engine, ".1f", " %"))
    share_axes(fig, rows, panels=1)
    fig.update_yaxes(title_text="prompt tokens found cached (%)", range=[0, 103])
    legend_at(fig, "legend", _HITS_FRAME.above(UPPER_AXIS_PX - 4))
    return finish(fig, "Prefix cache hits of both models", _HITS_CAPTION, face, _HITS_FRAME)


def thrashing(rows: pd.DataFrame, face: str = "") -> go.Figure:
    """Thrash events per 1,000 look-ups and thrashed blocks a search, over the LLM's share.

    rows: llm_share, llm_kv_tokens, prm_kv_tokens, engine, metric (events_per_1000 | blocks), value,
    low, high.
    """
    fig = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.08)
    for panel, (metric, form) in enumerate(
        (("events_per_1000", ".2f"), ("blocks", ",.0f")), start=1
    ):
        of_metric = rows[rows["metric"] == metric]
        for engine in MODELS:
            line = _line(of_metric, engine, form, "").update(showlegend=panel == 1)
            fig.add_trace(line, row=panel, col=1)
    share_axes(fig, rows, panels=2)
    fig.update_yaxes(rangemode="tozero")
    fig.update_yaxes(title_text="events per 1,000 look-ups", row=1, col=1)
    fig.update_yaxes(title_text="thrashed blocks per search", row=2, col=1)
    legend_at(fig, "legend", _THRASH_FRAME.above(UPPER_AXIS_PX - 4))
    _say_bound(fig, rows[rows["metric"] == "events_per_1000"])
    return finish(fig, "Thrashing of both models", _THRASH_CAPTION, face, _THRASH_FRAME)


def _say_bound(fig: go.Figure, events: pd.DataFrame) -> None:
    """The bars on zeros are often too short to be seen beside the rest: their bound in words, in
    the legend, where it hides no data.
    """
    zeros = events[events["value"] == 0]
    if len(zeros):
        text = f"open markers: 0, upper bound at most {zeros['high'].max():.2f}"
        marker = {"symbol": "circle-open", "color": GREY, "line": {"width": 1.5}}
        fig.add_trace(legend_note("legend", text, marker), row=1, col=1)


def _line(rows: pd.DataFrame, engine: str, form: str, unit: str) -> go.Scatter:
    """One model's line; a value of exactly zero gets an open marker."""
    style = MODELS[engine]
    own = rows[rows["engine"] == engine].sort_values("llm_share")
    symbols = [style.symbol + ("-open" if value == 0 else "") for value in own["value"]]
    size = {"size": 8, "color": style.colour, "line": {"color": style.colour, "width": 1.5}}
    return go.Scatter(
        x=own["llm_share"],
        y=own["value"],
        error_y=interval(own, style.colour),
        customdata=own[["low", "high"]],
        name=style.label,
        mode="lines+markers",
        line={"color": style.colour, "dash": style.dash, "width": 2},
        marker={"symbol": symbols, **size},
        cliponaxis=False,
        hovertemplate=(
            f"share %{{x:.2f}}: %{{y:{form}}}{unit} (95 %: %{{customdata[0]:{form}}} to "
            f"%{{customdata[1]:{form}}})<extra>{style.label}</extra>"
        ),
    )
