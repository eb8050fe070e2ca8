"""The optimisation chapter in one figure: policies over the split, techniques, memory over time.

Takes the rows the experiments make and draws them: throughput over the static shares with the other
policies as horizontal lines, one panel a budget; each technique alone and together over the shares,
tokens computed again beside throughput; what each model holds while a search runs; accuracy and
sameness of every setting.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.theme import (
    BLACK,
    GREEN,
    GREY,
    MODELS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Frame,
    finish,
    interval,
    legend_at,
)

STATIC, NONE, ALL = "static", "none", "all"


@dataclass(frozen=True, slots=True)
class Line:
    """How a policy or a technique is drawn; never told apart by colour alone."""

    label: str
    colour: str
    dash: str
    symbol: str = "circle"


POLICIES = {
    "static": Line("static split", BLACK, "solid"),
    "first_come": Line("first come", ORANGE, "dot"),
    "phase_aware": Line("phase-aware", PURPLE, "dashdot"),
    "marginal_value": Line("marginal value", GREEN, "dash"),
}
EVERYTHING = Line("marginal value, all that gain", VERMILION, "longdash")
TECHNIQUES = {
    "none": Line("none", BLACK, "solid", "circle"),
    "partial_blocks": Line("partial blocks", SKY, "dash", "square"),
    "forget_pruned": Line("pruned forgotten", GREY, "dash", "triangle-down"),
    "adaptive": Line("adaptive batching", BLACK, "dot", "cross"),
    "prefix_order": Line("prefix-aware order", ORANGE, "dot", "diamond"),
    "all": Line("all that gain", VERMILION, "solid", "hexagon"),
}
SHARE_AXIS = "LLM share of KV"
MIB = 2**20
_FRAME = Frame(panels=1080, top=100)
_HEIGHTS = (0.25, 0.28, 0.25, 0.22)
_GAP = 0.1
_CAPTION = (
    "Two models in one memory. Top: generated tokens per second over the LLM's share of the KV "
    "budget where the split is static, and as horizontal lines under policies that need no share, "
    "at budgets in multiples of the working set W; crosses: shares that leave a model less than "
    "one request. Second: each technique alone, and those that gain together, over the static "
    "share at the smallest budget: tokens that both models computed again because memory was "
    "short, which are exact, and throughput, which is this machine's (ratios and their intervals "
    "are in the text). Third: what each model holds (line), uses (area) and should "
    "come to (thin) at its own steps of one search. Bottom: accuracy of every setting; "
    "filled where every node has the uncapped search's tokens and score. Bars: 95 % intervals, of "
    "throughput those of its ratio to marginal value's on the same problems, of accuracy over "
    "problems."
)


def optimisation(rows: pd.DataFrame, face: str = "") -> go.Figure:
    """Policies, techniques, memory over time, accuracy: four rows of panels.

    rows: metric, setting, budget, policy, kv_share, technique, value, low, high, model, second;
    metrics tokens_per_s, accuracy, same, recomputed, infeasible, held, active, target.
    """
    budgets = sorted(rows["budget"].dropna().unique())[:3]
    width = 6 // len(budgets)
    gap: list[None] = [None] * (width - 1)
    first = [cell for _ in budgets for cell in ({"colspan": width}, *gap)]
    whole = [{"colspan": 6}, *[None] * 5]
    halves = [{"colspan": 3}, None, None] * 2
    fig = make_subplots(
        4,
        6,
        specs=[first, halves, halves, whole],
        row_heights=_HEIGHTS,
        vertical_spacing=_GAP,
        horizontal_spacing=0.1,
        subplot_titles=[f"{budget:g} W" for budget in budgets],
    )
    for number, budget in enumerate(budgets):
        _policies(fig, rows[rows["budget"] == budget], 1 + number * width, shown=not number)
    fig.update_yaxes(title_text="generated tokens/s", row=1, col=1)
    _techniques(fig, rows[rows["budget"] == budgets[0]])
    _memory(fig, rows)
    _accuracy(fig, rows)
    for name, foot in zip(("legend", "legend2", "legend3"), _feet()):
        legend_at(fig, name, foot)
    fig.update_annotations(font={"size": 13})
    return finish(fig, "Two models, one memory", _CAPTION, face, _FRAME)


def _feet() -> list[float]:
    """Where the legends of the first three rows of panels stand: just above them."""
    free = 1 - 3 * _GAP
    tops = [1 - sum(_HEIGHTS[:row]) * free - row * _GAP for row in range(3)]
    return [top + shift for top, shift in zip(tops, (0.028, 0.004, 0.004))]


def _policies(fig: go.Figure, rows: pd.DataFrame, column: int, shown: bool) -> None:
    """Throughput over the static share; the other policies across the panel."""
    speed = rows[(rows["metric"] == "tokens_per_s")]
    plain = speed[speed["technique"] == NONE]
    static = plain[plain["policy"] == STATIC].sort_values("kv_share")
    given = {"row": 1, "col": column}
    fig.add_trace(_shares(static, POLICIES[STATIC], "legend", shown), **given)
    ends = [float(rows["kv_share"].min()) - 0.03, float(rows["kv_share"].max()) + 0.03]
    across = [(POLICIES[name], plain[plain["policy"] == name]) for name in POLICIES]
    everything = speed[(speed["technique"] == ALL) & (speed["policy"] != STATIC)]
    for line, own in (*across[1:], (EVERYTHING, everything)):
        if len(own):
            fig.add_trace(_across(own.iloc[0], line, ends, shown), **given)
    bad = rows[(rows["metric"] == "infeasible") & (rows["technique"] == NONE)]
    if len(bad):
        cross = {"symbol": "x", "size": 9, "color": GREY}
        fig.add_trace(
            go.Scatter(
                x=bad["kv_share"],
                y=[0.0] * len(bad),
                mode="markers",
                marker=cross,
                name="infeasible",
                legend="legend",
                showlegend=shown,
                cliponaxis=False,
                hovertemplate="share %{x:.2f}: less than one request<extra></extra>",
            ),
            **given,
        )
    fig.update_xaxes(title_text=SHARE_AXIS, range=ends, row=1, col=column)
    fig.update_yaxes(rangemode="tozero", row=1, col=column)


def _shares(
    rows: pd.DataFrame,
    line: Line,
    legend: str,
    shown: bool = True,
    unit: str = "tokens/s",
    bars: bool = True,
) -> go.Scatter:
    """A value over the static share; bars: with intervals."""
    return go.Scatter(
        x=rows["kv_share"],
        y=rows["value"],
        error_y=interval(rows, line.colour) if bars else None,
        name=line.label,
        mode="lines+markers",
        line={"color": line.colour, "dash": line.dash, "width": 2},
        marker={"symbol": line.symbol, "size": 7, "color": line.colour},
        legend=legend,
        showlegend=shown,
        hovertemplate=f"share %{{x:.2f}}: %{{y:,.0f}} {unit}<extra>{line.label}</extra>",
    )


def _across(row: pd.Series, line: Line, ends: list[float], shown: bool) -> go.Scatter:
    """A policy that needs no share, as a horizontal line."""
    text = f"{row['value']:,.0f} tokens/s"
    return go.Scatter(
        x=ends,
        y=[row["value"]] * 2,
        name=line.label,
        mode="lines",
        line={"color": line.colour, "dash": line.dash, "width": 2.5},
        legend="legend",
        showlegend=shown,
        hovertemplate=text + "<extra>" + line.label + "</extra>",
    )


def _techniques(fig: go.Figure, rows: pd.DataFrame) -> None:
    """A line for each technique over the static shares: what it computes again, and how fast."""
    static = rows[(rows["policy"] == STATIC) & (rows["technique"].isin(list(TECHNIQUES)))]
    panels = {"recomputed": (1, "tokens computed again"), "tokens_per_s": (4, "generated tokens/s")}
    for metric, (column, label) in panels.items():
        found = static[static["metric"] == metric]
        for technique, line in TECHNIQUES.items():
            own = found[found["technique"] == technique].sort_values("kv_share")
            if len(own):
                shown = metric == "recomputed"
                trace = _shares(own, line, "legend2", shown, label, bars=False)
                fig.add_trace(trace, row=2, col=column)
        fig.update_xaxes(title_text=SHARE_AXIS, row=2, col=column)
        fig.update_xaxes(tickvals=sorted(set(found["kv_share"])), row=2, col=column)
        axis = {"title_text": label, "title_standoff": 3, "rangemode": "tozero"}
        fig.update_yaxes(**axis, row=2, col=column)


def _memory(fig: go.Figure, rows: pd.DataFrame) -> None:
    """What both models hold, use and should come to; the thesis's split left, elastic right."""
    held = rows[rows["metric"].isin(["held", "active", "target"])]
    policies = [name for name in (STATIC, "marginal_value") if name in set(held["policy"])]
    highest = 1.05 * float(held["value"].max()) / MIB if len(held) else 1.0
    for policy in policies:
        own = held[held["policy"] == policy]
        column = 1 if policy == STATIC else 4
        share = own["kv_share"].iloc[0]
        named = f"static {share:g}" if policy == STATIC else POLICIES[policy].label
        for model in reversed(MODELS):  # the smaller area in front
            _held(fig, own[own["model"] == model], model, column, policy == policies[0])
        fig.update_xaxes(title_text=f"seconds of a search, {named}", row=3, col=column)
        fig.update_yaxes(range=[0, highest], row=3, col=column)
    fig.update_yaxes(title_text="KV, MiB", row=3, col=1)


