"""What the CPU does to rows one by one: norms, rotation, storing of keys and values, drawing.

Every sum has one order, written out, so a row's result does not depend on the batch it is in. A
piece of work is some rows. Tokens are drawn by the inverse CDF of a softmax in float64: weights are
added in eight interleaved sums a run of 256, runs one after the other; the run in which the noise
falls is then gone through token by token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from workbench.kernels.cpu.thread_pool import kernel, take
from workbench.kernels.cpu.vectors import (
    ADDRESS_BYTES,
    FLOAT_BYTES,
    LONG,
    WIDTH,
    add,
    doubles,
    floats,
    fma,
    greatest,
    inlined,
    instruction,
    integers,
    largest,
    load,
    matrix,
    mul,
    same,
    store,
    sub,
    total,
)

_ROWS = 8  # of one piece
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_UNBOUNDED = 1 << 60
_RUN = 256
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.6931471803691238, 1.9082149292705877e-10
_SMALLEST = -708.0  # exp of less is taken for 0: it is no normal number


@inlined
def _norm(x: int, weight: int, width: int, epsilon: Any, out: int) -> None:
    """Squares are added in 16 interleaved sums, these in order, then what 16 does not divide."""
    squares, row = same(_ZERO), floats(x, width)
    for i in range(0, width - WIDTH + 1, WIDTH):
        part = load(x + i * FLOAT_BYTES)
        squares = fma(part, part, squares)
    square = total(squares)
    for i in range(width - width % WIDTH, width):
        square += row[i] * row[i]
    scale = same(_ONE / np.sqrt(square / np.float32(width) + epsilon))
    for i in range(0, width, WIDTH):
        at = min(i, width - WIDTH) * FLOAT_BYTES  # the last 16 overlap where 16 does not divide
        store(out + at, mul(mul(load(x + at), scale), load(weight + at)))


@kernel
def rms_norm(arguments: int, counter: int) -> None:
    """`Kernels.rms_norm`; arguments: rows, columns, x, out, weight, epsilon (its bits)."""
    a = integers(arguments, 6)
    count, width = a[0], a[1]
    epsilon, line = floats(arguments + 5 * ADDRESS_BYTES, 1)[0], width * FLOAT_BYTES
    piece = take(counter) * _ROWS
    while piece < count:
        for t in range(piece, min(piece + _ROWS, count)):
            _norm(a[2] + t * line, a[4], width, epsilon, a[3] + t * line)
        piece = take(counter) * _ROWS


@kernel
def add_row(arguments: int, counter: int) -> None:
    """`Kernels.add_row`; arguments: rows, columns, row, out."""
    a = integers(arguments, 4)
    count, width = a[0], a[1]
    row, out = floats(a[2], width), matrix(a[3], count, width)
    piece = take(counter) * _ROWS
    while piece < count:
        for t in range(piece, min(piece + _ROWS, count)):
            for i in range(width):
                out[t, i] += row[i]
        piece = take(counter) * _ROWS


@inlined
def _rotate(row: Any, head: int, half: int, cosine: Any, sine: Any) -> None:
    """Pairs (i, i + half) of a head, by the angles of its position (Su et al. 2021)."""
    whole = half - half % WIDTH
    for i in range(0, whole, WIDTH):
        at, to = row[head + i :].ctypes.data, row[head + half + i :].ctypes.data
        first, second = load(at), load(to)
        c, s = load(cosine[i:].ctypes.data), load(sine[i:].ctypes.data)
        store(at, sub(mul(first, c), mul(second, s)))
        store(to, add(mul(second, c), mul(first, s)))
    for i in range(whole, half):
        one, other = row[head + i], row[head + half + i]
        row[head + i] = one * cosine[i] - other * sine[i]
        row[head + half + i] = other * cosine[i] + one * sine[i]


@inlined
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
def store_kv(arguments: int, counter: int) -> None:
    """`Kernels.store_kv`."""
    a = integers(arguments, 15)
    count, columns, head_dim, kv_heads, block_size = a[0], a[1], a[2], a[3], a[4]
    qkv, data, base = matrix(a[5], count, columns), floats(a[6], _UNBOUNDED), a[7]
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
            table = integers(a[12] + sequence[t] * a[13] * ADDRESS_BYTES, a[13])
            _store(qkv[t], data, base + table[p // block_size], p % block_size, shape)
        piece = take(counter) * _ROWS


@instruction(types.float64(types.int64))
def _power_of_two(builder: ir.IRBuilder, exponent: Any) -> Any:
    """2.0 ** exponent, of -1022 to 1023."""
    biased = builder.add(exponent, LONG(1023))
    return builder.bitcast(builder.shl(biased, LONG(52)), ir.DoubleType())


@inlined
def _exponential(x: float) -> float:
    """exp(x) of x <= 0 within 2 units in the last place: 2^k times a Taylor series of 14 terms."""
    within = max(x, _SMALLEST)
    whole = np.int64(within * _LOG2_E - 0.5)  # cut off towards 0: rounded
    k = np.float64(whole)
    r = (within - k * _LN2_HIGH) - k * _LN2_LOW
    p = 1.0 / 6227020800
    p = p * r + 1.0 / 479001600
    p = p * r + 1.0 / 39916800
    p = p * r + 1.0 / 3628800
    p = p * r + 1.0 / 362880
    p = p * r + 1.0 / 40320
    p = p * r + 1.0 / 5040
    p = p * r + 1.0 / 720
    p = p * r + 1.0 / 120
    p = p * r + 1.0 / 24
    p = p * r + 1.0 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return p * _power_of_two(whole) if x >= _SMALLEST else 0.0


@inlined
def _weigh(logits: Any, begin: int, top: float, cooling: float, weights: Any) -> None:
    """Weights of a run of tokens; zeros behind the last token."""
    count = min(_RUN, len(logits) - begin)
    for i in range(count):
        weights[i] = _exponential((np.float64(logits[begin + i]) - top) * cooling)
    weights[count:] = 0.0


@inlined
def _top(logits: Any) -> float:
    """The largest logit; of sixteen at a time, the last sixteen once more."""
    if len(logits) < WIDTH:
        return np.float64(logits.max())
    at, last = logits.ctypes.data, (len(logits) - WIDTH) * FLOAT_BYTES
    top = load(at + last)
    for offset in range(0, last, WIDTH * FLOAT_BYTES):
        top = largest(top, load(at + offset))
    return np.float64(greatest(top))


@inlined
def _sum(weights: Any) -> float:
    a = b = c = d = e = f = g = h = 0.0
    for i in range(0, _RUN, 8):
        a, b, c, d = a + weights[i], b + weights[i + 1], c + weights[i + 2], d + weights[i + 3]
        e, f = e + weights[i + 4], f + weights[i + 5]
        g, h = g + weights[i + 6], h + weights[i + 7]
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


@inlined
def _draw_row(logits: Any, cooling: float, noise: float, sums: Any, weights: Any) -> int:
    """The first token whose weights up to and with it exceed noise times all of them."""
    top = _top(logits)
    total, runs = 0.0, (len(logits) + _RUN - 1) // _RUN
    for run in range(runs):
        _weigh(logits, run * _RUN, top, cooling, weights)
        sums[run] = _sum(weights)
        total += sums[run]
    target, before, run = noise * total, 0.0, 0
    while run < runs - 1 and before + sums[run] <= target:
        before += sums[run]
        run += 1
    _weigh(logits, run * _RUN, top, cooling, weights)
    last = 0
    for i in range(_RUN):
        if weights[i] > 0.0:
            before, last = before + weights[i], i
            if before > target:
                break
    return run * _RUN + last  # the last of any weight where these sums, rounded, fell short


@kernel
def draw(arguments: int, counter: int) -> None:
    """`Kernels.draw`, of the temperatures' reciprocals."""
    a = integers(arguments, 7)
    count, width = a[0], a[1]
    cooling, noise, tokens = doubles(a[4], count), doubles(a[5], count), integers(a[6], count)
    sums, weights = np.empty((width + _RUN - 1) // _RUN, np.float64), np.empty(_RUN, np.float64)
    row = take(counter)
    while row < count:
        logits = floats(a[2] + row * a[3], width)
        tokens[row] = _draw_row(logits, cooling[row], noise[row], sums, weights)
        row = take(counter)
