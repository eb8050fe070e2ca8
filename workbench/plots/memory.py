"""What each model's memory is used for over the memory split, and how many KV blocks that leaves
(thesis, sections 6.1 and 6.1.1).

Engines that were built stand beside the thesis's pair, which was computed: the same shape at two
scales.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots import theme
from workbench.plots.theme import MODELS, Style, finish, say, series

KV, MORE = "kv", "activations_more"
BAND = {"fillcolor": theme.GREY, "opacity": 0.2, "line_width": 0, "layer": "below"}
SIZES = ["budget", "lacks", "size"]  # columns in the unit of a panel
PARTS = {  # part: (label, colour, pattern); the KV cache has its model's colour
    "weights": ("weights", "#595959", ""),
    KV: ("KV", "", ""),
    "other": ("other (none on a CPU)", theme.SKY, ""),
    "activations_longest": ("activations: longest request", theme.YELLOW, ""),
    MORE: ("more for the batch limits", theme.ORANGE, "/"),
}
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BLOCKS_CAPTION = (
    "KV blocks of both models over the LLM's share of total memory, and the tokens they hold "
    "(right axis). Lines: what the model's part leaves beside weights, and activations where the "
    "total pays for them, over the bytes of a block, rounded down. Markers: engines that were "
    "built. Grey: one of the models cannot hold a single request of the greatest length; crosses: "
    "what it lacks there."
)
_PARTS_CAPTION = (
    "What the memory of each model is used for, over the LLM's share of total memory. Measured: "
    "engines built at each share; computed: from the models' shapes. Black: the "
    "model's part of the total; what stands above one is paid for outside it. Activations are "
    "those of one step over the longest request (thesis), and what a step at the batch limits, for "
    "which is reserved here, takes more. Grey: one of the models does not fit; what it lacks."
)


def memory_parts(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Weights, KV, other and activations of both models, stacked over the share.

    rows: how (measured, computed: a column of panels each), model, name, llm_share, budget_bytes,
    lacks_bytes, part, bytes, fits, llm_kv_tokens, prm_kv_tokens.
    """
    pairs: dict[Any, Any] = dict(iter(rows.groupby("how", sort=False)))
    fig = make_subplots(2, len(pairs), horizontal_spacing=0.1, vertical_spacing=0.05)
    for col, (how, of_pair) in enumerate(pairs.items(), start=1):
        shares, unit = sorted(of_pair["llm_share"].unique()), _unit(of_pair["budget_bytes"])
        sizes = of_pair[["budget_bytes", "lacks_bytes", "bytes"]] / UNITS[unit]
        drawn = of_pair.assign(
            place=of_pair["llm_share"].map(shares.index), **sizes.set_axis(SIZES, axis=1)
        )
        for row, (model, style) in enumerate(MODELS.items(), start=1):
            own = drawn[drawn["model"] == model]
            _columns(fig, own, style, unit, row, col)
            fig.update_yaxes(title_text=f"{style.label}, {unit}", row=row, col=col)
        kept = theme.thinned(range(len(shares)), 0.075 * len(pairs))
        room = of_pair.drop_duplicates("llm_share").set_index("llm_share").to_dict("index")
        above = [theme.both_rooms(room[shares[i]]) for i in kept]
        parts = of_pair.drop_duplicates(["model", "llm_share"]).groupby("llm_share")["budget_bytes"]
        total = parts.sum()
        size = f"{total.max() / UNITS[_unit(total)]:g} {_unit(total)}"
        title = f"<b>{how}</b>, {size}<br>{_pair(of_pair)}<br>{theme.ROOM_TITLE}"
        ticks = {"tickmode": "array", "tickvals": kept, "range": [-0.7, len(shares) - 0.3]}
        top = {"side": "top", "title": {"text": title, "standoff": 4}, "ticktext": above}
        fig.update_xaxes(**ticks, **top, showgrid=False, row=1, col=col)
        shown = [f"{shares[i]:.2f}" for i in kept]
        below = {"ticktext": shown, "title_text": "LLM share of the total"}
        fig.update_xaxes(**ticks, **below, showgrid=False, row=2, col=col)
    fig.update_layout(barmode="stack", legend={"traceorder": "normal"})
    title = "What each model's memory is used for"
    return finish(fig, title, _PARTS_CAPTION, provenance, 470, top=218, right=14, legend=106)


