"""What a search brings: answers, accuracy, the tree and the measurements, as tidy frames.

Every beam of every outcome is kept with its answer and score, so another vote, pass@k or a table
by level needs no second run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.search.active import ActiveSearch
from workbench.search.answers import extract_answer, group_answers, same_answer
from workbench.search.measure import Throughput
from workbench.search.tree import node_id
from workbench.search.voting import VOTINGS, aggregate, check_choice, pass_at_k, vote


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SearchResult:
    """A finished search.

    problems: one row a problem, in the order given: run_id, problem_id, level, subject, problem,
        answer, predicted, correct (NA without a reference answer), tokens (sampled), iterations,
        seconds (admission to answer), finished (the outcome has a finished beam), finished_beams,
        candidates, correct_candidates, and what scoring cost (prm_*, scores_*).
    candidates: one row a beam of an outcome, best first: problem_id, rank, node_id, answer (""
        without a box), group (equal answers share one), score, correct, finished, ended, text.
    tree: the `nodes` table, with each step's text and finish_reason beside it.
    """

    problems: pd.DataFrame
    candidates: pd.DataFrame
    tree: pd.DataFrame
    throughput: Throughput
    trace: Any
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
        found = {name: _vote_is_right(frame, voting) for name, frame in groups}
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

    def to_frame(self) -> pd.DataFrame:
        """The problems table."""
        return self.problems

    def to_parquet(self, folder: str | Path) -> list[Path]:
        """Write problems, candidates and nodes under `folder`; answers the files."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        frames = {"problems": self.problems, "candidates": self.candidates, "nodes": self.tree}
        for name, frame in frames.items():
            frame.to_parquet(folder / f"{name}.parquet", index=False)
        return [folder / f"{name}.parquet" for name in frames]

    def __repr__(self) -> str:
        return (
            f"SearchResult({len(self.problems)} problems, accuracy {self.accuracy:.3f}, "
            f"{len(self.tree)} nodes, {self.throughput})"
        )

    def _repr_html_(self) -> str:
        shown = [
            "problem_id",
            "level",
            "answer",
            "predicted",
            "correct",
            "tokens",
            "iterations",
            "seconds",
        ]
        table = self.problems[shown].to_html(max_rows=12, index=False, float_format="{:.2f}".format)
        return f"<p>{escape(repr(self))}</p>{table}"


def collect(
    searches: Sequence[ActiveSearch],
    *,
    run_id: str,
    aggregation: str,
    voting: str,
    throughput: Throughput,
    trace: Any,
) -> SearchResult:
    """The result of searches that all have their outcome."""
    candidates = [row for search in searches for row in _candidates(search, aggregation)]
    by_problem: dict[str, list[dict[str, Any]]] = {search.problem.id: [] for search in searches}
    for row in candidates:
        by_problem[row["problem_id"]].append(row)
    problems = [
        _problem(search, run_id, by_problem[search.problem.id], voting) for search in searches
    ]
    nodes = [row for search in searches for row in search.tree.rows(run_id, search.problem.id)]
    frame = pd.DataFrame(problems).astype({"correct": "boolean", "level": "Int64"})
    return SearchResult(
        frame, pd.DataFrame(candidates), pd.DataFrame(nodes), throughput, trace, voting
    )


def _candidates(search: ActiveSearch, aggregation: str) -> list[dict[str, Any]]:
    """The outcome's beams; one comparison with the reference a group of equal answers."""
    assert search.outcome is not None
    beams, reference = search.outcome.beams, search.problem.answer
    answers = [extract_answer(beam.text) for beam in beams]
    groups = group_answers(answers)
    first = dict(reversed(list(zip(groups, answers, strict=True))))
    right = {g: reference is not None and same_answer(reference, a) for g, a in first.items()}
    return [
        {
            "problem_id": search.problem.id,
            "rank": rank,
            "node_id": node_id(beam.path),
            "answer": answer,
            "group": group,
            "score": aggregate(beam.step_scores, aggregation),
            "correct": right[group],
            "finished": beam.finished,
            "ended": beam.ended,
            "text": beam.text,
        }
        for rank, (beam, answer, group) in enumerate(zip(beams, answers, groups, strict=True))
    ]


def _problem(
    search: ActiveSearch, run_id: str, rows: list[dict[str, Any]], voting: str
) -> dict[str, Any]:
    problem, counts = search.problem, asdict(search.counts)
    winner = _winner(pd.DataFrame(rows), voting)
    finished = sum(row["finished"] for row in rows)
    return {
        "run_id": run_id,
        "problem_id": problem.id,
        "level": problem.level,
        "subject": problem.subject,
        "problem": problem.problem,
        "answer": problem.answer,
        "predicted": winner["answer"] if winner else "",
        "correct": None if problem.answer is None else bool(winner and winner["correct"]),
        "tokens": search.tree.tokens,
        "iterations": search.tree.iterations,
        "seconds": search.answered_s - search.admitted_s,
        "finished": finished > 0,
        "finished_beams": finished,
        "candidates": len(rows),
        "correct_candidates": sum(row["correct"] for row in rows),
        "prm_requests": counts["requests"],
        "prm_tokens_asked": counts["tokens_asked"],
        "prm_tokens_computed": counts["tokens_computed"],
        "prm_tokens_distinct": counts["tokens_distinct"],
        "scores_asked": counts["steps_asked"],
        "scores_cached": counts["steps_cached"],
        "scores_shared": counts["steps_shared"],
    }


def _winner(rows: pd.DataFrame, voting: str) -> dict[str, Any] | None:
    """The first row of the group that wins the vote, or None when nobody votes."""
    columns = (rows["answer"].tolist(), rows["score"].tolist(), rows["group"].tolist())
    answer = vote(*columns, voting)
    if not answer:
        return None
    return dict(rows.iloc[columns[0].index(answer)])


def _vote_is_right(rows: pd.DataFrame, voting: str) -> bool:
    winner = _winner(rows, voting)
    return bool(winner and winner["correct"])


def _mean(values: pd.Series) -> float:
    known = values.dropna().astype(float)
    return float(known.mean()) if len(known) else float("nan")
