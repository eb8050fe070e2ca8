"""What each model's memory is used for over the memory split (thesis, section 6.1).

Takes the rows of engines that were built and of the thesis's pair, which was computed, and draws
both side by side: the same shape at two scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.theme import (
    BLACK,
    BLUE,
    MODELS,
    ORANGE,
    SKY,
    VERMILION,
    YELLOW,
    Frame,
    finish,
    legend_at,
    thinned,
    tokens_text,
)

HOWS = ("measured", "computed")
KV, MORE = "kv", "activations_more"
PARTS = {  # part: (label, colour, pattern); the KV cache has its model's colour
    "weights": ("weights", "#595959", ""),
    KV: ("KV", "", ""),
    "other": ("other: 0 on a CPU", SKY, ""),
    "activations_longest": ("activations: longest request", YELLOW, ""),
    MORE: ("more for the batch limits", ORANGE, "/"),
}
_TOP_AXIS_PX = 106
_PARTS_FRAME = Frame(panels=470, top=_TOP_AXIS_PX + 112, right=14)
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_PARTS_CAPTION = (
    "What the memory of each model is used for, over the LLM's share of total memory. Left: "
    "measured, engines built at each share; right: computed from the models' shapes. Strokes: the "
    "model's part of the total; what stands above one is paid for outside it. Activations are "
    "those of one step over the longest request (thesis), and what a step at the batch limits, for "
    "which is reserved here, takes more. Grey: one of the models does not fit; what it lacks."
)


@dataclass(frozen=True, slots=True)
class _Panel:
    """Where one model's columns stand, and in which unit; a share is drawn at its place."""

    model: str
    row: int
    col: int
    shares: tuple[float, ...]
    unit: str

    def places(self, shares: Sequence[float]) -> list[int]:
        return [self.shares.index(share) for share in shares]

    def sizes(self, num_bytes: pd.Series) -> pd.Series:
        return num_bytes / UNITS[self.unit]


def memory_parts(rows: pd.DataFrame, face: str = "") -> go.Figure:
    """Weights, KV, other and activations of both models, stacked over the share.

    rows: how (measured | computed), model, name, llm_share, budget_bytes, lacks_bytes, part, bytes,
    fits, in_total, llm_kv_tokens, prm_kv_tokens.
    """
    hows = [how for how in HOWS if how in set(rows["how"])]
    fig = make_subplots(2, len(hows), horizontal_spacing=0.1, vertical_spacing=0.05)
    for col, how in enumerate(hows, start=1):
        of_pair = rows[rows["how"] == how]
        shares, unit = (
            tuple(sorted(of_pair["llm_share"].unique())),
            unit_of(of_pair["budget_bytes"]),
        )
        for row, model in enumerate(MODELS, start=1):
            panel = _Panel(model, row, col, shares, unit)
            own = of_pair[of_pair["model"] == model]
            _stack(fig, _divided(own), panel)
            _budget(fig, own.drop_duplicates("llm_share"), panel)
            _lacking(fig, own[~own["fits"]].drop_duplicates("llm_share"), panel)
            fig.update_yaxes(title_text=f"{MODELS[model].label}, {unit}", row=row, col=col)
        _part_axes(fig, of_pair, shares, col)
    fig.update_layout(barmode="stack")
    legend_at(fig, "legend", _PARTS_FRAME.above(_TOP_AXIS_PX))
    fig.update_layout(legend={"traceorder": "normal"})
    title = "What each model's memory is used for"
    return finish(fig, title, _PARTS_CAPTION, face, _PARTS_FRAME)


def _divided(own: pd.DataFrame) -> pd.DataFrame:
    """Bytes by share and part; of activations at the batch limits what the longest lacks."""
    table = own[own["fits"]].pivot(index="llm_share", columns="part", values="bytes")
    reserved, longest = table.pop("activations_limits"), table["activations_longest"]
    table["activations_longest"] = longest.clip(upper=reserved)
    table[MORE] = (reserved - longest).clip(lower=0)
    return table


def _stack(fig: go.Figure, table: pd.DataFrame, panel: _Panel) -> None:
    for part, (label, colour, pattern) in PARTS.items():
        own_label = f"{label}, {MODELS[panel.model].label}" if part == KV else label
        shape = {"shape": pattern, "fillmode": "overlay", "fgcolor": "white", "size": 5}
        bar = go.Bar(
            x=panel.places(list(table.index)),
            y=panel.sizes(table[part]),
            width=0.74,
            name=own_label,
            showlegend=panel.col == 1 and (panel.row == 1 or part == KV),
            legendrank=list(PARTS).index(part),
            customdata=table.index,
            marker={
                "color": colour or MODELS[panel.model].colour,
                "pattern": shape,
                "line": {"width": 0},
            },
            hovertemplate="%{customdata:.2f}: %{y:,.2f} "
            + f"{panel.unit}<extra>{own_label}</extra>",
        )
        fig.add_trace(bar, row=panel.row, col=panel.col)


