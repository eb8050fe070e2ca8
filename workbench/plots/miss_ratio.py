"""Hits and thrashing over every size of a cache, LRU beside the optimum: policy or size?

One order of cache calls, run at every size. Below the order's own peak of active blocks a scheduler
would change the order: there whole searches are replayed, and the line between them is dashed.
Takes rows made by the experiments.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.theme import BLACK, GREY, MODELS, Frame, finish, legend_at, tokens_text

_FRAME = Frame(panels=430, top=96)
_CAPTION = (
    "Prompt tokens found cached (above) and blocks asked for again after their eviction (below) "
    "over the size of each model's cache, for one order of cache calls; first admissions only. "
    "Thin line: Belady's optimum, which knows the future; no bound where sequences fill equal "
    "blocks at once, since the victim decides whose block others share. Crosses: the whole search "
    "replayed at that size; between those below the order's own peak of active blocks, where a "
    "scheduler changes the order, the line is dashed. Uprights: sizes that some shares of the "
    "memory give."
)


def miss_ratio(rows: pd.DataFrame, face: str = "") -> go.Figure:
    """Hit rate and thrashed blocks of each model over cache sizes.

    rows: engine, tokens (the size), kind (lru | optimum | replay | share), fits, hit_ratio and
    thrashed_per_1000 (of look-ups; missing for the optimum), llm_share (kind share only: a size
    and no point of a curve).
    """
    titles = [f"{style.label}'s cache" for style in MODELS.values()]
    fig = make_subplots(rows=2, cols=2, shared_xaxes=True, vertical_spacing=0.08,
                        horizontal_spacing=0.09, subplot_titles=titles)  # fmt: skip
    for column, engine in enumerate(MODELS, start=1):
        own = rows[rows["engine"] == engine].sort_values("tokens")
        _curves(fig, own, engine, column)
        _replays(fig, own, engine, column)
        _shares(fig, own[own["kind"] == "share"], column)
        fig.update_xaxes(title_text="cache size (tokens)", row=2, col=column)
    fig.update_xaxes(type="log", dtick="D2", tickformat="~s")
    fig.update_yaxes(range=[0, 103], row=1)
    fig.update_yaxes(rangemode="tozero", row=2)
    fig.update_yaxes(title_text="prompt tokens found cached (%)", row=1, col=1)
    fig.update_yaxes(title_text="thrashed blocks per 1,000 look-ups", row=2, col=1)
    legend_at(fig, "legend", _FRAME.above(22))
    return finish(fig, "Is it the policy or the size?", _CAPTION, face, _FRAME)


def _curves(fig: go.Figure, rows: pd.DataFrame, engine: str, column: int) -> None:
    style = MODELS[engine]
    lru, best = (rows[rows["kind"] == kind] for kind in ("lru", "optimum"))
    fits, replays = lru[lru["fits"].astype(bool)], rows[rows["kind"] == "replay"]
    first = fits.head(1)
    below = pd.concat([replays[replays["tokens"] < first["tokens"].min()], first])
    for part, dash, label in ((fits, "solid", f"{style.label}, LRU"), (below, "dash", None)):
        line = {"color": style.colour, "dash": dash, "width": 2.2}
        _add(fig, part, "hit_ratio", 100, line, label, 1, column)
        _add(fig, part, "thrashed_per_1000", 1, line, None, 2, column)
    line = {"color": BLACK, "dash": "solid", "width": 1}
    _add(fig, best, "hit_ratio", 100, line, "optimum" if column == 1 else None, 1, column)


def _replays(fig: go.Figure, rows: pd.DataFrame, engine: str, column: int) -> None:
    own, style = rows[rows["kind"] == "replay"], MODELS[engine]
    marker = {"symbol": "x-thin", "size": 9, "line": {"width": 2, "color": style.colour}}
    name = "whole search replayed"
    for panel, (value, scale) in enumerate((("hit_ratio", 100), ("thrashed_per_1000", 1)), 1):
        points = go.Scatter(
            x=own["tokens"], y=scale * own[value], mode="markers", marker=marker, name=name
        )
        points.update(showlegend=panel == 1 and column == 1 and len(own) > 0)
        fig.add_trace(points, row=panel, col=column)


def _shares(fig: go.Figure, rows: pd.DataFrame, column: int) -> None:
    for tokens, share in rows[["tokens", "llm_share"]].to_numpy(float):
        for panel in (1, 2):
            line = {"color": GREY, "dash": "dot", "width": 1}
            fig.add_vline(tokens, line=line, row=panel, col=column)
        fig.add_annotation(
            x=float(np.log10(tokens)), y=2, text=f"{share:.2f}", showarrow=False, textangle=-90,
            xanchor="right", yanchor="bottom", font={"size": 10, "color": "#555555"},
            row=1, col=column,
        )  # fmt: skip


def _add(
    fig: go.Figure,
    rows: pd.DataFrame,
    value: str,
    scale: float,
    line: dict[str, object],
    label: str | None,
    panel: int,
    column: int,
) -> None:
    hover = [f"{tokens_text(tokens)} tokens" for tokens in rows["tokens"]]
    curve = go.Scatter(
        x=rows["tokens"],
        y=scale * rows[value],
        mode="lines",
        line=line,
        text=hover,
        name=label or "",
        showlegend=label is not None,
        hovertemplate="%{text}: %{y:.1f}<extra></extra>",
    )
    fig.add_trace(curve, row=panel, col=column)
