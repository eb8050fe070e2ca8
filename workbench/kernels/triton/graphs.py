"""Which program does what of one step's attention, and decoding steps as CUDA graphs.

Lists are made on the host, once for all layers. A sequence with few new rows is *decoded*: its
positions are cut into spans of a constant length, one program each, joined afterwards; the others
are *prefilled*, a tile of rows each. Spans that several have in common are worked on once for all:

    prefill  [P, 5]: first row, rows, sequence, begin (0), end         positions 0 .. end - 1
    decoded  [Q, 5]: first member, members, sequence, begin, end       a span, shared ones first;
                     `sequence` is one of those that share it, for its table
    members: slots, run after run; slots: the decoded rows of the batch

On the device lists and context are one tensor, copied at once, without waiting. A graph launches
what was captured, over the same addresses: of ROW_SIZES numbers of rows and SPAN_SIZES numbers of
spans each, the next larger ones, so a dozen graphs serve every decoding step. Lists have room for
as many spans a row as that (`padded`): an item of no members is a program that ends at once.
Sharing never makes lists longer. A size whose capture fails is launched one by one.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.host import collection_paused
from workbench.kernels import ForwardContext
from workbench.kernels.triton.attention import Shape, Tiles

if TYPE_CHECKING:
    from workbench.kernels.triton import TritonKernels

ROW_SIZES, SPAN_SIZES = 4, 3  # numbers of rows and, for each, of spans that have a graph
Work = Callable[[], object]
Capture = Callable[[Work], Work]  # what launches the same again
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepWork:
    """The lists of one step, on the host; spans: of the longest decoded sequence."""

    prefill: Integers
    decoded: Integers
    members: Integers
    slots: Integers
    spans: int


def plan_work(context: ForwardContext, shape: Shape, tiles: Tiles, share: bool = True) -> StepWork:
    """Cut a step up; share: find shared spans."""
    span, at_once = tiles.span, tiles.decoded // shape.group
    rows = np.diff(context.query_start).astype(np.int64)
    few = rows * shape.group <= tiles.decoded
    decoded, prefilled = np.flatnonzero(few & (rows > 0)), np.flatnonzero(~few)
    first = context.query_start[:-1].astype(np.int64)
    slots = _runs(first[decoded], rows[decoded])
    begins = np.cumsum(rows[decoded]) - rows[decoded]  # of each decoded sequence's slots

    groups = shared_spans(context, decoded.tolist() if share else [], shape.block_size, span)
    depth = np.zeros(len(rows), np.int64)  # of each sequence, spans that it shares
    shared: list[tuple[int, ...]] = []
    joint: list[int] = []  # members, numbered behind the slots
    counts = zip(decoded.tolist(), begins.tolist(), rows[decoded].tolist()) if groups else ()
    slots_of = {s: range(begin, begin + count) for s, begin, count in counts}
    for sequences, number in groups:
        depth[sequences] = number + 1
        members = [slot for s in sequences for slot in slots_of[s]]
        for i in range(0, len(members), at_once):
            run, bounds = members[i : i + at_once], (number * span, (number + 1) * span)
            shared.append((len(slots) + len(joint), len(run), sequences[0], *bounds))
            joint += run

    ends = context.context_len[decoded].astype(np.int64)
    owner, begin = _cut(depth[decoded], -(-ends // span), span)
    end = np.minimum(begin + span, ends[owner])
    own = np.stack([begins[owner], rows[decoded][owner], decoded[owner], begin, end], axis=1)

    prefill, at_once = np.empty((0, 5), np.int64), tiles.queries // shape.group
    if len(prefilled):  # the longest first: what starts last should not end last
        counted = -(-rows[prefilled] // at_once)
        owner, start = _cut(np.zeros_like(counted), counted, at_once)
        owner = prefilled[owner]
        number_of = np.minimum(at_once, rows[owner] - start)
        begin = first[owner] + start
        end = context.positions[begin + number_of - 1] + 1
        prefill = np.stack([begin, number_of, owner, np.zeros_like(end), end], axis=1)
        prefill = prefill[np.argsort(-end, kind="stable")]
    return StepWork(
        prefill=prefill,
        decoded=np.concatenate([np.array(shared, np.int64).reshape(-1, 5), own]),
        members=np.concatenate([np.arange(len(slots)), np.array(joint, np.int64)]),
        slots=slots,
        spans=int(-(-ends.max(initial=1) // span)),
    )


def shared_spans(
    context: ForwardContext, sequences: Sequence[int], block_size: int, span: int
) -> list[tuple[list[int], int]]:
    """(sequences, number of the span) for every whole span that several have in common, with all
    before it: a sequence's shared spans come first in it.
    """
    blocks, lengths = span // block_size, context.context_len.tolist()
    found: list[tuple[list[int], int]] = []
    groups, number = [list(sequences)], 0
    while groups:
        alike: dict[tuple[int, bytes], list[int]] = defaultdict(list)
        part = context.block_offsets[:, number * blocks : (number + 1) * blocks]
        tables = [row.tobytes() for row in part]
        for g, members in enumerate(groups):
            for s in members:
                if lengths[s] >= (number + 1) * span:
                    alike[g, tables[s]].append(s)
        groups = [members for members in alike.values() if len(members) > 1]
        found += [(members, number) for members in groups]
        number += 1
    return found


def _cut(first: Integers, last: Integers, size: int) -> tuple[Integers, Integers]:
    """Pieces first[i] .. last[i] - 1 of each i, a `size` each: their i, and where each begins."""
    counts = last - first
    return np.repeat(np.arange(len(counts)), counts), _runs(first, counts) * size


def _runs(first: Integers, counts: Integers) -> Integers:
    """first[i], first[i] + 1, ..., counts[i] of them, for each i in turn."""
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(first, counts) + np.arange(int(counts.sum())) - before


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """StepWork and the context's arrays, int64, as views of `buffer`."""

    buffer: torch.Tensor
    prefill: torch.Tensor
    decoded: torch.Tensor
    members: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor  # [T]
    sequence: torch.Tensor  # [T]
    tables: torch.Tensor  # [S, blocks]
    spans: int
    shape: Shape

    def refill(self, work: StepWork, context: ForwardContext) -> None:
        """Another step of the same sizes, put where this one is."""
        assert work.spans == self.spans and len(work.decoded) == len(self.decoded)
        staged = _staged(_arrays(work, context), self.buffer.device)
        self.buffer.copy_(staged, non_blocking=True)


