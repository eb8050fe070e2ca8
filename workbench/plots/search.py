"""A search seen as a tree: which steps were sampled, how the PRM scored them, which were kept.

Draws one problem's rows of the `nodes` trace table. Accuracy against budget is drawn elsewhere.
"""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from workbench.plots.theme import BLACK, GREY, Frame, finish, legend_at

_FRAME = Frame(panels=340)
_CAPTION = (
    "The search tree of one problem: each marker is a sampled step, its height and shade the PRM's "
    "score, a line joins it to the step it continues. Kept steps are filled, pruned ones open; "
    "stars are finished solutions."
)


def search_tree(nodes: pd.DataFrame, face: str = "") -> go.Figure:
    """One problem's tree over depth and score.

    nodes: node_id, parent_id, depth (root's children have the least), score, kept, finished.
    """
    fig = go.Figure()
    places = nodes.set_index("node_id")[["depth", "score"]]
    kept = nodes["kept"].astype(bool)
    fig.add_trace(_edges(nodes[~kept], places, GREY, 0.7))
    fig.add_trace(_edges(nodes[kept], places, BLACK, 1.6))
    done = nodes["finished"].astype(bool)
    fig.add_trace(_markers(nodes[~kept & ~done], "pruned", "circle-open", 7))
    fig.add_trace(_markers(nodes[kept & ~done], "kept", "circle", 8))
    fig.add_trace(_markers(nodes[done], "finished", "star", 13))
    fig.update_xaxes(title_text="depth, in steps", **_depth_ticks(nodes["depth"]))
    fig.update_yaxes(title_text="PRM score of the step", range=[-0.03, 1.03])
    legend_at(fig, "legend", 1.01)
    return finish(fig, "One search tree", _CAPTION, face, _FRAME)


def _depth_ticks(depths: pd.Series) -> dict[str, object]:
    """At most some 14 ticks; the root's place is called the question."""
    root, deepest = int(depths.min()) - 1, int(depths.max())
    values = list(range(root + 1, deepest + 1, max(1, (deepest - root) // 12)))
    text = ["question", *map(str, values)]
    return {"tickvals": [root, *values], "ticktext": text, "range": [root - 0.4, deepest + 0.4]}


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
