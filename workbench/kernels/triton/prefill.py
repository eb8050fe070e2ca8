"""Causal attention of rows that are prefilled: all sequences of a step in one launch.

program = (tile of one sequence's rows, key-value head): all positions up to the tile's last row's,
in order. With JOINED they are summed span by span and the spans merged, as a decode does it: a row
then has the same bits by either. Pointers, for T rows of S sequences, heads = KV_HEADS * GROUP:

    items int64 [P, 4]: first row, rows, sequence, end of positions (work.py)
    positions int64 [T]; tables int64 [S, width]: block offsets in elements
    qkv [T, (heads + 2 KV_HEADS) HEAD_DIM], rows qkv_stride elements apart
    out [T, heads HEAD_DIM], rows out_stride elements apart
    data: a layer's blocks, the one at offset 0 first (LayerCache)
"""

import triton
import triton.language as tl

from workbench.kernels.triton.spans import UNSEEN, attend_span, divide, load_queries, merge


@triton.jit
def prefill_tile(
    number: tl.tensor,  # of the program: item * KV_HEADS + key-value head
    items: tl.tensor,  # int64 [P, 4]: first row, rows, sequence, end
    positions: tl.tensor,
    tables: tl.tensor,
    width: tl.tensor,
    qkv: tl.tensor,
    qkv_stride: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,  # of scores, in units of log2
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMENSIONS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    JOINED: tl.constexpr,
    BY_POSITION: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Writes out of one tile's rows, for one key-value head's group of heads."""
    item, kv_head = items + number // KV_HEADS * 4, number % KV_HEADS
    first, rows = tl.load(item), tl.load(item + 1)
    table = tables + tl.load(item + 2) * width
    end = tl.load(item + 3).to(tl.int32)
    lane = tl.arange(0, LANES)
    live = lane < rows * GROUP
    row = first + lane // GROUP
    limit = tl.load(positions + row, mask=live, other=-1).to(tl.int32)
    query = load_queries(qkv, qkv_stride, row, live, kv_head, GROUP, HEAD_DIM, DIMENSIONS, LANES)
    keys = data + kv_head * (HEAD_DIM * BLOCK_SIZE)
    values = keys + KV_HEADS * HEAD_DIM * BLOCK_SIZE
    if JOINED:
        sums = tl.zeros([LANES, DIMENSIONS], tl.float32)
        total = tl.zeros([LANES], tl.float32)
        top = tl.full([LANES], UNSEEN, tl.float32)
        for begin in range(0, end, SPAN):
            stop = tl.minimum(begin + SPAN, end)
            sums_2, total_2, top_2 = attend_span(
                query, limit, begin, stop, keys, values, table, scale,
                BLOCK_SIZE, HEAD_DIM, DIMENSIONS, LANES, TILE, BY_POSITION, ALIGNED,
            )  # fmt: skip
            sums, total, top = merge(sums, total, top, sums_2, total_2, top_2)
    else:
        sums, total, top = attend_span(
            query, limit, 0, end, keys, values, table, scale,
            BLOCK_SIZE, HEAD_DIM, DIMENSIONS, LANES, TILE, BY_POSITION, ALIGNED,
        )  # fmt: skip
    dimension = tl.arange(0, DIMENSIONS)
    head = kv_head * GROUP + lane % GROUP
    at = (row * out_stride + head * HEAD_DIM)[:, None] + dimension[None, :]
    mask = live[:, None] & (dimension < HEAD_DIM)[None, :]
    tl.store(out + at, divide(sums, total).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["width"])
def prefill(
    items: tl.tensor,
    positions: tl.tensor,
    tables: tl.tensor,
    width: tl.tensor,
    qkv: tl.tensor,
    qkv_stride: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMENSIONS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    JOINED: tl.constexpr,
    BY_POSITION: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Causal attention of rows that are prefilled; grid: P * KV_HEADS."""
    prefill_tile(
        tl.program_id(0), items, positions, tables, width, qkv, qkv_stride, out, out_stride,
        data, scale, KV_HEADS, GROUP, HEAD_DIM, DIMENSIONS, BLOCK_SIZE, LANES, TILE, SPAN,
        JOINED, BY_POSITION, ALIGNED,
    )  # fmt: skip
