"""One problem being searched: its strategy's generator, what it asked last, and what it was told.

Plain bookkeeping between a strategy and the rounds; it submits nothing and knows no engine.
"""

from __future__ import annotations

from typing import Any

from workbench.search.control import shuffle_scores
from workbench.search.problems import Problem
from workbench.search.requests import Generate, Outcome, Score, Step, Strategy
from workbench.search.scoring import ProblemScores, ScoreCounts
from workbench.search.tree import Tree


class ActiveSearch:
    """A search in flight. Once `outcome` is set nothing more is asked."""

    def __init__(
        self,
        problem: Problem,
        prompt: list[int],
        strategy: Strategy,
        scores: ProblemScores,
        shuffle_seed: int | None = None,
    ) -> None:
        self.problem = problem
        self.prompt = prompt
        self.scores = scores
        self.tree = Tree()
        self.outcome: Outcome | None = None
        self.counts = ScoreCounts()
        self.admitted_s = 0.0
        self.answered_s = 0.0
        self.request: Generate | Score | None = None
        self.steps: list[Step | None] = []
        self.served = True  # by the engine that `request` is for; False until it is queued
        self._aggregation = strategy.aggregation
        search = strategy.search(problem.without_answer())
        if shuffle_seed is not None:
            search = shuffle_scores(search, shuffle_seed, problem.id)
        self._search = search

    def advance(self) -> None:
        """Hand the strategy what it asked for and take its next request, or its outcome."""
        self.served = False
        try:
            self.request = self._search.send(self._reply())
        except StopIteration as end:
            self.request, self.outcome = None, end.value
            self.tree.keep(end.value.beams)
            return
        if isinstance(self.request, Generate):
            self.tree.keep_parents(self.request.beams)
            self.steps = [None] * len(self.request.beams)

    def finish(self, now_s: float) -> None:
        """The answer is there: note the time, count, and let everything large but the tree go."""
        self.answered_s = now_s
        self.counts = self.scores.finish()
        self.prompt, self.steps = [], []

    def _reply(self) -> Any:
        request = self.request
        if isinstance(request, Generate):
            steps = [step for step in self.steps if step is not None]
            self.tree.add(request.beams, steps)
            return steps
        if isinstance(request, Score):
            scores = self.scores.replies(request.beams)
            self.tree.score(request.beams, scores, self._aggregation)
            return scores
        return None
