"""One problem's search tree, ready to be drawn and read: places, roles, the chosen solution.

Made of the `problems` and `nodes` tables, so a search of this moment and a stored run are one to
it. What it does not do: draw (tree_figure.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from workbench.errors import ConfigError, nearest
from workbench.search.answers import extract_answer

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

    def row(self, node_id: str) -> pd.Series:
        """A node's row. ConfigError for a node that is not there."""
        found = self.nodes[self.nodes["node_id"] == node_id]
        if found.empty:
            known = list(self.nodes["node_id"])
            raise ConfigError(
                f"Problem {self.problem_id!r} has no node {node_id!r}.{nearest(node_id, known)} "
                f"Nodes are named by their paths, {known[0]!r} to {known[-1]!r}."
            )
        return found.iloc[0]

    def path(self, node_id: str) -> pd.DataFrame:
        """The rows from the question to a node, itself included."""
        self.row(node_id)
        parts = node_id.split("/")
        names = ["/".join(parts[: k + 1]) for k in range(len(parts))]
        rows = self.nodes[self.nodes["node_id"].isin(names)]
        return rows.sort_values("depth")


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
    row, path = tree.row(node_id), tree.path(node_id)
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
    chosen = set() if end is None else {end[:k] for k, c in enumerate(end) if c == "/"} | {end}
    return rows.assign(chosen=rows["node_id"].isin(chosen))


def _chosen_end(rows: pd.DataFrame, predicted: str) -> str | None:
    """Of the outcome's beams that give the winning answer, the best scored; ties by path."""
    if not predicted:
        return None
    ends = rows[rows["kept"].astype(bool) & ~rows["node_id"].isin(rows["parent_id"])]
    texts = dict(zip(rows["node_id"], rows["text"], strict=True))
    fitting = [
        (-float(score), k, str(name))
        for k, (name, score) in enumerate(zip(ends["node_id"], ends["score"], strict=True))
        if extract_answer(_solution(str(name), texts)) == predicted
    ]
    return min(fitting)[2] if fitting else None


def _solution(node_id: str, texts: dict[str, str]) -> str:
    parts = node_id.split("/")
    return "".join(texts["/".join(parts[: k + 1])] for k in range(len(parts)))
