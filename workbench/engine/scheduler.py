"""Iteration-level scheduling: what a step computes, which request is admitted, which is preempted.

Each step gives every running sequence the tokens it lacks, decoding ones first, then admits waiting
ones in order, if all of their tokens fit. Its three calls are schedule -> StepPlan, then update or
fail; StepAccount counts each step for the trace, and no decision depends on it.

The running sequences are columns of a Batch: row i of every column is the i-th of them, oldest
first. Columns persist from step to step, so that a step of decoding costs little Python a sequence:
an append of its token. A plan computes tokens, several of one sequence where it prefills.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from operator import add, attrgetter, sub
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.core import (
    SamplingParams,
    SamplingRows,
    Sequence,
    StepPlan,
    StepResult,
    WantedLogits,
)
from workbench.engine.requests import length_limit, require_servable
from workbench.engine.sampling import COLUMNS, columns_of
from workbench.errors import OutOfMemory
from workbench.kvcache.manager import (
    NOTHING_LOST,
    Allocation,
    KVCacheManager,
    Lost,
    TokenList,
)
from workbench.trace import StepCounts

CACHE_COUNTS = (
    "allocated",
    "evicted",
    "thrashed",
    "thrash_events",
    "query_tokens",
    "hit_tokens",
    "readmit_hit_tokens",
)
_cache_counts = attrgetter(*CACHE_COUNTS)
Rows = NDArray[np.int64]


class StopConditions(Protocol):
    """What the scheduler needs of stop conditions (sampling.StopChecker is the real one).

    suspects(tokens): which of these tokens may end their sequence, without looking at it.
    finish_reason(seq): "eos", "stop" or None, judged by the sequence's newest token.
    """

    def add(self, request_id: int, params: SamplingParams) -> None: ...
    def remove(self, request_id: int) -> None: ...
    def suspects(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]: ...
    def finish_reason(self, seq: Sequence) -> str | None: ...


class Scheduler:
    """The queues of one engine. offsets: int64 element offset of each block id.

    Raises OutOfMemory when the cache has fewer blocks than one request of max_model_len needs.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        offsets: NDArray[np.int64],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        stops: StopConditions,
        watermark: float = 0.01,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert 1 <= max_num_seqs <= max_num_batched_tokens, "all running sequences decode each step"
        most_blocks = -(-max_model_len // cache.block_size)
        if cache.num_blocks < most_blocks:
            raise OutOfMemory(
                f"{cache.num_blocks} KV blocks of {cache.block_size} tokens cannot hold one "
                f"request of max_model_len={max_model_len}, which needs {most_blocks}. Give more "
                f"memory, or set max_model_len to at most {cache.num_blocks * cache.block_size}."
            )
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._stops = stops
        self._watermark = watermark
        self._clock = clock
        self._batch = Batch(max_num_seqs, most_blocks, np.asarray(offsets, np.int64))
        self._waiting: deque[Sequence] = deque()
        self._known: dict[int, Sequence] = {}  # waiting or running, not aborted
        self._aborted: set[int] = set()  # aborted while their step is in flight
        self._in_flight: PlannedStep | None = None
        self._account = StepAccount(cache)
        self._next_step = 0
        self.counts: StepCounts | None = None  # of the last schedule() that made a plan
        self.ended: list[tuple[Sequence, str]] = []  # by the last update or fail, and why

    # -- queues --

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._known)

    def __contains__(self, request_id: int) -> bool:
        """Whether this request waits or runs."""
        return request_id in self._known

    def add(self, sequence: Sequence) -> None:
        """Queue a request that `require_servable` takes."""
        assert sequence.request_id not in self._known, "a request is queued once"
        if sequence.params is not None:
            self._stops.add(sequence.request_id, sequence.params)
        self._known[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def require_servable(self, sequence: Sequence) -> None:
        """PromptError if it is empty or too long; a prompt must leave room for one token."""
        require_servable(sequence, self._max_model_len)

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

    def recover(self, stops: StopConditions) -> list[tuple[Sequence, str]]:
        """After a call that anything may have cut short, anywhere: all that had not ended waits.

        What was running is computed again, to the same tokens where batch_invariant. stops: new
        ones. Returns what the last step ended, which the caller may not have been told of.
        """
        for sequence in self._known.values():
            if sequence.scheduled_s is None and sequence.request_id in self._cache:
                self._stamp_admission(sequence, 0)  # its look-up is counted
        self._cache.recover()
        ended = {sequence.request_id for sequence, _ in self.ended}
        self._known = {number: s for number, s in self._known.items() if number not in ended}
        for sequence in self._batch.sequences:
            if sequence.request_id in ended:
                continue
            if sequence.num_output_tokens:  # the newest token may lack what goes with it
                sequence.token_ids = TokenList(sequence.token_ids[:-1])
            del sequence.logprobs[sequence.num_output_tokens :]
            sequence.score_rows.clear()
        self._batch.sequences = []
        self._stops = stops
        for sequence in self._known.values():
            sequence.num_computed = 0
            if sequence.params is not None:
                self._stops.add(sequence.request_id, sequence.params)
        self._waiting = deque(self._known.values())
        self._aborted.clear()
        self._in_flight = None
        self._account.restart()
        return self.ended

    # -- one step --

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when there is none. A plan is followed by update or fail."""
        assert self._in_flight is None, "the last plan was neither updated nor failed"
        if not self._known:
            return None
        self._account.open()
        if self._cache.apply():  # blocks in use have other ids now
            for row, sequence in enumerate(self._batch.sequences):
                self._batch.set_blocks(row, 0, self._cache.block_table(sequence.request_id))
        self._make_room_for_decodes()
        # One token for each decoding row, then chunks of running prefills, then new requests; a
        # step that had to preempt admits none.
        budget = self._max_num_batched_tokens - len(self._decoding_rows())
        chunks = self._plan_chunks(budget)
        if not self._account.preempted:
            self._admit(chunks, budget - sum(c.end - c.start for c in chunks))
        decodes, size = self._decoding_rows(), self._cache.block_size
        self._in_flight = plan_step(self._next_step, self._batch, decodes, chunks, size)
        self._next_step += 1
        self.counts = self._account.close(self._batch, self._in_flight, len(self._waiting))
        return self._in_flight.plan

    def _decoding_rows(self) -> NDArray[np.int64]:
        """Rows of the batch that compute their newest token in this step."""
        return self._batch.decoding[: len(self._batch)].nonzero()[0]

    def _make_room_for_decodes(self) -> None:
        """Oldest first: what runs after the one that lacks a block is not planned yet."""
        batch, count = self._batch, len(self._batch)
        # length % block_size is 1: the newest token needs a new block; 0: it fills one, which
        # `extend` then lets be hit.
        at_boundary = batch.length[:count] % self._cache.block_size <= 1
        for row in (batch.decoding[:count] & at_boundary).nonzero()[0].tolist():
            while row < len(batch) and not self._extend(row, batch.sequences[row].token_ids):
                self._preempt(len(batch) - 1)

    def _plan_chunks(self, budget: int) -> list[Chunk]:
        """Prefilling sequences, oldest first. Where blocks lack the newest of them is preempted:
        decodes are planned already, and keep theirs.
        """
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
            self._batch.set_blocks(row, int(self._batch.num_blocks[row]), new)
        return new is not None

    def _preempt(self, row: int) -> None:
        """Take a running sequence's blocks; it waits at the head of the queue and is recomputed."""
        sequence = self._batch.sequences[row]
        self._cache.pool.preempted()
        self._account.preempt(sequence)
        self._free_blocks(sequence)
        self._batch.remove({row})
        sequence.num_computed = 0
        sequence.preemptions += 1
        self._waiting.appendleft(sequence)

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        """Waiting requests in order, up to the first that does not fit."""
        while self._waiting and budget > 0 and len(self._batch) < self._max_num_seqs:
            sequence = self._waiting[0]
            tokens, most, score = sequence.token_ids, sequence.num_to_compute, sequence.score
            if most < len(tokens):
                tokens = tokens[:most]  # a whole sequence carries its hashes
            max_hit, salt = None, sequence.salt
            if score is not None:
                max_hit = next(p for p in score.positions if p not in sequence.score_rows)
            start = self._cache.match(tokens, salt=salt, max_hit=max_hit)
            spare = math.ceil(self._watermark * self._cache.num_blocks) if len(self._batch) else 0
            end = min(len(tokens), start + budget)
            allocation = self._cache.allocate(
                sequence.request_id,
                tokens,
                end,  # room for its first chunk, once all of it fits above the watermark
                salt=salt,
                max_hit=max_hit,
                keep_free=spare,  # none while nothing runs, so that nothing waits for ever
                readmission=sequence.scheduled_s is not None,
            )
            if allocation is None:
                return
            assert allocation.num_cached_tokens == start
            self._waiting.popleft()
            self._account.admit(sequence, allocation)
            self._stamp_admission(sequence, start)
            limit = length_limit(sequence, self._max_model_len)
            row = self._batch.append(sequence, limit, start, allocation.block_ids)
            chunks.append(Chunk(sequence, row, start, end))
            budget -= end - start

    def _stamp_admission(self, sequence: Sequence, num_cached_tokens: int) -> None:
        if sequence.scheduled_s is not None:  # preempted, or cut short by an interrupt
            sequence.readmit_cached_tokens += num_cached_tokens
        else:
            sequence.num_cached_tokens = num_cached_tokens
            sequence.scheduled_s = self._clock()
            self._account.scored += sequence.score is not None

    def tell(self) -> None:
        """The counts of the last step are where they belong, whatever comes."""
        self._account.tell()

    def requests_of(self, rows: SequenceOf[int]) -> list[int]:
        """Request ids that own these rows of the flat batch of the plan in flight."""
        step = self._in_flight
        assert step is not None, "no plan is in flight"
        owners = np.searchsorted(step.plan.query_start, list(rows), side="right") - 1
        found = (self._batch.sequences[row].request_id for row in step.rows[owners])
        return list(dict.fromkeys(found))

    # -- its result --

    def update(self, plan: StepPlan, result: StepResult) -> list[tuple[Sequence, str]]:
        """Take in a computed step; returns what finished and why (eos | stop | length | score)."""
        step, batch = self._close_step(plan), self._batch
        batch.advance(step.rows, step.computed)
        reasons = self._take_in(step, result)
        finished = [(batch.sequences[row], reason) for row, reason in sorted(reasons.items())]
        self.ended = finished
        for sequence, _ in finished:
            self._finish(sequence)
        self._release(set(reasons))
        self._release_aborted()
        return finished

    def _take_in(self, step: PlannedStep, result: StepResult) -> dict[int, str]:
        """Append what was sampled, keep wanted logits; row -> why its sequence ends."""
        reasons = self._take_tokens(step, result) if len(step.sampled) else {}
        for owners, values in zip(step.wanted, result.wanted):
            for (sequence, position), logits in zip(owners, values):
                sequence.score_rows[position] = np.array(logits)
        for chunk in step.chunks:
            sequence = chunk.sequence
            complete = sequence.score is not None and chunk.end == sequence.num_to_compute
            if complete and sequence.request_id not in self._aborted:
                reasons[chunk.row] = "score"
        return reasons

    def _take_tokens(self, step: PlannedStep, result: StepResult) -> dict[int, str]:
        """Looks only at those sequences that may have ended."""
        batch, rows, reasons = self._batch, step.sampled, {}
        tokens, sequences = np.asarray(result.tokens, np.int64), batch.sequences
        batch.append_tokens(rows, tokens)
        for row, logprobs in zip(rows.tolist(), result.logprobs):
            if logprobs is not None:
                sequences[row].logprobs.append(logprobs)
        for row in rows[step.num_decodes :].tolist():
            if sequences[row].first_token_s is None:
                sequences[row].first_token_s = self._clock()
        at_limit = batch.length[rows] >= batch.limit[rows]
        for i in np.flatnonzero(at_limit | self._stops.suspects(tokens)).tolist():
            sequence = sequences[rows[i]]
            if sequence.request_id not in self._aborted:
                reason = self._stops.finish_reason(sequence) or ("length" if at_limit[i] else None)
                if reason is not None:
                    reasons[int(rows[i])] = reason
        return reasons

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """The step raised: drops and returns its requests. Of what it was to compute nothing can be
        hit later, nor of what those that it had just admitted found cached.
        """
        step = self._close_step(plan)
        sequences = [self._batch.sequences[row] for row in step.rows.tolist()]
        failed = [s for s in sequences if s.request_id not in self._aborted]
        self.ended = [(sequence, "error") for sequence in failed]
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


# -- the running sequences, and the plan of a step of theirs --


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of the prefilling sequence in this row of the batch, planned now.

    padding: tokens computed after them for nothing, as in a padded batch (static_batch.py).
    """

    sequence: Sequence
    row: int
    start: int
    end: int
    padding: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the plan that it takes, padding included."""
        return self.end - self.start + self.padding


class Batch:
    """Columns of the running sequences, [capacity] each, and the element offsets of their blocks.

    length: tokens to compute; computed: tokens whose KV exists; limit: length at which generation
    ends; num_blocks: of its block table; decoding: the last step sampled, so exactly the newest
    token is to be computed.
    """

    def __init__(self, capacity: int, max_blocks: int, offsets: NDArray[np.int64]) -> None:
        self.sequences: list[Sequence] = []
        self._offset_of_block = offsets
        self.length = np.zeros(capacity, np.int64)
        self.computed = np.zeros(capacity, np.int64)
        self.limit = np.zeros(capacity, np.int64)
        self.num_blocks = np.zeros(capacity, np.int64)
        self.last_token = np.zeros(capacity, np.int64)
        self.decoding = np.zeros(capacity, bool)
        self.block_offsets = np.zeros((capacity, max_blocks), np.int64)
        self.sampling = {name: np.zeros(capacity, kind) for name, kind in COLUMNS.items()}
        own = (v for v in vars(self).values() if isinstance(v, np.ndarray) and v is not offsets)
        self._columns = *own, *self.sampling.values()

    def __len__(self) -> int:
        return len(self.sequences)

    def append(self, sequence: Sequence, limit: int, computed: int, block_ids: list[int]) -> int:
        """Add a sequence as the latest; returns its row."""
        row = len(self.sequences)
        self.sequences.append(sequence)
        self.length[row] = sequence.num_to_compute
        self.computed[row] = computed
        self.limit[row] = limit
        self.decoding[row] = False
        self.block_offsets[row] = self.num_blocks[row] = 0
        self.set_blocks(row, 0, block_ids)
        if sequence.params is not None:
            for name, value in columns_of(sequence.params).items():
                self.sampling[name][row] = value
        return row

    def set_blocks(self, row: int, first: int, block_ids: list[int]) -> None:
        """Blocks first, first + 1, ... of the row's table are these."""
        if block_ids:
            end = first + len(block_ids)
            self.block_offsets[row, first:end] = self._offset_of_block[block_ids]
            self.num_blocks[row] = end

    def advance(self, rows: Rows, computed: NDArray[np.int32]) -> None:
        """The step was computed: these rows' sequences have that many tokens in the cache."""
        self.computed[rows] = computed
        for row, count in zip(rows.tolist(), computed.tolist()):
            self.sequences[row].num_computed = count

    def append_tokens(self, rows: Rows, tokens: NDArray[np.int64]) -> None:
        """These rows' sequences got one sampled token each."""
        self.last_token[rows] = tokens
        self.length[rows] += 1
        self.decoding[rows] = True
        for row, token in zip(rows.tolist(), tokens.tolist()):
            self.sequences[row].token_ids.append(token)

    def remove(self, rows: set[int]) -> None:
        """Drop these rows; later ones move up and keep their order."""
        count = len(self.sequences)
        if rows == {count - 1}:
            self.sequences.pop()
            return
        kept = [i for i in range(count) if i not in rows]
        for column in self._columns:
            column[: len(kept)] = column[kept]
        self.sequences = [self.sequences[i] for i in kept]

    def sampling_rows(self, flat_rows: Rows, rows: Rows) -> SamplingRows:
        """What the sampler needs of these rows; their logits are rows flat_rows of the plan."""
        columns: dict[str, Any] = {name: each[rows] for name, each in self.sampling.items()}
        return SamplingRows(flat_rows, self.length[rows], **columns)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan and what the scheduler must know to take its result in; rows are rows of the batch.

    wanted: for each group of plan.wanted, the (sequence, position) of each of its rows.
    """

    plan: StepPlan
    rows: Rows  # [S] in the plan's order
    sampled: Rows  # [R]
    num_decodes: int
    chunks: list[Chunk]
    wanted: list[list[tuple[Sequence, int]]] = field(default_factory=list)

    @property
    def computed(self) -> NDArray[np.int32]:
        """[S] tokens of each sequence whose KV exists after the step; padding leaves none."""
        computed = self.plan.context_len.copy()
        computed[self.num_decodes :] -= np.array([c.padding for c in self.chunks], np.int32)
        return computed


def plan_step(
    step: int, batch: Batch, decodes: Rows, chunks: list[Chunk], size: int
) -> PlannedStep:
    """One flat batch: a token for each decoding row, then the chunks. size: tokens a block."""
    if not chunks:
        return _plan_decodes(step, batch, decodes, size)
    num_decodes = len(decodes)
    rows = np.concatenate([decodes, np.array([c.row for c in chunks], np.int64)])
    counts = np.ones(len(rows), np.int64)
    counts[num_decodes:] = [c.num_tokens for c in chunks]
    query_start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=query_start[1:])
    tokens = [batch.last_token[decodes]]
    positions = [batch.computed[decodes]]
    last: list[int] = []  # the computation of a sequence's last token alone is followed by sampling
    for i, chunk in enumerate(chunks, num_decodes):
        own, start, end = chunk.sequence.token_ids, chunk.start, chunk.end
        tokens.append(np.zeros(chunk.num_tokens, np.int64))  # padding is token 0
        tokens[-1][: end - start] = own[start:end]
        positions.append(np.arange(start, end + chunk.padding, dtype=np.int64))
        if chunk.sequence.params is not None and end == len(own):
            last.append(i)
    order = np.concatenate([np.arange(num_decodes), np.array(last, np.int64)])
    newest = query_start[order + 1] - 1
    newest[num_decodes:] -= np.array([chunks[i - num_decodes].padding for i in last], np.int64)
    wanted, owners = _wanted_logits(chunks, query_start[num_decodes:].tolist())
    context = batch.computed[rows] + counts
    plan = StepPlan(
        step=step,
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        query_start=query_start.astype(np.int32),
        context_len=context.astype(np.int32),
        block_offsets=_block_offsets(batch, rows, context, size),
        sampling=batch.sampling_rows(newest, rows[order]),
        wanted=wanted,
    )
    return PlannedStep(plan, rows, rows[order], num_decodes, chunks, owners)


def _plan_decodes(step: int, batch: Batch, rows: Rows, size: int) -> PlannedStep:
    """The same for a step without chunks: each sequence owns one row, and each row is sampled."""
    positions = batch.computed[rows]
    context = positions + 1
    flat = np.arange(len(rows) + 1, dtype=np.int64)
    plan = StepPlan(
        step=step,
        tokens=batch.last_token[rows],
        positions=positions,
        query_start=flat.astype(np.int32),
        context_len=context.astype(np.int32),
        block_offsets=_block_offsets(batch, rows, context, size),
        sampling=batch.sampling_rows(flat[:-1], rows),
    )
    return PlannedStep(plan, rows, rows, len(rows), [])


def _block_offsets(batch: Batch, rows: Rows, context: Rows, size: int) -> NDArray[np.int64]:
    """[rows, most blocks of one]; unused entries are 0."""
    return batch.block_offsets[rows, : -(-int(context.max()) // size)]


def _wanted_logits(
    chunks: list[Chunk], starts: list[int]
) -> tuple[tuple[WantedLogits, ...], list[list[tuple[Sequence, int]]]]:
    """The positions that scoring requests still want of their chunks, grouped by equal columns."""
    rows: dict[tuple[int, ...], list[int]] = {}
    owners: dict[tuple[int, ...], list[tuple[Sequence, int]]] = {}
    for chunk, start in zip(chunks, starts):
        score = chunk.sequence.score
        if score is None:
            continue
        for position in score.positions:
            inside = chunk.start <= position < chunk.end
            if inside and position not in chunk.sequence.score_rows:
                rows.setdefault(score.columns, []).append(start + position - chunk.start)
                owners.setdefault(score.columns, []).append((chunk.sequence, position))
    groups = (WantedLogits(np.array(r, np.int64), np.array(c, np.int64)) for c, r in rows.items())
    return tuple(groups), list(owners.values())


# -- what the trace is told --


class StepAccount:
    """Counts of one step at a time: `open` it, tell it what happens, `close` it."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self.scored = 0  # score requests that were admitted, of all steps
        self._told = self._closed = self._counts  # as of the last step told, and closed
        self._lost: dict[int, Lost] = {}  # of admitted sequences that still prefill
        self._computed_before: dict[int, int] = {}  # most tokens a preempted request had computed
        self.open()

    @property
    def _counts(self) -> tuple[int, ...]:
        return (*_cache_counts(self._cache.stats), self.scored)

    def restart(self) -> None:
        """All that runs waits again; what was closed and not told is told with the next step."""
        self._closed = self._told
        self._lost.clear()
        self._computed_before.clear()
        self.open()

    def tell(self) -> None:
        """What was closed is told."""
        self._told = self._closed

    def open(self) -> None:
        """A new step begins; the last one is told."""
        self.tell()
        self.preempted = 0
        self._cached_tokens = 0

    def admit(self, sequence: Sequence, allocation: Allocation) -> None:
        """A request was admitted, for the first time or again."""
        self._cached_tokens += allocation.num_cached_tokens
        before = self._computed_before.get(sequence.request_id, 0)
        lost = replace(allocation.lost, preempted_end=before) if before else allocation.lost
        if lost != NOTHING_LOST:
            self._lost[sequence.request_id] = lost

    def preempt(self, sequence: Sequence) -> None:
        """A running request is about to lose its blocks; its num_computed is what they hold."""
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
        cache, self._closed = self._cache, self._counts
        *since, scored = map(sub, self._closed, self._told)
        evicted = preempted = partial = 0  # tokens of this step that were computed before
        for chunk in planned.chunks:
            lost = self._lost.get(chunk.sequence.request_id)
            if lost is not None:
                again = lost.count(chunk.start, chunk.end)
                evicted, preempted, partial = map(add, (evicted, preempted, partial), again)
                if chunk.end == chunk.sequence.num_to_compute:
                    del self._lost[chunk.sequence.request_id]
        held = batch.computed[: len(batch)].copy()
        held[planned.rows] = planned.computed
        # places without a token after the step; shared blocks are full, others may not be
        slack = int(np.sum(batch.num_blocks[: len(batch)] * cache.block_size - held))
        total, active, cached = cache.num_blocks, cache.num_active, cache.num_cached
        return StepCounts(
            prefill_tokens=planned.plan.num_tokens - planned.num_decodes,
            decode_tokens=planned.num_decodes,
            cached_tokens=self._cached_tokens,
            running=len(batch),
            waiting=num_waiting,
            preempted=self.preempted,
            blocks_total=total,
            blocks_active=active,
            blocks_cached=cached,
            blocks_free=total - active - cached,
            tokens_held=active * cache.block_size - slack,
            recomputed_tokens_evicted=evicted,
            recomputed_tokens_preempted=preempted,
            recomputed_tokens_partial=partial,
            score_requests=scored,
            **dict(zip(CACHE_COUNTS, since)),
        )
