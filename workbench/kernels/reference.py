"""The kernels in plain torch: what is meant, and what runs where no faster one does.

One sequence at a time, its keys and values gathered into one tensor. Neither fast nor
batch-invariant: a row's sums may depend on how many rows torch was given.
"""

from __future__ import annotations

import math

import torch

from workbench.kernels import Kernels
from workbench.kernels.context import ForwardContext, LayerCache


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
    """Zhang and Sennrich 2019, computed in float32 as Llama does."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    out.copy_(weight * (wide * scale).to(x.dtype))


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
) -> None:
    """x += delta, then out = rms_norm(x)."""
    x.add_(delta)
    rms_norm(x, weight, epsilon, out)


def _rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
    """Rotates pairs (i, i + half) of heads [T, heads, 2 half] in place; tables [T, 1, half]."""
    half = heads.shape[-1] // 2
    first, second = heads[..., :half].clone(), heads[..., half:].clone()
    heads[..., :half] = first * cosine - second * sine
    heads[..., half:] = second * cosine + first * sine


def _addresses(
    cache: LayerCache, context: ForwardContext, sequence: int, count: int
) -> torch.Tensor:
    """Addresses of the keys of a sequence's first positions: [count, kv_heads * head_dim]."""
    positions = torch.arange(count)
    width = cache.kv_heads * cache.head_dim
    offsets = torch.from_numpy(context.block_offsets[sequence])[positions // cache.block_size]
    start = cache.base + offsets + positions % cache.block_size * width
    return (start[:, None] + torch.arange(width)).to(cache.data.device)


def store_kv(
    qkv: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    cache: LayerCache,
    context: ForwardContext,
) -> None:
    """Rotates queries and keys in place, then writes keys and values to the cache."""
    heads = qkv.view(len(qkv), -1, cache.head_dim)
    positions = torch.from_numpy(context.positions).to(cosine.device)
    _rotate(heads[:, : -cache.kv_heads], cosine[positions, None], sine[positions, None])
    width = cache.kv_heads * cache.head_dim
    key, value = qkv[:, -2 * width : -width], qkv[:, -width:]
    for s, count in enumerate(context.context_len):
        rows = slice(context.query_start[s], context.query_start[s + 1])
        at = _addresses(cache, context, s, int(count))[context.positions[rows]]
        cache.data[at] = key[rows]
        cache.data[at + cache.block_size * width] = value[rows]


def attend(
    qkv: torch.Tensor, out: torch.Tensor, cache: LayerCache, context: ForwardContext
) -> None:
    """Causal attention, sequence by sequence, over keys and values gathered from their blocks."""
    heads = qkv.view(len(qkv), -1, cache.head_dim)[:, : -2 * cache.kv_heads]
    group = heads.shape[1] // cache.kv_heads
    for s, count in enumerate(context.context_len):
        rows = slice(context.query_start[s], context.query_start[s + 1])
        at = _addresses(cache, context, s, int(count))
        shape = (int(count), cache.kv_heads, cache.head_dim)
        key = cache.data[at].view(shape).repeat_interleave(group, dim=1)
        value = (
            cache.data[at + cache.block_size * at.shape[1]]
            .view(shape)
            .repeat_interleave(group, dim=1)
        )
        scores = torch.einsum("thd,chd->htc", heads[rows], key) / math.sqrt(cache.head_dim)
        positions = torch.from_numpy(context.positions[rows]).to(scores.device)
        hidden = torch.arange(int(count), device=scores.device) > positions[:, None]
        weights = scores.float().masked_fill(hidden, -math.inf).softmax(-1).to(value.dtype)
        out[rows] = torch.einsum("htc,chd->thd", weights, value).reshape(-1, out.shape[1])


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """SwiGLU's product (Shazeer 2020): silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(torch.nn.functional.silu(gate), up, out=out)


def kernels() -> Kernels:
    """The reference as a set of kernels."""
    return Kernels("reference", False, rms_norm, add_rms_norm, store_kv, attend, silu_mul)
