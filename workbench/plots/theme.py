"""How every figure looks: the template, a style for each model, the share axis, what was measured.

Okabe-Ito colours, safe for colour-blind readers; the LLM and the PRM also differ in dash and
marker, so that a grey print still reads. Fonts are 12 px, which is 9 pt in a PDF 150 mm wide.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILION, YELLOW, BLACK = "#56B4E9", "#D55E00", "#F0E442", "#000000"
GREY = "#8C8C8C"  # what is no model's: waiting, pruned branches
Ends = Iterable[Sequence[float]]  # x or y of both ends of each of several lines
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "star", "pentagon", "hexagon")
FONT = "DejaVu Sans, Verdana, sans-serif"
"""First the font that the set-up installs: the widest, so that any other needs less room."""
FONT_PX = 12
PRINT_WIDTH_PX = 567  # 150 mm at 96 px an inch
PAGE_PT, CAPTION_PT, CAPTION_CHARACTERS = 522, 11, 83
"""Of a page of LaTeX's article at 11 pt, without what stands between figure and caption; of a line
of the caption, in letters of 9 pt.
"""
PX_PER_PT = 96 / 72.27
PROVENANCE = "provenance"  # the name of the annotation that says what was measured
_LINE_PX = 15  # height of one line of the provenance
_PROVENANCE_CHARACTERS = 135  # of one line, 11 px high, on a screen 800 px wide


@dataclass(frozen=True, slots=True)
class Style:
    """How a model, a policy, ... is drawn everywhere: never told apart by colour alone."""

    label: str
    colour: str
    dash: str = "solid"
    symbol: str = "circle"
    soft: str = ""  # the same hue, for areas


MODELS = {
    "llm": Style("LLM", BLUE, soft="#A6CEE8"),
    "prm": Style("PRM", VERMILION, "dash", "square", "#F5C2A0"),
}
ROOM_TITLE = (
    f"room for KV, tokens: <span style='color:{VERMILION}'>PRM</span> above "
    f"<span style='color:{BLUE}'>LLM</span>"
)
SHARE_TITLE = "LLM share of total memory (the PRM has the rest)"

_AXIS = {
    "showline": True,
    "linecolor": "#444444",
    "ticks": "outside",
    "ticklen": 4,
    "tickcolor": "#444444",
    "gridcolor": "#E6E6E6",
    "zeroline": False,
    "title": {"standoff": 8, "font": {"size": FONT_PX}},
}

TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": FONT, "size": FONT_PX, "color": "#111111"},
        "colorway": [BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, YELLOW],
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "modebar": {"remove": ["sendChartToCloud"]},  # it would upload the data
        "title": {"x": 0, "xref": "container", "xanchor": "left", "pad": {"l": 12}},
        "hoverlabel": {"font": {"family": FONT, "size": FONT_PX}},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
    }
)


OVER_SHARES = {"top": 128, "legend": 58}  # of `finish`: the axis of KV tokens is under the legend
TITLE_PX = 30


def finish(
    fig: go.Figure, title: str, caption: str, provenance: str, panels: int,
    *, top: int = 66, bottom: int = 52, left: int = 66, right: int = 18, legend: int = 4,
) -> go.Figure:  # fmt: skip
    """`fig` with the house template, a title above and `provenance`, what was measured, below.

    panels: px of the drawing's height between the margins. top (title and legend), bottom (the axis
    with its title), left, right: px beside it. legend: px from the first panel up to the legend,
    unless the figure has placed it.

    Returns the same figure. `layout.meta` holds what export needs: caption, provenance, and the
    layout of a PDF 150 mm wide, where both and the title are in the caption and have no room, and
    which with its caption is no higher than a page.
    """
    if fig.layout.legend.y is None:
        legend_at(fig, "legend", 1 + legend / panels)
    lines = wrapped(provenance, _PROVENANCE_CHARACTERS)
    room = _LINE_PX * len(lines) + 10
    margin = {"l": left, "r": right, "t": top, "b": bottom + room}
    less = {"l": left - 8, "t": top - TITLE_PX, "b": bottom}
    below = len(wrapped(f"Figure 10: {caption}", CAPTION_CHARACTERS)) * CAPTION_PT
    most = int((PAGE_PT - below) * PX_PER_PT) - less["t"] - less["b"]
    on_paper = {"width": PRINT_WIDTH_PX, "margin": margin | less} | lowered(fig, panels, most)
    on_paper["height"] = min(panels, most) + less["t"] + less["b"]
    fig.update_layout(
        template=TEMPLATE,
        title={"text": f"<b>{title}</b>", "font": {"size": 15}, "y": 1, "yanchor": "top"},
        title_pad={"t": 10, "l": 12},
        height=panels + top + bottom + room,
        margin=margin,
        meta={"caption": caption, "provenance": provenance, "on_paper": on_paper},
    )
    shift = {"xshift": 12 - left, "yshift": -bottom, "yanchor": "top"}
    font = {"size": 11, "color": "#444444"}
    say(fig, "<br>".join(lines), 0, 0, name=PROVENANCE, align="left", font=font, **shift)
    return fig


def lowered(fig: go.Figure, height: int, most: int) -> dict[str, Any]:
    """Layout of a drawing that is at most `most` px high in place of `height`: panels are lower,
    and what stands between and above them has the room it had.
    """
    if most >= height:
        return {}
    axes = {axis.plotly_name: axis.domain for axis in fig.select_yaxes() if axis.domain}
    ends = sorted(set(axes.values())) or [(0.0, 1.0)]
    panels = height * sum(head - foot for foot, head in ends)
    factor = 1 - (height - most) / panels
    places = [0.0, *(end for panel in ends for end in panel)]
    scales = np.resize([1.0, factor], len(places) - 1)  # of a gap, of a panel, of a gap, ...
    there = [0.0, *np.cumsum(np.diff(places) * scales * height / most)]

    def moved(y: float) -> float:
        """Where `y` is then; above the highest panel as between two."""
        return float(np.interp(y, places, there)) + max(y - places[-1], 0) * height / most

    legends = {name: fig.layout[name] for name in sorted(fig.layout) if name.startswith("legend")}
    return {
        name: {"domain": [min(moved(end), 1.0) for end in domain]} for name, domain in axes.items()
    } | {name: {"y": moved(legend.y)} for name, legend in legends.items() if legend.y is not None}


def one_above_two(**shape: object) -> go.Figure:
    """An empty figure: a wide panel, and two below it. shape: of make_subplots."""
    specs = [[{"colspan": 2}, None], [{}, {}]]
    return make_subplots(rows=2, cols=2, specs=specs, horizontal_spacing=0.14, **shape)


def legend_at(fig: go.Figure, name: str, y: float) -> None:
    """Place one horizontal legend (`legend`, `legend2`, ...), its foot at `y` of the paper."""
    place = {"orientation": "h", "x": 0, "xanchor": "left", "y": y, "yanchor": "bottom"}
    fig.update_layout({name: {**place, "bgcolor": "rgba(255,255,255,0)"}})


def legend_note(fig: go.Figure, name: str, text: str, marker: dict[str, Any], **panel: int) -> None:
    """An entry of the legend `name` that is no data: what a mark or a band means, in words."""
    look = {"mode": "markers", "marker": {"size": 9, **marker}, "hoverinfo": "skip"}
    fig.add_trace(go.Scatter(x=[None], y=[None], name=text, legend=name, **look), **panel)


def wrapped(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width` characters; a line break in it stays one."""
    return [line for part in text.splitlines() for line in textwrap.wrap(part, width) or [""]]


