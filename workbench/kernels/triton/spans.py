"""Attention of some lanes over some positions: what every attention kernel here is made of.

A *lane* is one query row of one head; a program works on LANES of them that share a key-value
head, rows side by side, so that keys and values are read once for all heads of the group (GQA
packing):

    lane i = row i // GROUP of the program's rows, head i % GROUP of the key-value head's group

Positions are taken in tiles of a constant number, in order, whatever the block size (online
softmax, Milakov and Gimelshein 2018). Sums over one run of positions are a *span*: `sums` are not
yet divided by `total`, and are relative to `top`, the largest score so far in units of log2.
`merge` joins two. A lane that sees nothing has total 0, and a key that it does not see adds exactly
nothing, whatever bytes lie there. All addresses are int64: a cache passes 2^31 elements.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
UNSEEN = tl.constexpr(-1.0e30)  # finite, so that the difference of two is no NaN


@triton.jit
def load_queries(
    qkv: tl.tensor,  # pointer to [T, (heads + 2 kv_heads) HEAD_DIM]
    qkv_stride: tl.tensor,  # elements from one row to the next
    row: tl.tensor,  # int64 [LANES]
    live: tl.tensor,  # [LANES]: the others are padding
    kv_head: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMENSIONS: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    LANES: tl.constexpr,
) -> tl.tensor:
    """The lanes' queries [LANES, DIMENSIONS], zeros where there is none."""
    head = kv_head * GROUP + tl.arange(0, LANES) % GROUP
    dimension = tl.arange(0, DIMENSIONS)
    at = (row * qkv_stride + head * HEAD_DIM)[:, None] + dimension[None, :]
    return tl.load(qkv + at, mask=live[:, None] & (dimension < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _add_tile(
    start: tl.tensor,  # positions start .. start + TILE - 1, of which those before `end` are there
    end: tl.tensor,
    query: tl.tensor,
    limit: tl.tensor,
    sums: tl.tensor,
    total: tl.tensor,
    top: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    scale: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMENSIONS: tl.constexpr,
    TILE: tl.constexpr,
    BY_POSITION: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,  # else every lane sees every position of the tile
) -> tl.tuple:
    """(sums, total, top) with one tile more."""
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
    if BY_POSITION:
        key = tl.trans(tl.load(keys + at, mask=read, other=0.0))
    else:
        key_at = (offset + slot)[None, :] + (dimension * BLOCK_SIZE)[:, None]
        key = tl.load(keys + key_at, mask=tl.trans(read), other=0.0)
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
    query: tl.tensor,  # [LANES, DIMENSIONS]
    limit: tl.tensor,  # int32 [LANES]: the last position a lane sees; -1 for padding
    begin: tl.tensor,  # positions begin .. end - 1; begin is a multiple of TILE
    end: tl.tensor,
    keys: tl.tensor,  # pointer to this head's keys in a block at offset 0
    values: tl.tensor,  # pointer to this head's values in a block at offset 0
    table: tl.tensor,  # pointer to the sequence's block offsets, int64
    scale: tl.tensor,  # of scores, in units of log2
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMENSIONS: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    BY_POSITION: tl.constexpr,  # a head's keys are [BLOCK_SIZE, HEAD_DIM], not the transpose
    ALIGNED: tl.constexpr,  # block offsets are multiples of 16 elements
) -> tl.tuple:
    """(sums float32 [LANES, DIMENSIONS], total [LANES], top [LANES]) of one span.

    Tiles that all lanes see whole come first, and need no masks; it is the same arithmetic.
    """
    sums = tl.zeros([LANES, DIMENSIONS], tl.float32)
    total = tl.zeros([LANES], tl.float32)
    top = tl.full([LANES], UNSEEN, tl.float32)
    seen_by_all = tl.min(tl.where(limit < 0, end, limit + 1), 0)
    middle = tl.maximum(begin, tl.minimum(seen_by_all, end) // TILE * TILE)
    for start in range(begin, middle, TILE):
        sums, total, top = _add_tile(
            start, end, query, limit, sums, total, top, keys, values, table, scale,
            BLOCK_SIZE, HEAD_DIM, DIMENSIONS, TILE, BY_POSITION, ALIGNED, False,
        )  # fmt: skip
    for start in range(middle, end, TILE):
        sums, total, top = _add_tile(
            start, end, query, limit, sums, total, top, keys, values, table, scale,
            BLOCK_SIZE, HEAD_DIM, DIMENSIONS, TILE, BY_POSITION, ALIGNED, True,
        )  # fmt: skip
    return sums, total, top


@triton.jit
def merge(
    sums: tl.tensor,
    total: tl.tensor,
    top: tl.tensor,
    sums_2: tl.tensor,
    total_2: tl.tensor,
    top_2: tl.tensor,
) -> tl.tuple:
    """One span followed by another; sums [..., DIMENSIONS], the others without that axis."""
    highest = tl.maximum(top, top_2)
    first, second = tl.exp2(top - highest), tl.exp2(top_2 - highest)
    sums = sums * first[:, None] + sums_2 * second[:, None]
    return sums, total * first + total_2 * second, highest


@triton.jit
def divide(sums: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The attention of lanes; 0 for one that saw nothing."""
    return sums / tl.where(total > 0.0, total, 1.0)[:, None]
