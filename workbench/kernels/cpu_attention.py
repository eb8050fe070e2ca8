"""Attention over blocks on a CPU: keys and values are read where they lie, nothing is gathered.

A *lane* is one query row of one head; sixteen lanes that share a key-value head are worked on side
by side. Each adds up its keys alone, one after the other in position order, rescaled at fixed
multiples of 32 positions (online softmax, Milakov and Gimelshein 2018): a lane's result depends on
no other lane, and on no block size, chunk or batch. A key that a lane does not see has weight
exactly 0 and so adds exactly nothing.

    lane = (row - first row) * group + (head - first head)        group = heads / kv_heads
    queries[dimension * 16 + lane]
    scores[position in tile * 16 + lane]
    sums[dimension * 16 + lane]
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types

from workbench.kernels.compiled import MATRIX, VECTOR, compiled
from workbench.kernels.lanes import (
    WIDTH,
    add,
    div,
    exponential,
    fma,
    largest,
    load,
    mul,
    prefetch,
    same,
    spread,
    store,
    sub,
    where_at_most,
)

TILE = 32  # positions between two rescalings; part of the arithmetic: changing it changes results
_UNSEEN = np.float32(-1e30)
_ZERO = np.float32(0.0)
_inlined = njit(error_model="numpy", inline="always")


@_inlined
def _score(data: Any, address: Any, count: int, queries: Any, scores: Any) -> None:
    """scores[j] = key j . query, eight keys at a time, dimensions added in ascending order."""
    head_dim = len(queries) // WIDTH
    for j in range(0, count, 8):
        a0, a1, a2, a3 = address[j], address[j + 1], address[j + 2], address[j + 3]
        a4, a5, a6, a7 = address[j + 4], address[j + 5], address[j + 6], address[j + 7]
        s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = same(_ZERO)
        for d in range(head_dim):
            query = load(queries, d * WIDTH)
            s0 = fma(spread(data, a0 + d), query, s0)
            s1 = fma(spread(data, a1 + d), query, s1)
            s2 = fma(spread(data, a2 + d), query, s2)
            s3 = fma(spread(data, a3 + d), query, s3)
            s4 = fma(spread(data, a4 + d), query, s4)
            s5 = fma(spread(data, a5 + d), query, s5)
            s6 = fma(spread(data, a6 + d), query, s6)
            s7 = fma(spread(data, a7 + d), query, s7)
        at = j * WIDTH
        store(scores, at, s0)
        store(scores, at + WIDTH, s1)
        store(scores, at + 2 * WIDTH, s2)
        store(scores, at + 3 * WIDTH, s3)
        store(scores, at + 4 * WIDTH, s4)
        store(scores, at + 5 * WIDTH, s5)
        store(scores, at + 6 * WIDTH, s6)
        store(scores, at + 7 * WIDTH, s7)


@_inlined
def _hide(first: int, count: int, limit: Any, scores: Any) -> None:
    """Scores of keys past a lane's own position become so small that their weight is exactly 0."""
    last = load(limit, 0)
    for j in range(count):
        position = same(np.float32(first + j))
        score = load(scores, j * WIDTH)
        store(scores, j * WIDTH, where_at_most(position, last, score, same(_UNSEEN)))