def interval(rows: pd.DataFrame, colour: str) -> dict[str, object] | None:
    """plotly's error bars from value, low and high; an infinite bound draws none."""
    if "low" not in rows:
        return None
    above = (rows["high"] - rows["value"]).where(np.isfinite(rows["high"]))
    below = (rows["value"] - rows["low"]).where(np.isfinite(rows["low"]))
    look = {"color": colour, "thickness": 1.2, "width": 4}
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, **look}


def series(
    fig: go.Figure, rows: pd.DataFrame, x: str, style: Style, hover: str,
    row: Any = None, col: Any = None, secondary_y: Any = None, **more: Any,
) -> None:  # fmt: skip
    """`value` over the column `x` as a line with markers; error bars if there are low and high.

    hover: how plotly writes a point, without the name. more: other attributes of the trace.
    """
    line = go.Scatter(
        x=rows[x],
        y=rows["value"],
        error_y=interval(rows, style.colour),
        name=style.label,
        mode="lines+markers",
        line={"color": style.colour, "dash": style.dash, "width": 2},
        marker={"symbol": style.symbol, "size": 8, "color": style.colour},
        hovertemplate=f"{hover}<extra>{style.label}</extra>",
        cliponaxis=False,
    )
    fig.add_trace(line.update(more), row=row, col=col, secondary_y=secondary_y)


def area(x: object, y: object, label: str, colour: str, stack: str, **more: object) -> go.Scatter:
    """An area in steps, stacked on those of the same `stack` before it."""
    return go.Scatter(
        x=x,
        y=y,
        name=label,
        stackgroup=stack,
        mode="lines",
        fillcolor=colour,
        line={"width": 0, "color": colour, "shape": "hv"},
    ).update(more)


def capacity(x: object, y: object, label: str, **more: object) -> go.Scatter:
    """The dashed line that stacked areas of blocks stay under."""
    line = {"color": BLACK, "dash": "dash", "width": 1.5}
    return go.Scatter(x=x, y=y, name=label, mode="lines", line=line).update(more)


