"""A search tree to click through: depth to the right, scores as colours, pruned branches faint.

Made of the `problems` and `nodes` tables, so a search of this moment and a stored run are alike.
`problem_tree`, `node_text`, `in_words` and `tree_figure` are plain functions; `tree_widget` shows
the figure, and the text of the node that is clicked or chosen by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

import ipywidgets
import pandas as pd
import plotly.graph_objects as go

from workbench.errors import ConfigError, nearest
from workbench.plots.theme import BLACK, GREY, Frame, finish, legend_at, legend_note
from workbench.search.answers import extract_answer
from workbench.widgets.parts import Drawing, FigureView, is_live, labelled

NOT_LIVE = "Nodes can be clicked in a live notebook (Jupyter, VS Code); the cells above read one."
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

ROLES = ("pruned", "kept", "finished")
"""What became of a node; a finished one may also be on the way to the chosen solution."""


@dataclass(frozen=True, slots=True)
class ProblemTree:
    """One problem and its nodes, by depth and place.

    nodes: the `nodes` table's columns, place (its rank among the nodes of its depth, children in
    their parents' order, so that no two edges cross), role (ROLES), chosen (on the way to the beam
    whose answer won).
    """

    problem_id: str
    question: str
    predicted: str
    correct: bool | None
    nodes: pd.DataFrame

    @property
    def chosen(self) -> str | None:
        """The node that ends the chosen solution; None where no kept solution has the answer."""
        ids = self.nodes.loc[self.nodes["chosen"], "node_id"]
        return None if ids.empty else str(ids.iloc[-1])

    def path(self, node_id: str) -> pd.DataFrame:
        """The rows from the question to a node, itself included. ConfigError for an unknown one."""
        known = list(self.nodes["node_id"])
        if node_id not in known:
            raise ConfigError(
                f"Problem {self.problem_id!r} has no node {node_id!r}.{nearest(node_id, known)} "
                f"Nodes are named by their paths, {known[0]!r} to {known[-1]!r}."
            )
        return self.nodes[self.nodes["node_id"].isin(_ancestry(node_id))].sort_values("depth")


def problem_tree(
    problems: pd.DataFrame, nodes: pd.DataFrame, problem_id: str | None = None
) -> ProblemTree:
    """The tree of one problem (default: the first) of a result's or a run's tables.

    Tables without `text` make a tree without texts. ConfigError for a problem that is not there.
    """
    ids = list(problems["problem_id"])
    wanted = ids[0] if problem_id is None else problem_id
    if wanted not in ids:
        hint = nearest(wanted, ids)
        raise ConfigError(f"There is no problem {wanted!r}.{hint} Problems: {', '.join(ids)}.")
    row = problems[problems["problem_id"] == wanted].iloc[0]
    own = nodes[nodes["problem_id"] == wanted]
    own = own.assign(**{name: "" for name in ("text", "finish_reason") if name not in own})
    predicted = str(row["predicted"] or "")
    correct = None if pd.isna(row["correct"]) else bool(row["correct"])
    return ProblemTree(
        wanted, str(row.get("problem", wanted)), predicted, correct, _laid_out(own, predicted)
    )


def node_text(tree: ProblemTree, node_id: str) -> str:
    """A node in words: what became of it, then the question and the solution as far as it goes.

    The node's own step stands below a line.
    """
    path = tree.path(node_id)
    row = path.iloc[-1]
    *before, own = path["text"]
    role = "chosen" if row["chosen"] else str(row["role"])
    head = (
        f"node {node_id}, depth {row['depth']}: {role}, score {row['score']:.3f}, "
        f"{row['step_tokens']} tokens in this step, {row['total_tokens']} in the solution so far, "
        f"ended by {row['finish_reason']}"
    )
    lines = [head, "", tree.question, *(text.strip() for text in before), "-" * 8, own.strip()]
    return "\n".join(lines)


def in_words(tree: ProblemTree) -> str:
    """What the tree shows, in a sentence or two."""
    counts = tree.nodes["role"].value_counts()
    sampled = (
        f"{tree.question} {len(tree.nodes)} steps were sampled down to depth "
        f"{tree.nodes['depth'].max()}: {counts.get('pruned', 0)} pruned, "
        f"{counts.get('kept', 0)} kept and extended, {counts.get('finished', 0)} that end a "
        "solution."
    )
    if not tree.predicted:
        return f"{sampled} No solution has an answer."
    verdict = {True: " (right)", False: " (wrong)", None: ""}[tree.correct]
    where = f"; node {tree.chosen} ends the best solution with it" if tree.chosen else ""
    return f"{sampled} The answer that won is {tree.predicted}{verdict}{where}."


def _laid_out(nodes: pd.DataFrame, predicted: str) -> pd.DataFrame:
    """The nodes with place, role and chosen, by depth and place."""
    ordinals = [tuple(map(int, name.split("/"))) for name in nodes["node_id"]]
    order = sorted(range(len(nodes)), key=lambda i: (len(ordinals[i]), ordinals[i]))
    rows = nodes.iloc[order].reset_index(drop=True)
    rows["place"] = rows.groupby("depth").cumcount()
    rows["role"] = "pruned"
    rows.loc[rows["kept"].astype(bool), "role"] = "kept"
    rows.loc[rows["finished"].astype(bool), "role"] = "finished"
    end = _chosen_end(rows, predicted)
    return rows.assign(chosen=rows["node_id"].isin(_ancestry(end) if end else []))


def _ancestry(node_id: str) -> list[str]:
    """The nodes from the question to this one, itself included."""
    parts = node_id.split("/")
    return ["/".join(parts[: k + 1]) for k in range(len(parts))]


def _chosen_end(rows: pd.DataFrame, predicted: str) -> str | None:
    """Of the outcome's beams that give the winning answer, the best scored; ties by path."""
    if not predicted:
        return None
    ends = rows[rows["kept"].astype(bool) & ~rows["node_id"].isin(rows["parent_id"])]
    texts = dict(zip(rows["node_id"], rows["text"], strict=True))
    for name in ends.sort_values("score", ascending=False, kind="stable")["node_id"]:
        if extract_answer("".join(texts[each] for each in _ancestry(name))) == predicted:
            return str(name)
    return None


