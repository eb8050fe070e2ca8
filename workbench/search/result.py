"""What a search brings: answers, accuracy, the tree and the measurements, as tidy frames.

Every beam of every outcome is kept with its answer and score, so another vote, pass@k or a table
by level needs no second run. Throughput is tokens sampled into nodes, pruned ones included, over
wall time from first admission to last answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from workbench.config import VOTINGS
from workbench.search.answers import UNSCORED, aggregate, check_choice, pass_at_k, vote
from workbench.search.strategies import Beam, NodePath, Step
from workbench.trace import NodeRow, Trace, write_table

SHOWN = ["problem_id", "level", "answer", "predicted", "correct", "tokens", "iterations", "seconds"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SearchResult:
    """A finished search, or what was answered of one that ended before its time.

    problems: one row a problem, in the order given: run_id, problem_id, level, subject, problem,
        answer, predicted, correct (NA without a reference answer), tokens (sampled), iterations,
        seconds (admission to answer), finished (the outcome has a finished beam), finished_beams,
        candidates, correct_candidates, and what scoring cost (prm_*, scores_*).
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
        found = {}
        for name, rows in self.candidates.groupby("problem_id"):
            place = vote(list(rows["answer"]), list(rows["score"]), list(rows["group"]), voting)
            found[name] = place is not None and bool(rows["correct"].iloc[place])
        problems = self.problems.set_index("problem_id")
        right = pd.Series(found, dtype="boolean", name="correct").reindex(problems.index)
        return right.fillna(False).where(problems["answer"].notna())

    def pass_at_k(self, k: int) -> float:
        """Mean chance that k of a problem's beams hold a right one (independent samples).

        Raises ConfigError when k exceeds the number of beams.
        """
        known = self.problems[self.problems["answer"].notna()]
        rows = zip(known["candidates"], known["correct_candidates"], strict=True)
        return _mean(pd.Series([pass_at_k(int(n), int(c), k) for n, c in rows], dtype=float))

    @property
    def prm_tokens(self) -> dict[str, int | None]:
        """Tokens of the PRM: asked, computed (again, too, where traced), distinct.

        computed: None where the PRM's engine does not tell. distinct: the ideal, nodes of the trie
        of a problem's inputs, summed over problems.
        """
        steps = self.trace.steps
        own = steps[steps["engine"] == "prm"]
        if {*self.trace.requests["problem_id"]} - {*self.problems["problem_id"]}:
            own = own.iloc[:0]  # of a search that was broken off: it counts others' steps, too
        traced = own["prefill_tokens"] + own["decode_tokens"]  # which critiques are
        by_problem = self.problems[
            ["prm_tokens_asked", "prm_tokens_computed", "prm_tokens_distinct"]
        ]
        totals = by_problem.sum(skipna=False)
        asked, computed, distinct = (None if pd.isna(total) else int(total) for total in totals)
        computed = int(traced.sum()) if len(traced) else computed
        return {"asked": asked, "computed": computed, "distinct": distinct}

    def to_parquet(self, folder: str | Path) -> list[Path]:
        """Write problems, candidates and nodes under `folder`; returns the files."""
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


def _mean(values: pd.Series) -> float:
    known = values.dropna().astype(float)
    return float(known.mean()) if len(known) else float("nan")


def node_id(path: NodePath) -> str:
    """A node's name within its problem: its path, "0/2/1"; the root is ""."""
    return "/".join(map(str, path))


@dataclass(slots=True)
class TreeNode:
    """One sampled node; score is the PRM's of its own steps, aggregated; None: not asked."""

    path: NodePath
    beam: int  # slot in the Generate that sampled it
    round: int  # in which that was asked for, from 1
    step: Step
    total_tokens: int  # sampled on the way here, this step included
    steps_before: int
    score: float | None = None
    kept: bool = False


