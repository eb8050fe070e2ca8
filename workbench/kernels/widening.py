"""Quantised weights of a panel as float32: scale * code + offset, rounded once."""

from __future__ import annotations

from numba import njit

from workbench.kernels.addresses import (
    floats,
    halves,
    high_nibbles,
    low_nibbles,
    put,
    signed_bytes,
)
from workbench.kernels.lanes import WIDTH, fma, mul
from workbench.kernels.panels import INT4
from workbench.kernels.tiles import PANEL

_BYTES, _HALF = PANEL * 4, WIDTH * 4
_plain = njit(error_model="numpy", inline="always")


@_plain
def _widen_nibbles(at: int, group: int, half: int, out: int) -> None:
    """One group of INT4."""
    size = PANEL * (2 if half else 4)  # of one array of scales
    if half:
        s0, s1 = halves(at), halves(at + size // 2)
        o0, o1 = halves(at + size), halves(at + size + size // 2)
    else:
        s0, s1 = floats(at), floats(at + size // 2)
        o0, o1 = floats(at + size), floats(at + size + size // 2)
    codes = at + 2 * size
    for k in range(group):
        put(out + k * _BYTES, fma(s0, low_nibbles(codes + k * WIDTH), o0))
        put(out + k * _BYTES + _HALF, fma(s1, high_nibbles(codes + k * WIDTH), o1))


@_plain
def _widen_bytes(at: int, group: int, half: int, out: int) -> None:
    """One group of INT8."""
    size = PANEL * (2 if half else 4)
    if half:
        s0, s1 = halves(at), halves(at + size // 2)
    else:
        s0, s1 = floats(at), floats(at + size // 2)
    codes = at + size
    for k in range(group):
        put(out + k * _BYTES, mul(s0, signed_bytes(codes + k * PANEL)))
        put(out + k * _BYTES + _HALF, mul(s1, signed_bytes(codes + k * PANEL + WIDTH)))


@njit(error_model="numpy")
def widen(panel: int, kind: int, group: int, half: int, first: int, count: int, out: int) -> None:
    """Inputs first .. first + count - 1, whole groups, of a panel: float32 [count, 32] at `out`."""
    size = PANEL * (2 if half else 4)
    for start in range(0, count, group):
        number, to = (first + start) // group, out + start * _BYTES
        if kind == INT4:
            _widen_nibbles(panel + number * (2 * size + group * WIDTH), group, half, to)
        else:
            _widen_bytes(panel + number * (size + group * PANEL), group, half, to)
