"""Throughput, hits and thrash over the LLM's share, with the point that the controls stand on.

Lines are estimates, diamonds exact replays, dots a cache too small for the order of calls; earlier
curves stay as ghosts. Takes what what_if_answers.py makes. What it does not do: compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.config import format_size
from workbench.plots.theme import (
    BLACK,
    GREEN,
    GREY,
    MODELS,
    UPPER_AXIS_PX,
    VERMILION,
    Frame,
    finish,
    legend_at,
    legend_note,
    share_axes,
)
from workbench.widgets.what_if_answers import ESTIMATE, Answer
from workbench.widgets.what_if_view import GHOSTS, QUANTITIES, Quantity, View

SHADES = ("#4D4D4D", "#8C8C8C", "#B8B8B8")  # of ghosts, the latest first
TITLES = (
    "generated tokens/s",
    "prompt tokens<br>found cached (%)",
    "thrash events<br>per 1,000 look-ups",
)
CAPTION = (
    "A recorded search at other shares of the memory: generated tokens per second, prompt tokens "
    "found cached at first admission, and thrash events, over the LLM's share. Lines are estimates "
    "from miss-ratio curves and a cost model, dotted where a cache is too small for the order of "
    "calls; diamonds and squares with a black edge are exact replays; the ring is the chosen share."
)
Points = tuple[list[Any], list[Any], Mapping[str, Any]]
"""Of one trace: x, y, and what else of it changes."""
_FRAME = Frame(panels=480, top=84 + UPPER_AXIS_PX, left=80)


def share_figure(view: View, marked: bool = True) -> go.Figure:
    """The figure of a view. marked: whether it says itself what kind of answer it shows."""
    fig = make_subplots(rows=3, shared_xaxes=True, vertical_spacing=0.06)
    for quantity in QUANTITIES:
        for key, line in _lines(quantity):
            fig.add_trace(line.update(meta=key), row=quantity.panel, col=1)
    for trace in _notes():
        fig.add_trace(trace, row=1, col=1)
    for panel, title in enumerate(TITLES, start=1):
        fig.update_yaxes(title_text=title, rangemode="tozero", row=panel, col=1)
    fig.update_yaxes(range=[0, 103], row=2, col=1)
    legend_at(fig, "legend", _FRAME.above(UPPER_AXIS_PX - 4))
    drawn = view.curve if len(view.curve) else pd.DataFrame([view.answer.row()])
    share_axes(fig, drawn, panels=3)
    finish(fig, "What if the memory were split there?", CAPTION, view.face, _FRAME)
    _place(fig, view)
    if marked:
        fig.add_annotation(**mark_above(_FRAME.top - 30, view.answer))
    return fill(fig, view)


def fill(fig: Any, view: View, before: View | None = None) -> Any:
    """Put a view's points into a figure of this kind; answers it. Axes stay, and a mark.

    before: what it shows now, so that only what differs is sent to a browser.
    """
    points = {key: found for part in _parts(view, before) for key, found in part(view)}
    put(fig, points)
    return fig


def move_rings(fig: Any, view: View) -> None:
    """The chosen point alone."""
    put(fig, dict(_rings(view)))


def fill_ghosts(fig: Any, view: View) -> None:
    """Pinned curves alone: the rest stays."""
    put(fig, dict(_ghosts(view)))


def put(fig: Any, points: Mapping[str, Points]) -> None:
    """Points into the traces whose keys they have."""
    for trace in fig.data:
        if trace.meta in points:
            x, y, shown = points[trace.meta]
            trace.update(x=x, y=y, **shown)


def reframe(fig: Any, view: View) -> Any:
    """The same for a view of another memory or recording, whose axes differ; answers the figure."""
    other = share_figure(view, marked=False)
    names = ("xaxis", "xaxis2", "xaxis3", "xaxis9", "shapes")
    fig.update_layout({name: other.layout[name] for name in names}, overwrite=True)
    take_face(fig, other)
    return fill(fig, view)


def take_face(fig: Any, other: go.Figure) -> None:
    """Another figure's words, and the room they need."""
    names = ("annotations", "meta", "height", "margin")
    fig.update_layout({name: other.layout[name] for name in names}, overwrite=True)


def mark_above(px: float, answer: Answer) -> dict[str, Any]:
    """The mark as an annotation, so many px above the first panel."""
    text, colour = mark(answer)
    place = {"x": 1, "y": 1, "xanchor": "right", "yanchor": "bottom", "yshift": px}
    look = {"text": f"<b>{text}</b>", "font": {"color": colour, "size": 13}, "showarrow": False}
    return {"name": "mark", "xref": "paper", "yref": "paper"} | place | look


def mark(answer: Answer | None) -> tuple[str, str]:
    """What stands above a figure, and its colour: an estimate, or an exact replay and how long it
    took; None: of another place of the controls.
    """
    if answer is None:
        return "NOT YET KNOWN (drawn is the last one)", GREY
    if answer.kind == ESTIMATE:
        return "ESTIMATE", VERMILION
    return f"EXACT REPLAY ({answer.took_s:.1f} s)", GREEN


