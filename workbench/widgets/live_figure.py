"""A running search as one figure: the block map, and below it throughput, phase and split in time.

`live_figure` draws a snapshot, `show` brings a figure up to a later one. What it does not do: poll
(live.py).
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.theme import BLACK, GREY, MODELS, Frame, finish, legend_at, legend_note
from workbench.widgets.live_map import COLOURS, LABELS, MapGrid, map_trace
from workbench.widgets.live_search import Snapshot
from workbench.widgets.live_timeline import Move

LLM, PRM = MODELS["llm"], MODELS["prm"]
CAPTION = (
    "A search on both engines. Above, the arena: every rectangle is a block, as wide as its bytes; "
    "blocks of one page stand together. Below, over time with pauses left out: generated tokens/s "
    "(mean of the last {window_s:.3g} s), which model was stepping, and the split: what each model "
    "holds, the LLM's target, and what it holds or could have at once. Triangles and dotted lines "
    "are re-splits; the dotted grey line is the throughput that was pinned."
)
PINNED = "pinned"
_FRAME = Frame(panels=600, top=72, left=70)
_HEIGHTS = (0.36, 0.22, 0.13, 0.29)


def live_figure(snapshot: Snapshot, face: str = "") -> go.Figure:
    """A snapshot drawn; its traces carry their names in `meta`."""
    specs = [[{}], [{"secondary_y": True}], [{}], [{}]]
    fig = make_subplots(rows=4, row_heights=_HEIGHTS, vertical_spacing=0.065, specs=specs)
    fig.add_trace(map_trace(snapshot.blocks), row=1, col=1)
    for state, label in LABELS.items():
        mark = {"symbol": "square", "size": 11, "color": COLOURS[state]}
        fig.add_trace(legend_note("legend", label, mark), row=1, col=1)
    fig.add_trace(_line(PINNED, "", GREY, dash="dot"), row=2, col=1)
    fig.add_trace(_line("tokens_per_s", "", BLACK), row=2, col=1)
    _areas(fig)
    fig.add_trace(_line("llm_actual", "LLM holds or could have", LLM.colour), row=4, col=1)
    fig.add_trace(_line("llm_target", "LLM's target", BLACK, dash="dash"), row=4, col=1)
    for row in (2, 3, 4):
        fig.add_trace(_marks(row), row=row, col=1, secondary_y=row == 2 or None)
    _axes(fig)
    show(fig, snapshot)
    caption = CAPTION.format(window_s=snapshot.window_s)
    return finish(fig, "A search as it runs", caption, face, _FRAME)


def show(fig: Any, snapshot: Snapshot) -> None:
    """Bring a figure of `live_figure` (a Figure or FigureWidget) up to a later snapshot."""
    traces = {trace.meta: trace for trace in fig.data if trace.meta}
    blocks, rows = snapshot.blocks, snapshot.timeline
    traces["map"].z = MapGrid(*blocks.cells.shape).heights(blocks)
    drawn = _drawn(rows)
    for name in drawn.columns[1:]:
        if name in traces:
            traces[name].update(x=drawn["time_s"].to_numpy(), y=drawn[name].to_numpy())
    for row in (2, 3, 4):
        top = 1.0 if row == 2 else 100.0
        traces[f"moves {row}"].update(_strokes(snapshot.moves, top))


def pin(fig: Any, snapshot: Snapshot) -> None:
    """Keep this snapshot's throughput in the figure, dotted, for the next search beside it."""
    drawn = _drawn(snapshot.timeline)
    (pinned,) = (trace for trace in fig.data if trace.meta == PINNED)
    pinned.update(x=drawn["time_s"].to_numpy(), y=drawn["tokens_per_s"].to_numpy())


def figure_rows(snapshot: Snapshot) -> pd.DataFrame:
    """The rows a live figure draws over time, to be kept beside it."""
    return _drawn(snapshot.timeline)


