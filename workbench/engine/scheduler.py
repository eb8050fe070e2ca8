"""Iteration-level scheduling: what a step computes, who is admitted, who gives up their blocks.

Each step gives every running sequence the tokens it lacks, decoding ones first, then admits waiting
ones in order, if all of their tokens fit. Its three calls are schedule -> StepPlan,
then update or fail. What it does not do: compute (executor.py), or hold the batch's arrays
(inputs.py).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from workbench.core import Sequence, StepPlan, StepResult
from workbench.engine.accounting import StepAccount
from workbench.engine.inputs import Batch, Chunk, PlannedStep, plan_step, tokens_to_compute
from workbench.engine.limits import first_wanted, length_limit, require_room, require_servable
from workbench.engine.outcome import StopChecker, stopped, take_scores, take_tokens
from workbench.kvcache.manager import KVCacheManager
from workbench.trace import StepCounts


class Scheduler:
    """The queues of one engine. offsets: int64 element offset of each block id.

    Raises ConfigError when a step could not hold one token of each sequence, and OutOfMemory when
    the cache has fewer blocks than one request of max_model_len needs.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        offsets: NDArray[np.int64],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        stops: StopChecker,
        watermark: float = 0.01,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        require_room(cache, max_num_seqs, max_num_batched_tokens, max_model_len)
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._stops = stops
        self._watermark = watermark
        self._clock = clock
        most_blocks = -(-max_model_len // cache.block_size)
        self._batch = Batch(max_num_seqs, most_blocks, np.asarray(offsets, np.int64))
        self._waiting: deque[Sequence] = deque()
        self._known: dict[int, Sequence] = {}  # waiting or running, not aborted
        self._aborted: set[int] = set()  # aborted while their step is in flight
        self._in_flight: PlannedStep | None = None
        self._account = StepAccount(cache)
        self._next_step = 0
        self.counts: StepCounts | None = None  # of the last schedule() that made a plan

    # -- queues --

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._batch)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._known)

    def add(self, sequence: Sequence) -> None:
        """Queue a request. PromptError if it is empty or longer than max_model_len allows."""
        assert sequence.request_id not in self._known, "a request is queued once"
        require_servable(sequence, self._max_model_len)
        if sequence.params is not None:
            self._stops.add(sequence.request_id, sequence.params)
        self._known[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: int) -> Sequence | None:
        """Drop a request; None if unknown. Its blocks wait for a step that is in flight."""
        sequence = self._known.pop(request_id, None)
        if sequence is None:
            return None
        if sequence.params is not None:
            self._stops.remove(request_id)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            self._account.forget(request_id)
        else:
            self._aborted.add(request_id)
            if self._in_flight is None:
                self._release_aborted()
        return sequence

    # -- one step --

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when there is none. Answer a plan with update or fail."""
        assert self._in_flight is None, "the last plan was neither updated nor failed"
        if not self._known:
            return None
        self._account.open()
        if self._cache.apply():
            self._read_block_tables()
        self._make_room_for_decodes()
        budget = self._max_num_batched_tokens - len(self._decoding_rows())
        chunks = self._plan_chunks(budget)
        if not self._account.preempted:
            self._admit(chunks, budget - sum(c.end - c.start for c in chunks))
        decodes, size = self._decoding_rows(), self._cache.block_size
        self._in_flight = plan_step(self._next_step, self._batch, decodes, chunks, size)
        self._next_step += 1
        self.counts = self._account.close(self._batch, self._in_flight, len(self._waiting))
        return self._in_flight.plan

    def _read_block_tables(self) -> None:
        """Blocks in use have other ids now."""
        for row, sequence in enumerate(self._batch.sequences):
            self._batch.set_blocks(row, 0, self._cache.block_table(sequence.request_id))

    def _decoding_rows(self) -> NDArray[np.int64]:
        """Rows of the batch that compute their newest token in this step."""
        return self._batch.decoding[: len(self._batch)].nonzero()[0]

    def _make_room_for_decodes(self) -> None:
        """Oldest first; whatever runs after the one that lacks a block is not planned yet."""
        batch, count = self._batch, len(self._batch)
        at_boundary = batch.length[:count] % self._cache.block_size <= 1
        for row in (batch.decoding[:count] & at_boundary).nonzero()[0].tolist():
            while row < len(batch) and not self._extend(row, batch.sequences[row].token_ids):
                self._preempt(len(batch) - 1)

    def _plan_chunks(self, budget: int) -> list[Chunk]:
        """Prefilling sequences, oldest first; the latest is the victim, as decodes are planned."""
        batch = self._batch
        rows = (~batch.decoding[: len(batch)]).nonzero()[0].tolist()
        chunks: list[Chunk] = []
        while len(chunks) < len(rows) and budget > 0:
            row = rows[len(chunks)]
            sequence, start = batch.sequences[row], int(batch.computed[row])
            end = min(int(batch.length[row]), start + budget)
            if self._extend(row, sequence.token_ids[:end]):
                chunks.append(Chunk(sequence, row, start, end))
                budget -= end - start
            else:
                self._preempt(rows.pop())
        return chunks

    def _extend(self, row: int, token_ids: list[int]) -> bool:
        """Room for these tokens of a running sequence, if there are blocks."""
        sequence = self._batch.sequences[row]
        new = self._cache.extend(sequence.request_id, token_ids)
        if new:
            first = -(-int(self._batch.computed[row]) // self._cache.block_size)
            self._batch.set_blocks(row, first, new)
        return new is not None

    def _preempt(self, row: int) -> None:
        """Take a running sequence's blocks; it waits at the head of the queue and is recomputed."""
        sequence = self._batch.sequences[row]
        self._account.preempt(sequence)
        self._free_blocks(sequence)
        self._batch.remove({row})
        sequence.num_computed = 0
        sequence.preemptions += 1
        self._waiting.appendleft(sequence)

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        """Waiting requests in order, up to the first that does not fit."""
        while self._waiting and budget > 0 and len(self._batch) < self._max_num_seqs:
            chunk = self._try_admit(self._waiting[0], budget)
            if chunk is None:
                return
            self._waiting.popleft()
            chunks.append(chunk)
            budget -= chunk.end - chunk.start

    def _try_admit(self, sequence: Sequence, budget: int) -> Chunk | None:
        """Admit it if all its tokens fit above the watermark, with room for its first chunk."""
        tokens, most = sequence.token_ids, tokens_to_compute(sequence)
        tokens = tokens if most == len(tokens) else tokens[:most]  # whole, it carries its hashes
        max_hit, salt = first_wanted(sequence), sequence.salt
        start = self._cache.match(tokens, salt=salt, max_hit=max_hit)
        end = min(len(tokens), start + budget)
        allocation = self._cache.allocate(
            sequence.request_id,
            tokens,
            end,
            salt=salt,
            max_hit=max_hit,
            keep_free=self._keep_free(),
            readmission=sequence.preemptions > 0,
        )
        if allocation is None:
            return None
        assert allocation.num_cached_tokens == start
        self._account.admit(sequence, allocation)
        self._stamp_admission(sequence, start)
        limit = length_limit(sequence, self._max_model_len)
        row = self._batch.append(sequence, limit, start, allocation.block_ids)
        return Chunk(sequence, row, start, end)

    def _keep_free(self) -> int:
        """Blocks to spare at an admission; 0 while nothing runs, so that nothing waits for ever."""
        return math.ceil(self._watermark * self._cache.num_blocks) if len(self._batch) else 0

    def _stamp_admission(self, sequence: Sequence, num_cached_tokens: int) -> None:
        if sequence.preemptions:
            sequence.readmit_cached_tokens += num_cached_tokens
        else:
            sequence.num_cached_tokens = num_cached_tokens
            sequence.scheduled_s = self._clock()

    def requests_of(self, rows: SequenceOf[int]) -> list[int]:
        """Request ids that own these rows of the flat batch of the plan in flight."""
        step = self._in_flight
        assert step is not None, "no plan is in flight"
        owners = np.searchsorted(step.plan.query_start, list(rows), side="right") - 1
        found = (self._batch.sequences[row].request_id for row in step.rows[owners])
        return list(dict.fromkeys(found))

    # -- its result --

    def update(self, plan: StepPlan, result: StepResult) -> list[tuple[Sequence, str]]:
        """Take in a computed step; answers who finished and why (eos | stop | length | score)."""
        step, batch = self._close_step(plan), self._batch
        batch.advance(step.rows, step.computed)
        reasons: dict[int, str] = {}
        if len(step.sampled):
            take_tokens(batch, step, result, self._clock)
            reasons |= stopped(batch, step, result, self._stops, self._aborted)
        reasons |= take_scores(step, result, self._aborted)
        finished = [(batch.sequences[row], reason) for row, reason in sorted(reasons.items())]
        for sequence, _ in finished:
            self._finish(sequence)
        self._release(set(reasons))
        self._release_aborted()
        return finished

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """The step raised: drops and answers its requests; nothing of theirs can be hit later.

        The rest go on.
        """
        step = self._close_step(plan)
        sequences = [self._batch.sequences[row] for row in step.rows.tolist()]
        failed = [s for s in sequences if s.request_id not in self._aborted]
        for sequence in failed:
            self._finish(sequence)
        self._release(set(step.rows.tolist()))
        self._release_aborted()
        return failed

    def _close_step(self, plan: StepPlan) -> PlannedStep:
        step = self._in_flight
        assert step is not None, "no plan is in flight"
        assert step.plan.step == plan.step, "another plan is in flight"
        self._in_flight = None
        return step

    # -- leaving --

    def _finish(self, sequence: Sequence) -> None:
        del self._known[sequence.request_id]
        if sequence.params is not None:
            self._stops.remove(sequence.request_id)

    def _release(self, rows: set[int]) -> None:
        """Free the blocks of these rows and drop the rows."""
        if not rows:
            return
        for row in sorted(rows):
            sequence = self._batch.sequences[row]
            self._free_blocks(sequence)
            self._account.forget(sequence.request_id)
            self._aborted.discard(sequence.request_id)
        self._batch.remove(rows)

    def _release_aborted(self) -> None:
        if self._aborted:
            running = enumerate(self._batch.sequences)
            self._release({row for row, s in running if s.request_id in self._aborted})

    def _free_blocks(self, sequence: Sequence) -> None:
        """Give the blocks back; whatever was not computed can no longer be hit."""
        computed = sequence.num_computed
        self._cache.free(sequence.request_id, computed, token_ids=sequence.token_ids)