def _columns(
    fig: go.Figure, rows: pd.DataFrame, model: Style, unit: str, row: int, col: int
) -> None:
    """Columns by part at the shares that fit; the model's part of the total as a stroke across each
    of them, and in grey where it does not fit, with what it lacks. Of the activations at the batch
    limits what those of the longest request lack.
    """
    is_first, at = row == col == 1, {"row": row, "col": col}
    fitting = rows[rows["fits"]]
    table = fitting.pivot(index=["place", "llm_share"], columns="part", values="size")
    table = table.reindex(columns=[*PARTS, "activations_limits"])  # where no share fits, too
    reserved, longest = table.pop("activations_limits"), table["activations_longest"]
    table["activations_longest"] = longest.clip(upper=reserved)
    table[MORE] = (reserved - longest).clip(lower=0)
    for rank, (part, (label, colour, pattern)) in enumerate(PARTS.items()):
        shape = {"shape": pattern, "fillmode": "overlay", "fgcolor": "white", "size": 5}
        bar = go.Bar(
            x=table.index.get_level_values("place"),
            y=table[part],
            width=0.74,
            name=f"{label}, {model.label}" if part == KV else label,
            showlegend=col == 1 and (row == 1 or part == KV),
            legendrank=rank,
            customdata=table.index.get_level_values("llm_share"),
            marker={"color": colour or model.colour, "pattern": shape, "line_width": 0},
            hovertemplate="%{customdata:.2f}: %{y:,.2f} " + unit,
        )
        fig.add_trace(bar, **at)
    budgets = fitting.drop_duplicates("place")
    stroke = theme.strokes(list(budgets["place"]), list(budgets["budget"]), 0.46)
    fig.add_trace(stroke.update(name="the model's part", showlegend=is_first), **at)
    without_room = rows[~rows["fits"]].drop_duplicates("place")
    grey = go.Bar(
        x=without_room["place"],
        y=without_room["budget"],
        width=0.74,
        name="does not fit",
        showlegend=is_first,
        marker={"color": "#D9D9D9", "line": {"width": 0}},
        hovertemplate="%{y:,.2f} " + unit,
    )
    fig.add_trace(grey, **at)
    turned = {"textangle": -90, "xanchor": "center", "yshift": 3}
    for place, budget, lacks in without_room[["place", "budget", "lacks"]].to_numpy(float):
        if lacks:
            say(fig, f"lacks {lacks:.1f} {unit}", place, budget, **turned, **at)


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
    pairs: dict[Any, Any] = dict(iter(rows.groupby("how", sort=False)))
    specs, gap = [[{"secondary_y": True}]] * len(pairs), 0.26 / len(pairs)
    fig = make_subplots(len(pairs), 1, specs=specs, shared_xaxes=True, vertical_spacing=gap)
    for row, (how, own) in enumerate(pairs.items(), start=1):
        at = {"row": row, "col": 1}
        for model, style in MODELS.items():
            _counts(fig, own[own["model"] == model], style, row)
        low, high, block_size = own[["low_end", "high_end", "block_size"]].iloc[0]
        last = own["llm_share"].max()
        for start, end in ((0.0, low), (high, last)):  # in grey what is not feasible
            if start < end:  # after the lines: plotly leaves bands out where nothing is drawn yet
                fig.add_vrect(start, end, **BAND, **at)
        empty = go.Scatter(x=[0.3], y=[None], showlegend=False, hoverinfo="skip")
        fig.add_trace(empty, **at, secondary_y=True)
        most = 1.06 * float(own["blocks"].max())
        fig.update_yaxes(title_text="blocks", range=[0, most], **at, secondary_y=False)
        tokens = {"title_text": "tokens they hold", "range": [0, most * block_size]}
        fig.update_yaxes(**tokens, showgrid=False, **at, secondary_y=True)
        shares = {"range": [0, last], "dtick": 0.1, "tickformat": ".1f", "showticklabels": True}
        fig.update_xaxes(title_text=theme.SHARE_TITLE, **shares, **at)
        text = f"<b>{how}</b>: {_pair(own)}, feasible {low:.3f} to {high:.3f}"
        say(fig, text, 0, 1, xref="x domain", yref="y domain", yshift=3, **at)
    title, room = "KV blocks of both models over the split", {"top": 112, "left": 74, "right": 66}
    return finish(fig, title, _BLOCKS_CAPTION, provenance, 260 * len(pairs), **room, legend=22)


def _counts(fig: go.Figure, rows: pd.DataFrame, model: Style, row: int) -> None:
    """One model's formula as a line, engines built on it; crosses, and what it lacks, elsewhere."""
    looks = {
        "formula": (f"{model.label}, formula", model.dash, "circle", "lines", 8),
        "built": (f"{model.label}, engine built", "solid", model.symbol, "markers", 9),
        "lacking": (f"{model.label} does not fit", "solid", "x", "markers", 10),
    }
    for kind, (name, dash, symbol, mode, size) in looks.items():
        own = rows[rows["kind"] == kind].rename(columns={"blocks": "value"})
        look = {"mode": mode, "marker_size": size, "showlegend": row == 1}
        style = Style(name, model.colour, dash, symbol)
        if len(own):
            series(fig, own, "llm_share", style, "%{x:.3f}: %{y:,} blocks", row, 1, **look)
    lacking = rows.loc[rows["kind"] == "lacking", ["llm_share", "lacks_bytes"]]
    for share, lacks in lacking.to_numpy(float):
        unit = _unit(lacking["lacks_bytes"])
        at = {"xanchor": "center", "yshift": 8, "font": {"size": 11}}
        say(fig, f"lacks<br>{lacks / UNITS[unit]:.1f} {unit}", share, 0, **at, row=row, col=1)
