"""Two figures of one plot function in one: the second dotted and hatched, over the first.

Both keep their colours, which mean models and parts; the legend says once how the two are told
apart. What it does not do: make the figures (explorer_figures.py).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from workbench.plots.theme import FACE, GREY, legend_note, wrapped

ROOMS = ["llm_share", "llm_kv_tokens", "prm_kv_tokens"]
_UPPER_AXIS = "x9"  # theme.share_axes draws an empty trace there, so that plotly shows the axis
_LINE_PX, _FACE_CHARACTERS = 15, 135  # as theme.finish writes the face
_LEGEND_PX = 20  # one line of a legend more


def aligned(a: pd.DataFrame, b: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Both with the other's shares among their rows, so that they are drawn along one axis."""
    if not set(ROOMS) <= set(a.columns):
        return a, b
    return _with_shares(a, b), _with_shares(b, a)


def _with_shares(rows: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    missing = other.loc[~other["llm_share"].isin(rows["llm_share"]), ROOMS]
    return pd.concat([rows, missing.drop_duplicates("llm_share")], ignore_index=True)


def overlaid(
    a: go.Figure, b: go.Figure, faces: tuple[str, str], shares: Sequence[float | None]
) -> go.Figure:
    """Both in one figure, with what was measured of both below.

    shares: at which each was drawn, None for all. Both must come of one plot function, so that
    their axes have the same names.
    """
    figure, second = copy.deepcopy(a), copy.deepcopy(b)
    for trace in figure.data:
        trace.update(hoverlabel={"namelength": -1})
        if trace.type == "bar":
            trace.update(offsetgroup="A", width=None)
    for trace in second.data:
        if trace.xaxis != _UPPER_AXIS and not _is_note(trace):
            figure.add_trace(_as_second(trace))
    for shape in second.layout.shapes:
        figure.add_shape({**shape.to_plotly_json(), "opacity": 0.10})
    _widen(figure, second)
    _say_which(figure, shares)
    _say_faces(figure, faces)
    return figure


def _is_note(trace: Any) -> bool:
    """An entry of the legend that draws nothing."""
    return trace.type == "scatter" and tuple(trace.x or ()) == (None,)


def _as_second(trace: Any) -> Any:
    """Dotted or hatched; its name is seen when it is pointed at."""
    trace.update(showlegend=False, name=f"B: {trace.name}", opacity=0.75)
    if trace.type == "bar":
        pattern = {"shape": "/", "size": 6, "solidity": 0.45}
        trace.update(offsetgroup="B", width=None, marker={"pattern": pattern})
    elif trace.type == "scatter":
        trace.line.dash = "dot"
        trace.marker.symbol = _dotted(trace.marker.symbol)
        if trace.stackgroup:  # areas would hide the first's: their upper edges alone
            trace.update(stackgroup=f"{trace.stackgroup} B", fillcolor="rgba(0,0,0,0)", opacity=1)
            trace.line.width = 1.8
        if trace.fill == "tozeroy":
            trace.fill = "none"
    return trace


def _dotted(symbol: Any) -> Any:
    """The variant of a marker's symbol that has a dot in it, or of each."""
    if symbol is None or isinstance(symbol, str):
        return symbol and f"{symbol.removesuffix('-open')}-open-dot"
    return [_dotted(each) for each in symbol]


def _widen(figure: go.Figure, other: go.Figure) -> None:
    """Axes that both have reach as far as either."""
    for name, axis in other.layout.to_plotly_json().items():
        if name.startswith(("xaxis", "yaxis")) and axis.get("range"):
            own = figure.layout[name].range
            if own is not None:
                (low, high), (least, most) = own, axis["range"]
                figure.layout[name].range = [min(low, least), max(high, most)]


def _say_which(figure: go.Figure, shares: Sequence[float | None]) -> None:
    """Two entries in the first legend, and room for their line; a title without A's share."""
    looks = (("A: solid", "circle"), ("B: dotted, hatched", "circle-open-dot"))
    for (text, symbol), share in zip(looks, shares, strict=True):
        where = "" if share is None else f", share {share:.2f}"
        figure.add_trace(legend_note("legend", f"{text}{where}", {"symbol": symbol, "color": GREY}))
    title = str(figure.layout.title.text)
    figure.layout.title.text = re.sub(r" at an LLM share of [0-9.]+", "", title)
    figure.layout.height += _LEGEND_PX
    figure.layout.margin.t += _LEGEND_PX


def _say_faces(figure: go.Figure, faces: tuple[str, str]) -> None:
    """Both faces where one stood; lines that both have stand once."""
    first, second = (face.splitlines() for face in faces)
    shared = [line for line in first if line in second]
    lines = [f"A: {line}" for line in first if line not in shared]
    lines += [f"B: {line}" for line in second if line not in shared]
    text = "\n".join([*lines, *shared])
    (note,) = (each for each in figure.layout.annotations if each.name == FACE)
    before, after = note.text.count("<br>"), wrapped(text, _FACE_CHARACTERS)
    note.text = "<br>".join(after)
    figure.layout.meta = {**figure.layout.meta, "face": text}
    more = _LINE_PX * max(0, len(after) - 1 - before)
    figure.layout.height += more
    figure.layout.margin.b += more
