"""A weight matrix as a GGUF file stores it, and taken apart into what kernels multiply.

A row's columns are cut into blocks of 32 (the K kinds: 256), so rows can be picked and joined
without a change to any block. A weight is scale * code + offset in float32, rounded once, and that
is the value the `gguf` package gives: scale * code is exact in every kind with offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Scales = NDArray[np.float16] | NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of codes. bits: 4 (codes 0 .. 15, with offsets) or 8 (signed, without).

    codes: uint8 or int8 [rows, columns]; scales, offsets: [rows, columns / group], float16 where
    the file has them so, else float32.
    """

    bits: int
    group: int
    codes: NDArray[np.uint8] | NDArray[np.int8]
    scales: Scales
    offsets: Scales | None


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One kind's block: `columns` weights in `size` bytes, with a float16 at each of `halves`.

    apart(blocks [rows, n, size]): their codes, scales and offsets, of any shape.
    """

    columns: int
    size: int
    halves: tuple[int, ...]
    apart: Callable[[Bytes], Codes]


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

    def codes(self) -> Codes:
        """Codes, scales and offsets."""
        (rows, columns), form = self.shape, FORMATS[self.kind]
        blocks = np.ascontiguousarray(self.rows).reshape(rows, -1, form.size)
        apart = form.apart(blocks)
        shape = rows, columns // apart.group
        offsets = None if apart.offsets is None else apart.offsets.reshape(shape)
        codes, scales = apart.codes.reshape(rows, columns), apart.scales.reshape(shape)
        return Codes(apart.bits, apart.group, codes, scales, offsets)

    def dequantise(self) -> Floats:
        """The values: float32 [rows, columns]."""
        apart = self.codes()
        values = apart.codes.astype(np.float32).reshape(*apart.scales.shape, apart.group)
        values *= apart.scales[..., None]
        if apart.offsets is not None:
            values += apart.offsets[..., None]
        return values.reshape(self.shape)

    def pick(self, rows: NDArray[np.integer[Any]]) -> Quantised:
        """These rows, in this order, copied."""
        return Quantised(self.kind, self.rows[rows], (len(rows), self.shape[1]))


def join(parts: Sequence[Quantised]) -> Quantised:
    """Matrices of one kind and width, one below the other, copied."""
    rows = np.concatenate([part.rows for part in parts])
    return Quantised(parts[0].kind, rows, (len(rows), parts[0].shape[1]))


def _half(blocks: Bytes, first: int) -> NDArray[np.float16]:
    """The float16 at a byte of each block: [..., 1]."""
    return np.ascontiguousarray(blocks[..., first : first + 2].view(np.float16))


def _nibbles(packed: Bytes) -> Bytes:
    """Lower halves of a block's bytes, then the upper ones; a block's are moved as one number."""
    block = np.dtype((np.void, packed.shape[-1]))
    together = np.ascontiguousarray(packed.view(block)).view(np.uint8)
    codes = np.empty((*packed.shape[:-1], 2), block)
    codes[..., 0] = (together & 15).view(block)[..., 0]
    codes[..., 1] = (together >> 4).view(block)[..., 0]
    return codes.view(np.uint8)


def _q8_0(blocks: Bytes) -> Codes:
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return Codes(8, 32, codes, _half(blocks, 0), None)


def _q4_0(blocks: Bytes) -> Codes:
    scales = _half(blocks, 0)
    return Codes(4, 32, _nibbles(blocks[..., 2:]), scales, -8 * scales.astype(np.float32))


def _q4_1(blocks: Bytes) -> Codes:
    return Codes(4, 32, _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _q4_k(blocks: Bytes) -> Codes:
    """256 codes in 8 parts, whose 6-bit scales and minima share bytes 4 .. 15."""
    low, middle, high = (blocks[..., first : first + 4] for first in (4, 8, 12))
    scales = np.concatenate([low & 63, (high & 15) | (low >> 2) & 48], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 2) & 48], axis=-1)
    packed = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    offsets = -(_half(blocks, 2) * minima.astype(np.float32))
    return Codes(4, 32, _nibbles(packed), _half(blocks, 0) * scales.astype(np.float32), offsets)


def _q6_k(blocks: Bytes) -> Codes:
    """256 codes: 128 bytes of low halves, 64 of upper pairs of bits; 16 signed scales."""
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*blocks.shape[:2], 256)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-2)
    codes = (low | high.reshape(low.shape) << 4).view(np.int8) - np.int8(32)
    small = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return Codes(8, 16, codes, _half(blocks, 208) * small.astype(np.float32), None)


FORMATS = {
    "Q8_0": BlockFormat(32, 34, (0,), _q8_0),
    "Q4_0": BlockFormat(32, 18, (0,), _q4_0),
    "Q4_1": BlockFormat(32, 20, (0, 2), _q4_1),
    "Q4_K": BlockFormat(256, 144, (0, 2), _q4_k),
    "Q6_K": BlockFormat(256, 210, (208,), _q6_k),
}
