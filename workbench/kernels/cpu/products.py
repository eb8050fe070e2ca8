"""Matrix products on a CPU: x [rows, inputs] times a packed matrix, by a thread pool.

A matrix is packed in panels: panel p holds columns 32 p .. 32 p + 31 (outputs of the product), the
last one filled up with zeros. Within it, in order of inputs:

    32 bits   32 float32 an input
     8 bits   every `group` inputs: 32 scales, then 32 words for every four inputs
     4 bits   every `group` inputs: 32 scales, 32 offsets, then 32 words for every eight inputs

A word is a column's: its lowest bits are the code of the first of these inputs, and so on. So each
input's codes come out of a register of words by a shift, without moving anything sideways. A weight
is scale * code + offset in float32, rounded once; scales and offsets are float16 where that is
exact, else float32.

One piece of work is some panels for up to 128 rows. Few rows are multiplied with a quantised panel
as it lies, widened in registers; for more, some inputs of it at a time are widened to float32, once
for all of them: as many as a first-level cache keeps or, for many rows on AVX-512, so many that
sums are seldom put aside. Every element is one sum (see `tiles`), so its value does
not depend on the number of threads, nor on the form in which equal weights are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.host import aligned_zeros
from workbench.kernels.cpu.thread_pool import kernel, take
from workbench.kernels.cpu.tiles import (
    COLUMNS,
    FEW_COLUMNS,
    FEW_ROWS,
    MOST_ROWS,
    PANEL,
    few_rows,
    form_number,
    tile,
    widen,
)
from workbench.kernels.cpu.vectors import (
    FLOAT_BYTES,
    VECTOR_BYTES,
    WIDTH,
    add,
    address_of,
    aligned,
    called,
    div,
    exponential,
    floats,
    integers,
    load,
    mul,
    same,
    store,
    sub,
)
from workbench.kernels.isa import ISA
from workbench.kernels.quantised import Codes, Scales

ROWS = 128  # of one piece: so many of 1,536 inputs leave room in a second-level cache
_MANY_ROWS = 64
_DEPTH, _MOST_DEPTH = 128, ISA.depth  # inputs widened at a time for fewer (16 KiB), and for as many
PIECES = 8  # a thread, at least, where there are panels enough
_BYTES = PANEL * 4  # of 32 float32
PLAIN, ADD, GATED = range(3)  # what becomes of the product: out = p; out += p; out = silu(p1) p2


@dataclass(frozen=True, slots=True)
class Form:
    """How a panel's bytes are laid out (see above); half: scales are float16."""

    bits: int = 32
    group: int = 1
    half: bool = False


