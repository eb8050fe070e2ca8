"""Attention on a GPU: the kernels, how they are cut up, and their launches.

A *query* is one row of one head. A program works on `queries` of them that share a key-value head,
rows side by side, so that keys and values are read once for all heads of the group (GQA packing):

    query i = row i // group of the program's rows, head i % group of the key-value head's group

Positions are taken in tiles of a constant number, in order, whatever the block size (online
softmax, Milakov and Gimelshein 2018). Sums over one run of positions are a *span*: `sums` are not
yet divided by `total`, and are relative to `top`, the largest score so far in units of log2.
`merge` joins two. A query that sees nothing has total 0, and a key that it does not see adds
exactly nothing: beyond the last position whatever bytes lie there, before it where values are
finite (else their own row fails, too). All addresses are int64: a cache passes 2^31 elements.

Positions of decoded rows are cut into spans, a program each, joined afterwards in order
(Flash-Decoding, Dao et al. 2023), which keeps all multiprocessors busy when there are few rows. A
span that siblings share is worked on once for all of them (Hydragen, Juravsky et al. 2024). Of rows
that are prefilled a program takes a tile of one sequence's rows and all positions up to its last.
Either sums a row span by span in tiles of the same sizes, so its bits depend on nothing but its own
keys (of INVARIANT tiles; else few queries take other instructions, and some last bits differ).

    items int64 [P, 5]: first member or row, how many, sequence, begin, end of positions (graphs.py)
    members int64: slots, run after run; slots int64: decoded rows of the batch
    positions int64 [T]; tables int64 [S, width]: block offsets in elements
    qkv [T, (heads + 2 kv_heads) head_dim] and out [T, heads head_dim], each with its rows' stride
    data: a layer's blocks, the one at offset 0 first (LayerCache)
    parts: sums float32 [slots, spans, heads, head_dim]; totals, tops float32 [slots, spans, heads]
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from workbench.kernels import LayerCache

if TYPE_CHECKING:
    from workbench.kernels.triton.graphs import DeviceWork

SMALLEST = 16  # queries, positions and dimensions that one tensor-core product takes at least
LOG2_E = 1.4426950408889634
UNSEEN = tl.constexpr(-1.0e30)  # finite, so that the difference of two is no NaN
HEADS = tl.constexpr(4)  # that one program of `join` takes


class Tiles(NamedTuple):
    """How attention is cut up: powers of two from 16 on, a span no shorter than a tile.

    They are part of the arithmetic, so not timed anew in every process; those of half precision
    were timed on an H100. span: positions of one program of a decode, and the unit of sharing.
    """

    queries: int = 64  # of a program that prefills
    decoded: int = 16  # of one that decodes
    tile: int = 64  # positions between two rescalings
    span: int = 256
    warps: tuple[int, int] = (4, 2)  # of a program that prefills, and of one that decodes
    stages: tuple[int, int] = (3, 2)  # tiles under way at a time, of each

    def fitting(self, shape: "Shape") -> "Tiles":
        """With room for a row of all heads of a group."""
        least = triton.next_power_of_2(shape.group)
        return self._replace(queries=max(self.queries, least), decoded=max(self.decoded, least))


INVARIANT = Tiles(decoded=64, warps=(4, 4), stages=(3, 3))  # the same instructions for both
FULL_PRECISION = Tiles(32, 32, 16, warps=(8, 8), stages=(2, 2))  # without tensor cores


class Shape(NamedTuple):
    """What kernels are compiled for; aligned: block offsets are multiples of 16 elements."""

    kv_heads: int
    group: int  # query heads of a key-value head
    head_dim: int
    block_size: int
    aligned: bool = False


@triton.jit
def _add_tile(
    start: tl.tensor, end: tl.tensor, query: tl.tensor, limit: tl.tensor, span: tl.tuple,
    layer: tl.tuple, SHAPE: tl.constexpr, TILES: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """A span, (sums, total, top), with positions start .. start + tile - 1 more, as far as `end`.

    limit: int32 [queries], the last position a query sees, -1 for padding; layer: keys and values
    of this head in a block at offset 0, the sequence's table, and the scale of scores, in units of
    log2. MASKED: else every query sees every position of the tile.
    """
    sums, total, top = span
    keys, values, table, scale = layer
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    dimension = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    position = start + tl.arange(0, TILES.tile)
    block, slot = position // SHAPE.block_size, position % SHAPE.block_size
    read = (dimension < HEAD_DIM)[None, :]
    if MASKED:
        # Whole blocks are read: a mask by position would forbid wide loads.
        inside = block < (end + SHAPE.block_size - 1) // SHAPE.block_size
        offset = tl.load(table + block, mask=inside, other=0)
        read = inside[:, None] & read
    else:
        offset = tl.load(table + block)
    if SHAPE.aligned:
        offset = tl.multiple_of(offset, [16])
    at = (offset + slot * HEAD_DIM)[:, None] + dimension[None, :]
    key = tl.trans(tl.load(keys + at, mask=read, other=0.0))
    scores = tl.dot(query, key, input_precision="ieee")
    if MASKED:
        seen = position[None, :] <= limit[:, None]
        scores = tl.where(seen, scores, UNSEEN)
    highest = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(tl.fma(scores, scale, -highest[:, None]))
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
def nothing(COUNT: tl.constexpr, HEAD_DIM: tl.constexpr) -> tl.tuple:
    """The span of no positions: sums float32 [COUNT, dimensions], total and top [COUNT]."""
    sums = tl.zeros([COUNT, triton.next_power_of_2(HEAD_DIM)], tl.float32)
    return sums, tl.zeros([COUNT], tl.float32), tl.full([COUNT], UNSEEN, tl.float32)


@triton.jit
def merge(span: tl.tuple, following: tl.tuple) -> tl.tuple:
    """One span followed by another."""
    sums, total, top = span
    sums_2, total_2, top_2 = following
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
    lists: tl.tuple, width: tl.tensor, spans: tl.tensor, qkv: tl.tuple, layer: tl.tuple,
    out: tl.tuple, SHAPE: tl.constexpr, TILES: tl.constexpr, DECODED: tl.constexpr,
) -> None:  # fmt: skip
    """One item for one key-value head's group of heads; grid: P * kv_heads.

    lists: items, members, slots, positions, tables; layer: data and the scale of scores. DECODED: a
    span, own or shared, and out the parts; else a tile of rows that are prefilled. Tiles that all
    queries see whole come first in a span, and need no masks; it is the same arithmetic.
    """
    items, members, slots, positions, tables = lists
    source, stride = qkv
    data, scale = layer
    KV_HEADS: tl.constexpr = SHAPE.kv_heads
    GROUP: tl.constexpr = SHAPE.group
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    QUERIES: tl.constexpr = TILES.decoded if DECODED else TILES.queries
    TILE: tl.constexpr = TILES.tile
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
    head = kv_head * GROUP + query_number % GROUP
    dimension = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    mask = live[:, None] & (dimension < HEAD_DIM)[None, :]
    at = (row * stride + head * HEAD_DIM)[:, None] + dimension[None, :]
    query = tl.load(source + at, mask=mask, other=0.0)
    keys = data + kv_head * (HEAD_DIM * SHAPE.block_size)
    values = keys + KV_HEADS * HEAD_DIM * SHAPE.block_size
    head_layer = (keys, values, table, scale)
    seen_by_all = tl.min(tl.where(limit < 0, end, limit + 1), 0)
    whole = nothing(QUERIES, HEAD_DIM)
    for start in range(begin, end, TILES.span):  # once, of a decode
        stop = tl.minimum(start + TILES.span, end)
        middle = tl.maximum(start, tl.minimum(seen_by_all, stop) // TILE * TILE)
        span = nothing(QUERIES, HEAD_DIM)
        for position in range(start, middle, TILE):
            span = _add_tile(position, stop, query, limit, span, head_layer, SHAPE, TILES, False)
        for position in range(middle, stop, TILE):
            span = _add_tile(position, stop, query, limit, span, head_layer, SHAPE, TILES, True)
        whole = merge(whole, span)
    sums, total, top = whole
    if DECODED:
        sums_out, totals, tops = out
        part = (slot * spans + begin // TILES.span) * (KV_HEADS * GROUP) + head
        tl.store(totals + part, total, mask=live)
        tl.store(tops + part, top, mask=live)
        tl.store(sums_out + part[:, None] * HEAD_DIM + dimension[None, :], sums, mask=mask)
    else:
        target, out_stride = out
        at = (row * out_stride + head * HEAD_DIM)[:, None] + dimension[None, :]
        tl.store(target + at, divide(sums, total).to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["spans"])
def join(
    slots: tl.tensor, positions: tl.tensor, parts: tl.tuple, spans: tl.tensor, out: tl.tuple,
    SHAPE: tl.constexpr, SPAN: tl.constexpr,
) -> None:  # fmt: skip
    """Writes out of the decoded rows; grid: (slots, heads / HEADS rounded up)."""
    sums, totals, tops = parts
    target, stride = out
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    QUERY_HEADS: tl.constexpr = SHAPE.kv_heads * SHAPE.group
    slot = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dimension = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    live = head < QUERY_HEADS
    mask = live[:, None] & (dimension < HEAD_DIM)[None, :]
    row = tl.load(slots + slot)
    end = tl.load(positions + row).to(tl.int32) + 1
    whole = nothing(HEADS, HEAD_DIM)
    for begin in range(0, end, SPAN):
        at = (slot * spans + begin // SPAN) * QUERY_HEADS + head
        part = tl.load(sums + at[:, None] * HEAD_DIM + dimension[None, :], mask=mask, other=0.0)
        total = tl.load(totals + at, mask=live, other=0.0)
        top = tl.load(tops + at, mask=live, other=UNSEEN)
        whole = merge(whole, (part, total, top))
    result = divide(whole[0], whole[1]).to(target.dtype.element_ty)
    at = (head * HEAD_DIM)[:, None] + dimension[None, :]
    tl.store(target + row * stride + at, result, mask)


def attend(
    tiles: Tiles, qkv: torch.Tensor, out: torch.Tensor, cache: LayerCache, work: "DeviceWork"
) -> None:
    """out [T, heads head_dim] of every row of the step: spans, prefills, join.

    Products and sums are not fused: the compiler would in one kernel and not in another.
    """
    shape = work.shape
    heads = shape.kv_heads * shape.group
    sums = out.new_empty((len(work.slots), work.spans, heads, shape.head_dim), dtype=torch.float32)
    parts = (sums, *out.new_empty((2, *sums.shape[:-1]), dtype=torch.float32))
    lists = (work.members, work.slots, work.positions, work.tables)
    layer = (cache.data[cache.base :], LOG2_E / math.sqrt(shape.head_dim))
    result, given = (out, out.stride(0)), (qkv, qkv.stride(0))
    for items, decoded in ((work.decoded, True), (work.prefill, False)):
        if len(items):
            attention[(len(items) * shape.kv_heads,)](
                *((items, *lists), work.tables.shape[1], work.spans, given, layer),
                *(parts if decoded else result, shape, tiles, decoded),
                num_warps=tiles.warps[decoded],
                num_stages=tiles.stages[decoded],
                enable_fp_fusion=False,
            )
    if len(work.slots):
        join[(len(work.slots), triton.cdiv(heads, HEADS.value))](
            *(work.slots, work.positions, parts, work.spans, result, shape, tiles.span),
            enable_fp_fusion=False,
        )
