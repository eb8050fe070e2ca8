"""Attention of a single row: what decoding spends its time on, read at the speed of memory.

The sums are those of `bundles`, element by element and in the same order, so the results are
the same bits; only what lies side by side in a register differs. There sixteen lanes are sixteen
queries, of which one row has but a few; here they are sixteen keys, then sixteen dimensions.

    scores[head][position], a row of `scores` for each query head of one key-value head
    sums[head][dimension]
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from workbench.kernels.lane_tiles import ROW_DIMENSIONS, ROW_KEYS, add_row_values, score_row
from workbench.kernels.lanes import (
    WIDTH,
    div,
    exponential,
    first,
    largest,
    load,
    mul,
    same,
    store,
    sub,
)

TILE = 32  # as in bundles
TOP, TOTAL = 0, 1  # of what a head has added up before; sums of values follow
KEYS = ROW_KEYS * WIDTH  # scored at a time
DIMENSIONS = ROW_DIMENSIONS * WIDTH  # summed at a time
_UNSEEN = np.float32(-1e30)
_FLOAT, _ADDRESS = 4, 8  # bytes
_inlined = njit(error_model="numpy", inline="always")


@_inlined
def takes_row(block_size: int, head_dim: int) -> bool:
    """Whether keys and dimensions come in whole registers."""
    return block_size % WIDTH == 0 and head_dim % DIMENSIONS == 0


@_inlined
def _weigh(scores: Any, start: int, top: Any) -> Any:
    """A tile's scores become weights; the new largest score so far, in all lanes."""
    highest = largest(load(scores, start), load(scores, start + WIDTH))
    store(scores, len(scores) - WIDTH, highest)
    value = scores[len(scores) - 1]
    for i in range(2, WIDTH + 1):
        value = max(value, scores[len(scores) - i])
    top = largest(top, same(value))
    for i in range(start, start + TILE, WIDTH):
        store(scores, i, exponential(sub(load(scores, i), top)))
    return top


@_inlined
def _total(weights: Any, begin: int, end: int, sum_so_far: Any, shrink: Any) -> Any:
    """The weights added up, one after the other, in all lanes."""
    value = first(mul(sum_so_far, shrink))
    for j in range(begin, end):
        value += weights[j]
    return same(value)


@_inlined
def _attend_two(
    values: Any, start: int, count: int, a: Any, b: Any, out_a: Any, out_b: Any, seen: Any
) -> None:
    """Softmax of two heads' scores and their sums of values, tile by tile from `start`.

    seen: of each head the largest score and the weights added up before; out: sums before.
    """
    top_a, top_b = same(seen[0, TOP]), same(seen[1, TOP])
    weights_a, weights_b = same(seen[0, TOTAL]), same(seen[1, TOTAL])
    for begin in range(start, count, TILE):
        end = min(begin + TILE, count)
        before_a, before_b = top_a, top_b
        top_a, top_b = _weigh(a, begin, top_a), _weigh(b, begin, top_b)
        shrink_a, shrink_b = exponential(sub(before_a, top_a)), exponential(sub(before_b, top_b))
        weights_a = _total(a, begin, end, weights_a, shrink_a)
        weights_b = _total(b, begin, end, weights_b, shrink_b)
        here, skipped = values.ctypes.data + begin * _ADDRESS, begin * _FLOAT
        one, other = a.ctypes.data + skipped, b.ctypes.data + skipped
        for at in range(0, len(out_a) * _FLOAT, DIMENSIONS * _FLOAT):
            to_a, to_b = out_a.ctypes.data + at, out_b.ctypes.data + at
            add_row_values(here, at, end - begin, one, other, shrink_a, shrink_b, to_a, to_b)
    for d in range(0, len(out_a), WIDTH):
        store(out_a, d, div(load(out_a, d), weights_a))
        store(out_b, d, div(load(out_b, d), weights_b))


@_inlined
def row_room(longest: int, head_dim: int) -> Any:
    """What `attend_row` works in, for up to `longest` positions."""
    return (
        np.empty((2, longest + KEYS + TILE + WIDTH), np.float32),  # scores
        np.empty((2, head_dim), np.float32),  # queries
        np.empty((2, head_dim), np.float32),  # sums of values
        np.empty((2, 2), np.float32),  # largest scores, weights added up
    )


@_inlined
def attend_row(
    keys: Any,
    values: Any,
    stride: int,
    start: int,
    count: int,
    query: Any,
    out: Any,
    seen: Any,
    room: Any,
) -> None:
    """One row's heads [group, head_dim] over positions start .. count - 1 of their keys and values.

    keys[i]: address of sixteen keys' first dimension, `stride` bytes before the next; values[j]: of
    position j's value. start: of a tile; seen [group, 2 + head_dim]: what the heads added up
    before it. room: of `row_room`.
    """
    scores, queries, sums, before = room
    group, head_dim = query.shape
    scale = np.float32(1.0 / math.sqrt(head_dim))
    for head in range(0, group, 2):
        for which in range(2):
            mine = min(head + which, group - 1)
            for d in range(head_dim):
                queries[which, d] = query[mine, d] * scale
                sums[which, d] = seen[mine, 2 + d]
            before[which, TOP], before[which, TOTAL] = seen[mine, TOP], seen[mine, TOTAL]
            query_at, scores_at = queries[which].ctypes.data, scores[which].ctypes.data
            for at in range(start // WIDTH, (count + WIDTH - 1) // WIDTH, ROW_KEYS):
                some, to = keys.ctypes.data + at * _ADDRESS, scores_at + at * WIDTH * _FLOAT
                score_row(some, stride, query_at, head_dim, to)
            scores[which, count : count + TILE] = _UNSEEN
        _attend_two(values, start, count, scores[0], scores[1], sums[0], sums[1], before)
        out[head] = sums[0]
        if head + 1 < group:
            out[head + 1] = sums[1]