@dataclass(frozen=True, slots=True)
class Panels:
    """A matrix [inputs, columns] in panels: uint8 [panels, bytes of one].

    gated: columns 16 .. 31 of each panel belong to a second matrix of as many columns.
    """

    data: NDArray[np.uint8]
    form: Form
    inputs: int
    columns: int
    gated: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the weights; what fills up the last panel is not counted."""
        columns = self.columns * (2 if self.gated else 1)
        return self.data.shape[1] * columns // PANEL

    @property
    def shape(self) -> tuple[int, int]:
        return self.inputs, self.columns

    @property
    def arguments(self) -> tuple[int, ...]:
        """What a kernel makes a `_Matrix` of."""
        data, form = self.data, self.form
        where = data.ctypes.data, data.shape[1], data.shape[0]
        return *where, self.columns, self.inputs, form.bits, form.group, form.half


@dataclass(frozen=True, slots=True)
class Beside:
    """Matrices of the same inputs, their columns one after the other, each in a form of its own."""

    parts: tuple[Panels, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def shape(self) -> tuple[int, int]:
        return self.parts[0].inputs, sum(part.columns for part in self.parts)


def pack_floats(matrix: NDArray[np.float32], gated: bool = False) -> Panels:
    """Panels of float32 [columns, inputs], a row of it a column of the product.

    gated: the upper half of the rows belongs to the second matrix.
    """
    data = _across(matrix, _order(len(matrix), gated))
    columns = len(matrix) // (2 if gated else 1)
    return Panels(_bytes(data, len(data)), Form(), matrix.shape[1], columns, gated)


def pack_codes(codes: Codes, gated: bool = False) -> Panels:
    """Panels of quantised rows; see `pack_floats`."""
    rows, inputs = codes.codes.shape
    order = _order(rows, gated)
    floats = [part for part in (codes.scales, codes.offsets) if part is not None]
    half = all(map(_all_halves, floats))
    stored: NDArray[Any] = codes.codes.view(np.uint8)
    if codes.bits == 4:
        stored = stored[:, 0::2] | stored[:, 1::2] << 4
    parts = [_across(part.astype(np.float16 if half else np.float32), order) for part in floats]
    parts.append(_across(np.ascontiguousarray(stored).view(np.uint32), order))
    shape = len(order) // PANEL, inputs // codes.group
    pieces = [_bytes(part, *shape) for part in parts]
    data = aligned_zeros(sum(piece.size for piece in pieces)).reshape(*shape, -1)
    np.concatenate(pieces, axis=-1, out=data)
    form, columns = Form(codes.bits, codes.group, half), rows // (2 if gated else 1)
    return Panels(data.reshape(len(data), -1), form, inputs, columns, gated)


def _across(values: NDArray[Any], order: NDArray[np.int64]) -> NDArray[Any]:
    """[panels, n, 32]: values [rows, n] of a panel's columns side by side, zeros for no row."""
    shape = len(order) // PANEL, values.shape[1], PANEL
    across = aligned_zeros(prod(shape) * values.itemsize).view(values.dtype).reshape(shape)
    for panel, rows in enumerate(order.reshape(-1, PANEL)):  # each in the cache
        taken = values[rows]
        taken[rows < 0] = 0
        across[panel] = taken.T
    return across


def _bytes(values: NDArray[Any], *shape: int) -> NDArray[np.uint8]:
    """uint8 [*shape, bytes]."""
    return values.reshape(-1).view(np.uint8).reshape(*shape, -1)


