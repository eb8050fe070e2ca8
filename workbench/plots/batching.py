"""Throughput of each model over its two batch limits (thesis, figures 6.4 and 6.5), static batches
beside continuous ones; which model a search waits for, and how much room its blocks waste.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots import theme
from workbench.plots.theme import MODELS, Style, finish, legend_at, say, series

CONTINUOUS = "continuous"
BESIDE = {
    "continuous, no prefix cache": Style("no prefix cache", theme.BLACK, "dot", "diamond"),
    "static, padded": Style("static, padded", theme.PURPLE, "dash", "triangle-up"),
}
TOKENS = {"llm": "generated tokens/s", "prm": "tokens read for the first time/s"}
STEPS = {"llm": "reasoning steps sampled/s", "prm": "reasoning steps judged/s"}
_HEAT_FOOT, _LINES_HEAD = 0.66, 0.46  # of the drawing: the heat map above, the lines below
_LIMITS_CAPTION = (
    "Throughput of the {label} over the limits of one step, all requests of a recorded search "
    "queued at once, memory as at an LLM share of 0.3. Above: {tokens}. Below: {steps}, and the "
    "same requests without a prefix cache in continuous and in static, padded batches. Hatched: "
    "more sequences than tokens in a step, not all of which could decode; a cross: padded batches "
    "for which the KV memory has too few blocks."
)
_BALANCE_CAPTION = (
    "Above: reasoning steps of the search over the seconds each model was busy with them, against "
    "the LLM's share of total memory; bars are 95 % bootstrap intervals over problems, and the "
    "search waits longer for the model whose line is lower. Below: share of the room in active "
    "blocks that holds no token, 1 - tokens held / (active blocks x block size) over all steps, "
    "against the block size, for each limit of sequences in a step. Static batches hold blocks for "
    "the longest request each may become."
)


def batch_limits(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """One model's throughput over max_num_batched_tokens and max_num_seqs; static batches beside.

    rows: model, kind (continuous | continuous, no prefix cache | static, padded), max_num_seqs,
    max_num_batched_tokens, tokens_per_s, steps_per_s with _low and _high, error: why a cell has no
    rates. A panel of a pair (rows with a column rung) says in the title what the heat map shows.
    """
    model, in_panel = str(rows["model"].iloc[0]), "rung" in rows
    head = _LINES_HEAD - (0.06 if in_panel else 0)  # a panel's legend has one line more
    continuous = rows[rows["kind"] == CONTINUOUS]
    fig = make_subplots(rows=2)
    _heat(fig, continuous, model)
    _lines(fig, rows, model)
    fig.update_xaxes(title_text="max_num_batched_tokens: tokens in one step", row=1, col=1)
    fig.update_yaxes(title_text="max_num_seqs", domain=[_HEAT_FOOT, 1], row=1, col=1)
    axis = theme.log_axis(sorted(rows["max_num_seqs"].unique()), 0.08)
    fig.update_xaxes(title_text="max_num_seqs: sequences in one step", **axis, row=2, col=1)
    rates = rows.assign(value=rows["steps_per_s"], high=rows["steps_per_s_high"])
    axis = {"range": [0, 1.04 * theme.highest(rates)], "domain": [0, head]}
    fig.update_yaxes(title_text=STEPS[model], **axis, row=2, col=1)
    legend_at(fig, "legend", head + 0.005)
    cannot = "; hatched: infeasible" if continuous["tokens_per_s"].isna().any() else ""
    if not in_panel:
        say(fig, f"<b>{TOKENS[model]}</b>, continuous batching{cannot}", 0, 1, yshift=4)
    label, tokens, steps = MODELS[model].label, TOKENS[model], STEPS[model]
    caption = _LIMITS_CAPTION.format(label=label, tokens=tokens, steps=steps)
    if (rows["steps_per_s_low"] < rows["steps_per_s_high"]).any():
        caption += " Bars reach from the slowest to the fastest repetition."
    title = f"Throughput of the {label} over its batch limits"
    title += f": {tokens} (above)" if in_panel else ""
    return finish(fig, title, caption, provenance, 540 if in_panel else 560)


def _heat(fig: go.Figure, rows: pd.DataFrame, model: str) -> None:
    """Rates as a heat map over places 0, 1, ... of both limits; what cannot be is hatched."""
    table = rows.pivot_table(
        index="max_num_seqs", columns="max_num_batched_tokens", values="tokens_per_s", dropna=False
    )
    rates, seqs, tokens = table.to_numpy(float), table.index.tolist(), table.columns.tolist()
    heat = go.Heatmap(
        z=rates,
        texttemplate="%{z:.3s}" if len(tokens) < 5 else "%{z:.2s}",  # 1.25k, or 1.3k in small cells
        colorscale=[[0, theme.mixed(model, 0.04)], [1, theme.mixed(model, 0.8)]],
        zmin=0,
        zmax=float(np.nanmax(rates)),
        showscale=False,
        showlegend=False,
        xgap=2,
        ygap=2,
        textfont={"size": 12 if len(tokens) < 5 else 11, "color": "#111111"},
        customdata=[[(s, t) for t in tokens] for s in seqs],
        hovertemplate="%{customdata[0]:,} sequences, %{customdata[1]:,} tokens: %{z:,.0f} "
        + f"{TOKENS[model]}<extra></extra>",
    )
    fig.add_trace(heat, row=1, col=1)
    cannot = rows[rows["tokens_per_s"].isna()]
    hatch = {"shape": "/", "fgcolor": theme.GREY, "size": 7, "solidity": 0.2}
    bars = go.Bar(
        x=[tokens.index(t) for t in cannot["max_num_batched_tokens"]],
        base=[seqs.index(s) - 0.5 for s in cannot["max_num_seqs"]],
        y=np.ones(len(cannot)),
        width=1.0,
        customdata=cannot[["error"]],
        marker={"color": "#F4F4F4", "line": {"width": 0}, "pattern": hatch},
        name="infeasible",
        showlegend=False,
        hovertemplate="infeasible: %{customdata[0]}<extra></extra>",
    )
    fig.add_trace(bars, row=1, col=1)
    for axis, values in (("xaxis", tokens), ("yaxis", seqs)):
        ticks = {"tickvals": list(range(len(values))), "ticktext": [f"{v:,}" for v in values]}
        look = {"tickmode": "array", "showgrid": False, "range": [-0.5, len(values) - 0.5]}
        fig.update_layout({axis: ticks | look})


def _lines(fig: go.Figure, rows: pd.DataFrame, model: str) -> None:
    """Steps/s over max_num_seqs: a line for the least, the middle and the greatest limit of tokens,
    darker for more, and what continuous batching is compared with; a cross on the axis where that
    does not fit.
    """
    hover = "%{x} sequences: %{y:,.1f} steps/s"
    names = {"steps_per_s": "value", "steps_per_s_low": "low", "steps_per_s_high": "high"}
    measured = rows[rows["steps_per_s"].notna()].rename(columns=names).sort_values("max_num_seqs")
    continuous = rows[rows["kind"] == CONTINUOUS]
    every = sorted(continuous["max_num_batched_tokens"].unique())
    limits = [every[at] for at in sorted({0, len(every) // 2, len(every) - 1})]
    for rank, tokens in enumerate(limits):
        has_limit = measured["max_num_batched_tokens"] == tokens
        own = measured[(measured["kind"] == CONTINUOUS) & has_limit]
        style = theme.ranked(f"{tokens:,} tokens a step", model, rank, len(limits))
        series(fig, own, "max_num_seqs", style, hover, 2, 1)
    for kind, style in BESIDE.items():
        own = measured[measured["kind"] == kind]
        refused = rows[(rows["kind"] == kind) & rows["steps_per_s"].isna()].assign(value=0.0)
        if len(own):
            series(fig, own, "max_num_seqs", style, hover, 2, 1)
        if len(refused):
            cross = Style(f"{style.label}: does not fit", style.colour, symbol="x")
            look = {"mode": "markers", "customdata": refused[["error"]], "marker_size": 10}
            series(fig, refused, "max_num_seqs", cross, "%{x}: %{customdata[0]}", 2, 1, **look)


def balance(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Reasoning steps a second of both models over the split; room wasted over the block size.

    rows: metric steps_per_busy_s with llm_share, llm_kv_tokens, prm_kv_tokens, model, value, low,
    high; metric waste with model, kind, block_size, max_num_seqs, value (a fraction).
    """
    fig = theme.one_above_two(vertical_spacing=0.24)
    busy = rows[rows["metric"] == "steps_per_busy_s"].sort_values("llm_share")
    for model, style in MODELS.items():
        hover = "share %{x:.2f}: %{y:,.1f} steps/s"
        series(fig, busy[busy["model"] == model], "llm_share", style, hover, 1, 1)
    theme.share_axes(fig, busy, panels=1)
    fig.update_yaxes(title_text="reasoning steps/s while busy", rangemode="tozero", row=1, col=1)
    waste = rows[rows["metric"] == "waste"].drop(columns=["low", "high"], errors="ignore")
    limits = sorted(waste.loc[waste["kind"] == CONTINUOUS, "max_num_seqs"].astype(int).unique())
    percent, hover = waste.assign(value=100 * waste["value"]), "blocks of %{x}: %{y:.1f} %"
    for column, (model, style) in enumerate(MODELS.items(), start=1):
        of_model = percent[percent["model"] == model]
        continuous = of_model[of_model["kind"] == CONTINUOUS].sort_values("block_size")
        static = of_model[of_model["kind"] != CONTINUOUS]
        for rank, seqs in enumerate(limits):
            own = continuous[continuous["max_num_seqs"] == seqs]
            look = theme.ranked(f"{style.label}, {seqs}", model, rank, len(limits))
            series(fig, own, "block_size", look, hover, 2, column, showlegend=False)
        look = Style(f"{style.label}, static", theme.PURPLE, symbol="triangle-up-open")
        marks = {"mode": "markers+text", "marker_size": 10}
        sides = [f"middle {('right', 'left')[k % 2]}" for k in range(len(static))]  # apart if equal
        marks |= {"text": [f"{s:.0f}" for s in static["max_num_seqs"]], "textposition": sides}
        series(fig, static, "block_size", look, hover, 2, column, **marks, showlegend=False)
    for rank, seqs in enumerate(limits):  # in grey: both models' lines are read by these markers
        level = round(190 - 160 * (rank / (len(limits) - 1) if len(limits) > 1 else 1.0))
        marker = {"symbol": theme.SYMBOLS[rank % 7], "color": f"rgb({level},{level},{level})"}
        theme.legend_note(fig, "legend2", f"≤ {seqs:,} sequences", marker, row=2, col=1)
    if (waste["kind"] != CONTINUOUS).any():
        marker = {"symbol": "triangle-up-open", "color": theme.PURPLE}
        theme.legend_note(fig, "legend2", "static batches of so many", marker, row=2, col=1)
    sizes = theme.log_axis(sorted(waste["block_size"].unique()), 0.1)
    top = 1.12 * max(100 * float(waste["value"].max()), 5.0)
    for column, style in enumerate(MODELS.values(), start=1):
        title = f"block size of the {style.label} (tokens)"
        fig.update_xaxes(title_text=title, **sizes, row=2, col=column)
        fig.update_yaxes(range=[0, top], title_text="room wasted (%)", row=2, col=column)
    legend_at(fig, "legend2", 0.385)
    title = "Balance of both models, and waste"
    return finish(fig, title, _BALANCE_CAPTION, provenance, 520, **theme.OVER_SHARES)
