"""Attention over blocks on a CPU: keys and values are read where they lie, nothing is gathered.

Rows of one sequence attend together, in bundles of lanes (`bundles`). So do single rows of several
sequences over what they begin with in common (`siblings`; cascade attention as in Hydragen,
Juravsky et al. 2024), before each goes on alone. A single row alone is `cpu_decode`'s where its
shape allows. All of them give the same bits.

    lane = (row - first row) * group + (head - first head)        group = heads / kv_heads
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import torch
from numba import njit

from workbench.kernels.addresses import integers, matrix
from workbench.kernels.blocks import locate, locate_sixteens
from workbench.kernels.bundles import (
    MOST_REGISTERS,
    TILE,
    attend_tile,
    bundle_size,
    forget,
    read_lane,
    registers_for,
    set_lane,
    take_lane,
)
from workbench.kernels.context import ForwardContext, LayerCache
from workbench.kernels.cpu_decode import attend_row, row_room, takes_row
from workbench.kernels.lanes import WIDTH
from workbench.kernels.siblings import find_siblings
from workbench.kernels.team import Team, kernel, take

_FLOAT = 4  # bytes
_inlined = njit(error_model="numpy", inline="always")
_called = njit(error_model="numpy")  # once in the code, however many call it

Batch = namedtuple("Batch", "qkv out positions sequence tables width base shape group")
"""The step: rows, their sequences, and the table of blocks of each; shape: see `blocks`."""
Room = namedtuple("Room", "siblings bundle scores keys values seen row")
"""Where one thread works: two bundles, a tile's scores, addresses, what lanes saw before."""


@_inlined
def _room(longest: int, head_dim: int, group: int) -> Any:
    return Room(
        np.empty(bundle_size(head_dim), np.float32),
        np.empty(bundle_size(head_dim), np.float32),
        np.empty(TILE * MOST_REGISTERS * WIDTH, np.float32),
        np.empty(longest + 8, np.int64),
        np.empty(longest + 8, np.int64),
        np.empty((group, 2 + head_dim), np.float32),
        row_room(longest, head_dim),
    )


@_inlined
def _locate(batch: Any, row: int, count: int, head: int, room: Any) -> None:
    """Keys and values of a row's first `count` positions."""
    table = integers(batch.tables + batch.sequence[row] * batch.width * 8, batch.width)
    locate(count, batch.base, batch.shape, head, table, room.keys, room.values)


@_inlined
def _set_lanes(
    batch: Any, head: int, begin: int, lanes: Any, first: int, bundle: Any, seen: Any
) -> int:
    """Lanes from `first` on in their places, those past the last repeat it; how many registers."""
    registers = registers_for(lanes - first)
    head_dim = batch.shape[2]
    for i in range(registers * WIDTH):
        lane = min(first + i, lanes - 1)
        row, of_group = begin + lane // batch.group, lane % batch.group
        at = (head * batch.group + of_group) * head_dim
        query = batch.qkv[row, at : at + head_dim]
        set_lane(bundle, registers * WIDTH, i, query, batch.positions[row], seen[of_group])
    return registers


@_inlined
def _attend_bundle(
    batch: Any, registers: int, bundle: Any, start: int, end: int, room: Any
) -> None:
    """A bundle's lanes over positions start .. end - 1; the first lane sees least."""
    block_size, _, head_dim = batch.shape
    for first in range(start, end, TILE):
        count = min(TILE, end - first)
        attend_tile(
            registers,
            room.keys,
            room.values,
            _FLOAT * block_size,
            head_dim,
            first,
            count,
            bundle,
            room.scores,
            first + count - 1 > bundle[0],
        )


