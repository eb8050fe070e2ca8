"""A search's throughput over the memory split (thesis, figure 6.1), and one search as a tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots import theme
from workbench.plots.theme import MODELS, Style, finish, legend_at, say, series

THROUGHPUT = {
    "tokens_per_s": Style("generated tokens/s (left axis)", theme.BLACK),
    "problems_per_min": Style("problems/min (right axis)", theme.GREEN, "dot", "diamond"),
}
_SPLIT_CAPTION = (
    "Throughput of the search against the LLM's share of total memory. Above, over that at "
    "{base:.2f}, the same problems and seeds on both sides, exactly 1 where both models do equal "
    "work; dashed, what the counts of steps and tokens alone make of it, at prices fitted to all "
    "shares; triangles, the last share at which the LLM and the first at which the PRM computes "
    "again what it had evicted. Below, generated tokens per second and problems per minute. Bars: "
    "95 % bootstrap intervals over problems and seeds, the machine's noise between runs of equal "
    "work included; the band is the interval of the share with the highest throughput, where "
    "shares of equal work count as one; dotted, 2 % below the best."
)
SHORT = {"llm": ("triangle-left-open", "up to here"), "prm": ("triangle-right-open", "from here")}
"""Marks of where a model's cache begins to be short, and on which side of them it is."""
VERIFIERS = {
    "scores": Style("PRM scores at once", theme.BLACK, "dash", "square"),
    "critiques": Style("PRM writes critiques first", theme.VERMILION, "solid", "diamond"),
}
_CRITIQUES_CAPTION = (
    "A PRM that scores a step at once beside one that writes a critique of it first, the same "
    "search and memory. Above: problems a minute against the LLM's share of total memory, over "
    "those at its own best; bars: 95 % intervals of this ratio, over problems. Below: tokens that "
    "a model computes again for a problem, after eviction or preemption; open markers: where the "
    "PRM scores at once."
)
STRATEGIES = {
    "beam_search": Style("beam search", theme.BLUE),
    "best_of_n": Style("best of n", theme.GREY, "dash", "square"),
    "self_consistency": Style("self-consistency", theme.GREY, "dot", "square-open"),
    "dvts": Style("DVTS", theme.ORANGE, "solid", "diamond"),
    "lookahead": Style("lookahead", theme.SKY, "solid", "triangle-up"),
    "rebase": Style("REBASE", theme.GREEN, "solid", "star"),
    "ets": Style("ETS", theme.PURPLE, "dash", "pentagon"),
    "dora": Style("DORA", theme.VERMILION, "dash", "hexagon"),
    "particle_filter": Style("particle filter", theme.BLACK, "solid", "cross"),
}
_STRATEGIES_CAPTION = (
    "Accuracy of each search strategy over the tokens that it samples for a problem (left; shifted "
    "by up to a quarter, so that markers of strategies that sample as many do not overlap) and "
    "over seconds, those of the one machine named with the runs (right). A line leads from few "
    "beams to many, a grey one without a search. A round's seconds are divided evenly among its "
    "problems, so strategies of a single round have none by level. Bars: 95 % intervals (Wilson) "
    "of as many trials as there are problems; differences between strategies, on the same ones, "
    "are surer."
)
ASIDE = 1.06  # times what is drawn at the same place, from strategy to strategy
_TREE_CAPTION = (
    "The search tree of one problem. Each marker is a sampled step, its colour the PRM's score, "
    "grey where that was not asked; a line joins it to the step it continues. Pruned steps are "
    "small and faint, stars end a solution; a thick line leads to the best solution with the "
    "answer that won. Up and down only keeps steps apart."
)
ROLES = {  # what became of a node: (symbol, size, opacity)
    "pruned": ("circle", 7, 0.45),
    "kept": ("circle", 11, 1.0),
    "finished": ("star", 15, 1.0),
}
_SCORE_BAR = {"title": {"text": "PRM score", "side": "right"}, "thickness": 12, "len": 1.0}
_SCORES = {"colorscale": "Cividis", "cmin": 0, "cmax": 1, "colorbar": _SCORE_BAR}


