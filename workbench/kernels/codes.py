"""Quantised weights taken apart: small whole numbers, and what each group of them is scaled by.

A weight is scale * code + offset in float32, rounded once, and that is bit for bit what the file's
format means: scale * code is exact in every format with offsets. This is the form in which kernels
multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.kernels.quantised import Quantised

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of codes. bits: 4 (codes 0 .. 15, with offsets) or 8 (signed, without).

    codes: uint8 or int8 [rows, inputs]; scales, offsets: float32 [rows, inputs / group].
    """

    bits: int
    group: int
    codes: NDArray[np.uint8] | NDArray[np.int8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32] | None


def take_apart(matrix: Quantised) -> Codes:
    """The codes, scales and offsets of a matrix."""
    rows, inputs = matrix.shape
    size = _BLOCK_BYTES[matrix.kind]
    blocks = np.ascontiguousarray(matrix.rows).reshape(rows, -1, size)
    bits, group, codes, scales, offsets = _SPLITS[matrix.kind](blocks)
    shape = (rows, inputs // group)
    return Codes(
        bits,
        group,
        codes.reshape(rows, inputs),
        np.ascontiguousarray(scales, np.float32).reshape(shape),
        None if offsets is None else np.ascontiguousarray(offsets, np.float32).reshape(shape),
    )


def join(parts: Sequence[Codes]) -> Codes:
    """Matrices of one layout, one below the other."""
    first = parts[0]
    return Codes(
        first.bits,
        first.group,
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        None if first.offsets is None else np.concatenate([part.offsets for part in parts]),
    )


def _half(blocks: Bytes, at: int) -> NDArray[np.float32]:
    """The float16 at a byte of each block, as float32 [..., 1]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Lower halves of the bytes, then the upper ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q8_0(blocks: Bytes) -> tuple:
    return 8, 32, np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _half(blocks, 0), None


def _q4_0(blocks: Bytes) -> tuple:
    scales = _half(blocks, 0)
    return 4, 32, _nibbles(blocks[..., 2:]), scales, np.float32(-8) * scales


def _q4_1(blocks: Bytes) -> tuple:
    return 4, 32, _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: Bytes) -> tuple:
    """256 codes in 8 parts, whose 6-bit scales and minima share bytes 4 .. 15."""
    low, middle, high = (blocks[..., first : first + 4] for first in (4, 8, 12))
    scales = np.concatenate([low & 63, (high & 15) | (low >> 2) & 48], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 2) & 48], axis=-1)
    packed = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    offsets = -(_half(blocks, 2) * minima.astype(np.float32))
    return 4, 32, _nibbles(packed), _half(blocks, 0) * scales.astype(np.float32), offsets


def _q6_k(blocks: Bytes) -> tuple:
    """256 codes: 128 bytes of low halves, 64 of upper pairs of bits; 16 signed scales."""
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*blocks.shape[:2], 256)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-2)
    codes = (low | high.reshape(low.shape) << 4).view(np.int8) - np.int8(32)
    small = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return 8, 16, codes, _half(blocks, 208) * small.astype(np.float32), None


_SPLITS = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q6_K": _q6_k}
_BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q4_K": 144, "Q6_K": 210}
