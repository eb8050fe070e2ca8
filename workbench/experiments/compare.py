"""Two runs, or two groups of runs, side by side: what was set differently and what that changed.

Differences are paired: the same problem with the same seed on both sides, so that what problems
have in common cancels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench.errors import RunStoreError
from workbench.experiments.runs import FINISHED, Folders, load_runs, load_table, read_config
from workbench.experiments.settings import COUNTED, TIMED
from workbench.experiments.statistics import bootstrap

PAIRED = {
    "accuracy": ("correct", None),
    **{name: (name, None) for name in ("tokens", "iterations", "seconds")},
    "tokens_per_s": ("tokens", "wall_part_s"),
}
"""What is compared: the mean of a column of `problems`, or a column over another."""
PLACES = ("machine", "versions", "git_commit")


@dataclass(frozen=True, slots=True)
class NodeDifference:
    """The first node whose tokens or score differ; a side that has no such node shows None."""

    problem_id: str
    seed: int
    node_id: str
    what: str  # "tokens" | "score" | "missing"
    a: Any
    b: Any

    def __str__(self) -> str:
        where = f"problem {self.problem_id}, seed {self.seed}, node {self.node_id}"
        return f"{where}: {self.what} differ, a has {self.a}, b has {self.b}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found.

    parameters: every setting that differs; differences: b - a with intervals; identical: every node
    of every pair has equal tokens and scores; warnings: why the two may not be comparable.
    """

    parameters: pd.DataFrame
    differences: pd.DataFrame
    identical: bool
    first_difference: NodeDifference | None
    warnings: tuple[str, ...]

    def _repr_html_(self) -> str:
        tokens = "identical" if self.identical else f"different ({self.first_difference})"
        notes = "".join(f"<p><b>Warning:</b> {escape(text)}</p>" for text in self.warnings)
        tables = self.parameters.to_html(index=False) + self.differences.to_html(index=False)
        return f"{notes}{tables}<p>Tokens and scores: {escape(tokens)}.</p>"


def compare(a: Folders, b: Folders) -> Comparison:
    """Compare two sides: each a run folder, several, or a folder of run folders.

    Runs pair by seed (and by llm_share, where a side holds several); problems pair within them.
    Raises RunStoreError where a side holds no finished run or the two have no pair in common.
    """
    sides = _finished(a, "a"), _finished(b, "b")
    keys = _pair_keys(*sides)
    tables = [_table(runs, "problems", keys) for runs in sides]
    problems = tables[0].merge(tables[1], on=[*keys, "problem_id"], suffixes=("_a", "_b"))
    if problems.empty:
        raise RunStoreError(
            f"The two have no problem in common with equal {' and '.join(keys)}; compare runs "
            "of the same problems and seeds."
        )
    nodes = [_table(runs, "nodes", keys) for runs in sides]
    first = _first_difference(nodes, problems[[*keys, "problem_id"]], keys)
    parameters = pd.DataFrame({side: _parameters(runs) for side, runs in zip("ab", sides)})
    parameters = parameters.fillna("-").rename_axis("name").sort_index().reset_index()
    return Comparison(
        parameters=parameters[parameters["a"] != parameters["b"]].reset_index(drop=True),
        differences=_differences(problems),
        identical=first is None,
        first_difference=first,
        warnings=tuple(_warnings(*sides)),
    )


def _finished(runs: Folders, side: str) -> pd.DataFrame:
    found = load_runs(runs)
    found = found[found["status"] == FINISHED]
    if "role" in found:
        found = found[~found["role"].isin((TIMED, COUNTED))]  # cells ask, they search nothing
    if found.empty:
        raise RunStoreError(
            f"Side {side} holds no finished search; `workbench runs list` shows status."
        )
    return found.reset_index(drop=True)


def _pair_keys(left: pd.DataFrame, right: pd.DataFrame) -> list[str]:
    """Columns that tell the runs of a side apart."""
    keys = ["seed", "llm_share", "role", "repeat", "setting", "max_depth", "num_problems"]
    for count in (1, 2, 4, 7):
        if not any(runs.duplicated(keys[:count]).any() for runs in (left, right)):
            return keys[:count]
    raise RunStoreError(
        "A side holds several runs of equal seed and share; name the run folders to be compared."
    )


def _table(runs: pd.DataFrame, name: str, keys: list[str]) -> pd.DataFrame:
    """A trace table with the keys of its runs."""
    return load_table(list(runs["folder"]), name).merge(runs[["run_id", *keys]], on="run_id")


def _parameters(runs: pd.DataFrame) -> pd.Series:
    """Every setting as text; where the runs differ, all values."""
    rows = []
    for config in (read_config(Path(folder)) for folder in runs["folder"]):
        values = config["parameters"] | {f"identity.{k}": v for k, v in config["identity"].items()}
        rows.append({name: json.dumps(value) for name, value in values.items()})
    return pd.DataFrame(rows).apply(lambda column: ", ".join(sorted(set(column.dropna()))))


def _differences(problems: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for metric, (top, bottom) in PAIRED.items():
        names = [f"{column}_{side}" for side in "ab" for column in (top, bottom) if column]
        known = problems[["problem_id", *names]].dropna()
        if known.empty:
            continue
        columns: list[Any] = [known[name].astype(float) for name in names]
        if bottom is None:
            columns = [each for top in columns for each in (top, np.ones_like(top))]
        found = bootstrap(
            columns, list(known["problem_id"]), lambda a0, a1, b0, b1: b0 / b1 - a0 / a1
        )
        a, b = (float(columns[k].sum() / columns[k + 1].sum()) for k in (0, 2))
        row = {"metric": metric, "a": a, "b": b, "difference": found.estimate}
        rows.append(row | {"low": found.low, "high": found.high, "pairs": len(known)})
    return pd.DataFrame(rows)


def _first_difference(
    nodes: list[pd.DataFrame], pairs: pd.DataFrame, keys: list[str]
) -> NodeDifference | None:
    on, order = [*keys, "problem_id", "node_id", "depth"], [*keys, "problem_id", "depth", "node_id"]
    tables = [table[[*on, "token_ids", "score"]].merge(pairs) for table in nodes]
    both = tables[0].merge(tables[1], on=on, how="outer", suffixes=("_a", "_b"), indicator="side")
    for side in "ab":
        tokens = both[f"token_ids_{side}"]
        both[side] = tokens.map(lambda ids: list(map(int, ids)) if np.iterable(ids) else None)
    both["same"] = [a == b for a, b in zip(both["a"], both["b"])]
    differ = both[~both["same"] | (both["score_a"] != both["score_b"])]
    if differ.empty:
        return None
    row = differ.sort_values(order).iloc[0]
    what = "missing" if row["side"] != "both" else "score" if row["same"] else "tokens"
    found = (row["score_a"], row["score_b"]) if row["same"] else (row["a"], row["b"])
    return NodeDifference(row["problem_id"], int(row["seed"]), row["node_id"], what, *found)


def _warnings(left: pd.DataFrame, right: pd.DataFrame) -> Iterable[str]:
    for column in PLACES:
        values = [sorted(map(str, set(runs[column]))) for runs in (left, right)]
        if values[0] != values[1] or len(values[0]) > 1:
            a, b = (" / ".join(each) for each in values)
            yield f"{column} differs: a {a}; b {b}. Seconds and rates do not compare."
    for side, runs in (("a", left), ("b", right)):
        if runs["git_dirty"].astype("boolean").fillna(False).any():
            yield f"side {side} was measured with uncommitted changes."
