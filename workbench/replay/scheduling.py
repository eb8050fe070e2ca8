"""The real scheduler where nobody computes: block places are not written down, decodes coast.

While everything that runs decodes and nobody can be admitted, a step decides nothing: it makes room
at block boundaries, and sequences end that a recording says end. Such steps skip plan and result.
The queues, admission, preemption, the account and the cache are Scheduler's and KVCacheManager's
own; a step that could preempt is theirs altogether.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.core import SamplingRows, Sequence, StepPlan, StepResult
from workbench.engine.inputs import Batch, Chunk, Rows
from workbench.engine.limits import length_limit
from workbench.engine.scheduler import Scheduler
from workbench.kvcache.arena import LeasedPool
from workbench.replay.answers import RecordedExecutor
from workbench.replay.lines import ChainedCache
from workbench.replay.work import StepWork
from workbench.trace import StepCounts

FEW = 4  # rows that are dropped one by one


class CountedBatch(Batch):
    """A batch that counts blocks and knows no place of theirs."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, 0, np.zeros(0, np.int64))
        kept = (self.length, self.computed, self.limit, self.num_blocks, self.seeds, self.decoding)
        self._columns = kept
        self._unread = np.zeros(capacity, np.float64)
        self._unread_whole = np.zeros(capacity, np.int64)

    def set_blocks(self, row: int, first: int, block_ids: list[int]) -> None:
        """The row's table ends with these."""
        if block_ids:
            self.num_blocks[row] = first + len(block_ids)

    def remove(self, rows: set[int]) -> None:
        """As Batch."""
        if len(rows) > FEW:
            super().remove(rows)
            return
        for row in sorted(rows, reverse=True):
            count = len(self.sequences)
            for column in self._columns:
                column[row : count - 1] = column[row + 1 : count]
            del self.sequences[row]

    def sampling_rows(self, flat_rows: Rows, rows: Rows) -> SamplingRows:
        """Whose turn it is; how they are sampled, nobody reads."""
        unread, whole = self._unread[: len(rows)], self._unread_whole[: len(rows)]
        mine = self.length[rows], self.seeds[rows]
        return SamplingRows(flat_rows, *mine, unread, whole, unread, unread, whole)

    def _set_sampling(self, row: int, sequence: Sequence) -> None:
        assert sequence.params is not None
        self.seeds[row] = sequence.params.seed & 0xFFFF_FFFF_FFFF_FFFF


class Decoding:
    """A sequence that decodes. Its length is base + the number of steps; last: its last step.

    order: the batch's. gone: preempted or finished.
    """

    __slots__ = ("base", "gone", "last", "order", "sequence")

    def __init__(self, sequence: Sequence, order: int, steps: int, left: int) -> None:
        self.sequence, self.order, self.gone = sequence, order, False
        self.base = len(sequence.token_ids) - steps
        self.last = steps + left - 1


