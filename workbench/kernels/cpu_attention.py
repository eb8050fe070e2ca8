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
import torch
from numba import njit

from workbench.kernels.addresses import integers, matrix, numbers
from workbench.kernels.blocks import locate, locate_sixteens
from workbench.kernels.context import ForwardContext, LayerCache
from workbench.kernels.cpu_decode import attend_row, row_room, takes_row
from workbench.kernels.lanes import (
    WIDTH,
    add,
    div,
    exponential,
    fma,
    largest,
    load,
    mul,
    same,
    spread,
    store,
    sub,
    where_at_most,
)
from workbench.kernels.team import Team, kernel, take

TILE = 32  # positions between two rescalings; part of the arithmetic: changing it changes results
_UNSEEN = np.float32(-1e30)
_ZERO = np.float32(0.0)
_UNBOUNDED = 1 << 60
_inlined = njit(error_model="numpy", inline="always")


@_inlined
def _score(data: Any, address: Any, stride: int, count: int, queries: Any, scores: Any) -> None:
    """scores[j] = key j . query, eight keys at a time, dimensions added in ascending order."""
    head_dim = len(queries) // WIDTH
    for j in range(0, count, 8):
        a0, a1, a2, a3 = address[j], address[j + 1], address[j + 2], address[j + 3]
        a4, a5, a6, a7 = address[j + 4], address[j + 5], address[j + 6], address[j + 7]
        s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = same(_ZERO)
        for d in range(head_dim):
            query, at = load(queries, d * WIDTH), d * stride
            s0 = fma(spread(data, a0 + at), query, s0)
            s1 = fma(spread(data, a1 + at), query, s1)
            s2 = fma(spread(data, a2 + at), query, s2)
            s3 = fma(spread(data, a3 + at), query, s3)
            s4 = fma(spread(data, a4 + at), query, s4)
            s5 = fma(spread(data, a5 + at), query, s5)
            s6 = fma(spread(data, a6 + at), query, s6)
            s7 = fma(spread(data, a7 + at), query, s7)
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
def _add_values(data: Any, address: Any, count: int, scores: Any, shrink: Any, sums: Any) -> None:
    """sums = sums * shrink + weights . values; positions are added in ascending order."""
    for d in range(0, len(sums) // WIDTH, 8):
        at = d * WIDTH
        s0, s1 = mul(load(sums, at), shrink), mul(load(sums, at + WIDTH), shrink)
        s2, s3 = mul(load(sums, at + 2 * WIDTH), shrink), mul(load(sums, at + 3 * WIDTH), shrink)
        s4, s5 = mul(load(sums, at + 4 * WIDTH), shrink), mul(load(sums, at + 5 * WIDTH), shrink)
        s6, s7 = mul(load(sums, at + 6 * WIDTH), shrink), mul(load(sums, at + 7 * WIDTH), shrink)
        for j in range(count):
            weight = load(scores, j * WIDTH)
            value = address[j] + d
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
    data: Any,
    keys: Any,
    values: Any,
    stride: int,
    queries: Any,
    limit: Any,
    scores: Any,
    sums: Any,
) -> None:
    """Sixteen lanes over positions 0 .. limit[lane]; the last lane sees most. Fills `sums`."""
    sums[:] = _ZERO
    top, weights = same(_UNSEEN), same(_ZERO)
    end = int(limit[WIDTH - 1]) + 1
    for first in range(0, end, TILE):
        count = min(TILE, end - first)
        _score(data, keys[first:], stride, count, queries, scores)
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
        _add_values(data, values[first:], count, scores, shrink, sums)
    for d in range(0, len(sums), WIDTH):
        store(sums, d, div(load(sums, d), weights))


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


@_inlined
def _attend_piece(
    qkv: Any,
    out: Any,
    data: Any,
    base: int,
    shape: Any,
    positions: Any,
    table: Any,
    begin: int,
    end: int,
    head: int,
    room: Any,
) -> None:
    """One key-value head's queries of rows begin .. end - 1, all of one sequence."""
    queries, sums, scores, limit, rows, heads, keys, values, row_room = room
    block_size, kv_heads, head_dim = shape
    group = out.shape[1] // head_dim // kv_heads
    count = positions[end - 1] + 1
    locate(count, base, shape, head, table, keys, values)
    if end - begin == 1 and takes_row(block_size, head_dim):
        locate_sixteens(count, base, shape, head, table, keys)
        query = qkv[begin, : out.shape[1]].reshape(-1, head_dim)
        target = out[begin].reshape(-1, head_dim)
        mine = slice(head * group, (head + 1) * group)
        attend_row(data, keys, values, block_size, count, query[mine], target[mine], row_room)
        return
    lanes = (end - begin) * group
    for first in range(0, lanes, WIDTH):
        _place(first, lanes, begin, head, group, positions, rows, heads, limit)
        _load_queries(qkv, rows, heads, queries)
        _attend_lanes(data, keys, values, block_size, queries, limit, scores, sums)
        _store_sums(sums, rows, heads, out)


@kernel
def _attend(arguments: int, counter: int) -> None:
    """Kernels.attend; piece i is one key-value head of one run of rows (ForwardContext.pieces)."""
    a = integers(arguments, 16)
    tokens, head_dim, kv_heads = a[0], a[1], a[2]
    qkv, out = matrix(a[3], tokens, a[4]), matrix(a[5], tokens, a[6])
    data, base, shape = numbers(a[7], _UNBOUNDED), a[8], (a[9], kv_heads, head_dim)
    positions, sequence = integers(a[10], tokens), integers(a[11], tokens)
    blocks, width, pieces = a[12], a[13], a[14]
    bounds, longest = integers(a[15], pieces + 1), positions.max() + 1
    room = (
        np.empty(head_dim * WIDTH, np.float32),
        np.empty(head_dim * WIDTH, np.float32),
        np.empty(TILE * WIDTH, np.float32),
        np.empty(WIDTH, np.float32),
        np.empty(WIDTH, np.int64),
        np.empty(WIDTH, np.int64),
        np.empty(longest + 8, np.int64),
        np.empty(longest + 8, np.int64),
        row_room(longest, head_dim),
    )
    number = take(counter)
    while number < pieces * kv_heads:
        piece, head = number // kv_heads, number % kv_heads
        begin, end = bounds[piece], bounds[piece + 1]
        table = integers(blocks + sequence[begin] * width * 8, width)
        _attend_piece(qkv, out, data, base, shape, positions, table, begin, end, head, room)
        number = take(counter)


def attend(
    team: Team, qkv: torch.Tensor, out: torch.Tensor, cache: LayerCache, context: ForwardContext
) -> None:
    """`Kernels.attend` by a team."""
    pieces, table = context.pieces, context.block_offsets
    team.run(
        _attend.address,
        *(len(qkv), cache.head_dim, cache.kv_heads),
        *(qkv.data_ptr(), qkv.shape[1], out.data_ptr(), out.shape[1]),
        *(cache.data.data_ptr(), cache.base, cache.block_size),
        *(context.positions.ctypes.data, context.sequence.ctypes.data),
        *(table.ctypes.data, table.shape[1], len(pieces) - 1, pieces.ctypes.data),
    )