def place(
    work: StepWork, context: ForwardContext, shape: Shape, device: torch.device
) -> DeviceWork:
    """Copy lists and context to a device."""
    arrays = _arrays(work, context)
    buffer = _staged(arrays, device).to(device, non_blocking=True)
    views = {
        name: part[: array.size].view(array.shape)
        for part, (name, array) in zip(buffer.split(_sizes(arrays)), arrays.items())
    }
    return DeviceWork(buffer, **views, spans=work.spans, shape=shape)


def sizes_up_to(most: int, count: int) -> list[int]:
    """At most so many numbers up to `most`, ascending, in about equal ratios."""
    return sorted({ceil(round(most ** (k / count), 6)) for k in range(1, count + 1)})


def at_least(number: int, sizes: Sequence[int]) -> int:
    """The smallest of these ascending sizes that is no smaller."""
    return sizes[bisect_left(sizes, number)]


def padded(work: StepWork, spans: int) -> StepWork:
    """The same decodes in lists with room for so many spans a row, the rest items of no members."""
    assert len(work.prefill) == 0 and work.spans <= spans
    rows = len(work.slots)
    return replace(
        work,
        decoded=np.pad(work.decoded, ((0, rows * spans - len(work.decoded)), (0, 0))),
        members=np.pad(work.members, (0, rows + rows * spans - len(work.members))),
        spans=spans,
    )


def _arrays(work: StepWork, context: ForwardContext) -> dict[str, Integers]:
    """What is put on the device, by the names that DeviceWork has for it."""
    lists = {f.name: getattr(work, f.name) for f in fields(StepWork) if f.name != "spans"}
    rows = {"positions": context.positions, "sequence": context.sequence}
    return lists | rows | {"tables": context.block_offsets}


