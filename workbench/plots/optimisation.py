"""The optimisation chapter in one figure: policies over the split, techniques alone and together,
memory over time, and whether every setting sampled the same tokens.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots import theme
from workbench.plots.theme import MODELS, Style, finish, legend_at, say, series

STATIC, NONE, ALL = "static", "none", "all"
POLICIES = {
    "static": Style("static split", theme.BLACK),
    "first_come": Style("first come", theme.ORANGE, "dot"),
    "phase_aware": Style("phase-aware", theme.PURPLE, "dashdot"),
    "marginal_value": Style("marginal value", theme.GREEN, "dash"),
}
EVERYTHING = Style("marginal value, all techniques", theme.VERMILION, "longdash")
TECHNIQUES = {
    "none": Style("none", theme.BLACK),
    "partial_blocks": Style("partial blocks", theme.SKY, "dash", "square"),
    "forget_pruned": Style("pruned forgotten", theme.GREY, "dash", "triangle-down"),
    "adaptive": Style("adaptive batching", theme.PURPLE, "dot", "cross"),
    "prefix_order": Style("prefix-aware order", theme.ORANGE, "dot", "diamond"),
    "all": Style("all techniques", theme.VERMILION, "solid", "hexagon"),
}
SHARE_AXIS = "LLM share of KV"
MIB = 2**20
_PANELS_PX = 560
_ROWS = ((1.0, 0.75), (0.58, 0.37), (0.2, 0.0))
"""Head and foot of each row of panels; its legend stands above, its axis title below."""
_CAPTION = (
    "Top: generated tokens/s over the LLM's share of the KV where the split is static; horizontal "
    "lines: policies that need no share; crosses: shares that leave a model less than one request. "
    "W is the LLM's peak of KV plus the PRM's with memory uncapped, which need not fall together. "
    "Middle, at the smallest budget: each technique alone, and all that are drawn together: tokens "
    "that both models computed again because memory was short (exact), and throughput. Bottom: "
    "what each model holds (line), uses (area) and should come to (thin) in one search. Bars: 95 % "
    "intervals of the ratio to marginal value's on the same problems."
)


def optimisation(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Policies, techniques, memory over time; in words, accuracy and sameness of the settings.

    rows: metric, setting, budget, policy, kv_share, technique, value, low, high, model, second;
    metrics tokens_per_s, accuracy, same, recomputed, infeasible, held, active, target.
    """
    rows = rows[rows["technique"].isin(list(TECHNIQUES))]
    budgets = sorted(rows["budget"].dropna().unique())[:3]
    width = 6 // len(budgets)
    first = [cell for _ in budgets for cell in ({"colspan": width}, *[None] * (width - 1))]
    halves = [{"colspan": 3}, None, None] * 2
    fig = make_subplots(3, 6, specs=[first, halves, halves], horizontal_spacing=0.13,
                        subplot_titles=[f"{budget:g} W" for budget in budgets])  # fmt: skip
    for number, budget in enumerate(budgets):
        _policies(fig, rows[rows["budget"] == budget], 1 + number * width, shown=not number)
    fig.update_yaxes(title_text="tokens/s", row=1, col=1)
    _techniques(fig, rows[rows["budget"] == budgets[0]])
    _memory(fig, rows)
    for row, (head, foot) in enumerate(_ROWS, start=1):
        fig.update_yaxes(domain=[foot, head], row=row)
        if row > 1:  # of the first, `finish` places it
            legend_at(fig, f"legend{row}", head + 6 / _PANELS_PX)
    fig.update_annotations(y=1, font={"size": 13})
    lines = theme.wrapped(_sameness(rows), 88)
    for line, text in enumerate(lines):
        say(fig, text, 0, 0, yanchor="top", yshift=-46 - 16 * line)
    room = {"top": 128, "bottom": 48 + 18 * len(lines), "legend": 24}
    return finish(fig, "Two models, one memory", _CAPTION, provenance, _PANELS_PX, **room)


