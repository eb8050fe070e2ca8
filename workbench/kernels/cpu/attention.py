"""Attention over blocks on a CPU: keys and values are read where they lie, nothing is gathered.

A *query* is one row of one head. Up to 48 that share a key-value head are worked on together, as a
*query tile*: rows of one sequence, or single rows of several sequences over what they begin with
in common (siblings of a search; cascade attention as in Hydragen, Juravsky et al. 2024), before
each goes on alone. Each query adds up its keys alone, in order of positions, rescaled at fixed
multiples of 32 of them (online softmax, Milakov and Gimelshein 2018): its result depends on no
other query, and on no block size, chunk or batch. A key that a query does not see has weight
exactly 0 and so adds exactly nothing, unless its value is not finite (then its own row fails, too).

Of few queries (a decoded row's heads) vectors hold keys, then dimensions; of many, where they fill
vectors better, they hold queries while scores and weights are made. All else is the same code, and
the bits are the same: which it is changes only the time.

    query = (row - first row) * group + (head - first head)        group = heads / kv_heads
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import numpy as np

from workbench.kernels.cpu.thread_pool import kernel, take
from workbench.kernels.cpu.tiles import (
    add_values,
    score,
    score_turned,
    tile_rows,
    tile_vectors,
)
from workbench.kernels.cpu.vectors import (
    ADDRESS_BYTES,
    FLOAT_BYTES,
    VECTOR_BYTES,
    WIDTH,
    add,
    address_of,
    aligned,
    ascending,
    called,
    exponential,
    floats,
    greatest,
    inlined,
    integers,
    largest,
    load,
    matrix,
    mul,
    read,
    same,
    store,
    sub,
    where_at_most,
)

QUERIES = 48  # of a query tile, at most
_STEP = 32  # positions between two rescalings: part of the arithmetic
_KEYS = 2 * _STEP  # scored at a time
_LEAST_SHARED = 2 * _STEP  # positions that are worth attending to together
_MANY = 12  # queries that fill vectors better than keys do, whose weights add up one by one
_UNSEEN = np.float32(-1e30)

Batch = namedtuple("Batch", "qkv out positions sequence tables width base shape group")
"""The step: rows, their sequences, and the table of blocks of each.

tables: element offsets; base: the layer's address; shape: (block_size, kv_heads, head_dim).
"""
QueryTile = namedtuple("QueryTile", "queries limit top total sums")
"""Of each query: itself, scaled; the last position it sees; then of the keys up to now the largest
score, the weights' sum and the weighted values' sums, these two relative to that score."""
Room = namedtuple(
    "Room",
    "scores highest shrink keys values packed_keys packed_values "
    "turned turned_scores limit top total",
)
"""Where a thread works on some positions: scores [queries, _KEYS], the new largest ones, what they
rescale sums by, and addresses. keys: of sixteen keys each; of their values; of keys that come next.
values: of each. packed: for blocks or heads of which sixteen is no divisor. turned and what
follows: many queries side by side, [head_dim, queries]."""


@inlined
def _table(batch: Any, row: int) -> Any:
    """Offsets of the blocks of a row's sequence."""
    return integers(batch.tables + batch.sequence[row] * batch.width * ADDRESS_BYTES, batch.width)


