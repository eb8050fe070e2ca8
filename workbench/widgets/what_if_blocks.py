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
from workbench.widgets.what_if_share import Points, mark_above, put
from workbench.widgets.what_if_view import GHOSTS, View

CAPTION = (
    "Blocks of each model's KV cache over the simulated time of the search, active and cached "
    "stacked, what is missing to the dashed line is free, as at its own steps and held until its "
    "next one; below, wall time of one problem, divided "
    "among the models' steps and the rest, at the chosen place and at pinned ones."
)
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
COSTS = (("llm", MODELS["llm"].colour), ("prm", MODELS["prm"].colour), ("rest", GREY))
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
    put(fig, dict(_areas_of(view)))
    blocks = view.answer.blocks
    seconds = float(blocks["start_s"].max()) if len(blocks) else 1.0
    each, unit = unit_of(seconds)
    fig.layout.xaxis2.title.text = f"simulated time since the start ({unit})"
    fig.update_xaxes(range=[0, seconds / each], row=1, col=1)
    for panel, model in enumerate(MODELS, start=1):
        most = max(blocks.loc[blocks["engine"] == model, "blocks_total"], default=1)
        fig.update_yaxes(range=[0, 1.06 * most], row=panel, col=1)
    fill_bars(fig, view)
    return fig


def reframe_blocks(fig: Any, view: View) -> Any:
    """The same for a view of another memory, device or recording, as its face says."""
    fig.layout.annotations = blocks_figure(view, marked=False).layout.annotations
    return fill_blocks(fig, view)


def fill_bars(fig: Any, view: View) -> None:
    """What a problem costs, pinned places too; blocks stay."""
    bars = _bars(view)
    most = max(answer.seconds for _, answer in bars)
    each, unit = unit_of(most)
    names = [name.replace(": ", ":<br>") for name, _ in bars]
    put(
        fig,
        {
            f"cost/{part}": ([_part(answer, part) / each for _, answer in bars], names, {})
            for part, _ in COSTS
        },
    )
    fig.layout.xaxis3.title.text = f"time of one problem ({unit})"
    fig.layout.xaxis3.range = [0, 1.04 * most / each]


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
    factor, _ = unit_of(float(blocks["start_s"].max()) if len(blocks) else 1.0)
    for model in MODELS:
        own = blocks[blocks["engine"] == model]
        times = (own["start_s"].astype(float) / factor).tolist()
        for column in ("blocks_active", "blocks_cached"):
            yield f"{model}/{column}", (times, own[column].tolist(), {})
        yield f"{model}/total", (times, own["blocks_total"].tolist(), {})


def _part(answer: Answer, part: str) -> float:
    seconds = {"llm": answer.llm.seconds, "prm": answer.prm.seconds, "rest": answer.outside_s}
    return seconds[part]
