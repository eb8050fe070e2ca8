"""From searches that have ended to a SearchResult: answers read, compared and voted on.

The only place where a reference answer is looked at, after everything has been sampled and scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from workbench.search.active import ActiveSearch
from workbench.search.answers import extract_answer, group_answers, same_answer
from workbench.search.measure import Throughput
from workbench.search.result import SearchResult, winner
from workbench.search.tree import node_id
from workbench.search.voting import aggregate
from workbench.trace import Recorder

Row = dict[str, Any]
SCORING = {
    "requests": "prm_requests",
    "tokens_asked": "prm_tokens_asked",
    "tokens_computed": "prm_tokens_computed",
    "tokens_distinct": "prm_tokens_distinct",
    "steps_asked": "scores_asked",
    "steps_cached": "scores_cached",
    "steps_shared": "scores_shared",
}
"""Fields of ScoreCounts and their columns in the problems table."""


def collect(
    searches: Sequence[ActiveSearch],
    *,
    aggregation: str,
    voting: str,
    throughput: Throughput,
    recorder: Recorder,
    discarded: Mapping[str, int],
) -> SearchResult:
    """The result of searches that all have their outcome; their nodes are recorded.

    discarded: tokens of speculated steps that nobody asked for, by problem id.
    """
    candidates = {search.problem.id: _candidates(search, aggregation) for search in searches}
    problems = [
        {"run_id": recorder.run_id}
        | _problem(search, candidates[search.problem.id], voting)
        | {"discarded_tokens": discarded.get(search.problem.id, 0)}
        for search in searches
    ]
    nodes = [row for search in searches for row in search.tree.rows(search.problem.id)]
    beside = [{name: row.pop(name) for name in ("finish_reason", "text")} for row in nodes]
    for row in nodes:
        recorder.node(**row)
    trace = recorder.trace()
    return SearchResult(
        problems=pd.DataFrame(problems).astype({"correct": "boolean", "level": "Int64"}),
        candidates=pd.DataFrame([row for rows in candidates.values() for row in rows]),
        tree=pd.concat([trace.nodes, pd.DataFrame(beside)], axis=1),
        throughput=throughput,
        trace=trace,
        voting=voting,
    )


def _candidates(search: ActiveSearch, aggregation: str) -> list[Row]:
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


def _problem(search: ActiveSearch, rows: list[Row], voting: str) -> Row:
    problem = search.problem
    index = winner(rows, voting)
    chosen: Row = {"answer": "", "correct": False} if index is None else rows[index]
    finished = sum(row["finished"] for row in rows)
    counts = asdict(search.counts)
    return {
        "problem_id": problem.id,
        "level": problem.level,
        "subject": problem.subject,
        "problem": problem.problem,
        "answer": problem.answer,
        "predicted": chosen["answer"],
        "correct": None if problem.answer is None else chosen["correct"],
        "tokens": search.tree.tokens,
        "iterations": search.tree.iterations,
        "seconds": search.answered_s - search.admitted_s,
        "finished": finished > 0,
        "finished_beams": finished,
        "candidates": len(rows),
        "correct_candidates": sum(row["correct"] for row in rows),
    } | {column: counts[field] for field, column in SCORING.items()}