@inlined
def _block(batch: Any, table: Any, head: int, position: int) -> Any:
    """Addresses of a position's key (its first number) and value, of one head."""
    block_size, kv_heads, head_dim = batch.shape
    block, slot = table[position // block_size], position % block_size
    key = block + head * head_dim * block_size + slot
    value = block + ((kv_heads + head) * block_size + slot) * head_dim
    return batch.base + FLOAT_BYTES * key, batch.base + FLOAT_BYTES * value


@inlined
def _locate(batch: Any, table: Any, head: int, first: int, until: int, then: Any, room: Any) -> int:
    """Addresses of keys and values from position `first` on, of the keys behind them or, where
    there are none, of `then` (row, head, position); bytes between a key's numbers.
    """
    block_size, _, head_dim = batch.shape
    count = min(_KEYS, until - first)
    if block_size % WIDTH == 0 and head_dim % WIDTH == 0:
        for start in range(0, count, WIDTH):
            key, value = _block(batch, table, head, first + start)
            room.keys[0, start // WIDTH], room.keys[1, start // WIDTH] = key, value
            room.keys[2, start // WIDTH] = key
            for j in range(start, min(start + WIDTH, count)):
                room.values[j] = value + (j - start) * head_dim * FLOAT_BYTES
        behind, end = first + _KEYS, until
        if behind >= until:
            row, head, behind = then
            table, end = _table(batch, row), batch.positions[row] + 1
        for start in range(0, min(count, end - behind), WIDTH):
            key, _ = _block(batch, table, head, behind + start)
            room.keys[2, start // WIDTH] = key
        return block_size * FLOAT_BYTES
    for start in range(0, _KEYS, WIDTH):
        room.keys[:, start // WIDTH] = room.packed_keys.ctypes.data + start * FLOAT_BYTES
    for j in range(count):
        key, value = _block(batch, table, head, first + j)
        numbers, packed = matrix(key, head_dim, block_size), matrix(value, 1, head_dim)
        for d in range(head_dim):
            room.packed_keys[d, j] = numbers[d, 0]
            room.packed_values[j, d] = packed[0, d]
        room.values[j] = room.packed_values[j].ctypes.data
    return _KEYS * FLOAT_BYTES


@inlined
def _score(tile: Any, begin: int, end: int, count: int, stride: int, room: Any) -> None:
    """Queries begin .. end - 1 times the keys in room."""
    head_dim, vectors = tile.queries.shape[1], (count + WIDTH - 1) // WIDTH
    keys, line, across = room.keys.ctypes.data, head_dim * FLOAT_BYTES, _KEYS * FLOAT_BYTES
    row = begin
    while row < end:
        rows, at = tile_rows(end - row), 0
        queries, scores = tile.queries[row].ctypes.data, room.scores[row].ctypes.data
        while at < vectors:
            wide = tile_vectors(vectors - at, rows)
            case, source = 64 * wide + rows, (queries, line, keys + at * ADDRESS_BYTES, stride)
            apart = _KEYS // WIDTH * ADDRESS_BYTES if row == begin else 0
            score((case, *source, head_dim, scores + at * VECTOR_BYTES, across, apart))
            at += wide
        row += rows


@inlined
def _score_turned(head_dim: int, queries: int, count: int, stride: int, room: Any) -> None:
    """The keys in room times the queries in room.turned."""
    vectors, line = (queries + WIDTH - 1) // WIDTH, QUERIES * FLOAT_BYTES
    for first in range(0, count, WIDTH):
        key, keys = first, room.keys[0, first // WIDTH] - first * FLOAT_BYTES
        while key < first + WIDTH:
            rows, at = tile_rows(first + WIDTH - key), 0
            x, scores = keys + key * FLOAT_BYTES, room.turned_scores[key].ctypes.data
            while at < vectors:
                wide, skipped = tile_vectors(vectors - at, rows), at * VECTOR_BYTES
                case, source = 64 * wide + rows, (x, stride, room.turned.ctypes.data + skipped)
                score_turned((case, *source, line, head_dim, scores + skipped, line))
                at += wide
            key += rows


@inlined
def _add_values(
    tile: Any, begin: int, end: int, start: int, count: int, weights: Any, room: Any
) -> None:
    """The values in room from `start` on, by weights, to the sums of queries begin .. end - 1.

    weights: address of the first query's first, bytes to the next query's, to the next position's.
    """
    vectors, there = tile.sums.shape[1] // WIDTH, room.values.ctypes.data + start * ADDRESS_BYTES
    address, line, step = weights
    row = begin
    while row < end:
        rows, at = tile_rows(end - row), 0
        shrink, sums = room.shrink[row:].ctypes.data, tile.sums[row].ctypes.data
        while at < vectors:
            wide, skipped = tile_vectors(vectors - at, rows), at * VECTOR_BYTES
            case, source = 64 * wide + rows, (address + (row - begin) * line, line, step)
            target = sums + skipped, vectors * VECTOR_BYTES
            add_values((case, *source, there, skipped, count, shrink, *target))
            at += wide
        row += rows


@inlined
def _weigh(tile: Any, begin: int, end: int, first: int, start: int, count: int, room: Any) -> None:
    """Scores of positions first .. first + 31, at `start` in room, become weights.

    Those past a query's own position become so small that their weight is exactly 0.
    """
    hides = np.float32(first + _STEP - 1) > tile.limit[begin]
    for query in range(begin, end):
        at = room.scores[query].ctypes.data + start * FLOAT_BYTES
        low, high = load(at), load(at + VECTOR_BYTES)
        if hides:
            last, unseen = same(tile.limit[query]), same(_UNSEEN)
            low = where_at_most(ascending(np.float32(first)), last, low, unseen)
            high = where_at_most(ascending(np.float32(first + WIDTH)), last, high, unseen)
        room.highest[query] = max(tile.top[query], greatest(largest(low, high)))
        top = same(room.highest[query])
        store(at, exponential(sub(low, top)))
        store(at + VECTOR_BYTES, exponential(sub(high, top)))
    for query in range(begin, end, WIDTH):
        before, now = tile.top[query:].ctypes.data, room.highest[query:].ctypes.data
        store(room.shrink[query:].ctypes.data, exponential(sub(load(before), load(now))))
    scores, last = room.scores, end - 1
    for a in range(begin, end, 4):  # four sums at a time: each waits for its last addition
        b, c, d = min(a + 1, last), min(a + 2, last), min(a + 3, last)
        for query in (a, b, c, d):
            tile.top[query] = room.highest[query]
        w, x = tile.total[a] * room.shrink[a], tile.total[b] * room.shrink[b]
        y, z = tile.total[c] * room.shrink[c], tile.total[d] * room.shrink[d]
        for j in range(start, start + count):
            w, x, y, z = w + scores[a, j], x + scores[b, j], y + scores[c, j], z + scores[d, j]
        tile.total[a], tile.total[b], tile.total[c], tile.total[d] = w, x, y, z


@inlined
def _weigh_turned(vectors: int, first: int, start: int, count: int, shrink: int, room: Any) -> None:
    """`_weigh` of the queries in room.turned, sixteen at a time; shrink: address of the first's."""
    line, hides = QUERIES * FLOAT_BYTES, np.float32(first + _STEP - 1) > room.limit[0]
    for at in range(0, vectors * VECTOR_BYTES, VECTOR_BYTES):
        last, top = load(room.limit.ctypes.data + at), load(room.top.ctypes.data + at)
        scores, highest = room.turned_scores[start].ctypes.data + at, top
        for j in range(count):
            value = load(scores + j * line)
            if hides:
                value = where_at_most(same(np.float32(first + j)), last, value, same(_UNSEEN))
                store(scores + j * line, value)
            highest = largest(highest, value)
        factor = exponential(sub(top, highest))
        weights = mul(load(room.total.ctypes.data + at), factor)
        for j in range(count):
            weight = exponential(sub(load(scores + j * line), highest))
            store(scores + j * line, weight)
            weights = add(weights, weight)
        store(room.top.ctypes.data + at, highest)
        store(room.total.ctypes.data + at, weights)
        store(shrink + at, factor)


@called
def _attend_tile(
    batch: Any,
    tile: Any,
    begin: int,
    end: int,
    where: Any,
    until: int,
    then: Any,
    room: Any,
) -> None:
    """Queries begin .. end - 1 of a tile, of which the first sees least, over a sequence.

    where: a row of the sequence, a head, and the first position, a multiple of 32; until: the one
    behind the last; then: `where` of what is likely to be next. Many queries, and not keys, stand
    side by side in a vector.
    """
    row, head, seen = where
    table = _table(batch, row)
    queries, head_dim, line = end - begin, batch.shape[2], QUERIES * FLOAT_BYTES
    many = queries >= _MANY
    if many:
        for query in range(queries):
            mine = begin + query
            room.limit[query], room.top[query] = tile.limit[mine], tile.top[mine]
            room.total[query] = tile.total[mine]
            for d in range(head_dim):
                room.turned[d, query] = tile.queries[mine, d]
    vectors, shrink = (queries + WIDTH - 1) // WIDTH, room.shrink[begin:].ctypes.data
    for first in range(seen, until, _KEYS):
        count = min(_KEYS, until - first)
        stride = _locate(batch, table, head, first, until, then, room)
        if many:
            _score_turned(head_dim, queries, count, stride, room)
        else:
            _score(tile, begin, end, count, stride, room)
        for start in range(0, count, _STEP):
            some = min(_STEP, count - start)
            if many:
                _weigh_turned(vectors, first + start, start, some, shrink, room)
                weights = room.turned_scores[start].ctypes.data, FLOAT_BYTES, line
            else:
                _weigh(tile, begin, end, first + start, start, some, room)
                source = room.scores[begin].ctypes.data + start * FLOAT_BYTES
                weights = source, _KEYS * FLOAT_BYTES, FLOAT_BYTES
            _add_values(tile, begin, end, start, some, weights, room)
    if many:
        for query in range(queries):
            tile.top[begin + query], tile.total[begin + query] = room.top[query], room.total[query]


@called
def _fill(batch: Any, tile: Any, head: int, row: int, first: int, count: int) -> None:
    """`count` queries from `first` on of those of the rows from `row` on, that saw no key yet."""
    head_dim = batch.shape[2]
    scale = np.float32(1.0 / math.sqrt(head_dim))
    for query in range(count):
        mine, of_group = row + (first + query) // batch.group, (first + query) % batch.group
        at = (head * batch.group + of_group) * head_dim
        given = floats(batch.qkv[mine, at:].ctypes.data, head_dim)
        scaled = floats(tile.queries[query].ctypes.data, head_dim)
        for d in range(head_dim):
            scaled[d] = given[d] * scale
        tile.limit[query], tile.top[query] = batch.positions[mine], _UNSEEN
        tile.total[query] = np.float32(0.0)
        tile.sums[query] = np.float32(0.0)


@called
def _finish(batch: Any, tile: Any, head: int, row: int, first: int, count: int) -> None:
    """Writes what the queries (see `_fill`) have seen: their sums over their weights."""
    head_dim = batch.shape[2]
    for query in range(count):
        mine, of_group = row + (first + query) // batch.group, (first + query) % batch.group
        at = (head * batch.group + of_group) * head_dim
        sums = floats(tile.sums[query].ctypes.data, head_dim)
        out, total = floats(batch.out[mine, at:].ctypes.data, head_dim), tile.total[query]
        for d in range(head_dim):
            out[d] = sums[d] / total


@inlined
def _in_common(tables: int, width: int, one: int, other: int, block_size: int, most: int) -> int:
    """Positions below `most`, in whole steps, whose blocks two sequences share from the start."""
    a = integers(tables + one * width * ADDRESS_BYTES, width)
    b = integers(tables + other * width * ADDRESS_BYTES, width)
    blocks = 0
    while (blocks + 1) * block_size <= most and a[blocks] == b[blocks]:
        blocks += 1
    return blocks * block_size // _STEP * _STEP


@inlined
def find_siblings(
    bounds: Any,
    positions: Any,
    sequence: Any,
    tables: int,
    width: int,
    block_size: int,
    group: int,
    shared: Any,
) -> int:
    """Joins runs of rows (ForwardContext.pieces) into groups, by their tables of blocks alone.

    Returns how many. bounds [pieces + 1] becomes the groups' bounds; shared [pieces]: positions
    that all rows of a group, each of its own sequence, begin with in common, 0 for the rows of one
    sequence. A row joins those before it unless that would halve what they share.
    """
    groups, most_rows = 0, QUERIES // group
    for piece in range(len(bounds) - 1):
        begin, end = bounds[piece], bounds[piece + 1]
        if groups and end - begin == 1 and (begin - bounds[groups - 1] == 1 or shared[groups - 1]):
            first, so_far = bounds[groups - 1], shared[groups - 1]
            most = min(positions[first], positions[begin])
            common = _in_common(tables, width, sequence[first], sequence[begin], block_size, most)
            if common >= max(_LEAST_SHARED, so_far // 2) and begin - first < most_rows:
                shared[groups - 1] = min(common, so_far) if so_far else common
                bounds[groups] = end
                continue
        shared[groups] = 0
        groups += 1
        bounds[groups] = end
    return groups


@inlined
def _take_room(at: int, rows: int, columns: int) -> Any:
    """A float32 array [rows, columns] at an address, and the address behind it."""
    return matrix(at, rows, columns), at + rows * columns * FLOAT_BYTES


@called
def _rooms(at: int, head_dim: int) -> Any:
    """A QueryTile and a Room in memory from an address on, and the address behind them.

    They are no arrays of their own, since each use of such a one counts references, on which the
    processor waits: some two fifths of a small model's decoding attention.
    """
    whole = (head_dim + WIDTH - 1) // WIDTH * WIDTH  # rounded up to vectors
    each, at = _take_room(at, 8, QUERIES + WIDTH)
    queries, at = _take_room(at, QUERIES, head_dim)
    sums, at = _take_room(at, QUERIES, whole)
    scores, at = _take_room(at, QUERIES, _KEYS)
    packed_keys, at = _take_room(at, head_dim, _KEYS)
    packed_values, at = _take_room(at, _KEYS, whole)
    turned, at = _take_room(at, head_dim, QUERIES)
    turned_scores, at = _take_room(at, _KEYS, QUERIES)
    values, keys = integers(at, _KEYS), integers(at + _KEYS * ADDRESS_BYTES, 3 * _KEYS // WIDTH)
    tile = QueryTile(queries, each[0], each[1], each[2], sums)
    packed = packed_keys, packed_values
    of_turned = turned, turned_scores, each[5], each[6], each[7]
    room = Room(scores, each[3], each[4], keys.reshape(3, -1), values, *packed, *of_turned)
    return tile, room, at + (_KEYS + 3 * _KEYS // WIDTH) * ADDRESS_BYTES


@kernel
def attend(arguments: int, counter: int) -> None:
    """`Kernels.attend`; a piece is one key-value head of one group of rows."""
    a = integers(arguments, 16)
    tokens, head_dim, kv_heads, block_size = a[0], a[1], a[2], a[9]
    qkv, out = matrix(a[3], tokens, a[4]), matrix(a[5], tokens, a[6])
    positions, sequence = integers(a[10], tokens), integers(a[11], tokens)
    tables, width, pieces, group = a[12], a[13], a[14], a[6] // head_dim // kv_heads
    base, shape = a[7] + FLOAT_BYTES * a[8], (block_size, kv_heads, head_dim)
    batch = Batch(qkv, out, positions, sequence, tables, width, base, shape, group)
    bounds, shared = integers(a[15], pieces + 1).copy(), np.empty(pieces, np.int64)
    groups = find_siblings(bounds, positions, sequence, tables, width, block_size, group, shared)
    memory = aligned(_rooms(np.int64(0), head_dim)[2] // FLOAT_BYTES)
    tile, room, _ = _rooms(address_of(memory), head_dim)
    for zeros in (room.packed_values, room.turned):
        zeros[:] = 0
    for zeros in (room.limit, room.top, room.total):
        zeros[:] = 0
    zero = np.int64(0)  # for a literal one each callee would be compiled once more
    number = take(counter)
    while number < groups * kv_heads:
        piece, head = number // kv_heads, number % kv_heads
        begin, end = bounds[piece], bounds[piece + 1]
        queries, common = (end - begin) * group, shared[piece]
        later = min(read(counter), groups * kv_heads - 1)
        after = bounds[later // kv_heads], later % kv_heads, zero
        if common:  # rows of several sequences, which begin with so many positions
            _fill(batch, tile, head, begin, zero, queries)
            own, all_of_them = (begin, head, common), (begin, head, zero)
            _attend_tile(batch, tile, zero, queries, all_of_them, common, own, room)
            for row in range(begin, end):
                first, until, own = (row - begin) * group, positions[row] + 1, (row, head, common)
                then = (row + 1, head, common) if row + 1 < end else after
                _attend_tile(batch, tile, first, first + group, own, until, then, room)
            _finish(batch, tile, head, begin, zero, queries)
        else:  # rows of one sequence
            for first in range(0, queries, QUERIES):
                count = min(QUERIES, queries - first)
                until = positions[begin + (first + count - 1) // group] + 1
                _fill(batch, tile, head, begin, first, count)
                _attend_tile(batch, tile, zero, count, (begin, head, zero), until, after, room)
                _finish(batch, tile, head, begin, first, count)
        number = take(counter)
    memory[0] = 0  # it lives until here
