"""A search tree to click through: the figure, and the text of the node that was clicked.

What it shows comes from tree_nodes.node_text and tree_figure.tree_figure, plain functions; every
node can be reached from menus too. What it does not do: search.
"""

from __future__ import annotations

from html import escape
from typing import Any

import pandas as pd

from workbench.widgets.commands import papermill_command
from workbench.widgets.plot import PlotWidget
from workbench.widgets.split import is_live
from workbench.widgets.tree_figure import select, tree_figure
from workbench.widgets.tree_nodes import ROLES, in_words, node_text, problem_tree

NOT_LIVE = "Nodes can be clicked in a live notebook (Jupyter, VS Code); the cells above read one."


def tree_widget(
    problems: pd.DataFrame, nodes: pd.DataFrame, face: str = "", **parameters: Any
) -> Any:
    """The widget over the problems of a result or a run; where none is shown, a sentence.

    problems, nodes: tables of one search. parameters: of notebooks/10_explore.ipynb; `problem` and
    `node` are what is chosen.
    """
    return TreeView(problems, nodes, face, parameters).box if is_live() else NOT_LIVE


class TreeView:
    """Menus, figure and texts of one search's trees; `box` is shown."""

    def __init__(
        self,
        problems: pd.DataFrame,
        nodes: pd.DataFrame,
        face: str,
        parameters: dict[str, Any],
    ) -> None:
        import ipywidgets  # noqa: PLC0415  an optional extra

        from workbench.widgets import parts  # noqa: PLC0415

        self._tables, self._face, self._parameters = (problems, nodes), face, parameters
        self.tree = problem_tree(problems, nodes)
        ids = list(problems["problem_id"])
        self.problem = parts.Choice("problem", ids, self.tree.problem_id)
        self.node = parts.Choice("node, or click one", self._ids(), self.selected_first)
        self.words, self.text = parts.sentence(), parts.sentence()
        self.pinned = parts.sentence()
        self.copy = parts.CopyText()
        self.place = ipywidgets.VBox()
        self.figure: Any = None
        pins = parts.button("pin for comparison", self.pin)
        save = parts.save_box(self._drawings, "build/figures/tree")
        texts = ipywidgets.HBox([self.text, self.pinned])
        menus = [self.problem.box, self.node.box, self.words, self.place, texts]
        self.box = ipywidgets.VBox([*menus, pins, self.copy, save])
        self.problem.observe(self.show_problem)
        self.node.observe(self.show_node)
        self.show_problem(self.tree.problem_id)

    @property
    def selected_first(self) -> str:
        """What is shown before anything is clicked: the chosen solution's end, or the first."""
        return self.tree.chosen or self._ids()[0]

    def show_problem(self, problem_id: str) -> None:
        """Draw another problem's tree."""
        self.tree = problem_tree(*self._tables, problem_id)
        self.figure = PlotWidget(tree_figure(self.tree, None, self._face))
        for trace in self.figure.data:
            if trace.meta in ROLES:
                trace.on_click(self._clicked)
        self.place.children = [self.figure]
        self.words.value = escape(in_words(self.tree))
        self.node.offer(self._ids())
        if self.node.value != self.selected_first:
            self.node.value = self.selected_first
        self.show_node(self.node.value)

    def show_node(self, node_id: str) -> None:
        """Ring a node and show its text."""
        if node_id in self._ids():
            select(self.figure, self.tree, node_id)
            self.text.value = _page(node_text(self.tree, node_id))
            given = {"problem": self.tree.problem_id, "node": node_id}
            self.copy.text = papermill_command("10_explore", {**self._parameters, **given})

    def pin(self) -> str:
        """Keep the text shown beside those shown next; answers which."""
        self.pinned.value = _page(f"pinned: {node_text(self.tree, self.node.value)}")
        return f"pinned node {self.node.value}"

    def _clicked(self, trace: Any, points: Any, _: Any) -> None:
        if points.point_inds:
            self.node.value = str(trace.customdata[points.point_inds[0]])

    def _ids(self) -> list[str]:
        return list(self.tree.nodes["node_id"])

    def _drawings(self) -> dict[str, Any]:
        given = {"problem": self.tree.problem_id, "node": self.node.value}
        fig = tree_figure(self.tree, self.node.value, self._face)
        return {"search_tree": (fig, self.tree.nodes, {**self._parameters, **given})}


def _page(text: str) -> str:
    """Text as it stands, its lines kept, wrapped where they are long."""
    style = "white-space:pre-wrap;word-break:normal;max-width:60em;margin:0 1em 0 0"
    return f'<pre style="{style}">{escape(text)}</pre>'
