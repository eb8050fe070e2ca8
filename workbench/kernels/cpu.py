"""The CPU kernels (numba, float32): keys and values into blocks, norms, SwiGLU; attention is in cpu_attention.

Every sum has one order, written out, so a row's result does not depend on the batch it is computed in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types

from workbench.kernels import Kernels
from workbench.kernels.compiled import compiled, exponential, fma
from workbench.kernels.context import ForwardContext, LayerCache
from workbench.kernels.cpu_attention import FEW_LANES, attend_few, attend_many

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)

_MATRIX, _VECTOR = types.float32[:, ::1], types.float32[::1]
_INDEX, _COUNTS, _TABLE = types.int64[::1], types.int32[::1], types.int64[:, ::1]
_CACHE = (
    _VECTOR,
    types.int64,
    types.int64,
    types.int64,
    types.int64,
)  # LayerCache's fields in order


@compiled(types.void(_MATRIX, _VECTOR, types.float32, _MATRIX))
def _rms_norm(x: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """Squares are added in 16 interleaved sums, then the 16 in order: one order, and a vector instruction."""
    rows, width = x.shape
    sums = np.empty(16, np.float32)
    for t in range(rows):
        sums[:] = _ZERO
        for first in range(0, width - 15, 16):
            for i in range(16):
                sums[i] = fma(x[t, first + i], x[t, first + i], sums[i])
        for i in range(width - width % 16, width):
            sums[0] = fma(x[t, i], x[t, i], sums[0])
        total = _ZERO
        for i in range(16):
            total += sums[i]
        scale = _ONE / np.sqrt(total / np.float32(width) + epsilon)
        for i in range(width):
            out[t, i] = x[t, i] * scale * weight[i]


@compiled(types.void(_MATRIX, _MATRIX, _VECTOR, types.float32, _MATRIX))
def _add_rms_norm(x: Any, delta: Any, weight: Any, epsilon: Any, out: Any) -> None:
    for t in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[t, i] += delta[t, i]
    _rms_norm(x, weight, epsilon, out)


@compiled(types.void(_MATRIX, _MATRIX))
def _silu_mul(gate_up: Any, out: Any) -> None:
    inner = out.shape[1]
    for t in range(out.shape[0]):
        for i in range(inner):
            gate = gate_up[t, i]
            out[t, i] = gate / (_ONE + exponential(-gate)) * gate_up[t, inner + i]


@compiled(types.void(_MATRIX, _MATRIX, _MATRIX, *_CACHE, _INDEX, _INDEX, _TABLE))
def _store_kv(
    qkv: Any,
    cosine: Any,
    sine: Any,
    data: Any,
    base: Any,
    block_size: Any,
    kv_heads: Any,
    head_dim: Any,
    positions: Any,
    sequence: Any,
    block_offsets: Any,
) -> None:
    rows, columns = qkv.shape
    width = kv_heads * head_dim
    half = head_dim // 2
    for t in range(rows):
        p = positions[t]
        for head in range(0, columns - width, head_dim):
            for i in range(half):
                first, second = qkv[t, head + i], qkv[t, head + half + i]
                qkv[t, head + i] = fma(first, cosine[p, i], -(second * sine[p, i]))
                qkv[t, head + half + i] = fma(second, cosine[p, i], first * sine[p, i])
        at = base + block_offsets[sequence[t], p // block_size] + p % block_size * width
        for i in range(width):
            data[at + i] = qkv[t, columns - 2 * width + i]
            data[at + block_size * width + i] = qkv[t, columns - width + i]


def _numbers(cache: LayerCache) -> tuple[Any, int, int, int, int]:
    return cache.data.numpy(), cache.base, cache.block_size, cache.kv_heads, cache.head_dim


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
    _rms_norm(x.numpy(), weight.numpy(), epsilon, out.numpy())


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
) -> None:
    _add_rms_norm(x.numpy(), delta.numpy(), weight.numpy(), epsilon, out.numpy())


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    _silu_mul(gate_up.numpy(), out.numpy())


def store_kv(
    qkv: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    cache: LayerCache,
    context: ForwardContext,
) -> None:
    where = (context.positions, context.sequence, context.block_offsets)
    _store_kv(qkv.numpy(), cosine.numpy(), sine.numpy(), *_numbers(cache), *where)


def attend(
    qkv: torch.Tensor, out: torch.Tensor, cache: LayerCache, context: ForwardContext
) -> None:
    heads = out.shape[1] // cache.head_dim
    lanes_each = len(context.positions) * heads // (cache.kv_heads * len(context.context_len))
    kernel = attend_few if lanes_each <= FEW_LANES else attend_many
    where = (context.positions, context.query_start, context.block_offsets)
    kernel(qkv.numpy(), out.numpy(), *_numbers(cache), *where)


def kernels() -> Kernels:
    """The CPU kernels; they compile when first imported on a machine and are read from disk afterwards."""
    return Kernels("cpu", True, rms_norm, add_rms_norm, store_kv, attend, silu_mul)
