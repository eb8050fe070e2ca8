"""The CPU kernels (numba, float32): norms, keys and values into blocks; products and attention's.

Every sum has one order, written out, so a row's result does not depend on the batch it is in.
What they mean is said in `Kernels` and, in plain torch, in `reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit, types

from workbench.kernels import ForwardContext, Kernels, LayerCache, Part, Quantised
from workbench.kernels.codes import join, take_apart
from workbench.kernels.compiled import MATRIX, VECTOR, compiled
from workbench.kernels.cpu_attention import attend
from workbench.kernels.lanes import WIDTH, fma, load, mul, same, store, total
from workbench.kernels.panels import Panels, pack_codes, pack_floats
from workbench.kernels.products import ADD, GATED, PLAIN, columns, multiply
from workbench.kernels.team import Team

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@njit(error_model="numpy", inline="always")
def _norm_rows(x: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """Squares are added in 16 interleaved sums, these in order, then what 16 does not divide."""
    width = x.shape[1]
    for t in range(x.shape[0]):
        row, target = x[t], out[t]
        squares = same(_ZERO)
        for i in range(0, width - WIDTH + 1, WIDTH):
            part = load(row, i)
            squares = fma(part, part, squares)
        square = total(squares)
        for i in range(width - width % WIDTH, width):
            square += row[i] * row[i]
        scale = same(_ONE / np.sqrt(square / np.float32(width) + epsilon))
        for i in range(0, width - WIDTH + 1, WIDTH):
            store(target, i, mul(mul(load(row, i), scale), load(weight, i)))
        end = width - WIDTH  # the last 16 once more, for what 16 does not divide
        store(target, end, mul(mul(load(row, end), scale), load(weight, end)))


@compiled(MATRIX, VECTOR, types.float32, MATRIX)
def _rms_norm(x: Any, weight: Any, epsilon: Any, out: Any) -> None:
    _norm_rows(x, weight, epsilon, out)


@njit(error_model="numpy", inline="always")
def _rotate(row: Any, head: int, half: int, cosine: Any, sine: Any) -> None:
    for i in range(half):
        first, second = row[head + i], row[head + half + i]
        row[head + i] = first * cosine[i] - second * sine[i]
        row[head + half + i] = second * cosine[i] + first * sine[i]


@compiled(
    *(MATRIX, MATRIX, MATRIX),  # qkv, cosine, sine
    *(VECTOR, types.int64, types.int64, types.int64, types.int64),  # LayerCache
    *(types.int64[::1], types.int64[::1], types.int64[:, ::1]),  # of ForwardContext
)
def _store_kv(
    qkv: Any,
    cosine: Any,
    sine: Any,
    data: Any,
    base: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    positions: Any,
    sequence: Any,
    block_offsets: Any,
) -> None:
    rows, columns = qkv.shape
    width = kv_heads * head_dim
    for t in range(rows):
        p = positions[t]
        row, slot = qkv[t], p % block_size
        for head in range(0, columns - width, head_dim):
            _rotate(row, head, head_dim // 2, cosine[p], sine[p])
        block = base + block_offsets[sequence[t], p // block_size]
        for i in range(width):
            data[block + i * block_size + slot] = row[columns - 2 * width + i]
        values = block + block_size * width
        for head in range(kv_heads):
            value = values + (head * block_size + slot) * head_dim
            for d in range(head_dim):
                data[value + d] = row[columns - width + head * head_dim + d]


def _fields(cache: LayerCache) -> tuple[Any, int, int, int, int]:
    return cache.data.numpy(), cache.base, cache.block_size, cache.kv_heads, cache.head_dim


class CpuKernels(Kernels):
    """float32 on a CPU, by a team of threads."""

    name, batch_invariant = "cpu", True

    def __init__(self, threads: int) -> None:
        self.team = Team(threads)

    def pack(self, parts: Sequence[Part], gated: bool = False) -> Panels:
        """Parts in codes of one layout stay codes; others become float32."""
        codes = [take_apart(part) for part in parts if isinstance(part, Quantised)]
        if len(codes) == len(parts) and len({(c.bits, c.group) for c in codes}) == 1:
            return pack_codes(join(codes), gated)
        floats = [
            part.dequantise() if isinstance(part, Quantised) else part.float().numpy()
            for part in parts
        ]
        return pack_floats(np.concatenate(floats), gated)

    def multiply(self, x: torch.Tensor, matrix: Panels, out: torch.Tensor) -> None:
        multiply(self.team, x, matrix, out, PLAIN)

    def multiply_add(self, x: torch.Tensor, matrix: Panels, out: torch.Tensor) -> None:
        multiply(self.team, x, matrix, out, ADD)

    def multiply_gated(self, x: torch.Tensor, matrix: Panels, out: torch.Tensor) -> None:
        multiply(self.team, x, matrix, out, GATED)

    def columns(self, matrix: Panels, numbers: torch.Tensor, out: torch.Tensor) -> None:
        columns(self.team, matrix, numbers, out)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
    ) -> None:
        _rms_norm(x.numpy(), weight.numpy(), epsilon, out.numpy())

    def store_kv(
        self,
        qkv: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        cache: LayerCache,
        context: ForwardContext,
    ) -> None:
        where = (context.positions, context.sequence, context.block_offsets)
        _store_kv(qkv.numpy(), cosine.numpy(), sine.numpy(), *_fields(cache), *where)

    def attend(
        self, qkv: torch.Tensor, out: torch.Tensor, cache: LayerCache, context: ForwardContext
    ) -> None:
        """Sixteen lanes at a time."""
        attend(self.team, qkv, out, cache, context)