def in_percent(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with value, low and high in per cent."""
    return rows.assign(**{name: 100 * rows[name] for name in ("value", "low", "high")})


def highest(rows: pd.DataFrame) -> float:
    """The largest value or finite upper bound."""
    return float(np.nanmax([rows["value"], rows["high"].where(np.isfinite(rows["high"]))]))


def segments(x: Ends, y: Ends, colour: str, width: float, **more: object) -> go.Scatter:
    """Lines, each from one point to another, as one trace broken by gaps."""
    return go.Scatter(
        x=[each for ends in x for each in (*ends, None)],
        y=[each for ends in y for each in (*ends, None)],
        mode="lines",
        line={"color": colour, "width": width},
        hoverinfo="skip",
        **more,
    )


def strokes(places: Sequence[float], heights: Sequence[float], half: float) -> go.Scatter:
    """A thick line across each column, `half` to either side of its place."""
    ends = [(place - half, place + half) for place in places]
    return segments(ends, [(height, height) for height in heights], BLACK, 2.5)


def say(fig: go.Figure, text: str, x: object, y: object, **place: object) -> None:
    """A text without an arrow, its left edge at `x`; on the paper unless `place` says otherwise."""
    at = {"x": x, "y": y, "xanchor": "left", "yanchor": "bottom"}
    if "row" not in place:
        at |= {"xref": "paper", "yref": "paper"}
    fig.add_annotation(text=text, showarrow=False, **{**at, **place})


def ranked(label: str, model: str, rank: int, count: int) -> Style:
    """One of `count` lines of a model: its colour lighter for the first, full for the last."""
    strength = 0.35 + 0.65 * (rank / (count - 1) if count > 1 else 1.0)
    return Style(label, mixed(model, strength), "solid", SYMBOLS[rank % len(SYMBOLS)])


def log_axis(values: Sequence[float], margin: float) -> dict[str, object]:
    """A logarithmic axis with a tick at each of the sorted `values`."""
    reach = [np.log10(values[0]) - margin, np.log10(values[-1]) + margin]
    return {"type": "log", "tickmode": "array", "tickvals": values, "range": reach}


def mixed(model: str, strength: float) -> str:
    """The model's colour on white paper; strength 1 is the colour itself."""
    colour = MODELS[model].colour
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - strength * (255 - part)):02X}" for part in parts)


def thinned(values: Sequence[float], gap: float = 0.06) -> list[int]:
    """Indices of sorted `values` whose labels fit: the ends, and those `gap` of the axis apart."""
    span = (values[-1] - values[0]) or 1.0
    kept = [0]
    for i in range(1, len(values) - 1):
        room = min(values[i] - values[kept[-1]], values[-1] - values[i])
        kept += [i] if room >= gap * span else []
    return kept + ([len(values) - 1] if len(values) > 1 else [])


def tokens_text(tokens: float) -> str:
    """4 digits at most: 812, 2.5k, 12k."""
    if tokens < 1000:
        return f"{tokens:.0f}"
    return f"{tokens / 1000:.1f}k" if tokens < 9950 else f"{tokens / 1000:.0f}k"


def share_axes(
    fig: go.Figure, rows: pd.DataFrame, *, panels: int, at: Sequence[float] | None = None
) -> None:
    """The LLM's share on the lowest axis, the KV tokens of both models above the first panel.

    rows: columns llm_share, llm_kv_tokens, prm_kv_tokens. at: where on the axis each distinct share
    is drawn (default: at its value). panels: how many rows of subplots share the axis.
    """
    table = rows.drop_duplicates("llm_share").sort_values("llm_share")
    places = list(table["llm_share"] if at is None else at)
    margin = 0.04 * ((places[-1] - places[0]) or 1.0) if at is None else 0.6
    kept = thinned(places)
    below = [f"{table['llm_share'].iloc[i]:.2f}" for i in kept]
    above = [both_rooms(row) for row in table.iloc[kept].to_dict("records")]
    ticks = {"tickmode": "array", "tickvals": [places[i] for i in kept]}
    reach = [places[0] - margin, places[-1] + margin]
    for panel in range(1, panels + 1):
        fig.update_xaxes(range=reach, **ticks, ticktext=below, row=panel, col=1)
    fig.update_xaxes(title_text=SHARE_TITLE, row=panels, col=1)
    # a second x axis above; plotly draws one only where a trace, here an empty one, uses it
    upper = {"overlaying": "x", "side": "top", "anchor": "y", "showgrid": False}
    upper["title"] = {"text": ROOM_TITLE, "standoff": 6, "font": {"size": FONT_PX}}
    fig.update_layout(xaxis9={**ticks, "range": reach, "ticktext": above, **upper})
    empty = {"x": [sum(places) / len(places)], "y": [None], "showlegend": False}
    fig.add_trace(go.Scatter(**empty, xaxis="x9", yaxis="y", hoverinfo="skip"))


def both_rooms(row: Mapping[Any, Any] | pd.Series) -> str:
    """The KV tokens of both models, where they are known, one above the other in their colours."""
    return "<br>".join(
        f"<span style='color:{MODELS[m].colour}'>{tokens_text(row[f'{m}_kv_tokens'])}</span>"
        for m in ("prm", "llm")
        if pd.notna(row[f"{m}_kv_tokens"])
    )
