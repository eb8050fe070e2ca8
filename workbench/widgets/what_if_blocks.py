"""Blocks of both models over a search, and what a problem costs, for one place of the controls.

Active and cached stacked below the line of what there is: what is missing is free. Below, seconds
of a problem beside those of pinned places. Takes what what_if_answers.py makes. What it does not
do: compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.theme import BLACK, GREY, MODELS, Frame, finish, legend_at
from workbench.widgets.what_if_answers import Answer
from workbench.widgets.what_if_share import Points, mark_above, put, take_face
from workbench.widgets.what_if_view import GHOSTS, View

CAPTION = (
    "Blocks of each model's KV cache over the simulated time of the search, active and cached "
    "stacked, what is missing to the dashed line is free, as at its own steps and held until its "
    "next one; below, wall time of one problem, divided "
    "among the models' steps and the rest, at the chosen place and at pinned ones."
)
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
COSTS = (("llm", MODELS["llm"].colour), ("prm", MODELS["prm"].colour), ("rest", GREY))
ROOM, ROOM_TO_MOVE, SPARE = 1.15, 1.6, 2.0
"""An axis reaches so many times as far as its largest number: at first; where it had to be drawn
again; at the most.
"""
_FRAME = Frame(panels=480, top=88, left=92)


def blocks_figure(view: View, marked: bool = True) -> go.Figure:
    """The figure of a view. marked: whether it says itself what kind of answer it shows."""
    fig = make_subplots(
        rows=3, row_heights=[0.37, 0.37, 0.26], vertical_spacing=0.13, shared_xaxes=False
    )
    for panel, model in enumerate(MODELS, start=1):
        for key, trace in _areas(model):
            fig.add_trace(trace.update(meta=key), row=panel, col=1)
        fig.update_yaxes(title_text=f"blocks of the {MODELS[model].label}", row=panel, col=1)
    for name, colour in COSTS:
        fig.add_trace(_bar(name, colour), row=3, col=1)
    fig.update_xaxes(matches="x", row=2, col=1)
    fig.update_yaxes(autorange="reversed", automargin=True, tickfont_size=9, row=3, col=1)
    fig.update_layout(barmode="stack")
    if marked:
        fig.add_annotation(**mark_above(_FRAME.top - 30, view.answer))
    legend_at(fig, "legend", 1.01)
    fig.update_layout(legend={"traceorder": "normal", "entrywidth": 104})
    finish(fig, "Blocks over the search, and what a problem costs", CAPTION, view.face, _FRAME)
    return fill_blocks(fig, view)


def fill_blocks(fig: Any, view: View) -> Any:
    """Put a view's blocks and bars into a figure of this kind; answers it. A mark stays."""
    move_blocks(fig, view)
    return frame_blocks(fig, view)


def move_blocks(fig: Any, view: View) -> None:
    """Blocks and bars alone, in axes that stay."""
    put(fig, dict(_areas_of(view)) | dict(_bars_of(view)))


def frame_blocks(fig: Any, view: View) -> Any:
    """Axes that hold a view; answers the figure.

    They stay while they can, for a browser takes as long to draw them as to draw all else; those
    that a hand has zoomed stay too.
    """
    for name, title in _titles(view).items():
        fig.layout[name].title.text = title
    for name, most in _reach(view).items():
        shown = fig.layout[name].range
        if shown is None:
            fig.layout[name].range = (0.0, most * ROOM)
        elif not _holds(shown, most):
            fig.layout[name].range = (0.0, most * ROOM_TO_MOVE)
    return fig


def reframe_blocks(fig: Any, view: View) -> Any:
    """The same for a view of another memory, device or recording, whose face differs."""
    other = blocks_figure(view, marked=False)
    take_face(fig, other)
    for name in _reach(view):
        fig.layout[name].range = other.layout[name].range
    return frame_blocks(fig, view)


def fill_bars(fig: Any, view: View) -> None:
    """What a problem costs, pinned places too; blocks stay."""
    put(fig, dict(_bars_of(view)))
    frame_blocks(fig, view)