def memory_split(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Throughput of the search over that at 0.3, and in itself, over the LLM's share.

    rows: llm_share, llm_kv_tokens, prm_kv_tokens, ratio, ratio_low, ratio_high, metric, value, low,
    high; metrics tokens_per_s, problems_per_min, and optionally one row peak_share, drawn as a band
    low .. high, one same_work, the shares that do equal work there, counted (its ratio), and one
    row each llm_short and prm_short. A panel of a pair (rows with a column rung) says in
    place of the right axis how many problems a minute are the most.
    """
    in_panel = "rung" in rows
    specs = [[{}], [{"secondary_y": not in_panel}]]
    fig = make_subplots(rows=2, shared_xaxes=True, specs=specs, vertical_spacing=0.12,
                        row_heights=(0.68, 0.32))  # fmt: skip
    of = dict(iter(rows.sort_values("llm_share").groupby("metric")))
    hover, rates = "share %{x:.2f}: %{y:,.1f}", of["tokens_per_s"]
    base = min(rates["llm_share"], key=lambda share: abs(share - 0.3))
    ratio = rates.assign(value=rates["ratio"], low=rates["ratio_low"], high=rates["ratio_high"])
    style = Style(f"generated tokens/s over those at {base:.2f}", theme.BLACK)
    look, told = {"legend": "legend", "marker_size": 7}, "share %{x:.2f}: %{y:.3f}"
    series(fig, ratio, "llm_share", style, told, 1, 1, **look)
    entries = _explained(fig, of, ratio[["llm_share", "value"]])
    look = {"legend": "legend2", "marker_size": 6, "showlegend": not in_panel}
    for metric, style in list(THROUGHPUT.items())[: 1 if in_panel else 2]:
        right = None if in_panel else metric == "problems_per_min"
        series(fig, of[metric], "llm_share", style, hover, 2, 1, right, **look)
    theme.share_axes(fig, rows, panels=2)
    fig.update_yaxes(rangemode="tozero")
    left = None if in_panel else False
    from_zero = "tozero" if in_panel else "normal"  # so that panels look alike
    fig.update_yaxes(title_text=f"over that at {base:.2f}", rangemode=from_zero, row=1, col=1)
    fig.update_yaxes(title_text="tokens/s", row=2, col=1, secondary_y=left)
    most = of["problems_per_min"]
    if in_panel:
        text, place = f"at most {most['value'].max():,.3g}<br>problems/min", {"yref": "y2 domain"}
        say(fig, text, 0.5, 0.05, xanchor="center", **place)
    else:
        # both measure the same searches: the right axis reaches higher, or lines would coincide
        reach = max(1.45 * float(most["value"].max()), 1.25 * theme.highest(most))
        axis = {"title_text": "problems/min", "showgrid": False, "tickmode": "auto"}
        fig.update_yaxes(**axis, range=[0, reach], row=2, col=1, secondary_y=True)
    dotted = {"line": {"color": theme.BLACK, "width": 1, "dash": "dot"}}
    fig.add_hline(0.98 * float(ratio["value"].max()), **dotted, row=1, col=1)  # off the plateau
    legend_at(fig, "legend2", fig.get_subplot(2, 1).yaxis.domain[1])
    if "peak_share" in of:
        low, high = of["peak_share"][["low", "high"]].to_numpy(float)[0]
        pad = 0.004  # so that an interval of one share is still seen
        band = {"fillcolor": theme.SKY, "opacity": 0.18, "line_width": 0, "layer": "below"}
        fig.add_vrect(low - pad, high + pad, **band)  # over all panels; its numbers in the legend
        marker = {"symbol": "square", "size": 12, "color": theme.SKY, "opacity": 0.4}
        text = _peak(rates["llm_share"], of["peak_share"].iloc[0], of.get("same_work"))
        theme.legend_note(fig, "legend", text, marker, row=1, col=1)
    caption = _SPLIT_CAPTION.format(base=base)
    what = " and the most problems per minute"
    caption = caption.replace(" and problems per minute", what) if in_panel else caption
    if ratio[["low", "high"]].isna().any(axis=None):
        caption += " Where a ratio has no bar its interval was not kept."
    title, room = "Throughput against the memory split", {"right": 62, **theme.OVER_SHARES}
    return finish(
        fig, title, caption, provenance, 430, **room | {"top": room["top"] + 20 * entries}
    )


def _peak(shares: pd.Series, peak: pd.Series, same: pd.DataFrame | None) -> str:
    """Where the peak is, for the legend: shares of equal work are one, none beats its equals."""
    low, high = peak["low"], peak["high"]
    if low <= shares.min() and shares.max() <= high:
        return "no peak is shown"
    first, last = (peak["value"],) * 2 if same is None else same[["low", "high"]].iloc[0]
    if first < last:
        return f"peak {first:.2f}-{last:.2f} (95 %: {low:.2f} to {high:.2f})"
    if low < high:
        return f"peak {low:.2f}-{high:.2f}, not told apart (95 %)"
    return f"peak {low:.2f} (95 %)"


def _explained(fig: go.Figure, of: dict[Any, pd.DataFrame], ratio: pd.DataFrame) -> int:
    """What counts alone make of the ratio, and from where on a model's cache is short; the number
    of entries that the legend has more.
    """
    before = len(fig.data)
    look: dict[str, Any] = {"legend": "legend", "row": 1, "col": 1}
    hover = "share %{x:.2f}: %{y:.3f}"
    if "counted" in of:
        own, style = of["counted"], Style("by counts at fitted prices", theme.GREEN, "dash")
        own = own.assign(value=own["ratio"])[["llm_share", "value"]]
        series(fig, own, "llm_share", style, hover, mode="lines", line_width=1.5, **look)
    for model, (symbol, side) in SHORT.items():
        if f"{model}_short" in of:
            at = ratio[ratio["llm_share"].isin(of[f"{model}_short"]["value"])]
            style = Style(f"{model.upper()} short {side}", MODELS[model].colour, "solid", symbol)
            series(fig, at, "llm_share", style, hover, mode="markers", marker_size=12, **look)
    return len(fig.data) - before


def critiques(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Problems a minute over the split, over each kind's best, and tokens computed again.

    rows: kind (scores | critiques), llm_share, llm_kv_tokens, prm_kv_tokens, metric
    (problems_per_min | again), engine (of the latter), value, and of problems_per_min ratio,
    ratio_low, ratio_high: over the kind's best.
    """
    fig = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.12)
    for kind, style in VERIFIERS.items():
        own = rows[rows["kind"] == kind].sort_values("llm_share")
        rate = own[own["metric"] == "problems_per_min"]
        over = 100 * rate[["ratio", "ratio_low", "ratio_high"]]
        scaled = over.set_axis(["value", "low", "high"], axis="columns")
        best, told = f"{style.label}: {rate['value'].max():.2f}/min", rate["value"]
        hover = "share %{x:.2f}: %{y:.1f} % of its best, %{customdata:.2f} problems/min"
        look = {"customdata": told, "name": best, "legend": "legend"}
        series(fig, rate.assign(**scaled), "llm_share", style, hover, 1, 1, **look)
        for model, style in MODELS.items():
            again, hover = own[own["engine"] == model], "share %{x:.2f}: %{y:,.0f} tokens"
            look = {"marker_symbol": f"{style.symbol}-open", "line_width": 1, "showlegend": False}
            look = {"legend": "legend2", **(look if kind == "scores" else {"showlegend": True})}
            series(fig, again, "llm_share", style, hover, 2, 1, **look)
    theme.share_axes(fig, rows, panels=2)
    fig.update_yaxes(rangemode="tozero")
    fig.update_yaxes(title_text="problems/min over the best (%)", row=1, col=1)
    fig.update_yaxes(title_text="tokens computed again a problem", row=2, col=1)
    legend_at(fig, "legend2", 0.445)
    title = "A PRM that writes before it judges"
    return finish(fig, title, _CRITIQUES_CAPTION, provenance, 470, **theme.OVER_SHARES)