def _drawn(rows: pd.DataFrame) -> pd.DataFrame:
    """The time line in the units of the axes: fractions as percentages."""
    names = [name for name in rows.columns if name not in ("time_s", "tokens_per_s")]
    scaled = rows.assign(**{name: 100 * rows[name] for name in names})
    return scaled.assign(unheld=100 - scaled["llm_held"] - scaled["prm_held"])


def _line(name: str, label: str, colour: str, dash: str = "solid") -> go.Scatter:
    return go.Scatter(
        x=[],
        y=[],
        name=label,
        meta=name,
        mode="lines",
        line={"color": colour, "dash": dash, "width": 2, "shape": "hv"},
        showlegend=bool(label),
        legend="legend3",
    )


def _areas(fig: go.Figure) -> None:
    """Which model stepped, and what each holds: the PRM's part hangs from above."""
    for style, name in ((LLM, "llm_busy"), (PRM, "prm_busy")):
        fig.add_trace(_area(name, style.label, style.colour, "busy", "legend2"), row=3, col=1)
    fig.add_trace(_area("llm_held", "LLM holds", LLM.soft, "held", "legend3"), row=4, col=1)
    none = _area("unheld", "", "rgba(0,0,0,0)", "held", "legend3").update(hoverinfo="skip")
    fig.add_trace(none, row=4, col=1)
    fig.add_trace(_area("prm_held", "PRM holds", PRM.soft, "held", "legend3"), row=4, col=1)


def _area(name: str, label: str, colour: str, group: str, legend: str) -> go.Scatter:
    return go.Scatter(
        x=[],
        y=[],
        name=label,
        meta=name,
        mode="lines",
        line={"width": 0, "color": colour, "shape": "hv"},
        fillcolor=colour,
        stackgroup=group,
        showlegend=bool(label),
        legend=legend,
    )


def _marks(row: int) -> go.Scatter:
    return go.Scatter(
        x=[],
        y=[],
        meta=f"moves {row}",
        mode="lines+markers",
        line={"color": GREY, "dash": "dot", "width": 1.2},
        marker={"symbol": "triangle-down", "size": 9, "color": BLACK},
        cliponaxis=False,
        showlegend=False,
        hovertemplate="%{text}<extra></extra>",
    )


def _strokes(moves: tuple[Move, ...], top: float) -> dict[str, Any]:
    """Dotted lines from the axis to a triangle at the top, one a move."""
    words = [f"split to {move.share:.2f}: {move.outcome}" for move in moves]
    return {
        "x": [x for move in moves for x in (move.time_s, move.time_s, None)],
        "y": [0.0, top, None] * len(moves),
        "text": [text for each in words for text in (each, each, "")],
        "marker": {"size": [0, 9, 0] * len(moves)},
    }


def _axes(fig: go.Figure) -> None:
    hidden = {"visible": False, "fixedrange": True}
    fig.update_xaxes(**hidden, row=1, col=1)
    fig.update_yaxes(title_text="pages", showticklabels=False, ticks="", row=1, col=1)
    fig.update_yaxes(autorange="reversed", showline=False, showgrid=False, row=1, col=1)
    for row in (3, 4):
        fig.update_xaxes(matches="x2", row=row, col=1)
    for row in (2, 3):
        fig.update_xaxes(showticklabels=False, row=row, col=1)
    fig.update_xaxes(rangemode="tozero", row=2, col=1)
    fig.update_xaxes(title_text="time since the start, s (pauses left out)", row=4, col=1)
    fig.update_yaxes(title_text="tokens/s", rangemode="tozero", row=2, col=1, secondary_y=False)
    fig.update_yaxes(**hidden, range=[0, 1], row=2, col=1, secondary_y=True)
    percent = {"range": [0, 100], "tickvals": [0, 50, 100]}
    fig.update_yaxes(title_text="steps<br>(% of time)", **percent, row=3, col=1)
    fig.update_yaxes(title_text="share of<br>pages (%)", **percent, row=4, col=1)
    legend_at(fig, "legend", _FRAME.above(2))
    legend_at(fig, "legend2", 0.415)
    legend_at(fig, "legend3", 0.235)
    plain = {"traceorder": "normal"}
    fig.update_layout(legend2=plain, legend3=plain, uirevision="live")
