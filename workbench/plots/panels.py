"""Figures of several pairs of models: a panel for each, side by side, each with its own axes.

Rows name a pair, at its own size, measured or replayed, in a column `rung`. Counts compare between
pairs, rates do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from workbench.plots import theme
from workbench.plots.theme import finish, say

Draw = Callable[..., go.Figure]
GROUND = "#F3EFE4"  # of what was replayed and not measured: pairs whose names begin so
REPLAYED = "replayed"
GAP, TICK_GAP = 0.1, 0.3  # between panels, of the width; between two ticks, of a panel's axis
LINE_PX = 18
APART = 20  # numbers of axes from one panel to the next: more than a figure has
REFERENCES = ("anchor", "overlaying", "matches", "xref", "yref", "xaxis", "yaxis")


PANELS = "One panel for each pair; tinted: replayed, not measured."


def by_rung(draw: Draw, told: str = PANELS) -> Draw:
    """The same figure for rows of several pairs, a column `rung`: their panels side by side.

    Rows of one pair, or without it, are drawn as they are. What was replayed has another ground.
    told: what the caption says of the panels.
    """

    def drawn(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
        rungs = list(dict.fromkeys(rows["rung"])) if "rung" in rows else []
        if len(rungs) > 1:
            figs = [draw(rows[rows["rung"] == rung]) for rung in rungs]
            return _side_by_side(figs, rungs, provenance, told)
        fig = draw(rows, provenance)
        if rungs and rungs[0].startswith(REPLAYED):
            title = fig.layout.title.text.replace("</b>", f"</b> ({rungs[0]})")
            fig.update_layout(plot_bgcolor=GROUND, title_text=title)
        return fig

    return drawn


def _side_by_side(
    figs: Sequence[go.Figure], rungs: Sequence[str], provenance: str, told: str
) -> go.Figure:
    """One figure. Axis titles and legends stand once; what a legend says of one panel alone, such
    as where its peak is, stands there with the name of its pair.
    """
    first, notes, named = figs[0].layout, 0, set[str]()
    width = (1 - GAP * (len(figs) - 1)) / len(figs)
    fig = go.Figure(layout={"barmode": first.barmode or "group"})
    names = sorted(name for name in first if re.fullmatch(r"legend\d*", name))  # of a set: sorted
    panels = int(first.height - first.margin.t - first.margin.b)
    has_room_axis = any("xaxis9" in each.layout for each in figs)
    for number, (own, rung) in enumerate(zip(figs, rungs, strict=True)):
        place = number * (width + GAP), width
        layout: dict[str, Any] = own.layout.to_plotly_json()
        for name, axis in layout.items():
            if re.fullmatch(r"[xy]axis\d*", name):
                shown = number == ((len(figs) - 1) // 2 if name[0] == "x" else 0)
                fig.layout[_renumbered(name, number)] = _axis(axis, name[0], number, place, shown)
        for trace in (each.to_plotly_json() for each in own.data):
            is_note = [*trace.get("x", ())] == [None]
            label = re.sub(r" \([^)]*\)$", "", trace.get("name") or "")
            trace = {"xaxis": "x", "yaxis": "y"} | trace
            trace["name"] = f"{rung}: {trace['name']}" if is_note else label
            if not is_note:
                trace["legendgroup"] = label
                shown = number == 0 or label not in named
                trace["showlegend"] = trace.get("showlegend", True) and shown
            if trace.get("stackgroup"):
                trace["stackgroup"] += f" of {rung}"
            fig.add_trace(_moved(trace, number))
            notes += is_note
        named |= {trace.name for trace in fig.data if trace.showlegend is not False}
        if rung.startswith(REPLAYED):  # first, so that bands lie upon it
            ends = {"x0": place[0], "x1": sum(place), "y0": 0, "y1": 1}
            look = {"fillcolor": GROUND, "line_width": 0, "layer": "below"}
            fig.add_shape(type="rect", xref="paper", yref="paper", **ends, **look)
        for note in layout.get("annotations", ()):
            if note.get("name") != theme.PROVENANCE:
                fig.add_annotation(_placed(note, number, place))
        for shape in layout.get("shapes", ()):
            fig.add_shape(_placed(shape, number, place))
        middle = {"xanchor": "center", "yshift": 54 if has_room_axis else 6}
        say(fig, f"<b>{rung}</b>", place[0] + width / 2, 1, **middle)
    for name in names:
        fig.layout[name] = first[name]
    fig.layout.legend.y += LINE_PX / panels
    bottom, top = int(first.margin.b) - 10, int(first.margin.t) + LINE_PX * (1 + notes)
    room = {"top": top, "bottom": bottom, "left": int(first.margin.l)}
    caption = f"{first.meta['caption']} {told}"
    return finish(fig, re.sub(r"</?b>", "", first.title.text), caption, provenance, panels, **room)


def _axis(
    axis: dict[str, Any], letter: str, number: int, place: tuple[float, float], shown: bool
) -> dict[str, Any]:
    """An axis of one panel; shown: its title. Ticks that were chosen are fewer in a panel."""
    found = _moved(axis, number)
    if not shown:
        found.pop("title", None)
    if letter == "x":
        ends = axis.get("domain", (0.0, 1.0))
        found |= {"domain": [place[0] + place[1] * end for end in ends], "nticks": 4}
        if axis.get("tickmode") == "array":
            kept = theme.thinned(axis["tickvals"], TICK_GAP)
            for name in ("tickvals", "ticktext"):
                if name in axis:
                    found[name] = [axis[name][i] for i in kept]
    return found


def _moved(part: dict[str, Any], number: int) -> dict[str, Any]:
    """A trace, an axis, a note or a shape with the axes it names, as the panel numbers them."""
    return part | {name: _renumbered(part[name], number) for name in REFERENCES if name in part}


def _renumbered(name: Any, number: int) -> Any:
    """An axis's name (x2, xaxis2, x2 domain) as the panel numbers it; anything else as it is."""
    found = re.fullmatch(r"([xy](?:axis)?)(\d*)( domain)?", str(name))
    if found is None or not number:
        return name
    return f"{found[1]}{int(found[2] or 1) + APART * number}{found[3] or ''}"


def _placed(part: dict[str, Any], number: int, place: tuple[float, float]) -> dict[str, Any]:
    """A note or a shape in its panel; on the paper, its x is of the panel's width."""
    found = _moved(part, number)
    if part.get("xref", "paper") == "paper":
        names = {"x", "x0", "x1"} & part.keys()
        found |= {name: place[0] + place[1] * part[name] for name in names}
    return found
