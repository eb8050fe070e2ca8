"""Steps to time attention on: decodes, prefills and siblings of a search, over several layers.

A step's layers have keys and values of their own, as a model's have, so that what one layer read is
not what the next finds in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workbench.kernels import ForwardContext, Kernels, LayerCache


@dataclass(frozen=True, slots=True)
class Shape:
    """Attention heads, and how a cache keeps them."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def block_elements(self) -> int:
        return 2 * self.block_size * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class TimedStep:
    """Random rows and caches [layers] of one step."""

    shape: Shape
    qkv: torch.Tensor
    out: torch.Tensor
    caches: tuple[LayerCache, ...]
    context: ForwardContext

    @property
    def flops(self) -> int:
        """Of one layer's attention: two products, each a multiplication and an addition."""
        seen = int((self.context.positions + 1).sum())
        return 4 * self.shape.heads * self.shape.head_dim * seen

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one layer, each sequence's once."""
        position = 2 * self.shape.kv_heads * self.shape.head_dim * self.qkv.element_size()
        return int(self.context.context_len.sum()) * position

    def attend(self, kernels: Kernels) -> None:
        """Every layer's attention."""
        for cache in self.caches:
            kernels.attend(self.qkv, self.out, cache, self.context)


def timed_step(
    shape: Shape,
    sequences: Sequence[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
    layers: int = 1,
    shared: int = 0,
) -> TimedStep:
    """(cached, new) tokens of each sequence, in shuffled blocks; the first `shared` tokens of all
    sequences lie in the same blocks."""
    draw = np.random.default_rng(0)
    new, ends = [n for _, n in sequences], [sum(pair) for pair in sequences]
    blocks = [-(-end // shape.block_size) for end in ends]
    names = draw.permutation(sum(blocks)) * shape.block_elements
    tables = np.zeros((len(ends), max(blocks)), np.int64)
    for s, (last, count) in enumerate(zip(np.cumsum(blocks), blocks)):
        tables[s, :count] = names[last - count : last]
    tables[:, : shared // shape.block_size] = tables[0, : shared // shape.block_size]
    context = ForwardContext(
        positions=np.concatenate([np.arange(c, c + n, dtype=np.int64) for c, n in sequences]),
        sequence=np.repeat(np.arange(len(new), dtype=np.int64), new),
        query_start=np.cumsum([0, *new]).astype(np.int32),
        context_len=np.array(ends, np.int32),
        block_offsets=tables,
    )
    slab = sum(blocks) * shape.block_elements
    data = torch.randn(layers * slab, device=device, dtype=dtype)
    caches = tuple(
        LayerCache(data, i * slab, shape.block_size, shape.kv_heads, shape.head_dim)
        for i in range(layers)
    )
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = torch.randn(sum(new), width, device=device, dtype=dtype)
    out = torch.empty(sum(new), shape.heads * shape.head_dim, device=device, dtype=dtype)
    return TimedStep(shape, qkv, out, caches, context)