def _titles(view: View) -> dict[str, str]:
    """Of the axes whose unit depends on what they hold."""
    time, cost = unit_of(_seconds(view.answer.blocks))[1], unit_of(_most(view))[1]
    return {
        "xaxis2": f"simulated time since the start ({time})",
        "xaxis3": f"time of one problem ({cost})",
    }


def _reach(view: View) -> dict[str, float]:
    """The largest number on each axis, in its unit."""
    blocks = view.answer.blocks
    seconds, cost = _seconds(blocks), _most(view)
    reach = {"xaxis": seconds / unit_of(seconds)[0], "xaxis3": cost / unit_of(cost)[0]}
    for name, model in zip(("yaxis", "yaxis2"), MODELS, strict=True):
        own = blocks.loc[blocks["engine"] == model, "blocks_total"]
        reach[name] = float(max(own, default=1))
    return reach


def _holds(shown: tuple[float, float], most: float) -> bool:
    """Whether an axis may stay."""
    low, high = shown
    return low != 0 or most <= high <= most * SPARE


def _seconds(blocks: pd.DataFrame) -> float:
    return float(blocks["start_s"].max()) if len(blocks) else 1.0


def _most(view: View) -> float:
    return max(answer.seconds for _, answer in _bars(view))


def unit_of(seconds: float) -> tuple[float, str]:
    """The largest unit of which `seconds` is at least one: seconds in it, and its name."""
    return next((unit for unit in UNITS if seconds >= unit[0]), UNITS[-1])


def block_rows(view: View) -> pd.DataFrame:
    """The rows drawn: blocks over time, then a row a bar."""
    bars = [{"bar": name, **answer.row()} for name, answer in _bars(view)]
    return pd.concat([view.answer.blocks, pd.DataFrame(bars)], ignore_index=True)


def _bars(view: View) -> list[tuple[str, Answer]]:
    return [("now", view.answer), *((g.name, g.answer) for g in view.ghosts[:GHOSTS])]


def _areas(model: str) -> Iterator[tuple[str, go.Scatter]]:
    style = MODELS[model]
    for column, colour, text in (
        ("blocks_active", style.colour, "active"),
        ("blocks_cached", style.soft, "cached"),
    ):
        name = f"{style.label} {text}"
        yield (
            f"{model}/{column}",
            go.Scatter(
                name=name,
                stackgroup=model,
                mode="lines",
                fillcolor=colour,
                line={"width": 0, "color": colour, "shape": "hv"},
                hovertemplate="%{y:,.0f} blocks<extra>" + name + "</extra>",
            ),
        )
    line = {"color": BLACK, "dash": "dash", "width": 1.5}
    name, first = "all there are", model == "llm"
    yield f"{model}/total", go.Scatter(mode="lines", line=line, name=name, showlegend=first)


def _bar(name: str, colour: str) -> go.Bar:
    style = MODELS.get(name)
    label = f"{style.label} steps" if style else "outside steps"
    return go.Bar(
        orientation="h",
        name=label,
        meta=f"cost/{name}",
        marker={"color": colour, "line": {"color": "white", "width": 0.6}},
        width=0.7,
        showlegend=style is None,
        hovertemplate="%{x:.3g}<extra>" + label + "</extra>",
    )


def _areas_of(view: View) -> Iterator[tuple[str, Points]]:
    blocks = view.answer.blocks
    factor, _ = unit_of(_seconds(blocks))
    for model in MODELS:
        own = blocks[blocks["engine"] == model]
        times = (own["start_s"].astype(float) / factor).tolist()
        for column in ("blocks_active", "blocks_cached"):
            yield f"{model}/{column}", (times, own[column].tolist(), {})
        yield f"{model}/total", (times, own["blocks_total"].tolist(), {})


def _bars_of(view: View) -> Iterator[tuple[str, Points]]:
    bars, (each, _) = _bars(view), unit_of(_most(view))
    names = [name.replace(": ", ":<br>") for name, _ in bars]
    for part, _ in COSTS:
        yield f"cost/{part}", ([_part(answer, part) / each for _, answer in bars], names, {})


def _part(answer: Answer, part: str) -> float:
    seconds = {"llm": answer.llm.seconds, "prm": answer.prm.seconds, "rest": answer.outside_s}
    return seconds[part]
