"""The CPU kernels (numba, float32): keys and values into blocks, norms, SwiGLU; and attention's.

Every sum has one order, written out, so a row's result does not depend on the batch it is in.
What they mean is said in `Kernels` and, in plain torch, in `reference`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, types

from workbench.kernels import Kernels
from workbench.kernels.compiled import MATRIX, VECTOR, compiled
from workbench.kernels.context import ForwardContext, LayerCache
from workbench.kernels.cpu_attention import attend_rows
from workbench.kernels.lanes import (
    WIDTH,
    add,
    div,
    exponential,
    fma,
    load,
    mul,
    same,
    store,
    sub,
    total,
)

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


@compiled(MATRIX, MATRIX, VECTOR, types.float32, MATRIX)
def _add_rms_norm(x: Any, delta: Any, weight: Any, epsilon: Any, out: Any) -> None:
    for t in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[t, i] += delta[t, i]
    _norm_rows(x, weight, epsilon, out)


@njit(error_model="numpy", inline="always")
def _silu_lanes(row: Any, at: int, inner: int, out: Any) -> None:
    gate, up = load(row, at), load(row, inner + at)
    negated = exponential(sub(same(_ZERO), gate))
    store(out, at, mul(div(gate, add(same(_ONE), negated)), up))


@compiled(MATRIX, MATRIX)
def _silu_mul(gate_up: Any, out: Any) -> None:
    inner = out.shape[1]
    for t in range(out.shape[0]):
        row, target = gate_up[t], out[t]
        for i in range(0, inner - WIDTH + 1, WIDTH):
            _silu_lanes(row, i, inner, target)
        _silu_lanes(row, inner - WIDTH, inner, target)


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
        for head in range(0, columns - width, head_dim):
            _rotate(qkv[t], head, head_dim // 2, cosine[p], sine[p])
        key = base + block_offsets[sequence[t], p // block_size] + p % block_size * width
        value = key + block_size * width
        for i in range(width):
            data[key + i] = qkv[t, columns - 2 * width + i]
            data[value + i] = qkv[t, columns - width + i]


def _fields(cache: LayerCache) -> tuple[Any, int, int, int, int]:
    return cache.data.numpy(), cache.base, cache.block_size, cache.kv_heads, cache.head_dim


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
    """out = x / rms(x) * weight (Zhang and Sennrich 2019)."""
    _rms_norm(x.numpy(), weight.numpy(), epsilon, out.numpy())


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
) -> None:
    """x += delta, then out = rms_norm(x)."""
    _add_rms_norm(x.numpy(), delta.numpy(), weight.numpy(), epsilon, out.numpy())


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """SwiGLU's product (Shazeer 2020): silu(gate) * up."""
    _silu_mul(gate_up.numpy(), out.numpy())


def store_kv(
    qkv: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    cache: LayerCache,
    context: ForwardContext,
) -> None:
    """Rotates queries and keys in place, then writes keys and values to the cache."""
    where = (context.positions, context.sequence, context.block_offsets)
    _store_kv(qkv.numpy(), cosine.numpy(), sine.numpy(), *_fields(cache), *where)


def attend(
    qkv: torch.Tensor, out: torch.Tensor, cache: LayerCache, context: ForwardContext
) -> None:
    """Causal attention over the cached keys and values, sixteen lanes at a time."""
    where = (context.positions, context.sequence, context.query_start, context.block_offsets)
    attend_rows(qkv.numpy(), out.numpy(), *_fields(cache), *where, 0, len(qkv))


def kernels() -> Kernels:
    """The CPU kernels; compiled when first imported on a machine, read from disk afterwards."""
    return Kernels("cpu", True, rms_norm, add_rms_norm, store_kv, attend, silu_mul)
