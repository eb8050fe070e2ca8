"""A weight matrix as a GGUF file stores it: rows of blocks with their scales, and what they mean.

A row's columns are cut into blocks of 32 (the K kinds: 256), so rows can be picked and joined
without a change to any block. Dequantising is exact: the same float32 operations in the same order
as the `gguf` package. What it does not do: quantise, or multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from workbench.kernels.compiled import MATRIX, VECTOR, compiled

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_BLOCKS = types.Array(types.uint8, 2, "C", readonly=True)  # a mapped file is read-only


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One kind's block: `columns` weights in `size` bytes, with a float16 at each of `halves`.

    decode(blocks [n, size], one float32 [n] for each half, out [n, columns]) writes the values.
    """

    columns: int
    size: int
    halves: tuple[int, ...]
    decode: Callable[..., None]


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix of shape (rows, columns), kept as its file's bytes.

    kind: a key of FORMATS; rows: uint8 [rows, bytes a row], perhaps mapped from the file.
    Invariant: columns are whole blocks, and a row's bytes are theirs.
    """

    kind: str
    rows: Bytes
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        form = FORMATS[self.kind]
        assert self.shape[1] % form.columns == 0, (self.kind, self.shape)
        assert self.rows.shape == (self.shape[0], self.shape[1] // form.columns * form.size)

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return int(self.rows.nbytes)

    @property
    def is_finite(self) -> bool:
        """Whether no scale is infinite or NaN: a float16 with every bit of its exponent set."""
        form = FORMATS[self.kind]
        high_bytes = [self.rows.reshape(-1, form.size)[:, first + 1] for first in form.halves]
        return not any((part & 0x7C == 0x7C).any() for part in high_bytes)

    def dequantise(self) -> Floats:
        """The values: float32 [rows, columns]."""
        form, out = FORMATS[self.kind], np.empty(self.shape, np.float32)
        blocks = np.ascontiguousarray(self.rows).reshape(-1, form.size)
        halves = [_half(blocks, first) for first in form.halves]
        form.decode(blocks, *halves, out.reshape(-1, form.columns))
        return out

    def pick(self, rows: NDArray[np.integer[Any]]) -> Quantised:
        """These rows, in this order, copied."""
        return Quantised(self.kind, self.rows[rows], (len(rows), self.shape[1]))


def join(parts: Sequence[Quantised]) -> Quantised:
    """Matrices of one kind and width, one below the other, copied."""
    rows = np.concatenate([part.rows for part in parts])
    return Quantised(parts[0].kind, rows, (len(rows), parts[0].shape[1]))


def _half(blocks: Bytes, first: int) -> Floats:
    """The float16 at byte `first` of each block: float32 [n]."""
    pairs = np.ascontiguousarray(blocks[:, first : first + 2])
    return pairs.view(np.float16).astype(np.float32).reshape(-1)


@compiled(_BLOCKS, VECTOR, MATRIX)
def _decode_q8_0(blocks: Any, scales: Any, out: Any) -> None:
    """32 int8 after the scale: scale * q."""
    for n in range(len(blocks)):
        for i in range(32):
            out[n, i] = scales[n] * np.float32(np.int8(blocks[n, 2 + i]))


@compiled(_BLOCKS, VECTOR, MATRIX)
def _decode_q4_0(blocks: Any, scales: Any, out: Any) -> None:
    """16 bytes after the scale, low halves first: scale * (q - 8)."""
    for n in range(len(blocks)):
        for i in range(16):
            packed = blocks[n, 2 + i]
            out[n, i] = scales[n] * (np.float32(packed & 15) - np.float32(8))
            out[n, 16 + i] = scales[n] * (np.float32(packed >> 4) - np.float32(8))


@compiled(_BLOCKS, VECTOR, VECTOR, MATRIX)
def _decode_q4_1(blocks: Any, scales: Any, minima: Any, out: Any) -> None:
    """16 bytes after scale and minimum, low halves first: scale * q + minimum."""
    for n in range(len(blocks)):
        for i in range(16):
            packed = blocks[n, 4 + i]
            out[n, i] = scales[n] * np.float32(packed & 15) + minima[n]
            out[n, 16 + i] = scales[n] * np.float32(packed >> 4) + minima[n]


@njit(error_model="numpy", inline="always")
def _six_bits(block: Any, part: Any, first: Any) -> Any:
    """Number `part` of eight 6-bit scales (first=4) or minima (first=8), which share 12 bytes.

    Bytes 4-7 hold the first four scales, 8-11 the first four minima; the two high bits of each,
    and a half of a byte of 12-15, make the last four of either.
    """
    if part < 4:
        return np.float32(block[first + part] & 63)
    half = block[8 + part] >> (first - 4)
    return np.float32((half & 15) | ((block[first + part - 4] >> 2) & 48))


@compiled(_BLOCKS, VECTOR, VECTOR, MATRIX)
def _decode_q4_k(blocks: Any, scales: Any, minima: Any, out: Any) -> None:
    """Eight parts of 32, a scale and a minimum each, two parts in the halves of 32 bytes."""
    for n in range(len(blocks)):
        for part in range(8):
            scale = scales[n] * _six_bits(blocks[n], part, 4)
            minimum = minima[n] * _six_bits(blocks[n], part, 8)
            first, shift = 16 + part // 2 * 32, part % 2 * 4
            for i in range(32):
                code = np.float32((blocks[n, first + i] >> shift) & 15)
                out[n, part * 32 + i] = scale * code - minimum


@compiled(_BLOCKS, VECTOR, MATRIX)
def _decode_q6_k(blocks: Any, scales: Any, out: Any) -> None:
    """Two halves of 128: low four bits of 64 bytes, two high ones of 32; 16 int8 scales."""
    for n in range(len(blocks)):
        for part in range(8):  # 32 values each, two scales
            low = part // 4 * 64 + part % 2 * 32
            high = 128 + part // 4 * 32
            low_shift, high_shift = part % 4 // 2 * 4, part % 4 * 2
            for i in range(32):
                scale = scales[n] * np.float32(np.int8(blocks[n, 192 + part * 2 + i // 16]))
                code = (blocks[n, low + i] >> low_shift) & 15
                code |= ((blocks[n, high + i] >> high_shift) & 3) << 4
                out[n, part * 32 + i] = scale * np.float32(np.int64(code) - 32)


FORMATS = {
    "Q8_0": BlockFormat(32, 34, (0,), _decode_q8_0),
    "Q4_0": BlockFormat(32, 18, (0,), _decode_q4_0),
    "Q4_1": BlockFormat(32, 20, (0, 2), _decode_q4_1),
    "Q4_K": BlockFormat(256, 144, (0, 2), _decode_q4_k),
    "Q6_K": BlockFormat(256, 210, (208,), _decode_q6_k),
}