def _held(fig: go.Figure, rows: pd.DataFrame, model: str, column: int, shown: bool) -> None:
    style = MODELS[model]
    drawn = {
        "active": (f"{style.label} in use", {"width": 0, "color": style.soft}, "tozeroy"),
        "held": (f"{style.label} held", {"width": 2, "color": style.colour}, None),
        "target": (
            f"{style.label} target",
            {"width": 1, "color": style.colour, "dash": "dot"},
            None,
        ),
    }
    for metric, (label, line, fill) in drawn.items():
        own = rows[rows["metric"] == metric].sort_values("second")
        trace = go.Scatter(
            x=own["second"],
            y=own["value"] / MIB,
            mode="lines",
            line=line,
            fill=fill,
            fillcolor=style.soft,
            opacity=0.8,
            name=label,
            legend="legend3",
            showlegend=shown,
            hovertemplate="%{x:.1f} s: %{y:.2f} MiB<extra>" + label + "</extra>",
        )
        fig.add_trace(trace, row=3, col=column)


def _accuracy(fig: go.Figure, rows: pd.DataFrame) -> None:
    """Every setting's accuracy; open marks where a node differs from the uncapped search's."""
    right = rows[rows["metric"] == "accuracy"].reset_index(drop=True)
    same = rows[rows["metric"] == "same"].set_index("setting")["value"]
    equal = [float(same.get(setting, 0.0)) == 1.0 for setting in right["setting"]]
    trace = go.Scatter(
        x=list(range(1, len(right) + 1)),
        y=right["value"],
        error_y=interval(right, GREY),
        mode="markers",
        marker={
            "symbol": ["circle" if fine else "circle-open" for fine in equal],
            "size": 7,
            "color": BLACK,
        },
        customdata=right["setting"],
        showlegend=False,
        hovertemplate="%{customdata}: accuracy %{y:.2f}<extra></extra>",
    )
    fig.add_trace(trace, row=4, col=1)
    told = f"the {len(right)} settings; {sum(equal)} sample the same tokens and scores throughout"
    fig.update_xaxes(title_text=told, showticklabels=False, row=4, col=1)
    fig.update_xaxes(ticks="", showgrid=False, row=4, col=1)
    fig.update_yaxes(title_text="accuracy", range=[0, 1.08], row=4, col=1)
