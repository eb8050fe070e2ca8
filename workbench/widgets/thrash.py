"""A slider over the measured shares of notebook 06: what thrashed there, and what that cost.

The ring stands on measured shares only. The numbers come from `thrash_readings`, a plain function;
the slider has a label, a typed twin and a sentence. What it does not do: run anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from workbench.plots import thrashing
from workbench.plots.theme import BLACK, MODELS
from workbench.widgets.plot import PlotWidget
from workbench.widgets.split import NOT_LIVE, is_live, nearest_share, reading

METRICS = ("events_per_1000", "blocks")
AGAIN = "recomputed_evicted"  # the part of lost_time that evictions cost


def thrash_readings(rows: pd.DataFrame, lost: pd.DataFrame) -> pd.DataFrame:
    """One row a share: events_per_1000 and blocks of each model, again_s, wall_s.

    rows: of plots.thrashing; lost: of plots.lost_time. again_s: seconds a search spends on what was
    evicted.
    """
    wide = rows.pivot_table(index="llm_share", columns=["engine", "metric"], values="value")
    wide.columns = ["_".join(pair) for pair in wide.columns.to_list()]
    again = lost[lost["part"] == AGAIN].groupby("llm_share")["seconds"].sum()
    walls = lost.groupby("llm_share")["wall_s"].first()
    wide["again_s"] = again.reindex(wide.index).fillna(0.0)
    return wide.assign(wall_s=walls).reset_index()


def in_words(readings: pd.DataFrame, share: float) -> str:
    """One sentence that says what the rings stand on."""
    row = reading(readings, share)
    return (
        f"At a share of {nearest_share(readings, share):.2f}: of 1,000 look-ups "
        f"{row['llm_events_per_1000']:.1f} of the LLM's and {row['prm_events_per_1000']:.1f} of "
        f"the PRM's ask for a block that was evicted; {row['llm_blocks']:,.0f} and "
        f"{row['prm_blocks']:,.0f} blocks a search are lost so. Computing them again takes "
        f"{row['again_s']:.2f} of {row['wall_s']:.2f} s ({row['again_s'] / row['wall_s']:.1%})."
    )


def thrash_figure(
    rows: pd.DataFrame, readings: pd.DataFrame, share: float, face: str = ""
) -> go.Figure:
    """The thrashing figure with a ring a line at a share."""
    fig = thrashing(rows, face)
    for panel, metric in enumerate(METRICS, start=1):
        for model in MODELS:
            fig.add_trace(_ring(f"{model}_{metric}"), row=panel, col=1)
    return move_rings(fig, readings, share)


def move_rings(fig: Any, readings: pd.DataFrame, share: float) -> Any:
    """Move the rings of a thrash_figure; answers it."""
    row, place = reading(readings, share), nearest_share(readings, share)
    for trace in fig.data:
        if trace.meta in row.index:
            trace.update(x=[place], y=[float(row[trace.meta])])
    return fig


def thrash_slider(
    rows: pd.DataFrame,
    lost: pd.DataFrame,
    face: str = "",
    share: float | None = None,
    **parameters: Any,
) -> Any:
    """The slider in a live notebook, elsewhere what it would say.

    share: where it starts, the largest one by default. parameters: of
    notebooks/06_cache_thrashing.ipynb.
    """
    readings = thrash_readings(rows, lost)
    start = readings["llm_share"].max() if share is None else share
    if not is_live():
        return f"{in_words(readings, start)} {NOT_LIVE}"
    return build_thrash(rows, readings, start, face, parameters)


def build_thrash(
    rows: pd.DataFrame,
    readings: pd.DataFrame,
    start: float,
    face: str = "",
    parameters: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """The widget itself, wherever it is."""
    from workbench.widgets import parts  # noqa: PLC0415  an optional extra
    from workbench.widgets.footing import Footing  # noqa: PLC0415

    shares = [float(share) for share in readings["llm_share"]]
    share = parts.Dial("LLM share of total memory", shares, start, "{:.2f}")
    fig = PlotWidget(thrash_figure(rows, readings, share.value, face))
    footing = Footing(
        "06_cache_thrashing",
        "thrash_slider",
        parameters,
        lambda: (thrash_figure(rows, readings, share.value, face), readings),
    )

    def move(value: float) -> None:
        with fig.batch_update():
            move_rings(fig, readings, value)
        footing.say(in_words(readings, value), slider_share=value)

    share.observe(move)
    move(share.value)
    return parts.column([share.box, footing.words, fig, footing.tools])


def _ring(key: str) -> go.Scatter:
    ring = {"symbol": "circle-open", "size": 18, "color": BLACK, "line": {"width": 2.5}}
    return go.Scatter(
        mode="markers",
        marker=ring,
        meta=key,
        showlegend=False,
        cliponaxis=False,
        hoverinfo="skip",
    )
