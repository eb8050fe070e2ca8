"""The ladder of the thesis's modifications (section 5.3): what each switch gains, and what sampling
to the end at the depth limit does to accuracy.

Takes the rows the experiments make (one a rung and metric, one a depth limit) and draws them.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.theme import (
    BLACK,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    Frame,
    finish,
    interval,
    legend_at,
)

BESIDE = "static_requests"  # the rung that is compared with the last
PANELS = {  # metric: (axis title, colour)
    "problems_per_min": ("problems/min", GREEN),
    "tokens_per_s": ("generated tokens/s", BLACK),
    "accuracy": ("accuracy", ORANGE),
}
FINISHING = {  # metric: (label, colour, dash, symbol)
    "finishes": ("sampled to the end", PURPLE, "solid", "diamond"),
    "stops": ("stopped, unfinished", BLACK, "dash", "circle"),
}
_HATCHED = {"fillmode": "overlay", "fgcolor": "white", "size": 7, "solidity": 0.35}
_FRAME = Frame(panels=620, left=182, top=44)
_FOOT, _HEAD = 0.46, 0.26  # of the drawing: the ladder above, the depth limits below
_CAPTION = (
    "The thesis's modifications (section 5.3), each rung the one before with one more switch, and "
    "hatched the last rung with the LLM's requests in static, padded batches. Numbers on the bars: "
    "how many times the problems/min of the rung before (hatched: of the last; problem batching: "
    "over a longer queue, since of few problems the last ones drain). Bars reach over 95 "
    "% intervals, bootstrap over problems with the machine's noise. Tokens/s counts tokens sampled "
    "to the end too, so rungs that differ in it compare by problems/min. Below: accuracy of the "
    "last two rungs at several depth limits, the same problems and seeds."
)


def modifications(rows: pd.DataFrame, face: str = "") -> go.Figure:
    """Problems/min, tokens/s and accuracy of every rung; accuracy over the depth limit below.

    rows: rung, label, metric (those of PANELS, gain, and those of FINISHING), value, low, high,
    max_depth.
    """
    specs = [[{}, {}, {}], [{"colspan": 3}, None, None]]
    fig = make_subplots(2, 3, specs=specs, shared_yaxes=True, column_widths=[0.46, 0.27, 0.27])
    rungs = rows[rows["metric"].isin(PANELS)]
    order = list(rungs.drop_duplicates("rung")["rung"])
    for column, metric in enumerate(PANELS, start=1):
        _bars(fig, rungs[rungs["metric"] == metric], metric, order, column)
    gains = rows[rows["metric"] == "gain"].set_index("rung")
    _say_gains(fig, rungs[rungs["metric"] == "problems_per_min"], gains, order)
    _rung_axes(fig, rungs, order)
    _limits(fig, rows[rows["metric"].isin(FINISHING)])
    title = "Modifications of the baseline, one after another"
    return finish(fig, title, _CAPTION, face, _FRAME)


def _bars(fig: go.Figure, rows: pd.DataFrame, metric: str, order: list[str], column: int) -> None:
    title, colour = PANELS[metric]
    bars = interval(rows, BLACK if colour != BLACK else GREY)
    patterns = ["/" if rung == BESIDE else "" for rung in rows["rung"]]
    bar = go.Bar(
        x=rows["value"],
        y=[order.index(rung) for rung in rows["rung"]],
        error_x=bars,
        orientation="h",
        width=0.5,
        customdata=rows[["low", "high"]],
        name=title,
        showlegend=False,
        marker={"color": colour, "pattern": {"shape": patterns, **_HATCHED}},
        hovertemplate="%{x:,.2f} (95 %: %{customdata[0]:,.2f} to %{customdata[1]:,.2f})<extra>"
        + title
        + "</extra>",
    )
    fig.add_trace(bar, row=1, col=column)


def _say_gains(fig: go.Figure, rates: pd.DataFrame, gains: pd.DataFrame, order: list[str]) -> None:
    """The factor over the rung before, right of each bar and its interval."""
    own = rates[rates["rung"].isin(gains.index)]
    ends = np.where(np.isfinite(own["high"]), own["high"], own["value"])
    for rung, end in zip(own["rung"], ends, strict=True):
        text = f"×{gains.loc[rung, 'value']:.2f}"
        place = {"x": float(end), "y": order.index(rung), "xref": "x", "yref": "y"}
        fig.add_annotation(text=text, showarrow=False, xanchor="left", xshift=5, **place)


def _rung_axes(fig: go.Figure, rungs: pd.DataFrame, order: list[str]) -> None:
    labels = rungs.drop_duplicates("rung").set_index("rung")["label"]
    places = {"tickmode": "array", "tickvals": list(range(len(order))), "showgrid": False}
    for column, (metric, (title, _)) in enumerate(PANELS.items(), start=1):
        own = rungs[rungs["metric"] == metric]
        highest = float(np.nanmax([own["value"], own["high"].where(np.isfinite(own["high"]))]))
        room = 1.32 if metric == "problems_per_min" else 1.05
        reach = 1.05 if metric == "accuracy" else room * highest
        fig.update_xaxes(title_text=title, range=[0, reach], nticks=4, row=1, col=column)
        fig.update_yaxes(**places, range=[len(order) - 0.5, -0.5], row=1, col=column)
        fig.update_yaxes(domain=[_FOOT, 1], row=1, col=column)
    fig.update_yaxes(ticktext=[labels[rung] for rung in order], row=1, col=1)
    fig.update_yaxes(ticks="", row=1, col=1)


def _limits(fig: go.Figure, rows: pd.DataFrame) -> None:
    limits = sorted(int(limit) for limit in rows["max_depth"].unique())
    for shift, (metric, (label, colour, dash, symbol)) in zip((-0.04, 0.04), FINISHING.items()):
        own = rows[rows["metric"] == metric].sort_values("max_depth")
        line = go.Scatter(
            x=[limits.index(limit) + shift for limit in own["max_depth"]],
            y=own["value"],
            error_y=interval(own, colour),
            name=label,
            mode="lines+markers",
            line={"color": colour, "dash": dash, "width": 2},
            marker={"symbol": symbol, "size": 9, "color": colour},
            cliponaxis=False,
            hovertemplate="accuracy %{y:.2f}<extra>" + label + "</extra>",
        )
        fig.add_trace(line, row=2, col=1)
    ticks = {"tickvals": list(range(len(limits))), "ticktext": [f"{limit}" for limit in limits]}
    reach = [-0.5, len(limits) - 0.5]
    title = "depth limit: reasoning steps a beam may have"
    fig.update_xaxes(title_text=title, range=reach, **ticks, row=2, col=1)
    fig.update_yaxes(title_text="accuracy", range=[0, 1.05], domain=[0, _HEAD], row=2, col=1)
    legend_at(fig, "legend", _HEAD + 0.01)
