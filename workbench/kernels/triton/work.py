"""Which program does what of one step's attention: lists made on the host, once for all layers.

A sequence with few new rows is *decoded*: its positions are cut into spans of a constant length,
one program each, joined afterwards; the others are *prefilled*, one program for a tile of rows.
Spans that several decoded sequences have in common, block for block (siblings of a search), are
worked on once for all of them. What it does not do: launch anything, or touch a device.

    prefill  [P, 4]: first row, rows, sequence, end                  positions 0 .. end - 1
    own      [Q, 5]: first member, members, sequence, begin, end     one sequence's span
    shared   [R, 5]: the same, of several sequences; `sequence` is one of them, for its table
    members: slots, run after run; slots: the decoded rows of the batch
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.kernels.context import ForwardContext
from workbench.kernels.triton.tuning import Tuning

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepWork:
    """The lists of one step, on the host; spans: of the longest decoded sequence."""

    prefill: Integers
    own: Integers
    shared: Integers
    members: Integers
    slots: Integers
    spans: int


def plan_work(
    context: ForwardContext, group: int, block_size: int, tuning: Tuning, share: bool = True
) -> StepWork:
    """Cut a step up; group: query heads of one key-value head; share: find shared spans."""
    rows = np.diff(context.query_start).astype(np.int64)
    few = rows * group <= tuning.span_lanes
    decoded, prefilled = np.flatnonzero(few & (rows > 0)), np.flatnonzero(~few)
    first = context.query_start[:-1].astype(np.int64)
    slots = _runs(first[decoded], rows[decoded])
    begins = np.cumsum(rows[decoded]) - rows[decoded]  # of each decoded sequence's slots
    alike = decoded.tolist() if share else []
    groups = shared_spans(context, alike, block_size, tuning.span)
    depth = np.zeros(len(rows), np.int64)  # of each sequence, spans that it shares
    for sequences, span in groups:
        depth[sequences] = span + 1
    shared, joint = np.empty((0, 5), np.int64), np.empty(0, np.int64)
    if groups:
        counts = zip(decoded.tolist(), begins.tolist(), rows[decoded].tolist())
        slots_of = {s: range(begin, begin + count) for s, begin, count in counts}
        shared, joint = _shared_items(groups, slots_of, group, len(slots), tuning)
    ends = context.context_len[decoded].astype(np.int64)
    own = _own_items(decoded, begins, rows[decoded], ends, depth[decoded], tuning.span)
    return StepWork(
        prefill=_prefill_items(context, prefilled, first, rows, group, tuning),
        own=own,
        shared=shared,
        members=np.concatenate([np.arange(len(slots)), joint]),
        slots=slots,
        spans=int(-(-ends.max(initial=1) // tuning.span)),
    )


def shared_spans(
    context: ForwardContext, sequences: Sequence[int], block_size: int, span: int
) -> list[tuple[list[int], int]]:
    """(sequences, number of the span) for every whole span that several have in common.

    In common are a span and all before it: a sequence's shared spans come first in it.
    """
    blocks, lengths = span // block_size, context.context_len.tolist()
    found: list[tuple[list[int], int]] = []
    groups, number = [list(sequences)], 0
    while groups:
        alike: dict[tuple[int, bytes], list[int]] = defaultdict(list)
        tables = _bytes(context.block_offsets[:, number * blocks : (number + 1) * blocks])
        for g, members in enumerate(groups):
            for s in members:
                if lengths[s] >= (number + 1) * span:
                    alike[g, tables[s]].append(s)
        groups = [members for members in alike.values() if len(members) > 1]
        found += [(members, number) for members in groups]
        number += 1
    return found


def _bytes(table: Integers) -> list[bytes]:
    """Each row, as something to compare and hash."""
    size = table.shape[1] * table.itemsize
    if size == 0:
        return []
    rows: list[bytes] = np.ascontiguousarray(table).view(f"V{size}").ravel().tolist()
    return rows


def _shared_items(
    groups: list[tuple[list[int], int]],
    slots_of: dict[int, range],
    group: int,
    first: int,
    tuning: Tuning,
) -> tuple[Integers, Integers]:
    """(items, members); members are numbered from `first` on."""
    items: list[tuple[int, ...]] = []
    members: list[int] = []
    at_once = tuning.shared_lanes // group
    for sequences, span in groups:
        slots = [slot for s in sequences for slot in slots_of[s]]
        for i in range(0, len(slots), at_once):
            run = slots[i : i + at_once]
            bounds = (span * tuning.span, (span + 1) * tuning.span)
            items.append((first + len(members), len(run), sequences[0], *bounds))
            members.extend(run)
    return np.array(items, np.int64).reshape(-1, 5), np.array(members, np.int64)


def _own_items(
    decoded: Integers, begins: Integers, rows: Integers, ends: Integers, depth: Integers, span: int
) -> Integers:
    """Spans depth .. last of every decoded sequence."""
    counts = -(-ends // span) - depth
    index = np.repeat(np.arange(len(decoded)), counts)
    begin = _runs(depth, counts) * span
    end = np.minimum(begin + span, ends[index])
    return np.stack([begins[index], rows[index], decoded[index], begin, end], axis=1)


def _prefill_items(
    context: ForwardContext,
    sequences: Integers,
    first: Integers,
    rows: Integers,
    group: int,
    tuning: Tuning,
) -> Integers:
    """Tiles of rows, the longest first: what starts last should not end last."""
    if len(sequences) == 0:
        return np.empty((0, 4), np.int64)
    at_once = tuning.prefill_lanes // group
    counts = -(-rows[sequences] // at_once)
    owner = np.repeat(sequences, counts)
    start = _runs(np.zeros_like(counts), counts) * at_once
    number = np.minimum(at_once, rows[owner] - start)
    begin = first[owner] + start
    items = np.stack([begin, number, owner, context.positions[begin + number - 1] + 1], axis=1)
    return items[np.argsort(-items[:, 3], kind="stable")]


def _runs(first: Integers, counts: Integers) -> Integers:
    """first[i], first[i] + 1, ..., counts[i] of them, for each i in turn."""
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(first, counts) + np.arange(int(counts.sum())) - before