def tree_figure(tree: ProblemTree, selected: str | None = None, provenance: str = "") -> go.Figure:
    """The tree drawn; markers carry their node in `customdata`, traces their role in `meta`."""
    places = _places(tree.nodes)
    fig = go.Figure()
    pruned, chosen = places["role"] == "pruned", places["chosen"]
    fig.add_trace(_edges(places, pruned, "#D8D8D8", 0.8))
    fig.add_trace(_edges(places, ~pruned & ~chosen, GREY, 1.6))
    fig.add_trace(_edges(places, chosen, BLACK, 4))
    for role in ROLES:
        fig.add_trace(_markers(places[places["role"] == role], role))
    question = {"symbol": "diamond", "size": 12, "color": BLACK}
    hover = {"text": [tree.question], "hovertemplate": "%{text}<extra>question</extra>"}
    fig.add_trace(_spots([0], [0], question).update(hover))
    at = places[places["node_id"] == (selected or tree.chosen)]
    ring = {"symbol": "circle-open", "size": 22, "color": BLACK, "line": {"width": 2}}
    fig.add_trace(_spots(at["depth"], at["y"], ring).update(meta="ring", hoverinfo="skip"))
    _legend(fig, places)
    _axes(fig, places)
    most = int(places.groupby("depth").size().max())
    frame = Frame(panels=max(LEAST_PX, ROW_PX * most), top=70, left=24, right=96)
    legend_at(fig, "legend", frame.above(4))
    fig.update_layout(coloraxis=COLOURS, uirevision=tree.problem_id)
    return finish(fig, f"Search tree of problem {tree.problem_id}", CAPTION, provenance, frame)


