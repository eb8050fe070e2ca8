"""What is worth a kernel: products with packed weights, attention over blocks, norms.

`load_kernels` chooses one implementation for a device, once; all have the signatures of `Kernels`.
`reference` is plain torch and says what is meant; `cpu` is numba; `triton` is for GPUs. Kernels
never see requests or blocks as objects, only a `ForwardContext`, built once a step and passed down:
positions and int64 element offsets.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.core import StepPlan
from workbench.errors import ConfigError
from workbench.kernels.quantised import Quantised

__all__ = [
    "ForwardContext",
    "Kernels",
    "LayerCache",
    "Quantised",
    "load_kernels",
]

_PIECE = 32  # rows that one thread attends with at a time
Part = torch.Tensor | Quantised  # some rows of a weight matrix, [outputs, inputs] as files have it
Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [positions, head_dim / 2] each


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
        runs = [np.arange(*pair, _PIECE) for pair in pairwise(self.query_start.tolist())]
        return np.concatenate([*runs, self.query_start[-1:]]).astype(np.int64)

    def of_rows(self, rows: NDArray[np.int64]) -> ForwardContext:
        """The same sequences, some owning fewer rows or none: rows [R] of these, ascending."""
        return replace(
            self,
            positions=self.positions[rows],
            sequence=self.sequence[rows],
            query_start=np.searchsorted(rows, self.query_start).astype(np.int32),
        )

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
    aligned: every block's offset is a multiple of 16, so that wide loads may begin there.
    """

    data: torch.Tensor  # flat, all layers
    base: int  # elements
    block_size: int
    kv_heads: int
    head_dim: int
    aligned: bool = False


