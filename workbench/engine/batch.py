"""The running sequences as columns, and the step plan built from them.

Row i of every column is the i-th running sequence, oldest first; columns persist from step to step,
so a step of decoding touches no Python object per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from workbench.core import SamplingRows, Sequence, StepPlan, WantedLogits

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of the prefilling sequence in this row of the batch, planned now.

    padding: rows computed after them for nothing, as in a padded batch (static_batch.py).
    """

    sequence: Sequence
    row: int
    start: int
    end: int
    padding: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of the plan that it takes."""
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
        self.seeds = np.zeros(capacity, np.uint64)
        self.temperature = np.zeros(capacity, np.float64)
        self.top_k = np.zeros(capacity, np.int64)
        self.top_p = np.ones(capacity, np.float64)
        self.min_p = np.zeros(capacity, np.float64)
        self.logprobs = np.full(capacity, -1, np.int64)
        self.block_offsets = np.zeros((capacity, max_blocks), np.int64)
        self._columns = tuple(v for v in vars(self).values() if isinstance(v, np.ndarray))
        self._columns = tuple(c for c in self._columns if c is not offsets)

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
        if (params := sequence.params) is not None:
            self.seeds[row] = params.seed & 0xFFFF_FFFF_FFFF_FFFF
            self.temperature[row] = params.temperature
            self.top_k[row], self.top_p[row] = params.top_k, params.top_p
            self.min_p[row] = params.min_p
            self.logprobs[row] = -1 if params.logprobs is None else params.logprobs
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
        return SamplingRows(
            rows=flat_rows,
            positions=self.length[rows],
            seeds=self.seeds[rows],
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            logprobs=self.logprobs[rows],
        )


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
        padding = [chunk.padding for chunk in self.chunks]
        if not any(padding):
            return self.plan.context_len
        computed = self.plan.context_len.copy()
        computed[self.num_decodes :] -= np.array(padding, np.int32)
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
    counts[num_decodes:] = [c.num_rows for c in chunks]
    query_start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=query_start[1:])
    tokens = [batch.last_token[decodes]]
    positions = [batch.computed[decodes]]
    last: list[int] = []  # the computation of a sequence's last token alone is followed by sampling
    for i, chunk in enumerate(chunks, num_decodes):
        own, start, end = chunk.sequence.token_ids, chunk.start, chunk.end
        tokens.append(np.zeros(chunk.num_rows, np.int64))  # padding is token 0
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
    width = -(-int(context.max()) // size)
    offsets = batch.block_offsets[:, :width]
    if len(rows) == len(batch) and (rows[:-1] < rows[1:]).all():  # all of them, in order
        return offsets[: len(rows)].copy()
    return np.take(offsets, rows, axis=0)


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