def _spots(x: Any, y: Any, marker: dict[str, Any]) -> go.Scatter:
    return go.Scatter(x=x, y=y, mode="markers", marker=marker, showlegend=False)


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
    outline = {
        "color": [BLACK if chosen else "#555555" for chosen in nodes["chosen"]],
        "width": [2.4 if chosen else 0.6 for chosen in nodes["chosen"]],
    }
    marker = {"symbol": symbol, "size": size, "color": nodes["score"], "coloraxis": "coloraxis"}
    return _spots(nodes["depth"], nodes["y"], marker | {"line": outline}).update(
        customdata=nodes["node_id"],
        meta=role,
        opacity=opacity,
        text=[f"{score:.3f}" for score in nodes["score"]],
        hovertemplate="node %{customdata}: score %{text}<extra>" + role + "</extra>",
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


def tree_widget(
    problems: pd.DataFrame, nodes: pd.DataFrame, provenance: str = "", **parameters: Any
) -> Any:
    """The widget over the problems of a result or a run; where none is shown, a sentence.

    problems, nodes: tables of one search. parameters: of notebooks/10_explore.ipynb; `problem` and
    `node` are what is chosen.
    """
    return TreeView(problems, nodes, provenance, parameters).box if is_live() else NOT_LIVE


class TreeView(FigureView):
    """Menus, figure and texts of one search's trees; `box` is shown."""

    def __init__(
        self,
        problems: pd.DataFrame,
        nodes: pd.DataFrame,
        provenance: str,
        parameters: dict[str, Any],
    ) -> None:
        self._tables, self._provenance, self._parameters = (problems, nodes), provenance, parameters
        self.problem = ipywidgets.Dropdown(options=list(problems["problem_id"]))
        self.node, self.text = ipywidgets.Dropdown(), ipywidgets.HTML()
        self._choose_problem()
        menus = [labelled("problem", self.problem), labelled("node, or click one", self.node)]
        super().__init__("10_explore", "search_tree", menus, self._drawing)
        texts = ipywidgets.HBox([self.text, self.pinned])
        self.box.children = [c for c in self.box.children if c is not self.pinned] + [texts]
        self.problem.observe(self._other_problem, names="value")
        self.node.observe(self.show, names="value")

    def show(self, _: Any = None) -> None:
        """Draw the problem's tree, the chosen node ringed and its text below."""
        super().show()
        self.text.value = _page(node_text(self.tree, self.node.value))

    def attach(self, figure: go.FigureWidget) -> None:
        """A click on a marker chooses its node."""
        for trace in figure.data:
            if trace.meta in ROLES:
                trace.on_click(self._clicked)

    def pin(self) -> str:
        """Keep the text shown beside those shown next; returns which."""
        self.pinned.value = _page(f"pinned: {node_text(self.tree, self.node.value)}")
        return f"pinned node {self.node.value}"

    def _choose_problem(self) -> None:
        """Its tree and nodes; the end of the chosen solution first, else the first node."""
        self.tree = problem_tree(*self._tables, self.problem.value)
        self.node.options = list(self.tree.nodes["node_id"])
        self.node.value = self.tree.chosen or self.node.options[0]

    def _other_problem(self, _: Any) -> None:
        self._choose_problem()
        self.show()

    def _clicked(self, trace: Any, points: Any, _: Any) -> None:
        if points.point_inds:
            self.node.value = str(trace.customdata[points.point_inds[0]])

    def _drawing(self) -> Drawing:
        chosen = {"problem": self.tree.problem_id, "node": self.node.value}
        figure = tree_figure(self.tree, self.node.value, self._provenance)
        words = escape(in_words(self.tree))
        return Drawing(figure, self.tree.nodes, words, self._parameters | chosen)


def _page(text: str) -> str:
    """Text as it stands, its lines kept, wrapped where they are long."""
    style = "white-space:pre-wrap;word-break:normal;max-width:60em;margin:0 1em 0 0"
    return f'<pre style="{style}">{escape(text)}</pre>'
