"""Which of the problems in flight are sampled in a round: as many as both caches keep.

Every problem comes round again in each round. If together they need more than there is, each loses
its prefixes before its next turn, and all are computed again, again and again; with some of them
waiting, the rest keep theirs. What a problem has to keep is known: the blocks of the beams that it
goes on from. Those who go on are sampled together, once nobody in the group waits for scores:
halves of a batch cost nearly as much as the whole. Counts decide, never a clock; where two engines
at work at once take pages of one arena (lanes.py), a policy that moves its split may move it
otherwise from run to run, and the rounds with it. What it does not do: choose which problems wait
(the latest), or hold a block for anyone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from workbench.core import TokenEngine
from workbench.search.active import ActiveSearch
from workbench.search.requests import Generate, Score

TO_KEEP = 0.75
"""Part of a cache that beams to go on from may fill; the new steps pass through the rest."""

Span = tuple[int, int]  # a node's first token and the one after its last, counted in its sequence


class Pace:
    """Room of the LLM's and the PRM's cache. No cache is never too small."""

    def __init__(self, llm: TokenEngine, prm: TokenEngine) -> None:
        self._caches: list[Any] = [getattr(engine, "cache", None) for engine in (llm, prm)]

    def chosen(self, group: Sequence[ActiveSearch], num_groups: int = 1) -> list[ActiveSearch]:
        """The first so many of a group that may use one of `num_groups` parts of both caches.

        Nobody while one of them waits for scores; else at least one.
        """
        if any(isinstance(search.request, Score) for search in group):
            return []
        rooms = [self._room(cache) / num_groups for cache in self._caches]
        kept = [0, 0]
        chosen: list[ActiveSearch] = []
        for search in group:
            kept = [held + more for held, more in zip(kept, self._blocks(search))]
            if chosen and any(held > room for held, room in zip(kept, rooms)):
                break
            chosen.append(search)
        return chosen

    def _room(self, cache: Any) -> float:
        return float("inf") if cache is None else TO_KEEP * cache.room

    def _blocks(self, search: ActiveSearch) -> Iterator[int]:
        """Full blocks of each model that hold the beams which a search goes on from."""
        assert isinstance(search.request, Generate)
        parents = {beam.path[:-1]: beam for beam in search.request.beams}
        sampled = {
            node.path: (node.total_tokens - len(node.step.token_ids), node.total_tokens)
            for path in parents
            for node in search.tree.lineage(path)
        }
        prompt = len(search.prompt)
        nodes = [(0, prompt), *((prompt + start, prompt + end) for start, end in sampled.values())]
        scored = {
            node.steps: span
            for beam in parents.values()
            for node, span in search.scores.spans(beam.steps)
        }
        for cache, spans in zip(self._caches, (nodes, scored.values())):
            yield 0 if cache is None else _full_blocks(spans, cache.block_size)


def _full_blocks(spans: Iterable[Span], size: int) -> int:
    """Blocks that end within one of these, each counted once: spans of one tree do not overlap."""
    return sum(end // size - start // size for start, end in spans)
