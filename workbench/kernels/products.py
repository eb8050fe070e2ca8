"""Matrix products on a CPU: x [rows, inputs] times a packed matrix, by a team of threads.

One piece of work is some panels for up to 256 rows. Few rows are multiplied with a quantised panel
as it lies; for more, 128 inputs of it at a time are widened to float32 in the first-level cache and
multiplied with all of them. Every element is one sum over ascending inputs (see `tiles`), so its
value depends neither on the other rows nor on the number of threads, nor on the form in which equal
weights are kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from workbench.kernels.addresses import floats, integers, numbers, put
from workbench.kernels.lanes import WIDTH, add, div, exponential, mul, same, sub
from workbench.kernels.panels import FLOAT32, INT4, Panels
from workbench.kernels.team import Team, kernel, take
from workbench.kernels.tiles import COLUMNS, MOST_ROWS, PANEL, tile
from workbench.kernels.widening import FEW_COLUMNS, FEW_ROWS, few_rows, widen

ROWS = 256  # of one piece
_DEPTH = 128  # inputs widened at a time: 16 KiB
_PIECES = 8  # a thread, at least, where there are panels enough
_BYTES = PANEL * 4  # of 32 float32
_HALF = WIDTH * 4
PLAIN, ADD, GATED = range(3)  # what becomes of the product: out = p; out += p; out = silu(p1) p2

_plain = njit(error_model="numpy")


class _Rows(NamedTuple):
    """Rows of float32 in memory: address of the first, bytes from one to the next, how many."""

    address: int
    stride: int
    rows: int


class _Matrix(NamedTuple):
    """`Panels`, by address."""

    address: int
    panel_bytes: int
    panels: int
    columns: int
    inputs: int
    kind: int
    group: int
    half: int


@_plain
def _part(x: Any, first: int, most: int) -> Any:
    """Rows from `first` on, `most` at most."""
    return _Rows(x.address + first * x.stride, x.stride, min(most, x.rows - first))


@_plain
def _multiply_float(x: Any, weights: int, depth: int, out: Any, fresh: bool) -> None:
    """out (+)= x [rows, depth] @ weights [depth, 32], in tiles of nearly equal size."""
    tiles = (x.rows + MOST_ROWS - 1) // MOST_ROWS
    row = 0
    for number in range(tiles):
        count = x.rows // tiles + (1 if number < x.rows % tiles else 0)
        at, to = x.address + row * x.stride, out.address + row * out.stride
        for column in range(0, _BYTES, COLUMNS * 4):
            there = to + column
            tile(count, at, x.stride, weights + column, there, out.stride, depth, fresh)
        row += count


@_plain
def _multiply(x: Any, m: Any, number: int, out: Any, fresh: bool, room: Any) -> None:
    """out (+)= x @ the panel of this number; room: where to widen it."""
    panel = m.address + number * m.panel_bytes
    bits, groups, to = 4 if m.kind == INT4 else 8, m.inputs // m.group, out.address
    if m.kind == FLOAT32:
        for k in range(0, m.inputs, _DEPTH):
            some = _Rows(x.address + k * 4, x.stride, x.rows)
            depth = min(_DEPTH, m.inputs - k)
            _multiply_float(some, panel + k * _BYTES, depth, out, fresh and k == 0)
    elif x.rows <= FEW_ROWS:
        at, step, to_step = x.address, x.stride, out.stride
        for c in range(0, PANEL, FEW_COLUMNS):
            there, half = to + c * 4, m.half
            few_rows(x.rows, bits, half, m.group, at, step, panel, c, there, to_step, groups, fresh)
    else:
        for k in range(0, m.inputs, _DEPTH):
            depth = min(_DEPTH, m.inputs - k)
            weights = room.ctypes.data
            widen(bits, m.half, m.group, panel, k // m.group, depth // m.group, weights)
            some = _Rows(x.address + k * 4, x.stride, x.rows)
            _multiply_float(some, weights, depth, out, fresh and k == 0)


@_plain
def _gate(product: Any) -> None:
    """First halves of rows of 32 = silu(first half) * second half (SwiGLU, Shazeer 2020)."""
    one, zero = same(np.float32(1)), same(np.float32(0))
    for r in range(product.rows):
        at = product.address + r * product.stride
        gate = floats(at)
        silu = div(gate, add(one, exponential(sub(zero, gate))))
        put(at, mul(silu, floats(at + _HALF)))


@_plain
def _copy(source: Any, target: Any, columns: int) -> None:
    """The first so many columns of each row."""
    for r in range(source.rows):
        start = numbers(source.address + r * source.stride, columns)
        end = numbers(target.address + r * target.stride, columns)
        for c in range(columns):
            end[c] = start[c]


@_plain
def _panel(x: Any, m: Any, number: int, out: Any, mode: int, room: Any, aside: Any) -> None:
    """One panel's columns of out; aside: room for a panel's product where it cannot lie in out."""
    width = WIDTH if mode == GATED else PANEL
    wide = min(width, m.columns - number * width)
    to = _Rows(out.address + number * width * 4, out.stride, out.rows)
    if mode != GATED and wide == PANEL:
        _multiply(x, m, number, to, mode == PLAIN, room)
        return
    product = _Rows(aside.ctypes.data, _BYTES, x.rows)
    if mode == ADD:
        _copy(to, product, wide)
    _multiply(x, m, number, product, mode != ADD, room)
    if mode == GATED:
        _gate(product)
    _copy(product, to, wide)


@kernel
def _product(arguments: int, counter: int) -> None:
    """Pieces are numbered row block by row block; arguments as `multiply` gives them."""
    a = integers(arguments, 15)
    x, out = _Rows(a[0], a[1], a[2]), _Rows(a[3], a[4], a[2])
    mode, per_piece = a[5], a[6]
    m = _Matrix(a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14])
    room, aside = np.empty(_DEPTH * PANEL, np.float32), np.empty(ROWS * PANEL, np.float32)
    across = (m.panels + per_piece - 1) // per_piece
    down = (x.rows + ROWS - 1) // ROWS
    piece = take(counter)
    while piece < across * down:
        first, begin = piece // across * ROWS, piece % across * per_piece
        some, target = _part(x, first, ROWS), _part(out, first, ROWS)
        for number in range(begin, min(begin + per_piece, m.panels)):
            _panel(some, m, number, target, mode, room, aside)
        piece = take(counter)


@kernel
def _columns(arguments: int, counter: int) -> None:
    """A piece is one column; arguments as `columns` gives them."""
    a = integers(arguments, 11)
    chosen, out = integers(a[0], a[1]), a[2]
    m = _Matrix(a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10])
    room = np.empty(_DEPTH * PANEL, np.float32)
    i = take(counter)
    while i < len(chosen):
        panel, column = m.address + chosen[i] // PANEL * m.panel_bytes, chosen[i] % PANEL
        target = numbers(out + i * m.inputs * 4, m.inputs)
        for k in range(0, m.inputs, _DEPTH):
            depth, weights = min(_DEPTH, m.inputs - k), panel + k * _BYTES
            if m.kind != FLOAT32:
                weights, bits = room.ctypes.data, 4 if m.kind == INT4 else 8
                widen(bits, m.half, m.group, panel, k // m.group, depth // m.group, weights)
            values = numbers(weights, depth * PANEL)
            for j in range(depth):
                target[k + j] = values[j * PANEL + column]
        i = take(counter)


def _fields(matrix: Panels) -> tuple[int, ...]:
    """What `_Matrix` holds."""
    data, form = matrix.data, matrix.form
    where = data.ctypes.data, data.shape[1], data.shape[0]
    return *where, matrix.columns, matrix.inputs, form.kind, form.group, form.half


def columns(team: Team, matrix: Panels, chosen: torch.Tensor, out: torch.Tensor) -> None:
    """out [C, inputs] = the chosen columns (int64 [C]) of a matrix that is not gated."""
    where = chosen.data_ptr(), len(chosen), out.data_ptr()
    team.run(_columns.address, *where, *_fields(matrix))


def multiply(
    team: Team, x: torch.Tensor, matrix: Panels, out: torch.Tensor, mode: int = PLAIN
) -> None:
    """out [rows, columns] = x @ matrix, or += it, or silu(gate) * up of its two halves; float32."""
    pieces = len(matrix.data) * -(-len(x) // ROWS)
    per_piece = max(1, pieces // (team.threads * _PIECES))
    rows = x.data_ptr(), x.stride(0) * 4, len(x)
    target = out.data_ptr(), out.stride(0) * 4, mode, per_piece
    team.run(_product.address, *rows, *target, *_fields(matrix))
