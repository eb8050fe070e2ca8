"""Attention of decoded rows: their positions are cut into spans, a program each, joined afterwards.

Splitting (Flash-Decoding, Dao et al. 2023) keeps all multiprocessors busy when there are few rows;
a span has a constant length and spans are merged in order, so a row's bits depend on nothing but
its own keys. A span that siblings share is worked on once for all of them (Hydragen, Juravsky et
al. 2024; cascade inference): the same kernel with members of several sequences. Pointers:

    items int64 [Q, 5]: first member, members, sequence, begin, end of positions (work.py)
    members int64: slots, run after run; slots int64: decoded rows of the batch
    positions int64 [T]; tables int64 [S, width]: block offsets in elements
    qkv [T, (heads + 2 KV_HEADS) HEAD_DIM], rows qkv_stride elements apart; out [T, heads HEAD_DIM]
    data: a layer's blocks, the one at offset 0 first (LayerCache)
    sums float32 [slots, spans, heads, HEAD_DIM]; totals, tops float32 [slots, spans, heads]
"""

import triton
import triton.language as tl

from workbench.kernels.triton.spans import UNSEEN, attend_span, divide, load_queries, merge

HEADS = tl.constexpr(4)  # that one program of `join` takes


@triton.jit
def one_span(
    number: tl.tensor,  # of the program: item * KV_HEADS + key-value head
    items: tl.tensor,  # int64 [Q, 5]: first member, members, sequence, begin, end
    members: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    tables: tl.tensor,
    width: tl.tensor,
    qkv: tl.tensor,
    qkv_stride: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    sums_out: tl.tensor,
    totals: tl.tensor,
    tops: tl.tensor,
    spans: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMENSIONS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    BY_POSITION: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Writes sums, totals and tops of one span's members, for one group of heads."""
    item, kv_head = items + number // KV_HEADS * 5, number % KV_HEADS
    first, rows = tl.load(item), tl.load(item + 1)
    table = tables + tl.load(item + 2) * width
    begin, end = tl.load(item + 3).to(tl.int32), tl.load(item + 4).to(tl.int32)
    lane = tl.arange(0, LANES)
    live = lane < rows * GROUP
    slot = tl.load(members + first + lane // GROUP, mask=live, other=0)
    row = tl.load(slots + slot, mask=live, other=0)
    limit = tl.load(positions + row, mask=live, other=-1).to(tl.int32)
    query = load_queries(qkv, qkv_stride, row, live, kv_head, GROUP, HEAD_DIM, DIMENSIONS, LANES)
    keys = data + kv_head * (HEAD_DIM * BLOCK_SIZE)
    values = keys + KV_HEADS * HEAD_DIM * BLOCK_SIZE
    sums, total, top = attend_span(
        query, limit, begin, end, keys, values, table, scale,
        BLOCK_SIZE, HEAD_DIM, DIMENSIONS, LANES, TILE, BY_POSITION, ALIGNED,
    )  # fmt: skip
    head = kv_head * GROUP + lane % GROUP
    at = (slot * spans + begin // SPAN) * (KV_HEADS * GROUP) + head
    tl.store(totals + at, total, mask=live)
    tl.store(tops + at, top, mask=live)
    dimension = tl.arange(0, DIMENSIONS)
    mask = live[:, None] & (dimension < HEAD_DIM)[None, :]
    tl.store(sums_out + at[:, None] * HEAD_DIM + dimension[None, :], sums, mask=mask)


@triton.jit(do_not_specialize=["width", "spans"])
def spans_of(
    items: tl.tensor,
    members: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    tables: tl.tensor,
    width: tl.tensor,
    qkv: tl.tensor,
    qkv_stride: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    sums: tl.tensor,
    totals: tl.tensor,
    tops: tl.tensor,
    spans: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMENSIONS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    BY_POSITION: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Spans of decoded rows, own or shared; grid: Q * KV_HEADS."""
    one_span(
        tl.program_id(0), items, members, slots, positions, tables, width, qkv, qkv_stride,
        data, scale, sums, totals, tops, spans, KV_HEADS, GROUP, HEAD_DIM, DIMENSIONS,
        BLOCK_SIZE, LANES, TILE, SPAN, BY_POSITION, ALIGNED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["spans"])
def join(
    slots: tl.tensor,
    positions: tl.tensor,
    sums: tl.tensor,
    totals: tl.tensor,
    tops: tl.tensor,
    spans: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMENSIONS: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
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
