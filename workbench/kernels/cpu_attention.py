"""Attention over blocks on a CPU: keys and values are read where they lie, nothing is gathered.

A *lane* is one query row of one head; the lanes that share a key-value head are worked on side by side, so a vector
instruction handles 8 or 16 of them, and each lane adds up its keys alone, one after the other in position order,
rescaled at fixed multiples of 32 positions (online softmax, Milakov and Gimelshein 2018). A lane's result therefore
depends on no other lane, and on no block size, chunk or batch: a masked key adds exactly nothing.

    lane = (row - first row) * group + (head - first head)        group = heads / kv_heads
    queries[dimension, lane]   scores[position in tile, lane]   sums[dimension, lane]
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types

from workbench.kernels.compiled import compiled, exponential, fma

TILE = 32  # positions between two rescalings; part of the arithmetic: changing it changes results
FEW_LANES, MANY_LANES = 8, 64  # lanes side by side: a choice of speed alone
_UNSEEN = np.float32(-1e30)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)

_MATRIX, _VECTOR = types.float32[:, ::1], types.float32[::1]
_SIGNATURE = types.void(
    *(_MATRIX, _MATRIX),  # qkv [T, width], out [T, heads * head_dim]
    *(_VECTOR, types.int64, types.int64, types.int64, types.int64),  # LayerCache, field by field
    *(
        types.int64[::1],
        types.int32[::1],
        types.int64[:, ::1],
    ),  # positions, query_start, block_offsets
)
_inlined = njit(
    error_model="numpy", forceinline=True
)  # so that `lanes` is a constant where it is used


@_inlined
def _score(lanes: int, data: Any, address: Any, count: int, queries: Any, scores: Any) -> None:
    """scores[j, lane] = key j . query; dimensions are added in ascending order, eight a pass."""
    head_dim = queries.shape[0]
    for j in range(count):
        at = address[j]
        for r in range(lanes):
            scores[j, r] = _ZERO
        for d in range(0, head_dim, 8):
            k0, k1, k2, k3 = data[at + d], data[at + d + 1], data[at + d + 2], data[at + d + 3]
            k4, k5, k6, k7 = data[at + d + 4], data[at + d + 5], data[at + d + 6], data[at + d + 7]
            for r in range(lanes):
                s = fma(k0, queries[d, r], scores[j, r])
                s = fma(k1, queries[d + 1, r], s)
                s = fma(k2, queries[d + 2, r], s)
                s = fma(k3, queries[d + 3, r], s)
                s = fma(k4, queries[d + 4, r], s)
                s = fma(k5, queries[d + 5, r], s)
                s = fma(k6, queries[d + 6, r], s)
                scores[j, r] = fma(k7, queries[d + 7, r], s)


@_inlined
def _hide(lanes: int, first: int, count: int, limit: Any, scores: Any) -> None:
    """Scores of keys past a lane's own position become so small that their weight is exactly 0."""
    for j in range(count):
        for r in range(lanes):
            if first + j > limit[r]:
                scores[j, r] = _UNSEEN


@_inlined
def _weigh(lanes: int, count: int, scores: Any, top: Any, total: Any, shrink: Any) -> None:
    """Scores become weights exp(score - top); `shrink` is what sums over earlier tiles must be scaled by."""
    for r in range(lanes):
        shrink[r] = top[r]
    for j in range(count):
        for r in range(lanes):
            top[r] = max(top[r], scores[j, r])
    for r in range(lanes):
        shrink[r] = exponential(shrink[r] - top[r])
        total[r] *= shrink[r]
    for j in range(count):
        for r in range(lanes):
            scores[j, r] = exponential(scores[j, r] - top[r])
    for j in range(count):
        for r in range(lanes):
            total[r] += scores[j, r]


