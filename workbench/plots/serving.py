"""What clients of a server wait for: over their number, and over the split of its memory."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots import theme
from workbench.plots.theme import Frame, Style, finish, legend_at, series

SECONDS = {"ttft": ("first token", theme.BLUE), "e2e": ("whole answer", theme.PURPLE)}
PERCENTILES = {"p50": ("median", "solid", "circle"), "p95": ("95th percentile", "dash", "square")}
ARRIVALS = {
    "closed": Style("clients that ask anew", theme.BLACK),
    "poisson": Style("arriving by chance", theme.ORANGE, symbol="diamond"),
}
_LOAD_CAPTION = (
    "One served model. Above: generated tokens/s over the clients that ask at a time, each anew "
    "once it has its answer. Below left: what they wait for. Below right: requests inside the "
    "server, running or waiting, as its own metrics count them, against the rate at which they are "
    "served times the seconds that each is inside as its client sees it; by Little's law both are "
    "equal, and points lie on the line."
)
_SPLIT_CAPTION = (
    "Two served models that share one memory, both asked at once, the same load under each split. "
    "Left: generated tokens/s. Right: 95th percentile of the seconds until the first token."
)


def serving_load(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Throughput, latency and Little's law over load.

    rows: arrivals (closed | poisson), clients, tokens_per_s, ttft_p50, ttft_p95, e2e_p50, e2e_p95,
    inside, little.
    """
    fig = theme.one_above_two(vertical_spacing=0.25, row_heights=[0.45, 0.55])
    closed = rows[rows["arrivals"] == "closed"].sort_values("clients")
    rate, style = closed.assign(value=closed["tokens_per_s"]), ARRIVALS["closed"]
    line = series(rate, "clients", style, "%{x} clients: %{y:,.0f} tokens/s", showlegend=False)
    fig.add_trace(line, row=1, col=1)
    for name, (label, colour) in SECONDS.items():
        for share, (kind, dash, symbol) in PERCENTILES.items():
            own = closed.assign(value=closed[f"{name}_{share}"])
            style = Style(f"{label}, {kind}", colour, dash, symbol)
            line = series(own, "clients", style, "%{x} clients: %{y:.3g} s", legend="legend")
            fig.add_trace(line, row=2, col=1)
    both = rows[["inside", "little"]].to_numpy()
    ends = [both.min() / 1.3, both.max() * 1.3]
    line = theme.capacity(ends, ends, "Little's law", legend="legend2", hoverinfo="skip")
    fig.add_trace(line, row=2, col=2)
    for name, style in ARRIVALS.items():
        own = rows[rows["arrivals"] == name]
        own, hover = own.assign(value=own["inside"]), "%{x:.1f} expected: %{y:.1f} inside"
        dots = series(own, "little", style, hover, mode="markers", legend="legend2")
        fig.add_trace(dots, row=2, col=2)
    counts = theme.log_axis(closed["clients"].tolist(), 0.1)
    fig.update_xaxes(title_text="clients at a time", **counts, col=1)
    fig.update_yaxes(title_text="generated tokens/s", rangemode="tozero", row=1, col=1)
    fig.update_yaxes(type="log", dtick="D2", title_text="seconds", row=2, col=1)
    fig.update_xaxes(type="log", dtick=1, title_text="rate times time inside", row=2, col=2)
    fig.update_yaxes(type="log", dtick=1, title_text="requests inside", row=2, col=2)
    for name, x in (("legend", 0), ("legend2", 0.57)):
        legend_at(fig, name, 0.42)
        fig.update_layout({name: {"orientation": "v", "x": x, "font": {"size": 10}}})
    return finish(fig, "What clients wait for", _LOAD_CAPTION, provenance, Frame(560, top=40))


def serving_split(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Two models' throughput and waiting over the first one's share of the KV memory.

    rows: share, model, clients, tokens_per_s, ttft_p95.
    """
    fig = make_subplots(cols=2, horizontal_spacing=0.16)
    panels = {"tokens_per_s": "generated tokens/s", "ttft_p95": "first token, 95th percentile (s)"}
    for column, (name, title) in enumerate(panels.items(), 1):
        for model, style in zip(map(str, rows["model"].unique()), theme.MODELS.values()):
            own = rows[rows["model"] == model]
            told = f"{model.removeprefix('dummy:')}{', random weights' * ('dummy:' in model)}"
            named = replace(style, label=f"{told}: {own['clients'].iloc[0]} clients")
            own = own.assign(value=own[name], share=100 * own["share"]).sort_values("share")
            line = series(own, "share", named, "%{x:.0f} %: %{y:.3g}", showlegend=column == 1)
            fig.add_trace(line, row=1, col=column)
        fig.update_yaxes(title_text=title, rangemode="tozero", row=1, col=column)
    shares = sorted(100 * rows["share"].unique())
    fig.update_xaxes(title_text="first model's share of memory (%)", tickvals=shares)
    return finish(fig, "Two models in one memory", _SPLIT_CAPTION, provenance, Frame(panels=300))
