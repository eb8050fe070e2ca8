"""Whether the answer about the split stands when a value that the thesis leaves open is another."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots import theme
from workbench.plots.theme import MODELS, Frame, finish, say

ROW_PX, NEAR = 15, 2.0
LOSSES = ["loss_low", "loss_mid", "loss_high"]
ENDS = {"loss_low": ("llm", "low"), "loss_high": ("prm", "high")}
_CAPTION = (
    "The memory split with one value at a time set otherwise, replayed; the first row is what is "
    "taken. Left: the plateau, the shares of the LLM that lose less than 2 % of the best tokens/s "
    "of those replayed, as a bar, and the best of them; grey, the plateau of what is taken; "
    "dotted, the thesis's 0.3. Right: what the lowest and the highest share lose to the best, 0.08 "
    "and 0.5 where both fit; dotted, 2 %. The value that changes these losses most comes first."
)


def sensitivity(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Plateau and losses at the ends of the interval for each setting of each value.

    rows: kind (only `setting` is drawn), value, setting, best, plateau_low, plateau_high, low, high
    (shares), loss_low, loss_high (fractions), lacks (a text where the pair does not fit).
    """
    own = by_effect(rows)
    places = [-number for number in range(len(own))]
    labels = [
        "<b>taken</b>" if value == "taken" else f"{str(value).split(',')[0]}: {setting}"
        for value, setting in own[["value", "setting"]].to_numpy()
    ]
    own = own.assign(place=places, label=labels)
    fig = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.05)
    turns = own["value"].ne(own["value"].shift()).cumsum()
    for number, (_, group) in enumerate(own.groupby(turns)):  # every other value on a ground
        if number % 2:
            reach = {"y0": group["place"].min() - 0.5, "y1": group["place"].max() + 0.5}
            look = {"fillcolor": "#F2F2F2", "line_width": 0, "layer": "below"}
            fig.add_shape(x0=0, x1=1, xref="paper", yref="y", **reach, **look)
    fits = own[own["best"].notna()]
    _plateaus(fig, fits)
    for column, (model, end) in ENDS.items():
        style = MODELS[model]
        lost = go.Scatter(
            x=100 * fits[column],
            y=fits["place"],
            mode="markers",
            marker={"symbol": style.symbol, "color": style.colour, "size": 8},
            name=f"loss at the {'lower' if end == 'low' else 'upper'} end ({style.label} short)",
            customdata=fits[["label", end]],
            hovertemplate="%{customdata[0]}: %{x:.1f} % at %{customdata[1]:.2f}<extra></extra>",
        )
        fig.add_trace(lost, row=1, col=2)
    # after the traces: plotly leaves out what is drawn across an empty panel
    taken = own.iloc[0]
    band = {"fillcolor": theme.GREY, "opacity": 0.22, "line_width": 0, "layer": "below"}
    fig.add_vrect(taken["plateau_low"], taken["plateau_high"], **band, row=1, col=1)
    dotted = {"line": {"color": theme.BLACK, "width": 1, "dash": "dot"}}
    fig.add_vline(0.3, **dotted, row=1, col=1)
    fig.add_vline(NEAR, **dotted, row=1, col=2)
    small = {"yanchor": "middle", "font": {"size": 11, "color": "#555555"}}
    for place in own.loc[own["best"].isna(), "place"]:
        say(fig, "does not fit", 0.1, place, **small, row=1, col=1)
    axis = {"tickvals": places, "ticktext": labels, "range": [places[-1] - 0.7, 0.7]}
    fig.update_yaxes(**axis, showgrid=False)
    fig.update_xaxes(title_text="LLM share: plateau and best", range=[0.05, 0.53], row=1, col=1)
    most = 100 * float(fits[["loss_low", "loss_high"]].max().max())
    title = "tokens/s lost to the best (%)"
    fig.update_xaxes(title_text=title, range=[-3, 1.06 * most], row=1, col=2)
    frame = Frame(panels=ROW_PX * len(own) + 12, top=84, left=250, legend=6)
    return finish(fig, "What the split's answer depends on", _CAPTION, provenance, frame)


def by_effect(rows: pd.DataFrame) -> pd.DataFrame:
    """The settings: taken first, then value by value, that whose losses change most first."""
    own = rows[rows["kind"] == "setting"]
    is_taken = own["value"] == "taken"
    change = own[LOSSES] - own.loc[is_taken, LOSSES].iloc[0].astype(float)
    effect = change.abs().max(axis=1).fillna(0.0).groupby(own["value"]).transform("max")
    own = own.assign(effect=-effect.mask(is_taken, np.inf))
    return own.sort_values(["effect", "value"], ignore_index=True)  # stable, of two columns


def _plateaus(fig: go.Figure, rows: pd.DataFrame) -> None:
    """A bar from end to end of each plateau, its best share as a diamond."""
    bars = go.Scatter(
        x=[x for a, b in rows[["plateau_low", "plateau_high"]].to_numpy() for x in (a, b, None)],
        y=[y for place in rows["place"] for y in (place, place, None)],
        mode="lines",
        line={"color": theme.GREEN, "width": 6},
        name="plateau: within 2 % of the best",
        hoverinfo="skip",
    )
    best = go.Scatter(
        x=rows["best"],
        y=rows["place"],
        mode="markers",
        marker={"symbol": "diamond", "size": 8, "color": theme.BLACK},
        name="best of those replayed",
        customdata=rows[["label", "plateau_low", "plateau_high"]],
        hovertemplate="%{customdata[0]}: best %{x:.2f}, plateau %{customdata[1]:.2f} to "
        "%{customdata[2]:.2f}<extra></extra>",
    )
    fig.add_traces([bars, best], rows=[1, 1], cols=[1, 1])
