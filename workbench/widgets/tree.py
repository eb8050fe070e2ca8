"""A search tree to click through: depth to the right, scores as colours, pruned branches faint.

Made of the `problems` and `nodes` tables, so a search of this moment and a stored run are alike.
A `TreeView` shows the figure, and the text of the node that is clicked or chosen by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ipywidgets
import pandas as pd
import plotly.graph_objects as go

from workbench.config import require_known
from workbench.errors import ConfigError, nearest
from workbench.plots.search import ROLES, search_tree, tree_places
from workbench.search.answers import UNSCORED, extract_answer
from workbench.widgets.parts import Drawing, FigureView, HtmlText, labelled


@dataclass(frozen=True, slots=True)
class ProblemTree:
    """One problem and its nodes, in the order of plots.tree_places.

    nodes: the `nodes` table's columns, place, role, chosen (on the way to the beam whose answer
    won); score is NaN where the PRM was not asked.
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


def problem_tree(
    problems: pd.DataFrame, nodes: pd.DataFrame, problem_id: str | None = None
) -> ProblemTree:
    """The tree of one problem (default: the first) of a result's or a run's tables; ConfigError for
    one that is not there.
    """
    ids = list(problems["problem_id"])
    wanted = ids[0] if problem_id is None else problem_id
    require_known([wanted], ids, "The search", "problem")
    row = problems[problems["problem_id"] == wanted].iloc[0]
    own = nodes[nodes["problem_id"] == wanted]
    predicted = str(row["predicted"] or "")
    correct = None if pd.isna(row["correct"]) else bool(row["correct"])
    laid_out, question = tree_places(own), str(row["problem"])
    # of the outcome's beams that give the winning answer, the best scored; ties by path
    ends = laid_out["kept"].astype(bool) & ~laid_out["node_id"].isin(laid_out["parent_id"])
    texts = dict(zip(laid_out["node_id"], laid_out["text"], strict=True))
    chosen = list[str]()
    for name in laid_out[ends].sort_values("score", ascending=False, kind="stable")["node_id"]:
        path = _ancestry(name)
        if predicted and extract_answer("".join(texts[each] for each in path)) == predicted:
            chosen = path
            break
    laid_out["chosen"] = laid_out["node_id"].isin(chosen)
    unscored = laid_out["score"] == UNSCORED  # all: of a strategy that only votes
    if not row["prm_tokens_asked"] and unscored.all():
        laid_out["score"] = float("nan")
    return ProblemTree(wanted, question, predicted, correct, laid_out)


def node_text(tree: ProblemTree, node_id: str) -> str:
    """A node in words: what became of it, then the question and the solution as far as it goes.

    The node's own step stands below a line. ConfigError for an unknown one.
    """
    known = list(tree.nodes["node_id"])
    if node_id not in known:
        raise ConfigError(
            f"Problem {tree.problem_id!r} has no node {node_id!r}.{nearest(node_id, known)} "
            f"Nodes are named by their paths, {known[0]!r} to {known[-1]!r}."
        )
    path = tree.nodes[tree.nodes["node_id"].isin(_ancestry(node_id))].sort_values("depth")
    row = path.iloc[-1]
    *before, own = path["text"]
    role = "chosen" if row["chosen"] else str(row["role"])
    score = "" if pd.isna(row["score"]) else f"score {row['score']:.3f}, "
    head = (
        f"node {node_id}, depth {row['depth']}: {role}, {score}"
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
        f"{counts.get('kept', 0)} kept, {counts.get('finished', 0)} that end a "
        "solution."
    )
    if not tree.predicted:
        return f"{sampled} No solution has an answer."
    verdict = {True: " (right)", False: " (wrong)", None: ""}[tree.correct]
    where = f"; node {tree.chosen} ends the best solution with it" if tree.chosen else ""
    return f"{sampled} The answer that won is {tree.predicted}{verdict}{where}."


def _ancestry(node_id: str) -> list[str]:
    """The nodes from the question to this one, itself included."""
    parts = node_id.split("/")
    return ["/".join(parts[: k + 1]) for k in range(len(parts))]


def tree_figure(tree: ProblemTree, selected: str | None = None, provenance: str = "") -> go.Figure:
    """The tree drawn (plots.search_tree), a ring around a node: default, the chosen end."""
    figure = search_tree(
        tree.nodes,
        provenance,
        title=f"Search tree of problem {tree.problem_id}",
        question=tree.question,
        selected=selected or tree.chosen or "",
    )
    return figure.update_layout(uirevision=tree.problem_id)


class TreeView(FigureView):
    """Menus, figure and texts of one search's trees.

    problems, nodes: tables of a result or a run. problem, node: what is shown first (default: the
    first; the end of its chosen solution). parameters: others of notebooks/10_explore.ipynb.
    """

    def __init__(
        self,
        problems: pd.DataFrame,
        nodes: pd.DataFrame,
        provenance: str = "",
        problem: str | None = None,
        node: str | None = None,
        measured: Mapping[str, Any] | None = None,
        **parameters: Any,
    ) -> None:
        self._tables, self._provenance = (problems, nodes), provenance
        names = list(problems["problem_id"])
        self.problem = ipywidgets.Dropdown(options=names, value=problem or names[0])
        self.node, self.text = ipywidgets.Dropdown(), HtmlText()
        self._choose_problem()
        self.node.value = node or self.node.value
        menus = [labelled("problem", self.problem), labelled("node, or click one", self.node)]
        super().__init__("10_explore", menus, self._drawings, parameters, measured=measured)
        texts = ipywidgets.HBox([self.text, self.pinned])
        self.box.children = [c for c in self.box.children if c is not self.pinned] + [texts]
        self.problem.observe(self._choose_problem, names="value")
        self.problem.observe(self.show, names="value")
        self.node.observe(self.show, names="value")

    def show(self, _: Any = None) -> None:
        """Draw the problem's tree, the chosen node ringed and its text below."""
        super().show()
        self.text.say(node_text(self.tree, self.node.value), tag="pre")

    def attach(self, figure: go.FigureWidget) -> None:
        """A click on a marker chooses its node."""

        def choose(trace: Any, points: Any, _: Any) -> None:
            if points.point_inds:
                self.node.value = str(trace.customdata[points.point_inds[0]])

        for trace in figure.data:
            if trace.meta in ROLES:
                trace.on_click(choose)

    def pin(self) -> str:
        """Keep the text shown beside those shown next; returns which."""
        self.pinned.say(self.text.text, "pinned:", tag="pre")
        return f"pinned node {self.node.value}"

    def _choose_problem(self, _: Any = None) -> None:
        """Its tree and nodes; the end of the chosen solution first, else the first node."""
        self.tree = problem_tree(*self._tables, self.problem.value)
        self.node.options = list(self.tree.nodes["node_id"])
        self.node.value = self.tree.chosen or self.node.options[0]

    def _drawings(self) -> dict[str, Drawing]:
        given = {"problem": self.tree.problem_id, "node": self.node.value}
        figure = tree_figure(self.tree, self.node.value, self._provenance)
        return {"search_tree": Drawing(figure, self.tree.nodes, in_words(self.tree), given)}
