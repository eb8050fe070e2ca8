"""Two runs, or two groups of runs, side by side: what was set differently and what that changed.

Differences are paired: the same problem with the same seed on both sides, so that what problems
have in common cancels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.errors import RunStoreError
from workbench.experiments.runs import FINISHED, load_runs, load_table, read_config
from workbench.experiments.settings import COUNTED, TIMED
from workbench.experiments.statistics import (
    Interval,
    paired_difference,
    paired_ratio_difference,
)

Runs = str | Path | Iterable[str | Path]

PAIRED = {"correct": "accuracy"} | {name: name for name in ("tokens", "iterations", "seconds")}
"""Columns of `problems` that are compared, and what their mean is called."""
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

    parameters: name, a, b of every setting that differs; differences: metric, a, b, difference (b -
    a), low, high, pairs; identical: every node of every pair has equal tokens and scores; warnings:
    why the two may not be comparable.
    """

    parameters: pd.DataFrame
    differences: pd.DataFrame
    identical: bool
    first_difference: NodeDifference | None
    warnings: tuple[str, ...]

    def _repr_html_(self) -> str:
        tokens = "identical" if self.identical else f"different ({self.first_difference})"
        notes = "".join(f"<p><b>Warning:</b> {text}</p>" for text in self.warnings)
        tables = self.parameters.to_html(index=False) + self.differences.to_html(index=False)
        return f"{notes}{tables}<p>Tokens and scores: {tokens}.</p>"


def compare(a: Runs, b: Runs) -> Comparison:
    """Compare two sides: each a run folder, several, or a folder of run folders.

    Runs pair by seed (and by llm_share, where a side holds several); problems pair within them.
    Raises RunStoreError where a side holds no finished run or the two have no pair in common.
    """
    left, right = _finished(a, "a"), _finished(b, "b")
    keys = _pair_keys(left, right)
    sides = [_table(runs, "problems", keys) for runs in (left, right)]
    problems = sides[0].merge(sides[1], on=[*keys, "problem_id"], suffixes=("_a", "_b"))
    if problems.empty:
        raise RunStoreError(
            f"The two have no problem in common with equal {' and '.join(keys)}; compare runs "
            "of the same problems and seeds."
        )
    first = _first_difference(left, right, keys)
    return Comparison(
        parameters=_parameters(left, right),
        differences=_differences(problems),
        identical=first is None,
        first_difference=first,
        warnings=tuple(_warnings(left, right)),
    )


def _finished(runs: Runs, side: str) -> pd.DataFrame:
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
    of_a_run = ["seed", "llm_share", "role", "repeat"]
    every = [*of_a_run, "setting", "max_depth", "num_problems"]
    for keys in (["seed"], ["seed", "llm_share"], of_a_run, every):
        if not (left.duplicated(keys).any() or right.duplicated(keys).any()):
            return keys
    raise RunStoreError(
        "A side holds several runs of equal seed and share; name the run folders to be compared."
    )


def _table(runs: pd.DataFrame, name: str, keys: list[str]) -> pd.DataFrame:
    """A trace table with the run's keys in place of its own (`requests` has a seed a node)."""
    table = load_table(list(runs["folder"]), name)
    own = [key for key in keys if key in table]
    return table.drop(columns=own).merge(runs[["run_id", *keys]], on="run_id")


def _parameters(left: pd.DataFrame, right: pd.DataFrame) -> pd.DataFrame:
    """What differs, as text; where the runs of a side differ, all values."""
    sides: list[dict[str, str]] = []
    for runs in (left, right):
        found: dict[str, set[str]] = {}
        for config in (read_config(Path(folder)) for folder in runs["folder"]):
            identity = {f"identity.{name}": value for name, value in config["identity"].items()}
            for name, value in (config["parameters"] | identity).items():
                found.setdefault(name, set()).add(json.dumps(value))
        sides.append({name: ", ".join(sorted(values)) for name, values in found.items()})
    rows = [
        [name, *(side.get(name, "-") for side in sides)] for name in sorted(sides[0] | sides[1])
    ]
    return pd.DataFrame([row for row in rows if row[1] != row[2]], columns=["name", "a", "b"])


def _differences(problems: pd.DataFrame) -> pd.DataFrame:
    rows = []

    def add(metric: str, a: float, b: float, found: Interval, pairs: int) -> None:
        row = {"metric": metric, "a": float(a), "b": float(b), "difference": found.estimate}
        rows.append(row | {"low": found.low, "high": found.high, "pairs": pairs})

    for column, name in PAIRED.items():
        known = problems[problems[[f"{column}_a", f"{column}_b"]].notna().all(axis=1)]
        if len(known):
            a, b = (known[f"{column}_{side}"].astype(float) for side in "ab")
            found = paired_difference(a, b, list(known["problem_id"]))
            add(name, a.mean(), b.mean(), found, len(known))
    before, after = (  # a problem's part of the run's wall time: its time in flight, scaled
        (problems[f"tokens_{side}"].astype(float), problems[f"wall_part_s_{side}"].astype(float))
        for side in "ab"
    )
    found = paired_ratio_difference(before, after, list(problems["problem_id"]))
    rate_a, rate_b = (tokens.sum() / seconds.sum() for tokens, seconds in (before, after))
    add("tokens_per_s", rate_a, rate_b, found, len(problems))
    return pd.DataFrame(rows)


def _first_difference(
    left: pd.DataFrame, right: pd.DataFrame, keys: list[str]
) -> NodeDifference | None:
    on = [*keys, "problem_id", "node_id"]
    tables = [_table(runs, "nodes", keys) for runs in (left, right)]
    tables = [table[[*on, "depth", "token_ids", "score"]] for table in tables]
    pairs = [table[[*keys, "problem_id"]].drop_duplicates() for table in tables]
    tables = [table.merge(pairs[0].merge(pairs[1])) for table in tables]
    both = tables[0].merge(tables[1], on=on, how="outer", suffixes=("_a", "_b"))
    both["depth"] = both["depth_a"].fillna(both["depth_b"])
    ordered = both.sort_values([*keys, "problem_id", "depth", "node_id"])
    for row in ordered.to_dict("records"):
        where = (str(row["problem_id"]), int(row["seed"]), str(row["node_id"]))
        a, b = (
            None if ids is None or ids is pd.NA or isinstance(ids, float) else list(ids)
            for ids in (row["token_ids_a"], row["token_ids_b"])
        )
        if a != b:
            what = "missing" if a is None or b is None else "tokens"
            return NodeDifference(*where, what, a, b)
        if row["score_a"] != row["score_b"]:
            return NodeDifference(*where, "score", row["score_a"], row["score_b"])
    return None


def _warnings(left: pd.DataFrame, right: pd.DataFrame) -> Iterable[str]:
    for column in PLACES:
        values = [sorted(map(str, set(runs[column]))) for runs in (left, right)]
        if values[0] != values[1] or len(values[0]) > 1:
            a, b = (" / ".join(each) for each in values)
            yield f"{column} differs: a {a}; b {b}. Seconds and rates do not compare."
    for side, runs in (("a", left), ("b", right)):
        if runs["git_dirty"].astype("boolean").fillna(False).any():
            yield f"side {side} was measured with uncommitted changes."