@_inlined
def _add_values(
    data: Any, address: Any, shift: int, count: int, scores: Any, shrink: Any, sums: Any
) -> None:
    """sums = sums * shrink + weights . values; positions are added in ascending order."""
    for d in range(0, len(sums) // WIDTH, 8):
        at = d * WIDTH
        s0, s1 = mul(load(sums, at), shrink), mul(load(sums, at + WIDTH), shrink)
        s2, s3 = mul(load(sums, at + 2 * WIDTH), shrink), mul(load(sums, at + 3 * WIDTH), shrink)
        s4, s5 = mul(load(sums, at + 4 * WIDTH), shrink), mul(load(sums, at + 5 * WIDTH), shrink)
        s6, s7 = mul(load(sums, at + 6 * WIDTH), shrink), mul(load(sums, at + 7 * WIDTH), shrink)
        for j in range(count):
            weight = load(scores, j * WIDTH)
            value = address[j] + shift + d
            s0 = fma(spread(data, value), weight, s0)
            s1 = fma(spread(data, value + 1), weight, s1)
            s2 = fma(spread(data, value + 2), weight, s2)
            s3 = fma(spread(data, value + 3), weight, s3)
            s4 = fma(spread(data, value + 4), weight, s4)
            s5 = fma(spread(data, value + 5), weight, s5)
            s6 = fma(spread(data, value + 6), weight, s6)
            s7 = fma(spread(data, value + 7), weight, s7)
        store(sums, at, s0)
        store(sums, at + WIDTH, s1)
        store(sums, at + 2 * WIDTH, s2)
        store(sums, at + 3 * WIDTH, s3)
        store(sums, at + 4 * WIDTH, s4)
        store(sums, at + 5 * WIDTH, s5)
        store(sums, at + 6 * WIDTH, s6)
        store(sums, at + 7 * WIDTH, s7)


@_inlined
def _attend_lanes(
    data: Any, address: Any, shift: int, queries: Any, limit: Any, scores: Any, sums: Any
) -> None:
    """Sixteen lanes over positions 0 .. limit[lane]; the last lane sees most. Fills `sums`."""
    sums[:] = _ZERO
    top, weights = same(_UNSEEN), same(_ZERO)
    end = int(limit[WIDTH - 1]) + 1
    for first in range(0, end, TILE):
        count = min(TILE, end - first)
        here = address[first:]
        _score(data, here, count, queries, scores)
        if first + count - 1 > limit[0]:
            _hide(first, count, limit, scores)
        before = top
        for j in range(count):
            top = largest(top, load(scores, j * WIDTH))
        shrink = exponential(sub(before, top))
        weights = mul(weights, shrink)
        for j in range(count):
            weight = exponential(sub(load(scores, j * WIDTH), top))
            store(scores, j * WIDTH, weight)
            weights = add(weights, weight)
        _add_values(data, here, shift, count, scores, shrink, sums)
    for d in range(0, len(sums), WIDTH):
        store(sums, d, div(load(sums, d), weights))


@_inlined
def _locate(count: int, base: int, block_size: int, width: int, table: Any, address: Any) -> None:
    """Element addresses of the keys of positions 0 .. count - 1, then seven more of the last."""
    for first in range(0, count, block_size):
        start = base + table[first // block_size] - first * width
        for p in range(first, min(first + block_size, count)):
            address[p] = start + p * width
    for p in range(count, count + 7):  # scores are computed eight keys at a time
        address[p] = address[count - 1]


@_inlined
def _ask_for(data: Any, address: Any, count: int, width: int, to_values: int) -> None:
    """All keys and values are fetched at once; blocks lie too scattered for the processor to see.

    In decoding, where each is read once, this takes a sixth off the time of attention.
    """
    for p in range(count):
        for i in range(0, width, WIDTH):
            prefetch(data, address[p] + i)
            prefetch(data, address[p] + to_values + i)


@_inlined
def _place(
    first: int,
    lanes: int,
    row: int,
    head: int,
    group: int,
    positions: Any,
    rows: Any,
    heads: Any,
    limit: Any,
) -> None:
    """Row, head and position of lanes first .. first + 15; those past the last repeat it."""
    for i in range(WIDTH):
        lane = min(first + i, lanes - 1)
        rows[i], heads[i] = row + lane // group, head * group + lane % group
        limit[i] = positions[rows[i]]


@_inlined
def _load_queries(qkv: Any, rows: Any, heads: Any, queries: Any) -> None:
    """Each lane's query, scaled, as a column of `queries`."""
    head_dim = len(queries) // WIDTH
    scale = np.float32(1.0 / math.sqrt(head_dim))
    for lane in range(WIDTH):
        source, at = qkv[rows[lane]], heads[lane] * head_dim
        for d in range(head_dim):
            queries[d * WIDTH + lane] = source[at + d] * scale


@_inlined
def _store_sums(sums: Any, rows: Any, heads: Any, out: Any) -> None:
    head_dim = len(sums) // WIDTH
    for lane in range(WIDTH):
        target, at = out[rows[lane]], heads[lane] * head_dim
        for d in range(head_dim):
            target[at + d] = sums[d * WIDTH + lane]


@compiled(
    *(MATRIX, MATRIX),  # qkv, out
    *(VECTOR, types.int64, types.int64, types.int64, types.int64),  # LayerCache
    *(types.int64[::1], types.int64[::1], types.int32[::1], types.int64[:, ::1]),  # ForwardContext
    *(types.int64, types.int64),
)
def attend_rows(
    qkv: Any,
    out: Any,
    data: Any,
    base: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    positions: Any,
    sequence: Any,
    query_start: Any,
    block_offsets: Any,
    begin: int,
    end: int,
) -> None:
    """Kernels.attend for rows begin .. end - 1, over LayerCache and ForwardContext by field."""
    group, width = out.shape[1] // head_dim // kv_heads, kv_heads * head_dim
    queries, sums = np.empty(head_dim * WIDTH, np.float32), np.empty(head_dim * WIDTH, np.float32)
    scores, limit = np.empty(TILE * WIDTH, np.float32), np.empty(WIDTH, np.float32)
    rows, heads = np.empty(WIDTH, np.int64), np.empty(WIDTH, np.int64)
    address = np.empty(positions[begin:end].max() + 8, np.int64)
    to_values = block_size * width
    row = begin
    while row < end:
        s = sequence[row]
        stop = min(end, query_start[s + 1])
        count = positions[stop - 1] + 1
        _locate(count, base, block_size, width, block_offsets[s], address)
        if (stop - row) * group <= WIDTH:
            _ask_for(data, address, count, width, to_values)
        for head in range(kv_heads):
            for first in range(0, (stop - row) * group, WIDTH):
                lanes = (stop - row) * group
                _place(first, lanes, row, head, group, positions, rows, heads, limit)
                _load_queries(qkv, rows, heads, queries)
                _attend_lanes(data, address, to_values, queries, limit, scores, sums)
                _store_sums(sums, rows, heads, out)
            address += head_dim
        row = stop