def search_strategies(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Accuracy over tokens and over seconds, a row of panels for each kind of levels.

    rows: strategy, n, levels, tokens, seconds, value, low, high.
    """
    kinds, order = list(rows["levels"].unique()), list(STRATEGIES)
    aside = rows["strategy"].map(order.index) - len(order) // 2  # most sample as many tokens
    rows = rows.assign(place=rows["tokens"] * ASIDE**aside).sort_values("n")
    fig = make_subplots(len(kinds), 2, shared_yaxes=True,
                        vertical_spacing=0.09, horizontal_spacing=0.03)  # fmt: skip
    hover = "n = %{customdata[0]}: %{y:.3f}, %{customdata[1]:,.0f} tokens, %{customdata[2]:.2g} s"
    for (name, levels), own in rows.groupby(["strategy", "levels"], sort=False):
        style, row = STRATEGIES[str(name)], kinds.index(levels) + 1
        look = {"customdata": own[["n", "tokens", "seconds"]], "legendgroup": style.label}
        wide = {"line_width": 2.5 if style.colour == theme.GREY else 1, "marker_size": 7}
        for column, x in enumerate(("place", "seconds"), 1):
            look["showlegend"] = row == column == 1
            series(fig, own, x, style, hover, row, column, **look, **wide)
    ticks = [k * 10.0**power for power in range(-2, 8) for k in (1, 2, 5)]
    fig.update_xaxes(type="log", tickvals=ticks, tickformat=",")
    fig.update_xaxes(matches="x2", col=2)
    for column, what in enumerate(("tokens sampled", "seconds"), 1):
        fig.update_xaxes(title_text=f"{what} for a problem", row=len(kinds), col=column)
    for row, levels in enumerate(kinds, 1):
        own = rows[rows["levels"] == levels]
        for column, seen in enumerate((own["place"], rows["seconds"]), 1):
            ends = np.log10([0.85 * seen.min(), 1.18 * seen.max()]).tolist()
            fig.update_xaxes(range=ends, row=row, col=column)
        fig.update_yaxes(range=[own["low"].min() - 0.02, own["high"].max() + 0.02], row=row)
        fig.update_yaxes(title_text=f"accuracy, {levels}", row=row, col=1)
    title, height = "Search strategies: accuracy against tokens and seconds", 40 + 165 * len(kinds)
    return finish(fig, title, _STRATEGIES_CAPTION, provenance, height, top=110, legend=8)


def tree_places(nodes: pd.DataFrame) -> pd.DataFrame:
    """The nodes by depth and place, with role (of ROLES) and place: their rank in their depth.

    Children stand in their parents' order, so that no two edges cross.
    """
    ordinals = [tuple(map(int, name.split("/"))) for name in nodes["node_id"]]
    order = sorted(range(len(nodes)), key=lambda i: (len(ordinals[i]), ordinals[i]))
    rows = nodes.iloc[order].reset_index(drop=True)
    kept = np.where(rows["kept"].astype(bool), "kept", "pruned")
    role = np.where(rows["finished"].astype(bool), "finished", kept)
    return rows.assign(place=rows.groupby("depth").cumcount(), role=role)


def search_tree(
    nodes: pd.DataFrame,
    provenance: str = "",
    *,
    title: str = "One search tree",
    question: str = "",
    selected: str | None = None,
) -> go.Figure:
    """One problem's tree, depth to the right; a node's marker carries its name in `customdata`.

    nodes: node_id (a path: 0, 0/1, ...), parent_id, depth from 1, score (NaN of all where the PRM
    was not asked: grey), kept, finished, and where they are to be drawn thick chosen. selected: the
    node that a ring is drawn around.
    """
    places = tree_places(nodes)
    width = places.groupby("depth")["place"].transform("max")
    places = places.assign(y=width / 2 - places["place"])  # one apart, around 0, the first on top
    chosen = places["chosen"] if "chosen" in places else pd.Series(False, places.index)
    pruned, is_scored = places["role"] == "pruned", bool(places["score"].notna().any())
    faint = _edges(places, pruned, "#D8D8D8", 0.8)
    plain = _edges(places, ~pruned & ~chosen, theme.GREY, 1.6)
    fig = go.Figure([faint, plain, _edges(places, chosen, theme.BLACK, 4)])
    for role, (symbol, size, opacity) in ROLES.items():
        own, look = places[places["role"] == role], {"symbol": symbol, "size": size}
        edge = {"width": np.where(chosen[own.index], 2.4, 0.6)}
        marker = {"color": theme.GREY, "line": edge}
        marker |= {"color": own["score"], "coloraxis": "coloraxis"} if is_scored else {}
        hover = "node %{customdata}" + ": score %{marker.color:.3f}" * is_scored
        hover += f"<extra>{role}</extra>"
        told = {"customdata": own["node_id"], "meta": role, "hovertemplate": hover}
        fig.add_trace(_spots(own["depth"], own["y"], look | marker, opacity=opacity, **told))
        note = look | {"color": theme.GREY, "opacity": opacity}
        theme.legend_note(fig, "legend", f"{role} ({len(own)})", note)
    diamond = {"symbol": "diamond", "size": 12, "color": theme.BLACK}
    told = {"hovertext": [question or "the question"], "hoverinfo": "text"}
    fig.add_trace(_spots([0], [0], diamond, **told))
    ring = {"symbol": "circle-open", "size": 22, "color": theme.BLACK, "line": {"width": 2}}
    at = places[places["node_id"] == selected]
    fig.add_trace(_spots(at["depth"], at["y"], ring, meta="ring", hoverinfo="skip"))
    if chosen.any():
        thick = {"symbol": "line-ew", "size": 22, "line": {"color": theme.BLACK, "width": 4}}
        theme.legend_note(fig, "legend", "chosen", thick)
    if len(at):
        theme.legend_note(fig, "legend", "selected", {**ring, "size": 14})
    deepest = int(places["depth"].max())
    ticks = [0, *range(1, deepest + 1, max(1, deepest // 12))]
    axis = {"tickvals": ticks, "tickangle": 0, "range": [-0.4, deepest + 0.5]}
    fig.update_xaxes(title_text="depth, in steps (0: the question)", **axis)
    most = int(places["place"].max()) + 1
    fig.update_yaxes(visible=False, range=[-most / 2 - 0.3, most / 2 + 0.3])
    fig.update_layout(coloraxis=_SCORES if is_scored else None)
    room = {"top": 70, "left": 24, "right": 96}
    return finish(fig, title, _TREE_CAPTION, provenance, max(230, 21 * most), **room)


def _spots(x: Any, y: Any, marker: dict[str, Any], **more: Any) -> go.Scatter:
    return go.Scatter(x=x, y=y, mode="markers", marker=marker, showlegend=False, **more)


def _edges(places: pd.DataFrame, wanted: pd.Series, colour: str, width: float) -> go.Scatter:
    """Lines to the wanted nodes as one trace broken by gaps; those of depth 1 start at (0, 0)."""
    nodes = places[wanted]
    start = places.set_index("node_id")["y"].reindex(nodes["parent_id"]).fillna(0.0)
    x, y = zip(nodes["depth"] - 1, nodes["depth"]), zip(start, nodes["y"], strict=True)
    return theme.segments(x, y, colour, width, showlegend=False)