def _order(rows: int, gated: bool) -> NDArray[np.int64]:
    """The row that each column of the panels takes, -1 for none."""
    if not gated:
        return np.concatenate([np.arange(rows), np.full(-rows % PANEL, -1)])
    one = np.concatenate([np.arange(rows // 2), np.full(-(rows // 2) % WIDTH, -1)])
    other = np.where(one < 0, -1, one + rows // 2)
    return np.stack([one.reshape(-1, WIDTH), other.reshape(-1, WIDTH)], axis=1).reshape(-1)


def _all_halves(values: Scales) -> bool:
    """Whether float16 holds them exactly."""
    if values.dtype == np.float16:
        return True
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


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
    bits: int
    group: int
    half: int


@called
def _part(x: Any, first: int, most: int) -> Any:
    """Rows from `first` on, `most` at most."""
    return _Rows(x.address + first * x.stride, x.stride, min(most, x.rows - first))


@called
def _multiply_float(x: Any, weights: int, depth: int, out: Any, fresh: bool) -> None:
    """out (+)= x [rows, depth] @ weights [depth, 32], in tiles of nearly equal size."""
    tiles = (x.rows + MOST_ROWS - 1) // MOST_ROWS
    row = 0
    for number in range(tiles):
        count = x.rows // tiles + (1 if number < x.rows % tiles else 0)
        at, to = x.address + row * x.stride, out.address + row * out.stride
        for column in range(0, _BYTES, COLUMNS * 4):
            there = to + column
            tile((count, at, x.stride, weights + column, there, out.stride, depth, fresh))
        row += count


@called
def _depth(m: Any, rows: int) -> int:
    """Inputs widened at a time for so many rows: parts as equal as groups allow."""
    most = _MOST_DEPTH if rows >= _MANY_ROWS else _DEPTH
    groups, parts = m.inputs // m.group, (m.inputs + most - 1) // most
    return (groups + parts - 1) // parts * m.group


@called
def _floats_of(m: Any, panel: int, k: int, depth: int, room: Any) -> int:
    """Where a panel's weights from input `k` on are float32: in the panel, or widened into room."""
    if m.bits == 32:
        return panel + k * _BYTES
    form, to = form_number(m.bits, m.half), address_of(room)
    widen((form, m.group, panel, k // m.group, depth // m.group, to))
    return to


@called
def _multiply(x: Any, m: Any, number: int, out: Any, fresh: bool, room: Any) -> None:
    """out (+)= x @ the panel of this number; room: where to widen it."""
    panel, step = m.address + number * m.panel_bytes, out.stride
    if m.bits != 32 and x.rows <= FEW_ROWS:
        case = FEW_ROWS * form_number(m.bits, m.half) + x.rows
        source, groups = (m.group, x.address, x.stride, panel), m.inputs // m.group
        for c in range(0, PANEL, FEW_COLUMNS):
            few_rows((case, *source, c, out.address + c * FLOAT_BYTES, step, groups, fresh))
        return
    most = _depth(m, x.rows)
    for k in range(0, m.inputs, most):
        some, depth = _Rows(x.address + k * 4, x.stride, x.rows), min(most, m.inputs - k)
        _multiply_float(some, _floats_of(m, panel, k, depth, room), depth, out, fresh and k == 0)


@called
def _gate(product: Any, out: Any) -> None:
    """out [rows, 16] = silu(first half) * second half of rows of 32 (SwiGLU, Shazeer 2020)."""
    one, zero = same(np.float32(1)), same(np.float32(0))
    for r in range(product.rows):
        at = product.address + r * product.stride
        gate = load(at)
        silu = div(gate, add(one, exponential(sub(zero, gate))))
        store(out.address + r * out.stride, mul(silu, load(at + VECTOR_BYTES)))


@called
def _copy(source: Any, target: Any, columns: int) -> None:
    """The first so many columns of each row."""
    for r in range(source.rows):
        start = floats(source.address + r * source.stride, columns)
        end = floats(target.address + r * target.stride, columns)
        for c in range(columns):
            end[c] = start[c]


@called
def _panel(x: Any, m: Any, number: int, out: Any, mode: int, room: Any, aside: Any) -> None:
    """One panel's columns of out; aside: room for a panel's product where it cannot lie in out."""
    width = WIDTH if mode == GATED else PANEL
    wide = min(width, m.columns - number * width)
    to = _Rows(out.address + number * width * 4, out.stride, out.rows)
    if mode != GATED and wide == PANEL:
        _multiply(x, m, number, to, mode == PLAIN, room)
        return
    product = _Rows(address_of(aside), _BYTES, x.rows)
    if mode == ADD:
        _copy(to, product, wide)
    _multiply(x, m, number, product, mode != ADD, room)
    if mode == GATED and wide == WIDTH:
        _gate(product, to)
        return
    if mode == GATED:
        _gate(product, product)
    _copy(product, to, wide)


@kernel
def product(arguments: int, counter: int) -> None:
    """Arguments: x, out, mode, panels of a piece, matrix; pieces are numbered row block first."""
    a = integers(arguments, 15)
    x, out = _Rows(a[0], a[1], a[2]), _Rows(a[3], a[4], a[2])
    mode, per_piece = a[5], a[6]
    m = _Matrix(a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14])
    room, aside = aligned(_depth(m, x.rows) * PANEL), aligned(ROWS * PANEL)
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
def columns(arguments: int, counter: int) -> None:
    """A piece is one column; arguments: chosen, out, matrix."""
    a = integers(arguments, 11)
    chosen, out = integers(a[0], a[1]), a[2]
    m = _Matrix(a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10])
    most = _depth(m, np.int64(1))
    room = aligned(most * PANEL)
    i = take(counter)
    while i < len(chosen):
        panel, column = m.address + chosen[i] // PANEL * m.panel_bytes, chosen[i] % PANEL
        target = floats(out + i * m.inputs * 4, m.inputs)
        for k in range(0, m.inputs, most):
            depth = min(most, m.inputs - k)
            values = floats(_floats_of(m, panel, k, depth, room), depth * PANEL)
            for j in range(depth):
                target[k + j] = values[j * PANEL + column]
        i = take(counter)
