"""What a search brings: answers, accuracy, the tree and the measurements, as tidy frames.

Every beam of every outcome is kept with its answer and score, so another vote, pass@k or a table
by level needs no second run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.search.measure import Throughput
from workbench.search.voting import VOTINGS, check_choice, pass_at_k, vote
from workbench.trace import Trace, write_table

SHOWN = ["problem_id", "level", "answer", "predicted", "correct", "tokens", "iterations", "seconds"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SearchResult:
    """A finished search.

    problems: one row a problem, in the order given: run_id, problem_id, level, subject, problem,
        answer, predicted, correct (NA without a reference answer), tokens (sampled), iterations,
        seconds (admission to answer), finished (the outcome has a finished beam), finished_beams,
        candidates, correct_candidates, what scoring cost (prm_*, scores_*), and discarded_tokens:
        of speculated steps that nobody asked for, in none of the other columns.
    candidates: one row a beam of an outcome, best first: problem_id, rank, node_id, answer (""
        without a box), group (equal answers share one), score, correct, finished, ended, text.
    tree: the `nodes` table, with each step's finish_reason and text beside it.
    trace: steps and requests of both engines ("llm", "prm"; empty for an engine without a trace),
        nodes, and spans of the search itself.
    """

    problems: pd.DataFrame
    candidates: pd.DataFrame
    tree: pd.DataFrame
    throughput: Throughput
    trace: Trace
    voting: str

    @property
    def answers(self) -> dict[str, str]:
        """The answer to each problem by its id, "" where no beam has one."""
        return dict(zip(self.problems["problem_id"], self.problems["predicted"], strict=True))

    @property
    def accuracy(self) -> float:
        """Share of problems answered right, among those whose answer is known; NaN if none is."""
        return _mean(self.problems["correct"])

    def correct_by(self, voting: str) -> pd.Series:
        """Whether each problem would be right under another vote (or this one), by problem_id."""
        check_choice("voting", voting, VOTINGS)
        groups = self.candidates.groupby("problem_id", sort=False)
        found = {name: _is_right(frame, voting) for name, frame in groups}
        correct = [found.get(name, False) for name in self.problems["problem_id"]]
        known = self.problems["answer"].notna().to_numpy()
        values = [right if fine else None for right, fine in zip(correct, known, strict=True)]
        return pd.Series(values, index=self.problems["problem_id"], name="correct", dtype="boolean")

    def pass_at_k(self, k: int) -> float:
        """Mean chance that k of a problem's beams hold a right one (independent samples).

        Raises ConfigError when k exceeds the number of beams.
        """
        known = self.problems[self.problems["answer"].notna()]
        rows = zip(known["candidates"], known["correct_candidates"], strict=True)
        return _mean(pd.Series([pass_at_k(int(n), int(c), k) for n, c in rows], dtype=float))

    @property
    def prm_tokens(self) -> dict[str, int]:
        """Tokens of the PRM's inputs: asked, computed (again, too, where traced), distinct.

        distinct is the ideal: nodes of the trie of a problem's inputs, summed over problems.
        """
        steps = self.trace.steps
        traced = steps.loc[steps["engine"] == "prm", "prefill_tokens"]
        by_problem = self.problems[
            ["prm_tokens_asked", "prm_tokens_computed", "prm_tokens_distinct"]
        ]
        asked, computed, distinct = (int(total) for total in by_problem.sum())
        computed = int(traced.sum()) if len(traced) else computed
        return {"asked": asked, "computed": computed, "distinct": distinct}

    def to_frame(self) -> pd.DataFrame:
        """The problems table."""
        return self.problems

    def to_parquet(self, folder: str | Path) -> list[Path]:
        """Write problems, candidates and nodes under `folder`; answers the files."""
        folder = Path(folder)
        frames = {"problems": self.problems, "candidates": self.candidates, "nodes": self.tree}
        return [write_table(frame, folder / f"{name}.parquet") for name, frame in frames.items()]

    def __repr__(self) -> str:
        return (
            f"SearchResult({len(self.problems)} problems, accuracy {self.accuracy:.3f}, "
            f"{len(self.tree)} nodes, {self.throughput})"
        )

    def _repr_html_(self) -> str:
        table = self.problems[SHOWN].to_html(max_rows=12, index=False, float_format="{:.2f}".format)
        return f"<p>{escape(repr(self))}</p>{table}"


def winner(rows: Sequence[Mapping[Any, Any]], voting: str) -> int | None:
    """Index of the first candidate that gave the winning answer, or None when nobody votes."""
    answers, scores, groups = ([row[name] for row in rows] for name in ("answer", "score", "group"))
    answer = vote(answers, scores, groups, voting)
    return answers.index(answer) if answer else None


def _is_right(rows: pd.DataFrame, voting: str) -> bool:
    index = winner(rows.to_dict("records"), voting)
    return index is not None and bool(rows["correct"].iloc[index])


def _mean(values: pd.Series) -> float:
    known = values.dropna().astype(float)
    return float(known.mean()) if len(known) else float("nan")
