"""Attention on a GPU: the kernels, how they are cut up, and their launches.

A *query* is one row of one head. A program works on QUERIES of them that share a key-value head,
rows side by side, so that keys and values are read once for all heads of the group (GQA packing):

    query i = row i // GROUP of the program's rows, head i % GROUP of the key-value head's group

Positions are taken in tiles of a constant number, in order, whatever the block size (online
softmax, Milakov and Gimelshein 2018). Sums over one run of positions are a *span*: `sums` are not
yet divided by `total`, and are relative to `top`, the largest score so far in units of log2.
`merge` joins two. A query that sees nothing has total 0, and a key that it does not see adds
exactly nothing, whatever bytes lie there. All addresses are int64: a cache passes 2^31 elements.

Positions of decoded rows are cut into spans, a program each, joined afterwards in order
(Flash-Decoding, Dao et al. 2023), which keeps all multiprocessors busy when there are few rows; a
span has a constant length, so a row's bits depend on nothing but its own keys. A span that siblings
share is worked on once for all of them (Hydragen, Juravsky et al. 2024). Of rows that are prefilled
a program takes a tile of one sequence's rows and all positions up to its last; with JOINED it sums
them span by span, as a decode does: a row then has the same bits by either. Pointers:

    items int64 [P, 5]: first member or row, how many, sequence, begin, end of positions (graphs.py)
    members int64: slots, run after run; slots int64: decoded rows of the batch
    positions int64 [T]; tables int64 [S, width]: block offsets in elements
    qkv [T, (heads + 2 KV_HEADS) HEAD_DIM], rows qkv_stride elements apart; out [T, heads HEAD_DIM]
    data: a layer's blocks, the one at offset 0 first (LayerCache)
    sums float32 [slots, spans, heads, HEAD_DIM]; totals, tops float32 [slots, spans, heads]
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from workbench.errors import ConfigError
from workbench.kernels import LayerCache

if TYPE_CHECKING:
    from workbench.kernels.triton.graphs import DeviceWork

SMALLEST = 16  # queries, positions and dimensions that one tensor-core product takes at least
LOG2_E = tl.constexpr(1.4426950408889634)
UNSEEN = tl.constexpr(-1.0e30)  # finite, so that the difference of two is no NaN
HEADS = tl.constexpr(4)  # that one program of `join` takes
_JOIN_WARPS = 4


@dataclass(frozen=True, slots=True)
class Tuning:
    """How attention is cut up; numbers of queries and positions are powers of two.

    Tiles are part of the arithmetic, so they are written down (`chosen`) and not timed anew in
    every process, as `triton.autotune` would. span: positions that one program of a decode sums up,
    and the unit in which shared prefixes are shared. joined: prefill too is summed span by span.
    """

    tile: int = 64  # positions between two rescalings
    span: int = 256
    prefill_queries: int = 128
    span_queries: int = 16
    shared_queries: int = 64
    prefill_warps: int = 8
    span_warps: int = 4
    stages: int = 3  # tiles under way at a time
    joined: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError when the kernels cannot be built so."""
        sizes = (self.tile, self.span, self.prefill_queries, self.span_queries, self.shared_queries)
        if min(sizes) < SMALLEST or any(size & (size - 1) for size in sizes):
            raise ConfigError(
                f"Tiles of {sizes} positions and queries: not all powers of two from {SMALLEST} on."
            )
        if self.span < self.tile:
            raise ConfigError(
                f"A span of {self.span} positions is shorter than a tile of {self.tile}; "
                "give a span of at least one tile."
            )

    @property
    def same_bits(self) -> bool:
        """Whether a row's result is the same bits by whichever program it is computed."""
        queries = {self.prefill_queries, self.span_queries, self.shared_queries}
        return self.joined and len(queries) == 1 and self.prefill_warps == self.span_warps


