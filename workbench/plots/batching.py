"""Throughput of each model over its two batch limits (thesis, figures 6.4 and 6.5), and static
batches beside continuous ones.

Takes one row a cell, those that cannot be included, and draws them. What it does not do: measure,
or leave out what has no number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.theme import (
    BLACK,
    GREY,
    MODELS,
    PURPLE,
    SYMBOLS,
    Frame,
    finish,
    interval,
    legend_at,
    mixed,
    shade,
)

CONTINUOUS = "continuous"
BESIDE = {  # kind: (label, colour, dash, symbol)
    "continuous, no prefix cache": ("no prefix cache", BLACK, "dot", "diamond"),
    "static, padded": ("static, padded", PURPLE, "dash", "triangle-up"),
}
TOKENS = {"llm": "generated tokens/s", "prm": "tokens read for the first time/s"}
STEPS = {"llm": "reasoning steps sampled/s", "prm": "reasoning steps judged/s"}
_LIMITS_FRAME = Frame(panels=560)
_AS_INTERVAL = {
    "steps_per_s": "value",
    "steps_per_s_low": "low",
    "steps_per_s_high": "high",
}
_HEAT_FOOT = 0.66  # of the drawing: the lines below it, the heat map above
_LINES_HEAD = 0.46


def batch_limits(rows: pd.DataFrame, face: str = "") -> go.Figure:
    """One model's throughput over max_num_batched_tokens and max_num_seqs; static batches beside.

    rows: model, kind (continuous | continuous, no prefix cache | static, padded), max_num_seqs,
    max_num_batched_tokens, tokens_per_s, steps_per_s with _low and _high, error: why a cell has no
    rates.
    """
    model = str(rows["model"].iloc[0])
    continuous = rows[rows["kind"] == CONTINUOUS]
    fig = make_subplots(rows=2)
    _heat(fig, continuous, model)
    _lines(fig, continuous, model)
    for kind in BESIDE:
        _beside(fig, rows[rows["kind"] == kind], kind)
    _limit_axes(fig, rows, model)
    title = f"Throughput of the {MODELS[model].label} over its batch limits"
    return finish(fig, title, _limits_caption(rows, model), face, _LIMITS_FRAME)


def _heat(fig: go.Figure, rows: pd.DataFrame, model: str) -> None:
    """Rates as a heat map over places 0, 1, ... of both limits; what cannot be is hatched."""
    table = rows.pivot_table(
        index="max_num_seqs", columns="max_num_batched_tokens", values="tokens_per_s", dropna=False
    )
    rates = table.to_numpy(float)
    heat = go.Heatmap(
        z=rates,
        text=[[_short(rate) for rate in line] for line in rates],
        texttemplate="%{text}",
        colorscale=[[0, mixed(model, 0.04)], [1, mixed(model, 0.8)]],
        zmin=0,
        zmax=float(np.nanmax(rates)),
        showscale=False,
        xgap=2,
        ygap=2,
        textfont={"size": 12, "color": "#111111"},
        customdata=[[(s, t) for t in table.columns] for s in table.index],
        hovertemplate="%{customdata[0]:,} sequences, %{customdata[1]:,} tokens: %{z:,.0f} "
        + TOKENS[model]
        + "<extra></extra>",
    )
    fig.add_trace(heat, row=1, col=1)
    _hatch(fig, rows[rows["tokens_per_s"].isna()], table.columns.tolist(), table.index.tolist())
    places = {"tickmode": "array", "showgrid": False}
    for axis, values in (("xaxis", table.columns), ("yaxis", table.index)):
        ticks = {"tickvals": list(range(len(values))), "ticktext": [f"{v:,}" for v in values]}
        fig.update_layout({axis: {**places, **ticks, "range": [-0.5, len(values) - 0.5]}})


def _hatch(fig: go.Figure, rows: pd.DataFrame, tokens: list[Any], seqs: list[Any]) -> None:
    bars = go.Bar(
        x=[tokens.index(t) for t in rows["max_num_batched_tokens"]],
        base=[seqs.index(s) - 0.5 for s in rows["max_num_seqs"]],
        y=np.ones(len(rows)),
        width=1.0,
        customdata=rows[["error"]],
        marker={
            "color": "#F4F4F4",
            "line": {"width": 0},
            "pattern": {"shape": "/", "fgcolor": GREY, "size": 7, "solidity": 0.2},
        },
        name="infeasible",
        showlegend=False,
        hovertemplate="infeasible: %{customdata[0]}<extra></extra>",
    )
    fig.add_trace(bars, row=1, col=1)


def _lines(fig: go.Figure, rows: pd.DataFrame, model: str) -> None:
    """Continuous batching over max_num_seqs, a line for each limit of tokens, darker for more."""
    limits = sorted(rows["max_num_batched_tokens"].unique())
    for rank, tokens in enumerate(limits):
        own = rows[(rows["max_num_batched_tokens"] == tokens) & rows["steps_per_s"].notna()]
        colour = shade(model, rank, len(limits))
        name = f"{tokens:,} tokens a step"
        fig.add_trace(_line(own, name, colour, "solid", SYMBOLS[rank % 7]), row=2, col=1)


def _beside(fig: go.Figure, rows: pd.DataFrame, kind: str) -> None:
    """What continuous batching is compared with; a cross on the axis where it does not fit."""
    label, colour, dash, symbol = BESIDE[kind]
    measured, refused = rows[rows["steps_per_s"].notna()], rows[rows["steps_per_s"].isna()]
    if len(measured):
        fig.add_trace(_line(measured, label, colour, dash, symbol), row=2, col=1)
    if len(refused):
        crosses = go.Scatter(
            x=refused["max_num_seqs"],
            y=np.zeros(len(refused)),
            customdata=refused[["error"]],
            name=f"{label}: does not fit",
            mode="markers",
            marker={"symbol": "x", "size": 10, "color": colour},
            cliponaxis=False,
            hovertemplate="%{x}: %{customdata[0]}<extra></extra>",
        )
        fig.add_trace(crosses, row=2, col=1)


def _line(rows: pd.DataFrame, name: str, colour: str, dash: str, symbol: str) -> go.Scatter:
    own = rows.sort_values("max_num_seqs")
    return go.Scatter(
        x=own["max_num_seqs"],
        y=own["steps_per_s"],
        error_y=interval(own.rename(columns=_AS_INTERVAL), colour),
        name=name,
        mode="lines+markers",
        line={"color": colour, "dash": dash, "width": 2},
        marker={"symbol": symbol, "size": 8, "color": colour},
        cliponaxis=False,
        hovertemplate="%{x} sequences: %{y:,.1f} steps/s<extra>" + name + "</extra>",
    )


def _limit_axes(fig: go.Figure, rows: pd.DataFrame, model: str) -> None:
    fig.update_xaxes(title_text="max_num_batched_tokens: tokens in one step", row=1, col=1)
    fig.update_yaxes(title_text="max_num_seqs", domain=[_HEAT_FOOT, 1], row=1, col=1)
    seqs = sorted(rows["max_num_seqs"].unique())
    fig.update_xaxes(
        title_text="max_num_seqs: sequences in one step",
        type="log",
        tickmode="array",
        tickvals=seqs,
        range=[np.log10(seqs[0]) - 0.08, np.log10(seqs[-1]) + 0.08],
        row=2,
        col=1,
    )
    reach = 1.08 * float(rows["steps_per_s"].max())
    fig.update_yaxes(
        title_text=STEPS[model], range=[0, reach], domain=[0, _LINES_HEAD], row=2, col=1
    )
    legend_at(fig, "legend", _LINES_HEAD + 0.005)
    cannot = rows.loc[rows["kind"] == CONTINUOUS, "tokens_per_s"].isna().any()
    hatched = "; hatched: infeasible" if cannot else ""
    _say(fig, f"<b>{TOKENS[model]}</b>, continuous batching{hatched}", 1.0)


def _say(fig: go.Figure, text: str, y: float) -> None:
    place = {"x": 0, "y": y, "xref": "paper", "yref": "paper", "xanchor": "left"}
    fig.add_annotation(text=text, showarrow=False, yanchor="bottom", yshift=4, **place)


def _limits_caption(rows: pd.DataFrame, model: str) -> str:
    reasons = rows.loc[rows["steps_per_s"].isna(), "error"].dropna().unique()
    first = [str(reason).split(". ")[0].rstrip(".") for reason in reasons]
    why = f" Infeasible: {'; '.join(first)}." if first else ""
    return (
        f"Throughput of the {MODELS[model].label} over the limits of one step, all requests of a "
        "recorded search queued at once, memory as at an LLM share of 0.3. Above: "
        f"{TOKENS[model]}. Below: {STEPS[model]}, and the same requests without a prefix cache in "
        "continuous and in static, padded batches; bars reach from the slowest to the fastest "
        f"repetition.{why}"
    )


def _short(rate: float) -> str:
    """3 digits: 87.2, 940, 1.25k, 20.1k; nothing for what has no number."""
    if not np.isfinite(rate):
        return ""
    if rate < 999.5:
        return f"{rate:.1f}" if rate < 99.95 else f"{rate:.0f}"
    return f"{rate / 1000:.2f}k" if rate < 9995 else f"{rate / 1000:.1f}k"
