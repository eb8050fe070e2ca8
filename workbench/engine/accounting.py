"""What a step did, for its row of the trace: counts of the cache, and tokens computed a second
time.

No decision depends on anything here. What it does not do: record rows (trace/recorder.py).
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from workbench.core import Sequence
from workbench.engine.inputs import Batch, Chunk, PlannedStep, tokens_to_compute
from workbench.kvcache.manager import Allocation, KVCacheManager
from workbench.kvcache.pool import CacheStats
from workbench.kvcache.recompute import NOTHING_LOST, Lost
from workbench.trace.rows import StepCounts

_STATS = tuple(f.name for f in fields(CacheStats))


class StepAccount:
    """Counts of one step at a time: `open` it, tell it what happens, `close` it."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._before = replace(cache.stats)
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
        cache, recomputed = self._cache, self._count_recomputed(planned.chunks)
        new = self._new_cache_counts()
        return StepCounts(
            prefill_tokens=planned.plan.num_tokens - planned.num_decodes,
            decode_tokens=planned.num_decodes,
            cached_tokens=self._cached_tokens,
            running=len(batch),
            waiting=num_waiting,
            preempted=self.preempted,
            blocks_total=cache.num_blocks,
            blocks_active=cache.num_active,
            blocks_cached=cache.num_cached,
            blocks_free=cache.num_free,
            allocated=new["allocated"],
            evicted=new["evicted"],
            thrashed=new["thrashed"],
            thrash_events=new["thrash_events"],
            query_tokens=new["query_tokens"],
            hit_tokens=new["hit_tokens"],
            readmit_hit_tokens=new["readmit_hit_tokens"],
            tokens_held=self._tokens_held(batch, planned),
            recomputed_tokens_evicted=recomputed[0],
            recomputed_tokens_preempted=recomputed[1],
            recomputed_tokens_partial=recomputed[2],
            score_requests=self._score_requests,
        )

    def _new_cache_counts(self) -> dict[str, int]:
        """What the cache counted since the last step."""
        now, before = self._cache.stats, self._before
        new = {name: getattr(now, name) - getattr(before, name) for name in _STATS}
        self._before = replace(now)
        return new

    def _count_recomputed(self, chunks: list[Chunk]) -> tuple[int, int, int]:
        """Tokens of this step that were computed before: (evicted, preempted, partial)."""
        evicted = preempted = partial = 0
        for chunk in chunks:
            lost = self._lost.get(chunk.sequence.request_id)
            if lost is None:
                continue
            again = lost.count(chunk.start, chunk.end)
            evicted += again.evicted
            preempted += again.preempted
            partial += again.partial
            if chunk.end == tokens_to_compute(chunk.sequence):
                del self._lost[chunk.sequence.request_id]
        return evicted, preempted, partial

    def _tokens_held(self, batch: Batch, planned: PlannedStep) -> int:
        """Tokens in active blocks after the step; shared blocks are full, others may not be."""
        held, size = batch.computed[: len(batch)].copy(), self._cache.block_size
        held[planned.rows] = planned.computed
        slack = int(np.sum(batch.num_blocks[: len(batch)] * size - held))
        return self._cache.num_active * size - slack
