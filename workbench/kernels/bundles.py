"""Bundles of lanes that attend to the same keys, tile by tile.

A *lane* is one query row of one head; up to 48 that share a key-value head are worked on side by
side, as a *bundle*. Each lane adds up its keys alone, one after the other in position order,
rescaled at fixed multiples of 32 positions (online softmax, Milakov and Gimelshein 2018): its
result depends on no other lane, and on no block size, chunk or batch. A key that a lane does not
see has weight exactly 0 and so adds exactly nothing.

    a bundle, each line 16, 32 or 48 numbers wide:
    LIMIT    last position the lane sees      TOP      largest score so far
    TOTAL    weights added up so far          SHRINK   what this tile rescales them by
    QUERIES  head_dim lines, scaled           then the sums of values, head_dim lines
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from workbench.kernels.addresses import floats, put
from workbench.kernels.lane_tiles import AT_ONCE, MOST_VECTORS, adding_values, scoring
from workbench.kernels.lanes import (
    WIDTH,
    add,
    exponential,
    largest,
    mul,
    same,
    sub,
    where_at_most,
)

TILE = 32  # positions between two rescalings; part of the arithmetic: changing it changes results
MOST_REGISTERS = 3
UNSEEN = np.float32(-1e30)
LIMIT, TOP, TOTAL, SHRINK, QUERIES = range(5)
_REGISTER, _ADDRESS = 4 * WIDTH, 8  # bytes
_inlined = njit(error_model="numpy", inline="always")
_called = njit(error_model="numpy")  # once in the code, however many call it


@_inlined
def registers_for(lanes: int) -> int:
    """How many registers the next bundle takes of so many lanes that are left."""
    return min(MOST_REGISTERS, (lanes + WIDTH - 1) // WIDTH)


@_inlined
def bundle_size(head_dim: int) -> int:
    """Numbers of the largest bundle."""
    return (QUERIES + 2 * head_dim) * MOST_REGISTERS * WIDTH


@_inlined
def forget(seen: Any) -> None:
    """Lanes that have seen no key yet; seen: [lanes, TOP, TOTAL and head_dim sums]."""
    for lane in range(len(seen)):
        seen[lane, 0] = UNSEEN
        for i in range(1, seen.shape[1]):
            seen[lane, i] = np.float32(0.0)


@_inlined
def set_lane(bundle: Any, width: int, lane: int, query: Any, limit: int, seen: Any) -> None:
    """Puts a lane in its place; query: [head_dim], seen: what it has added up so far."""
    head_dim = len(query)
    scale = np.float32(1.0 / math.sqrt(head_dim))
    bundle[LIMIT * width + lane] = limit
    bundle[TOP * width + lane], bundle[TOTAL * width + lane] = seen[0], seen[1]
    at = QUERIES * width + lane
    sums = at + head_dim * width
    for d in range(head_dim):
        bundle[at + d * width] = query[d] * scale
        bundle[sums + d * width] = seen[2 + d]


@_inlined
def take_lane(bundle: Any, width: int, lane: int, seen: Any) -> None:
    """What a lane has added up so far."""
    head_dim = len(seen) - 2
    seen[0], seen[1] = bundle[TOP * width + lane], bundle[TOTAL * width + lane]
    at = (QUERIES + head_dim) * width + lane
    for d in range(head_dim):
        seen[2 + d] = bundle[at + d * width]


@_inlined
def read_lane(bundle: Any, width: int, lane: int, out: Any) -> None:
    """A lane's result, out [head_dim]: its sums over its weights."""
    head_dim = len(out)
    total = bundle[TOTAL * width + lane]
    at = (QUERIES + head_dim) * width + lane
    for d in range(head_dim):
        out[d] = bundle[at + d * width] / total


@_inlined
def _hide(first: int, count: int, limit: int, scores: int, line: int) -> None:
    """Scores of keys past a lane's own position become so small that their weight is exactly 0."""
    last = floats(limit)
    for j in range(count):
        at = scores + j * line
        position = same(np.float32(first + j))
        put(at, where_at_most(position, last, floats(at), same(UNSEEN)))


@_inlined
def _weigh(count: int, scores: int, line: int, top: int, total: int, shrink: int) -> None:
    """Sixteen lanes' scores become weights, relative to the largest score so far."""
    before = highest = floats(top)
    for j in range(count):
        highest = largest(highest, floats(scores + j * line))
    factor = exponential(sub(before, highest))
    weights = mul(floats(total), factor)
    for j in range(count):
        weight = exponential(sub(floats(scores + j * line), highest))
        put(scores + j * line, weight)
        weights = add(weights, weight)
    put(top, highest)
    put(total, weights)
    put(shrink, factor)


def _attending(registers: int) -> Any:
    """`attend_tile` for bundles of so many registers."""
    line, step = registers * _REGISTER, min(registers, MOST_VECTORS) * _REGISTER
    score, add_values = scoring(registers), adding_values(registers)

    @_called
    def attend_tile(
        keys: int,
        values: int,
        stride: int,
        head_dim: int,
        first: int,
        count: int,
        bundle: int,
        scores: int,
        hides: bool,
    ) -> None:
        for j in range(0, count, AT_ONCE):
            for at in range(0, line, step):
                queries, target = bundle + QUERIES * line + at, scores + j * line + at
                score(keys + (first + j) * _ADDRESS, stride, queries, head_dim, target)
        for at in range(0, line, _REGISTER):
            mine = bundle + at
            if hides:
                _hide(first, count, mine + LIMIT * line, scores + at, line)
            top, total, shrink = mine + TOP * line, mine + TOTAL * line, mine + SHRINK * line
            _weigh(count, scores + at, line, top, total, shrink)
        sums, shrink = bundle + (QUERIES + head_dim) * line, bundle + SHRINK * line
        for d in range(0, head_dim, AT_ONCE):
            here = values + first * _ADDRESS
            for at in range(0, line, step):
                add_values(here, 4 * d, count, scores + at, shrink + at, sums + d * line + at)

    return attend_tile


_attend_one, _attend_two, _attend_three = (_attending(count) for count in (1, 2, 3))


@_inlined
def attend_tile(
    registers: int,
    keys: Any,
    values: Any,
    stride: int,
    head_dim: int,
    first: int,
    count: int,
    bundle: Any,
    scores: Any,
    hides: bool,
) -> None:
    """A bundle attends to positions first .. first + count - 1 of one tile.

    keys, values: int64 addresses by position, as `blocks.locate` makes them; stride: bytes between
    a key's numbers. scores: room. hides: whether some lane does not see all of them.
    """
    k, v, b, s = keys.ctypes.data, values.ctypes.data, bundle.ctypes.data, scores.ctypes.data
    if registers == 1:
        _attend_one(k, v, stride, head_dim, first, count, b, s, hides)
    elif registers == 2:
        _attend_two(k, v, stride, head_dim, first, count, b, s, hides)
    else:
        _attend_three(k, v, stride, head_dim, first, count, b, s, hides)
