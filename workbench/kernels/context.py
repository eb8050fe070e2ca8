"""What every kernel of one forward pass shares: where rows belong and where keys and values lie.

Built once per step and passed down; nothing here is looked up in a global. Kernels never see
requests or blocks as objects, only positions and int64 element offsets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.core import StepPlan

PIECE = 32  # rows that one thread attends with at a time


@dataclass(frozen=True)
class ForwardContext:
    """The flat batch of one step: T rows of S sequences. Arrays are C-contiguous.

    Row t of the batch is position positions[t] of sequence sequence[t]; sequence s owns rows
    query_start[s] : query_start[s + 1] and sees keys 0 .. context_len[s] - 1, block b of which
    starts block_offsets[s, b] elements after its layer's base.
    """

    positions: NDArray[np.int64]  # [T]
    sequence: NDArray[np.int64]  # [T]
    query_start: NDArray[np.int32]  # [S + 1]
    context_len: NDArray[np.int32]  # [S]
    block_offsets: NDArray[np.int64]  # [S, blocks]

    @cached_property
    def pieces(self) -> NDArray[np.int64]:
        """Bounds [P + 1] of runs of at most 32 rows, each within one sequence."""
        counts = np.diff(self.query_start)
        if len(counts) == len(self.positions):  # every sequence owns one row
            return np.arange(len(counts) + 1, dtype=np.int64)
        runs = [np.arange(*pair, PIECE) for pair in pairwise(self.query_start.tolist())]
        return np.concatenate([*runs, self.query_start[-1:]]).astype(np.int64)

    @classmethod
    def of(cls, plan: StepPlan) -> ForwardContext:
        """The context of a plan; arrays are shared with it where their layout allows."""
        query_start = np.require(plan.query_start, np.int32, ("C", "W"))
        return cls(
            positions=np.require(plan.positions, np.int64, ("C", "W")),
            sequence=np.repeat(np.arange(plan.num_seqs, dtype=np.int64), np.diff(query_start)),
            query_start=query_start,
            context_len=np.require(plan.context_len, np.int32, ("C", "W")),
            block_offsets=np.require(plan.block_offsets, np.int64, ("C", "W")),
        )


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Where one layer keeps its keys and values.

    A block at offset o holds, from element base + o on, its keys [kv_heads, head_dim, block_size],
    positions side by side, then its values [kv_heads, block_size, head_dim]: what one head reads of
    a block is in one piece, as its kernels take it; `Kernels.keys_by_position` says where keys are
    kept as values are. Position p of a sequence is p % block_size of its block p // block_size.
    """

    data: torch.Tensor  # flat, all layers
    base: int  # elements
    block_size: int
    kv_heads: int
    head_dim: int