class ReplayScheduler(Scheduler):
    """A Scheduler that can coast: plan_decodes and take_decodes in the place of schedule and
    update, for as long as plan_decodes answers.
    """

    def __init__(self, cache: ChainedCache, recorded: RecordedExecutor, **limits: Any) -> None:
        super().__init__(cache, np.zeros(0, np.int64), stops=recorded, **limits)
        self._chained, self._recorded = cache, recorded
        self._in_arena = isinstance(cache.pool, LeasedPool)
        self._batch: CountedBatch = CountedBatch(self._max_num_seqs)
        self._steps = self._admissions = 0
        self._decoding: dict[int, Decoding] = {}  # by request id, in the batch's order
        self._orders: dict[int, int] = {}  # of running requests: which admission they were
        self._due: dict[int, list[Decoding]] = {}  # step -> who meets a block boundary in it
        self._ends: dict[int, list[Decoding]] = {}  # step -> who ends with it
        self._refused = False  # the head of the queue, and no block was released since
        self._behind = 0  # steps that the batch's columns have not seen
        self._context = self._slack = 0  # while coasting: tokens, and places in blocks without

    # -- coasting --

    def plan_decodes(self) -> tuple[StepCounts, StepWork] | None:
        """The next step's counts and work if it only decodes, whatever happens; else None.

        Answer it with take_decodes.
        """
        due = self._take_due() if self._only_decodes() else None
        if due is None:
            self._stop_coasting()
            return None
        if not self._behind:
            self._start_coasting()
        self._chained.apply()
        self._account.open()
        self._make_room(due)
        count, size = len(self._batch), self._cache.block_size
        held = self._cache.num_active * size - self._slack
        counts = self._account.close_decodes(count, len(self._waiting), held)
        return counts, StepWork(count, count, self._context, count, count, self._context)

    def take_decodes(self) -> list[tuple[Sequence, str]]:
        """The planned step is over; who finished in it, and why."""
        ended = self._ends.pop(self._steps, ())
        self._steps += 1
        self._behind += 1
        self._next_step += 1
        count = len(self._batch)
        self._context += count
        self._slack -= count
        finished = [d for d in ended if not d.gone]
        if not finished:
            return []
        finished.sort(key=_order)
        return self._end(finished)

    def _end(self, finished: list[Decoding]) -> list[tuple[Sequence, str]]:
        size, rows = self._cache.block_size, set()
        found = []
        for each in finished:
            sequence = each.sequence
            self._catch_up(each)
            found.append((sequence, self._stops.finish_reason(sequence) or "length"))
            rows.add(self._batch.sequences.index(sequence))
            self._context -= sequence.num_tokens
            self._slack -= -sequence.num_computed % size - 1
            self._finish(sequence)
        self._release(rows)
        return found

    def _only_decodes(self) -> bool:
        """Whether everything that runs decodes, and nobody can be admitted."""
        running = len(self._batch)
        if not running or running != len(self._decoding):
            return False
        if not self._waiting or running == self._max_num_seqs:
            return True
        return self._refused and not self._in_arena  # an arena is told again what was refused

    def _start_coasting(self) -> None:
        count, size = len(self._batch), self._cache.block_size
        lengths = self._batch.length[:count]
        self._context = int(lengths.sum())
        computed = lengths - 1
        self._slack = int((-computed % size).sum()) - count

    def _stop_coasting(self) -> None:
        """Bring the batch and its sequences up to the present step."""
        if self._behind:
            count, batch = len(self._batch), self._batch
            batch.length[:count] += self._behind
            batch.computed[:count] += self._behind
            batch.num_blocks[:count] = -(-batch.computed[:count] // self._cache.block_size)
            self._behind = 0
            for each in self._decoding.values():
                self._catch_up(each)

    def _catch_up(self, each: Decoding) -> None:
        length = each.base + self._steps
        line: Any = each.sequence.token_ids
        line.length = length
        each.sequence.num_computed = length - 1

    def _take_due(self) -> list[Decoding] | None:
        """Who meets a block boundary in this step, oldest first; None if they may lack blocks."""
        due = [each for each in self._due.get(self._steps, ()) if not each.gone]
        self._chained.apply_ahead()
        if due and len(due) > self._cache.num_cached + self._cache.num_free:
            return None
        self._due.pop(self._steps, None)
        due.sort(key=_order)
        return due

    def _make_room(self, due: list[Decoding]) -> None:
        """Blocks for those at a boundary; `plan_decodes` saw that there are enough."""
        steps, size = self._steps, self._cache.block_size
        for each in due:
            line: Any = each.sequence.token_ids
            line.length = each.base + steps
            new = self._cache.extend(each.sequence.request_id, line)
            assert new is not None, "there was room"
            self._slack += size * len(new)
            self._wait_for_boundary(each, steps + 1)

    def _wait_for_boundary(self, each: Decoding, step: int) -> None:
        """File it under the first step from this one on in which it fills or begins a block."""
        size = self._cache.block_size
        place = (each.base + step) % size
        step += size - place if place > 1 else 0
        if step <= each.last:
            self._due.setdefault(step, []).append(each)

    # -- who decodes --

    def update(self, plan: StepPlan, result: StepResult) -> list[tuple[Sequence, str]]:
        """As Scheduler."""
        step = self._in_flight
        assert step is not None, "no plan is in flight"
        sampled = [chunk.sequence for chunk in step.chunks if _samples(chunk)]
        finished = super().update(plan, result)
        for each in self._due.pop(self._steps, ()):
            if not each.gone:
                self._wait_for_boundary(each, self._steps + 1)
        self._ends.pop(self._steps, None)
        self._steps += 1
        for sequence in sampled:
            if sequence.request_id in self._known:
                self._begin(sequence)
        return finished

    def _begin(self, sequence: Sequence) -> None:
        """Its first token was sampled, the others follow one by one."""
        tokens = self._recorded.count(sequence.request_id) - sequence.num_output_tokens
        limit = length_limit(sequence, self._max_model_len)
        left = min(tokens, limit - sequence.num_tokens)
        each = Decoding(sequence, self._orders[sequence.request_id], self._steps, left)
        self._decoding[sequence.request_id] = each
        self._ends.setdefault(each.last, []).append(each)
        self._wait_for_boundary(each, self._steps)

    def schedule(self) -> StepPlan | None:
        """As Scheduler."""
        self._refused = False
        return super().schedule()

    def _try_admit(self, sequence: Sequence, budget: int) -> Chunk | None:
        chunk = super()._try_admit(sequence, budget)
        if chunk is None:
            self._refused = True
        else:
            self._admissions += 1
            self._orders[sequence.request_id] = self._admissions
        return chunk

    def _preempt(self, row: int) -> None:
        self._forget(self._batch.sequences[row])
        super()._preempt(row)

    def _release(self, rows: set[int]) -> None:
        self._refused = self._refused and not rows
        for row in rows:
            self._forget(self._batch.sequences[row])
        super()._release(rows)

    def _forget(self, sequence: Sequence) -> None:
        del self._orders[sequence.request_id]
        each = self._decoding.pop(sequence.request_id, None)
        if each is not None:
            each.gone = True


def _samples(chunk: Chunk) -> bool:
    return chunk.sequence.params is not None and chunk.end == len(chunk.sequence.token_ids)


def _order(each: Decoding) -> int:
    return each.order