def chosen(head_dim: int, element_bytes: int, batch_invariant: bool) -> Tuning:
    """The tiles for a head size and element size, with or without same bits everywhere.

    Reasoned from sizes of tiles, registers and shared memory; not timed on a GPU yet.
    """
    if element_bytes > 2:  # without tensor cores: larger tiles do not fit the registers
        tile, queries, warps, stages = 16, 32, 8, 2
    else:
        tile, queries, warps, stages = 64, 64, 4, 2 if head_dim > 64 else 3
    same = Tuning(
        tile=tile,
        prefill_queries=queries,
        span_queries=queries,
        shared_queries=queries,
        prefill_warps=warps,
        span_warps=warps,
        stages=stages,
        joined=True,
    )
    if batch_invariant:
        return same
    fast = replace(same, span_queries=SMALLEST, joined=False)
    if element_bytes > 2:
        return fast
    return replace(fast, prefill_queries=128, prefill_warps=8 if head_dim > 64 else 4, stages=3)


@triton.jit
def load_queries(
    qkv: tl.tensor, qkv_stride: tl.tensor, row: tl.tensor, live: tl.tensor, kv_head: tl.tensor,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIMENSIONS: tl.constexpr, QUERIES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Queries [QUERIES, DIMENSIONS] of rows int64 [QUERIES]; zeros where none is live.

    DIMENSIONS: HEAD_DIM rounded up to a power of two.
    """
    head = kv_head * GROUP + tl.arange(0, QUERIES) % GROUP
    dimension = tl.arange(0, DIMENSIONS)
    at = (row * qkv_stride + head * HEAD_DIM)[:, None] + dimension[None, :]
    return tl.load(qkv + at, mask=live[:, None] & (dimension < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _add_tile(
    start: tl.tensor, end: tl.tensor, query: tl.tensor, limit: tl.tensor, sums: tl.tensor,
    total: tl.tensor, top: tl.tensor, keys: tl.tensor, values: tl.tensor, table: tl.tensor,
    scale: tl.tensor, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIMENSIONS: tl.constexpr,
    TILE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """(sums, total, top) with positions start .. start + TILE - 1 more, as far as `end`.

    MASKED: else every query sees every position of the tile.
    """
    dimension = tl.arange(0, DIMENSIONS)
    position = start + tl.arange(0, TILE)
    slot = position % BLOCK_SIZE
    real = (dimension < HEAD_DIM)[None, :]
    if MASKED:
        # Whole blocks are read: a mask by position would forbid wide loads.
        inside = position // BLOCK_SIZE < (end + BLOCK_SIZE - 1) // BLOCK_SIZE
        offset = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0)
        read = inside[:, None] & real
    else:
        offset = tl.load(table + position // BLOCK_SIZE)
        read = real
    if ALIGNED:
        offset = tl.multiple_of(offset, [16])
    at = (offset + slot * HEAD_DIM)[:, None] + dimension[None, :]
    key = tl.trans(tl.load(keys + at, mask=read, other=0.0))
    scores = tl.dot(query, key, input_precision="ieee") * scale
    if MASKED:
        seen = position[None, :] <= limit[:, None]
        scores = tl.where(seen, scores, UNSEEN)
    highest = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - highest[:, None])
    value = tl.load(values + at, mask=read, other=0.0)
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
        # What lies behind the last position may be any bytes, and 0 * NaN is NaN.
        value = tl.where((position < end)[:, None], value, 0.0)
    shrink = tl.exp2(top - highest)
    total = total * shrink + tl.sum(weights, 1)
    sums = tl.dot(weights.to(value.dtype), value, sums * shrink[:, None], input_precision="ieee")
    return sums, total, highest


@triton.jit
def attend_span(
    query: tl.tensor, limit: tl.tensor, begin: tl.tensor, end: tl.tensor, keys: tl.tensor,
    values: tl.tensor, table: tl.tensor, scale: tl.tensor, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMENSIONS: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """(sums float32 [QUERIES, DIMENSIONS], total [QUERIES], top [QUERIES]) of one span.

    limit: int32 [QUERIES], the last position a query sees, -1 for padding; begin: a multiple of
    TILE; keys, values: of this head in a block at offset 0; scale: of scores, in units of log2.
    ALIGNED: block offsets are multiples of 16 elements. Tiles that all queries see whole come
    first, and need no masks; it is the same arithmetic.
    """
    sums = tl.zeros([QUERIES, DIMENSIONS], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    top = tl.full([QUERIES], UNSEEN, tl.float32)
    seen_by_all = tl.min(tl.where(limit < 0, end, limit + 1), 0)
    middle = tl.maximum(begin, tl.minimum(seen_by_all, end) // TILE * TILE)
    for start in range(begin, middle, TILE):
        sums, total, top = _add_tile(
            start, end, query, limit, sums, total, top, keys, values, table, scale,
            BLOCK_SIZE, HEAD_DIM, DIMENSIONS, TILE, ALIGNED, False,
        )  # fmt: skip
    for start in range(middle, end, TILE):
        sums, total, top = _add_tile(
            start, end, query, limit, sums, total, top, keys, values, table, scale,
            BLOCK_SIZE, HEAD_DIM, DIMENSIONS, TILE, ALIGNED, True,
        )  # fmt: skip
    return sums, total, top


@triton.jit
def merge(
    sums: tl.tensor, total: tl.tensor, top: tl.tensor,
    sums_2: tl.tensor, total_2: tl.tensor, top_2: tl.tensor,
) -> tl.tuple:  # fmt: skip
    """One span followed by another; sums [..., DIMENSIONS], the others without that axis."""
    highest = tl.maximum(top, top_2)
    first, second = tl.exp2(top - highest), tl.exp2(top_2 - highest)
    sums = sums * first[:, None] + sums_2 * second[:, None]
    return sums, total * first + total_2 * second, highest


@triton.jit
def divide(sums: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The attention of queries; 0 for one that saw nothing."""
    return sums / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["width", "spans"])
