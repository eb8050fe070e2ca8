"""Matrix products on a CPU: x [rows, inputs] times a packed matrix, by a team of threads.

One piece of work is some panels for up to 256 rows; within it, 128 inputs of a panel at a time are
widened to float32 in the first-level cache and multiplied with all the rows, 14 at a time. Every
element is one sum over ascending inputs (see `tiles`), so its value depends neither on the other
rows nor on the number of threads, nor on the form in which equal weights are kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from workbench.kernels.addresses import (
    floats,
    halves,
    high_nibbles,
    integers,
    low_nibbles,
    numbers,
    put,
    signed_bytes,
)
from workbench.kernels.lanes import WIDTH, add, div, exponential, fma, mul, same, sub
from workbench.kernels.panels import FLOAT32, INT4, Panels
from workbench.kernels.team import Team, kernel, take
from workbench.kernels.tiles import MOST_ROWS, PANEL, tile

ROWS = 256  # of one piece
_DEPTH = 128  # inputs widened at a time: 16 KiB
_PIECES = 8  # a thread, at least, where there are panels enough
_BYTES = PANEL * 4  # of 32 float32
_HALF = WIDTH * 4
PLAIN, ADD, GATED = range(3)  # what becomes of the product: out = p; out += p; out = silu(p1) p2

_inlined = njit(error_model="numpy", inline="always")


@_inlined
def _widen(panel: int, kind: int, group: int, half: int, first: int, count: int, out: int) -> None:
    """Inputs first .. first + count - 1 of a quantised panel as float32 [count, 32]."""
    size = PANEL * (2 if half else 4)  # of one array of scales
    step = WIDTH * (2 if half else 4)
    for start in range(0, count, group):
        if kind == INT4:
            at = panel + (first + start) // group * (2 * size + group * WIDTH)
            codes = at + 2 * size
            if half:
                s0, s1 = halves(at), halves(at + step)
                o0, o1 = halves(at + size), halves(at + size + step)
            else:
                s0, s1 = floats(at), floats(at + step)
                o0, o1 = floats(at + size), floats(at + size + step)
            for k in range(group):
                to = out + (start + k) * _BYTES
                put(to, fma(s0, low_nibbles(codes + k * WIDTH), o0))
                put(to + _HALF, fma(s1, high_nibbles(codes + k * WIDTH), o1))
        else:
            at = panel + (first + start) // group * (size + group * PANEL)
            codes = at + size
            if half:
                s0, s1 = halves(at), halves(at + step)
            else:
                s0, s1 = floats(at), floats(at + step)
            for k in range(group):
                to = out + (start + k) * _BYTES
                put(to, mul(s0, signed_bytes(codes + k * PANEL)))
                put(to + _HALF, mul(s1, signed_bytes(codes + k * PANEL + WIDTH)))


@_inlined
def _multiply(
    x: int,
    x_stride: int,
    rows: int,
    panel: int,
    panel_form: Any,
    inputs: int,
    out: int,
    out_stride: int,
    fresh: int,
    room: int,
) -> None:
    """Rows of x times one panel; room: where to widen it."""
    kind, group, half = panel_form
    tiles = (rows + MOST_ROWS - 1) // MOST_ROWS
    for k in range(0, inputs, _DEPTH):
        depth = min(_DEPTH, inputs - k)
        if kind == FLOAT32:
            weights = panel + k * _BYTES
        else:
            weights = room
            _widen(panel, kind, group, half, k, depth, room)
        row = 0
        for number in range(tiles):
            count = rows // tiles + (1 if number < rows % tiles else 0)
            tile(
                count,
                x + row * x_stride + k * 4,
                x_stride,
                weights,
                out + row * out_stride,
                out_stride,
                depth,
                fresh if k == 0 else 0,
            )
            row += count


@_inlined
def _gate(product: int, rows: int, out: Any, at: int, out_stride: int, columns: int) -> None:
    """silu(first half) * second half of each row of 32 (SwiGLU, Shazeer 2020)."""
    for r in range(rows):
        gate, up = floats(product + r * _BYTES), floats(product + r * _BYTES + _HALF)
        value = mul(
            div(gate, add(same(np.float32(1)), exponential(sub(same(np.float32(0)), gate)))), up
        )
        put(product + r * _BYTES, value)
        _copy(product + r * _BYTES, at + r * out_stride, columns)


@_inlined
def _copy(source: int, target: int, columns: int) -> None:
    """Some float32."""
    a, b = numbers(source, columns), numbers(target, columns)
    for c in range(columns):
        b[c] = a[c]


@kernel
def _product(arguments: int, counter: int) -> None:
    """See `CpuProducts`; pieces are numbered row block by row block."""
    a = integers(arguments, 14)
    x, x_stride, rows, data, panel_bytes, panels, columns, inputs = (
        a[0],
        a[1],
        a[2],
        a[3],
        a[4],
        a[5],
        a[6],
        a[7],
    )
    form = (a[8], a[9], a[10])
    out, out_stride, mode = a[11], a[12], a[13]
    per_piece = integers(arguments, 15)[14]
    pieces = (panels + per_piece - 1) // per_piece
    blocks = (rows + ROWS - 1) // ROWS
    room = np.empty(_DEPTH * PANEL, np.float32)
    aside = np.empty(ROWS * PANEL, np.float32)
    piece = take(counter)
    while piece < pieces * blocks:
        first = piece // pieces * ROWS
        count = min(ROWS, rows - first)
        begin = piece % pieces * per_piece
        x_rows = x + first * x_stride
        for p in range(begin, min(begin + per_piece, panels)):
            width = WIDTH if mode == GATED else PANEL
            wide = min(width, columns - p * width)
            to = out + first * out_stride + p * width * 4
            panel = data + p * panel_bytes
            if mode != GATED and wide == PANEL:
                _multiply(
                    x_rows,
                    x_stride,
                    count,
                    panel,
                    form,
                    inputs,
                    to,
                    out_stride,
                    1 if mode == PLAIN else 0,
                    room.ctypes.data,
                )
                continue
            product = aside.ctypes.data
            if mode == ADD:
                for r in range(count):
                    _copy(to + r * out_stride, product + r * _BYTES, wide)
            _multiply(
                x_rows,
                x_stride,
                count,
                panel,
                form,
                inputs,
                product,
                _BYTES,
                0 if mode == ADD else 1,
                room.ctypes.data,
            )
            if mode == GATED:
                _gate(product, count, out, to, out_stride, wide)
            else:
                for r in range(count):
                    _copy(product + r * _BYTES, to + r * out_stride, wide)
        piece = take(counter)


@kernel
def _columns(arguments: int, counter: int) -> None:
    """See `columns`; a piece is one column."""
    a = integers(arguments, 9)
    data, panel_bytes, inputs, numbers_at, count, out = a[0], a[1], a[2], a[3], a[4], a[5]
    form = (a[6], a[7], a[8])
    chosen = integers(numbers_at, count)
    room = np.empty(_DEPTH * PANEL, np.float32)
    i = take(counter)
    while i < count:
        panel, column = data + chosen[i] // PANEL * panel_bytes, chosen[i] % PANEL
        target = numbers(out + i * inputs * 4, inputs)
        for k in range(0, inputs, _DEPTH):
            depth = min(_DEPTH, inputs - k)
            weights = panel + k * _BYTES
            if form[0] != FLOAT32:
                weights = room.ctypes.data
                _widen(panel, form[0], form[1], form[2], k, depth, weights)
            wide = numbers(weights, depth * PANEL)
            for j in range(depth):
                target[k + j] = wide[j * PANEL + column]
        i = take(counter)


def columns(team: Team, matrix: Panels, chosen: torch.Tensor, out: torch.Tensor) -> None:
    """out [C, inputs] = the chosen columns (int64 [C]) of a matrix that is not gated."""
    form = matrix.form
    team.run(
        _columns.address,
        *(matrix.data.ctypes.data, matrix.data.shape[1], matrix.inputs),
        *(chosen.data_ptr(), len(chosen), out.data_ptr()),
        *(form.kind, form.group, form.half),
    )


def multiply(
    team: Team, x: torch.Tensor, matrix: Panels, out: torch.Tensor, mode: int = PLAIN
) -> None:
    """out [rows, columns] = x @ matrix, or += it, or silu(gate) * up of its two halves; float32."""
    form, panels = matrix.form, len(matrix.data)
    blocks = -(-len(x) // ROWS)
    per_piece = max(1, panels * blocks // (team.threads * _PIECES))
    team.run(
        _product.address,
        *(x.data_ptr(), x.stride(0) * 4, len(x)),
        *(matrix.data.ctypes.data, matrix.data.shape[1], panels, matrix.columns, matrix.inputs),
        *(form.kind, form.group, form.half),
        *(out.data_ptr(), out.stride(0) * 4, mode, per_piece),
    )
