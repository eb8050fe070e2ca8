"""A search's throughput over the memory split, measured and replayed, and one search as a tree
(thesis, figure 6.1).
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.theme import (
    BLACK,
    GREEN,
    GREY,
    MODELS,
    SHARE_TITLE,
    SKY,
    TITLE_PX,
    UPPER_AXIS_PX,
    VERMILION,
    Frame,
    Style,
    finish,
    highest,
    in_percent,
    legend_at,
    legend_note,
    say,
    series,
    share_axes,
)

Draw = Callable[..., go.Figure]
THROUGHPUT = {
    "tokens_per_s": Style("generated tokens/s (left axis)", BLACK),
    "problems_per_min": Style("problems/min (right axis)", GREEN, "dot", "diamond"),
}
BUSY = {"llm_tokens_per_busy_s": "llm", "prm_tokens_per_busy_s": "prm"}
GROUND = "#F3EFE4"
BADGE = "REPLAYED, not measured"
DASHES = {"solid": "dot", "dash": "dashdot", "dot": "longdashdot", None: "dot"}
_SPLIT_FRAME = Frame(panels=470, top=66 + UPPER_AXIS_PX, right=62)
_RUNGS_FRAME = Frame(panels=300)
_TREE_FRAME = Frame(panels=340)
_SPLIT_CAPTION = (
    "Throughput of the search against the LLM's share of total memory: generated tokens per second "
    "and problems per minute (above), tokens each model processes per second it is busy (below). "
    "Bars: 95 % bootstrap intervals over problems and seeds, the machine's noise between runs of "
    "equal work included; the band is the interval of the share with the highest throughput, where "
    "shares at which both models do the same work count as one."
)
_RUNGS_CAPTION = (
    "Generated tokens a second against the LLM's share of total memory, each rung as a share of "
    "its own best. Bars: 95 % intervals of the rate over problems. Shares of a rung that differ by "
    "less than its intervals are of one rank."
)
_TREE_CAPTION = (
    "The search tree of one problem: each marker is a sampled step, its height and shade the PRM's "
    "score, a line joins it to the step it continues. Kept steps are filled, pruned ones open; "
    "stars are finished solutions."
)


def memory_split(rows: pd.DataFrame, face: str = "") -> go.Figure:
    """Throughput of the search, and of each model while busy, over the LLM's share.

    rows: llm_share, llm_kv_tokens, prm_kv_tokens, metric, value, low, high; metrics tokens_per_s,
    problems_per_min, llm_tokens_per_busy_s, prm_tokens_per_busy_s, and optionally one row
    peak_share, drawn as a band low .. high.
    """
    specs = [[{"secondary_y": True}], [{}]]
    fig = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.12, specs=specs)
    of = dict(iter(rows.sort_values("llm_share").groupby("metric")))
    hover = "share %{x:.2f}: %{y:,.1f}"
    for metric, style in THROUGHPUT.items():
        line = series(of[metric], "llm_share", style, hover, legend="legend", marker_size=7)
        fig.add_trace(line, row=1, col=1, secondary_y=metric == "problems_per_min")
    for metric, model in BUSY.items():
        line = series(of[metric], "llm_share", MODELS[model], hover, legend="legend2")
        fig.add_trace(line, row=2, col=1)
    share_axes(fig, rows, panels=2)
    fig.update_yaxes(rangemode="tozero")
    fig.update_yaxes(title_text="generated tokens/s", row=1, col=1, secondary_y=False)
    fig.update_yaxes(title_text="tokens per busy second", row=2, col=1)
    # both measure the same searches, so their lines would coincide: the right axis reaches higher
    right = of["problems_per_min"]
    reach = max(1.45 * float(right["value"].max()), 1.25 * highest(right))
    axis = {"title_text": "problems/min", "showgrid": False, "tickmode": "auto"}
    fig.update_yaxes(**axis, range=[0, reach], row=1, col=1, secondary_y=True)
    legend_at(fig, "legend", _SPLIT_FRAME.above(UPPER_AXIS_PX - 4))
    legend_at(fig, "legend2", 0.445)
    if "peak_share" in of:
        value, low, high = of["peak_share"][["value", "low", "high"]].to_numpy(float)[0]
        pad = 0.004  # so that an interval of one share is still seen
        band = {"fillcolor": SKY, "opacity": 0.18, "line_width": 0, "layer": "below"}
        fig.add_vrect(low - pad, high + pad, **band)  # over both panels; its numbers in the legend
        text = f"peak {value:.2f} (95 %: {low:.2f} to {high:.2f})"
        marker = {"symbol": "square", "size": 12, "color": SKY, "opacity": 0.4}
        fig.add_trace(legend_note("legend", text, marker), row=1, col=1)
    return finish(fig, "Throughput against the memory split", _SPLIT_CAPTION, face, _SPLIT_FRAME)


def rungs(rows: pd.DataFrame, face: str = "") -> go.Figure:
    """Throughput over the split on several rungs, each over its own best.

    rows: rung, replayed (whether nobody measured it), llm_share, value, low, high; 1 is the best.
    """
    fig = go.Figure()
    for name, own in in_percent(rows).sort_values("llm_share").groupby("rung", sort=False):
        replayed = bool(own["replayed"].iloc[0])
        look = (VERMILION, "dot", "diamond-open") if replayed else (BLACK, "solid", "circle")
        hover = "share %{x:.2f}: %{y:.1f} % of the best"
        fig.add_trace(series(own, "llm_share", Style(str(name), *look), hover, marker_size=9))
    fig.update_xaxes(title_text=SHARE_TITLE)
    fig.update_yaxes(title_text="tokens/s over the rung's best (%)", rangemode="tozero")
    legend_at(fig, "legend", _RUNGS_FRAME.above(4))
    return finish(fig, "Do the rungs agree on the split?", _RUNGS_CAPTION, face, _RUNGS_FRAME)


def as_replayed(draw: Draw, rung: str = "replayed 1B + 8B") -> Draw:
    """The same figure for rows of a replayed rung: another ground, a badge, other dashes."""

    def drawn(rows: pd.DataFrame, face: str = "") -> go.Figure:
        return _mark_replayed(draw(rows, face), rung)

    return drawn


def _mark_replayed(fig: go.Figure, rung: str) -> go.Figure:
    meta = dict(fig.layout.meta)
    meta["caption"] = f"{rung[0].upper()}{rung[1:]}, not measured. {meta['caption']}"
    paper = meta["on_paper"]  # the badge stands where the title is on a screen: it keeps that room
    margin = paper["margin"] | {"t": paper["margin"]["t"] + TITLE_PX}
    meta["on_paper"] = paper | {"height": paper["height"] + TITLE_PX, "margin": margin}
    title = fig.layout.title.text.replace("</b>", f"</b> ({rung})")
    fig.update_layout(plot_bgcolor=GROUND, title_text=title, meta=meta)
    for trace in fig.data:
        area = trace.type != "scatter" or trace.stackgroup or trace.fill
        if not area and "lines" in (trace.mode or ""):
            trace.line.dash = DASHES.get(trace.line.dash, "dot")
    frame = {"bgcolor": GROUND, "bordercolor": GREY, "font": {"size": 11}, "xanchor": "right"}
    say(fig, f"<b>{BADGE}</b>", 1, 1, yshift=fig.layout.margin.t - 27, **frame)
    return fig


def search_tree(nodes: pd.DataFrame, face: str = "") -> go.Figure:
    """One problem's tree over depth and score.

    nodes: node_id, parent_id, depth (root's children have the least), score, kept, finished.
    """
    fig = go.Figure()
    places = nodes.set_index("node_id")[["depth", "score"]]
    kept, done = nodes["kept"].astype(bool), nodes["finished"].astype(bool)
    fig.add_trace(_edges(nodes[~kept], places, GREY, 0.7))
    fig.add_trace(_edges(nodes[kept], places, BLACK, 1.6))
    fig.add_trace(_markers(nodes[~kept & ~done], "pruned", "circle-open", 7))
    fig.add_trace(_markers(nodes[kept & ~done], "kept", "circle", 8))
    fig.add_trace(_markers(nodes[done], "finished", "star", 13))
    root, deepest = int(nodes["depth"].min()) - 1, int(nodes["depth"].max())
    depths = list(range(root + 1, deepest + 1, max(1, (deepest - root) // 12)))  # 14 ticks at most
    ticks = {"tickvals": [root, *depths], "ticktext": ["question", *map(str, depths)]}
    fig.update_xaxes(title_text="depth, in steps", range=[root - 0.4, deepest + 0.4], **ticks)
    fig.update_yaxes(title_text="PRM score of the step", range=[-0.03, 1.03])
    legend_at(fig, "legend", 1.01)
    return finish(fig, "One search tree", _TREE_CAPTION, face, _TREE_FRAME)


def _edges(nodes: pd.DataFrame, places: pd.DataFrame, colour: str, width: float) -> go.Scatter:
    """The edges to `nodes` as one trace broken by gaps; the root's children start at 0.5."""
    parents = places.reindex(nodes["parent_id"])
    start_x = parents["depth"].fillna(nodes["depth"].min() - 1 if len(nodes) else 0).to_numpy()
    start_y = parents["score"].fillna(0.5).to_numpy()
    xs = [x for a, b in zip(start_x, nodes["depth"], strict=True) for x in (a, b, None)]
    ys = [y for a, b in zip(start_y, nodes["score"], strict=True) for y in (a, b, None)]
    line = {"color": colour, "width": width}
    return go.Scatter(x=xs, y=ys, mode="lines", line=line, hoverinfo="skip", showlegend=False)


def _markers(nodes: pd.DataFrame, label: str, symbol: str, size: int) -> go.Scatter:
    scale = {"color": nodes["score"], "colorscale": "Cividis", "cmin": 0, "cmax": 1}
    edge = {"color": BLACK if symbol != "circle-open" else GREY, "width": 1}
    return go.Scatter(
        x=nodes["depth"],
        y=nodes["score"],
        text=nodes["node_id"].astype(str),
        name=f"{label} ({len(nodes)})",
        mode="markers",
        marker={"symbol": symbol, "size": size, "line": edge, **scale},
        hovertemplate="%{text}: score %{y:.3f}<extra>" + label + "</extra>",
    )