def attention(
    items: tl.tensor, members: tl.tensor, slots: tl.tensor, positions: tl.tensor,
    tables: tl.tensor, width: tl.tensor, qkv: tl.tensor, qkv_stride: tl.tensor, data: tl.tensor,
    scale: tl.tensor, out: tl.tensor, out_stride: tl.tensor, sums_out: tl.tensor,
    totals: tl.tensor, tops: tl.tensor, spans: tl.tensor, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIMENSIONS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
    JOINED: tl.constexpr, DECODED: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    """One item for one key-value head's group of heads; grid: P * KV_HEADS.

    DECODED: a span, own or shared, whose sums, totals and tops are written; else a tile of rows
    that are prefilled, which is written to out.
    """
    number = tl.program_id(0).to(tl.int64)
    item, kv_head = items + number // KV_HEADS * 5, number % KV_HEADS
    first, rows = tl.load(item), tl.load(item + 1)
    table = tables + tl.load(item + 2) * width
    begin, end = tl.load(item + 3).to(tl.int32), tl.load(item + 4).to(tl.int32)
    query_number = tl.arange(0, QUERIES)
    live = query_number < rows * GROUP
    row = first + query_number // GROUP
    slot = row
    if DECODED:
        slot = tl.load(members + row, mask=live, other=0)
        row = tl.load(slots + slot, mask=live, other=0)
    limit = tl.load(positions + row, mask=live, other=-1).to(tl.int32)
    query = load_queries(qkv, qkv_stride, row, live, kv_head, GROUP, HEAD_DIM, DIMENSIONS, QUERIES)
    keys = data + kv_head * (HEAD_DIM * BLOCK_SIZE)
    values = keys + KV_HEADS * HEAD_DIM * BLOCK_SIZE
    if JOINED and not DECODED:
        sums = tl.zeros([QUERIES, DIMENSIONS], tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        top = tl.full([QUERIES], UNSEEN, tl.float32)
        for start in range(0, end, SPAN):
            stop = tl.minimum(start + SPAN, end)
            sums_2, total_2, top_2 = attend_span(
                query, limit, start, stop, keys, values, table, scale,
                BLOCK_SIZE, HEAD_DIM, DIMENSIONS, QUERIES, TILE, ALIGNED,
            )  # fmt: skip
            sums, total, top = merge(sums, total, top, sums_2, total_2, top_2)
    else:
        sums, total, top = attend_span(
            query, limit, begin, end, keys, values, table, scale,
            BLOCK_SIZE, HEAD_DIM, DIMENSIONS, QUERIES, TILE, ALIGNED,
        )  # fmt: skip
    dimension = tl.arange(0, DIMENSIONS)
    mask = live[:, None] & (dimension < HEAD_DIM)[None, :]
    head = kv_head * GROUP + query_number % GROUP
    if DECODED:
        at = (slot * spans + begin // SPAN) * (KV_HEADS * GROUP) + head
        tl.store(totals + at, total, mask=live)
        tl.store(tops + at, top, mask=live)
        tl.store(sums_out + at[:, None] * HEAD_DIM + dimension[None, :], sums, mask=mask)
    else:
        at = (row * out_stride + head * HEAD_DIM)[:, None] + dimension[None, :]
        tl.store(out + at, divide(sums, total).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["spans"])
def join(
    slots: tl.tensor, positions: tl.tensor, sums: tl.tensor, totals: tl.tensor, tops: tl.tensor,
    spans: tl.tensor, out: tl.tensor, out_stride: tl.tensor, QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMENSIONS: tl.constexpr, SPAN: tl.constexpr,
) -> None:  # fmt: skip
    """Writes out of the decoded rows; grid: (slots, QUERY_HEADS / HEADS rounded up)."""
    slot = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dimension = tl.arange(0, DIMENSIONS)
    live = head < QUERY_HEADS
    mask = live[:, None] & (dimension < HEAD_DIM)[None, :]
    row = tl.load(slots + slot)
    end = tl.load(positions + row).to(tl.int32) + 1
    joined = tl.zeros([HEADS, DIMENSIONS], tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    top = tl.full([HEADS], UNSEEN, tl.float32)
    for begin in range(0, end, SPAN):
        at = (slot * spans + begin // SPAN) * QUERY_HEADS + head
        part = tl.load(sums + at[:, None] * HEAD_DIM + dimension[None, :], mask=mask, other=0.0)
        part_total = tl.load(totals + at, mask=live, other=0.0)
        part_top = tl.load(tops + at, mask=live, other=UNSEEN)
        joined, total, top = merge(joined, total, top, part, part_total, part_top)
    result = divide(joined, total).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + (head * HEAD_DIM)[:, None] + dimension[None, :], result, mask)


def attend(
    tuning: Tuning, qkv: torch.Tensor, out: torch.Tensor, cache: LayerCache, work: "DeviceWork"
) -> None:
    """out [T, heads head_dim] of every row of the step: shared spans, own spans, prefills, join.

    Products and sums are fused where the compiler sees fit, unless bits must agree.
    """
    heads, dim = out.shape[1] // cache.head_dim, cache.head_dim
    options: dict[str, Any] = {
        "num_stages": tuning.stages,
        "enable_fp_fusion": not tuning.joined,
    }
    sizes = {"HEAD_DIM": dim, "DIMENSIONS": max(SMALLEST, triton.next_power_of_2(dim))}
    shape = (len(work.slots), work.spans, heads)
    sums = out.new_empty((*shape, dim), dtype=torch.float32)
    totals, tops = out.new_empty((2, *shape), dtype=torch.float32)
    scratch = (sums, totals, tops, work.spans)
    tables = (work.positions, work.tables, work.tables.shape[1])
    layer = (cache.data[cache.base :], LOG2_E.value / math.sqrt(dim))
    for items, decoded, queries, warps in (
        (work.shared, True, tuning.shared_queries, tuning.span_warps),
        (work.own, True, tuning.span_queries, tuning.span_warps),
        (work.prefill, False, tuning.prefill_queries, tuning.prefill_warps),
    ):
        if len(items):
            attention[(len(items) * cache.kv_heads,)](
                *(items, work.members, work.slots, *tables, qkv, qkv.stride(0), *layer),
                *(out, out.stride(0), *scratch),
                **(sizes | options),
                KV_HEADS=cache.kv_heads,
                GROUP=heads // cache.kv_heads,
                BLOCK_SIZE=cache.block_size,
                QUERIES=queries,
                TILE=tuning.tile,
                SPAN=tuning.span,
                JOINED=tuning.joined,
                DECODED=decoded,
                ALIGNED=work.aligned,
                num_warps=warps,
            )
    if len(work.slots):
        join[(len(work.slots), triton.cdiv(heads, HEADS.value))](
            *(work.slots, work.positions, *scratch, out, out.stride(0)),
            **(sizes | options),
            QUERY_HEADS=heads,
            SPAN=tuning.span,
            num_warps=_JOIN_WARPS,
        )
