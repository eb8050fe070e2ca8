"""Scores that need not be asked for twice.

The key is the PRM's fingerprint, the problem's id and the exact texts of the steps: nothing about
how or when a solution was sampled. A position whose KV is cached returns no score, so a PRM with a
prefix cache needs this one beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

Key = tuple[str, str, tuple[str, ...]]


class ScoreCache:
    """The score of the last of some steps. A run has one of its own unless it is given one."""

    def __init__(self) -> None:
        self._scores: dict[Key, float] = {}

    def get(self, prm: str, problem_id: str, steps: Sequence[str]) -> float | None:
        """The score of the last step, or None; `prm` is the PRM's fingerprint."""
        return self._scores.get((prm, problem_id, tuple(steps)))

    def put(self, prm: str, problem_id: str, steps: Sequence[str], score: float) -> None:
        """Keep a score, already rounded to 2^-16."""
        self._scores[prm, problem_id, tuple(steps)] = score

    def __len__(self) -> int:
        return len(self._scores)