def _policies(fig: go.Figure, rows: pd.DataFrame, column: int, shown: bool) -> None:
    """Throughput over the static share; the other policies across the panel."""
    place = {"row": 1, "col": column}
    speed = rows[rows["metric"] == "tokens_per_s"]
    plain = speed[speed["technique"] == NONE]
    static = plain[plain["policy"] == STATIC].sort_values("kv_share")
    hover = "share %{x:.2f}: %{y:,.0f} tokens/s"
    look = {"legend": "legend", "showlegend": shown, "marker_size": 7}
    series(fig, static, "kv_share", POLICIES[STATIC], hover, **place, **look)
    ends = [float(rows["kv_share"].min()) - 0.03, float(rows["kv_share"].max()) + 0.03]
    across = [(style, plain[plain["policy"] == name]) for name, style in POLICIES.items()][1:]
    everything = speed[(speed["technique"] == ALL) & (speed["policy"] != STATIC)]
    for style, own in (*across, (EVERYTHING, everything)):
        for rate in own["value"].head(1):  # it needs no share: a horizontal line
            level = pd.DataFrame({"kv_share": ends, "value": rate})
            across_it = look | {"mode": "lines", "line_width": 2.5}
            series(fig, level, "kv_share", style, f"{rate:,.0f} tokens/s", **place, **across_it)
    bad = rows[(rows["metric"] == "infeasible") & (rows["technique"] == NONE)].assign(value=0.0)
    if len(bad):
        hover = "share %{x:.2f}: less than one request"
        cross, look = Style("infeasible", theme.GREY, symbol="x"), look | {"marker_size": 9}
        series(fig, bad, "kv_share", cross, hover, **place, **look, mode="markers")
    fig.update_xaxes(title={"text": SHARE_AXIS, "standoff": 4}, range=ends, **place)
    fig.update_yaxes(rangemode="tozero", **place)


def _techniques(fig: go.Figure, rows: pd.DataFrame) -> None:
    """A line for each technique over the static shares: what it computes again, and how fast."""
    static = rows[rows["policy"] == STATIC].sort_values("kv_share")
    panels = {"recomputed": (1, "recomputed"), "tokens_per_s": (4, "tokens/s")}
    for metric, (column, label) in panels.items():
        found = static[static["metric"] == metric].drop(columns=["low", "high"])
        place, hover = {"row": 2, "col": column}, f"share %{{x:.2f}}: %{{y:,.0f}} {label}"
        look = {"legend": "legend2", "marker_size": 7, "showlegend": metric == "recomputed"}
        for technique, style in TECHNIQUES.items():
            own = found[found["technique"] == technique]
            if len(own):
                series(fig, own, "kv_share", style, hover, **place, **look)
        title = {"text": SHARE_AXIS, "standoff": 4}
        fig.update_xaxes(title=title, tickvals=sorted(set(found["kv_share"])), **place)
        fig.update_yaxes(title={"text": label, "standoff": 3}, rangemode="tozero", **place)


def _memory(fig: go.Figure, rows: pd.DataFrame) -> None:
    """What both models hold, use and should come to; the thesis's split left, elastic right."""
    held = rows[rows["metric"].isin(["held", "active", "target"])].sort_values("second")
    policies = [name for name in (STATIC, "marginal_value") if name in set(held["policy"])]
    looks: dict[str, tuple[str, dict[str, Any]]] = {
        "active": ("in use", {"width": 0}),
        "held": ("held", {"width": 2}),
        "target": ("target", {"width": 1, "dash": "dot"}),
    }
    for policy in policies:
        own, at = held[held["policy"] == policy], {"row": 3, "col": 1 if policy == STATIC else 4}
        share = own["kv_share"].iloc[0]
        named = f"static {share:g}" if policy == STATIC else POLICIES[policy].label
        for model, (metric, (label, look)) in product(reversed(MODELS), looks.items()):
            style = MODELS[model]  # the smaller area in front
            drawn = own[(own["model"] == model) & (own["metric"] == metric)]
            trace = go.Scatter(
                x=drawn["second"],
                y=drawn["value"] / MIB,
                mode="lines",
                line={"color": style.soft if metric == "active" else style.colour, **look},
                fill="tozeroy" if metric == "active" else None,
                fillcolor=style.soft,
                opacity=0.8,
                name=f"{style.label} {label}",
                legend="legend3",
                showlegend=policy == policies[0],
                hovertemplate="%{x:.1f} s: %{y:.2f} MiB",
            )
            fig.add_trace(trace, **at)
        title = {"text": f"seconds of a search, {named}", "standoff": 4}
        fig.update_xaxes(title=title, **at)
        fig.update_yaxes(range=[0, 1.05 * float(held["value"].max()) / MIB], **at)
    fig.update_yaxes(title_text="KV, MiB", row=3, col=1)


def _sameness(rows: pd.DataFrame) -> str:
    """Whether the settings sampled the uncapped search's tokens and scores, and their accuracy."""
    right = rows[rows["metric"] == "accuracy"].set_index("setting")["value"]
    same = rows[rows["metric"] == "same"].set_index("setting")["value"].reindex(right.index) == 1
    if right.empty:
        return ""
    text = f"{same.sum()} of {len(right)} settings sample the same tokens and scores"
    if same.any():
        text += f", accuracy {right[same].iloc[0]:.2f}"
    others = [f"{name} ({value:.2f})" for name, value in right[~same].items()]
    return f"{text}. Not the same: {', '.join(others)}." if others else f"{text}."
