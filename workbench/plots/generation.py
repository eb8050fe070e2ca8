"""What generating text costs an engine (a KV cache, batches, blocks), each model of a search over
its two batch limits (thesis, figures 6.4 and 6.5), and a server's clients.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots import theme
from workbench.plots.theme import MODELS, Style, finish, legend_at, say, series

# -- one engine: a KV cache, batches, blocks --

CACHED = {True: Style("with a KV cache", theme.BLUE), False: Style("without", theme.VERMILION)}
KINDS = {
    "continuous": Style("continuous", theme.BLUE),
    "static": Style("static, padded", theme.PURPLE, "dash", "triangle-up"),
    "paged": Style("paged", theme.BLUE),
    "contiguous": Style("contiguous", theme.PURPLE, "dash", "triangle-up"),
}
PARTS = {
    "forward": ("forward pass", theme.BLUE, ""),
    "sampling": ("sampling", theme.ORANGE, "/"),
    "scheduling": ("scheduling", theme.GREEN, "."),
    "other": ("rest of the step", theme.GREY, ""),
}
_DASHES = ("solid", "dash", "dot", "dashdot")
_HEIGHTS = [0.58, 1 - 0.58]
_CACHE_CAPTION = (
    "One request alone, greedy. Above: seconds until so many tokens are generated, with a KV cache "
    "and where every token computes its whole sequence again, for each length of the prompt. "
    "Below: how many times as long it takes without; bars reach from the least to the most of the "
    "paired repeats."
)
_BATCH_CAPTION = (
    "The same requests, all queued at once, in continuous and in static, padded batches of at most "
    "so many sequences. Above: generated tokens/s; a cross where the batch does not fit the "
    "memory. Below left: where the time of continuous batching goes. Below right: operations that "
    "the requests need, over the time, as a share of what the device reaches on registers alone "
    "(model FLOPs utilisation); padding does not count. Bars reach from the slowest to the fastest "
    "repeat."
)
_MEMORY_CAPTION = (
    "Above: bytes of keys and values at the fullest step of a continuous batch, in blocks of 16 "
    "tokens and with one piece of the model's longest sequence for each request, exactly counted; "
    "the dashed line is the memory given, and the numbers say how many sequences it holds. Below "
    "left: share of the room taken that holds no token, over the block size, counted. Below right: "
    "time to decode, over that of the same kernels with one block for each sequence; bars reach "
    "from the least to the most of the paired repeats."
)


def engine_cache(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """A KV cache on and off over generated length.

    rows: prompt_tokens, new_tokens, metric (seconds | ratio), kv_cache, value, low, high.
    """
    fig = make_subplots(rows=2, vertical_spacing=0.16, row_heights=[0.55, 0.45])
    hover = "%{x:,} new tokens: %{y:,.3g}"
    for rank, (prompt, own) in enumerate(rows.groupby("prompt_tokens")):
        look = {"dash": _DASHES[rank % 4], "symbol": theme.SYMBOLS[rank % 7]}
        for cached, style in CACHED.items():
            line = own[(own["metric"] == "seconds") & (own["kv_cache"] == cached)]
            named = Style(f"{style.label}, prompt of {prompt}", style.colour, **look)
            series(fig, line, "new_tokens", named, hover + " s", 1, 1, showlegend=False)
        named, ratio = Style(f"prompt of {prompt}", theme.BLACK, **look), own["metric"] == "ratio"
        series(fig, own[ratio], "new_tokens", named, hover + " times", 2, 1)
    for style in CACHED.values():
        marker = {"symbol": "square", "color": style.colour}
        theme.legend_note(fig, "legend", style.label, marker, row=1, col=1)
    fig.update_yaxes(type="log", dtick="D2", title_text="seconds until there", row=1, col=1)
    fig.update_yaxes(rangemode="tozero", title_text="time without over with", row=2, col=1)
    fig.update_xaxes(title_text="tokens generated", rangemode="tozero")
    return finish(fig, "What a KV cache gains", _CACHE_CAPTION, provenance, 520, top=84)


def engine_batch(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Throughput of continuous and static batches, the parts of a step, and utilisation.

    rows: batch, kind (continuous | static), metric (tokens_per_s | mfu | share), part, value, low,
    high; error: why a batch has no value.
    """
    fig = theme.one_above_two(vertical_spacing=0.2, row_heights=_HEIGHTS)
    axis = theme.log_axis(sorted(rows["batch"].unique()), 0.08)
    for kind in ("continuous", "static"):
        own, style = rows[rows["kind"] == kind].sort_values("batch"), KINDS[kind]
        rates = own[(own["metric"] == "tokens_per_s") & own["value"].notna()]
        hover = "%{x} sequences: %{y:,.4g}"
        series(fig, rates, "batch", style, hover + " tokens/s", 1, 1)
        cannot = own[(own["metric"] == "tokens_per_s") & own["value"].isna()].assign(value=0.0)
        if len(cannot):
            cross = Style(f"{style.label}: does not fit", style.colour, symbol="x")
            dots = {"mode": "markers", "customdata": cannot[["error"]]}
            series(fig, cannot, "batch", cross, "%{x}: %{customdata[0]}", 1, 1, **dots)
        used = theme.in_percent(own[own["metric"] == "mfu"])
        series(fig, used, "batch", style, hover + " %", 2, 2, showlegend=False)
    shares = theme.in_percent(rows[(rows["metric"] == "share") & (rows["kind"] == "continuous")])
    names = [f"{batch:,}" for batch in sorted(shares["batch"].unique())]
    for part, (label, colour, shape) in PARTS.items():
        own = shares[shares["part"] == part].sort_values("batch")
        lines = {"shape": shape, "bgcolor": colour, "fgcolor": "white", "solidity": 0.2}
        look = {"color": colour, "pattern": lines if shape else None}
        bars = go.Bar(x=names, y=own["value"], name=label, marker=look, legend="legend2")
        bars.hovertemplate = "%{x} sequences: %{y:.1f} %<extra>" + label + "</extra>"
        fig.add_trace(bars, row=2, col=1)
    title = "sequences in one step, at most"
    fig.update_xaxes(title_text=title, **axis, row=1, col=1)
    fig.update_yaxes(title_text="generated tokens/s", rangemode="tozero", row=1, col=1)
    fig.update_xaxes(title_text="sequences", type="category", row=2, col=1)
    fig.update_yaxes(title_text="of the time (%)", range=[0, 100], row=2, col=1)
    ticks = sorted(rows["batch"].unique())
    thin = axis | {"tickvals": ticks[:: 1 + len(ticks) // 6]}
    fig.update_xaxes(title_text="sequences", **thin, row=2, col=2)
    fig.update_yaxes(title_text="of the ceiling (%)", rangemode="tozero", row=2, col=2)
    fig.update_layout(barmode="stack", bargap=0.3)
    legend_at(fig, "legend2", 0.385)
    return finish(fig, "What batches gain", _BATCH_CAPTION, provenance, 560)


def engine_memory(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Bytes of paged and contiguous caches over batch size; waste and time over block size.

    rows: metric (bytes | most | waste | seconds | ratio), kind (paged | contiguous), batch,
    block_size, value, low, high.
    """
    fig = theme.one_above_two(vertical_spacing=0.2, row_heights=_HEIGHTS)
    metric = rows["metric"]
    room = rows[metric == "most"].set_index("kind")
    unit, name = (2**30, "GiB") if room["value"].max() >= 2**30 else (2**20, "MiB")
    batches = sorted(rows.loc[metric == "bytes", "batch"].unique())
    for kind in ("paged", "contiguous"):
        style = KINDS[kind]
        own = rows[(metric == "bytes") & (rows["kind"] == kind)].sort_values("batch")
        own = own.assign(value=own["value"] / unit)
        hover = f"%{{x:,.0f}} sequences: %{{y:,.3g}} {name}"
        series(fig, own, "batch", style, hover, 1, 1)
        waste = theme.in_percent(rows[(metric == "waste") & (rows["kind"] == kind)])
        waste = waste.sort_values("block_size")
        times = rows[(metric == "ratio") & (rows["kind"] == kind)].sort_values("block_size")
        for column, found, told in ((1, waste, "%{y:.1f} %"), (2, times, "%{y:.3f} times")):
            hover = f"blocks of %{{x:,.0f}}: {told}"
            series(fig, found, "block_size", style, hover, 2, column, showlegend=False)
    given = float(room["value"].iloc[0]) / unit
    line = theme.capacity([batches[0], batches[-1]], [given] * 2, f"memory: {given:,.3g} {name}")
    fig.add_trace(line, row=1, col=1)
    held = " and ".join(f"{int(room.loc[kind, 'batch']):,} {kind}" for kind in room.index)
    say(fig, f"the memory holds {held} sequences", 0, 1, yshift=4)
    fig.update_xaxes(title_text="sequences", **theme.log_axis(batches, 0.08), row=1, col=1)
    fig.update_yaxes(type="log", dtick=1, title_text=f"KV ({name})", row=1, col=1)
    for column, wanted in ((1, "waste"), (2, "ratio")):
        sizes = sorted(rows.loc[metric == wanted, "block_size"].unique())
        kept = [sizes[i] for i in theme.thinned(np.log10(sizes).tolist(), 0.16)]
        axis = theme.log_axis(sizes, 0.1) | {"tickvals": kept}
        fig.update_xaxes(title_text="block size (tokens)", **axis, row=2, col=column)
    fig.update_yaxes(title_text="room wasted (%)", range=[0, 100], row=2, col=1)
    fig.update_yaxes(title_text="time over contiguous", rangemode="tozero", row=2, col=2)
    title = "What blocks gain, and cost"
    return finish(fig, title, _MEMORY_CAPTION, provenance, 560, top=84, legend=22)


# -- both models of a search: the limits of a step, balance, waste --

CONTINUOUS = "continuous"
BESIDE = {
    "continuous, no prefix cache": Style("no prefix cache", theme.BLACK, "dot", "diamond"),
    "static, padded": Style("static, padded", theme.PURPLE, "dash", "triangle-up"),
}
TOKENS = {"llm": "generated tokens/s", "prm": "tokens read for the first time/s"}
STEPS = {"llm": "reasoning steps sampled/s", "prm": "reasoning steps judged/s"}
_LIMITS_CAPTION = (
    "Throughput of the {label} over the limits of one step, all requests of a recorded search "
    "queued at once, memory as at an LLM share of 0.3. Above: {tokens}. Below: {steps} over those "
    "with the greatest limits, seed by seed, also of the same requests, or some of them, without a "
    "prefix cache in continuous and in static, padded batches. Hatched: more sequences than tokens "
    "in a step, not all of which could decode; a cross: padded batches for which the KV memory has "
    "too few blocks."
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
    max_num_batched_tokens, tokens_per_s, steps_per_s, ratio with _low and _high, status, error: why
    a cell has no rates. A panel of a pair (rows with a column rung) says in the title what the heat
    map shows.
    """
    model, in_panel = str(rows["model"].iloc[0]), "rung" in rows
    head = 0.46 - (0.06 if in_panel else 0)  # of the lines; a panel's legend has one line more
    continuous = rows[rows["kind"] == CONTINUOUS]
    fig = make_subplots(rows=2)
    _heat(fig, continuous, model)
    _lines(fig, rows, model)
    fig.update_xaxes(title_text="max_num_batched_tokens: tokens in one step", row=1, col=1)
    fig.update_yaxes(title_text="max_num_seqs", domain=[0.66, 1], row=1, col=1)
    axis = theme.log_axis(sorted(rows["max_num_seqs"].unique()), 0.08)
    fig.update_xaxes(title_text="max_num_seqs: sequences in one step", **axis, row=2, col=1)
    rates = rows.assign(value=rows["ratio"], high=rows["ratio_high"])
    axis = {"domain": [0, head], "title_text": f"{STEPS[model]}, ratio"}
    if rates["value"].notna().any():
        axis["range"] = [0, 1.04 * theme.highest(rates)]
    fig.update_yaxes(**axis, row=2, col=1)
    legend_at(fig, "legend", head + 0.005)
    why = continuous.loc[continuous["tokens_per_s"].isna(), "status"].unique()
    cannot = f"; hatched: {' or '.join(sorted(why))}" if len(why) else ""
    if not in_panel:
        say(fig, f"<b>{TOKENS[model]}</b>, continuous batching{cannot}", 0, 1, yshift=4)
    label, tokens, steps = MODELS[model].label, TOKENS[model], STEPS[model]
    caption = _LIMITS_CAPTION.format(label=label, tokens=tokens, steps=steps)
    if (np.isfinite(rows["ratio_high"]) & (rows["ratio_low"] < rows["ratio_high"])).any():
        caption += " Bars are 95 % intervals over seeds."
    if (rows["status"] == "failed").any():
        caption += " Some runs failed: hatched or crossed, too, and the pointer says why."
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
        customdata=cannot[["status", "error"]],
        marker={"color": "#F4F4F4", "line": {"width": 0}, "pattern": hatch},
        name="no rate",
        showlegend=False,
        hovertemplate="%{customdata[0]}: %{customdata[1]}<extra></extra>",
    )
    fig.add_trace(bars, row=1, col=1)
    for axis, values in (("xaxis", tokens), ("yaxis", seqs)):
        ticks = {"tickvals": list(range(len(values))), "ticktext": [f"{v:,}" for v in values]}
        look = {"tickmode": "array", "showgrid": False, "range": [-0.5, len(values) - 0.5]}
        fig.update_layout({axis: ticks | look})


def _lines(fig: go.Figure, rows: pd.DataFrame, model: str) -> None:
    """Ratios of steps/s over max_num_seqs: a line for the least, the middle and the greatest limit
    of tokens, darker for more, and what continuous batching is compared with; a cross on the axis
    where that does not fit.
    """
    hover = "%{x} sequences: %{y:.3f} times"
    names = {"ratio": "value", "ratio_low": "low", "ratio_high": "high"}
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
        if len(own):
            series(fig, own, "max_num_seqs", style, hover, 2, 1)
        cannot = rows[(rows["kind"] == kind) & rows["steps_per_s"].isna()].assign(value=0.0)
        for status, refused in cannot.groupby("status"):
            said = "does not fit" if status == "infeasible" else str(status)
            cross = Style(f"{style.label}: {said}", style.colour, symbol="x")
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


# -- clients of a server --

SECONDS = {"ttft": ("first token", theme.BLUE), "e2e": ("whole answer", theme.PURPLE)}
PERCENTILES = {"p50": ("median", "solid", "circle"), "p95": ("95th percentile", "dash", "square")}
ARRIVALS = {
    "closed": Style("clients that ask anew", theme.BLACK),
    "poisson": Style("arriving by chance", theme.ORANGE, symbol="diamond"),
}
_LOAD_CAPTION = (
    "One served model. Above: generated tokens/s over the clients that ask at a time, each anew "
    "once it has its answer. Below left: what they wait for. Below right: requests inside the "
    "server, running or waiting, as its own metrics count them, against the rate at which they are "
    "served times the seconds that each is inside as its client sees it. By Little's law both are "
    "equal, but for what a request waits on its way to the server's count and back: points lie on "
    "the line or below."
)
_SPLIT_CAPTION = (
    "Two served models that share one memory, both asked at once, the same load under each split. "
    "Left: generated tokens/s. Right: 95th percentile of the seconds until the first token."
)


def serving_load(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Throughput, latency and Little's law over load.

    rows: arrivals (closed | poisson), clients, tokens_per_s, ttft_p50, ttft_p95, e2e_p50, e2e_p95,
    inside, little.
    """
    fig = theme.one_above_two(vertical_spacing=0.25, row_heights=[0.45, 0.55])
    closed = rows[rows["arrivals"] == "closed"].sort_values("clients")
    rate, style = closed.assign(value=closed["tokens_per_s"]), ARRIVALS["closed"]
    hover = "%{x} clients: %{y:,.0f} tokens/s"
    series(fig, rate, "clients", style, hover, 1, 1, showlegend=False)
    for name, (label, colour) in SECONDS.items():
        for share, (kind, dash, symbol) in PERCENTILES.items():
            own = closed.assign(value=closed[f"{name}_{share}"])
            style = Style(f"{label}, {kind}", colour, dash, symbol)
            series(fig, own, "clients", style, "%{x} clients: %{y:.3g} s", 2, 1, legend="legend")
    both = rows[["inside", "little"]].stack().dropna()  # a short load's inside may not be known
    ends = [both.min() / 1.3, both.max() * 1.3]
    line = theme.capacity(ends, ends, "Little's law", legend="legend2", hoverinfo="skip")
    fig.add_trace(line, row=2, col=2)
    for name, style in ARRIVALS.items():
        own = rows[rows["arrivals"] == name]
        own, hover = own.assign(value=own["inside"]), "%{x:.1f} expected: %{y:.1f} inside"
        series(fig, own, "little", style, hover, 2, 2, mode="markers", legend="legend2")
    counts = theme.log_axis(closed["clients"].tolist(), 0.1)
    fig.update_xaxes(title_text="clients at a time", **counts, col=1)
    fig.update_yaxes(title_text="generated tokens/s", rangemode="tozero", row=1, col=1)
    fig.update_yaxes(type="log", dtick="D2", title_text="seconds", row=2, col=1)
    fig.update_xaxes(type="log", dtick=1, title_text="rate times time inside", row=2, col=2)
    fig.update_yaxes(type="log", dtick=1, title_text="requests inside", row=2, col=2)
    for name, x in (("legend", 0), ("legend2", 0.57)):
        legend_at(fig, name, 0.42)
        fig.update_layout({name: {"orientation": "v", "x": x, "font": {"size": 10}}})
    return finish(fig, "What clients wait for", _LOAD_CAPTION, provenance, 560, top=40)


def serving_split(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Two models' throughput and waiting over the first one's share of the KV memory.

    rows: share, model, clients, tokens_per_s, ttft_p95.
    """
    fig = make_subplots(cols=2, horizontal_spacing=0.16)
    panels = {"tokens_per_s": "generated tokens/s", "ttft_p95": "first token, 95th percentile (s)"}
    for column, (name, title) in enumerate(panels.items(), 1):
        for model, style in zip(map(str, rows["model"].unique()), theme.MODELS.values()):
            own = rows[rows["model"] == model]
            told = f"{model.removeprefix('dummy:')}{', random weights' * ('dummy:' in model)}"
            named = replace(style, label=f"{told}: {own['clients'].iloc[0]} clients")
            own = own.assign(value=own[name], share=100 * own["share"]).sort_values("share")
            hover = "%{x:.0f} %: %{y:.3g}"
            series(fig, own, "share", named, hover, 1, column, showlegend=column == 1)
        fig.update_yaxes(title_text=title, rangemode="tozero", row=1, col=column)
    shares = sorted(100 * rows["share"].unique())
    fig.update_xaxes(title_text="first model's share of memory (%)", tickvals=shares)
    return finish(fig, "Two models in one memory", _SPLIT_CAPTION, provenance, 300)