def _lines(quantity: Quantity) -> Iterator[tuple[str, go.Scatter]]:
    """Empty traces by key: ghosts below, then line, dots, replays and ring."""
    name, first = quantity.column, quantity.panel < 3
    for place in reversed(range(GHOSTS)):
        colour = SHADES[place] if quantity.model is None else MODELS[quantity.model].soft
        line = {"color": colour, "dash": quantity.dash, "width": 1.5}
        ghost = go.Scatter(mode="lines", line=line, showlegend=False, legendrank=2000)
        yield f"{name}/ghost{place}", ghost
    base = {"color": quantity.colour, "dash": quantity.dash, "width": 2}
    legend = quantity.panel == 2 or (quantity.model is None and first)
    yield (
        f"{name}/line",
        go.Scatter(mode="lines", line=base, name=quantity.label, showlegend=legend),
    )
    dots = {**base, "dash": "dot", "width": 1.5}
    yield f"{name}/dots", go.Scatter(mode="lines", line=dots, showlegend=False)
    edge = {"color": BLACK, "width": 1}
    marker = {"symbol": quantity.symbol, "color": quantity.colour, "size": 8, "line": edge}
    yield f"{name}/exact", _markers(marker)
    ring = {"symbol": "circle-open", "size": 17, "color": BLACK, "line": {"width": 2.5}}
    yield f"{name}/ring", _markers(ring)


def _markers(marker: Mapping[str, Any]) -> go.Scatter:
    return go.Scatter(mode="markers", marker=marker, showlegend=False, cliponaxis=False)


def _notes() -> Iterator[go.Scatter]:
    ring = {"symbol": "circle-open", "color": BLACK, "line": {"width": 2}}
    exact = {"symbol": "diamond", "color": "white", "line": {"color": BLACK, "width": 1.5}}
    yield legend_note("legend", "the chosen share", ring)
    yield legend_note("legend", "exact replay", exact)
    yield go.Scatter(
        x=[None],
        y=[None],
        mode="lines",
        line={"color": GREY, "dash": "dot", "width": 1.5},
        name="order of calls would change",
        hoverinfo="skip",
    )


Part = Callable[[View], Iterator[tuple[str, Points]]]


def _parts(view: View, before: View | None) -> list[Part]:
    """What has to be drawn again."""
    parts: list[Part] = [_rings]
    if before is None or before.curve is not view.curve:
        parts.append(_curves)
    if before is None or before.replays is not view.replays:
        parts.append(_replays)
    if before is None or before.ghosts is not view.ghosts:
        parts.append(_ghosts)
    return parts


def _rings(view: View) -> Iterator[tuple[str, Points]]:
    row = pd.DataFrame([view.answer.row()])
    for quantity in QUANTITIES:
        yield f"{quantity.column}/ring", (*_xy(row, quantity), {})


def _curves(view: View) -> Iterator[tuple[str, Points]]:
    for quantity in QUANTITIES:
        yield f"{quantity.column}/line", (*_xy(view.curve, quantity, fits=True), {})
        yield f"{quantity.column}/dots", (*_xy(view.curve, quantity, fits=False), {})


def _replays(view: View) -> Iterator[tuple[str, Points]]:
    for quantity in QUANTITIES:
        yield f"{quantity.column}/exact", (*_xy(view.replays, quantity), {})


def _ghosts(view: View) -> Iterator[tuple[str, Points]]:
    ghosts = [*view.ghosts, *[None] * GHOSTS][:GHOSTS]
    for quantity in QUANTITIES:
        for place, ghost in enumerate(ghosts):
            curve = pd.DataFrame() if ghost is None else ghost.curve
            named = ghost is not None and quantity.model is None
            shown = {"name": ghost.name if ghost else "", "showlegend": named}
            yield f"{quantity.column}/ghost{place}", (*_xy(curve, quantity), shown)


def _xy(
    rows: pd.DataFrame, quantity: Quantity, fits: bool | None = None
) -> tuple[list[Any], list[Any]]:
    """Places and values; gaps where the cache fits, or does not. The two kinds of line touch."""
    if not len(rows):
        return [], []
    rows = rows.sort_values("llm_share")
    values = rows[quantity.column].astype(float) * quantity.scale
    if fits is not None:
        names = [quantity.model] if quantity.model else list(MODELS)
        holds = rows[[f"{name}_fits" for name in names]].astype(bool).all(axis=1)
        wanted = (
            holds
            if fits
            else ~holds | ~holds.shift(1, fill_value=True) | ~holds.shift(-1, fill_value=True)
        )
        values = values.where(wanted)
    plain = [None if pd.isna(value) else value for value in values.tolist()]
    return rows["llm_share"].tolist(), plain


def _place(fig: go.Figure, view: View) -> None:
    """The grey ends, and what lacks there."""
    found = view.feasible
    low, high = max(found.low, 0.0), min(found.high, 1.0)
    reach = (max(low - 0.07, 0.0), min(high + 0.07, 1.0))
    fig.update_xaxes(range=list(reach))
    for start, end, lacks, who in (
        (reach[0], low, found.at(reach[0]).lacks("llm"), "LLM"),
        (high, reach[1], found.at(reach[1]).lacks("prm"), "PRM"),
    ):
        if end > start:
            fig.add_shape(_grey(start, end))
            fig.add_annotation(**_lack((start + end) / 2, f"{who} lacks {format_size(lacks)}"))


def _grey(start: float, end: float) -> dict[str, Any]:
    fill_ = {"fillcolor": "#D9D9D9", "opacity": 0.6, "line": {"width": 0}, "layer": "below"}
    return {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": start,
        "x1": end,
        "y0": 0,
        "y1": 1,
    } | fill_


def _lack(x: float, text: str) -> dict[str, Any]:
    look = {"textangle": -90, "showarrow": False, "font": {"size": 11, "color": "#444444"}}
    return {"x": x, "y": 0.5, "xref": "x", "yref": "paper", "text": text} | look
