"""Where a sequence's keys and values lie: addresses out of its table of blocks.

The layout is `LayerCache`'s; shape: (block_size, kv_heads, head_dim); base: the layer's address;
table: element offsets of blocks. Addresses are in bytes.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from workbench.kernels.lanes import WIDTH

_FLOAT = 4
_inlined = njit(error_model="numpy", inline="always")


@_inlined
def locate(
    count: int, base: int, shape: Any, head: int, table: Any, keys: Any, values: Any
) -> None:
    """Addresses of one head's keys and values of positions 0 .. count - 1.

    Then seven more of the last key: scores are computed eight keys at a time.
    """
    block_size, kv_heads, head_dim = shape
    for first in range(0, count, block_size):
        block = table[first // block_size]
        key = block + head * head_dim * block_size - first
        value = block + (kv_heads + head) * block_size * head_dim - first * head_dim
        for p in range(first, min(first + block_size, count)):
            keys[p] = base + _FLOAT * (key + p)
            values[p] = base + _FLOAT * (value + p * head_dim)
    for p in range(count, count + 7):
        keys[p] = keys[count - 1]


@_inlined
def locate_sixteens(count: int, base: int, shape: Any, head: int, table: Any, keys: Any) -> None:
    """Addresses of every sixteenth key; then seven more of the last."""
    block_size, _, head_dim = shape
    sixteens = (count + WIDTH - 1) // WIDTH
    for i in range(sixteens):
        p = i * WIDTH
        block = table[p // block_size]
        keys[i] = base + _FLOAT * (block + head * head_dim * block_size + p % block_size)
    for i in range(sixteens, sixteens + 7):
        keys[i] = keys[sixteens - 1]
