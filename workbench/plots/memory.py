"""What each model's memory is used for over the memory split, and how many KV blocks that leaves
(thesis, sections 6.1 and 6.1.1).

Engines that were built stand beside the thesis's pair, which was computed: the same shape at two
scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots import theme
from workbench.plots.theme import MODELS, Frame, Style, finish, legend_at, say, series

HOWS = ("measured", "computed")
KV, MORE = "kv", "activations_more"
PARTS = {  # part: (label, colour, pattern); the KV cache has its model's colour
    "weights": ("weights", "#595959", ""),
    KV: ("KV", "", ""),
    "other": ("other: 0 on a CPU", theme.SKY, ""),
    "activations_longest": ("activations: longest request", theme.YELLOW, ""),
    MORE: ("more for the batch limits", theme.ORANGE, "/"),
}
_TOP_AXIS_PX = 106
_PARTS_FRAME = Frame(panels=470, top=_TOP_AXIS_PX + 112, right=14)
_BLOCKS_FRAME = Frame(panels=520, top=112, left=74, right=66)
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BLOCKS_CAPTION = (
    "KV blocks of both models over the LLM's share of total memory, and the tokens they hold "
    "(right axis). Lines: what the model's part leaves beside weights, and activations where the "
    "total pays for them, over the bytes of a block, rounded down. Markers: engines that were "
    "built. Grey: one of the models cannot hold a single request of the greatest length; crosses: "
    "what it lacks there."
)
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


def memory_parts(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Weights, KV, other and activations of both models, stacked over the share.

    rows: how (measured | computed), model, name, llm_share, budget_bytes, lacks_bytes, part, bytes,
    fits, in_total, llm_kv_tokens, prm_kv_tokens.
    """
    hows = [how for how in HOWS if how in set(rows["how"])]
    fig = make_subplots(2, len(hows), horizontal_spacing=0.1, vertical_spacing=0.05)
    for col, how in enumerate(hows, start=1):
        of_pair = rows[rows["how"] == how]
        shares, unit = tuple(sorted(of_pair["llm_share"].unique())), _unit(of_pair["budget_bytes"])
        for row, model in enumerate(MODELS, start=1):
            panel = _Panel(model, row, col, shares, unit)
            own = of_pair[of_pair["model"] == model]
            _stack(fig, own[own["fits"]], panel)
            _lacking(fig, own[~own["fits"]].drop_duplicates("llm_share"), panel)
            fig.update_yaxes(title_text=f"{MODELS[model].label}, {unit}", row=row, col=col)
        _part_axes(fig, of_pair, shares, col)
    fig.update_layout(barmode="stack")
    legend_at(fig, "legend", _PARTS_FRAME.above(_TOP_AXIS_PX), traceorder="normal")
    return finish(
        fig, "What each model's memory is used for", _PARTS_CAPTION, provenance, _PARTS_FRAME
    )


def _stack(fig: go.Figure, rows: pd.DataFrame, panel: _Panel) -> None:
    """Columns of bytes by part, and the model's part of the total as a stroke across each; of the
    activations at the batch limits what those of the longest request lack.
    """
    model = MODELS[panel.model]
    table = rows.pivot(index="llm_share", columns="part", values="bytes")
    reserved, longest = table.pop("activations_limits"), table["activations_longest"]
    table["activations_longest"] = longest.clip(upper=reserved)
    table[MORE] = (reserved - longest).clip(lower=0)
    for part, (label, colour, pattern) in PARTS.items():
        shape = {"shape": pattern, "fillmode": "overlay", "fgcolor": "white", "size": 5}
        bar = go.Bar(
            x=panel.places(list(table.index)),
            y=panel.sizes(table[part]),
            width=0.74,
            name=f"{label}, {model.label}" if part == KV else label,
            showlegend=panel.col == 1 and (panel.row == 1 or part == KV),
            legendrank=list(PARTS).index(part),
            customdata=table.index,
            marker={"color": colour or model.colour, "pattern": shape, "line_width": 0},
            hovertemplate="%{customdata:.2f}: %{y:,.2f} " + panel.unit,
        )
        fig.add_trace(bar, row=panel.row, col=panel.col)
    budgets = rows.drop_duplicates("llm_share")
    heights = list(panel.sizes(budgets["budget_bytes"]))
    stroke = go.Scatter(
        **theme.strokes(panel.places(list(budgets["llm_share"])), heights, 0.46),
        mode="lines",
        line={"color": theme.BLACK, "width": 2.5},
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
        hovertemplate="%{y:,.2f} " + panel.unit,
    )
    fig.add_trace(bar, row=panel.row, col=panel.col)
    for share, size, lacks in own[["llm_share", "budget_bytes", "lacks_bytes"]].to_numpy(float):
        if lacks:
            text = f"lacks {lacks / UNITS[panel.unit]:.1f} {panel.unit}"
            at = {"x": panel.shares.index(share), "y": size / UNITS[panel.unit], "yshift": 3}
            turned = {"textangle": -90, "xanchor": "center"}
            say(fig, text, **at, **turned, row=panel.row, col=panel.col)


