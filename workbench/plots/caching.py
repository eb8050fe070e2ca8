"""How well prefixes are remembered: hit rates and thrashing over the split (thesis, figures 6.6 and
6.7), and over every size of a cache, where LRU stands beside the optimum.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots import theme
from workbench.plots.theme import MODELS, Frame, finish, say, series

RATES = {"hit_ratio": 100, "thrashed_per_1000": 1}  # of the upper and lower panels, their scale
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
        fig.add_trace(_line(theme.in_percent(rows), engine, ".1f", " %"))
    theme.share_axes(fig, rows, panels=1)
    fig.update_yaxes(title_text="prompt tokens found cached (%)", range=[0, 103])
    frame = Frame(panels=320, **theme.OVER_SHARES)
    return finish(fig, "Prefix cache hits of both models", _HITS_CAPTION, provenance, frame)


def thrashing(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Thrash events per 1,000 look-ups and thrashed blocks a search, over the LLM's share.

    rows: llm_share, llm_kv_tokens, prm_kv_tokens, engine, metric (events_per_1000 | blocks), value,
    low, high.
    """
    fig = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.08)
    events, blocks = (rows[rows["metric"] == metric] for metric in ("events_per_1000", "blocks"))
    for engine in MODELS:
        fig.add_trace(_line(events, engine, ".2f", ""), row=1, col=1)
        fig.add_trace(_line(blocks, engine, ",.0f", "").update(showlegend=False), row=2, col=1)
    theme.share_axes(fig, rows, panels=2)
    fig.update_yaxes(rangemode="tozero")
    fig.update_yaxes(title_text="events per 1,000 look-ups", row=1, col=1)
    fig.update_yaxes(title_text="thrashed blocks per search", row=2, col=1)
    zeros = events[events["value"] == 0]
    if len(zeros):  # their bars are often too short to be seen: the bound is in the legend
        text = f"open markers: 0, upper bound at most {zeros['high'].max():.2f}"
        marker = {"symbol": "circle-open", "color": theme.GREY, "line": {"width": 1.5}}
        fig.add_trace(theme.legend_note("legend", text, marker), row=1, col=1)
    frame = Frame(panels=470, **theme.OVER_SHARES)
    return finish(fig, "Thrashing of both models", _THRASH_CAPTION, provenance, frame)


def _line(rows: pd.DataFrame, engine: str, form: str, unit: str) -> go.Scatter:
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
    return series(own, "llm_share", style, hover, customdata=bounds, marker=marker)


def miss_ratio(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Hit rate and thrashed blocks of each model over cache sizes.

    rows: engine, tokens (the size), kind (lru | optimum | replay | share), fits, hit_ratio and
    thrashed_per_1000 (of look-ups; missing for the optimum), llm_share (kind share only: a size
    and no point of a curve). Sizes that do not fit the order are those below its own peak of active
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
    frame = Frame(panels=430, top=96, legend=22)
    return finish(fig, "Is it the policy or the size?", _SIZES_CAPTION, provenance, frame)


def _sizes(fig: go.Figure, rows: pd.DataFrame, engine: str, column: int) -> None:
    """One model's curves: LRU, dashed below the sizes that fit, the optimum, and replays."""
    style = MODELS[engine]
    lru, best, replays = (rows[rows["kind"] == kind] for kind in ("lru", "optimum", "replay"))
    fits = lru[lru["fits"].astype(bool)]
    first = fits.head(1)
    below = pd.concat([replays[replays["tokens"] < first["tokens"].min()], first])
    curves = [
        (fits, f"{style.label}, LRU", {"color": style.colour, "dash": "solid", "width": 2.2}),
        (below, "", {"color": style.colour, "dash": "dash", "width": 2.2}),
        (best, "optimum", {"color": theme.BLACK, "dash": "solid", "width": 1}),
    ]
    for panel, (value, scale) in enumerate(RATES.items(), start=1):
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
