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

from workbench.kernels.addresses import floats
from workbench.kernels.lanes import (
    WIDTH,
    div,
    exponential,
    first,
    fma,
    largest,
    load,
    mul,
    same,
    spread,
    store,
    sub,
)

TILE = 32  # as in bundles
TOP, TOTAL = 0, 1  # of what a head has added up before; sums of values follow
KEYS = 8 * WIDTH  # scored at a time
DIMENSIONS = 4 * WIDTH  # summed at a time
_UNSEEN, _ZERO = np.float32(-1e30), np.float32(0.0)
_FLOAT, _REGISTER = 4, 4 * WIDTH  # bytes
_inlined = njit(error_model="numpy", inline="always")


@_inlined
def takes_row(block_size: int, head_dim: int) -> bool:
    """Whether keys and dimensions come in whole registers."""
    return block_size % WIDTH == 0 and head_dim % DIMENSIONS == 0


@_inlined
def _score(keys: Any, at: int, stride: int, query: Any, scores: Any) -> None:
    """Scores of 128 keys, whose sixteens begin at keys[at], ...; dimensions in ascending order."""
    k0, k1, k2, k3 = keys[at], keys[at + 1], keys[at + 2], keys[at + 3]
    k4, k5, k6, k7 = keys[at + 4], keys[at + 5], keys[at + 6], keys[at + 7]
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = same(_ZERO)
    for d in range(len(query)):
        q, step = spread(query, d), d * stride
        s0, s1 = fma(floats(k0 + step), q, s0), fma(floats(k1 + step), q, s1)
        s2, s3 = fma(floats(k2 + step), q, s2), fma(floats(k3 + step), q, s3)
        s4, s5 = fma(floats(k4 + step), q, s4), fma(floats(k5 + step), q, s5)
        s6, s7 = fma(floats(k6 + step), q, s6), fma(floats(k7 + step), q, s7)
    to = at * WIDTH
    store(scores, to, s0)
    store(scores, to + WIDTH, s1)
    store(scores, to + 2 * WIDTH, s2)
    store(scores, to + 3 * WIDTH, s3)
    store(scores, to + 4 * WIDTH, s4)
    store(scores, to + 5 * WIDTH, s5)
    store(scores, to + 6 * WIDTH, s6)
    store(scores, to + 7 * WIDTH, s7)


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
def _add_values(
    values: Any,
    begin: int,
    end: int,
    a: Any,
    b: Any,
    sums_a: Any,
    sums_b: Any,
    shrink_a: Any,
    shrink_b: Any,
    at: int,
) -> None:
    """Two heads' sums over 64 dimensions from `at`; positions are added in ascending order."""
    s0, s1 = mul(load(sums_a, at), shrink_a), mul(load(sums_a, at + WIDTH), shrink_a)
    s2 = mul(load(sums_a, at + 2 * WIDTH), shrink_a)
    s3 = mul(load(sums_a, at + 3 * WIDTH), shrink_a)
    t0, t1 = mul(load(sums_b, at), shrink_b), mul(load(sums_b, at + WIDTH), shrink_b)
    t2 = mul(load(sums_b, at + 2 * WIDTH), shrink_b)
    t3 = mul(load(sums_b, at + 3 * WIDTH), shrink_b)
    for j in range(begin, end):
        v, wa, wb = values[j] + _FLOAT * at, spread(a, j), spread(b, j)
        v0, v1 = floats(v), floats(v + _REGISTER)
        v2, v3 = floats(v + 2 * _REGISTER), floats(v + 3 * _REGISTER)
        s0, s1, s2, s3 = fma(v0, wa, s0), fma(v1, wa, s1), fma(v2, wa, s2), fma(v3, wa, s3)
        t0, t1, t2, t3 = fma(v0, wb, t0), fma(v1, wb, t1), fma(v2, wb, t2), fma(v3, wb, t3)
    store(sums_a, at, s0)
    store(sums_a, at + WIDTH, s1)
    store(sums_a, at + 2 * WIDTH, s2)
    store(sums_a, at + 3 * WIDTH, s3)
    store(sums_b, at, t0)
    store(sums_b, at + WIDTH, t1)
    store(sums_b, at + 2 * WIDTH, t2)
    store(sums_b, at + 3 * WIDTH, t3)


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
        for at in range(0, len(out_a), DIMENSIONS):
            _add_values(values, begin, end, a, b, out_a, out_b, shrink_a, shrink_b, at)
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
            for at in range(start // WIDTH, (count + WIDTH - 1) // WIDTH, 8):
                _score(keys, at, stride, queries[which], scores[which])
            scores[which, count : count + TILE] = _UNSEEN
        _attend_two(values, start, count, scores[0], scores[1], sums[0], sums[1], before)
        out[head] = sums[0]
        if head + 1 < group:
            out[head + 1] = sums[1]
