"""What a step did, for its row of the trace: counts of the cache, and tokens computed a second
time.

No decision depends on anything here. What it does not do: record rows (trace.py).
"""

from __future__ import annotations

from dataclasses import replace
from operator import add, attrgetter, sub

import numpy as np

from workbench.core import Sequence
from workbench.engine.inputs import Batch, Chunk, PlannedStep, tokens_to_compute
from workbench.kvcache.manager import NOTHING_LOST, Allocation, KVCacheManager, Lost
from workbench.trace import StepCounts

_COUNTED = (
    "allocated",
    "evicted",
    "thrashed",
    "thrash_events",
    "query_tokens",
    "hit_tokens",
    "readmit_hit_tokens",
)
_counted = attrgetter(*_COUNTED)  # what the cache counts, in the order of StepCounts


class StepAccount:
    """Counts of one step at a time: `open` it, tell it what happens, `close` it."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._before: tuple[int, ...] = _counted(cache.stats)
        self._lost: dict[int, Lost] = {}  # of admitted sequences that still prefill
        self._computed_before: dict[int, int] = {}  # most tokens a preempted request had computed
        self.open()

    def open(self) -> None:
        """A new step begins."""
        self.preempted = 0
        self._cached_tokens = 0
        self._score_requests = 0

    def admit(self, sequence: Sequence, allocation: Allocation) -> None:
        """A request was admitted, for the first time or again."""
        self._cached_tokens += allocation.num_cached_tokens
        self._score_requests += sequence.score is not None and sequence.preemptions == 0
        before = self._computed_before.get(sequence.request_id, 0)
        lost = replace(allocation.lost, preempted_end=before) if before else allocation.lost
        if lost != NOTHING_LOST:
            self._lost[sequence.request_id] = lost

    def preempt(self, sequence: Sequence) -> None:
        """A running request gave up its blocks; its num_computed is still what they held."""
        self.preempted += 1
        before = self._computed_before.get(sequence.request_id, 0)
        self._computed_before[sequence.request_id] = max(before, sequence.num_computed)
        self._lost.pop(sequence.request_id, None)

    def forget(self, request_id: int) -> None:
        """A request finished, was aborted or failed."""
        self._lost.pop(request_id, None)
        self._computed_before.pop(request_id, None)

    def close(self, batch: Batch, planned: PlannedStep, num_waiting: int) -> StepCounts:
        """The step is planned: its counts."""
        recomputed = self._count_recomputed(planned.chunks)
        computed = planned.plan.num_tokens - planned.num_decodes, planned.num_decodes
        queues = self._cached_tokens, len(batch), num_waiting, self.preempted
        cache = *self._blocks(), *self._new_cache_counts()
        held = self._tokens_held(batch, planned)
        row = (*computed, *queues, *cache, held, *recomputed, self._score_requests)
        return StepCounts._make(row)

    def _blocks(self) -> tuple[int, int, int, int]:
        """All, active, cached and free ones."""
        cache = self._cache
        return cache.num_blocks, cache.num_active, cache.num_cached, cache.num_free

    def _new_cache_counts(self) -> tuple[int, ...]:
        """What the cache counted since the last step, as in _COUNTED."""
        now, before = _counted(self._cache.stats), self._before
        self._before = now
        return tuple(map(sub, now, before))

    def _count_recomputed(self, chunks: list[Chunk]) -> tuple[int, int, int]:
        """Tokens of this step that were computed before: (evicted, preempted, partial)."""
        evicted = preempted = partial = 0
        for chunk in chunks:
            lost = self._lost.get(chunk.sequence.request_id)
            if lost is None:
                continue
            again = lost.count(chunk.start, chunk.end)
            evicted, preempted, partial = map(add, (evicted, preempted, partial), again)
            if chunk.end == tokens_to_compute(chunk.sequence):
                del self._lost[chunk.sequence.request_id]
        return evicted, preempted, partial

    def _tokens_held(self, batch: Batch, planned: PlannedStep) -> int:
        """Tokens in active blocks after the step; shared blocks are full, others may not be."""
        held, size = batch.computed[: len(batch)].copy(), self._cache.block_size
        held[planned.rows] = planned.computed
        slack = int(np.sum(batch.num_blocks[: len(batch)] * size - held))
        return self._cache.num_active * size - slack