def _budget(fig: go.Figure, own: pd.DataFrame, panel: _Panel) -> None:
    """The model's part of the total, a stroke across each column."""
    own = own[own["fits"]]
    ends = [
        x
        for place in panel.places(list(own["llm_share"]))
        for x in (place - 0.46, place + 0.46, None)
    ]
    heights = [y for size in panel.sizes(own["budget_bytes"]) for y in (size, size, None)]
    stroke = go.Scatter(
        x=ends,
        y=heights,
        mode="lines",
        line={"color": BLACK, "width": 2.5},
        name="the model's part",
        showlegend=panel.row == panel.col == 1,
        hoverinfo="skip",
    )
    fig.add_trace(stroke, row=panel.row, col=panel.col)


def _lacking(fig: go.Figure, own: pd.DataFrame, panel: _Panel) -> None:
    """Shares that do not fit: the model's part in grey, and what it lacks."""
    bar = go.Bar(
        x=panel.places(list(own["llm_share"])),
        y=panel.sizes(own["budget_bytes"]),
        width=0.74,
        name="does not fit",
        showlegend=panel.row == panel.col == 1,
        marker={"color": "#D9D9D9", "line": {"width": 0}},
        hovertemplate="%{y:,.2f} " + panel.unit + "<extra>does not fit</extra>",
    )
    fig.add_trace(bar, row=panel.row, col=panel.col)
    for share, size, lacks in own[["llm_share", "budget_bytes", "lacks_bytes"]].to_numpy(float):
        if lacks:
            place = {"x": panel.shares.index(share), "y": size / UNITS[panel.unit]}
            text = f"lacks {lacks / UNITS[panel.unit]:.1f} {panel.unit}"
            at = {**place, "yanchor": "bottom", "yshift": 3, "textangle": -90, "showarrow": False}
            fig.add_annotation(text=text, **at, row=panel.row, col=panel.col)


def _part_axes(fig: go.Figure, rows: pd.DataFrame, shares: tuple[float, ...], col: int) -> None:
    """Shares below the lower panel; above the upper one whose pair, and the room for KV."""
    kept = thinned(range(len(shares)), 0.15)
    room = rows.drop_duplicates("llm_share").set_index("llm_share")
    above = [_rooms_text(room.loc[[shares[i]]].iloc[0]) for i in kept]
    names = rows.drop_duplicates("model").set_index("model")["name"]
    pair = " + ".join(names[model].removeprefix("dummy:") for model in MODELS)
    title = (
        f"<b>{rows['how'].iloc[0]}</b>, {_size_text(rows)}<br>{pair}<br>room for KV, tokens: "
        f"<span style='color:{VERMILION}'>PRM</span> above <span style='color:{BLUE}'>LLM</span>"
    )
    ticks = {"tickmode": "array", "tickvals": kept, "range": [-0.7, len(shares) - 0.3]}
    top = {"side": "top", "title": {"text": title, "standoff": 4}, "ticktext": above}
    fig.update_xaxes(**ticks, **top, showgrid=False, row=1, col=col)
    below = {"ticktext": [f"{shares[i]:.2f}" for i in kept], "title_text": "LLM share of the total"}
    fig.update_xaxes(**ticks, **below, showgrid=False, row=2, col=col)


def _size_text(rows: pd.DataFrame) -> str:
    """The memory of both models together."""
    total = rows.drop_duplicates(["model", "llm_share"]).groupby("llm_share")["budget_bytes"].sum()
    unit = unit_of(total)
    return f"{total.max() / UNITS[unit]:g} {unit}"


def _rooms_text(room: pd.Series) -> str:
    return "<br>".join(
        f"<span style='color:{MODELS[m].colour}'>{tokens_text(room[f'{m}_kv_tokens'])}</span>"
        for m in ("prm", "llm")
    )


def unit_of(sizes: pd.Series) -> str:
    """The largest unit of which the largest size has one or more."""
    largest = float(sizes.max())
    return [unit for unit, size in UNITS.items() if size <= max(largest, 2**10)][-1]