def _sizes(arrays: dict[str, Integers]) -> list[int]:
    """Room for each array: every one begins at a multiple of 16 bytes."""
    return [-(-array.size // 2) * 2 for array in arrays.values()]


def _staged(arrays: dict[str, Integers], device: torch.device) -> torch.Tensor:
    """All arrays in one host tensor, from which a GPU copies by itself."""
    sizes = _sizes(arrays)
    host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    room, begin = host.numpy(), 0
    for size, array in zip(sizes, arrays.values()):
        room[begin : begin + array.size] = array.reshape(-1)
        begin += size
    return host


class DecodeLists:
    """Padded lists of one decoding step after another, each of one row a sequence.

    While no context begins or fills a span and the blocks of whole ones stay, all that changes is
    where rows end; else lists are made anew.
    """

    def __init__(self, plan: Callable[[ForwardContext, Shape], StepWork], span: int) -> None:
        self._plan, self._span = plan, span
        self._last: tuple[StepWork, Integers, Integers, Integers, NDArray[np.bool_]] | None = None

    def of(self, context: ForwardContext, shape: Shape) -> StepWork:
        """Valid until the next call."""
        span, ends = self._span, context.context_len.astype(np.int64)
        counts = np.stack([-(-ends // span), ends // span])  # begun, whole
        if self._last is not None:
            lists, own, known, blocks, whole = self._last
            now = context.block_offsets[:, : blocks.shape[1]]
            if np.array_equal(counts, known) and not ((now != blocks) & whole).any():
                np.minimum(own[:, 3] + span, ends[own[:, 2]], out=own[:, 4])
                return lists
        made, size = self._plan(context, shape), span // shape.block_size
        most = context.block_offsets.shape[1] * shape.block_size
        lists = padded(made, at_least(made.spans, sizes_up_to(-(-most // span), SPAN_SIZES)))
        shared = int((made.decoded[:, 0] >= len(made.slots)).sum())
        own = lists.decoded[shared : len(made.decoded)]  # a view: items of one row each
        number = np.arange(counts[1].max(initial=0) * size)
        blocks, whole = context.block_offsets[:, : len(number)], number < counts[1][:, None] * size
        self._last = lists, own, counts, blocks.copy(), whole
        return lists


class RecordedWork:
    """Work of one row a sequence, over a context whose arrays change in place."""

    def __init__(self, kernels: TritonKernels, work: Work, capture: Capture) -> None:
        self._kernels, self._work, self._capture = kernels, work, capture
        self._about: tuple[ForwardContext, Shape] | None = None
        self._lists = DecodeLists(kernels.plan, kernels.tiles.span)
        self._recorded: dict[int, tuple[DeviceWork, Work]] = {}  # by spans a row

    def __call__(self) -> None:
        """Do the work once."""
        first = self._about is None
        if first:  # which context it is about is seen when it is done
            self._kernels.held = None
            self._work()
            assert self._kernels.held is not None, "recorded work that attends to nothing"
            self._about = self._kernels.held[:2]
        assert self._about is not None
        context, shape = self._about
        lists = self._lists.of(context, shape)
        spans, width = lists.spans, lists.spans * self._kernels.tiles.span // shape.block_size
        near = replace(context, block_offsets=context.block_offsets[:, :width])
        if spans in self._recorded:
            placed, again = self._recorded[spans]
            placed.refill(lists, near)
            self._kernels.held = (context, shape, placed)
            again()
            return
        placed = place(lists, near, shape, self._kernels.device)
        self._kernels.held = (context, shape, placed)
        if not first:
            self._work()  # this step; and every kernel is compiled before one is captured
        again = self._work  # as it is where the device cannot capture it
        try:
            again = self._capture(self._work)
        except RuntimeError as problem:  # torch.OutOfMemoryError among them
            told = f"Decoding steps are launched one by one, slower: no CUDA graph ({problem})."
            warnings.warn(told, RuntimeWarning, stacklevel=2)
        self._recorded[spans] = placed, again


class GraphCapture:
    """Captures CUDA graphs that share one pool of memory: they never run at the same time.

    Unlike `torch.cuda.graph` it does not wait for the device, an error while another thread
    captures. A pool whose last graph is gone takes no other: the first, of next to nothing, stays.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        nothing = torch.zeros(1, device=device)
        self._kept = self(lambda: nothing.zero_())

    def __call__(self, work: Work) -> Work:
        """Captures the work, without doing it."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream), collection_paused():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # it fails too where the work has broken the capture
                    graph.capture_end()
                raise
            graph.capture_end()
        replay: Work = graph.replay
        return replay
