"""The search tree of one problem, written down from what a strategy asks and is told.

One row a sampled node. Everything is read off the traffic between strategy and runner, so any
strategy has a tree, and no strategy needs to keep one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.search.requests import Beam, Path, Step
from workbench.search.voting import UNSCORED, aggregate


def node_id(path: Path) -> str:
    """A node's name within its problem: its path, "0/2/1"; the root is ""."""
    return "/".join(map(str, path))


@dataclass(slots=True)
class TreeNode:
    """One sampled node; score is the PRM's of this node's own steps, aggregated."""

    path: Path
    beam: int  # slot in the Generate that sampled it
    step: Step
    total_tokens: int  # sampled on the way here, this step included
    steps_before: int
    score: float = UNSCORED
    kept: bool = False


class Tree:
    """The nodes of one problem in the order they were sampled."""

    def __init__(self) -> None:
        self._nodes: dict[Path, TreeNode] = {}
        self.iterations = 0
        self.tokens = 0

    def keep_parents(self, beams: Iterable[Beam]) -> None:
        """The parents of these beams are being extended, so they were kept."""
        for beam in beams:
            if len(beam.path) > 1:
                self._nodes[beam.path[:-1]].kept = True

    def keep(self, beams: Iterable[Beam]) -> None:
        """These beams are the outcome."""
        for beam in beams:
            self._nodes[beam.path].kept = True

    def lineage(self, path: Path) -> Iterator[TreeNode]:
        """The nodes on the way to this one, which comes last; of the root none."""
        return (self._nodes[path[:depth]] for depth in range(1, len(path) + 1))

    def add(self, beams: Sequence[Beam], steps: Sequence[Step]) -> None:
        """What one Generate sampled."""
        self.iterations += 1
        for slot, (beam, step) in enumerate(zip(beams, steps, strict=True)):
            total = len(beam.token_ids) + len(step.token_ids)
            self._nodes[beam.path] = TreeNode(beam.path, slot, step, total, len(beam.steps))
            self.tokens += len(step.token_ids)

    def score(
        self, beams: Sequence[Beam], scores: Sequence[Sequence[float]], aggregation: str
    ) -> None:
        """What one Score brought."""
        for beam, row in zip(beams, scores, strict=True):
            node = self._nodes[beam.path]
            node.score = aggregate(row[node.steps_before :] or row, aggregation)

    def rows(self, problem_id: str) -> list[dict[str, Any]]:
        """The `nodes` table's columns but run_id, then why the step ended and its text."""
        return [
            {
                "problem_id": problem_id,
                "node_id": node_id(node.path),
                "parent_id": node_id(node.path[:-1]),
                "path": node_id(node.path),
                "depth": len(node.path),
                "beam": node.beam,
                "step_tokens": len(node.step.token_ids),
                "total_tokens": node.total_tokens,
                "score": node.score,
                "kept": node.kept,
                "finished": node.step.finish_reason == "eos",
                "token_ids": node.step.token_ids,
                "finish_reason": node.step.finish_reason,
                "text": node.step.text,
            }
            for node in self._nodes.values()
        ]
