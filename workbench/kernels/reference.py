"""The kernels in plain torch: what is meant, and what runs where no faster one does.

One sequence at a time, its keys and values gathered into one tensor. Neither fast nor
batch-invariant: a row's sums may depend on how many rows torch was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.core import StepPlan
from workbench.kernels.quantised import Quantised

_PIECE = 32  # rows that one thread attends with at a time
_MOST_SELECTED = 8  # sets of outputs whose matrices are kept,
_FEW_OUTPUTS = 256  # each of at most so many
_MOST_SCORES = 1 << 24  # of attention, at a time
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
        if (counts == 1).all():
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


@dataclass(frozen=True, slots=True)
class Dense:
    """A matrix as torch multiplies it: weight [inputs, outputs]; gated, both parts' outputs."""

    weight: torch.Tensor
    gated: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs."""
        inputs, outputs = self.weight.shape
        return inputs, outputs // (2 if self.gated else 1)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class Kernels:
    """Plain torch for T rows of hidden states, or of fused queries, keys and values.

    What others do faster in its place has the same signatures. A *matrix* is what `pack` made:
    opaque, with `shape` (inputs, outputs) and `nbytes`.
    batch_invariant: whether each row's result is bit for bit the same in whatever batch.
    keys_by_position: whether a block's keys are [kv_heads, block_size, head_dim], as its values
    are, and not as `LayerCache` draws them.
    """

    name: str = "reference"
    batch_invariant: bool = False

    def __init__(
        self, device: torch.device, dtype: torch.dtype, keys_by_position: bool = False
    ) -> None:
        self.device, self.dtype, self.keys_by_position = device, dtype, keys_by_position
        self._selected: dict[tuple[int, bytes], tuple[Any, Any]] = {}  # matrix, and its outputs

    def pack(self, parts: Sequence[Part], gated: bool = False) -> Any:
        """The matrix whose outputs are the parts' rows one after the other.

        gated: two parts of equal shape, for `multiply_gated` only. Quantised parts stay quantised
        where the kernels can multiply them so; here they are dequantised.
        """
        return Dense(self.joined(parts).t().contiguous(), gated)

    def joined(self, parts: Sequence[Part]) -> torch.Tensor:
        """[outputs, inputs] of all parts, here and in this type."""
        tensors = [
            torch.from_numpy(part.dequantise()) if isinstance(part, Quantised) else part
            for part in parts
        ]
        return torch.cat([tensor.to(self.device, self.dtype) for tensor in tensors])

    def multiply(self, x: torch.Tensor, matrix: Any, out: torch.Tensor) -> None:
        """out [T, outputs] = x [T, inputs] @ matrix."""
        torch.mm(x, matrix.weight, out=out)

    def multiply_add(self, x: torch.Tensor, matrix: Any, out: torch.Tensor) -> None:
        """out [T, outputs] += x [T, inputs] @ matrix."""
        out.addmm_(x, matrix.weight)

    def multiply_gated(self, x: torch.Tensor, matrix: Any, out: torch.Tensor) -> None:
        """out [T, outputs] = silu(x @ first part) * (x @ second part): SwiGLU, Shazeer 2020."""
        gate, up = (x @ matrix.weight).chunk(2, dim=-1)
        torch.mul(torch.nn.functional.silu(gate), up, out=out)

    def columns(self, matrix: Any, numbers: torch.Tensor, out: torch.Tensor) -> None:
        """out [C, inputs]: the outputs' weights, numbers int64 [C]. Not of a gated matrix."""
        out.copy_(matrix.weight[:, numbers].t())

    def add_row(self, row: torch.Tensor, out: torch.Tensor) -> None:
        """Adds row [columns] to each row of out [T, columns]."""
        out += row

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
    ) -> None:
        """out [T, hidden] = x / rms(x) * weight [hidden] (Zhang and Sennrich 2019).

        Computed in float32 at least, as Llama does.
        """
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        out.copy_(weight * (wide * scale).to(x.dtype))

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
    ) -> None:
        """out [T, hidden] = (x - mean) / deviation * weight + bias (Ba et al. 2016).

        weight: [2, hidden], its bias included.
        """
        out.copy_(torch.nn.functional.layer_norm(x, x.shape[1:], weight[0], weight[1], epsilon))

    def gelu(self, row: torch.Tensor, out: torch.Tensor) -> None:
        """out [T, columns] = GELU(out + row), by its tanh (Hendrycks and Gimpel 2016)."""
        out.copy_(torch.nn.functional.gelu(out + row, approximate="tanh"))

    def store_kv(
        self, qkv: torch.Tensor, angles: Angles, cache: LayerCache, context: ForwardContext
    ) -> None:
        """Rotates queries and keys in place by their positions, writes keys and values to blocks.

        qkv: [T, (heads + 2 kv_heads) head_dim].
        """
        heads = qkv.view(len(qkv), -1, cache.head_dim)
        positions = torch.from_numpy(context.positions).to(qkv.device)
        cosine, sine = (table[positions, None] for table in angles)
        turned = heads[:, : -cache.kv_heads]
        first, second = turned.chunk(2, dim=-1)
        rotated = first * cosine - second * sine, second * cosine + first * sine
        turned.copy_(torch.cat(rotated, dim=-1))
        width = cache.kv_heads * cache.head_dim
        key, value = qkv[:, -2 * width : -width], qkv[:, -width:]
        for s, count in enumerate(context.context_len):
            rows = slice(context.query_start[s], context.query_start[s + 1])
            new = context.positions[rows]
            keys, values = self._addresses(cache, context, s, int(count))
            cache.data[keys[new]] = key[rows]
            cache.data[values[new]] = value[rows]

    def attend(
        self, qkv: torch.Tensor, out: torch.Tensor, cache: LayerCache, context: ForwardContext
    ) -> None:
        """out [T, heads head_dim]: causal attention of each row over its sequence's cached keys.

        Keys at positions up to the row's own, scaled by 1 / sqrt(head_dim). As many rows at a time
        as their scores need little memory beside the cache.
        """
        heads = qkv.view(len(qkv), -1, cache.head_dim)[:, : -2 * cache.kv_heads]
        group = heads.shape[1] // cache.kv_heads
        for s, count in enumerate(map(int, context.context_len)):
            shape = (count, cache.kv_heads, cache.head_dim)
            key, value = (
                cache.data[at].view(shape).repeat_interleave(group, dim=1)
                for at in self._addresses(cache, context, s, count)
            )
            first, end = map(int, context.query_start[s : s + 2])
            size = max(1, _MOST_SCORES // (heads.shape[1] * max(1, count)))
            for rows in (slice(row, min(row + size, end)) for row in range(first, end, size)):
                scores = torch.einsum("thd,chd->htc", heads[rows], key) / math.sqrt(cache.head_dim)
                positions = torch.from_numpy(context.positions[rows]).to(scores.device)
                hidden = torch.arange(count, device=scores.device) > positions[:, None]
                weights = scores.float().masked_fill(hidden, -math.inf).softmax(-1).to(value.dtype)
                mixed = torch.einsum("htc,chd->thd", weights, value)
                out[rows] = mixed.reshape(-1, out.shape[1])

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
        warm, largest = temperature > 0, logits.amax(dim=1)
        heat = torch.where(warm, temperature, 1.0)
        kept = logits if filters is None else leave_out(logits, heat, filters)
        sums = _weights(kept, heat).cumsum(dim=1)
        drawn = (sums <= (noise * sums[:, -1])[:, None]).sum(dim=1)
        last = (sums < sums[:, -1:]).sum(dim=1)  # of any weight, where noise * sum rounded up
        tokens = torch.where(warm, torch.minimum(drawn, last), logits.argmax(dim=1))
        return torch.stack([tokens, largest.isfinite().long()])

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
        """out [R, C] = hidden[rows] @ the outputs `numbers` of matrix; both int64, not gated.

        A few outputs that were asked for last are kept: a PRM asks for the same all the time.
        """
        key = id(matrix), numbers.cpu().numpy().tobytes()
        found = self._selected.pop(key, None)
        if found is None:
            weight = hidden.new_empty(len(numbers), hidden.shape[1])
            self.columns(matrix, numbers, weight)
            found = matrix, self.pack([weight])
        if len(numbers) <= _FEW_OUTPUTS:
            self._selected[key] = found
        if len(self._selected) > _MOST_SELECTED:
            self._selected.pop(next(iter(self._selected)), None)
        self.multiply(hidden.index_select(0, rows), found[1], out)

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

    def require_takes(self, block_size: int, head_dim: int) -> None:
        """ConfigError for blocks that these kernels cannot read."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """What does `work` again, as often as it is called, and faster where these kernels can.

        work: calls of these kernels and nothing else. Its arrays and tensors are the same each
        time, in place and shape; what lies in them need not be.
        """
        return work

    def do(self, work: Callable[[], None]) -> None:
        """`work` once: calls of these kernels and nothing else."""
        work()

    def _addresses(
        self, cache: LayerCache, context: ForwardContext, sequence: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Addresses of keys and values of first positions: [count, kv_heads * head_dim] each."""
        size, positions = cache.block_size, torch.arange(count)
        offsets = torch.from_numpy(context.block_offsets[sequence])[positions // size]
        block, slot = (cache.base + offsets)[:, None, None], (positions % size)[:, None, None]
        head = torch.arange(cache.kv_heads)[:, None]
        dimension = torch.arange(cache.head_dim)
        by_position = block + (head * size + slot) * cache.head_dim + dimension
        by_dimension = block + (head * cache.head_dim + dimension) * size + slot
        keys = by_position if self.keys_by_position else by_dimension
        values = by_position + size * cache.kv_heads * cache.head_dim
        device = cache.data.device
        return keys.flatten(1).to(device), values.flatten(1).to(device)


def _weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Softmax without its denominator, float64 [R, vocab]: the largest is 1."""
    wide = logits.double()
    return ((wide - wide.amax(dim=1, keepdim=True)) / temperature[:, None]).exp_()


def leave_out(
    logits: torch.Tensor, temperature: torch.Tensor, filters: torch.Tensor
) -> torch.Tensor:
    """The logits with -inf for what `Kernels.choose` says that the filters leave out; any device.

    temperature: above 0. Weights are added as integers, whose sums are the same in every order: a
    row's cut depends neither on the batch nor on how a device adds.
    """
    ordered, ids = _weights(logits, temperature).sort(dim=1, descending=True, stable=True)
    top_k, top_p, min_p = (column[:, None] for column in filters.T)
    rank = torch.arange(logits.shape[1], device=logits.device)
    kept = (rank < top_k) | (top_k <= 0)
    fine = 2.0 ** (62 - logits.shape[1].bit_length())  # no sum overflows
    units = (ordered * kept * fine).long()
    before = units.cumsum(dim=1) - units
    kept &= (before < top_p * units.sum(dim=1, keepdim=True)) | (top_p >= 1)
    kept &= ordered >= min_p
    kept |= ordered.isnan()  # of a row that is not finite, as all must see
    return logits.masked_fill(~torch.zeros_like(kept).scatter_(1, ids, kept), -math.inf)