class Kernels(ABC):
    """One device's kernels, for T rows of hidden states, or of fused queries, keys and values.

    A *matrix* is what `pack` made: opaque, with `shape` (inputs, outputs) and `nbytes`.
    batch_invariant: whether each row's result is bit for bit the same in whatever batch.
    keys_by_position: whether a block's keys are [kv_heads, block_size, head_dim], as its values
    are, and not as `LayerCache` draws them.
    selects: whether outputs stay where they are made, and only what `choose` and `selected_logits`
    return is copied from there.
    """

    name: str
    batch_invariant: bool
    keys_by_position: bool = False
    selects: bool = False

    @abstractmethod
    def pack(self, parts: Sequence[Part], gated: bool = False) -> Any:
        """The matrix whose outputs are the parts' rows one after the other.

        gated: two parts of equal shape, for `multiply_gated` only. Quantised parts stay quantised
        where the kernels can multiply them so.
        """

    @abstractmethod
    def multiply(self, x: torch.Tensor, matrix: Any, out: torch.Tensor) -> None:
        """out [T, outputs] = x [T, inputs] @ matrix."""

    @abstractmethod
    def multiply_add(self, x: torch.Tensor, matrix: Any, out: torch.Tensor) -> None:
        """out [T, outputs] += x [T, inputs] @ matrix."""

    @abstractmethod
    def multiply_gated(self, x: torch.Tensor, matrix: Any, out: torch.Tensor) -> None:
        """out [T, outputs] = silu(x @ first part) * (x @ second part): SwiGLU, Shazeer 2020."""

    @abstractmethod
    def columns(self, matrix: Any, numbers: torch.Tensor, out: torch.Tensor) -> None:
        """out [C, inputs]: the outputs' weights, numbers int64 [C]. Not of a gated matrix."""

    @abstractmethod
    def add_row(self, row: torch.Tensor, out: torch.Tensor) -> None:
        """Adds row [columns] to each row of out [T, columns]."""

    @abstractmethod
    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
    ) -> None:
        """out [T, hidden] = x / rms(x) * weight [hidden] (Zhang and Sennrich 2019)."""

    @abstractmethod
    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
    ) -> None:
        """out [T, hidden] = (x - mean) / deviation * weight + bias (Ba et al. 2016).

        weight: [2, hidden], its bias included.
        """

    @abstractmethod
    def gelu(self, row: torch.Tensor, out: torch.Tensor) -> None:
        """out [T, columns] = GELU(out + row), by its tanh (Hendrycks and Gimpel 2016)."""

    @abstractmethod
    def store_kv(
        self, qkv: torch.Tensor, angles: Angles, cache: LayerCache, context: ForwardContext
    ) -> None:
        """Rotates queries and keys in place by their positions, writes keys and values to blocks.

        qkv: [T, (heads + 2 kv_heads) head_dim].
        """

    @abstractmethod
    def attend(
        self, qkv: torch.Tensor, out: torch.Tensor, cache: LayerCache, context: ForwardContext
    ) -> None:
        """out [T, heads head_dim]: causal attention of each row over its sequence's cached keys.

        Keys at positions up to the row's own, scaled by 1 / sqrt(head_dim).
        """

    @abstractmethod
    def choose(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        noise: torch.Tensor,
        filters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """int64 [2, R]: tokens, and whether a row's largest logit is finite and none is a NaN.

        A token is the inverse CDF of the row's noise over ascending token ids; the distribution is
        the softmax of logits / temperature, in float64; temperature 0 takes the largest logit, the
        lowest id on ties. logits: [R, vocab] of any float; temperature, noise in [0, 1): float64
        [R]; filters: float64 [R, 3] of top_k (0: none), top_p (1: none) and min_p, each on what the
        one before left. top_k keeps k tokens, of equal ones the lowest ids; top_p the fewest, most
        likely first, that reach it; min_p those of at least min_p times the likeliest one's weight.
        """

    def likely(self, logits: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What log probabilities need of finite rows, each by itself.

        int64 [R, most]: the ids of so many largest logits, the largest first, equal ones by their
        ids; float64 [R]: the log of the summed exponentials, within 1e-5: logits less it are
        log probabilities.
        """
        totals = torch.stack([row.double().logsumexp(0) for row in logits])
        if not most:
            return torch.empty(len(logits), 0, dtype=torch.int64), totals
        least, found = logits.topk(most).values[:, -1], []
        for row, bound in zip(logits, least, strict=True):
            ids = (row >= bound).nonzero()[:, 0]
            found.append(ids[row[ids].sort(descending=True, stable=True).indices[:most]])
        return torch.stack(found), totals

    def selected_logits(
        self,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        matrix: Any,
        numbers: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """out [R, C] = hidden[rows] @ the outputs `numbers` of matrix; both int64, not gated."""
        weight = hidden.new_empty(len(numbers), hidden.shape[1])
        self.columns(matrix, numbers, weight)
        self.multiply(hidden.index_select(0, rows), self.pack([weight]), out)

    def rows_launched(self, rows: int, most: int) -> int:
        """How many rows, of at most `most`, a decoding step of so many is launched for.

        Those added are at position -1: they store nothing and see nothing; a step's launches then
        serve all sizes up to theirs.
        """
        return rows

    def contexts_recorded(self, longest: int) -> Sequence[int]:
        """The context lengths, longest first, for each of which a decoding step is recorded before
        the first one is run; none where recording takes no memory and no time.
        """
        return ()

    def require_takes(self, block_size: int, head_dim: int) -> None:  # noqa: B027 - torch: any
        """ConfigError for blocks that these kernels cannot read."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """What does `work` again, as often as it is called, and faster where these kernels can.

        work: calls of these kernels and nothing else. Its arrays and tensors are the same each
        time, in place and shape; what lies in them need not be.
        """
        return work


def load_kernels(
    device: torch.device,
    dtype: torch.dtype,
    threads: int | None = None,
    *,
    batch_invariant: bool = True,
    head_dim: int | None = None,
    block_size: int | None = None,
) -> Kernels:
    """The kernels for `dtype` on `device`: numba for float32 on a CPU, Triton for a GPU.

    ConfigError, with the cause, where these do not serve the type, the GPU, a head size or a block
    size: in plain torch a row's bits depend on its batch. With batch_invariant=False plain torch
    computes there, and a warning says why on a GPU; elsewhere it takes the fastest where kernels
    differ, as they do on a GPU. threads: of the CPU kernels; as many as torch has if not given.
    """
    if device.type == "cpu" and dtype == torch.float32:
        from workbench.kernels.cpu import CpuKernels  # noqa: PLC0415 - compiles: only where it runs

        return CpuKernels(threads or torch.get_num_threads())
    cause = f"Plain torch alone computes {dtype} on a CPU; kernels there take float32."
    if device.type == "cuda":
        try:
            from workbench.kernels import triton  # noqa: PLC0415 - an extra

            triton.require_served(device, dtype, head_dim, block_size)
            return triton.TritonKernels(device, dtype, batch_invariant=batch_invariant)
        except ConfigError as problem:
            cause = str(problem)
    if batch_invariant:
        raise ConfigError(
            f"{cause} In plain torch a row's bits depend on its batch: with batch_invariant=False "
            "it computes instead."
        )
    if device.type == "cuda":
        warnings.warn(f"{cause} Plain torch computes instead.", RuntimeWarning, stacklevel=2)
    from workbench.kernels.reference import ReferenceKernels  # noqa: PLC0415

    return ReferenceKernels(device, dtype)