@_inlined
def _add_values(
    lanes: int, data: Any, address: Any, count: int, scores: Any, shrink: Any, sums: Any
) -> None:
    """sums[d, lane] = sums * shrink + weights . values; positions are added in ascending order, eight a pass."""
    head_dim = sums.shape[0]
    for d in range(head_dim):
        for r in range(lanes):
            sums[d, r] *= shrink[r]
    for j in range(0, count - 7, 8):
        a0, a1, a2, a3 = address[j], address[j + 1], address[j + 2], address[j + 3]
        a4, a5, a6, a7 = address[j + 4], address[j + 5], address[j + 6], address[j + 7]
        for d in range(head_dim):
            v0, v1, v2, v3 = data[a0 + d], data[a1 + d], data[a2 + d], data[a3 + d]
            v4, v5, v6, v7 = data[a4 + d], data[a5 + d], data[a6 + d], data[a7 + d]
            for r in range(lanes):
                s = fma(v0, scores[j, r], sums[d, r])
                s = fma(v1, scores[j + 1, r], s)
                s = fma(v2, scores[j + 2, r], s)
                s = fma(v3, scores[j + 3, r], s)
                s = fma(v4, scores[j + 4, r], s)
                s = fma(v5, scores[j + 5, r], s)
                s = fma(v6, scores[j + 6, r], s)
                sums[d, r] = fma(v7, scores[j + 7, r], s)
    for j in range(count - count % 8, count):
        for d in range(head_dim):
            value = data[address[j] + d]
            for r in range(lanes):
                sums[d, r] = fma(value, scores[j, r], sums[d, r])


@_inlined
def _locate(
    first: int, count: int, base: int, block_size: int, width: int, table: Any, address: Any
) -> None:
    """Element addresses of the keys of positions first .. first + count - 1 of one head."""
    for j in range(count):
        p = first + j
        address[j] = base + table[p // block_size] + p % block_size * width


@_inlined
def _attend(
    lanes: int,
    qkv: Any,
    out: Any,
    data: Any,
    base: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    positions: Any,
    query_start: Any,
    block_offsets: Any,
) -> None:
    group = out.shape[1] // head_dim // kv_heads
    width = kv_heads * head_dim
    scale = np.float32(1.0 / math.sqrt(head_dim))
    queries, sums = np.empty((head_dim, lanes), np.float32), np.empty((head_dim, lanes), np.float32)
    scores, address = np.empty((TILE, lanes), np.float32), np.empty(TILE, np.int64)
    top, total, shrink = (
        np.empty(lanes, np.float32),
        np.empty(lanes, np.float32),
        np.empty(lanes, np.float32),
    )
    limit = np.zeros(lanes, np.int32)  # the last position each lane sees
    for s in range(block_offsets.shape[0]):
        all_lanes = (query_start[s + 1] - query_start[s]) * group
        for item in range(kv_heads * ((all_lanes + lanes - 1) // lanes)):
            head, first = item % kv_heads, item // kv_heads * lanes
            used = min(lanes, all_lanes - first)
            queries[:, :] = _ZERO
            for r in range(used):
                row, column = (
                    query_start[s] + (first + r) // group,
                    (head * group + (first + r) % group) * head_dim,
                )
                limit[r] = positions[row]
                for d in range(head_dim):
                    queries[d, r] = qkv[row, column + d] * scale
            limit[used:] = limit[used - 1]
            sums[:, :] = _ZERO
            top[:] = _UNSEEN
            total[:] = _ZERO
            end = limit[used - 1] + 1
            for tile in range(0, end, TILE):
                count = min(TILE, end - tile)
                _locate(
                    tile,
                    count,
                    base + head * head_dim,
                    block_size,
                    width,
                    block_offsets[s],
                    address,
                )
                _score(lanes, data, address, count, queries, scores)
                if tile + count - 1 > limit[0]:
                    _hide(lanes, tile, count, limit, scores)
                _weigh(lanes, count, scores, top, total, shrink)
                address += block_size * width  # from keys to values
                _add_values(lanes, data, address, count, scores, shrink, sums)
            for r in range(used):
                row, column = (
                    query_start[s] + (first + r) // group,
                    (head * group + (first + r) % group) * head_dim,
                )
                for d in range(head_dim):
                    out[row, column + d] = sums[d, r] / total[r]


@compiled(_SIGNATURE, nogil=True)
def attend_few(
    qkv: Any,
    out: Any,
    data: Any,
    base: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    positions: Any,
    query_start: Any,
    block_offsets: Any,
) -> None:
    """Attention where a sequence has few query rows, as in decoding."""
    _attend(
        FEW_LANES,
        qkv,
        out,
        data,
        base,
        block_size,
        kv_heads,
        head_dim,
        positions,
        query_start,
        block_offsets,
    )


@compiled(_SIGNATURE, nogil=True)
def attend_many(
    qkv: Any,
    out: Any,
    data: Any,
    base: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    positions: Any,
    query_start: Any,
    block_offsets: Any,
) -> None:
    """Attention where a sequence has many query rows, as in prefill."""
    _attend(
        MANY_LANES,
        qkv,
        out,
        data,
        base,
        block_size,
        kv_heads,
        head_dim,
        positions,
        query_start,
        block_offsets,
    )
