"""A search tree as a figure: depth to the right, scores as colours, pruned branches faint.

What it does not do: lay out or choose (tree_nodes.py), or wait for clicks (tree.py).
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from workbench.plots.theme import BLACK, GREY, Frame, finish, legend_at, legend_note
from workbench.widgets.tree_nodes import ROLES, ProblemTree

CAPTION = (
    "The search tree of one problem. Each marker is a sampled step, its colour the PRM's score; a "
    "line joins it to the step it continues. Pruned steps are small and faint, stars end a "
    "solution, the thick line leads to the best solution with the answer that won. Up and down "
    "only keeps steps apart."
)
LOOKS = {  # role: (symbol, size, opacity)
    "pruned": ("circle", 7, 0.45),
    "kept": ("circle", 11, 1.0),
    "finished": ("star", 15, 1.0),
}
ROW_PX, LEAST_PX = 21, 230  # height of a place, and of the panel
SCORE_BAR = {
    "title": {"text": "PRM score", "side": "right"},
    "thickness": 12,
    "len": 1.0,
    "tickvals": [0, 0.25, 0.5, 0.75, 1],
}
COLOURS = {"colorscale": "Cividis", "cmin": 0, "cmax": 1, "colorbar": SCORE_BAR}


def tree_figure(tree: ProblemTree, selected: str | None = None, face: str = "") -> go.Figure:
    """The tree drawn; markers carry their node in `customdata`, traces their role in `meta`."""
    places = _places(tree.nodes)
    fig = go.Figure()
    pruned, chosen = places["role"] == "pruned", places["chosen"]
    fig.add_trace(_edges(places, pruned, "#D8D8D8", 0.8))
    fig.add_trace(_edges(places, ~pruned & ~chosen, GREY, 1.6))
    fig.add_trace(_edges(places, chosen, BLACK, 4))
    for role in ROLES:
        fig.add_trace(_markers(places[places["role"] == role], role))
    fig.add_trace(_question(tree))
    fig.add_trace(_ring())
    _legend(fig, places)
    _axes(fig, places)
    most = int(places.groupby("depth").size().max())
    frame = Frame(panels=max(LEAST_PX, ROW_PX * most), top=70, left=24, right=96)
    legend_at(fig, "legend", frame.above(4))
    select(fig, tree, selected or tree.chosen)
    fig.update_layout(coloraxis=COLOURS, uirevision=tree.problem_id)
    return finish(fig, f"Search tree of problem {tree.problem_id}", CAPTION, face, frame)


def select(fig: Any, tree: ProblemTree, node_id: str | None) -> None:
    """Put the ring of `fig` (a Figure or FigureWidget of tree_figure) around a node."""
    (ring,) = (trace for trace in fig.data if trace.meta == "ring")
    places = _places(tree.nodes)
    found = places[places["node_id"] == node_id]
    ring.update(x=found["depth"].to_numpy(), y=found["y"].to_numpy())


def _places(nodes: pd.DataFrame) -> pd.DataFrame:
    """With y: the nodes of a depth one apart, around zero, the first on top."""
    width = nodes.groupby("depth")["place"].transform("max")
    return nodes.assign(y=width / 2 - nodes["place"])


def _edges(places: pd.DataFrame, wanted: pd.Series, colour: str, width: float) -> go.Scatter:
    """Lines to the wanted nodes as one trace broken by gaps; those of depth 1 start at (0, 0)."""
    nodes = places[wanted]
    start = places.set_index("node_id")["y"].reindex(nodes["parent_id"]).fillna(0.0)
    ends = zip(nodes["depth"], start, nodes["y"], strict=True)
    lines = [((depth - 1, depth, None), (a, b, None)) for depth, a, b in ends]
    return go.Scatter(
        x=[x for xs, _ in lines for x in xs],
        y=[y for _, ys in lines for y in ys],
        mode="lines",
        line={"color": colour, "width": width},
        hoverinfo="skip",
        showlegend=False,
    )


def _markers(nodes: pd.DataFrame, role: str) -> go.Scatter:
    symbol, size, opacity = LOOKS[role]
    edges = [BLACK if chosen else "#555555" for chosen in nodes["chosen"]]
    widths = [2.4 if chosen else 0.6 for chosen in nodes["chosen"]]
    return go.Scatter(
        x=nodes["depth"],
        y=nodes["y"],
        customdata=nodes["node_id"],
        meta=role,
        mode="markers",
        opacity=opacity,
        marker={
            "symbol": symbol,
            "size": size,
            "color": nodes["score"],
            "coloraxis": "coloraxis",
            "line": {"color": edges, "width": widths},
        },
        text=[f"{score:.3f}" for score in nodes["score"]],
        hovertemplate="node %{customdata}: score %{text}<extra>" + role + "</extra>",
        showlegend=False,
    )


def _question(tree: ProblemTree) -> go.Scatter:
    return go.Scatter(
        x=[0],
        y=[0],
        mode="markers",
        marker={"symbol": "diamond", "size": 12, "color": BLACK},
        text=[tree.question],
        hovertemplate="%{text}<extra>question</extra>",
        showlegend=False,
    )


def _ring() -> go.Scatter:
    marker = {"symbol": "circle-open", "size": 22, "color": BLACK, "line": {"width": 2}}
    return go.Scatter(
        x=[], y=[], mode="markers", marker=marker, meta="ring", hoverinfo="skip", showlegend=False
    )


def _legend(fig: go.Figure, places: pd.DataFrame) -> None:
    """Shapes and lines in words; colours have the bar."""
    counts = places["role"].value_counts()
    for role in ROLES:
        symbol, size, opacity = LOOKS[role]
        mark = {"symbol": symbol, "size": size, "color": GREY, "opacity": opacity}
        text = f"{role} ({counts.get(role, 0)})"
        fig.add_trace(legend_note("legend", text, mark))
    line = {"color": BLACK, "width": 4}
    fig.add_trace(go.Scatter(x=[None], y=[None], mode="lines", line=line, name="chosen"))
    ring = {"symbol": "circle-open", "size": 14, "color": BLACK}
    fig.add_trace(legend_note("legend", "shown below", ring))


def _axes(fig: go.Figure, places: pd.DataFrame) -> None:
    deepest = int(places["depth"].max())
    ticks = list(range(1, deepest + 1, max(1, deepest // 12)))
    fig.update_xaxes(
        title_text="depth, in steps (0: the question)",
        tickvals=[0, *ticks],
        tickangle=0,
        range=[-0.4, deepest + 0.5],
    )
    reach = float(places["y"].abs().max()) + 0.8
    fig.update_yaxes(visible=False, range=[-reach, reach])