class Tree:
    """The nodes of one problem in the order they were sampled."""

    def __init__(self) -> None:
        self._nodes: dict[NodePath, TreeNode] = {}
        self.iterations = 0
        self.tokens = 0

    def keep(self, paths: Iterable[NodePath]) -> None:
        """These nodes are being extended, or are the outcome, and so are those before them."""
        for path in paths:
            while path and not self._nodes[path].kept:
                self._nodes[path].kept = True
                path = path[:-1]

    def lineage(self, path: NodePath) -> Iterator[TreeNode]:
        """The nodes on the way to this one, which comes last; of the root none."""
        return (self._nodes[path[:depth]] for depth in range(1, len(path) + 1))

    def add(self, beams: Sequence[Beam], steps: Sequence[Step], round: int) -> None:
        """What one Generate sampled, asked for in this round."""
        self.iterations = max(self.iterations, *(len(beam.path) for beam in beams))
        for slot, (beam, step) in enumerate(zip(beams, steps, strict=True)):
            total = len(beam.token_ids) + len(step.token_ids)
            self._nodes[beam.path] = TreeNode(beam.path, slot, round, step, total, len(beam.steps))
            self.tokens += len(step.token_ids)

    def score(
        self, beams: Sequence[Beam], scores: Sequence[Sequence[float]], aggregation: str
    ) -> None:
        """What one Score brought, to nodes on the way too that were never asked about alone."""
        for beam, row in zip(beams, scores, strict=True):
            path, end = beam.path, len(row)
            while path == beam.path or (path and self._nodes[path].score is None):
                node = self._nodes[path]
                node.score = aggregate(row[node.steps_before : end] or row[:end], aggregation)
                path, end = path[:-1], node.steps_before

    def __iter__(self) -> Iterator[TreeNode]:
        return iter(self._nodes.values())

    def rows(self, run_id: str, problem_id: str) -> list[NodeRow]:
        """The rows of the `nodes` table."""
        return [
            NodeRow(
                run_id=run_id,
                problem_id=problem_id,
                node_id=node_id(node.path),
                parent_id=node_id(node.path[:-1]),
                path=node.path,
                depth=len(node.path),
                beam=node.beam,
                step_tokens=len(node.step.token_ids),
                total_tokens=node.total_tokens,
                score=UNSCORED if node.score is None else node.score,
                kept=node.kept,
                finished=node.step.finish_reason == "eos",
                token_ids=node.step.token_ids,
            )
            for node in self
        ]


STEADY = (0.1, 0.9)
"""The part of wall time that the steady state keeps: the first and last 10 % are dropped."""


class Mark(NamedTuple):
    """A point of the time line: what was done by then."""

    time_s: float
    tokens: int
    answered: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """How fast a search was.

    steady_*: over the middle 80 % of wall time; busy: seconds inside an engine's steps.
    """

    tokens: int
    problems: int
    wall_s: float
    tokens_per_s: float
    problems_per_min: float
    steady_tokens_per_s: float
    steady_problems_per_min: float
    llm_busy_s: float
    prm_busy_s: float

    @classmethod
    def of(cls, marks: list[Mark], llm_busy_s: float, prm_busy_s: float) -> Throughput:
        """From the time line: first mark at the first admission, last one at the last answer."""
        times, tokens, answered = (np.array(column, dtype=float) for column in zip(*marks))
        wall = max(times[-1] - times[0], 1e-9)
        ends = times[0] + wall * np.array(STEADY)
        kept = max(ends[1] - ends[0], 1e-9)
        steady = [
            float(np.diff(np.interp(ends, times, column))[0] / kept)
            for column in (tokens, answered)
        ]
        return cls(
            tokens=int(tokens[-1]),
            problems=int(answered[-1]),
            wall_s=float(wall),
            tokens_per_s=float(tokens[-1] / wall),
            problems_per_min=float(60 * answered[-1] / wall),
            steady_tokens_per_s=steady[0],
            steady_problems_per_min=60 * steady[1],
            llm_busy_s=llm_busy_s,
            prm_busy_s=prm_busy_s,
        )

    def to_dict(self) -> dict[str, float]:
        """The fields by name, for a table's row."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_s:,.0f} tokens/s, {self.problems_per_min:.1f} problems/min "
            f"({self.problems} problems in {self.wall_s:.1f} s)"
        )
