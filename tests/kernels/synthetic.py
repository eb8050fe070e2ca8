"""Random steps for kernels: what lies around the live keys and values is NaN."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from workbench.kernels import ForwardContext, LayerCache

BASE = 16  # elements before the layer's first block
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
KINDS = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@dataclass(frozen=True)
class Step:
    """Rows [T, (heads + 2 kv_heads) head_dim] over a cache, as they are after storing."""

    qkv: torch.Tensor
    cache: LayerCache
    context: ForwardContext

    @property
    def heads(self) -> int:
        return self.qkv.shape[1] // self.cache.head_dim - 2 * self.cache.kv_heads

    def room(self) -> torch.Tensor:
        """Where attention is written: NaN before."""
        return self.qkv.new_full((len(self.qkv), self.heads * self.cache.head_dim), torch.nan)

    def to(self, dtype: torch.dtype, device: str = "cpu") -> "Step":
        cache = replace(self.cache, data=self.cache.data.to(device, dtype))
        return Step(self.qkv.to(device, dtype), cache, self.context)

    def chunk(self, first: int, last: int) -> "Step":
        """Only rows first .. last - 1 of the first sequence, which had none cached, and others'."""
        whole = self.context
        count = int(whole.query_start[1])
        rows = np.r_[first:last, count : len(whole.positions)]
        context = replace(
            whole,
            positions=whole.positions[rows],
            sequence=whole.sequence[rows],
            query_start=np.r_[0, whole.query_start[1:] - count + last - first].astype(np.int32),
            context_len=np.r_[last, whole.context_len[1:]].astype(np.int32),
        )
        return Step(self.qkv[rows], self.cache, context)


def context_of(
    sequences: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]] | np.ndarray
) -> ForwardContext:
    """(cached, new) tokens of each sequence, over tables of block offsets."""
    new = [count for _, count in sequences]
    width = max(map(len, tables))
    offsets = [[*table, *[0] * (width - len(table))] for table in tables]
    return ForwardContext(
        positions=np.concatenate([np.arange(c, c + n, dtype=np.int64) for c, n in sequences]),
        sequence=np.repeat(np.arange(len(new), dtype=np.int64), new),
        query_start=np.cumsum([0, *new]).astype(np.int32),
        context_len=np.array([c + n for c, n in sequences], np.int32),
        block_offsets=np.array(offsets, np.int64),
    )


def random_step(
    shape: tuple[int, int, int],
    sequences: Sequence[tuple[int, int]],
    block_size: int,
    by_position: bool = True,
    shared: int = 0,
    copied: bool = False,
) -> Step:
    """(cached, new) tokens of each sequence, in scattered blocks with gaps between them.

    The first `shared` tokens' blocks are one table for all sequences; copied: equal contents in
    each one's own blocks instead. The last bits of every number are those of float16.
    """
    heads, kv_heads, head_dim = shape
    draw = np.random.default_rng(len(sequences) + head_dim)
    ends = [sum(pair) for pair in sequences]
    blocks = [-(-end // block_size) for end in ends]
    elements = 2 * block_size * kv_heads * head_dim
    names = iter(np.random.default_rng(1).permutation(2 * sum(blocks)).tolist())
    offsets = np.zeros((len(ends), max(blocks)), np.int64)
    for s, count in enumerate(blocks):
        offsets[s, :count] = [next(names) * elements for _ in range(count)]
    common = shared // block_size
    data = np.full(BASE + 2 * sum(blocks) * elements, np.nan, np.float32)
    for s, end in enumerate(ends):
        _fill(data, offsets[s], end, (block_size, kv_heads, head_dim), by_position, draw)
        for b in range(min(common, blocks[s]) if s > 0 else 0):
            first, own = BASE + offsets[0, b], BASE + offsets[s, b]
            data[own : own + elements] = data[first : first + elements]
    if not copied:
        offsets[:, :common] = offsets[0, :common]
    context = context_of(sequences, offsets)
    width = (heads + 2 * kv_heads) * head_dim
    drawn = draw.standard_normal((len(context.positions), width), np.float32)
    qkv = torch.from_numpy(drawn).half().float()
    shape, aligned = (block_size, kv_heads, head_dim), not (offsets % 16).any()
    cache = LayerCache(torch.from_numpy(data), BASE, *shape, aligned)
    return Step(qkv, cache, context)


def _fill(
    data: np.ndarray,
    offsets: np.ndarray,
    end: int,
    shape: tuple[int, int, int],
    by_position: bool,
    draw: np.random.Generator,
) -> None:
    """Random keys and values of positions 0 .. end - 1; other slots of their blocks stay NaN."""
    size, kv_heads, head_dim = shape
    half = size * kv_heads * head_dim
    for p in range(end):
        block = data[BASE + offsets[p // size] :][: 2 * half]
        keys, values = block[:half], block[half:]
        drawn = draw.standard_normal((2, kv_heads, head_dim), np.float32)
        key, value = drawn.astype(np.float16).astype(np.float32)
        if by_position:
            keys.reshape(kv_heads, size, head_dim)[:, p % size] = key
        else:
            keys.reshape(kv_heads, head_dim, size)[:, :, p % size] = key
        values.reshape(kv_heads, size, head_dim)[:, p % size] = value


def check_same(one: torch.Tensor, other: torch.Tensor, interpreted: bool) -> None:
    """Equal bits where kernels are compiled, else nearly.

    Triton's interpreter multiplies with numpy, whose library rounds by the host's instruction set
    and by the number of rows: there the identity is not the kernel's to promise.
    """
    if interpreted:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(one, other)