@_called
def _attend_lanes(batch: Any, head: int, begin: int, end: int, start: int, room: Any) -> None:
    """Rows of one sequence, from position `start` on; room.seen: what was seen before, a head."""
    head_dim, lanes, first = batch.shape[2], (end - begin) * batch.group, 0
    while first < lanes:
        registers = _set_lanes(batch, head, begin, lanes, first, room.bundle, room.seen)
        width = registers * WIDTH
        until = int(room.bundle[width - 1]) + 1
        _attend_bundle(batch, registers, room.bundle, start, until, room)
        for lane in range(first, min(first + width, lanes)):
            row, at = begin + lane // batch.group, (head * batch.group + lane % batch.group)
            out = batch.out[row, at * head_dim : (at + 1) * head_dim]
            read_lane(room.bundle, width, lane - first, out)
        first += width


@_called
def _attend_single(batch: Any, head: int, row: int, start: int, room: Any) -> None:
    """One row of its sequence, from position `start` on, in the way that suits its shape."""
    block_size, _, head_dim = batch.shape
    if not takes_row(block_size, head_dim):
        _attend_lanes(batch, head, row, row + 1, start, room)
        return
    count = batch.positions[row] + 1
    table = integers(batch.tables + batch.sequence[row] * batch.width * 8, batch.width)
    locate_sixteens(count, batch.base, batch.shape, head, table, room.keys)
    begin, end = head * batch.group, (head + 1) * batch.group
    query = batch.qkv[row, begin * head_dim : end * head_dim].reshape(-1, head_dim)
    out = batch.out[row, begin * head_dim : end * head_dim].reshape(-1, head_dim)
    stride = _FLOAT * block_size
    attend_row(room.keys, room.values, stride, start, count, query, out, room.seen, room.row)


@_inlined
def _attend_group(batch: Any, head: int, begin: int, end: int, shared: int, room: Any) -> None:
    """Rows of several sequences, each of which begins with the same `shared` positions (or 0)."""
    registers = registers_for((end - begin) * batch.group)
    if shared:
        forget(room.seen)
        _locate(batch, begin, shared, head, room)
        lanes = (end - begin) * batch.group
        _set_lanes(batch, head, begin, lanes, 0, room.siblings, room.seen)
        _attend_bundle(batch, registers, room.siblings, 0, shared, room)
    for row in range(begin, end):
        forget(room.seen)
        if shared:
            for i in range(batch.group):
                lane = (row - begin) * batch.group + i
                take_lane(room.siblings, registers * WIDTH, lane, room.seen[i])
        _locate(batch, row, batch.positions[row] + 1, head, room)
        _attend_single(batch, head, row, shared, room)


@kernel
def _attend(arguments: int, counter: int) -> None:
    """Kernels.attend; a piece is one key-value head of one group of rows."""
    a = integers(arguments, 16)
    tokens, head_dim, kv_heads, block_size = a[0], a[1], a[2], a[9]
    qkv, out = matrix(a[3], tokens, a[4]), matrix(a[5], tokens, a[6])
    positions, sequence = integers(a[10], tokens), integers(a[11], tokens)
    tables, width, pieces, group = a[12], a[13], a[14], a[6] // head_dim // kv_heads
    base, shape = a[7] + _FLOAT * a[8], (block_size, kv_heads, head_dim)
    batch = Batch(qkv, out, positions, sequence, tables, width, base, shape, group)
    bounds, shared = integers(a[15], pieces + 1).copy(), np.empty(pieces, np.int64)
    alone = takes_row(block_size, head_dim)
    groups = find_siblings(
        bounds, positions, sequence, tables, width, block_size, group, alone, shared
    )
    room = _room(positions.max() + 1, head_dim, group)
    number = take(counter)
    while number < groups * kv_heads:
        piece, head = number // kv_heads, number % kv_heads
        begin, end = bounds[piece], bounds[piece + 1]
        if sequence[begin] == sequence[end - 1] and end - begin > 1:
            forget(room.seen)
            _locate(batch, begin, positions[end - 1] + 1, head, room)
            _attend_lanes(batch, head, begin, end, 0, room)
        else:
            _attend_group(batch, head, begin, end, shared[piece], room)
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