def _part_axes(fig: go.Figure, rows: pd.DataFrame, shares: tuple[float, ...], col: int) -> None:
    """Shares below the lower panel; above the upper one whose pair, and the room for KV."""
    kept = theme.thinned(range(len(shares)), 0.15)
    room = rows.drop_duplicates("llm_share").set_index("llm_share")
    rooms = [room.loc[[shares[i]]].iloc[0] for i in kept]
    above = [theme.both_rooms(own) for own in rooms]
    total = rows.drop_duplicates(["model", "llm_share"]).groupby("llm_share")["budget_bytes"].sum()
    unit = _unit(total)
    size = f"{total.max() / UNITS[unit]:g} {unit}"
    title = f"<b>{rows['how'].iloc[0]}</b>, {size}<br>{_pair(rows)}<br>{theme.ROOM_TITLE}"
    ticks = {"tickmode": "array", "tickvals": kept, "range": [-0.7, len(shares) - 0.3]}
    top = {"side": "top", "title": {"text": title, "standoff": 4}, "ticktext": above}
    fig.update_xaxes(**ticks, **top, showgrid=False, row=1, col=col)
    below = {"ticktext": [f"{shares[i]:.2f}" for i in kept], "title_text": "LLM share of the total"}
    fig.update_xaxes(**ticks, **below, showgrid=False, row=2, col=col)


def _pair(rows: pd.DataFrame) -> str:
    names = rows.groupby("model")["name"].first()
    return " + ".join(names[model].removeprefix("dummy:") for model in MODELS)


def _unit(sizes: pd.Series) -> str:
    """The largest unit of which the largest size has one or more."""
    largest = float(sizes.max())
    return [unit for unit, size in UNITS.items() if size <= max(largest, 2**10)][-1]


def kv_blocks(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
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
            _counts(fig, own[own["model"] == model], model, row)
        _block_axes(fig, own, row)
    legend_at(fig, "legend", _BLOCKS_FRAME.above(22))
    title = "KV blocks of both models over the split"
    return finish(fig, title, _BLOCKS_CAPTION, provenance, _BLOCKS_FRAME)


def _counts(fig: go.Figure, rows: pd.DataFrame, model: str, row: int) -> None:
    """One model's formula as a line, engines that were built on it; a cross where it does not fit,
    and what it lacks there.
    """
    label, colour = MODELS[model].label, MODELS[model].colour
    of = dict(iter(rows.rename(columns={"blocks": "value"}).groupby("kind")))
    looks = {
        "formula": (f"{label}, formula", MODELS[model].dash, "circle", "lines", 8),
        "built": (f"{label}, engine built", "solid", MODELS[model].symbol, "markers", 9),
        "lacking": (f"{label} does not fit", "solid", "x", "markers", 10),
    }
    for kind, (name, dash, symbol, mode, size) in looks.items():
        if kind in of:
            style = Style(name, colour, dash, symbol)
            line = series(of[kind], "llm_share", style, "%{x:.3f}: %{y:,} blocks", mode=mode)
            fig.add_trace(line.update(marker_size=size, showlegend=row == 1), row=row, col=1)
    if "lacking" in of:
        unit = _unit(of["lacking"]["lacks_bytes"])
        for share, lacks in of["lacking"][["llm_share", "lacks_bytes"]].to_numpy(float):
            text = f"lacks<br>{lacks / UNITS[unit]:.1f} {unit}"
            at = {"xanchor": "center", "yshift": 8, "font": {"size": 11}}
            say(fig, text, share, 0, **at, row=row, col=1)


def _block_axes(fig: go.Figure, rows: pd.DataFrame, row: int) -> None:
    """Both axes, whose pair it is, and in grey what lies outside the feasible shares."""
    low, high = rows["low_end"].iloc[0], rows["high_end"].iloc[0]
    band = {"fillcolor": theme.GREY, "opacity": 0.2, "line_width": 0, "layer": "below"}
    for start, end in ((0.0, low), (high, rows["llm_share"].max())):
        if start < end:  # drawn after the lines: plotly leaves bands out where nothing is drawn yet
            fig.add_vrect(start, end, **band, row=row, col=1)
    reach = 1.06 * float(rows["blocks"].max())
    size = int(rows["block_size"].iloc[0])
    empty = go.Scatter(x=[0.3], y=[None], showlegend=False, hoverinfo="skip")
    fig.add_trace(empty, row=row, col=1, secondary_y=True)
    fig.update_yaxes(title_text="blocks", range=[0, reach], row=row, col=1, secondary_y=False)
    tokens = {"title_text": "tokens they hold", "range": [0, reach * size], "showgrid": False}
    fig.update_yaxes(**tokens, row=row, col=1, secondary_y=True)
    ticks = {"range": [0, rows["llm_share"].max()], "dtick": 0.1, "tickformat": ".1f"}
    fig.update_xaxes(**ticks, showticklabels=True, row=row, col=1)
    text = f"<b>{rows['how'].iloc[0]}</b>: {_pair(rows)}, feasible {low:.3f} to {high:.3f}"
    place = {"xref": "x domain", "yref": "y domain", "yshift": 3}
    say(fig, text, 0, 1, **place, row=row, col=1)
    fig.update_xaxes(title_text=theme.SHARE_TITLE, row=row, col=1)
