"""Figures of the replayed rung, told apart at a glance: a tinted ground, a badge, other dashes.

`as_replayed` makes any of the study's figures one of them; the model's colours and markers stay.
`rungs` lays the rungs over each other, each as a share of its own best. Draws no data of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import plotly.graph_objects as go

from workbench.plots.theme import BLACK, GREY, VERMILION, Frame, finish, interval, legend_at

Draw = Callable[..., go.Figure]
GROUND = "#F3EFE4"
BADGE = "REPLAYED, not measured"
DASHES = {"solid": "dot", "dash": "dashdot", "dot": "longdashdot", None: "dot"}
MEASURED_STYLE = {"color": BLACK, "dash": "solid", "symbol": "circle"}
REPLAYED_STYLE = {"color": VERMILION, "dash": "dot", "symbol": "diamond-open"}
_FRAME = Frame(panels=300)
_CAPTION = (
    "Generated tokens a second against the LLM's share of total memory, each rung as a share of "
    "its own best. Bars: 95 % intervals of the rate over problems. Shares of a rung that differ by "
    "less than its intervals are of one rank."
)


def as_replayed(draw: Draw, rung: str = "replayed 1B + 8B") -> Draw:
    """The same figure for rows of the replayed rung."""

    def drawn(rows: pd.DataFrame, face: str = "") -> go.Figure:
        return mark_replayed(draw(rows, face), rung)

    return drawn


def mark_replayed(fig: go.Figure, rung: str) -> go.Figure:
    """`fig` as a figure of a rung that nobody measured: ground, badge, dashes, title, caption."""
    fig.update_layout(plot_bgcolor=GROUND)
    title = fig.layout.title.text.replace("</b>", f"</b> ({rung})")
    meta = dict(fig.layout.meta)
    meta["caption"] = f"{rung[0].upper()}{rung[1:]}, not measured. {meta['caption']}"
    fig.update_layout(title_text=title, meta=meta)
    for trace in fig.data:
        area = trace.type != "scatter" or trace.stackgroup or trace.fill
        if not area and "lines" in (trace.mode or ""):
            trace.line.dash = DASHES.get(trace.line.dash, "dot")
    fig.add_annotation(
        text=f"<b>{BADGE}</b>",
        xref="paper",
        yref="paper",
        x=1,
        y=1,
        xanchor="right",
        yanchor="bottom",
        yshift=fig.layout.margin.t - 34,  # beside the title, where no figure draws
        showarrow=False,
        bgcolor=GROUND,
        bordercolor=GREY,
        font={"size": 11},
    )
    return fig


def rungs(rows: pd.DataFrame, face: str = "") -> go.Figure:
    """Throughput over the split on several rungs, each over its own best.

    rows: rung, replayed (whether nobody measured it), llm_share, value, low, high; 1 is the best.
    """
    fig = go.Figure()
    for rung, own in rows.groupby("rung", sort=False):
        style = REPLAYED_STYLE if bool(own["replayed"].iloc[0]) else MEASURED_STYLE
        fig.add_trace(_line(own.sort_values("llm_share"), str(rung), style))
    fig.update_xaxes(title_text="LLM share of total memory (the PRM has the rest)")
    fig.update_yaxes(title_text="tokens/s over the rung's best (%)", rangemode="tozero")
    legend_at(fig, "legend", _FRAME.above(4))
    return finish(fig, "Do the rungs agree on the split?", _CAPTION, face, _FRAME)


def _line(rows: pd.DataFrame, rung: str, style: dict[str, str]) -> go.Scatter:
    percent = rows.assign(**{name: 100 * rows[name] for name in ("value", "low", "high")})
    return go.Scatter(
        x=percent["llm_share"],
        y=percent["value"],
        error_y=interval(percent, style["color"]),
        name=rung,
        mode="lines+markers",
        line={"color": style["color"], "dash": style["dash"], "width": 2},
        marker={"symbol": style["symbol"], "size": 9, "color": style["color"]},
        hovertemplate="share %{x:.2f}: %{y:.1f} % of the best<extra>" + rung + "</extra>",
    )
