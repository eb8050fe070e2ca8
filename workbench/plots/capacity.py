"""How many KV blocks the memory split leaves both models (thesis, section 6.1.1).

The formula as a line, engines that were built as points on it, and the shares that do not fit in
grey. Takes rows that the experiments make. What it does not do: compute a block's bytes.
"""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.requirements import HOWS, UNITS, unit_of
from workbench.plots.theme import GREY, MODELS, Frame, finish, legend_at

_FRAME = Frame(panels=520, top=112, left=74, right=66)
_CAPTION = (
    "KV blocks of both models over the LLM's share of total memory, and the tokens they hold "
    "(right axis). Lines: what the model's part leaves beside weights, and activations where the "
    "total pays for them, over the bytes of a block, rounded down. Markers: engines that were "
    "built. Grey: one of the models cannot hold a single request of the greatest length; crosses: "
    "what it lacks there."
)


def kv_blocks(rows: pd.DataFrame, face: str = "") -> go.Figure:
    """Blocks of both models over the share: the formula's line, counts of engines, and the ends.

    rows: how, model, name, llm_share, kind (formula | built | lacking), blocks, lacks_bytes,
    low_end, high_end, block_size.
    """
    hows = [how for how in HOWS if how in set(rows["how"])]
    specs = [[{"secondary_y": True}]] * len(hows)
    fig = make_subplots(len(hows), 1, specs=specs, shared_xaxes=True, vertical_spacing=0.13)
    for row, how in enumerate(hows, start=1):
        own = rows[rows["how"] == how]
        for model in MODELS:
            of_model = own[own["model"] == model]
            _line(fig, of_model[of_model["kind"] == "formula"], model, row)
            _built(fig, of_model[of_model["kind"] == "built"], model, row)
            _crosses(fig, of_model[of_model["kind"] == "lacking"], model, row)
        _ends(fig, own, row)  # after the lines: plotly leaves bands out where nothing is drawn yet
        _block_axes(fig, own, row)
    legend_at(fig, "legend", _FRAME.above(22))
    title = "KV blocks of both models over the split"
    return finish(fig, title, _CAPTION, face, _FRAME)


def _line(fig: go.Figure, rows: pd.DataFrame, model: str, row: int) -> None:
    style = MODELS[model]
    line = go.Scatter(
        x=rows["llm_share"],
        y=rows["blocks"],
        mode="lines",
        line={"color": style.colour, "dash": style.dash, "width": 2},
        name=f"{style.label}, formula",
        showlegend=row == 1,
        hovertemplate="%{x:.3f}: %{y:,} blocks<extra>" + style.label + "</extra>",
    )
    fig.add_trace(line, row=row, col=1)


def _built(fig: go.Figure, rows: pd.DataFrame, model: str, row: int) -> None:
    if rows.empty:
        return
    style = MODELS[model]
    points = go.Scatter(
        x=rows["llm_share"],
        y=rows["blocks"],
        mode="markers",
        marker={"symbol": style.symbol, "size": 9, "color": style.colour},
        name=f"{style.label}, engine built",
        hovertemplate="%{x:.2f}: %{y:,} blocks<extra>" + style.label + ", built</extra>",
    )
    fig.add_trace(points, row=row, col=1)


def _crosses(fig: go.Figure, rows: pd.DataFrame, model: str, row: int) -> None:
    """A share that does not fit: a cross on the axis, and what the model lacks there."""
    if rows.empty:
        return
    style, unit = MODELS[model], unit_of(rows["lacks_bytes"])
    points = go.Scatter(
        x=rows["llm_share"],
        y=[0] * len(rows),
        mode="markers",
        marker={"symbol": "x", "size": 10, "color": style.colour},
        cliponaxis=False,
        name=f"{style.label} does not fit",
        showlegend=row == 1,
        hovertemplate="%{x:.2f}<extra>" + style.label + " does not fit</extra>",
    )
    fig.add_trace(points, row=row, col=1)
    for share, lacks in rows[["llm_share", "lacks_bytes"]].to_numpy(float):
        text = f"lacks<br>{lacks / UNITS[unit]:.1f} {unit}"
        at = {"x": share, "y": 0, "yanchor": "bottom", "yshift": 8, "showarrow": False}
        fig.add_annotation(text=text, **at, font={"size": 11}, row=row, col=1)


def _ends(fig: go.Figure, rows: pd.DataFrame, row: int) -> None:
    """What lies outside the feasible shares, in grey."""
    low, high = rows["low_end"].iloc[0], rows["high_end"].iloc[0]
    band = {"fillcolor": GREY, "opacity": 0.2, "line_width": 0, "layer": "below"}
    for start, end in ((0.0, low), (high, rows["llm_share"].max())):
        if start < end:
            fig.add_vrect(start, end, **band, row=row, col=1)


def _block_axes(fig: go.Figure, rows: pd.DataFrame, row: int) -> None:
    names = rows.drop_duplicates("model").set_index("model")["name"]
    pair = " + ".join(names[model].removeprefix("dummy:") for model in MODELS)
    reach = 1.06 * float(rows["blocks"].max())
    size = int(rows["block_size"].iloc[0])
    empty = go.Scatter(x=[0.3], y=[None], showlegend=False, hoverinfo="skip")
    fig.add_trace(empty, row=row, col=1, secondary_y=True)
    fig.update_yaxes(title_text="blocks", range=[0, reach], row=row, col=1, secondary_y=False)
    tokens = {"title_text": "tokens they hold", "range": [0, reach * size], "showgrid": False}
    fig.update_yaxes(**tokens, row=row, col=1, secondary_y=True)
    ticks = {"range": [0, rows["llm_share"].max()], "dtick": 0.1, "tickformat": ".1f"}
    fig.update_xaxes(**ticks, showticklabels=True, row=row, col=1)
    below = "LLM share of total memory (the PRM has the rest)"
    low, high = rows["low_end"].iloc[0], rows["high_end"].iloc[0]
    text = f"<b>{rows['how'].iloc[0]}</b>: {pair}, feasible {low:.3f} to {high:.3f}"
    place = {"xref": "x domain", "yref": "y domain", "x": 0, "y": 1, "yanchor": "bottom"}
    note = {**place, "xanchor": "left", "showarrow": False, "yshift": 3}
    fig.add_annotation(text=text, **note, row=row, col=1)
    fig.update_xaxes(title_text=below, row=row, col=1)
