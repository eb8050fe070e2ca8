"""A weight matrix as the CPU's product kernel reads it: panels of 32 columns, inputs one by one.

Panel p holds columns 32 p .. 32 p + 31 (outputs of the product), the last one filled up with zeros.
Within it, in order of inputs:

    FLOAT32   32 float32 an input
    INT8      every `group` inputs: 32 scales, then 32 words for every four inputs
    INT4      every `group` inputs: 32 scales, 32 offsets, then 32 words for every eight inputs

A word is a column's: its lowest bits are the code of the first of these inputs, and so on. So each
input's codes come out of a register of words by a shift, without moving anything sideways.

A weight is scale * code + offset in float32, rounded once. Scales and offsets are float16 where
that is exact, else float32. Codes stay as small as the file had them; the kernel widens some inputs
of a panel at a time, in the first-level cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from workbench.kernels.compiled import MATRIX, compiled
from workbench.kernels.lanes import WIDTH
from workbench.kernels.quantised import Codes, Scales
from workbench.kernels.tiles import PANEL

FLOAT32, INT8, INT4 = range(3)
_BITS = {FLOAT32: 32, INT8: 8, INT4: 4}
_inlined = njit(error_model="numpy", inline="always")


@dataclass(frozen=True, slots=True)
class Form:
    """How a panel's bytes are laid out; see the module's text. half: scales are float16."""

    kind: int = FLOAT32
    group: int = 1
    half: bool = False

    @property
    def scale_bytes(self) -> int:
        """Bytes before a group's codes: of scales, and of offsets where there are any."""
        arrays = {FLOAT32: 0, INT8: 1, INT4: 2}[self.kind]
        return arrays * PANEL * (2 if self.half else 4)

    @property
    def group_bytes(self) -> int:
        """Bytes of a group: those, and its codes."""
        return self.scale_bytes + self.group * PANEL * _BITS[self.kind] // 8


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
        return self.inputs // self.form.group * self.form.group_bytes * columns // PANEL

    @property
    def shape(self) -> tuple[int, int]:
        return self.inputs, self.columns


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
    order = _order(len(matrix), gated)
    panels, inputs = len(order) // PANEL, matrix.shape[1]
    data = np.zeros((panels, inputs * PANEL * 4), np.uint8)
    _place_floats(np.ascontiguousarray(matrix), order, data.view(np.float32))
    return Panels(data, Form(), inputs, len(matrix) // (2 if gated else 1), gated)


def pack_codes(codes: Codes, gated: bool = False) -> Panels:
    """Panels of quantised rows; see `pack_floats`."""
    rows, inputs = codes.codes.shape
    order = _order(rows, gated)
    half = _all_halves(codes.scales) and (codes.offsets is None or _all_halves(codes.offsets))
    form = Form(INT4 if codes.bits == 4 else INT8, codes.group, half)
    data = np.zeros((len(order) // PANEL, inputs // codes.group, form.group_bytes), np.uint8)
    scales = [codes.scales] if codes.offsets is None else [codes.scales, codes.offsets]
    width = PANEL * (2 if half else 4)
    for number, values in enumerate(scales):
        at = slice(number * width, (number + 1) * width)
        data[..., at] = _place_scales(values, order, np.float16 if half else np.float32)
    place = _place_nibbles if codes.bits == 4 else _place_bytes
    place(codes.codes.view(np.uint8), order, form.group, form.scale_bytes, data)
    columns = rows // (2 if gated else 1)
    return Panels(data.reshape(len(data), -1), form, inputs, columns, gated)


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


def _place_scales(values: Scales, order: NDArray[np.int64], dtype: type) -> NDArray[np.uint8]:
    """uint8 [panels, groups, bytes]: 32 columns' values side by side."""
    taken: NDArray[Any] = values.astype(dtype)[order]
    taken[order < 0] = 0
    turned = taken.reshape(-1, PANEL, values.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(turned).view(np.uint8)


@_inlined
def _take(rows: Any, order: Any, panel: int, room: Any) -> None:
    """The rows of a panel's columns, side by side in `room`; zeros where there is none."""
    for column in range(PANEL):
        row = order[panel * PANEL + column]
        if row < 0:
            room[column] = 0
        else:
            room[column] = rows[row]


@compiled(types.Array(types.float32, 2, "C", readonly=True), types.int64[::1], MATRIX)
def _place_floats(matrix: Any, order: Any, data: Any) -> None:
    room = np.empty((PANEL, matrix.shape[1]), np.float32)
    for panel in range(len(data)):
        _take(matrix, order, panel, room)
        for k in range(matrix.shape[1]):
            for column in range(PANEL):
                data[panel, k * PANEL + column] = room[column, k]


_CODES = (types.uint8[:, ::1], types.int64[::1], types.int64, types.int64, types.uint8[:, :, ::1])


@compiled(*_CODES)
def _place_bytes(codes: Any, order: Any, group: int, start: int, data: Any) -> None:
    room = np.empty((PANEL, codes.shape[1]), np.uint8)
    for panel in range(len(data)):
        _take(codes, order, panel, room)
        for k in range(0, codes.shape[1], 4):
            at = start + k % group * PANEL
            for column in range(PANEL):
                for byte in range(4):
                    data[panel, k // group, at + 4 * column + byte] = room[column, k + byte]


@compiled(*_CODES)
def _place_nibbles(codes: Any, order: Any, group: int, start: int, data: Any) -> None:
    room = np.empty((PANEL, codes.shape[1]), np.uint8)
    for panel in range(len(data)):
        _take(codes, order, panel, room)
        for k in range(0, codes.shape[1], 8):
            at = start + k % group * PANEL // 2
            for column in range(PANEL):
                for byte in range(4):
                    upper = room[column, k + 2 * byte + 1] << 4
                    both = room[column, k + 2 * byte] | upper
                    data[panel, k // group, at + 4 * column + byte] = both
