"""What the CPU does to rows one by one: norms, rotation, keys and values into their blocks.

Every sum has one order, written out, so a row's result does not depend on the batch it is in. A
piece of work is some rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from workbench.kernels.addresses import integers, matrix, numbers
from workbench.kernels.context import ForwardContext, LayerCache
from workbench.kernels.lanes import WIDTH, add, fma, load, mul, same, store, sub, total
from workbench.kernels.team import Team, kernel, take

_ROWS = 8  # of one piece
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_UNBOUNDED = 1 << 60
_inlined = njit(error_model="numpy", inline="always")


@_inlined
def _norm(row: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """Squares are added in 16 interleaved sums, these in order, then what 16 does not divide."""
    width = len(row)
    squares = same(_ZERO)
    for i in range(0, width - WIDTH + 1, WIDTH):
        part = load(row, i)
        squares = fma(part, part, squares)
    square = total(squares)
    for i in range(width - width % WIDTH, width):
        square += row[i] * row[i]
    scale = same(_ONE / np.sqrt(square / np.float32(width) + epsilon))
    for i in range(0, width - WIDTH + 1, WIDTH):
        store(out, i, mul(mul(load(row, i), scale), load(weight, i)))
    end = width - WIDTH  # the last 16 once more, for what 16 does not divide
    store(out, end, mul(mul(load(row, end), scale), load(weight, end)))


@kernel
def _rms_norm(arguments: int, counter: int) -> None:
    a = integers(arguments, 6)
    count, width = a[0], a[1]
    x, out = matrix(a[2], count, width), matrix(a[3], count, width)
    weight, epsilon = numbers(a[4], width), numbers(arguments + 5 * 8, 1)[0]
    piece = take(counter) * _ROWS
    while piece < count:
        for t in range(piece, min(piece + _ROWS, count)):
            _norm(x[t], weight, epsilon, out[t])
        piece = take(counter) * _ROWS


def rms_norm(
    team: Team, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
) -> None:
    """`Kernels.rms_norm` by a team."""
    bits = int(np.float32(epsilon).view(np.int32))
    where = x.data_ptr(), out.data_ptr(), weight.data_ptr()
    team.run(_rms_norm.address, *x.shape, *where, bits)


@kernel
def _add_row(arguments: int, counter: int) -> None:
    a = integers(arguments, 4)
    count, width = a[0], a[1]
    row, out = numbers(a[2], width), matrix(a[3], count, width)
    piece = take(counter) * _ROWS
    while piece < count:
        for t in range(piece, min(piece + _ROWS, count)):
            for i in range(width):
                out[t, i] += row[i]
        piece = take(counter) * _ROWS


def add_row(team: Team, row: torch.Tensor, out: torch.Tensor) -> None:
    """`Kernels.add_row` by a team."""
    team.run(_add_row.address, *out.shape, row.data_ptr(), out.data_ptr())


@_inlined
def _rotate(row: Any, head: int, half: int, cosine: Any, sine: Any) -> None:
    """Pairs (i, i + half) of a head, by the angles of its position (Su et al. 2021)."""
    whole = half - half % WIDTH
    for i in range(0, whole, WIDTH):
        first, second = load(row, head + i), load(row, head + half + i)
        c, s = load(cosine, i), load(sine, i)
        store(row, head + i, sub(mul(first, c), mul(second, s)))
        store(row, head + half + i, add(mul(second, c), mul(first, s)))
    for i in range(whole, half):
        one, other = row[head + i], row[head + half + i]
        row[head + i] = one * cosine[i] - other * sine[i]
        row[head + half + i] = other * cosine[i] + one * sine[i]


@_inlined
def _store(row: Any, data: Any, block: int, slot: int, shape: Any) -> None:
    """The row's keys and values at a slot of a block (LayerCache)."""
    block_size, kv_heads, head_dim = shape
    width = kv_heads * head_dim
    keys, values = len(row) - 2 * width, len(row) - width
    for i in range(width):
        data[block + i * block_size + slot] = row[keys + i]
    for head in range(kv_heads):
        target = block + block_size * width + (head * block_size + slot) * head_dim
        for d in range(head_dim):
            data[target + d] = row[values + head * head_dim + d]


@kernel
def _store_kv(arguments: int, counter: int) -> None:
    a = integers(arguments, 15)
    count, columns, head_dim, kv_heads, block_size = a[0], a[1], a[2], a[3], a[4]
    qkv, data, base = matrix(a[5], count, columns), numbers(a[6], _UNBOUNDED), a[7]
    half, tables = head_dim // 2, a[14]
    cosine, sine = matrix(a[8], tables, half), matrix(a[9], tables, half)
    positions, sequence = integers(a[10], count), integers(a[11], count)
    shape = (block_size, kv_heads, head_dim)
    piece = take(counter) * _ROWS
    while piece < count:
        for t in range(piece, min(piece + _ROWS, count)):
            p = positions[t]
            for head in range(0, columns - kv_heads * head_dim, head_dim):
                _rotate(qkv[t], head, half, cosine[p], sine[p])
            table = integers(a[12] + sequence[t] * a[13] * 8, a[13])
            _store(qkv[t], data, base + table[p // block_size], p % block_size, shape)
        piece = take(counter) * _ROWS


def store_kv(
    team: Team,
    qkv: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    cache: LayerCache,
    context: ForwardContext,
) -> None:
    """`Kernels.store_kv` by a team."""
    table = context.block_offsets
    team.run(
        _store_kv.address,
        *(*qkv.shape, cache.head_dim, cache.kv_heads, cache.block_size),
        *(qkv.data_ptr(), cache.data.data_ptr(), cache.base),
        *(cosine.data_ptr(), sine.data_ptr()),
        *(context.positions.ctypes.data, context.sequence.ctypes.data),
        *(table.ctypes.data, table.shape[1], len(cosine)),
    )
